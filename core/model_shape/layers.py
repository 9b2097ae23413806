"""The parts of a decoder's layers: their matrix products, the KV that they cache for every token, and the state that
they keep for every request.

A layer has a *mixer*, which moves information between tokens, and an MLP; some families have layers with one of the
two. Sizes are in elements. Tensor parallelism `tp` divides heads, channels and the width of an MLP. It does not divide
what every device needs whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product [tokens, inner] × [inner, columns], in `groups` with weights of their own."""

    inner: int
    columns: int
    groups: int = 1

    @property
    def parameters(self) -> int:
        return self.inner * self.columns * self.groups


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one layer for the tokens of a request, on one device, and the part that a new token reads.

    `heads` caches, each read by `queries` query heads; an entry has `width` elements, of which a query multiplies
    `key_dim` and sums up `value_dim`. `tokens_per_entry`: tokens that one entry stands for. `reach`: the most tokens
    that a query attends to (None: all); `keeps_reach`: whether only these are kept. `is_kept`: whether the layer keeps
    the entries, or reads another one's. `element_bytes`: of an element, where the format of the KV cache does not say
    it. `prompt_dims`: what a query head multiplies and sums up when a prompt is computed, if not `key_dim` and
    `value_dim`.
    """

    heads: int
    queries: int
    key_dim: int
    value_dim: int
    width: int
    tokens_per_entry: int = 1
    reach: int | None = None
    keeps_reach: bool = False
    is_kept: bool = True
    element_bytes: int | None = None
    prompt_dims: int = 0

    @property
    def is_latent(self) -> bool:
        """Whether an entry is one vector, of which the values are a part."""
        return self.width == self.key_dim


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention with keys and values per KV head (multi-head, grouped, multi-query).

    `window`: tokens that a query sees, itself included. `output_gate`: a second query projection scales the output.
    `values_are_keys`: no projection of values. `sinks`: a learnt logit per head. `index`: block-sparse attention, see
    `Index`. `has_kv`: whether the layer has its own keys and values, or reads those of a layer below.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    values_are_keys: bool = False
    sinks: bool = False
    index: Index | None = None
    has_kv: bool = True

    def products(self, hidden: int, tp: int = 1, inputs: int = 1) -> tuple[Product, ...]:
        """Return the matrix products of one layer; `inputs`: the width of what is projected, in hidden sizes."""
        heads, kv_heads = self.heads // tp, self.local_kv_heads(tp) if self.has_kv else 0
        values = 0 if self.values_are_keys else kv_heads * self.value_dim
        columns = heads * self.head_dim * (2 if self.output_gate else 1) + kv_heads * self.head_dim + values
        own = (Product(hidden * inputs, columns), Product(heads * self.value_dim, hidden))
        return own + (self.index.products(hidden, hidden) if self.index else ())

    def small_parameters(self, hidden: int) -> int:
        """Return the biases, norms of heads and sinks."""
        kv_heads = self.kv_heads if self.has_kv else 0
        projected = (self.heads + kv_heads) * self.head_dim + kv_heads * self.value_dim
        return (
            (projected if self.qkv_bias else 0)
            + (hidden if self.output_bias else 0)
            + ((2 if self.has_kv else 1) * self.head_dim if self.qk_norm else 0)
            + (self.heads if self.sinks else 0)
        )

    def local_kv_heads(self, tp: int) -> int:
        """Return the KV heads of one device: with fewer heads than devices each device keeps a copy of one."""
        return max(self.kv_heads // tp, 1)

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        kv_heads = self.local_kv_heads(tp)
        reach = self.index.reach if self.index else self.window
        main = Cache(
            kv_heads, max(self.heads // tp // kv_heads, 1), self.head_dim, self.value_dim,
            self.head_dim + self.value_dim, reach=reach, keeps_reach=self.window is not None, is_kept=self.has_kv,
        )  # fmt: skip
        return (main, *(self.index.caches() if self.index else ()))

    @property
    def rotated(self) -> int:
        """Elements of a token that rotary embedding and the KV write touch."""
        return self.heads * self.head_dim + self.has_kv * self.kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Index:
    """The indexer of sparse attention: `heads` small queries score all tokens, and the attention reads the best `reach`
    of them.

    Its keys are cached beside the layer's own, as 8-bit floats, one for `tokens_per_entry` tokens. `input_width`: of
    what the queries are projected from, 0 for the hidden state. `present`: whether this layer has an indexer, or uses
    the choice of one below.
    """

    heads: int
    dim: int
    reach: int
    input_width: int = 0
    tokens_per_entry: int = 1
    present: bool = True

    def products(self, hidden: int, input_width: int) -> tuple[Product, ...]:
        """Return the projections of queries, of the key, and of the weight of each head;
        every device has them whole."""
        if not self.present:
            return ()
        return (Product(self.input_width or input_width, self.heads * self.dim), Product(hidden, self.dim + self.heads))

    def caches(self) -> tuple[Cache, ...]:
        if not self.present:
            return ()
        return (Cache(1, self.heads, self.dim, 0, self.dim, tokens_per_entry=self.tokens_per_entry, element_bytes=1),)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are one latent vector per token.

    Every device caches the whole latent. A new token's queries are taken into the latent space (`absorbed` products),
    so decoding reads a single head of `kv_rank + rope_dim` elements.
    """

    heads: int
    q_rank: int  # 0: queries are projected in one step
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    output_gate: bool = False
    index: Index | None = None

    def products(self, hidden: int, tp: int = 1, inputs: int = 1) -> tuple[Product, ...]:
        heads, query = self.heads // tp, self.nope_dim + self.rope_dim
        latent = self.kv_rank + self.rope_dim
        into: tuple[Product, ...]
        if self.q_rank:
            into = (Product(hidden * inputs, self.q_rank + latent), Product(self.q_rank, heads * query))
        else:
            into = (Product(hidden * inputs, heads * query + latent),)
        absorbed = (Product(self.nope_dim, self.kv_rank, heads), Product(self.kv_rank, self.value_dim, heads))
        gate = (Product(hidden, heads * self.value_dim),) if self.output_gate else ()
        index = self.index.products(hidden, self.q_rank or hidden) if self.index else ()
        return (*into, *absorbed, Product(heads * self.value_dim, hidden), *gate, *index)

    def small_parameters(self, hidden: int) -> int:
        return self.q_rank + self.kv_rank

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        width = self.kv_rank + self.rope_dim
        reach = self.index.reach if self.index else None
        # A prompt is computed with the keys and values of each head, unless an indexer chooses what is read.
        expanded = 0 if self.index else self.nope_dim + self.rope_dim + self.value_dim
        main = Cache(1, self.heads // tp, width, self.kv_rank, width, reach=reach, prompt_dims=expanded)
        return (main, *(self.index.caches() if self.index else ()))

    @property
    def rotated(self) -> int:
        return self.heads * self.rope_dim + self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention of DeepSeek-V4: the last `window` tokens, and entries that each stand for `ratio` tokens (0: the window
    alone).

    Keys are values, one head of `head_dim` for all `heads`. Queries and outputs pass through `q_rank` and
    `output_groups` times `output_rank`. With an `index` a query reads the best entries, else all.
    """

    heads: int
    head_dim: int
    q_rank: int
    output_rank: int
    output_groups: int
    window: int
    ratio: int
    index: Index | None = None

    def products(self, hidden: int, tp: int = 1, inputs: int = 1) -> tuple[Product, ...]:
        heads, groups = self.heads // tp, max(self.output_groups // tp, 1)
        # A compressor projects an entry and the weight of each of its elements; overlapping windows double both at
        # small ratios.
        compressor = 0 if not self.ratio else 2 * self.head_dim * (2 if self.index else 1)
        index: tuple[Product, ...] = ()
        if self.index is not None:  # whose keys are compressed, too
            query, _ = self.index.products(hidden, self.q_rank)
            index = query, Product(hidden, 4 * self.index.dim + self.index.heads)
        return (
            Product(hidden * inputs, self.q_rank + self.head_dim + compressor),
            Product(self.q_rank, heads * self.head_dim),
            Product(heads * self.head_dim // groups, self.output_rank, groups),
            Product(groups * self.output_rank, hidden),
            *index,
        )

    def small_parameters(self, hidden: int) -> int:
        return self.q_rank + self.head_dim + self.heads

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        heads, dim = self.heads // tp, self.head_dim
        recent = Cache(1, heads, dim, dim, dim, reach=self.window, keeps_reach=True)
        if not self.ratio:
            return (recent,)
        reach = self.index.reach if self.index else None
        compressed = Cache(1, heads, dim, dim, dim, tokens_per_entry=self.ratio, reach=reach)
        return (recent, compressed, *(self.index.caches() if self.index else ()))

    @property
    def rotated(self) -> int:
        return (self.heads + 1) * self.head_dim


WIDE_STATE = 4
"""Bytes of an element of a recurrent state in 32 bits, which is what most models say."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A layer with a state of fixed size per request instead of a cache: linear attention (delta rule, lightning) or
    Mamba-2.

    `heads` states of `key_dim` × `value_dim`. `projected`: columns of the input's projections; `shared_projected`:
    those that every device has whole; `low_rank`: further products, over all heads. `conv_channels`, `conv_kernel`: of
    the short convolution before the recurrence.
    `state_bytes_each`, `conv_bytes_each`: of an element of the state and of the convolution's; None: the model's files
    do not say it.
    """

    heads: int
    key_dim: int
    value_dim: int
    projected: int
    output: int
    conv_channels: int = 0
    conv_kernel: int = 0
    shared_projected: int = 0
    low_rank: tuple[tuple[int, int], ...] = ()
    other_parameters: int = 0
    state_bytes_each: int | None = None
    conv_bytes_each: int = 2

    def products(self, hidden: int, tp: int = 1, inputs: int = 1) -> tuple[Product, ...]:
        columns = math.ceil(self.projected / tp) + self.shared_projected
        low_rank = tuple(Product(inner, math.ceil(columns / tp)) for inner, columns in self.low_rank)
        return (Product(hidden * inputs, columns), *low_rank, Product(math.ceil(self.output / tp), hidden))

    def small_parameters(self, hidden: int) -> int:
        return self.conv_channels * (self.conv_kernel + 1) + self.other_parameters

    def caches(self, tp: int = 1) -> tuple[Cache, ...]:
        return ()

    @property
    def state_elements(self) -> int:
        """Elements of the recurrent state of one request, without the convolution's."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state: the recurrence's, and the last inputs of the convolution."""
        conv = self.conv_channels * max(self.conv_kernel - 1, 0) * self.conv_bytes_each
        return self.state_elements * (self.state_bytes_each or WIDE_STATE) + conv

    @property
    def rotated(self) -> int:
        return self.conv_channels


Mixer = Attention | LatentAttention | CompressedAttention | Recurrence


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP: up (twice when gated) and down."""

    width: int
    gated: bool = True

    def products(self, hidden: int, tp: int = 1) -> tuple[Product, ...]:
        local = math.ceil(self.width / tp)
        return (Product(hidden, (2 if self.gated else 1) * local), Product(local, hidden))

    def parameters(self, hidden: int) -> int:
        return sum(product.parameters for product in self.products(hidden))

    def active_parameters(self, hidden: int) -> int:
        return self.parameters(hidden)

    @property
    def activated(self) -> int:
        """Width of the activations of one token."""
        return self.width


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each token is sent to `top_k` of `count` MLPs of `width`, and to a shared MLP of
    `shared_width`.

    `latent`: routed experts work on vectors of this size, with a projection before and after them (None: on the hidden
    state). `biases`: experts have biases. `shared_gate`: a learnt scalar scales the shared MLP.
    """

    count: int
    top_k: int
    width: int
    shared_width: int = 0
    gated: bool = True
    latent: int | None = None
    biases: bool = False
    shared_gate: bool = False

    def expert(self, hidden: int, tp: int = 1) -> tuple[Product, ...]:
        """Return the products of one routed expert."""
        return Mlp(self.width, self.gated).products(self.latent or hidden, tp)

    def shared(self, hidden: int, tp: int = 1) -> tuple[Product, ...]:
        """Return the products over all tokens: those of the shared MLP, and the projections into and out of
        the latent space."""
        into = (Product(hidden, self.latent), Product(self.latent, hidden)) if self.latent else ()
        shared = Mlp(self.shared_width, self.gated).products(hidden, tp) if self.shared_width else ()
        return into + shared

    def expert_parameters(self, hidden: int) -> int:
        size = self.latent or hidden
        biases = (2 if self.gated else 1) * self.width + size if self.biases else 0
        return sum(product.parameters for product in self.expert(hidden)) + biases

    def router_parameters(self, hidden: int) -> int:
        return hidden * self.count + (hidden if self.shared_gate else 0)

    def parameters(self, hidden: int) -> int:
        return self.count * self.expert_parameters(hidden) + self._every_token(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self.top_k * self.expert_parameters(hidden) + self._every_token(hidden)

    def _every_token(self, hidden: int) -> int:
        return sum(product.parameters for product in self.shared(hidden)) + self.router_parameters(hidden)

    @property
    def activated(self) -> int:
        return self.top_k * self.width


Part = Mlp | Experts


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Further embeddings of the tokens for each layer (Gemma 4 E2B), of `width` elements, which the layer adds behind
    its MLP. `vocab`: the rows of their table."""

    width: int
    vocab: int

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Return the matrix products of one layer: its share of a projection of the embedding, the gate, and the way
        back. Every device has them whole."""
        return Product(hidden, self.width), Product(hidden, self.width), Product(self.width, hidden)

    def parameters(self, hidden: int, layers: int) -> int:
        """Return all weights but the table: products and norms."""
        return layers * (sum(one.parameters for one in self.products(hidden)) + hidden) + self.width
