"""The part of a layer that moves information between tokens, as an object of the layer.

A mixer projects its input, hands queries, keys and values to the pass's `BatchAttention`, and projects what comes back.
Its configuration says all that differs between families and between layers: heads, norms, rotation, window, biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..types.attention import PLAIN, BatchAttention, Softmax
from ..types.ops import Ops
from .config import ModelConfig
from .projection import Projection
from .rope import Rope, channel_order, cos_sin_table, query_factors, unrotated_table
from .weights import NamedWeight, empty_matrix, empty_weight, rows_of


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What a layer's rotation has of its own beside the table of the pass."""

    table: Tensor | None = None  # None: that of the pass
    query_factors: Tensor | None = None  # see `Softmax`


SHARED_ROTATION = Rotation()


def rotations_of(config: ModelConfig, device: torch.device | str) -> tuple[Tensor, list[Rotation]]:
    """Return the rotary table of a model, and what each of its layers has of its own. Each table is made once."""
    size, positions = config.full_head_dim or config.head_dim, config.max_position_embeddings
    main = cos_sin_table(config.rope, size, positions, device)
    factors = query_factors(config.rope, positions, device)
    known: dict[tuple[Rope | None, int], Rotation] = {
        (config.rope, size): SHARED_ROTATION if factors is None else Rotation(None, factors)
    }
    layers = []
    for layer in range(config.num_layers):
        rope, size = key = config.rope_of(layer), config.heads_of(layer).dim
        if key not in known:
            known[key] = Rotation(
                unrotated_table(size, positions, device)
                if rope is None
                else cos_sin_table(rope, size, positions, device)
            )
        layers.append(known[key])
    return main, layers


