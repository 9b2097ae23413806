"""The CUDA graphs of decode rounds: their keys, their table, and the graphs that adaptive steps can reach."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ..contract.step import RoundShape
from ..errors import ForedraftError
from .config import AdaptiveConfig
from .policy import RangeRouter

Graph = TypeVar("Graph")


class MissingGraph(ForedraftError):
    """A round fits into a captured batch size, but nothing was built under its key; the message lists what was."""


PACKED_PER_KEY = 4
"""The most graphs of packed rounds for each shape and batch size."""


class GraphKey(NamedTuple):
    """The key of the graph of a decode round. `batch_size` is the captured size to which the round is padded."""

    shape: RoundShape  # as it is computed
    batch_size: int
    num_tokens: int | None = None  # of a packed pass of the target; None: all rows verify all nodes
    has_budget: bool = False  # the device chooses the nodes of rows

    def packed(self, num_tokens: int) -> GraphKey:
        """Return the key of the graph of rounds with so many nodes in all, of rows of unequal lengths: a quarter of
        this round's nodes, half of them, three quarters, or all, whatever each row has."""
        return next(key for key in reversed(self.all_packed) if (key.num_tokens or 0) >= num_tokens)

    @property
    def all_packed(self) -> tuple[GraphKey, ...]:
        """The keys of all graphs of packed rounds, the largest first."""
        nodes = self.batch_size * self.shape.nodes
        sizes = sorted(
            {-(-nodes * quarters // PACKED_PER_KEY) for quarters in range(1, PACKED_PER_KEY + 1)}, reverse=True
        )
        return tuple(self._replace(num_tokens=size) for size in sizes)


class GraphTable(Generic[Graph]):
    """The graphs of decode rounds by key.

    All of them, or none, are built before the first round; later the table is only read.
    """

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, Graph] = {}
        self._sizes: tuple[int, ...] = ()

    def build(self, keys: Sequence[GraphKey], capture: Callable[[GraphKey], Graph]) -> None:
        """Replace the table by one graph per key, captured in this order.

        If `capture` raises, the table stays as it was.
        """
        self._graphs = {key: capture(key) for key in keys}
        self._sizes = tuple(sorted({key.batch_size for key in keys}))

    def find(self, shape: RoundShape, batch_size: int) -> Graph | None:
        """Return the graph of a round, or None if no captured size is large enough. Raises `MissingGraph`."""
        index = bisect_left(self._sizes, batch_size)
        if index == len(self._sizes):
            return None
        key = GraphKey(shape.computed, self._sizes[index])
        if key not in self._graphs:
            raise MissingGraph(f"no graph of {key}; there are graphs of {sorted(self._graphs)}: call init_states first")
        return self._graphs[key]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The (steps, captured batch size) pairs that routing can reach, ascending, and the memory saved by leaving out the
    others.
    """

    pairs: tuple[tuple[int, int], ...]
    num_graphs: int
    num_graphs_unpruned: int
    num_bytes: int
    num_bytes_unpruned: int


def graph_plan(
    config: AdaptiveConfig, captured_sizes: Sequence[int], bytes_per_graph: int | Callable[[int, int], int] = 0
) -> GraphPlan:
    """Return the plan for these captured sizes. `bytes_per_graph` is a number or a function of (steps, batch size).

    Raises `InvalidGraphSizes`.
    """
    router = RangeRouter(config, captured_sizes)
    every = [(steps, size) for steps in config.candidate_steps for size in router.sizes]
    pairs = tuple((steps, size) for steps, size in every if steps in router.candidates(size))

    def cost(pair: tuple[int, int]) -> int:
        return bytes_per_graph(*pair) if callable(bytes_per_graph) else bytes_per_graph

    return GraphPlan(pairs, len(pairs), len(every), sum(map(cost, pairs)), sum(map(cost, every)))
