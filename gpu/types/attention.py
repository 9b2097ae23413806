"""What a model's layers need from outside: rotate, write KV, attend. A model knows no pool and no batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .recurrence import RecurrentWeights, StateShape

E4M3 = torch.float8_e4m3fn
"""The 8-bit numbers that a pool may keep keys and values in."""


class KVScales(NamedTuple):
    """What a layer's keys and values are divided by before a pool of 8-bit numbers keeps them."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """How a layer turns query-key products into weights. By default: the softmax of q · k / √d over all keys."""

    scale: float | None = None  # of the products; None: d^-½
    window: int = 0  # positions that a query sees, its own included; 0: all before it
    softcap: float = 0.0  # c: scores become c · tanh(score / c); 0: they stay (Gemma 2)
    sinks: Tensor | None = None  # [Hq]: one more score per head in the softmax, which has no value (gpt-oss)
    query_factors: Tensor | None = None  # float32 [positions]: of a query at each position (Ministral 3)
    value_factor: float = 1.0  # of the weighted sums of values
    key_only: int = 0  # channels at the begin of each half of a key whose sums are not read, where keys are the values

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention computes it, given scale and mask."""
        return not self.softcap and self.sinks is None

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of the products for q […, d]."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def scaled(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return queries [n, Hq, d] at `positions` [n] with their factors."""
        if self.query_factors is None:
            return q
        return q * self.query_factors[positions].to(q.dtype)[:, None, None]

    def over(self, scales: KVScales, q: Tensor) -> Softmax:
        """Return the softmax of queries q […, d] over keys and values that were divided by `scales`."""
        if scales == UNSCALED:
            return self
        return replace(self, scale=self.scale_of(q) * scales.key, value_factor=scales.value)

    def window_within(self, positions: int) -> int:
        """Return the window, or 0 if a text of `positions` tokens fits into it."""
        return self.window if self.window < positions else 0

    def weights(self, products: Tensor, bias: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the weights of scaled products […, queries, keys]; `bias` 0 or −inf, `sinks` broadcasts to […,
        queries, 1].

        A query that sees nothing has weights of 0.
        """
        if self.softcap:
            products = (products / self.softcap).tanh() * self.softcap
        scores = products + bias
        peak = scores.amax(-1, keepdim=True)
        peak = torch.maximum(peak, sinks) if sinks is not None else peak.clamp(min=torch.finfo(peak.dtype).min)
        weights = (scores - peak).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            return weights / (total + (sinks - peak).exp())
        return weights / total.where(total > 0, 1.0)

    def result(self, sums: Tensor) -> Tensor:
        """Return weighted sums of values with their factor."""
        return sums if self.value_factor == 1.0 else sums * self.value_factor


PLAIN = Softmax()


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer's attention."""

    query: int
    kv: int
    dim: int  # channels of each
    values_are_keys: bool = False  # there is no projection of values


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention: of the vector that is kept of a token, and of the parts of each head."""

    rank: int  # of the vector from which keys and values of all heads are made
    rope_dim: int  # of the key that is rotated and kept beside it, which all heads share
    nope_dim: int  # of a head's query and key that are not rotated
    value_dim: int  # of a head's value
    query_rank: int = 0  # of the vector from which queries are made; 0: they are projected at once


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps of a token: keys [heads, key_dim] and values [heads, value_dim].

    `value_dim` 0: the keys, as they are kept, are the values.
    """

    heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


class BatchAttention(Protocol):
    """One forward pass's attention over its batch of n tokens; paged in the executor, dense in training."""

    @property
    def in_round(self) -> bool:
        """Whether it is a pass of a decode round. These choose what a graph can hold, before a capture and without one,
        so that captured and eager rounds compute the same."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Attend: q [n, Hq, d], k and v [n, Hk, d], not rotated yet → [n, Hq, d]. `layer` counts the model's own layers
        from 0. With v [n, Hk, 0] the rotated keys are the values.

        cos_sin float32 [positions, d]: the model's rotary table, d/2 cosines, then d/2 sines.
        """

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """Run what is projected of n tokens (`StateShape.projected`) through the convolution and the states of
        recurrent layer `layer`, counted among these from 0, norm and gate → [n, H · Dv]."""


class ContextAttention(BatchAttention, Protocol):
    """The attention of a pass that keeps KV which is made of something else than its tokens."""

    def keep(self, layer: int, k: Tensor, v: Tensor, cos_sin: Tensor) -> None:
        """Keep k and v [n, Hk, d], not rotated yet, for later passes; see `BatchAttention.attend`."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where n of the nodes of bs rows stand in a pass that leaves out the others.

    Those that rows verify come first, row behind row. Behind them a captured pass has some of the others, with their
    own positions and slots, until it has its n tokens.
    """

    nodes: Tensor  # int64 [n]: flat number r · nd + j of the node at each place
    places: Tensor  # int64 [bs · nd]: where each node stands; −1: it is left out

    def pick(self, values: Tensor) -> Tensor:
        """Return the values of the pass's tokens [n, …], from those of all nodes [bs · nd, …]."""
        return values[self.nodes]

    def spread(self, values: Tensor) -> Tensor:
        """Return values of all nodes [bs · nd, …], from those of the pass's tokens [n, …]. A node that is left out gets
        those of the last token (index −1), and is never read."""
        return values[self.places]
