"""The shape of a round for a step count and a batch size: chains, trees, look-up."""

from __future__ import annotations

from collections.abc import Mapping

from ..contract.step import RoundShape
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
        self._rounds: tuple[dict[int, RoundShape], ...] = tuple(
            {
                steps: RoundShape(steps, topk, self._nodes_of(bound, slot, steps, given))
                for steps in slot.candidate_steps
            }
            for bound, slot in zip(config.bounds, config.slots, strict=True)
        )
        self._follows_steps = all(shape.nodes == shape.steps + 1 for shape in self.round_shapes())

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

    def round_shape(self, steps: int, batch_size: int) -> RoundShape:
        """Return the shape of a round. It has the draft's `topk` for 0 steps, too: see `RoundShape.computed`."""
        rounds = self._rounds[0 if self._follows_steps else self._router.range_index(batch_size)]
        return rounds[steps] if steps in rounds else self._shape_elsewhere(steps)

    def _shape_elsewhere(self, steps: int) -> RoundShape:
        """Return the shape of a round whose steps its range does not have. A result may come late: from steps that the
        range no longer has, or from a batch that was launched in another range."""
        fewest = RoundShape(steps, self.topk, steps + 1)
        return max(rounds.get(steps, fewest) for rounds in self._rounds)

    def fewest_steps(self, batch_size: int) -> int:
        """Return the smallest candidate of the batch size's range."""
        return self._router.candidates(batch_size)[0]

    @property
    def max_num_draft_tokens(self) -> int:
        """The greatest number of nodes over all candidates of all ranges."""
        return max(shape.nodes for shape in self.round_shapes())

    def round_shapes(self) -> tuple[RoundShape, ...]:
        """Return every shape that a round may have, ascending."""
        return tuple(sorted({shape for rounds in self._rounds for shape in rounds.values()}))

    def graph_keys(self) -> tuple[GraphKey, ...]:
        """Return the keys of all graphs that routing can reach; none without captured sizes.

        Among equal steps the largest batch comes first, because the graphs of smaller batches fit into its memory.
        """
        keys = [
            GraphKey(self.round_shape(steps, size).computed, size)
            for size in reversed(self._router.sizes)
            for steps in self._router.candidates(size)
        ]
        return tuple(sorted(keys, key=lambda key: key.shape))
