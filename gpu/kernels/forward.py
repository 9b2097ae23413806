"""The forward pass's half of the port `Ops`, in plain torch and in Triton."""

from __future__ import annotations

from torch import Tensor

from ..ops import KVView
from .decode_attention import decode_attention_torch, decode_keys
from .extend_attention import extend_attention_torch, extend_keys
from .padded import LastValue
from .rms_norm import add_rms_norm_torch, rms_norm_torch
from .rope_write import rope_write_torch
from .silu_mul import silu_mul_torch
from .verify_attention import verify_attention_torch, verify_keys


class TorchForward:
    """Norms, rotation, and attention with the torch twins.

    What the attention of a batch reads, slots and masks, is made once per forward pass and kept for its other layers; it is made anew
    as soon as one of the index tensors is another one or has been written by torch (writes through NumPy's view of one go unseen).
    """

    def __init__(self) -> None:
        super().__init__()
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return rope_write_torch(q, k, v, cos_sin, positions, slots, k_pool, v_pool)

    def decode_attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, view: KVView, scale: float
    ) -> Tensor:
        keys = self._decode_keys.of(
            decode_keys, (table, view.rows, view.bases, view.tails, view.lens), (view.max_len, q.dtype)
        )
        return decode_attention_torch(q, k_pool, v_pool, keys, scale)

    def verify_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        table: Tensor,
        rows: Tensor,
        prefix_lens: Tensor,
        max_prefix_len: int,
        ancestor_bits: Tensor,
        scale: float,
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys = self._verify_keys.of(
            verify_keys, (table, rows, prefix_lens, ancestor_bits), (max_prefix_len, group, q.dtype)
        )
        return verify_attention_torch(q, k, v, k_pool, v_pool, keys, scale)

    def extend_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        table: Tensor,
        rows: Tensor,
        prefix_lens: Tensor,
        starts: Tensor,
        max_prefix_len: int,
        max_new_len: int,
        scale: float,
    ) -> Tensor:
        keys = self._extend_keys.of(
            extend_keys, (table, rows, prefix_lens, starts), (max_prefix_len, max_new_len, q.shape[0], q.dtype)
        )
        return extend_attention_torch(q, k, v, k_pool, v_pool, rows.shape[0], keys, scale)


class TritonForward(TorchForward):
    """Norms, rotation, and attention with the Triton kernels."""
