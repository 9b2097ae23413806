"""The real executor, on a CPU, behind the executor contract:
`foredraft check executor foredraft.checks.adapters.torch_executor:make`.

Its models have random weights and a few thousand parameters, made in memory. The contract's config is taken as it comes
(`properties/executor/contract.py`); this file imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.registry import get_algorithm
from ...core.contract.step import StepResult
from ...core.model_shape import MoeConfig
from ...gpu.executor.build import DraftModel, build_executor
from ...gpu.executor.executor import TorchExecutor
from ...gpu.executor.outputs import NUM_TOP_LOGPROBS, USER_OUTPUTS
from ...gpu.executor.shaping import paths_of
from ...gpu.models.checkpoint import network_of, new_head
from ...gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig
from ...gpu.models.decoder import Decoder
from ...gpu.models.head_config import EAGLE3, MULTI_LAYER_EAGLE, HeadConfig
from ...gpu.models.rope import Rope
from ...gpu.models.weights import initialize
from ...gpu.ops.delta_rule import StateShape
from ...gpu.ops.host_ops import HostOps
from ...gpu.ops.port import Capture, DeviceTree
from ...properties.executor.oracle import After, Drafts, RecurrentState, is_allowed, looked_up
from ...properties.executor.reference.adapter import WrappedExecutor
from .dense_drafting import DenseHead, DenseHeads, DenseModel, Shape, dense_tree
from .plain_recurrence import PlainRecurrence, flat_state

# Widths that nothing else in these models has: projections are 16 + 2 · 8 and 2 · 24 wide.
HIDDEN = 44
DRAFT_HIDDEN = 52
NUM_HEADS = 7
CONTEXT_LEN = 256
QWEN3_NEXT = "Qwen3NextForCausalLM"
STATE = StateShape(heads=4, key_heads=2, key_dim=5, value_dim=7, kernel=4)
WINDOWS: dict[str, Any] = {
    "windowed_layers": (0,),
    "window": 5,
    "local_rope": Rope(100.0),
    "full_head_dim": 8,
    "full_kv_heads": 1,
    "sinks": True,
}
SHARPNESS = 12.0  # a fresh model says nearly the same everywhere
TOKEN, CONTEXT = 4.0, 0.25  # what the last token and what layers add weigh, so that a head can often be right
LONG_CONTEXT, NOISE = 3.0, 0.01
"""Of a draft model and its target: any key or value that is not its own changes what it drafts."""

MOST_TEXTS = 12  # whose outputs, computed plainly, are remembered
OPS = HostOps()
DENSE = {Drafter.MODEL: DenseModel, Drafter.HEAD: DenseHead, Drafter.HEADS: DenseHeads}


class CheckedExecutor(WrappedExecutor):
    """Run steps on a `TorchExecutor` in debug mode."""

    hidden_size = HIDDEN
    capabilities = (
        *("tokens", "trees", "hidden_states", "relay", "inspection", "rounds", "merging", "handoff"),
        *("plain", "drafts", "proposals", "samples", "shaped", "states", "restarts"),
    )

    def __init__(self, config: Any) -> None:
        # Pools of threads would only wait for their members: the models are tiny.
        torch.set_num_threads(1)
        threadpool_limits(1, user_api="blas")
        kind = Kind(config.mixture, config.is_recurrent, config.windows)
        target = target_model(config.vocab_size, kind, context_of(config.algorithm))
        draft = draft_model(config.algorithm, config.vocab_size, kind)
        self.models = (target, draft)
        self.config = config
        self.executor: TorchExecutor = build_executor(
            config.make_engine(),
            target,
            draft,
            OPS,
            debug=True,
            make_matcher=lambda grammar: Matcher(config.vocab_size),
        )
        self._plain = lru_cache(MOST_TEXTS)(self._plainly)
        self._drafted: list[list[Drafts]] = []  # per round
        self._proposed: list[list[Drafts]] = []
        self.executor.draft.propose = partial(self._propose, self.executor.draft.propose)

    def _propose(self, propose: Callable[..., DeviceTree], *arguments: Any) -> DeviceTree:
        tree = propose(*arguments)
        trees = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        self._drafted.append([_drafts(tokens, parents) for tokens, parents in trees])
        return tree

    def collect(self) -> StepResult:
        result = super().collect()
        rounds = 0 if result.decode is None else result.decode.rounds
        self._proposed, self._drafted = self._drafted[:rounds], self._drafted[rounds:]
        return result

    def restart(self) -> None:
        super().restart()
        self._drafted.clear()

    def proposed(self) -> list[list[Drafts]]:
        return self._proposed

    def hidden_sizes(self) -> tuple[int, ...]:
        return (HIDDEN, DRAFT_HIDDEN)

    def weights(self) -> tuple[object, ...]:
        modules = [module for model in self.models if model is not None for module in model.modules()]
        return (*modules, OPS)

    def shown(self) -> tuple[str, ...]:
        return USER_OUTPUTS

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
        }
        return After(logits.numpy(), outputs, torch.cat(attention.states).numpy() if attention.states else None)

    def state_room(self) -> int:
        states = self.executor.pool.states
        return 0 if states is None else len(states.lengths) - 1

    def states(self, rows: Sequence[int]) -> list[RecurrentState]:
        pools = [pool.states for pool in (self.executor.pool, self.executor.draft_pool) if pool and pool.states]
        layers = [layer for pool in pools for layer in pool.layers]
        found = []
        for row in rows:
            values = torch.cat([flat_state(layer.matrices[row], layer.inputs[row]) for layer in layers])
            found.append(RecurrentState(int(pools[0].lengths[row]), values.numpy()))
        return found

    def drafted(self, text: Sequence[int], steps: int, topk: int, num_draft_tokens: int, noise: int) -> Drafts | None:
        target, draft = self.models
        drafter = self.executor.algorithm.drafter
        if drafter is Drafter.LOOKUP:
            if self.executor.algorithm.name != "NGRAM":
                return None  # only its plugin knows
            return looked_up(text, num_draft_tokens, max(1, min(topk, num_draft_tokens - 1)))
        if drafter is Drafter.HEADS and self.config.prefix_cache:
            return None  # behind a cached prefix nothing is known of what the heads said at its end
        dense = DENSE[drafter](*((draft,) if drafter is Drafter.MODEL else (draft, target)), noise)
        with torch.no_grad():
            shape = Shape(steps, topk, num_draft_tokens, self.config.context_len - 1)
            tree = dense_tree(dense, text, shape, topk).tree
        return _drafts(tree.tokens.tolist(), tree.parents[0].tolist())


class Matcher:
    """The suite's grammar, as the executor asks for one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output: list[int] = []

    def advance(self, tokens: np.ndarray) -> None:
        self._output += tokens.tolist()

    def allowed(self, path: list[int]) -> np.ndarray:
        return np.packbits(is_allowed([*self._output, *path], self._vocab_size), bitorder="little")


