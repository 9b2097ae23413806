"""What a recurrent layer keeps of a request, and what it makes of new tokens: the sizes and inputs of
`kernels.layers.delta_rule`.

B sequences of w new tokens each, heads H, channels C of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer keeps of a request, whatever the length of its text."""

    heads: int  # each with a state [key_dim, value_dim]
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # inputs that the convolution sees, at least 2

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one request in one layer of a model whose weights have `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        state = self.heads * self.key_dim * self.value_dim * wide.itemsize
        return state + self.channels * (self.kernel - 1) * dtype.itemsize

    def node_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that a round keeps of each node in one layer: see `Nodes`."""
        wide = torch.promote_types(dtype, torch.float32)
        kept = self.heads * (self.key_dim + self.value_dim + 1) * wide.itemsize
        return kept + self.channels * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a layer makes of new tokens before they meet a state: n tokens, or [B, w] of them."""

    mixed: Tensor  # […, C]: queries, keys and values before the convolution
    log_decay: Tensor  # […, H]: ln γ ≤ 0, 32 bits at least
    beta: Tensor  # […, H]: 0 … 1, 32 bits at least

    def at(self, places: Tensor) -> Inputs:
        """Return the tokens at int64 places [B, w] of n."""
        return Inputs(self.mixed[places], self.log_decay[places], self.beta[places])

    def unflattened(self, batch_size: int) -> Inputs:
        """Return n tokens as [B, n / B]."""
        shape = (batch_size, -1)
        return Inputs(*(x.unflatten(0, shape) for x in (self.mixed, self.log_decay, self.beta)))
