"""The bytes that a round of decoding must read, which over the memory's bandwidth give its floor.

    round = target weights once + every draft pass's weights + each row's KV and recurrent states, once per pass of
            its model

Of a layer with a window only the KV inside it is read, although the pool keeps the whole row.

That bandwidth is measured, as bytes read plus bytes written per second of a big copy. A datasheet's figure is never
reached: every share of it would look smaller than the kernels can help.

Activations, logits and all writes are left out, because they are small beside these reads, and kernels could keep them
on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...core.algorithm.algorithm import Drafter
from ..batch.pools import bytes_per_slot
from ..executor.parts import DraftModel
from ..models.decoder import Decoder
from ..models.divided import sharded
from ..models.eagle import DraftHead, Eagle3Head, MultiLayerEagleHeads
from ..models.heads.block import BlockHead
from .clock import Clock


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """The bytes that rounds of one shape read."""

    weights: int  # per round, target and draft
    kv: tuple[tuple[int, int], ...]  # (window, bytes): per round and token in a row's KV, of which window 0 reads all
    states: int = 0  # per round and row, of recurrent layers

    def total(self, kv_lens: np.ndarray) -> int:
        """Return the bytes of rounds in which rows had KV of these lengths, int [rounds, bs]."""
        seen = [(np.minimum(kv_lens, window) if window else kv_lens, size) for window, size in self.kv]
        of_rows = kv_lens.size * self.states + sum(int(lens.sum()) * size for lens, size in seen)
        return len(kv_lens) * self.weights + of_rows


def round_bytes(
    target: Decoder,
    draft: DraftModel | None,
    drafter: Drafter,
    steps: int,
    verified_tokens: int,
    in_one_pass: bool = False,
) -> RoundBytes:
    """Return the bytes that a round must read. `verified_tokens`, the nodes of the whole batch, decide how many
    experts are read. `in_one_pass`: the pass that catches up drafts, too."""
    weights = decoder_pass_bytes(target, verified_tokens)
    kv, states = decoder_kv_bytes(target), state_bytes(target)
    if draft is None or steps == 0 or drafter in (Drafter.NONE, Drafter.LOOKUP):
        return RoundBytes(weights, kv, states)
    if in_one_pass:
        steps = 1
    # S − 1 passes propose, one catches up.
    if isinstance(draft, Decoder):
        of_draft = tuple((window, steps * size) for window, size in decoder_kv_bytes(draft))
        states += steps * state_bytes(draft)
        return RoundBytes(weights + steps * decoder_pass_bytes(draft, verified_tokens), kv + of_draft, states)
    slot = bytes_per_slot(draft.kv_shapes, target.kv_dtype)
    if isinstance(draft, MultiLayerEagleHeads):
        # All heads run once, in the catch-up; each brings its own layer of the pool.
        return RoundBytes(weights + head_pass_bytes(draft, target), (*kv, (0, slot)), states)
    if isinstance(draft, BlockHead):  # one pass proposes; the catch-up makes KV, with weights of that pass
        return RoundBytes(weights + head_pass_bytes(draft, target), (*kv, (0, slot)), states)
    fusion = draft.fc_weight.nbytes if isinstance(draft, Eagle3Head) else 0  # in the catch-up only
    a_pass = head_pass_bytes(draft, target) - fusion
    return RoundBytes(weights + steps * a_pass + fusion, (*kv, (0, steps * slot)), states)


def state_bytes(model: Decoder) -> int:
    """Return the bytes of the recurrent states of one request, which a pass reads."""
    return sum(shape.num_bytes(model.dtype) for shape in model.state_shapes)


def decoder_kv_bytes(model: Decoder) -> tuple[tuple[int, int], ...]:
    """Return (window, bytes of a token's KV) of a model's layers with and without a window; window 0:
    they see all tokens."""
    read = [0, 0]
    for layer, shape in enumerate(model.kv_shapes):
        read[layer in model.config.windowed_layers] += shape.elements * model.kv_dtype.itemsize
    return (0, read[0]), (model.config.window, read[1])


def decoder_pass_bytes(model: Decoder, num_tokens: int) -> int:
    """Return the bytes of weights that a pass over `num_tokens` tokens reads;
    an input embedding's few rows do not count."""
    total = model.weight_bytes
    if model.lm_head_weight is not None:
        total -= model.embed_weight.nbytes
    moe = sharded(model.config, model.shard).moe
    if moe is not None:
        products = (one for module in model.modules() for one in getattr(module, "expert_projections", ()))
        experts = sum(one.nbytes for one in products)
        # Tokens choose k of E experts; with even routing an expert is missed by all of them with this probability.
        missed = (1 - moe.top_k / moe.num_experts) ** num_tokens
        total -= int(missed * experts)
    return total


def head_pass_bytes(head: DraftHead, target: Decoder) -> int:
    """Return the bytes of weights that a pass of a head reads, its LM head included;
    for one head per step, of all heads."""
    total = head.weight_bytes
    if head.embed_weight is not None:
        total -= head.embed_weight.nbytes
    lm_head = (target if head.lm_head_weight is None else head).projections[0]
    outputs = head.num_heads if isinstance(head, MultiLayerEagleHeads) else 1
    return total + (outputs if head.lm_head_weight is None else outputs - 1) * lm_head.nbytes


GPU_BYTES = 1 << 30
CPU_BYTES = 1 << 28  # several times the caches
COPIES = 9


def copy_bandwidth(device: torch.device | str, num_bytes: int | None = None) -> float:
    """Return bytes per second, reads and writes together;
    the median of a few copies of `num_bytes` (default: far beyond any cache).

    A copy is no cell of a plan: it has no arm that could be compared in turns, and a GPU times it by events, without
    its launch."""
    device = torch.device(device)
    size = num_bytes or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES + 1):
        seconds.append(_timed_copy(source, target))
    return 2 * source.nbytes / sorted(seconds[1:])[COPIES // 2]


def _timed_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type != "cuda":
        begin_ns = Clock.read_ns()
        target.copy_(source)
        return (Clock.read_ns() - begin_ns) / 1e9
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    target.copy_(source)
    end_event.record()
    end_event.synchronize()
    seconds: float = begin_event.elapsed_time(end_event) / 1e3
    return seconds
