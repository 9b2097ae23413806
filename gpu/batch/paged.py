"""Attention of one forward pass over the paged pools, of whichever kind its batch is (`ops.port`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..models.attention import PLAIN, Softmax
from ..ops.port import AttentionBatch, DecodeBatch, Ops, VerifyBatch
from .pools import KVPool


@dataclass(slots=True)
class PagedAttention:
    """Writes the KV of n new tokens while it rotates them, then attends."""

    ops: Ops
    pool: KVPool
    batch: AttentionBatch
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """See `Attention`."""
        ops, batch, kv = self.ops, self.batch, self.pool.layers[layer]
        q, k = ops.rope_write(q, k, v, cos_sin, self.positions, self.slots, kv)
        if isinstance(batch, DecodeBatch):
            return ops.decode_attention(q, kv, batch, softmax)
        if isinstance(batch, VerifyBatch):
            return ops.verify_attention(q, k, v, kv, batch, softmax)
        return ops.extend_attention(q, k, v, kv, batch, softmax)
