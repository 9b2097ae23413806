"""The shape of a draft for a step count and a batch size: chains, trees, look-up."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ForetokenError
from .config import AdaptiveConfig
from .graph_plan import GraphKey
from .routing import RangeRouter


class InfeasibleDraftShape(ForetokenError):
    """A tree that its smallest candidate cannot fill, or a shape that contradicts itself, with the numbers."""


class DraftTreeShape:
    """`topk` branches and, per batch-size range, the nodes of the verify tree.

    Chains (`topk` 1) have steps + 1 nodes. For trees `num_draft_tokens` is one number or a mapping from range bounds; a
    tree of S steps has at most k + (S − 1)·k² nodes below its root. Look-up drafting (`depth_limited` False) has
    no such limit: its accepted runs are as long as the tree is large. Zero steps always mean one node.
    Raises `InfeasibleDraftShape`.
    """

    __slots__ = ("_chain", "_config", "_nodes", "_router", "depth_limited", "topk")

    def __init__(
        self,
        config: AdaptiveConfig,
        topk: int = 1,
        num_draft_tokens: int | Mapping[int, int] | None = None,
        depth_limited: bool = True,
    ) -> None:
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise InfeasibleDraftShape(f"topk {topk!r}; expected an integer >= 1")
        self.topk = topk
        self.depth_limited = depth_limited
        self._config = config
        self._router = RangeRouter(config)
        self._chain = num_draft_tokens is None and (topk == 1 or not depth_limited)
        self._nodes: tuple[int, ...] = ()
        if not self._chain:
            self._nodes = self._checked_nodes(num_draft_tokens)

    def _checked_nodes(self, given: int | Mapping[int, int] | None) -> tuple[int, ...]:
        bounds = self._config.bounds
        if given is None:
            raise InfeasibleDraftShape(f"topk {self.topk} needs num_draft_tokens: the nodes of the verify tree")
        if isinstance(given, Mapping) and sorted(given) != list(bounds):
            raise InfeasibleDraftShape(
                f"num_draft_tokens is given for the ranges {sorted(given)}; expected exactly {list(bounds)}"
            )
        nodes = tuple(given[bound] for bound in bounds) if isinstance(given, Mapping) else (given,) * len(bounds)
        for bound, nd, slot in zip(bounds, nodes, self._config.slots, strict=True):
            if isinstance(nd, bool) or not isinstance(nd, int) or nd < 1:
                raise InfeasibleDraftShape(f"range {bound}: num_draft_tokens {nd!r}; expected an integer >= 1")
            drafting = [steps for steps in slot.candidate_steps if steps > 0]
            if not drafting or not self.depth_limited:
                continue
            if self.topk == 1:
                if drafting != [nd - 1]:
                    raise InfeasibleDraftShape(
                        f"range {bound}: a chain of {drafting} steps has steps + 1 draft tokens, not {nd};"
                        " leave num_draft_tokens out"
                    )
                continue
            most = self.topk + (drafting[0] - 1) * self.topk**2
            if nd - 1 > most:
                raise InfeasibleDraftShape(
                    f"range {bound}: num_draft_tokens {nd} needs {nd - 1} candidates, but topk {self.topk} with"
                    f" {drafting[0]} steps has only k + (S - 1)·k² = {most}; expected at most {most + 1}"
                )
        return nodes

    def set_router(self, router: RangeRouter) -> None:
        """Route as the policy does, once the captured sizes are known."""
        self._router = router

    def num_draft_tokens(self, steps: int, batch_size: int) -> int:
        """Return the nodes of the verify tree, root included."""
        if steps == 0:
            return 1
        if self._chain:
            return steps + 1
        return self._nodes[self._router.range_index(batch_size)]

    def fewest_steps(self, batch_size: int) -> int:
        """Return the smallest candidate of the batch size's range."""
        return self._router.candidates(batch_size)[0]

    @property
    def max_num_draft_tokens(self) -> int:
        """The greatest number of nodes over all candidates of all ranges."""
        widest = max(self._nodes, default=1)
        return max(widest, self._config.candidate_steps[-1] + 1) if self._chain else widest

    def tree_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return every (steps, num_draft_tokens) that a round may have, ascending."""
        found = set()
        for index, slot in enumerate(self._config.slots):
            for steps in slot.candidate_steps:
                found.add((steps, 1 if steps == 0 else steps + 1 if self._chain else self._nodes[index]))
        return tuple(sorted(found))

    def graph_keys(self) -> tuple[GraphKey, ...]:
        """Return the keys of all graphs that routing can reach; none without captured sizes.

        Of equal steps the largest batch comes first: the graphs of smaller ones fit into the memory that it took.
        """
        keys = [
            GraphKey(steps, self.num_draft_tokens(steps, size), size)
            for size in reversed(self._router.sizes)
            for steps in self._router.candidates(size)
        ]
        return tuple(sorted(keys, key=lambda key: key[:2]))
