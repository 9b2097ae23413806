"""The shape of a draft for a step count and a batch size: chains, trees, look-up."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ForedraftError
from .config import AdaptiveConfig, SlotConfig, TreeNodes, nodes_for
from .graphs import GraphKey
from .policy import RangeRouter


class InfeasibleDraftShape(ForedraftError):
    """A tree that its steps cannot fill, or a shape that contradicts itself; the message has the numbers."""


class DraftTreeShape:
    """`topk` branches and, for every candidate of every batch-size range, the nodes of its verify tree.

    Chains (`topk` 1) have steps + 1 nodes. The nodes of a tree come from the table's range, or else from
    `num_draft_tokens`: one number, or a mapping from steps. A tree of S steps has at most k + (S − 1)·k² nodes below
    its root. Look-up drafting (`depth_limited` False) has no such limit: its accepted runs are as long as the tree is
    large. Zero steps always mean one node. Raises `InfeasibleDraftShape`.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        topk: int = 1,
        num_draft_tokens: TreeNodes | Mapping[int, int] | None = None,
        depth_limited: bool = True,
    ) -> None:
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise InfeasibleDraftShape(f"topk {topk!r}; expected an integer >= 1")
        self.topk = topk
        self.depth_limited = depth_limited
        self._config = config
        self._router = RangeRouter(config)
        given = tuple(num_draft_tokens.items()) if isinstance(num_draft_tokens, Mapping) else num_draft_tokens
        self._nodes: tuple[dict[int, int], ...] = tuple(
            {steps: self._nodes_of(bound, slot, steps, given) for steps in slot.candidate_steps}
            for bound, slot in zip(config.bounds, config.slots, strict=True)
        )
        self._follows_steps = all(nodes == steps + 1 for tree in self._nodes for steps, nodes in tree.items())

    def _nodes_of(self, bound: int, slot: SlotConfig, steps: int, given: TreeNodes | None) -> int:
        if steps == 0:
            return 1
        asked = nodes_for(steps, slot.num_draft_tokens, given)
        if asked is None:
            if self.topk > 1 and self.depth_limited:
                raise InfeasibleDraftShape(
                    f"range {bound}: topk {self.topk} needs num_draft_tokens for {steps} steps: the nodes of the verify tree"
                )
            return steps + 1
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise InfeasibleDraftShape(f"range {bound}: num_draft_tokens {asked!r}; expected an integer >= 1")
        if not self.depth_limited:
            return asked
        if self.topk == 1 and asked != steps + 1:
            raise InfeasibleDraftShape(
                f"range {bound}: a chain of {steps} steps has {steps + 1} draft tokens, not {asked};"
                " leave num_draft_tokens out"
            )
        most = self.topk + (steps - 1) * self.topk**2
        if asked - 1 > most:
            raise InfeasibleDraftShape(
                f"range {bound}: num_draft_tokens {asked} needs {asked - 1} candidates, but topk {self.topk} with"
                f" {steps} steps has only k + (S - 1)·k² = {most}; expected at most {most + 1}"
            )
        return asked

    def set_router(self, router: RangeRouter) -> None:
        """Route as the policy does, once the captured sizes are known."""
        self._router = router

    def num_draft_tokens(self, steps: int, batch_size: int) -> int:
        """Return the nodes of the verify tree, root included."""
        if steps == 0:
            return 1
        if self._follows_steps:
            return steps + 1
        nodes = self._nodes[self._router.range_index(batch_size)]
        # A result may come late: from steps that the range no longer has, or from a batch that was launched in another
        # range.
        return nodes[steps] if steps in nodes else max(tree.get(steps, steps + 1) for tree in self._nodes)

    def fewest_steps(self, batch_size: int) -> int:
        """Return the smallest candidate of the batch size's range."""
        return self._router.candidates(batch_size)[0]

    @property
    def max_num_draft_tokens(self) -> int:
        """The greatest number of nodes over all candidates of all ranges."""
        return max(nodes for tree in self._nodes for nodes in tree.values())

    def tree_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return every (steps, num_draft_tokens) that a round may have, ascending."""
        return tuple(sorted({size for tree in self._nodes for size in tree.items()}))

    def graph_keys(self) -> tuple[GraphKey, ...]:
        """Return the keys of all graphs that routing can reach; none without captured sizes.

        Among equal steps the largest batch comes first, because the graphs of smaller batches fit into its memory.
        """
        keys = [
            GraphKey(steps, self.num_draft_tokens(steps, size), size)
            for size in reversed(self._router.sizes)
            for steps in self._router.candidates(size)
        ]
        return tuple(sorted(keys, key=lambda key: key[:2]))
