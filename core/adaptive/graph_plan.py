"""Which CUDA graphs adaptive steps need: every (steps, batch size) pair that routing can reach, and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .config import AdaptiveConfig
from .routing import RangeRouter


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The graphs to capture, with what pruning saves.

    `pairs` are (steps, captured batch size), ascending; the unpruned counterpart is every candidate at every size.
    `metadata_num_draft_tokens` is the greatest width over all candidates. Metadata buffers of every graph have it, as a
    width per step count would change split points, so numerics, so acceptance, so the choice of steps.
    """

    pairs: tuple[tuple[int, int], ...]
    num_graphs: int
    num_graphs_unpruned: int
    num_bytes: int
    num_bytes_unpruned: int
    metadata_num_draft_tokens: int

    def sizes_of_step(self, steps: int) -> tuple[int, ...]:
        """The batch sizes to capture for one step count."""
        return tuple(size for step, size in self.pairs if step == steps)

    def explain(self) -> str:
        """One line for a log."""
        mib = 1 << 20
        return (
            f"CUDA graphs: {self.num_graphs} of {self.num_graphs_unpruned} (steps, batch size) pairs are reachable,"
            f" {self.num_bytes / mib:.1f} of {self.num_bytes_unpruned / mib:.1f} MiB"
        )


def graph_plan(
    config: AdaptiveConfig,
    captured_sizes: Sequence[int],
    bytes_per_graph: int | Callable[[int, int], int] = 0,
    max_num_draft_tokens: int | None = None,
) -> GraphPlan:
    """The plan for these captured sizes. `bytes_per_graph` is a number or a function of (steps, batch size).

    `max_num_draft_tokens` is the greatest tree width; the default is that of chains. Raises `InvalidGraphSizes`.
    """
    router = RangeRouter(config, captured_sizes)
    union = config.candidate_steps
    every = [(step, size) for step in union for size in router.sizes]
    pairs = tuple(
        (step, size) for step, size in every if step in config.slots[router.range_index(size)].candidate_steps
    )

    def cost(pair: tuple[int, int]) -> int:
        return bytes_per_graph(*pair) if callable(bytes_per_graph) else bytes_per_graph

    return GraphPlan(
        pairs=pairs,
        num_graphs=len(pairs),
        num_graphs_unpruned=len(every),
        num_bytes=sum(map(cost, pairs)),
        num_bytes_unpruned=sum(map(cost, every)),
        metadata_num_draft_tokens=max(union[-1] + 1, max_num_draft_tokens or 1),
    )
