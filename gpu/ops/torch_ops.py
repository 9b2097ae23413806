"""The device operations in plain torch: what a CPU uses for batches and prompts, and what the Triton kernels are tested against."""

from __future__ import annotations

from torch import Tensor

from ..kernels.layers.decode_attention import decode_attention_torch, decode_keys
from ..kernels.layers.extend_attention import extend_attention_torch, extend_keys
from ..kernels.layers.rms_norm import add_rms_norm_torch, rms_norm_torch
from ..kernels.layers.rope_write import rope_write_torch, rotation_of
from ..kernels.layers.silu_mul import silu_mul_torch
from ..kernels.layers.verify_attention import verify_attention_torch, verify_keys
from ..kernels.padded import LastValue
from ..kernels.rounds.bonus import gather_emitted_torch
from ..kernels.rounds.build_tree import build_chain_torch, build_tree_torch
from ..kernels.rounds.coins import coins_torch
from ..kernels.rounds.compact import compact_torch
from ..kernels.rounds.duplicate_tails import duplicate_tails_torch_
from ..kernels.rounds.move_kv import move_accepted_torch_, move_slots_torch_
from ..kernels.rounds.relay import relay_gather_torch, relay_scatter_torch_
from ..kernels.rounds.verify_greedy import verify_greedy_torch
from ..kernels.rounds.verify_sampling import verify_sampling_torch
from ..models.layer import run_layers
from .port import DecodeBatch, ExtendBatch, KVTensors, VerifyBatch


class TorchOps:
    """`Ops` with the kernels' torch twins, in any floating dtype, float64 included.

    What the attention of a batch reads, slots and masks, and its rotation are made once per forward pass and kept for its other layers;
    they are made anew as soon as one of the index tensors is another one or has been written by torch (writes through NumPy's view of
    one go unseen).
    """

    run_layers = staticmethod(run_layers)
    rms_norm = staticmethod(rms_norm_torch)
    add_rms_norm = staticmethod(add_rms_norm_torch)
    silu_mul = staticmethod(silu_mul_torch)
    build_chain = staticmethod(build_chain_torch)
    build_tree = staticmethod(build_tree_torch)
    verify_greedy = staticmethod(verify_greedy_torch)
    verify_sampling = staticmethod(verify_sampling_torch)
    coins = staticmethod(coins_torch)
    gather_emitted = staticmethod(gather_emitted_torch)
    compact = staticmethod(compact_torch)
    move_accepted_ = staticmethod(move_accepted_torch_)
    move_slots_ = staticmethod(move_slots_torch_)
    duplicate_tails_ = staticmethod(duplicate_tails_torch_)
    relay_gather = staticmethod(relay_gather_torch)
    relay_scatter_ = staticmethod(relay_scatter_torch_)

    def __init__(self) -> None:
        self._rotation = LastValue()
        self._decode_keys = LastValue()
        self._verify_keys = LastValue()
        self._extend_keys = LastValue()

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        rotation = self._rotation.of(rotation_of, (cos_sin, positions), ())
        return rope_write_torch(q, k, v, rotation, slots, *kv)

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.bases, batch.tails, batch.lens)
        keys = self._decode_keys.of(decode_keys, tensors, (batch.max_len, q.dtype))
        return decode_attention_torch(q, *kv, keys, scale_of(q))

    def verify_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.ancestor_bits)
        group = q.shape[1] // k.shape[1]
        keys = self._verify_keys.of(verify_keys, tensors, (batch.max_prefix_len, group, q.dtype))
        return verify_attention_torch(q, k, v, *kv, keys, scale_of(q))

    def extend_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.starts)
        options = (batch.max_prefix_len, batch.max_new_len, q.shape[0], q.dtype)
        keys = self._extend_keys.of(extend_keys, tensors, options)
        return extend_attention_torch(q, k, v, *kv, batch.rows.shape[0], keys, scale_of(q))


def scale_of(q: Tensor) -> float:
    """Return the factor of attention scores, d^-½."""
    return q.shape[-1] ** -0.5
