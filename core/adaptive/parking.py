"""When a draft that is loaded and not used rests: the engine runs no pass of it, so that plain decoding costs no more.

A round of 0 steps with a draft still runs the draft over the new tokens, because a later round drafts from their KV.
While the draft is *parked* no step does that. Its KV lacks the tokens of these steps, so a return has a price: the
requests that run are retracted, and their contexts are computed anew, by the target and the draft.

```
             0 steps for `patience` rounds           lost as much as a return costs, or a probe
 DRAFTING ──────────────────────────────► PARKED ───────────────────────────────────────────────► RETURNING
     ▲                                                                                                │
     └────────────────── no request runs whose draft KV is incomplete ────────────────────────────────┘
```

The policy that chooses steps (goodput.py) decides with what it has learned; the engine carries a return out
(`Preemption.return_draft`).
"""

from __future__ import annotations

import math
from enum import Enum

PATIENCE_ROUNDS = 64
"""Rounds of 0 steps, one after the other, before a draft is parked; they double with each return, up to 4,096."""
_LONGEST_PATIENCE_ROUNDS = 4096


class ParkingState(Enum):
    DRAFTING = "drafting"  # the draft's KV of every running request is complete
    PARKED = "parked"  # no pass of the draft runs
    RETURNING = "returning"  # as parked, until the running requests are retracted


class ParkingEvent(Enum):
    PARK = "park"
    RETURN = "return"  # the policy wants drafts
    RETURNED = "returned"  # the engine has retracted the requests


S, E = ParkingState, ParkingEvent
PARKING_TRANSITIONS: dict[ParkingState, dict[ParkingEvent, ParkingState]] = {
    S.DRAFTING: {E.PARK: S.PARKED},
    S.PARKED: {E.RETURN: S.RETURNING},
    S.RETURNING: {E.RETURNED: S.DRAFTING},
}


class Parking:
    """Counts the rounds of 0 steps before a draft is parked, and what it costs that it is. `prefill_token_ps`: of each
    token of a running request's context when the draft returns; 0: the draft is never parked."""

    def __init__(self, prefill_token_ps: int = 0) -> None:
        assert prefill_token_ps >= 0
        self.prefill_token_ps = prefill_token_ps
        self.state: ParkingState = ParkingState.DRAFTING
        self.num_returns: int = 0
        self._patience = PATIENCE_ROUNDS
        self._since: int | None = None  # the first of the rounds of 0 steps, one after the other
        self._seen = 0  # the last round that was counted as lost or not
        self._lost_ns = 0.0

    @property
    def is_parked(self) -> bool:
        """Whether no pass of the draft runs."""
        return self.state is not ParkingState.DRAFTING

    @property
    def is_returning(self) -> bool:
        return self.state is ParkingState.RETURNING

    def price_ns(self, kv_tokens: int) -> int:
        """Return what a return costs while the running requests have so many tokens."""
        return self.prefill_token_ps * kv_tokens // 1000

    def rest(self, now: int) -> bool:
        """Note that round `now` is to have 0 steps. Returns whether the draft is parked from this round on."""
        if self.is_parked:
            self._seen = now
            return False
        if self._since is None:
            self._since = now
        if not self.prefill_token_ps or now - self._since < self._patience:
            return False
        self._advance(ParkingEvent.PARK)
        self._seen, self._lost_ns = now, 0.0
        return True

    def want(self, now: int, lost_ns: float, kv_tokens: int) -> None:
        """Note that round `now` is to draft, which gains `lost_ns` over a round of a parked draft."""
        self._since = None
        if self.state is not ParkingState.PARKED:
            return
        self._lost_ns += lost_ns * max(now - self._seen, 1)
        self._seen = now
        if self._lost_ns >= self.price_ns(kv_tokens):
            self.ask_back()

    def ask_back(self) -> None:
        """Let a parked draft return, whatever it costs."""
        if self.state is ParkingState.PARKED:
            self._advance(ParkingEvent.RETURN)

    def returned(self) -> None:
        """Note that the engine has retracted every request whose draft KV is incomplete."""
        self._advance(ParkingEvent.RETURNED)
        self.num_returns += 1
        self._patience = min(2 * self._patience, _LONGEST_PATIENCE_ROUNDS)

    def rounds_to_probe(self, kv_tokens: int, round_ns: int, share: float) -> int:
        """Return after how many rounds a probe, and the return before it, costs `share` of the time."""
        return math.ceil(self.price_ns(kv_tokens) / (round_ns * share))

    def _advance(self, event: ParkingEvent) -> None:
        self.state = PARKING_TRANSITIONS[self.state][event]

    def snapshot(self) -> dict[str, object]:
        return {"state": self.state.value, "since": self._since, "patience": self._patience, "lost_ns": self._lost_ns}


NEVER_PARKED = Parking()
"""Of policies that do not park: nothing changes its state."""


def always_parked() -> Parking:
    """Return the state of a draft that is parked from the start, to time rounds without it."""
    parking = Parking(prefill_token_ps=1)
    parking.state = ParkingState.PARKED
    return parking
