"""KV pools on a device: keys and values of every layer, addressed by the engine's slots."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..models.attention import PLAIN, Softmax
from ..ops.port import AttentionBatch, DecodeBatch, KVTensors, Ops, VerifyBatch


class KVPool:
    """Keys and values of one model, [layers, slots, Hk, d] each. Slot 0 (page 0) is the sink that padding writes to."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        # Indexing a tensor costs as much as a small kernel, so each layer's view is made once.
        self.layers: tuple[KVTensors, ...] = tuple(map(KVTensors, self.keys, self.values))
        self.all_layers = KVTensors(self.keys, self.values)

    @cached_property
    def on_host(self) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
        """The layers' memory as arrays; None on a GPU, and for dtypes that NumPy lacks."""
        if self.keys.device.type != "cpu" or self.keys.dtype not in (torch.float32, torch.float64):
            return None
        return tuple((keys.numpy(), values.numpy()) for keys, values in self.layers)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return bytes that one token's keys and values take."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


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
