"""What a recurrent layer keeps of a request, and what it makes of new tokens: the sizes, weights and inputs of
`kernels.layers.delta_rule`.

B sequences of w new tokens each, heads H, key heads Hk, channels C of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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

    @property
    def projected(self) -> tuple[int, int, int, int]:
        """Numbers that a layer projects of a token: inputs of the convolution, gate, β and decay."""
        return self.channels, self.heads * self.value_dim, self.heads, self.heads

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


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """What a recurrent layer has beside its projections."""

    kernel: Tensor  # [C, K], of the convolution
    log_rate: Tensor  # [H], 32 bits at least
    step_bias: Tensor  # [H], 32 bits at least
    norm: Tensor  # [Dv], of the outputs
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """The states of B requests in one layer, or of all rows in all layers, with an axis of layers before."""

    matrices: Tensor  # [B, H, Dk, Dv], 32 bits at least
    inputs: Tensor  # [B, K − 1, C]: of the convolution, oldest first


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """What is kept of new tokens until it is known which of them stay, in one layer or, with an axis of layers before,
    in all."""

    mixed: Tensor  # [B, w, C]
    log_decay: Tensor  # [B, w, H]
    path_decay: Tensor  # [B, w, H]: the sum of ln γ from the first token of the path on
    keys: Tensor  # [B, w, H, Dk], of length 1
    updates: Tensor  # [B, w, H, Dv]: u

    @classmethod
    def empty(cls, num_layers: int, width: int, rows: Tensor, shape: StateShape, dtype: torch.dtype) -> Nodes:
        """Return uninitialised nodes of all layers, `width` for each of `rows`, in 32 bits; inputs of the convolution
        in `dtype`."""
        tokens = (num_layers, len(rows), width)

        def make(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty((*tokens, *sizes), dtype=dtype, device=rows.device)

        heads = shape.heads
        decays = make(heads), make(heads)
        return cls(make(shape.channels, dtype=dtype), *decays, make(heads, shape.key_dim), make(heads, shape.value_dim))


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """How the new tokens of B sequences follow each other; parents stand before their children."""

    parents: Tensor  # int64 [B, w]; −1 for a token that follows the state
    ancestors: Tensor  # bool [B, w, w]: [i, j] whether j is token i itself or one of its ancestors


class PassStates(Protocol):
    """The recurrent layers' part of one forward pass."""

    def run(self, layer: int, inputs: Inputs, kernel: Tensor, shape: StateShape) -> Tensor:
        """Run the pass's n tokens through recurrent layer `layer` (counted among these): [n, H, Dv]."""
