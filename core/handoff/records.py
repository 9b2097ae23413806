"""The records that the two sides keep of their transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..contract.request import Request
from .life import TransferState
from .messages import Manifest, Offer, PageSeal, TransferKey


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer on the prefill side, over all its attempts."""

    request: Request
    peer: str
    row: int
    key: TransferKey  # of the current attempt
    first_attempt: int
    state: TransferState = TransferState.OFFERED
    attempts: int = 1
    peer_epoch: int | None = None  # of the decode worker that accepted
    first_page: int = 0
    next_page: int = 0  # pages before it are sent, or being sent, in this attempt
    seals: dict[int, PageSeal] = field(default_factory=dict)
    num_reading: int = 0  # pages that the driver is reading out, in this attempt and in earlier ones
    awaits_readers: bool = False  # only these keep the fence up
    renewal_ns: int | None = None  # how often to tell the decode side that the prompt is still being computed
    end: TransferState = TransferState.FAILED  # the end that giving up leads to
    message: str = ""


@dataclass(slots=True, eq=False)
class Incoming:
    """A transfer on the decode side, over all its attempts."""

    offer: Offer  # of the newest attempt
    peer: str
    state: TransferState = TransferState.QUEUED
    row: int = 0
    epoch: int = 0  # of the row
    first_page: int = 0
    num_pages: int = 0  # of the whole prompt
    slots: np.ndarray | None = None  # int32 [num_pages · page_size], once they are reserved
    received: dict[int, PageSeal] = field(default_factory=dict)  # verified pages of the newest attempt
    manifest: Manifest | None = None
    is_refused: bool = False  # the newest attempt was answered with a Nack; the rest of it is ignored
    end: TransferState = TransferState.FAILED
    message: str = ""

    @property
    def key(self) -> TransferKey:
        return self.offer.key

    @property
    def request_id(self) -> str:
        return self.offer.request.request_id


@dataclass(frozen=True, slots=True)
class Trace:
    """What the decode side remembers of an ended transfer. `joined`: its request may be running here."""

    key: TransferKey
    joined: bool
