"""The states of a transfer on either side, as tables.

```
prefill   OFFERED ──accept──► SENDING ──sent──► SENT ──ack──► COMPLETED
             ▲ └──────retry──────┴──────────────┘ │
             └────────────────────────────────────┘        anywhere: give up ──► CANCELLING ──► FENCED
                                                           ──► FAILED, CANCELLED
decode    QUEUED ──reserve──► RECEIVING ──verified──► COMPLETED
```

CANCELLING waits for the other side's answer, FENCED for time to pass; until then pages stay as they are. An event that
is not listed for a state is late, duplicate or meaningless: it changes nothing and is counted as ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import InvariantViolation


class TransferState(Enum):
    OFFERED = "offered"  # prefill: no answer yet
    SENDING = "sending"  # prefill: pages are sent as they are computed
    SENT = "sent"  # prefill: all is sent, the answer is awaited
    QUEUED = "queued"  # decode: there is no room yet; holds nothing
    RECEIVING = "receiving"  # decode: slots are reserved, pages arrive
    CANCELLING = "cancelling"
    FENCED = "fenced"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferEvent(Enum):
    ACCEPT = "accept"
    SENT = "sent"
    RETRY = "retry"
    RESERVE = "reserve"
    COMPLETE = "complete"
    GIVE_UP = "give_up"  # a cancel is sent, its answer awaited
    FENCE = "fence"  # no answer is awaited; time must pass, or copies must end
    FAIL = "fail"
    CANCEL = "cancel"


S, E = TransferState, TransferEvent
_ENDS = {E.FENCE: S.FENCED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLED}
_OPEN = {E.GIVE_UP: S.CANCELLING, **_ENDS}
PREFILL_TRANSITIONS: dict[TransferState, dict[TransferEvent, TransferState]] = {
    S.OFFERED: {E.ACCEPT: S.SENDING, E.RETRY: S.OFFERED, E.COMPLETE: S.COMPLETED, **_OPEN},
    S.SENDING: {E.SENT: S.SENT, E.RETRY: S.OFFERED, **_OPEN},
    S.SENT: {E.RETRY: S.OFFERED, E.COMPLETE: S.COMPLETED, **_OPEN},
    S.CANCELLING: _ENDS,
    S.FENCED: {E.COMPLETE: S.COMPLETED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLED},
    S.COMPLETED: {},
    S.FAILED: {},
    S.CANCELLED: {},
}
DECODE_TRANSITIONS: dict[TransferState, dict[TransferEvent, TransferState]] = {
    S.QUEUED: {E.RESERVE: S.RECEIVING, E.RETRY: S.QUEUED, E.FAIL: S.FAILED, E.CANCEL: S.CANCELLED},
    S.RECEIVING: {E.RETRY: S.RECEIVING, E.COMPLETE: S.COMPLETED, **_OPEN},
    S.CANCELLING: _ENDS,
    S.FENCED: {E.FAIL: S.FAILED, E.CANCEL: S.CANCELLED},
    S.COMPLETED: {},
    S.FAILED: {},
    S.CANCELLED: {},
}
ENDED = (S.COMPLETED, S.FAILED, S.CANCELLED)
ENDING_EVENTS = {S.COMPLETED: E.COMPLETE, S.FAILED: E.FAIL, S.CANCELLED: E.CANCEL}


@dataclass(slots=True)
class TransferCounts:
    """How the transfers of one side ended. `ignored` and `retries` count messages and attempts, not transfers."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    retries: int = 0
    ignored: int = 0  # late, duplicate or meaningless messages

    def end(self, state: TransferState) -> None:
        name = state.value
        setattr(self, name, getattr(self, name) + 1)

    def check(self, in_flight: int) -> None:
        """Raise InvariantViolation HANDOFF-05 unless every transfer that started is counted once."""
        if self.started != self.completed + self.failed + self.cancelled + in_flight:
            raise InvariantViolation("HANDOFF-05", f"{self} with {in_flight} in flight")
