"""Attention without a KV pool: whole sequences at once, differentiable. For training, and to compare the paged form with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.attention import PLAIN, Softmax


class DenseAttention:
    """Causal attention inside each of several sequences that lie one after another in the batch.

    `lengths` are the sequences' tokens; `positions` int64 [n] their rotary positions, counted from 0 in each sequence if None.
    Sequences of one length share a batched pass; others are kept apart by a mask [n, n].
    """

    def __init__(
        self, lengths: Sequence[int], positions: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        assert len(lengths) > 0 and min(lengths) > 0, lengths
        self._shape = (len(lengths), lengths[0])
        self._mask: Tensor | None = None
        if positions is None:
            positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        self._positions = positions
        self._table: Tensor | None = None  # the table that the rows below were taken from
        self._rows = positions
        if len(set(lengths)) > 1:
            n = sum(lengths)
            self._shape = (1, n)
            owner = torch.repeat_interleave(torch.tensor(lengths, device=device))
            order = torch.arange(n, device=device)
            self._mask = (owner[:, None] == owner) & (order[:, None] >= order)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """See `Attention`."""
        if self._table is not cos_sin:
            self._table, self._rows = cos_sin, cos_sin[self._positions].to(q.dtype)
        b, t = self._shape
        q, k, v = (x.unflatten(0, (b, t)).transpose(1, 2) for x in (rotate(q, self._rows), rotate(k, self._rows), v))
        if softmax is not PLAIN:
            return self._written_out(q, k, v, softmax)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
        """Return the attention of q, k, v [b, heads, t, d] with any softmax, [b · t, Hq, d]."""
        heads, t = q.shape[1:3]
        order = torch.arange(t, device=q.device)
        distance = order[:, None] - order
        visible = (distance >= 0) & (distance < (softmax.window or t))
        if self._mask is not None:
            visible = visible & self._mask
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        bias = torch.where(visible, 0.0, -torch.inf).to(q.dtype)
        sinks = None if softmax.sinks is None else softmax.sinks.view(-1, 1, 1)
        out = softmax.weights(q @ k.transpose(2, 3) * softmax.scale_of(q), bias, sinks) @ v
        return out.transpose(1, 2).flatten(0, 1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [n, heads, d] at the positions of cos_sin [n, d], halves rotated against each other (arXiv 2104.09864, eq. 34)."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
