"""KV pools on a device: keys and values of every layer, addressed by the engine's slots."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from ..ops.port import KVTensors


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
