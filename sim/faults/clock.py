"""The host's clock, which may jump or stop, and the time stamps that a scheduler takes from it.

`raw` is what the clock shows, `stamp` what the scheduler works with: the same, but where the clock went back the stamps
go on from where they were. Both are functions of simulated time, so that the end of an earlier round can be stamped
later.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from ...core.contract.events import Aborted, Event, EventSink, HandoffMoved


class HostClock:
    def __init__(self) -> None:
        self.is_true: bool = True  # nothing ever happened to it
        self._shift_from, self._shifts = [0], [0]  # raw = time + the last shift that began before
        self._hold_from, self._holds = [0], [0]  # stamp = raw + the last hold that began before
        self._freezes: list[tuple[int, int]] = []

    def raw(self, time_ns: int) -> int:
        """Return what the clock shows at `time_ns`."""
        for start_ns, end_ns in reversed(self._freezes):
            if start_ns <= time_ns < end_ns:
                time_ns = start_ns
                break
        return time_ns + self._shifts[bisect_right(self._shift_from, time_ns) - 1]

    def stamp(self, time_ns: int) -> int:
        """Return the scheduler's time at `time_ns`; never less than at an earlier time."""
        if self.is_true:
            return time_ns
        return self.raw(time_ns) + self._holds[bisect_right(self._hold_from, time_ns) - 1]

    def jump(self, now_ns: int, amount_ns: int) -> None:
        """Move the clock forward or back by `amount_ns` from now on. A stopped clock runs again."""
        before_ns = self.stamp(now_ns)
        self.is_true = False
        if self._freezes and self._freezes[-1][1] > now_ns:
            self._freezes[-1] = (self._freezes[-1][0], now_ns)
        self._shift_from.append(now_ns)
        self._shifts.append(self._shifts[-1] + amount_ns)
        self._hold(now_ns, before_ns)

    def freeze(self, now_ns: int, lasts_ns: int) -> None:
        """Stop the clock for a while; then it shows the time that it would have shown without the stop."""
        self.is_true = False
        if not self._freezes or self._freezes[-1][1] <= now_ns:
            self._freezes.append((now_ns, now_ns + lasts_ns))

    def _hold(self, now_ns: int, before_ns: int) -> None:
        """Keep stamps from going back behind `before_ns`: from now on add what is missing."""
        missing_ns = before_ns - self.stamp(now_ns)
        if missing_ns > 0:
            self._hold_from.append(now_ns)
            self._holds.append(self._holds[-1] + missing_ns)


class StampedMoves:
    """An event sink that changes the times of handoff events to the host's clock, because endpoints use a monotonic
    clock."""

    def __init__(self, sink: EventSink, clock: HostClock) -> None:
        self._sink = sink
        self._clock = clock

    def __call__(self, event: Event) -> None:
        if isinstance(event, HandoffMoved | Aborted) and not self._clock.is_true:
            event = replace(event, now_ns=self._clock.stamp(event.now_ns))
        self._sink(event)
