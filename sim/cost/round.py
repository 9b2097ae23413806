"""The time of a step on the device: prefill, decode rounds with drafting and verifying, or both.

A decode round with S steps is, in this order of work (S = 0 is one plain forward pass and its sampling):

    draft      S − 1 passes of the draft over batch · topk tokens (the first step's drafts come from the last catch-up);
               one pass over batch · (S + 1) masks of a block drafter; none of a draft whose masks are in the catch-up
    tree       for topk > 1: pick nodes, build parents and mask
    verify     one target pass over batch · nd tokens: layers, attention over the KV, logits of every node
    sampling   softmax, acceptance, bonus token
    KV move    for topk > 1: the accepted path becomes contiguous
    catch-up   one draft pass over the accepted tokens, padded to batch · (S + 1), which also gives the next first
               drafts; with masks behind them all drafts; of a block drafter only keys and values from hidden states

Where some rows draft by look-up beside a head (`DraftShape.look_up_share`), its passes run only in rounds in which
others do not; a round has their mean time.

Batches are padded to captured graph sizes; a batch beyond the largest runs kernel by kernel with a dispatch floor.

Errors against published measurements: docs/evidence/accuracy.md; those of single passes: `efficiency.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ...core.contract.step import PLAIN_ROUND, RoundShape
from ...core.model_shape import ModelShape
from ...core.scheduler.spec import GRAPH_SIZES
from .calibration import PROMPT_FACTOR, Calibration, FittedParameters
from .deployments.evidence import Evidence
from .draft import DraftShape
from .efficiency import Efficiency, default_efficiency
from .hardware import GPU, Parallelism
from .host import FULL_GRAPH, GraphUnit, LaunchCost
from .measured import KernelTables, MeasuredForward
from .passes.curve import Line, Pass, PassCurve
from .passes.decode_work import DecodeWork, InvalidRound, check_round
from .passes.drafting import PASSES, DraftPasses
from .passes.forward import ForwardCost
from .passes.launch import PassLaunch
from .passes.tokens import EXPERT_INDEPENDENCE, PassTokens

GREEDY = "greedy"
STOCHASTIC = "stochastic"
TARGET_PARTS = "verify", "attention", "lm_head"
"""The parts of the target's pass: its layers, its attention, its logits."""


def _shared(passes: Sequence[Pass], share: float) -> Sequence[Pass]:
    """Return the mean time of passes that a `share` of the rounds has."""
    return passes if share == 1.0 else [item.times(share) for item in passes]


class _Rider(NamedTuple):
    """A decode round that runs with prefill: the passes and lines that do not depend on the chunks."""

    drafting: tuple[Pass, ...] = ()
    after_verify: tuple[Pass, ...] = ()
    attention: Line = Line(0.0)
    caught_up_tokens: int = 0
    catch_up_attention: Line = Line(0.0)


