"""Find the range of a batch size: pad to the next captured graph size, then take the largest lower bound up to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from ..errors import ForetokenError
from .config import AdaptiveConfig


class InvalidGraphSizes(ForetokenError):
    """A captured batch size is not a positive integer."""


class RangeRouter:
    """Routes batch sizes to the ranges of one table. `sizes` are the captured batch sizes; None or none without graphs."""

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
