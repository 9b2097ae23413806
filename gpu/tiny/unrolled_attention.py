"""The attention of a draft head that is trained on its own outputs: EAGLE-3's training-time test, over whole sequences at once.

When a head drafts, step s at slot m takes the head's own output at slot m − 1, and the slots before the draft hold what the head
computed from the target's hidden states. So the query of (step s, slot m) sees

    slots 0 … m − s of step 0 · slot m − s + 1 of step 1 · … · slot m of step s

which is one triangle and one diagonal per step (Li et al., arXiv 2503.01840, section 3.2 and figure 6).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.attention import PLAIN, Softmax
from .dense import rotate


class UnrolledAttention:
    """An `Attention` of one layer over `batch_size` sequences of `length` slots; each call is the next step."""

    def __init__(self, batch_size: int, length: int) -> None:
        self._shape = (batch_size, length)
        self._keys: list[Tensor] = []  # per step [b, Hk, t, d], rotated
        self._values: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Tokens are sequence after sequence, b · t in all; see `Attention`."""
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
    """x [..., t, d] moved `slots` later, zeros at the beginning."""
    if slots == 0:
        return x
    return F.pad(x[..., :-slots, :], (0, 0, slots, 0))