class GroupedAttention(nn.Module):
    """Softmax attention whose query heads share key and value heads in groups.

    `index` counts the model's layers. `input_size`: of what is projected, if not the hidden size.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ops: Ops,
        device: torch.device | str,
        dtype: torch.dtype,
        input_size: int | None = None,
        rotation: Rotation = SHARED_ROTATION,
    ) -> None:
        super().__init__()
        self._place, self._ops, self._eps = (
            index - sum(r < index for r in config.recurrent_layers),
            ops,
            config.rms_norm_eps,
        )
        heads, self._has_gate = config.heads_of(index), config.output_gate
        self._family, self.head_dim = config.family, heads.dim
        self.heads: tuple[int, int, int] = (heads.query, heads.kv, 0 if heads.values_are_keys else heads.kv)
        self.rope, self.table = config.rope_of(index), rotation.table
        hidden, d, wide = config.hidden_size, self.head_dim, norm_dtype(config, dtype)
        self._split = self.heads if not self._has_gate else (heads.query, heads.query, *self.heads[1:])
        total = sum(self._split) * d
        matrix = partial(empty_matrix, device=device, dtype=dtype, kept=config.keeps_quantized)
        self.qkv_weight: nn.Parameter = matrix(total, input_size or hidden)
        self.output_weight: nn.Parameter = matrix(hidden, heads.query * d)
        self.qkv_bias: nn.Parameter | None = (
            empty_weight(total, device=device, dtype=dtype) if config.qkv_bias else None
        )
        self.output_bias: nn.Parameter | None = (
            empty_weight(hidden, device=device, dtype=dtype) if config.output_bias else None
        )
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        self.sinks: nn.Parameter | None = None
        if config.qk_norm:
            of_q, of_k = (n * d if self._family.joint_head_norms else d for n in self.heads[:2])
            self.q_norm = empty_weight(of_q, device=device, dtype=wide)
            self.k_norm = empty_weight(of_k, device=device, dtype=wide)
        if config.sinks:
            self.sinks = empty_weight(config.num_heads, device=device, dtype=dtype)
        self.softmax: Softmax = softmax_of(config, index)
        if self.sinks is not None or rotation.query_factors is not None:
            self.softmax = replace(self.softmax, sinks=self.sinks, query_factors=rotation.query_factors)
        # Plain attributes of the object, past the module's registry.
        self.projections: tuple[Projection, Projection] = (
            Projection(self.qkv_weight, self.qkv_bias, ops.coded_product),
            Projection(self.output_weight, self.output_bias, ops.coded_product, config.exchange),
        )
        self._head_norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        self._joint, self._shard = self._family.joint_head_norms, config.shard
        self._value_norm = torch.ones(d, dtype=dtype, device=device) if self._family.has_value_norms else None

    @property
    def is_plain(self) -> bool:
        """Whether the host computes it: scores that are products alone, norms of each head, and no rotation but the
        pass's own."""
        softmax, own_rotation = self.softmax, self.table is not None and self.rope is not None
        differs = self._joint or own_rotation or self._value_norm is not None or self._has_gate
        return softmax.is_plain and softmax.query_factors is None and not differs

    def run(self, x: Tensor, attention: BatchAttention, cos_sin: Tensor) -> Tensor:
        """Attend: x [n, input size] → [n, H], without the residual.
        q, k, v are views of one tensor: only their last two axes are dense."""
        project_qkv, project_output = self.projections
        qkv = project_qkv(x).view(x.shape[0], -1, self.head_dim)
        q, *gate, k, v = qkv.split_with_sizes(self._split, 1)
        if not self.heads[2]:
            v = k
        if self._value_norm is not None:
            v = self._ops.rms_norm(v, self._value_norm, self._eps)
        if self._head_norms is not None:
            q, k = self._normed((q, k), self._head_norms)
        out = attention.attend(self._place, q, k, v, cos_sin if self.table is None else self.table, self.softmax)
        return project_output((self._ops.sigmoid_mul(out, gate[0]) if gate else out).flatten(1))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys, not rotated yet, and values [n, Hk, d] alone of x [n, input size]."""
        _, num_keys, num_values = self.heads
        assert num_values and self._value_norm is None, "values have a projection of their own"
        first = self.qkv_weight.shape[0] - (num_keys + num_values) * self.head_dim
        both = self.projections[0].outputs_from(first, x).view(x.shape[0], -1, self.head_dim)
        k, v = both.split_with_sizes((num_keys, num_values), 1)
        return (k, v) if self._head_norms is None else (next(self._normed((k,), self._head_norms[1:])), v)

    def _normed(self, parts: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """Yield queries and keys [n, heads, d] under their norms: of each head, or of all heads of all ranks."""
        if not self._joint or self._shard.is_whole:
            for x, weight in zip(parts, weights, strict=True):
                normed = self._ops.rms_norm(x.flatten(1) if self._joint else x, weight, self._eps)
                yield normed.view(x.shape)
            return
        wide = [x.flatten(1).to(torch.promote_types(x.dtype, torch.float32)) for x in parts]
        # Every rank has as many heads, so the mean over all of them is that of the ranks' means.
        means = self._shard.total(torch.stack([x.square().mean(-1) for x in wide])) / self._shard.size
        scales = (means + self._eps).rsqrt().unsqueeze(-1)
        for x, of_parts, scale, weight in zip(parts, wide, scales, weights, strict=True):
            yield (of_parts * scale * weight).to(x.dtype).view(x.shape)

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's own prefix, as the family publishes them."""
        rows = {f"self_attn.{p}_proj": n * self.head_dim for p, n in zip("qkv", self.heads, strict=True) if n}
        fused = tuple(rows.values()) if self._family.fused_qkv else None
        if fused is not None:
            rows = {"self_attn.qkv_proj": sum(fused)}
        q, k, _ = self.heads
        order = self._gated_order() if self._has_gate else self._order(q + k)
        if self._has_gate:
            rows["self_attn.q_proj"] *= 2
        if order is not None:
            order = torch.cat([order, torch.arange(len(order), self.qkv_weight.shape[0])])
        yield from rows_of(self.qkv_weight, rows, "weight", order, fused)
        if self.qkv_bias is not None:
            yield from rows_of(self.qkv_bias, rows, "bias", order, fused)
        yield NamedWeight("self_attn.o_proj.weight", self.output_weight.detach())
        if self.output_bias is not None:
            yield NamedWeight("self_attn.o_proj.bias", self.output_bias.detach())
        if self.sinks is not None:
            yield NamedWeight("self_attn.sinks", self.sinks.detach())
        if self._head_norms is not None:
            for name, heads, weight in zip(("q_norm", "k_norm"), (q, k), self._head_norms, strict=True):
                order = self._order(heads if self._joint else 1)
                offset = self._family.norm_offset
                yield NamedWeight(f"self_attn.{name}.weight", weight.detach(), offset, order)

    def _order(self, heads: int) -> Tensor | None:
        """Return which published channel stands at each place of so many heads, int64 [heads · d]."""
        order = None if self.rope is None else channel_order(self.rope, self.head_dim)
        if order is None:
            return None
        return (torch.arange(heads)[:, None] * self.head_dim + torch.tensor(order)).flatten()

    def _gated_order(self) -> Tensor:
        """Return which published row stands at each place of q, its gate, and k: each head's gate is published behind
        the head."""
        d, (q, k, _) = self.head_dim, self.heads
        published, order = torch.arange(2 * q * d).view(q, 2, d), self._order(1)
        queries, keys = published[:, 0], torch.arange(2 * q * d, (2 * q + k) * d).view(k, d)
        if order is not None:
            queries, keys = queries[:, order], keys[:, order]
        return torch.cat([part.flatten() for part in (queries, published[:, 1], keys)])


