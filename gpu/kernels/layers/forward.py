"""The forward pass's half of the port `Ops`, in plain torch and in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.port import DecodeBatch, ExtendBatch, KVTensors, VerifyBatch
from ..padded import LastValue
from .decode_attention import decode_attention_torch, decode_attention_triton, decode_keys
from .extend_attention import extend_attention_torch, extend_attention_triton, extend_keys
from .rms_norm import add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from .rope_write import rope_write_torch, rope_write_triton, rotation_of
from .silu_mul import silu_mul_torch, silu_mul_triton
from .verify_attention import verify_attention_torch, verify_attention_triton, verify_keys


class TorchForward:
    """Norms, rotation, and attention with the torch twins.

    What the attention of a batch reads, slots and masks, and its rotation are made once per forward pass and kept for its other layers;
    they are made anew as soon as one of the index tensors is another one or has been written by torch (writes through NumPy's view of
    one go unseen).
    """

    def __init__(self) -> None:
        super().__init__()
        self._rotation = LastValue()
        self._decode_keys = LastValue()
        self._verify_keys = LastValue()
        self._extend_keys = LastValue()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_torch(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_torch(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul_torch(gate_up)

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        rotation = self._rotation.of(rotation_of, (cos_sin, positions), ())
        return rope_write_torch(q, k, v, rotation, slots, *kv)

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.bases, batch.tails, batch.lens)
        keys = self._decode_keys.of(decode_keys, tensors, (batch.max_len, q.dtype))
        return decode_attention_torch(q, *kv, keys, _scale(q))

    def verify_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.ancestor_bits)
        group = q.shape[1] // k.shape[1]
        keys = self._verify_keys.of(verify_keys, tensors, (batch.max_prefix_len, group, q.dtype))
        return verify_attention_torch(q, k, v, *kv, keys, _scale(q))

    def extend_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch) -> Tensor:
        tensors = (batch.table, batch.rows, batch.prefix_lens, batch.starts)
        options = (batch.max_prefix_len, batch.max_new_len, q.shape[0], q.dtype)
        keys = self._extend_keys.of(extend_keys, tensors, options)
        return extend_attention_torch(q, k, v, *kv, batch.rows.shape[0], keys, _scale(q))


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class TritonForward:
    """Norms, rotation, and attention as Triton kernels; where a gradient is wanted, norms and gate are the differentiable twins."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = rms_norm_torch if _needs_gradient(x, weight) else rms_norm_triton
        return norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        norm = add_rms_norm_torch if _needs_gradient(x, residual, weight) else add_rms_norm_triton
        return norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul_torch(gate_up) if _needs_gradient(gate_up) else silu_mul_triton(gate_up)

    def rope_write(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, kv: KVTensors
    ) -> tuple[Tensor, Tensor]:
        return rope_write_triton(q, k, v, cos_sin, positions, slots, *kv)

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch) -> Tensor:
        return decode_attention_triton(q, *kv, batch, _scale(q))

    def verify_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch) -> Tensor:
        return verify_attention_triton(q, k, v, *kv, batch, _scale(q))

    def extend_attention(self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch) -> Tensor:
        return extend_attention_triton(q, k, v, *kv, batch, _scale(q))