class RoundCost:
    """Device time of steps of one engine: target, draft, GPU, and how its devices share the models.

    `tables`, `draft_tables`: measured times of the target's and the draft's passes, which replace the roofline's.
    `graph_sizes`: captured sizes in increasing order, None for no graphs; `graph_unit`: what they count. `sampling`:
    "stochastic" (softmax and lossless acceptance over the vocabulary) or "greedy" (argmax). `keep_draft_warm`: whether
    rounds with 0 steps run the catch-up. `expert_independence`: see `ExpertRouting`. `published`: the published points
    whose factor every pass has.
    """

    sees_rows: Literal[False] = False  # a round's time follows from its shape and the KV tokens of all rows together

    def __init__(
        self,
        target: ModelShape,
        gpu: GPU,
        parallel: int | Parallelism = 1,
        draft: DraftShape | None = None,
        efficiency: Efficiency | None = None,
        graph_sizes: tuple[int, ...] | None = GRAPH_SIZES,
        launch: LaunchCost = FULL_GRAPH,
        calibration: Calibration | None = None,
        *,
        graph_unit: GraphUnit = "rows",
        tables: KernelTables | None = None,
        draft_tables: KernelTables | None = None,
        sampling: str = STOCHASTIC,
        keep_draft_warm: bool = False,
        expert_independence: float = EXPERT_INDEPENDENCE,
        published: Evidence | None = None,
    ) -> None:
        if sampling not in (GREEDY, STOCHASTIC):
            raise InvalidRound(f"sampling must be {GREEDY!r} or {STOCHASTIC!r}, not {sampling!r}")
        if graph_sizes is not None and (
            list(graph_sizes) != sorted(set(graph_sizes)) or min(graph_sizes, default=0) < 1
        ):
            raise InvalidRound(f"graph sizes must be positive and increasing, not {graph_sizes}")
        if calibration is not None:
            calibration.check(gpu.name)
        self.target = target
        self.gpu = gpu
        self.parallel: Parallelism = Parallelism.of(parallel)
        self.tp: int = self.parallel.tensor
        self.draft = draft
        self.efficiency: Efficiency = efficiency or default_efficiency(gpu)
        self.graph_sizes = graph_sizes
        self.graph_unit: GraphUnit = graph_unit
        self.launch = launch
        self.calibration = calibration
        self.sampling = sampling
        self.keep_draft_warm = keep_draft_warm
        self.expert_independence = expert_independence
        self.published = published
        roofline = ForwardCost(target, gpu, self.efficiency, self.parallel)
        self._target = roofline if tables is None else MeasuredForward(roofline, tables)
        self._pass_launch: PassLaunch = PassLaunch(launch, graph_sizes, graph_unit, expert_independence)
        self._draft: DraftPasses | None = None
        if draft is not None and draft.body is not None:
            has_ranks = draft.body.experts is not None and not draft.is_model
            ranks = self.parallel if has_ranks else self.parallel.without_experts
            own = ForwardCost(draft.body, gpu, self.efficiency, ranks, draft.qkv_inputs)
            forward = own if draft_tables is None else MeasuredForward(own, draft_tables)
            self._draft = PASSES[draft.drafting](draft, forward, self._pass_launch, keep_draft_warm)
        self._curves: dict[tuple[int, RoundShape, int | None], PassCurve] = {}
        self._first_samplings: dict[int, Pass] = {}
        self._riders: dict[tuple[int, RoundShape, int | None], _Rider] = {}
        self._fitted: FittedParameters | None = None if calibration is None else calibration.parameters

    # The hot path: one dictionary look-up and a few integer operations.
    @overload
    def decode_ns(self, batch_size: int, shape: RoundShape, kv_tokens: int, num_verified: int | None = None) -> int: ...
    @overload
    def decode_ns(
        self, batch_size: int, shape: RoundShape, kv_tokens: NDArray[np.int64], num_verified: int | None = None
    ) -> NDArray[np.int64]: ...
    def decode_ns(
        self, batch_size: int, shape: RoundShape, kv_tokens: int | NDArray[np.int64], num_verified: int | None = None
    ) -> int | NDArray[np.int64]:
        """Return the nanoseconds of a decode round, rounded down.

        `shape`: `PLAIN_ROUND`, `RoundShape.chain(steps)` or that of a tree. `kv_tokens`: KV tokens over the batch when
        the round starts; an integer array [m] for m rounds of one multi-step gives int64 [m], bit for bit what m single
        calls give. `num_verified`: tokens that the target verifies, where rows verify fewer nodes than the shape has.
        They run in one packed pass, whose graph is one for so many tokens. Raises `InvalidRound` for a contradictory
        round.
        """
        curve = self._curves.get((batch_size, shape, num_verified))
        if curve is None:
            curve = self._curve(batch_size, shape, num_verified)
        return curve(kv_tokens)

    def decode_parts(
        self, batch_size: int, shape: RoundShape, kv_tokens: int, num_verified: int | None = None
    ) -> dict[str, int]:
        """Return `decode_ns` by part (draft, verify, attention, lm_head, sampling, …); the parts sum to it exactly."""
        return self._curve(batch_size, shape, num_verified).parts(kv_tokens)

    def step_ns(self, prefill_tokens: Sequence[tuple[int, int]], decode: DecodeWork | None = None) -> int:
        """Return the nanoseconds of a step with prompt chunks (new tokens, tokens before them), a
        decode round, or both."""
        if not prefill_tokens:
            return 0 if decode is None else self.decode_ns(*decode)
        return self._step_curve(prefill_tokens, decode)(decode.kv_tokens if decode is not None else 0)

    @property
    def priced_by(self) -> str:
        """The source of the times of passes: the roofline, measured kernels, or one of them for the target and one for
        the draft."""
        by = [forward.priced_by for forward in self._forwards.values()]
        return (
            by[0] if len(set(by)) == 1 else f"{by[0]} for the target, {by[1]} for the draft"
        ) + self._target.about_prices

    @property
    def kernels(self) -> str:
        """What prices the target's passes, before a profile's factor: "measured" or "roofline"."""
        return "measured" if isinstance(self._target, MeasuredForward) else "roofline"

    @property
    def kernel_sources(self) -> dict[str, str]:
        """What prices the passes of the target and of the draft:
        the database with its version and what it was asked, or the roofline."""
        return {name: forward.source for name, forward in self._forwards.items()}

    @property
    def has_experts(self) -> bool:
        """Whether the target or the draft is a mixture of experts."""
        return any(forward.shape.moe_layers for forward in self._forwards.values())

    @property
    def _forwards(self) -> dict[str, ForwardCost]:
        return {"target": self._target} | ({} if self._draft is None else {"draft": self._draft.forward})

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """Return rows (name, value, unit, source) of all parts of this cost."""
        rows: list[tuple[str, float | str, str, str]] = [
            *self.gpu.explain(),
            *self.target.explain(),
            *self._target.explain(),
        ]
        if self.has_experts:
            source = (
                "of a request's further tokens in their choice of experts; the default is fitted to published counts"
            )
            rows.append(("experts: independence", self.expert_independence, "", source))
        if self.published is not None:
            rows.append(("passes: published / simulated", self.published.factor, "", self.published.about))
        for part in (self.draft, self.efficiency, self.launch, self.calibration):
            if part is not None:
                rows += part.explain()
        return rows

    def _curve(self, batch_size: int, shape: RoundShape, num_verified: int | None = None) -> PassCurve:
        key = (batch_size, shape, num_verified)
        if key not in self._curves:
            check_round(self.draft, batch_size, shape)
            passes = self._decode_passes(*key) if batch_size else []
            fitted = self._fitted
            factor = 1.0 if fitted is None else fitted.round_factor(batch_size, has_drafts=shape.steps > 0)
            self._curves[key] = self._curve_of(passes, factor)
        return self._curves[key]

    def _decode_passes(self, batch_size: int, shape: RoundShape, num_verified: int | None = None) -> list[Pass]:
        tokens, draft = self._pass_launch.tokens(batch_size, shape.nodes, num_tokens=num_verified), self._draft
        verified = num_verified or batch_size * shape.nodes
        attention = self._target.decode_attention(batch_size, shape.nodes, verified)
        verify = self._target_pass(tokens, attention, tokens.num_tokens, batch_size)
        if num_verified is not None and tokens.is_captured:
            verify = verify.times(self.efficiency.unequal_rows)
        runs = 1.0 if self.draft is None else self.draft.runs(batch_size)
        # A round with the draft behind one without it catches up with both.
        catch_ups = runs * (2.0 - runs)
        return [
            *(() if draft is None else _shared(draft.of_steps(batch_size, shape), runs)),
            verify,
            *self._host_pass(verify, shape.steps),
            self._after_verify(tokens.num_tokens, shape),
            *(() if draft is None else _shared(draft.catch_up(batch_size, shape), catch_ups)),
        ]

    def _target_pass(
        self,
        tokens: PassTokens,
        attention: Line,
        logit_rows: int,
        rows: int,
        chunks: Sequence[tuple[int, int]] = (),
    ) -> Pass:
        """Return the target's pass over decode rows, prompt chunks or both."""
        gap_ns = self.launch.target_gap_ns(self._own_rows(len(chunks) + rows))
        return self._pass_launch.forward_pass(
            self._target, TARGET_PARTS, tokens, attention, logit_rows, rows, gap_ns, chunks=chunks, is_round=not chunks
        )

    def _curve_of(self, passes: Sequence[Pass], factor: float = 1.0) -> PassCurve:
        """Return the curve of `passes` times a fitted factor. Published points give a factor, too."""
        if self.published is not None:
            factor *= self.published.factor
        return PassCurve(passes if factor == 1.0 else [item.times(factor) for item in passes])

    def _step_factor(self, passes: Sequence[Pass], rows: int, shape: RoundShape) -> float:
        """Return the fitted factor on a step with prompts and a decode round of `rows` requests: the round has its own,
        and what the step takes longer has that of prompts."""
        if self._fitted is None:
            return 1.0
        prompts = self._fitted.value(PROMPT_FACTOR)
        if not rows:
            return prompts
        decode = PassCurve(self._decode_passes(rows, shape))(0)
        share = min(1.0, decode / max(PassCurve(passes)(0), 1))
        return share * self._fitted.round_factor(rows, has_drafts=shape.steps > 0) + (1 - share) * prompts

    def is_captured(self, batch_size: int, nodes: int) -> bool:
        """Return whether a verify pass of so many rows and tokens per row runs as a captured graph, if it comes
        without prefill."""
        return self._pass_launch.is_captured(batch_size, nodes)

    def _own_rows(self, rows: int) -> float:
        """Return the rows of one attention-data parallel group: each group has a scheduler and samples by itself."""
        return rows / self.parallel.data

    def _sampling_ns(self, rows: int) -> float:
        """Return the time of sampling.

        Greedy: read the 16-bit logits once. Stochastic: softmax (read 2, write 4 bytes), truncation (read and write 4),
        acceptance (read 4): 18 bytes per logit. Then the acceptance walk and its bookkeeping, in small kernels.
        """
        logit_bytes, kernels = (2, 3) if self.sampling == GREEDY else (18, 7)
        moved = self._own_rows(rows) * self.target.vocab * logit_bytes
        return self.efficiency.stream_ns(self.gpu, moved) + kernels * self.efficiency.small_kernel_ns

    def _after_verify(self, tokens: int, shape: RoundShape) -> Pass:
        parts = {"sampling": Line(self._sampling_ns(tokens))}
        if shape.topk > 1 and shape.steps:
            # The kernel covers the widest path of every row; keys and values are read and written once each.
            moved = 2.0 * -(-tokens // shape.nodes) * (shape.steps + 1) * self._target.moved_token_bytes
            parts["kv_move"] = Line(self.efficiency.stream_ns(self.gpu, moved) + self.efficiency.small_kernel_ns)
        return Pass(parts)

    def _host_pass(self, verify: Pass, steps: int) -> list[Pass]:
        """Return the pass in which the host proposes drafts, for which the round waits;
        an empty list if it does not."""
        fraction = self.draft.verify_share if self.draft is not None else 0.0
        if not steps or not fraction:
            return []
        share = verify.times(fraction).parts.values()
        total = Line(*map(sum, zip(*share, strict=True)))
        return [Pass({"draft": total}, window_cap_tokens=verify.window_cap_tokens)]

    def _rider(self, batch_size: int, shape: RoundShape, num_verified: int | None = None) -> _Rider:
        """Return the part of a decode round in a step with prefill; nothing of it depends on the chunks."""
        key, draft = (batch_size, shape, num_verified), self._draft
        if not batch_size:
            return _Rider()
        if key not in self._riders:
            check_round(self.draft, batch_size, shape)
            verified = num_verified or batch_size * shape.nodes
            caught_up = 0 if draft is None else draft.caught_up(batch_size, shape)
            drafting: Sequence[Pass] = ()
            if draft is not None:
                drafting = _shared(draft.of_steps(batch_size, shape, has_graph=False), draft.draft.runs(batch_size))
            self._riders[key] = _Rider(
                tuple(drafting),
                (self._after_verify(verified, shape),),
                self._target.decode_attention(batch_size, shape.nodes, verified),
                caught_up,
                draft.catch_up_attention(batch_size, shape.steps) if draft and caught_up else Line(0.0),
            )
        return self._riders[key]

    def _step_curve(self, chunks: Sequence[tuple[int, int]], decode: DecodeWork | None) -> PassCurve:
        """Return the curve of a step with prefill and perhaps a decode round:
        one target and one draft pass over all tokens, no graph."""
        batch_size, shape, _, num_verified = decode if decode is not None else DecodeWork(0, PLAIN_ROUND, 0)
        rider = self._rider(batch_size, shape, num_verified)
        verified = num_verified or batch_size * shape.nodes
        new_tokens = sum(new for new, _ in chunks) + verified
        tokens = self._pass_launch.of_requests(len(chunks) + batch_size, new_tokens)
        verify = self._target_pass(tokens, rider.attention, len(chunks) + verified, batch_size, chunks)
        first_tokens = self._first_samplings.get(len(chunks))
        if first_tokens is None:
            first_tokens = self._first_samplings[len(chunks)] = Pass({"sampling": Line(self._sampling_ns(len(chunks)))})
        passes = [*rider.drafting, verify, *self._host_pass(verify, shape.steps), *rider.after_verify, first_tokens]
        if self._draft is not None and not shape.is_parked:
            passes.append(self._draft.prefill(chunks, batch_size, rider.caught_up_tokens, rider.catch_up_attention))
        return self._curve_of(passes, self._step_factor(passes, batch_size, shape))
