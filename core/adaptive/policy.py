"""The interface of a policy of draft steps, the simplest policy, and the choice of a table's range for a batch size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from ..errors import ForedraftError
from .config import AdaptiveConfig, fixed_config
from .parking import NEVER_PARKED, Parking

NEVER = 1 << 30
"""The number of rounds to the next decision if the choice cannot change."""


class StepPolicy(Protocol):
    """Chooses the draft steps of a round from the batch size and from what verify has accepted so far.

    A policy is a pure function of the history of its calls: no clock, no randomness. Results may come late, and from
    rounds with other steps than it would choose now (overlap mode).
    """

    name: str
    config: AdaptiveConfig
    parking: Parking

    @property
    def switches(self) -> int:
        """How often the choice for some batch size has changed."""
        ...

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        """Return the steps for a round of `batch_size` rows that read `kv_tokens` KV tokens in all."""
        ...

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        """Take one verify result: `counts[n]` of its `rows` > 0 rows had n correct drafts, `total` in all."""
        ...

    def rounds_to_next_decision(self, batch_size: int) -> int:
        """Return after how many results of this batch size, at the earliest, its steps may change. At least 1."""
        ...

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        """Route by these captured batch sizes, or None without graphs."""
        ...

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        ...


class FixedPolicy:
    """A policy with fixed steps; 0 is plain decoding."""

    name = "fixed"
    switches = 0
    parking: Parking = NEVER_PARKED

    def __init__(self, steps: int) -> None:
        self.config: AdaptiveConfig = fixed_config(steps)
        self._steps = steps

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        return self._steps

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        pass

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return NEVER

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        pass

    def snapshot(self) -> dict[str, object]:
        return {"policy": self.name, "steps": self._steps}


class InvalidGraphSizes(ForedraftError):
    """A captured batch size is not a positive integer."""


class RangeRouter:
    """Routes batch sizes to the ranges of one table.

    `sizes` are the captured batch sizes; None or none without graphs.
    """

    def __init__(self, config: AdaptiveConfig, sizes: Iterable[int] | None = None) -> None:
        self._config = config
        self.sizes: tuple[int, ...] = ()  # ascending
        if sizes is not None:
            given = list(sizes)
            for size in given:
                if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                    raise InvalidGraphSizes(f"captured batch size {size!r}; expected an integer >= 1")
            self.sizes = tuple(sorted(set(given)))

    def padded(self, batch_size: int) -> int:
        """Return the captured size a batch runs at, or the batch size itself if no graph is large enough."""
        index = bisect_left(self.sizes, batch_size)
        return self.sizes[index] if index < len(self.sizes) else batch_size

    def range_index(self, batch_size: int) -> int:
        """Return the index of the range that decides for this batch size."""
        return max(0, bisect_right(self._config.bounds, self.padded(batch_size)) - 1)

    def candidates(self, batch_size: int) -> tuple[int, ...]:
        """Return the steps that a batch of this size may draft."""
        return self._config.slots[self.range_index(batch_size)].candidate_steps


# -- how often a choice may change ------------------------------------------------------------------------------------

SWITCHES_PER_WINDOW = 10
WINDOW_ROUNDS = 10_000
_QUIET_DWELLS = 8
_LONGEST_DWELL = 2048


class GateState(Enum):
    OPEN = "open"  # a switch is allowed
    DWELLING = "dwelling"  # the last switch is too recent
    CROWDED = "crowded"  # the dwell is over, but the window has no room for a switch more


class GateEvent(Enum):
    SWITCH = "switch"
    DWELT = "dwelt"  # the dwell is over
    FILLED = "filled"  # the dwell is over, and the window is full
    CLEARED = "cleared"  # the oldest switch has left the window
    FORGET = "forget"  # acceptance has changed: the window is empty, the dwell is not doubled any more


GATE_TRANSITIONS: dict[GateState, dict[GateEvent, GateState]] = {
    GateState.OPEN: {GateEvent.SWITCH: GateState.DWELLING, GateEvent.FORGET: GateState.OPEN},
    GateState.DWELLING: {
        GateEvent.SWITCH: GateState.DWELLING,  # the return from a probe, or an early look
        GateEvent.DWELT: GateState.OPEN,
        GateEvent.FILLED: GateState.CROWDED,
        GateEvent.FORGET: GateState.DWELLING,
    },
    GateState.CROWDED: {GateEvent.CLEARED: GateState.OPEN, GateEvent.FORGET: GateState.OPEN},
}


class SwitchGate:
    """Says when a switch is allowed, from the rounds at which the earlier ones happened.

    Two rules. First, after a switch the next one waits for the dwell. It doubles after each reversal of direction and
    falls back to `min_dwell` after eight dwells without a switch. It is at most 2,048 rounds. A probe and its return
    are two reversals, so without this bound the probes would put an end to all probing. Second, no window of 10,000
    rounds holds more than 10 switches, whatever the input.

    Rounds are the caller's counter and must not go back. A gate with `min_dwell` 0 allows everything.
    `GATE_TRANSITIONS` has both rules as states. Some of its events are rounds that pass, so `state` computes where the
    gate is.
    """

    def __init__(self, min_dwell: int) -> None:
        assert min_dwell >= 0, min_dwell
        self._min_dwell = min_dwell
        self._doublings = 0
        self._direction = 0
        self._last: int | None = None
        self._recent: deque[int] = deque(maxlen=SWITCHES_PER_WINDOW)

    def state(self, now: int) -> GateState:
        """Return the state at round `now`."""
        if self.earliest(now) <= now:
            return GateState.OPEN
        assert self._last is not None, "a gate without a switch is open"
        return GateState.DWELLING if self._last + self._doubled() > now else GateState.CROWDED

    def dwell(self, now: int) -> int:
        """Return the dwell in force at round `now`."""
        current = self._doubled()
        if self._last is not None and now - self._last >= _QUIET_DWELLS * current:
            return self._min_dwell
        return current

    def earliest(self, now: int, switches: int = 1, certain: bool = False) -> int:
        """Return the first round >= now at which `switches` switches may begin. They may follow each other at once.

        A probe asks for two switches, because its return must never be blocked. A `certain` switch waits for the dwell
        without its doublings.
        """
        assert 1 <= switches <= SWITCHES_PER_WINDOW
        if self._min_dwell == 0 or self._last is None:
            return now
        earliest = max(now, self._last + (self._min_dwell if certain else self._doubled()))
        crowding = len(self._recent) + switches - SWITCHES_PER_WINDOW
        if crowding > 0:
            earliest = max(earliest, self._recent[crowding - 1] + WINDOW_ROUNDS)
        return earliest

    def is_crowded(self, now: int, switches: int = 1) -> bool:
        """Return whether the window has no room for so many switches at round `now`."""
        crowding = len(self._recent) + switches - SWITCHES_PER_WINDOW
        return crowding > 0 and self._recent[crowding - 1] + WINDOW_ROUNDS > now

    def record(self, now: int, old_steps: int, new_steps: int) -> None:
        """Note a switch at round `now`."""
        assert old_steps != new_steps
        if self._min_dwell == 0:
            return
        if self._last is not None and now - self._last >= _QUIET_DWELLS * self._doubled():
            self._doublings = 0
        direction = 1 if new_steps > old_steps else -1
        if self._direction == -direction:
            # Once the dwell is at its bound, counting on would change nothing.
            self._doublings += self._doubled() < _LONGEST_DWELL
        self._direction = direction
        self._last = now
        self._recent.append(now)

    def _doubled(self) -> int:
        """Return the dwell with its doublings. A dwell that begins beyond the bound stays as it is."""
        return max(self._min_dwell, min(self._min_dwell << self._doublings, _LONGEST_DWELL))

    def forget_switches(self) -> None:
        """Forget earlier switches: acceptance has changed."""
        self._doublings = 0
        self._direction = 0
        self._recent.clear()

    def snapshot(self) -> dict[str, object]:
        return {"doublings": self._doublings, "direction": self._direction, "recent": list(self._recent)}
