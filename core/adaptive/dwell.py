"""How often a choice of steps may change: a dwell that doubles at each reversal, up to a bound, under a hard window."""

from __future__ import annotations

from collections import deque

SWITCHES_PER_WINDOW = 10
WINDOW_ROUNDS = 10_000
_QUIET_DWELLS = 8
_LONGEST_DWELL = 2048


class SwitchGate:
    """Says when a switch is allowed, from the rounds at which the earlier ones happened.

    Two rules. First, after a switch the next one waits for the dwell. It doubles after each reversal of direction and falls back to
    `min_dwell` after eight dwells without a switch. It is at most 2,048 rounds: a probe and its way back are two reversals, so without a
    bound probes would end all probing. Second, no window of 10,000 rounds holds more than 10 switches, whatever the input.

    Rounds are the caller's counter and must not go back. A gate with `min_dwell` 0 allows everything.
    """

    def __init__(self, min_dwell: int) -> None:
        assert min_dwell >= 0, min_dwell
        self._min_dwell = min_dwell
        self._doublings = 0
        self._direction = 0
        self._last: int | None = None
        self._recent: deque[int] = deque(maxlen=SWITCHES_PER_WINDOW)

    def dwell(self, now: int) -> int:
        """Return the dwell in force at round `now`."""
        current = self._doubled()
        if self._last is not None and now - self._last >= _QUIET_DWELLS * current:
            return self._min_dwell
        return current

    def earliest(self, now: int, switches: int = 1, certain: bool = False) -> int:
        """Return the first round >= now at which `switches` switches may begin; they may then follow each other at once.

        A probe asks for two: its way back must never be blocked. A `certain` switch waits the dwell without its doublings.
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
        """Return the dwell with its doublings; one that begins beyond the bound stays as it is."""
        return max(self._min_dwell, min(self._min_dwell << self._doublings, _LONGEST_DWELL))

    def forget_switches(self) -> None:
        """Forget earlier switches: acceptance has changed."""
        self._doublings = 0
        self._direction = 0
        self._recent.clear()

    def snapshot(self) -> dict[str, object]:
        return {"doublings": self._doublings, "direction": self._direction, "recent": list(self._recent)}
