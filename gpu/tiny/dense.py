"""Attention without a KV pool: whole sequences at once, differentiable.
For training, and to compare the paged form with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.states import ChunkStates, StatePool
from ..kernels.layers.delta_rule import recur_torch
from ..types.attention import PLAIN, Softmax
from ..types.recurrence import RecurrentWeights, StateShape


class DenseAttention:
    """Causal attention inside each of several sequences that lie one after another in the batch.

    `lengths` are the sequences' tokens; `positions` int64 [n] their rotary positions, counted from 0 in each sequence
    if None. Sequences of one length share a batched pass; others are kept apart by a mask [n, n]. `kept`: the numbers
    that keys and values are rounded to before queries read them; None: they stay as they are.
    """

    in_round = False

    def __init__(
        self,
        lengths: Sequence[int],
        positions: Tensor | None = None,
        device: torch.device | str = "cpu",
        kept: torch.dtype | None = None,
    ) -> None:
        assert len(lengths) > 0 and min(lengths) > 0, lengths
        self._shape, self._lengths, self._kept = (len(lengths), lengths[0]), tuple(lengths), kept
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
        q = softmax.scaled(q, self._positions)
        q, k = rotate(q, self._rows), rotate(k, self._rows)
        if self._kept is not None:
            k, v = (x.to(self._kept).to(x.dtype) for x in (k, v))
        q, k, v = (x.unflatten(0, (b, t)).transpose(1, 2) for x in (q, k, v if v.shape[-1] else k))
        if softmax is not PLAIN:
            return self._written_out(q, k, v, softmax)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """See `Attention`."""
        device, count = projected.device, len(self._lengths)
        pool = StatePool([shape], count, projected.dtype, device)
        lens = torch.tensor(self._lengths, device=device)
        starts = torch.cat((lens.new_zeros(1), lens.cumsum(0)))
        rows = torch.arange(1, count + 1, device=device)
        chunks = ChunkStates(pool, rows, torch.zeros_like(rows), starts, lens, max(self._lengths))
        return recur_torch(chunks, 0, projected, weights, shape)

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


class UnrolledAttention:
    """The attention of a draft head that is trained on its own outputs, EAGLE-3's training-time test: one layer, each
    call the next step.

    `batch_size` sequences have `length` slots each. When a head drafts, step s at slot m takes the head's own output at
    slot m − 1. The slots before the draft hold what the head computed from the target's hidden states. So the query of
    (step s, slot m) sees

        slots 0 … m − s of step 0 · slot m − s + 1 of step 1 · … · slot m of step s

    which is one triangle and one diagonal per step (Li et al., arXiv 2503.01840, section 3.2 and figure 6).
    """

    in_round = False

    def __init__(self, batch_size: int, length: int) -> None:
        self._shape = (batch_size, length)
        self._keys: list[Tensor] = []  # per step [b, Hk, t, d], rotated
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Attend: tokens are sequence after sequence, b · t in all; see `Attention`."""
        assert softmax is PLAIN, "a head that is trained has plain attention"
        assert layer == 0, f"a head of one layer asks for layer {layer}"
        b, t = self._shape
        rows = cos_sin[:t].to(q.dtype).repeat(b, 1)
        q, k, v = (x.unflatten(0, (b, t)).transpose(1, 2) for x in (rotate(q, rows), rotate(k, rows), v))
        self._keys.append(k)
        self._values.append(v)
        step = len(self._keys) - 1
        if step == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        else:
            out = self._attend_unrolled(q, step)
        return out.transpose(1, 2).flatten(0, 1)

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """Refuse: what is trained has no recurrent layers."""
        raise AssertionError("a head that is trained has no recurrent layers")

    def _attend_unrolled(self, q: Tensor, step: int) -> Tensor:
        b, num_heads, t, d = q.shape
        num_kv_heads = self._keys[0].shape[1]
        q = q.reshape(b, num_kv_heads, num_heads // num_kv_heads, t, d) * d**-0.5
        slots = torch.arange(t, device=q.device)
        triangle = (q @ self._keys[0].unsqueeze(2).transpose(-1, -2)).masked_fill(
            slots[None, :] > slots[:, None] - step, -torch.inf
        )
        scores = [triangle]
        for r in range(1, step + 1):
            diagonal = (q * shifted(self._keys[r], step - r).unsqueeze(2)).sum(-1)
            scores.append(diagonal.masked_fill(slots < step - r, -torch.inf)[..., None])
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :t] @ self._values[0].unsqueeze(2)
        for r in range(1, step + 1):
            out = out + weights[..., t + r - 1, None] * shifted(self._values[r], step - r).unsqueeze(2)
        return out.reshape(b, num_heads, t, d)


