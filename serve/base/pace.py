"""Whether a simulation keeps up with real time, and how fast this machine could run it.

```
     due          begins      ends
      │── behind ──│── busy ───│── waits until the next is due …
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

WINDOW_S = 1.0
NUM_WINDOWS = 10
MIN_BUSY_SHARE = 0.02
"""Of a window that says something about the machine's speed."""
HEADROOM = 0.5
"""Share of the speed at which a machine would have no time left at which clients still see the simulated times: nearer
to that speed, turns wait for turns (`benchmarks/timing/serve_times.py` measures it)."""
LATE_S = 0.25
WARN_EVERY_S = 30.0


class ClockPace:
    """Compares real with simulated time, turn by turn; seconds are real ones unless said otherwise.

    `behind_s`: how late the newest turn began. `warn` gets a sentence when that is more than LATE_S, at most one in
    WARN_EVERY_S.
    """

    def __init__(self, speed: float, warn: Callable[[str], None]) -> None:
        self.speed = speed
        self.behind_s: float = 0.0
        self._warn = warn
        self._warned_s = -WARN_EVERY_S
        self._began_s: float | None = None  # the window
        self._busy_s = 0.0
        self._begin_behind_s = 0.0
        self._windows: deque[tuple[float, float]] = deque(maxlen=NUM_WINDOWS)  # (busy, simulated seconds)

    def turn(self, begin_s: float, end_s: float, behind_s: float) -> None:
        """Note a turn, which began `behind_s` after it was due."""
        self.behind_s = behind_s
        if self._began_s is None:
            self._began_s, self._begin_behind_s = begin_s, behind_s
        self._busy_s += end_s - begin_s
        took_s = end_s - self._began_s
        if took_s >= WINDOW_S:
            if self._busy_s >= MIN_BUSY_SHARE * took_s:
                covered_s = took_s - (behind_s - self._begin_behind_s)
                self._windows.append((self._busy_s, covered_s * self.speed))
            self._began_s, self._busy_s = None, 0.0
        if behind_s > LATE_S and end_s >= self._warned_s + WARN_EVERY_S:
            self._warned_s = end_s
            self._warn(self.sentence)

    @property
    def possible_speed(self) -> float | None:
        """The greatest speed that can be expected to hold at the load of the last seconds; None if nothing was served
        meanwhile."""
        busy_s = sum(busy for busy, _ in self._windows)
        return HEADROOM * sum(covered for _, covered in self._windows) / busy_s if busy_s else None

    @property
    def is_kept(self) -> bool:
        return self.behind_s <= LATE_S

    @property
    def sentence(self) -> str:
        """How late it is, and what would help."""
        possible = self.possible_speed
        hint = "" if possible is None else f"; at this load --speed {possible:.2g} would hold"
        late = f"the simulation is {self.behind_s:.1f} s behind real time (--speed {self.speed:g}){hint}"
        return f"{late}: clients see longer times than the metrics, which are simulated"
