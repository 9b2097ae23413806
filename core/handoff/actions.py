"""The actions that a side asks its driver to carry out, in order, and its reports of transfers that have ended."""

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
    """Read these pages of KV, in both pools, send a `Page` for each, and call `PrefillSide.pages_sent` once their bytes are read out.

    Until then the slots do not change.
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
    epoch: int  # of the row, which identifies the request that will own the KV
    slots: np.ndarray  # int32 [page_size]


PrefillAction = Send | SendPages
DecodeAction = Send | WritePage


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The end of a transfer on one side, which holds nothing for it any more. Its request may have ended before."""

    request_id: str
    state: TransferState  # COMPLETED, FAILED or CANCELLED
    message: str = ""