def shifted(x: Tensor, slots: int) -> Tensor:
    """Return x [..., t, d] moved `slots` later, zeros at the beginning."""
    if slots == 0:
        return x
    return F.pad(x[..., :-slots, :], (0, 0, slots, 0))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Return x [n, heads, d] at the positions of cos_sin [n, d], halves rotated against each other (arXiv
    2104.09864, eq. 34)."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class BlockAttention:
    """The attention of a block drafter over whole sequences: `batch_size` of `length` tokens each, whose context
    `keep` takes, and the same number of blocks of `places` places in each.

    `anchors` int64 [b, A]: the position of each block's first place, which sees the context before it.
    `is_causal` says which layers see of a block only what stands before a place.
    """

    in_round = False

    def __init__(self, anchors: Tensor, length: int, places: int, is_causal: Callable[[int], bool]) -> None:
        self._anchors, self._length, self._places, self._is_causal = anchors, length, places, is_causal
        self._context: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys, rotated, and values [b, Hk, t, d]

    def keep(self, layer: int, k: Tensor, v: Tensor, cos_sin: Tensor) -> None:
        """See `ContextAttention`; k and v [b · t, Hk, d]."""
        b, t = len(self._anchors), self._length
        k = rotate(k, cos_sin[:t].to(k.dtype).repeat(b, 1))
        self._context[layer] = k.unflatten(0, (b, t)).transpose(1, 2), v.unflatten(0, (b, t)).transpose(1, 2)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Attend: blocks stand one after another, b · A · n places in all; see `Attention`."""
        b, blocks, n = *self._anchors.shape, self._places
        order, device = torch.arange(n, device=q.device), q.device
        positions = self._anchors.unsqueeze(-1) + order
        rows = cos_sin[positions.flatten().clamp(max=len(cos_sin) - 1)].to(q.dtype)
        group, causal = q.shape[1] // k.shape[1], self._is_causal(layer)
        q, k = rotate(q, rows) * softmax.scale_of(q), rotate(k, rows)
        q, k, v = (x.unflatten(0, (b, blocks, n)).transpose(2, 3) for x in (q, k, v))  # [b, A, heads, n, d]
        q = q.unflatten(2, (-1, group))
        keys, values = (x[:, None, :, None] for x in self._context[layer])
        before = torch.arange(self._length, device=device) < self._anchors.unsqueeze(-1)
        before = before.unsqueeze(2).expand(-1, -1, n, -1)
        if softmax.window:
            first = (positions if causal else self._anchors.unsqueeze(-1).expand(-1, -1, n)) - softmax.window
            before = before & (torch.arange(self._length, device=device) > first.unsqueeze(-1))
        scores = (q @ keys.transpose(-1, -2)).masked_fill(~before[:, :, None, None], -torch.inf)
        own = q @ k.unsqueeze(3).transpose(-1, -2)
        if causal:
            own = own.masked_fill(order > order[:, None], -torch.inf)
            if softmax.window:
                own = own.masked_fill(order <= order[:, None] - softmax.window, -torch.inf)
        weights = torch.cat((scores, own), -1).softmax(-1)
        out = weights[..., : self._length] @ values + weights[..., self._length :] @ v.unsqueeze(3)
        return out.flatten(2, 3).transpose(2, 3).flatten(0, 2)

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """Refuse: block drafters have no recurrent layers."""
        raise AssertionError("a block drafter has no recurrent layers")
