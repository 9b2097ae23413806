"""A slow attention that remembers: dense keys and values of one sequence, appended call by call, softmax written out."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gpu.tiny.dense import rotate


class CachedAttention:
    """One sequence. Each forward pass brings the tokens that follow those of the passes before."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        seen = len(self._keys[layer]) if layer in self._keys else 0
        rows = cos_sin[seen : seen + len(q)].to(q.dtype)
        q, k = rotate(q, rows), rotate(k, rows)
        if seen:
            k, v = torch.cat([self._keys[layer], k]), torch.cat([self._values[layer], v])
        self._keys[layer], self._values[layer] = k, v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        visible = torch.arange(len(k)) <= torch.arange(seen, len(k))[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(group, 1))
