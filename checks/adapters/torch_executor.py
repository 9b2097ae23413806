"""The real executor behind the executor contract: `foredraft check executor`, on a CPU; with `--device` and `--ops` on
another device and with other operations, under the names that `Place.name` gives.

Its models have random weights and a few thousand parameters, made in memory. The contract's config is taken as it comes
(`properties/executor/contract.py`); this file imports nothing of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.hybrid import HYBRID_COSTS, HybridChoice, RoundChoice
from ...core.algorithm.suffix import Lookup
from ...core.contract.step import PARKED_ROUND, StepResult
from ...core.draws import Purpose, hash64
from ...core.errors import ConfigError, nearest
from ...core.scheduler.spec import default_graph_sizes
from ...core.tree.chains import AcceptRule
from ...gpu.draft.hybrid import HybridDraft
from ...gpu.executor.build import build_executor
from ...gpu.executor.executor import TorchExecutor
from ...gpu.executor.outputs import NUM_TOP_LOGPROBS, USER_OUTPUTS
from ...gpu.executor.parts import ExecutorOptions
from ...gpu.executor.round import nodes_of
from ...gpu.executor.shaping import paths_of
from ...gpu.kernels.rounds.build_tree import shorten_rows
from ...gpu.models.decoder import Decoder
from ...gpu.models.heads.block import BlockHead
from ...gpu.ops.host_ops import HostOps
from ...gpu.session.devices import ops_for, resolve_device
from ...gpu.types.ops import Capture, DeviceTree, Ops
from ...gpu.types.session_options import AUTO
from ...properties.executor.oracle import After, Drafts, LookedUp, RecurrentState, is_allowed, looked_up
from ...properties.executor.reference.adapter import WrappedExecutor
from .dense_drafting import (
    DenseHead,
    DenseHeads,
    DenseModel,
    DenseProposal,
    PlainRecurrence,
    Shape,
    dense_block,
    dense_masked,
    dense_tree,
)
from .torch_models import (
    DRAFT_HIDDEN,
    HIDDEN,
    RUNNING_TEXT,
    RunningText,
    TargetKind,
    context_of,
    draft_model,
    hashes_of,
    models_on,
    target_model,
)

MOST_TEXTS = 12  # whose outputs, computed plainly, are remembered
MOST_WAITING = 9  # tokens of a row, for its head: texts are too short for what one pass takes
DEVICE_HEAD_DIM = 16  # of models that run elsewhere: a kernel's block has no fewer channels
STRETCH = 3  # rounds in which rows of HYBRID choose in one way
DEVICE_LIMIT_S = 600.0  # of a run elsewhere: kernels are compiled in it, or interpreted
DENSE = {Drafter.MODEL: DenseModel, Drafter.HEAD: DenseHead, Drafter.HEADS: DenseHeads}


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Where an executor runs: a torch device, and which operations it has, "host", "torch" or "triton".

    With `captured` rounds are graphs, and nothing is checked on the way, since checks wait for the device.
    """

    device: str = "cpu"
    ops: str = "host"
    captured: bool = False

    @property
    def name(self) -> str:
        """Return the name of the component here, as `foredraft check executor` and stored cases have it."""
        parts = ("make", self.device.replace(":", ""), self.ops, *(("captured",) if self.captured else ()))
        return f"{__name__}:{'make' if self == HOST else '_'.join(parts)}"


@cache
def ops_in(device: str, name: str) -> Ops:
    """Return the operations of a place. Raises ConfigError if they cannot run here."""
    try:
        return ops_for(device, AUTO if name == "host" else name)
    except ConfigError as error:
        raise ConfigError.of("--ops", "", error.problems[0].message) from None


HOST = DevicePlace()


