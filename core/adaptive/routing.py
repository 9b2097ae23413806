"""From a batch size to its range: pad to the next captured graph size, then the largest lower bound below it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from ..errors import ForetokenError
from .config import AdaptiveConfig


class InvalidGraphSizes(ForetokenError):
    """Captured batch sizes that are no positive integers."""


class RangeRouter:
    """Routes batch sizes over the ranges of one table. `sizes` are the captured batch sizes, None without graphs."""

    __slots__ = ("_bounds", "_config", "_sizes")

    def __init__(self, config: AdaptiveConfig, sizes: Iterable[int] | None = None) -> None:
        self._config = config
        self._bounds = config.bounds
        self._sizes: tuple[int, ...] = ()
        if sizes is not None:
            given = list(sizes)
            for size in given:
                if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                    raise InvalidGraphSizes(f"captured batch size {size!r}; expected an integer >= 1")
            self._sizes = tuple(sorted(set(given)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured sizes, ascending; empty without graphs."""
        return self._sizes

    @property
    def bounds(self) -> Sequence[int]:
        return self._bounds

    def padded(self, batch_size: int) -> int:
        """The captured size a batch runs at, or the batch size itself if no graph is large enough."""
        index = bisect_left(self._sizes, batch_size)
        return self._sizes[index] if index < len(self._sizes) else batch_size

    def range_index(self, batch_size: int) -> int:
        """The index of the range that decides for this batch size."""
        return max(0, bisect_right(self._bounds, self.padded(batch_size)) - 1)

    def graph_sizes_of_step(self, step: int) -> tuple[int, ...] | None:
        """The captured sizes whose own range has `step` among its candidates; None without graphs."""
        if not self._sizes:
            return None
        slots = self._config.slots
        return tuple(size for size in self._sizes if step in slots[self.range_index(size)].candidate_steps)
