"""What changes while an engine admits requests by its rules: a share that falls, a pause, a wait for more requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum

from ...kv.store import KVStore
from ..life import RequestRecord

NumOutputs = Callable[[RequestRecord], int]
"""The number of tokens that a request has emitted."""

ESTIMATED_ROUNDS = 20
"""The rounds for which an estimate after a retraction adds a token for each request (SGLang 0.5.23,
SGLANG_RETRACT_DECODE_STEPS)."""


class GuaranteedShare:
    """The share of the running requests' remaining output that a newcomer must leave free now.

    It begins at `share` and falls with each decode round in a straight line, to `floor` of itself after `rounds`. An
    idle engine sets it back. After a retraction it is what the remaining requests have emitted of what they may.
    """

    def __init__(self, share: float, floor: float = 1.0, rounds: int = 1) -> None:
        self._first = share
        self._least = share * floor
        self._fall = (self._first - self._least) / rounds
        self.reset()

    @property
    def falls(self) -> bool:
        """Whether the share is an estimate, and not the same at all times."""
        return self._fall > 0

    def reset(self) -> None:
        """Begin again: the engine is idle."""
        self._start, self._rounds = self._first, 0

    def count(self, rounds: int) -> None:
        """Count committed decode rounds."""
        self._rounds += rounds

    def now(self, rounds_in_flight: int) -> float:
        """Return the share, with `rounds_in_flight` rounds launched and not counted yet."""
        rounds = self._rounds + rounds_in_flight
        return self._start if rounds <= 0 or not self.falls else max(self._start - rounds * self._fall, self._least)

    def estimate(self, kept: Iterable[RequestRecord], num_outputs: NumOutputs, rounds_in_flight: int) -> None:
        """Estimate the share anew after a retraction that leaves the requests `kept`, if it is one that falls.

        The share begins to fall after the round for which the retraction has made room.
        """
        if not self.falls:
            return
        records = list(kept)
        emitted = sum(map(num_outputs, records)) + ESTIMATED_ROUNDS * len(records)
        self._start = min(1.0, emitted / (sum(record.max_tokens for record in records) + 1))
        self._rounds = -rounds_in_flight - 1


class Refusals:
    """Which request did not fit, and how often room was made before. Until that number grows, it does not fit."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._head: RequestRecord | None = None
        self._revision: int | None = None  # None: no request is refused

    def refuse(self, head: RequestRecord | None) -> None:
        """Note that `head` does not fit; None: no request does, until a running one has left."""
        self._head = head
        self._revision = self._made_room()

    def end(self) -> None:
        """Take note that a request has entered."""
        self._revision = None

    def hold_for(self, head: RequestRecord) -> bool:
        """Return whether a request was refused, and no event since then may have made room for it."""
        is_meant = self._head is None or self._head is head
        return is_meant and self._revision is not None and self._revision == self._made_room()

    def _made_room(self) -> int:
        """Return how often room was made, where a running request left or, for a single head, in the cache, too."""
        store = self._store
        return store.revision if self._head is None else store.revision + store.cache_revision


class PauseEnd(Enum):
    """The event after a retraction with which requests may enter again."""

    COMMIT = "commit"  # of the next decode round with a live row
    LAUNCH = "launch"  # of the next decode round
    PLAN = "plan"  # the next one


class AdmissionPause:
    """Whether admission pauses after a retraction, until the event that the rules name.

    It does not pause if no round can come. Without the pause two requests could retract each other in turns and neither
    would advance. A request that was given way to by smaller priorities is spared: none of them can retract it.
    """

    def __init__(self, until: PauseEnd) -> None:
        self._until = until
        self._has_begun = False
        self._greatest: float = -math.inf  # priority for which admission pauses

    def goes_on(self, may_have_rounds: bool) -> bool:
        """Return whether admission pauses. `may_have_rounds`: rows decode, or a step in flight has rounds."""
        return self._has_begun and (self._until is PauseEnd.PLAN or may_have_rounds)

    def spares(self, head: RequestRecord | None) -> bool:
        """Return whether all that was retracted has given way to requests of this one's priority."""
        return self._has_begun and head is not None and head.request.priority > self._greatest

    def begin(self, greatest: float) -> None:
        """Pause for requests up to this priority: a request was retracted."""
        self._has_begun = True
        self._greatest = max(self._greatest, greatest)

    def end(self) -> None:
        self._has_begun = False
        self._greatest = -math.inf

    def pass_event(self, event: PauseEnd) -> None:
        """Take note of a plan that begins, or of decode rounds that were launched or committed."""
        if self._has_begun and event is self._until:
            self.end()


class BatchWait:
    """How long newcomers have waited for more of them, beside requests that decode.

    They wait for `most_plans` plans at most, and only while a step with all of them would have fewer than
    `enough_tokens` tokens, verified ones included.
    """

    def __init__(self, most_plans: int = 0, enough_tokens: float = 0.0) -> None:
        self.is_used: bool = most_plans > 0
        self.enough_tokens: float = enough_tokens
        self._most_plans = most_plans
        self._num_plans = 0

    def goes_on(self, is_small: bool) -> bool:
        """Count a plan for which newcomers wait. Returns whether they do: the step is small, and they may wait on."""
        waits = is_small and self._num_plans < self._most_plans
        self._num_plans = self._num_plans + 1 if waits else 0
        return waits

    def end(self) -> None:
        """Begin to count anew: no newcomer has to wait."""
        self._num_plans = 0