class CheckedExecutor(WrappedExecutor):
    """Run steps on a `TorchExecutor`, in debug mode if its rounds are not captured. It is compared with the same models
    on the CPU, whose operations are torch's and NumPy's."""

    hidden_size = HIDDEN
    rule = AcceptRule.TARGET
    capabilities: tuple[str, ...] = (
        *("tokens", "trees", "hidden_states", "relay", "inspection", "rounds", "merging", "handoff"),
        *("plain", "drafts", "proposals", "samples", "shaped", "keyed", "states", "restarts", "parking", "lengths"),
        *("budgets", "confidences"),
    )
    parts: tuple[str, ...] = ("accepted paths in rings", "experts", RUNNING_TEXT)

    def __init__(self, config: Any, place: DevicePlace = HOST) -> None:
        # Pools of threads would only wait for their members: the models are tiny.
        torch.set_num_threads(1)
        threadpool_limits(1, user_api="blas")
        kind = TargetKind(config.mixture, config.is_recurrent, config.windows)
        if place != HOST:
            kind = replace(kind, head_dim=DEVICE_HEAD_DIM)
        target = target_model(config.vocab_size, kind, context_of(config.algorithm))
        self.models = (target, draft_model(config.algorithm, config.vocab_size, kind))
        self._ops, self._running = HostOps(), self.models
        if place != HOST:
            self._ops = ops_in(place.device, place.ops)
            self._running = models_on(place.device, self._ops, config.algorithm, config.vocab_size, kind)
        self.config: Any = config
        self.used_parts: Counter[str] = Counter()
        producers = {RUNNING_TEXT: RunningText(config.max_running)} if place == HOST else {}
        self._outputs = (*USER_OUTPUTS, *producers)
        self.executor: TorchExecutor = build_executor(
            config.make_engine(),
            *self._running,
            self._ops,
            ExecutorOptions(
                debug=not place.captured,
                eager=None if place == HOST else True,
                graph_sizes=default_graph_sizes(config.max_running) if place.captured else None,
                make_matcher=lambda grammar: SuiteMatcher(config.vocab_size),
                producers=producers,
                in_rings=config.windows and not config.prefix_cache,
                accept_rule=self.rule,
            ),
        )
        if self.executor.graphs.are_on:
            self.executor.graphs.on_round = self._note_graph
        self._hybrid = self.executor.draft if isinstance(self.executor.draft, HybridDraft) else None
        if self._hybrid is not None:
            self._hybrid.most_waiting = MOST_WAITING
            self._hybrid._choice = DrawnChoice(config.steps)
        self._plain = lru_cache(MOST_TEXTS)(self._plainly)
        self._drafted: list[list[Drafts]] = []  # per round
        self._proposed: list[list[Drafts]] = []
        if not place.captured:
            for draft in (self.executor.draft, self.executor._rounds.round.draft_of(PARKED_ROUND)):
                draft.propose = partial(self._propose, draft.propose)
        # Behind each pass that was launched, and behind the last one of the collected step: lengths [R], values [R, n].
        self._states: list[tuple[Tensor, Tensor]] = []
        self._collected: tuple[Tensor, Tensor] | None = None
        for runner in (self.executor._prompts, self.executor._rounds) if self.state_room() else ():
            runner.enqueue = partial(self._note_states, runner.enqueue)

    def _propose(self, propose: Callable[..., DeviceTree], *arguments: Any) -> DeviceTree:
        tree = propose(*arguments)
        lengths, _ = nodes_of(arguments[0], tree)
        kept = tree if lengths is None else shorten_rows(tree, lengths)
        trees = zip(kept.tokens.tolist(), kept.parents.tolist(), strict=True)
        drafts = [_drafts(tokens, parents) for tokens, parents in trees]
        if self._hybrid is not None and not arguments[0].shape.is_parked:
            texts = [self._hybrid._rows[row] for row in arguments[0].row_numbers.tolist()]
            drafts = [own if text.found is None else LookedUp(own) for own, text in zip(drafts, texts, strict=True)]
        self._drafted.append(drafts)
        return tree

    def _note_states(self, enqueue: Callable[..., Any], *arguments: Any) -> Any:
        """Launch a pass, and copy the states behind it, since a device is ahead of the results."""
        pending = enqueue(*arguments)
        pools = [pool.states for pool in (self.executor.pool, self.executor.draft_pool) if pool and pool.states]
        layers = [part.flatten(1) for pool in pools for layer in pool.layers for part in (layer.matrices, layer.inputs)]
        self._states.append((pools[0].lengths.clone(), torch.cat(layers, 1)))
        return pending

    def _note_graph(self, is_captured: bool, num_rows: int) -> None:
        self.used_parts["captured rounds"] += is_captured

    def collect(self) -> StepResult:
        result = super().collect()
        rounds = 0 if result.decode is None else result.decode.rounds
        self._note_parts(result)
        self._proposed, self._drafted = self._drafted[:rounds], self._drafted[rounds:]
        passes = rounds + (result.prefill is not None)
        if self._states and passes:
            self._collected, self._states = self._states[passes - 1], self._states[passes:]
        return result

    def _note_parts(self, result: StepResult) -> None:
        """Count the optional parts that a step has used."""
        decode, used = result.decode, self.used_parts
        if decode is None:
            return
        moves = self.config.topk > 1 or self.executor.draft.has_branches
        used["accepted paths in rings"] += self.executor.pool.rings is not None and moves
        used["experts"] += self.config.mixture
        used[RUNNING_TEXT] += any(RUNNING_TEXT in outputs for outputs in decode.outputs or ())

    def restart(self) -> None:
        super().restart()
        self._drafted.clear()
        self._states.clear()

    def proposed(self) -> list[list[Drafts]]:
        return self._proposed

    def hidden_sizes(self) -> tuple[int, ...]:
        return (HIDDEN, DRAFT_HIDDEN)

    def weights(self) -> tuple[object, ...]:
        modules = [module for model in self._running if model is not None for module in model.modules()]
        return (*modules, self._ops)

    def shown(self) -> tuple[str, ...]:
        return self._outputs

    def after(self, text: Sequence[int], first: int) -> After:
        known = self._plain(tuple(text))
        outputs = {name: values[first:] for name, values in known.outputs.items()}
        return After(known.logits[first:], outputs, known.state)

    def _plainly(self, text: tuple[int, ...]) -> After:
        """Return what the target gives after each token of a text, computed as one sequence in one
        pass, without pages."""
        target, draft = self.models
        tokens, attention = torch.tensor(text), PlainRecurrence(len(text))
        with torch.no_grad():
            out = target.forward(tokens, attention, Capture(routed_experts=True))
            if self.config.is_recurrent and isinstance(draft, Decoder):
                draft.forward(tokens, attention)
            logits = target.logits(out.hidden)
            logprobs = logits.log_softmax(-1)
            top, ids = logprobs.topk(NUM_TOP_LOGPROBS, dim=-1)
        no_experts = np.empty((len(text), 0, 0), np.int32)
        outputs = {
            "logprobs": logprobs.numpy(),
            "top_logprobs": top.numpy(),
            "top_logprob_ids": ids.numpy(),
            "hidden_states": out.hidden.numpy(),
            "routed_experts": no_experts if out.routed_experts is None else out.routed_experts.numpy(),
            RUNNING_TEXT: hashes_of(text),
        }
        return After(logits.numpy(), outputs, torch.cat(attention.states).numpy() if attention.states else None)

    def state_room(self) -> int:
        states = self.executor.pool.states
        return 0 if states is None else len(states.lengths) - 1

    def states(self, rows: Sequence[int]) -> list[RecurrentState]:
        assert self._collected is not None, "no step has been collected"
        lengths, values = self._collected
        return [RecurrentState(int(lengths[row]), values[row].cpu().numpy()) for row in rows]

    def drafted(self, text: Sequence[int], steps: int, topk: int, num_draft_tokens: int, noise: int) -> Drafts | None:
        if self.executor.algorithm.drafter is Drafter.LOOKUP:
            if self.executor.algorithm.name != "NGRAM":
                return None  # only its plugin knows
            return looked_up(text, num_draft_tokens, max(1, min(topk, num_draft_tokens - 1)))
        target, draft = self.models
        if draft is not None and self._drafts_at_once:
            at_once = dense_block if isinstance(draft, BlockHead) else dense_masked
            with torch.no_grad():
                drafts = at_once(draft, target, text, steps)[: num_draft_tokens - 1]
            return {tuple(drafts[: n + 1]) for n in range(len(drafts))}
        dense = self._dense(text, Shape(steps, topk, num_draft_tokens, self.config.context_len - 1), noise)
        if dense is None:
            return None
        tokens, parents = (values[:num_draft_tokens].tolist() for values in (dense.tree.tokens, dense.tree.parents[0]))
        return _drafts(tokens, parents)

    def confidences(self, text: Sequence[int], steps: int) -> list[float] | None:
        algorithm = self.executor.algorithm
        if algorithm.drafter is Drafter.LOOKUP or self._drafts_at_once:
            return None
        shape = Shape(steps, 1, steps + 1, self.config.context_len - 1)
        found = [self._dense(text, shape, noise) for noise in range(3)]
        first = found[0]
        # Of nearly equal candidates either may have been drafted, and other confidences follow.
        if first is None or any(one is None or (one.tree.tokens != first.tree.tokens).any() for one in found):
            return None
        survival = [1.0, *(float(level.scores[0, 0]) for level in first.levels)]
        return [own / before for before, own in pairwise(survival)]

    @property
    def _drafts_at_once(self) -> bool:
        algorithm = self.executor.algorithm
        return algorithm.in_one_pass or algorithm.drafter is Drafter.BLOCK

    def _dense(self, text: Sequence[int], shape: Shape, noise: int) -> DenseProposal | None:
        """Return what the draft proposes behind a text, computed without a pool; None if more than the text decides."""
        (target, draft), drafter = self.models, self.executor.algorithm.drafter
        if drafter is Drafter.HEADS and self.config.prefix_cache:
            return None  # behind a cached prefix nothing is known of what the heads said at its end
        dense = DENSE[drafter](*((draft,) if drafter is Drafter.MODEL else (draft, target)), noise)
        with torch.no_grad():
            return dense_tree(dense, text, shape, shape.topk)


