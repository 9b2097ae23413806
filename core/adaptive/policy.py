"""What a policy of draft steps is, the simplest one, and which range of a table decides for a batch size."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import ForetokenError
from .config import AdaptiveConfig, fixed_config
from .slot import NEVER


class StepPolicy(Protocol):
    """Chooses the draft steps of a round from the batch size and from what verify has accepted so far.

    A policy is a pure function of the history of its calls: no clock, no randomness. Results may come late, and from
    rounds with other steps than it would choose now (overlap mode).
    """

    name: str
    config: AdaptiveConfig
    switches: int  # how often the choice for some batch size has changed

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
    """Always the same steps; 0 is plain decoding."""

    name = "fixed"
    switches = 0

    def __init__(self, steps: int) -> None:
        self.config = fixed_config(steps)
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
