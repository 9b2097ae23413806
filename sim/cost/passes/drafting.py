"""The passes of a draft on the device: the steps after the first, the tree, and the catch-up with what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.contract.step import RoundShape
from ..draft import MULTI_LAYER_EAGLE, DraftShape
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
        self._lm_heads: dict[int, float] = {}
        self._fusions: dict[int, float] = {}

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

    def caught_up(self, batch_size: int, steps: int) -> int:
        """Return the tokens that the catch-up of a round adds to a pass with prefill: S + 1 per row at most."""
        return batch_size * (steps + 1) if steps or self.keeps_warm else 0

    def catch_up_attention(self, batch_size: int, steps: int) -> Line:
        """Return the time of the catch-up's attention."""
        own = batch_size * (steps + 1)
        return self.forward.decode_attention(batch_size, steps + 1, own)

    def catch_up(self, batch_size: int, steps: int) -> list[Pass]:
        """Return the pass in which the draft sees the accepted tokens:
        S + 1 per row at most, and the graph computes them all."""
        if not (steps or self.keeps_warm):
            return []
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
        logit_rows = len(chunks) + (batch_size if caught_up else 0)
        line, prefill_ns = caught_up_attention, self.forward.prefill_attention_ns(chunks)
        attention = Line(line.base_ns + prefill_ns, line.slope_ns, line.window_slope_ns)
        tokens = self.launch.of_requests(logit_rows, sum(new for new, _ in chunks) + caught_up)
        # Each head of a multi-layer draft has its own KV of the prompt.
        return self._pass("draft_catch_up", batch_size, tokens, logit_rows, attention, self.draft.heads)

    def _pass(
        self,
        label: str,
        batch_size: int,
        tokens: PassTokens,
        logit_rows: int,
        attention: Line,
        repeat: int,
        later: bool = False,
    ) -> Pass:
        """Return one pass of the draft; `later`: a pass after the first of a round, on its own hidden states."""
        forward, draft, efficiency = self.forward, self.draft, self.forward.efficiency
        layers_ns = forward.layers_ns(tokens.num_tokens, tokens.routing)
        if draft.fusion_inputs and (draft.fusion_every_pass or not later):
            layers_ns += self._fusion_ns(tokens.num_tokens)
        # Softmax and top-k over the draft's logits: read 2 bytes, write and read 4.
        choose_ns = lm_head_ns = 0.0
        if logit_rows:
            logit_bytes = 10.0 * logit_rows * forward.shape.vocab
            choose_ns = efficiency.stream_ns(forward.gpu, logit_bytes) + efficiency.small_kernel_ns
            lm_head_ns = self._lm_head_ns(logit_rows)
        gap_ns = 0.0 if later else self.launch.cost.graph_gap_ns
        parts = {
            label: Line(layers_ns + choose_ns),
            "draft_attention": attention,
            "draft_lm_head": Line(lm_head_ns),
            LAUNCH: Line(gap_ns + self.launch.waits_ns(forward, tokens)),
        }
        if forward.parallel.devices > 1:
            parts["comm"] = Line(forward.comm_ns(tokens.num_tokens))
        floor_ns = max(self.launch.floor_ns(forward, tokens), self.launch.cost.draft_pass_floor_ns)
        return Pass(parts, floor_ns, repeat, batch_size * forward.knee)

    def _lm_head_ns(self, rows: int) -> float:
        if rows not in self._lm_heads:
            self._lm_heads[rows] = self.forward.lm_head_ns(rows)
        return self._lm_heads[rows]

    def _fusion_ns(self, tokens: int) -> float:
        """Return the time of the fully connected layer in front of a head."""
        if tokens not in self._fusions:
            forward, hidden = self.forward, self.forward.shape.hidden
            inputs, columns = self.draft.fusion_width, -(-hidden // forward.tp)
            self._fusions[tokens] = forward.gemm_ns(tokens, inputs, columns)
        return self._fusions[tokens]