class HybridExecutor(CheckedExecutor):
    """The same with HYBRID alone, whose rows draft by a head or by look-up."""

    capabilities = tuple(name for name in (*CheckedExecutor.capabilities, "look_ups") if name != "trees")
    parts = ("experts", RUNNING_TEXT)

    def waiting(self) -> tuple[int, list[int]]:
        draft = self._hybrid
        return (MOST_WAITING, []) if draft is None else (draft.most_waiting, list(draft.waiting().values()))


class DrawnChoice(HybridChoice):
    """Chooses as HYBRID does in some stretches of rounds, and by chance in others: drafts of tiny models are so seldom
    right that rows would hardly ever go from one source to the other."""

    def __init__(self, most_steps: int) -> None:
        super().__init__(most_steps, HYBRID_COSTS)
        self._rounds = 0

    def choose(
        self, rows: Sequence[int], found: Sequence[Lookup], most: int, late: int = 0, is_sampled: bool = False
    ) -> RoundChoice:
        own = super().choose(rows, found, most, late, is_sampled)
        bits = hash64(0, Purpose.SWARM, self._rounds, np.arange(len(rows) + 1))
        stretch = int(hash64(1, Purpose.SWARM, self._rounds // STRETCH, 0)) % 4
        self._rounds += 1
        if most == 0 or stretch == 0:
            return own
        by_model = (np.zeros(len(rows), bool), bits[1:] % 2 == 0, np.ones(len(rows), bool))[stretch - 1]
        steps = 1 + int(bits[0]) % most if by_model.any() else 0
        return RoundChoice(steps, by_model, np.where(by_model, 0, [min(len(each.tokens), most) for each in found]))


class DrawingExecutor(CheckedExecutor):
    """The same where drafts of requests that sample are drawn and verified as blocks. What it drafts is then no
    function of the text, and its relay has more candidates than the suite's parcels."""

    rule = AcceptRule.BLOCK
    capabilities = tuple(
        name
        for name in CheckedExecutor.capabilities
        if name not in ("trees", "drafts", "proposals", "merging", "handoff", "parking", "budgets", "confidences")
    )
    parts = ("experts", RUNNING_TEXT)


class SuiteMatcher:
    """The suite's grammar, as the executor asks for one."""

    is_over = False
    problem = ""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output: list[int] = []

    def advance(self, tokens: np.ndarray) -> None:
        self._output += tokens.tolist()

    def allowed(self, path: list[int]) -> np.ndarray:
        return np.packbits(is_allowed([*self._output, *path], self._vocab_size), bitorder="little")


def _drafts(tokens: list[int], parents: list[int]) -> Drafts:
    return {tuple(path) for path in paths_of(tokens, parents) if path}


class ExecutorIn:
    """Makes executors in a place. Those that capture their rounds show neither their proposals, which never reach the
    host, nor what they keep: the results of a graph stay in its memory."""

    limit_s = DEVICE_LIMIT_S

    def __init__(self, place: DevicePlace) -> None:
        # Sums of another device may differ with the batch, and a coin between them.
        without = ("keyed", *(("proposals", "inspection", "merging", "handoff") if place.captured else ()))
        self.place = place
        self.capabilities: tuple[str, ...] = tuple(name for name in CheckedExecutor.capabilities if name not in without)
        self.parts: tuple[str, ...] = ("accepted paths in rings", "experts")
        if place.captured:
            self.parts += ("captured rounds",)

    def __call__(self, config: Any) -> CheckedExecutor:
        return CheckedExecutor(config, self.place)


make = CheckedExecutor
make_block = DrawingExecutor
make_hybrid = HybridExecutor


def places_of(device: str, ops: str | None) -> tuple[DevicePlace, ...]:
    """Return where `foredraft check executor` runs for a device and operations (None: those of the device): without and
    with captured rounds. Raises ConfigError for what there is not."""
    device = resolve_device(device).removesuffix(":0")
    own, known = ("host", ("host", "torch", "triton")) if device == "cpu" else ("triton", ("triton", "torch"))
    if ops is not None and ops not in known:
        message = f"{ops!r} is none of {', '.join(known)}, which {device} has{nearest(ops, known)}"
        raise ConfigError.of("--ops", "", message)
    place = DevicePlace(device, ops or own)
    ops_in(place.device, place.ops)
    # Torch's operations wait for a GPU here and there, and cannot be captured on one.
    return (place,) if device != "cpu" and place.ops == "torch" else (place, replace(place, captured=True))


def __getattr__(name: str) -> ExecutorIn:
    """Return what makes executors in the place with this name."""
    found = re.fullmatch(r"make_(cpu|cuda)(\d*)_(host|torch|triton)(_captured)?", name)
    if found is None:
        raise AttributeError(f"{__name__} has no {name!r}")
    kind, number, ops, captured = found.groups()
    return ExecutorIn(DevicePlace(f"{kind}:{number}" if number else kind, ops, captured is not None))
