"""A time budget of a whole training: each part gets its share of the time that is left when it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

# Seconds that each part of the size tiny would take without a budget, so that within one all parts shrink alike. Measured with
# `foretoken tiny --time-budget-s 75` on a 2-core x86-64 machine while that bounded the trainings alone; these are scaled to all steps.
WHOLE_S = {
    "data": 8.0, "target": 475.0, "own texts": 41.0, "draft": 61.0, "eagle3": 97.0, "multi_layer_eagle": 80.0,
    "held-out loss": 4.0, "held-out texts": 11.0, "measurement": 15.0,
}  # fmt: skip


class TimeBudget:
    """Shares `seconds` from `started_s` on (`time.monotonic`) among `parts`, in their order; None: there is no limit.

    What a part saves or overdraws is shared by all parts behind it.
    """

    def __init__(self, seconds: float | None, started_s: float, parts: Sequence[str]) -> None:
        self._ends_s = math.inf if seconds is None else started_s + seconds
        self._left = list(parts)
        self._begun_s: dict[str, float] = {}
        self.seconds: dict[str, float] = {}  # that each ended part took
        self.cuts: list[str] = []  # what was left out to keep within the budget, in words

    @property
    def is_limited(self) -> bool:
        return self._ends_s < math.inf

    def begin(self, part: str) -> float:
        """End the part before and return the seconds that `part` may take; math.inf without a budget."""
        self.end()
        now_s = time.monotonic()
        share = WHOLE_S[part] / sum(WHOLE_S[one] for one in self._left)
        self._left.remove(part)
        self._begun_s = {part: now_s}
        return max(self._ends_s - now_s, 0.0) * share

    def end(self) -> None:
        """Note how long the part took that began last."""
        for part, begun_s in self._begun_s.items():
            self.seconds[part] = time.monotonic() - begun_s
        self._begun_s = {}

    def cut(self, what: str, done: int, whole: int, unit: str) -> None:
        """Note that only a piece of `what` was made, if so."""
        if done < whole:
            self.cuts.append(f"{what}: {done:,} of {whole:,} {unit}")


def while_they_fit(items: Iterable[T], seconds: float) -> Iterator[T]:
    """Yield the first item, and further ones as long as another one ends within `seconds` at the pace so far."""
    begun_s = time.monotonic()
    for number, item in enumerate(items):
        if number and (time.monotonic() - begun_s) * (number + 1) / number > seconds:
            return
        yield item