class LatentAttentionMixer(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): of a token one latent vector is kept,
    from which keys and values of all heads can be made, and one rotated key that they share.

    Keys are not made: a head's query is multiplied with the projection that would make them, and its weighted sum of
    latent vectors with the one that makes values. So it is attention whose query heads share one key of rank + rope_dim
    channels, that is its own value. Its channels stand as `place` puts them.
    """

    is_plain = False

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        ops: Ops,
        device: torch.device | str,
        dtype: torch.dtype,
        rotation: Rotation = SHARED_ROTATION,
    ) -> None:
        super().__init__()
        assert config.latent is not None
        self._index, self._ops, self._num_heads, self._sizes = index, ops, config.num_heads, config.latent
        self._rope, self._table = config.rope, rotation.table
        self._softmax = replace(softmax_of(config, index), key_only=config.latent.rope_dim // 2)
        sizes, hidden, heads = self._sizes, config.hidden_size, config.num_heads

        weight = partial(empty_matrix, device=device, dtype=dtype, kept=config.keeps_quantized)

        def bias(rows: int, exists: bool) -> nn.Parameter | None:
            return empty_weight(rows, device=device, dtype=dtype) if exists else None

        self._query_down_weight = self._query_down_bias = self._query_norm = None
        if sizes.query_rank:
            self._query_down_weight = weight(sizes.query_rank, hidden)
            self._query_down_bias = bias(sizes.query_rank, config.qkv_bias)
            self._query_norm = empty_weight(sizes.query_rank, device=device, dtype=dtype)
        self._query_weight = weight(heads * (sizes.nope_dim + sizes.rope_dim), sizes.query_rank or hidden)
        self._latent_weight = weight(sizes.rank + sizes.rope_dim, hidden)
        self._latent_bias = bias(sizes.rank + sizes.rope_dim, config.qkv_bias)
        self._latent_norm = empty_weight(sizes.rank, device=device, dtype=dtype)
        # Its halves are multiplied with apart, so it stays a tensor.
        expanded = heads * (sizes.nope_dim + sizes.value_dim)
        self._expand_weight = empty_weight(expanded, sizes.rank, device=device, dtype=dtype)
        self._output_weight = weight(hidden, heads * sizes.value_dim)
        self._output_bias = bias(hidden, config.output_bias)
        # Plain attributes of the object, past the module's registry.
        self._norms = (self._query_norm, self._latent_norm)
        down = self._query_down_weight
        self.projections: tuple[Projection, ...] = (
            Projection(self._query_weight, product=ops.coded_product),
            Projection(self._latent_weight, self._latent_bias, ops.coded_product),
            Projection(self._output_weight, self._output_bias, ops.coded_product, config.exchange),
            *(() if down is None else (Projection(down, self._query_down_bias, ops.coded_product),)),
        )
        self._expand = self._expand_weight.view(heads, sizes.nope_dim + sizes.value_dim, sizes.rank)

    def run(self, x: Tensor, attention: BatchAttention, cos_sin: Tensor) -> Tensor:
        """Attend: x [n, H] → [n, H], without the residual."""
        n, sizes = x.shape[0], self._sizes
        project_query, project_latent, project_output, *down = self.projections
        query_norm, latent_norm = self._norms
        if query_norm is not None:
            q = project_query(self._ops.rms_norm(down[0](x), query_norm, LATENT_EPS))
        else:
            q = project_query(x)
        q_nope, q_rope = q.view(n, self._num_heads, -1).split_with_sizes((sizes.nope_dim, sizes.rope_dim), 2)
        latent, k_rope = project_latent(x).split_with_sizes((sizes.rank, sizes.rope_dim), 1)
        latent = self._ops.rms_norm(latent, latent_norm, LATENT_EPS)
        to_key, to_value = self._expand.split_with_sizes((sizes.nope_dim, sizes.value_dim), 1)
        q_latent = torch.bmm(q_nope.transpose(0, 1), to_key).transpose(0, 1)
        q, k = place(q_rope, q_latent), place(k_rope, latent).unsqueeze(1)
        table = cos_sin if self._table is None else self._table
        out = attention.attend(self._index, q, k, k[..., :0], table, self._softmax)
        _, seen = displace(out, sizes.rope_dim)
        values = torch.bmm(seen.transpose(0, 1), to_value.transpose(1, 2)).transpose(0, 1)
        attended: Tensor = project_output(values.flatten(1))
        return attended

    def checkpoint_weights(self) -> Iterator[NamedWeight]:
        """Yield the weights with names below the layer's own prefix, as the family publishes them."""
        sizes, of_latent = self._sizes, self._order(self._sizes.rank, 1)
        of_query = self._order(sizes.nope_dim, self._num_heads)
        if self._query_down_weight is None:
            yield NamedWeight("self_attn.q_proj.weight", self._query_weight.detach(), order=of_query)
        else:
            yield NamedWeight("self_attn.q_b_proj.weight", self._query_weight.detach(), order=of_query)
        rest = {
            "q_a_proj.weight": self._query_down_weight,
            "q_a_proj.bias": self._query_down_bias,
            "q_a_layernorm.weight": self._query_norm,
            "kv_a_layernorm.weight": self._latent_norm,
            "kv_b_proj.weight": self._expand_weight,
            "o_proj.weight": self._output_weight,
            "o_proj.bias": self._output_bias,
        }
        yield from (NamedWeight(f"self_attn.{name}", w.detach()) for name, w in rest.items() if w is not None)
        yield NamedWeight("self_attn.kv_a_proj_with_mqa.weight", self._latent_weight.detach(), order=of_latent)
        if self._latent_bias is not None:
            yield NamedWeight("self_attn.kv_a_proj_with_mqa.bias", self._latent_bias.detach(), order=of_latent)

    def _order(self, before: int, heads: int) -> Tensor | None:
        """Return which published row stands at each place of so many heads, whose rotated channels are behind `before`
        others."""
        order = channel_order(replace(self._rope, fraction=1.0), self._sizes.rope_dim)
        if order is None:
            return None
        one = torch.tensor([*range(before), *(before + channel for channel in order)])
        return (torch.arange(heads)[:, None] * len(one) + one).flatten()


LATENT_EPS = 1e-6  # of the norms inside latent attention, whatever the configuration says of the others


def place(rotated: Tensor, latent: Tensor) -> Tensor:
    """Return the channels of a query or key of latent attention: half of the rotated ones stands before each half of
    the others, so that place i turns against place i + half."""
    first, second = rotated.chunk(2, -1)
    before, behind = latent.chunk(2, -1)
    return torch.cat((first, before, second, behind), -1)


def displace(x: Tensor, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Return the rotated and the other channels of what `place` made."""
    first, second = x.chunk(2, -1)
    half = rope_dim // 2
    parts = [torch.cat((first[..., part], second[..., part]), -1) for part in (slice(half), slice(half, None))]
    return parts[0], parts[1]


def norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms: 32 bits at least where 16 would round what their weights have beyond the published
    ones."""
    return torch.promote_types(dtype, torch.float32) if config.family.norm_offset else dtype


def softmax_of(config: ModelConfig, index: int) -> Softmax:
    """Return the softmax of layer `index`, without sinks and factors of queries."""
    window = config.window if index in config.windowed_layers else 0
    if window or config.attention_scale is not None or config.attention_softcap:
        return Softmax(config.attention_scale, window, config.attention_softcap)
    return PLAIN
