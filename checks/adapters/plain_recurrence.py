"""Recurrent layers as their rule is written: one text, one token after the other, without a pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...gpu.ops.delta_rule import L2_EPS, Inputs, StateShape
from ...gpu.tiny.dense import DenseAttention


class PlainRecurrence(DenseAttention):
    """Dense attention over one text of `length` tokens. `states` are the layers' behind it."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.states: list[Tensor] = []  # per recurrent layer, see `flat_state`

    def recur(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """See `Attention`."""
        mixed, size = inputs.mixed, shape.key_heads * shape.key_dim
        padded = torch.cat((mixed.new_zeros(shape.kernel - 1, mixed.shape[1]), mixed))
        convolved = F.silu((padded.unfold(0, shape.kernel, 1) * kernel).sum(-1))
        q, k, v = convolved.split_with_sizes((size, size, shape.heads * shape.value_dim), 1)
        q, k = (_by_heads(x, shape) for x in (q, k))
        v = v.unflatten(1, (shape.heads, shape.value_dim))
        state = mixed.new_zeros(shape.heads, shape.key_dim, shape.value_dim)
        outputs: list[Tensor] = []
        for i, (decay, beta) in enumerate(zip(inputs.log_decay.exp(), inputs.beta, strict=True)):
            state = state * decay.view(-1, 1, 1)
            update = (v[i] - (k[i].unsqueeze(1) @ state).squeeze(1)) * beta.unsqueeze(1)
            state = state + k[i].unsqueeze(2) * update.unsqueeze(1)
            outputs.append((q[i].unsqueeze(1) @ state).squeeze(1))
        self.states.append(flat_state(state, padded[len(mixed) :]))
        scaled: Tensor = torch.stack(outputs) * shape.key_dim**-0.5
        return scaled


def flat_state(matrices: Tensor, inputs: Tensor) -> Tensor:
    """Return what a layer keeps of a request as one vector: states [H, Dk, Dv] and inputs [K − 1, C]."""
    return torch.cat((matrices.flatten(), inputs.flatten()))


def _by_heads(x: Tensor, shape: StateShape) -> Tensor:
    """Return queries or keys [n, Hk · Dk] of length 1 for each head, [n, H, Dk]."""
    x = x.unflatten(1, (shape.key_heads, shape.key_dim))
    x = x / (x.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
    return x.repeat_interleave(shape.heads // shape.key_heads, 1)
