"""The device operations in plain torch. A CPU uses them for batches and prompts, and the tests compare the Triton
kernels with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from ..kernels.layers.decode_attention import decode_attention_torch, decode_keys
from ..kernels.layers.delta_rule import recur_torch
from ..kernels.layers.experts import combine_torch, route_torch
from ..kernels.layers.extend_attention import extend_attention_torch, extend_keys
from ..kernels.layers.products import coded_product_torch, expert_product_torch
from ..kernels.layers.rms_norm import add_rms_norm_torch, rms_norm_torch
from ..kernels.layers.rope_write import rope_write_torch, rotation_of
from ..kernels.layers.silu_mul import gelu_mul_torch, sigmoid_mul_torch, silu_mul_torch
from ..kernels.layers.verify_attention import verify_attention_torch, verify_keys
from ..kernels.padded import LastValue
from ..kernels.rounds.best import best_drafts_torch, best_tokens_torch
from ..kernels.rounds.bonus import gather_emitted_torch
from ..kernels.rounds.build_tree import build_chain_torch, build_tree_torch
from ..kernels.rounds.coins import coins_torch
from ..kernels.rounds.compact import compact_torch
from ..kernels.rounds.duplicate_tails import duplicate_tails_torch_
from ..kernels.rounds.move_kv import move_accepted_torch_, move_slots_torch_
from ..kernels.rounds.relay import relay_gather_torch, relay_scatter_torch_
from ..kernels.rounds.shape_logits import count_tokens_torch_, shape_logits_torch
from ..kernels.rounds.target_probs import target_probs_torch
from ..kernels.rounds.verify_chains import verify_chains_torch
from ..kernels.rounds.verify_greedy import verify_greedy_torch
from ..kernels.rounds.verify_sampling import verify_sampling_torch
from ..kernels.rounds.window import window_torch
from ..models.layer import run_layers
from ..types.attention import PLAIN, UNSCALED, KVScales, Softmax
from ..types.ops import DecodeBatch, ExtendBatch, KVTensors, VerifyBatch


class TorchOps:
    """`Ops` with the kernels' torch twins, in any floating dtype, float64 included.

    The slots, masks and rotations that a batch's attention reads are computed once per forward pass and kept for its
    other layers. They are computed again when an index tensor is another one, or when torch has written to it. A write
    through NumPy's view of a tensor is not noticed.
    """

    run_layers = staticmethod(run_layers)
    rms_norm = staticmethod(rms_norm_torch)
    add_rms_norm = staticmethod(add_rms_norm_torch)
    silu_mul: Callable[[Tensor], Tensor] = staticmethod(silu_mul_torch)
    gelu_mul: Callable[[Tensor], Tensor] = staticmethod(gelu_mul_torch)
    sigmoid_mul: Callable[..., Tensor] = staticmethod(sigmoid_mul_torch)
    coded_product = staticmethod(coded_product_torch)
    expert_product = staticmethod(expert_product_torch)
    route = staticmethod(route_torch)
    combine = staticmethod(combine_torch)
    recur = staticmethod(recur_torch)
    build_chain = staticmethod(build_chain_torch)
    build_tree = staticmethod(build_tree_torch)
    window: Callable[..., tuple[Tensor, Tensor]] = staticmethod(window_torch)
    best_tokens: Callable[[Tensor], Tensor] = staticmethod(best_tokens_torch)
    best_drafts: Callable[..., Tensor] = staticmethod(best_drafts_torch)
    target_probs = staticmethod(target_probs_torch)
    verify_greedy = staticmethod(verify_greedy_torch)
    verify_sampling = staticmethod(verify_sampling_torch)
    verify_chains = staticmethod(verify_chains_torch)
    coins = staticmethod(coins_torch)
    shape_logits = staticmethod(shape_logits_torch)
    count_tokens_ = staticmethod(count_tokens_torch_)
    gather_emitted = staticmethod(gather_emitted_torch)
    compact = staticmethod(compact_torch)
    move_accepted_ = staticmethod(move_accepted_torch_)
    move_slots_ = staticmethod(move_slots_torch_)
    duplicate_tails_ = staticmethod(duplicate_tails_torch_)
    relay_gather = staticmethod(relay_gather_torch)
    relay_scatter_ = staticmethod(relay_scatter_torch_)

    def __init__(self) -> None:
        # By table and by window: the layers of one pass may take turns with two of each.
        self._rotations: dict[int, LastValue] = defaultdict(LastValue)
        self._decode_keys: dict[int, LastValue] = defaultdict(LastValue)
        self._verify_keys: dict[int, LastValue] = defaultdict(LastValue)
        self._extend_keys: dict[int, LastValue] = defaultdict(LastValue)

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVTensors,
        scales: KVScales = UNSCALED,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotation = self._rotations[cos_sin.data_ptr()].of(rotation_of, (cos_sin, positions), ())
        return rope_write_torch(q, k, v, rotation, slots, *kv, scales)

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch, softmax: Softmax = PLAIN) -> Tensor:
        tensors = (batch.table, batch.rows, batch.bases, batch.tails, batch.lens)
        window = softmax.window_within(batch.max_len)
        keys = self._decode_keys[window].of(decode_keys, tensors, (batch.max_len, window, q.dtype))
        return decode_attention_torch(q, *kv.with_values(), keys, softmax)

    def verify_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        packing = batch.packing
        if packing is not None:
            q, k, v = map(packing.spread, (q, k, v))
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.ancestor_bits)
        group = q.shape[1] // k.shape[1]
        window = softmax.window_within(batch.max_prefix_len + batch.ancestor_bits.shape[1])
        keys = self._verify_keys[window].of(verify_keys, tensors, (batch.max_prefix_len, group, window, q.dtype))
        out = verify_attention_torch(q, *KVTensors(k, v).with_values(), *kv.with_values(), keys, softmax)
        return out if packing is None else packing.pick(out)

    def extend_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.starts)
        window = softmax.window_within(batch.max_prefix_len + batch.max_new_len)
        options = (batch.max_prefix_len, batch.max_new_len, q.shape[0], window, q.dtype)
        keys = self._extend_keys[window].of(extend_keys, tensors, options)
        return extend_attention_torch(
            q, *KVTensors(k, v).with_values(), *kv.with_values(), batch.rows.shape[0], keys, softmax
        )
