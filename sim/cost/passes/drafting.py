"""The passes of a draft on the device: the steps after the first, the tree, and the catch-up with what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.contract.step import RoundShape
from ..draft import MULTI_LAYER_EAGLE, Drafting, DraftShape
from .curve import Line, Pass
from .forward import ForwardCost
from .launch import LAUNCH, PassLaunch
from .tokens import PassTokens


class DraftPasses:
    """The passes of one draft whose body costs `forward`. `keeps_warm`: whether rounds with 0 steps run the
    catch-up."""

    def __init__(self, draft: DraftShape, forward: ForwardCost, launch: PassLaunch, keeps_warm: bool) -> None:
        self.draft = draft
        self.forward = forward
        self.launch = launch
        self.keeps_warm = keeps_warm
        self._fusion: tuple[int, int] = draft.fusion_width, -(-forward.shape.hidden // forward.tp)

    def of_steps(self, batch_size: int, shape: RoundShape, has_graph: bool = True) -> list[Pass]:
        """Return the S − 1 passes after the first step's drafts, and the tree.
        With one head per step they run in the catch-up instead."""
        forward, draft, (steps, topk, _) = self.forward, self.draft, shape
        if not steps:
            return []
        passes = []
        if steps > 1 and draft.algorithm != MULTI_LAYER_EAGLE:
            # On average a branch has half of the steps' own tokens behind it.
            own, tokens = batch_size * steps // 2, self.launch.tokens(batch_size, topk, has_graph)
            attention = forward.decode_attention(batch_size, 1, own, reads=topk)
            passes.append(self._pass("draft", batch_size, tokens, tokens.num_tokens, attention, steps - 1, later=True))
        if topk > 1:
            # Cumulative scores, selection, sorting, parents, sibling links, mask.
            tree_ns = (steps + 5) * forward.efficiency.small_kernel_ns
            passes.append(Pass({"tree": Line(tree_ns), LAUNCH: Line(self.launch.cost.tree_ns)}))
        step_ns = self.launch.cost.step_ns(draft.algorithm)
        if step_ns:
            passes.append(Pass({LAUNCH: Line(steps * step_ns)}))
        return passes

    def catch_up_width(self, steps: int) -> int:
        """Return the tokens of a row in the catch-up: S + 1 at most."""
        return steps + 1

    def follows(self, shape: RoundShape) -> bool:
        """Return whether a round has a catch-up."""
        return shape.steps > 0 or (self.keeps_warm and not shape.is_parked)

    def caught_up(self, batch_size: int, shape: RoundShape) -> int:
        """Return the tokens that the catch-up of a round adds to a pass with prefill."""
        return batch_size * self.catch_up_width(shape.steps) if self.follows(shape) else 0

    def catch_up_attention(self, batch_size: int, steps: int) -> Line:
        """Return the time of the catch-up's attention."""
        width = self.catch_up_width(steps)
        return self.forward.decode_attention(batch_size, width, batch_size * width)

    def catch_up(self, batch_size: int, shape: RoundShape) -> list[Pass]:
        """Return the pass in which the draft sees the accepted tokens:
        S + 1 per row at most, and the graph computes them all."""
        if not self.follows(shape):
            return []
        steps = shape.steps
        repeat = max(steps, 1) if self.draft.algorithm == MULTI_LAYER_EAGLE else 1
        tokens = self.launch.tokens(batch_size, steps + 1)
        rows = -(-tokens.num_tokens // (steps + 1)) if steps or self.launch.cost.has_resting_logits else 0
        attention = self.catch_up_attention(batch_size, steps)
        return [self._pass("draft_catch_up", batch_size, tokens, rows, attention, repeat)]

    def prefill(
        self, chunks: Sequence[tuple[int, int]], batch_size: int, caught_up: int, caught_up_attention: Line
    ) -> Pass:
        """Return the pass over prompt chunks (new tokens, tokens before them) and the `caught_up` tokens of a decode
        round that runs with them."""
        rows = len(chunks) + (batch_size if caught_up else 0)
        tokens = self.launch.of_requests(rows, sum(new for new, _ in chunks) + caught_up)
        # Each head of a multi-layer draft has its own KV of the prompt.
        heads = self.draft.heads
        return self._pass("draft_catch_up", batch_size, tokens, rows, caught_up_attention, heads, chunks=chunks)

    def _pass(
        self,
        label: str,
        batch_size: int,
        tokens: PassTokens,
        logit_rows: int,
        attention: Line,
        repeat: int,
        later: bool = False,
        chunks: Sequence[tuple[int, int]] = (),
    ) -> Pass:
        """Return one pass of the draft; `later`: a pass after the first of a round, on its own hidden states."""
        forward, fuses = self.forward, self.draft.fusion_every_pass or not later
        # Softmax and top-k over the draft's logits: read 2 bytes, write and read 4.
        logit_bytes, small_ns = 10.0 * logit_rows * forward.shape.vocab, forward.efficiency.small_kernel_ns
        choose_ns = forward.efficiency.stream_ns(forward.gpu, logit_bytes) + small_ns if logit_rows else 0.0
        return self.launch.forward_pass(
            forward,
            (label, "draft_attention", "draft_lm_head"),
            tokens,
            attention,
            logit_rows,
            batch_size,
            0.0 if later else self.launch.cost.graph_gap_ns,
            chunks=chunks,
            beside_ns=(self._fusion_ns(tokens.num_tokens) if fuses else 0.0, choose_ns),
            least_ns=self.launch.cost.draft_pass_floor_ns,
            repeat=repeat,
        )

    def _fusion_ns(self, tokens: int) -> float:
        """Return the time of the fully connected layer in front of a head."""
        return self.forward.gemm_ns(tokens, *self._fusion) if self.draft.fusion_inputs else 0.0


class MaskedPasses(DraftPasses):
    """The passes of a draft that proposes in its catch-up: a row's K drafts come from its last accepted token and K − 1
    masks behind it."""

    def of_steps(self, batch_size: int, shape: RoundShape, has_graph: bool = True) -> list[Pass]:
        """Return the fixed time of a draft step, which comes once."""
        step_ns = self.launch.cost.step_ns(self.draft.algorithm)
        return [Pass({LAUNCH: Line(step_ns)})] if shape.steps and step_ns else []

    def catch_up_width(self, steps: int) -> int:
        """Return the tokens of a row in the catch-up: K + 1 accepted ones at most, and K − 1 masks."""
        return max(2 * steps, 1)

    def catch_up(self, batch_size: int, shape: RoundShape) -> list[Pass]:
        """Return the pass over accepted tokens and masks, with logits for each draft."""
        if not self.follows(shape):
            return []
        steps = shape.steps
        width = self.catch_up_width(steps)
        tokens = self.launch.tokens(batch_size, width)
        rows = -(-tokens.num_tokens // width) * steps
        return [self._pass("draft_catch_up", batch_size, tokens, rows, self.catch_up_attention(batch_size, steps), 1)]


class BlockPasses(DraftPasses):
    """The passes of a draft that proposes in one pass over a block of masks, behind keys and values that are made from
    the target's hidden states: no layer of it runs over the tokens of prompts or the accepted ones."""

    def of_steps(self, batch_size: int, shape: RoundShape, has_graph: bool = True) -> list[Pass]:
        """Return the pass over the block, and the choice of its tokens."""
        steps = shape.steps
        if not steps:
            return []
        width = steps if self.draft.parts.samples_anchor else steps + 1
        tokens = self.launch.tokens(batch_size, width, has_graph)
        rows = -(-tokens.num_tokens // width)
        attention = self.forward.decode_attention(batch_size, width, batch_size * width)
        block = self._pass("draft", batch_size, tokens, rows * steps, attention, 1, later=True)
        beside = Line(self._convolutions_ns(tokens.num_tokens) + self._choice_ns(rows, steps))
        step_ns = self.launch.cost.step_ns(self.draft.algorithm)
        return [block, Pass({"draft": beside, LAUNCH: Line(step_ns + self.launch.cost.graph_gap_ns)})]

    def catch_up_attention(self, batch_size: int, steps: int) -> Line:
        """Return no time: the accepted tokens attend to nothing."""
        return Line(0.0)

    def catch_up(self, batch_size: int, shape: RoundShape) -> list[Pass]:
        """Return the pass that makes the draft's KV of the accepted tokens."""
        if not self.follows(shape):
            return []
        return [self._injection(self.launch.tokens(batch_size, self.catch_up_width(shape.steps)))]

    def prefill(
        self, chunks: Sequence[tuple[int, int]], batch_size: int, caught_up: int, caught_up_attention: Line
    ) -> Pass:
        """See `DraftPasses`: the same layers fuse hidden states and project keys and values."""
        requests = len(chunks) + (batch_size if caught_up else 0)
        return self._injection(self.launch.of_requests(requests, sum(new for new, _ in chunks) + caught_up))

    def _injection(self, tokens: PassTokens) -> Pass:
        """Return the pass that fuses hidden states of the target and projects the keys and values of all layers."""
        forward, num_tokens = self.forward, tokens.num_tokens
        columns = sum(count * cache.heads * cache.width for cache, count in forward.caches)
        made_ns = self._fusion_ns(num_tokens) + forward.gemm_ns(num_tokens, forward.shape.hidden, columns)
        made_ns += 2 * forward.efficiency.small_kernel_ns  # norms and rotation; the write into the cache
        floor_ns = 0.0 if tokens.is_captured else 4 * self.launch.cost.eager_kernel_ns
        return Pass({"draft_catch_up": Line(made_ns), LAUNCH: Line(self.launch.cost.graph_gap_ns)}, floor_ns)

    def _convolutions_ns(self, tokens: int) -> float:
        """Return the time of the convolutions before and after each sublayer: a product gives their kernels."""
        forward, columns = self.forward, self.draft.parts.conv_kernels(self.forward.shape.hidden)
        if not columns:
            return 0.0
        one = forward.gemm_ns(tokens, forward.shape.hidden, columns) + 2 * forward.efficiency.small_kernel_ns
        return 2 * forward.shape.layers * one

    def _choice_ns(self, rows: int, steps: int) -> float:
        """Return the time of choosing the tokens of a block one after the other."""
        forward, parts, small_ns = self.forward, self.draft.parts, self.forward.efficiency.small_kernel_ns
        total = 0.0
        if parts.selector_rank:
            # Project the hidden states, gather codes of the candidates, score all pairs of neighbours, walk once.
            gathered = 4.0 * rows * steps * parts.selector_top_k * parts.selector_rank
            total += forward.gemm_ns(rows * steps, forward.shape.hidden, parts.selector_rank)
            total += forward.efficiency.stream_ns(forward.gpu, gathered) + 4 * small_ns
        if parts.markov_rank:
            # Each position: a bias for every token of the vocabulary, which is added before the choice.
            bias_ns = forward.gemm_ns(rows, parts.markov_rank, forward.shape.vocab)
            added_ns = forward.efficiency.stream_ns(forward.gpu, 6.0 * rows * forward.shape.vocab)
            total += steps * (bias_ns + added_ns + 3 * small_ns)
        return total + parts.has_confidence * small_ns


PASSES = {Drafting.STEPS: DraftPasses, Drafting.MASKS: MaskedPasses, Drafting.BLOCK: BlockPasses}
