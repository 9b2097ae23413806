"""What the estimate of acceptance and the cost table predict for the candidates of a batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.step import RoundShape
from .acceptance_estimate import AcceptLengths
from .cost_table import CostTable
from .policy import SwitchGate

MIN_GAIN = 0.005  # relative gain below which steps are not changed


@dataclass(slots=True)
class ChoiceCell:
    """The choice for the batch sizes that run at one size: a captured graph size, or a size of the grid without graphs.

    `decided` is the fold whose estimates the choice was last made with, and `rows` the batch size at that time: rows
    that pad a batch to `batch_size` have no KV.
    """

    batch_size: int
    candidates: tuple[int, ...]
    shapes: dict[int, RoundShape]
    steps: int
    gate: SwitchGate
    decided: int = -1
    rows: int = 0
    switches: int = 0


class ExpectedRates:
    """Expected tokens per row and ns of the candidates of a cell. `kv_per_row` are the KV tokens of a row, as last
    seen."""

    def __init__(self, estimate: AcceptLengths, cost_table: CostTable) -> None:
        self.estimate = estimate
        self.cost_table = cost_table
        self.kv_per_row: float = 0.0

    def times_of(self, cell: ChoiceCell) -> list[int]:
        """Return the ns of a round of a cell for each of its candidates."""
        return self.times(cell.candidates, cell.batch_size, cell.rows)

    def times(self, candidates: Sequence[int], size: int, rows: int) -> list[int]:
        """Return the ns of a round of `rows` rows, padded to `size`, for each of the candidates."""
        kv_tokens = int(self.kv_per_row * rows)
        return [self.cost_table.round_time_ns(steps, size, kv_tokens) for steps in candidates]

    def of(self, cell: ChoiceCell, times: Sequence[int], p: Sequence[float] | None = None) -> dict[int, float]:
        """Return expected tokens per row and ns of every candidate, ascending.

        `p` replaces the learned acceptance of the positions.
        """
        expected = self.estimate.expected
        return {s: expected(cell.shapes[s], p) / time for s, time in zip(cell.candidates, times, strict=True)}

    def doubt(self, cell: ChoiceCell, one: int, other: int, measured: int) -> float:
        """Return the standard deviation of the relative gain of `one` candidate over the `other`, when drafts of
        `measured` steps are measured."""
        return self.estimate.doubt(cell.shapes[one], cell.shapes[other], measured)