def _drafts(tokens: list[int], parents: list[int]) -> Drafts:
    return {tuple(path) for path in paths_of(tokens, parents) if path}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a target has: experts in its second layer; a recurrent first layer, whose state no prefix cache has; a
    first layer that sees a window, with heads and a rotation of its own."""

    mixture: bool = False
    is_recurrent: bool = False
    windows: bool = False


PLAIN = Kind()


@cache
def target_model(vocab_size: int, kind: Kind = PLAIN, context: float = CONTEXT) -> Decoder:
    """Return the target that all executors of a configuration share."""
    return _fresh_target(vocab_size, kind, context)


def context_of(algorithm: str) -> float:
    return LONG_CONTEXT if get_algorithm(algorithm).drafter is Drafter.MODEL else CONTEXT


def _fresh_target(vocab_size: int, kind: Kind, context: float) -> Decoder:
    target = _sharpened(Decoder(_config(vocab_size, HIDDEN, 2, kind), OPS, "cpu", torch.float32), 0)
    with torch.no_grad():
        target.embed_weight *= TOKEN
    _weigh_layers(target, context)
    return target


@cache
def draft_model(algorithm: str, vocab_size: int, kind: Kind = PLAIN) -> DraftModel | None:
    """Return what the algorithm drafts with: None, a small language model, or a head on the target."""
    drafter, form = get_algorithm(algorithm).drafter, get_algorithm(algorithm).draft_form
    if drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    if drafter is Drafter.MODEL:
        # An executor that packed the shared one has dropped its plain weights.
        return _near(_fresh_target(vocab_size, kind, LONG_CONTEXT))
    config = HeadConfig(
        algorithm=form,
        model=_config(vocab_size, HIDDEN, 1),
        target_hidden_size=HIDDEN,
        draft_vocab_size=vocab_size,
        aux_layers=(0, 1, 2) if form == EAGLE3 else (),
        num_heads=NUM_HEADS if form == MULTI_LAYER_EAGLE else 1,
        network=network_of(get_algorithm(algorithm)),
    )
    head = _sharpened(new_head(config, target_model(vocab_size, kind)), 2)
    if form == EAGLE3:
        head.set_vocabulary(torch.arange(vocab_size))
    else:
        _pass_tokens_on(head)
    return head


def _pass_tokens_on(head: Any) -> None:
    """Let what fuses token and hidden state pass on the token, and a little of the state."""
    _weigh_layers(head, CONTEXT)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if name.endswith("fc_weight"):
                weight *= CONTEXT
                weight[:, :HIDDEN] = torch.eye(HIDDEN)


def _weigh_layers(model: Any, context: float) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("output_weight", "down_weight")):
                weight *= context


def _near(target: Decoder) -> Decoder:
    """Make a draft that agrees with the target more often than not."""
    draft = Decoder(target.config, OPS, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs * (1 + NOISE * torch.randn(theirs.shape, generator=generator)))
    return draft


def _config(vocab_size: int, hidden_size: int, num_layers: int, kind: Kind = PLAIN) -> ModelConfig:
    experts = MoeConfig(num_experts=16, top_k=2, intermediate_size=12, decoder_sparse_step=2) if kind.mixture else None
    return ModelConfig(
        architecture=QWEN3_NEXT if kind.is_recurrent else QWEN3_MOE if kind.mixture else LLAMA,
        state=STATE if kind.is_recurrent else None,
        recurrent_layers=(0,) if kind.is_recurrent else (),
        output_gate=kind.is_recurrent,
        **WINDOWS if kind.windows else {},
        moe=experts,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=CONTEXT_LEN,
    )


def _sharpened(model: Any, seed: int) -> Any:
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= SHARPNESS
    return model


make = CheckedExecutor
