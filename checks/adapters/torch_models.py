"""Models of the real executor behind the executor contract, with random weights and a few thousand parameters, and a
producer of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.registry import get_algorithm
from ...core.contract.step import Join
from ...core.model_shape import MoeConfig
from ...core.model_shape.block_heads import DFLASH2, DSPARK, USUAL_PARTS
from ...gpu.batch.pools import Chunks
from ...gpu.draft.port import RoundBatch
from ...gpu.executor.parts import DraftModel
from ...gpu.models.checkpoint import network_of, new_head
from ...gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig
from ...gpu.models.decoder import Decoder
from ...gpu.models.eagle import DraftHead
from ...gpu.models.heads.block_config import QWEN3
from ...gpu.models.heads.config import FUSING, MULTI_LAYER_EAGLE, HeadConfig
from ...gpu.models.rope import Rope
from ...gpu.models.weights import initialize
from ...gpu.ops.host_ops import HostOps
from ...gpu.types.ops import DeviceTree, Ops
from ...gpu.types.recurrence import StateShape

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
    "full_kv_heads": 1,
    "sinks": True,
}
SHARPNESS = 12.0  # a fresh model says nearly the same everywhere
TOKEN, CONTEXT = 4.0, 0.25  # what the last token and what layers add weigh, so that a head can often be right
LONG_CONTEXT, NOISE = 3.0, 0.01
"""Of a draft model and its target: any key or value that is not its own changes what it drafts."""
OPS: Ops = HostOps()
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class TargetKind:
    """What a target has: experts in its second layer; a recurrent first layer, whose state no prefix cache has; a
    first layer that sees a window, with heads and a rotation of its own."""

    mixture: bool = False
    is_recurrent: bool = False
    windows: bool = False
    head_dim: int = 4


PLAIN = TargetKind()


@cache
def target_model(vocab_size: int, kind: TargetKind = PLAIN, context: float = CONTEXT) -> Decoder:
    """Return the target that all executors of a configuration share."""
    return _fresh_target(vocab_size, kind, context)


def context_of(algorithm: str) -> float:
    return LONG_CONTEXT if get_algorithm(algorithm).drafter is Drafter.MODEL else CONTEXT


def _fresh_target(vocab_size: int, kind: TargetKind, context: float) -> Decoder:
    target = _sharpened(Decoder(_config(vocab_size, HIDDEN, 2, kind), OPS, "cpu", torch.float32), 0)
    with torch.no_grad():
        target.embed_weight.mul_(TOKEN)
    _weigh_layers(target, context)
    return target


@cache
def draft_model(algorithm: str, vocab_size: int, kind: TargetKind = PLAIN) -> DraftModel | None:
    """Return what the algorithm drafts with: None, a small language model, or a head on the target."""
    drafter, form = get_algorithm(algorithm).drafter, get_algorithm(algorithm).draft_form
    if drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    if drafter is Drafter.MODEL:
        # An executor that packed the shared one has dropped its plain weights.
        return _near(_fresh_target(vocab_size, kind, LONG_CONTEXT))
    if drafter is Drafter.BLOCK:
        return _block_head(form, vocab_size, kind)
    config = HeadConfig(
        algorithm=form,
        model=_config(vocab_size, HIDDEN, 1, TargetKind(head_dim=kind.head_dim)),
        target_hidden_size=HIDDEN,
        draft_vocab_size=vocab_size,
        aux_layers=(0, 1, 2) if form in FUSING else (),
        mask_token=vocab_size - 1,
        num_heads=NUM_HEADS if form == MULTI_LAYER_EAGLE else 1,
        network=network_of(get_algorithm(algorithm)),
    )
    head = _sharpened(new_head(config, target_model(vocab_size, kind)), 2)
    if form in FUSING:
        head.set_vocabulary(torch.arange(vocab_size))
    else:
        _pass_tokens_on(head)
    return head


def _block_head(form: str, vocab_size: int, kind: TargetKind) -> DraftHead:
    """Return a block drafter of one layer."""
    small = {"conv_group": 4, "selector_rank": 3, "selector_top_k": 5} if form == DFLASH2 else {}
    small |= {"markov_rank": 3} if form == DSPARK else {}
    parts = replace(USUAL_PARTS[form], block_size=NUM_HEADS + 1, mask_token=vocab_size - 1, **small)
    layers = replace(
        _config(vocab_size, HIDDEN, 1, TargetKind(head_dim=kind.head_dim)), architecture=QWEN3, qk_norm=True
    )
    config = HeadConfig(form, layers, HIDDEN, vocab_size, (1, 2), block=parts)
    return _sharpened(new_head(config, target_model(vocab_size, kind)), 2)


@cache
def models_on(
    device: str, ops: Ops, algorithm: str, vocab_size: int, kind: TargetKind
) -> tuple[Decoder, DraftModel | None]:
    """Return copies of the target and the draft on a device. Those on the CPU must not have been packed."""
    known = draft_model(algorithm, vocab_size, kind)
    target = _copied(target_model(vocab_size, kind, context_of(algorithm)), ops, device)
    if known is None or isinstance(known, Decoder):
        return target, known and _copied(known, ops, device)
    head = _with_weights(new_head(known.config, target), known)
    if known.target_ids is not None:
        head.set_vocabulary(known.target_ids)
    return target, head


def _copied(model: Decoder, ops: Ops, device: str) -> Decoder:
    return _with_weights(Decoder(model.config, ops, device, torch.float32), model)


def _with_weights(model: Model, other: nn.Module) -> Model:
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
    return model


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
    config = replace(target.config, mask_token=target.vocab_size - 1)
    draft = Decoder(config, OPS, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(theirs * (1 + NOISE * torch.randn(theirs.shape, generator=generator)))
    return draft


def _config(vocab_size: int, hidden_size: int, num_layers: int, kind: TargetKind = PLAIN) -> ModelConfig:
    experts = MoeConfig(num_experts=16, top_k=2, intermediate_size=12, decoder_sparse_step=2) if kind.mixture else None
    return ModelConfig(
        architecture=QWEN3_NEXT if kind.is_recurrent else QWEN3_MOE if kind.mixture else LLAMA,
        state=STATE if kind.is_recurrent else None,
        recurrent_layers=(0,) if kind.is_recurrent else (),
        output_gate=kind.is_recurrent,
        **{**WINDOWS, "full_head_dim": 2 * kind.head_dim} if kind.windows else {},
        moe=experts,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=kind.head_dim,
        max_position_embeddings=CONTEXT_LEN,
    )


def _sharpened(model: Model, seed: int) -> Model:
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SHARPNESS)
    return model


# -- an output of a producer -------------------------------------------------------------------------------------------

RUNNING_TEXT = "running_text"
TEXT_MODULUS = 1_000_003
"""A hash of all tokens so far, which goes on from node to node as a recurrent state does: a value at another token is a
wrong one."""


def _after(state: Any, token: Any) -> Any:
    """Return the value of a text that goes on with a token, of numbers or tensors."""
    return (state * 31 + token + 7) % TEXT_MODULUS


def hashes_of(text: Sequence[int]) -> np.ndarray:
    """Return the value after each token of a text, int64 [n]."""
    state, states = 0, []
    for token in text:
        state = _after(state, token)
        states.append(state)
    return np.array(states)


class RunningText:
    """Produce it for the rows of an executor."""

    def __init__(self, max_running: int) -> None:
        self.states = torch.zeros(max_running + 1, dtype=torch.int64)
        self.kept = 0

    def open_row(self, join: Join) -> None:
        tokens = join.cached_tokens.tolist()
        self.states[join.row] = int(hashes_of(tokens)[-1]) if tokens else 0

    def prompt(self, chunks: Chunks) -> Tensor:
        part = chunks.part
        tokens = iter(part.tokens.tolist())
        for row, length in zip(part.rows.tolist(), part.lens.tolist(), strict=True):
            for _ in range(length):
                self.states[row] = _after(self.states[row], next(tokens))
        return self.states[part.rows[chunks.last]].clone()

    def nodes(self, batch: RoundBatch, tree: DeviceTree) -> Tensor:
        states = torch.zeros_like(tree.tokens)
        rows = torch.arange(tree.batch_size)
        for node in range(tree.num_nodes):
            parents = tree.parents[:, node].long()
            before = self.states[batch.rows] if node == 0 else states[rows, parents.clamp(min=0)]
            states[:, node] = _after(before, tree.tokens[:, node])
        return states.view(-1)

    def keep(self, batch: RoundBatch, values: Tensor) -> None:
        self.states[batch.rows] = values
        self.kept += 1
