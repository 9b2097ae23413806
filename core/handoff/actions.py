"""What the two state machines ask of their driver, in order, and what they report of transfers that are over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .life import TransferState
from .messages import Message, Page, TransferKey


@dataclass(frozen=True, slots=True)
class Send:
    """Give `message` to the link to `peer`."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True, eq=False)
class SendPages:
    """Read these pages of KV, in both pools, send a `Page` for each, and call `PrefillSide.page_sent` once its bytes are read out.

    The slots stay as they are until then.
    """

    peer: str
    key: TransferKey
    epoch: int
    indices: tuple[int, ...]
    slots: np.ndarray  # int32 [len(indices), page_size]


@dataclass(frozen=True, slots=True, eq=False)
class WritePage:
    """Write a verified page to these slots of both pools, before the next step is launched."""

    page: Page
    row: int
    epoch: int  # of the row: who will own the KV
    slots: np.ndarray  # int32 [page_size]


PrefillAction = Send | SendPages
DecodeAction = Send | WritePage


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """A transfer's end on one side: nothing is held for it any more. Its request may have ended before."""

    request_id: str
    state: TransferState  # COMPLETED, FAILED or CANCELLED
    message: str = ""
