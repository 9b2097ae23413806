"""The shape of a decoder, which decides its weights, its KV cache and the cost of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..errors import ForedraftError
from .kv_formats import END_LAYERS, KV_FORMATS
from .layers import Attention, Cache, Experts, LayerInputs, Mixer, Mlp, Part, Recurrence
from .quantization import WEIGHT_BITS, bits_per_weight

STATE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element of a recurrent state, by format."""

T = TypeVar("T")


class UnknownModel(ForedraftError):
    """A model name that is not built in; the message lists the known ones and the nearest."""


def counted(parts: Iterable[T | None]) -> tuple[tuple[T, int], ...]:
    """Return each different part with its number of occurrences, in the order of first occurrence; None is no part."""
    counts: dict[T, int] = {}
    for part in parts:
        if part is not None:
            counts[part] = counts.get(part, 0) + 1
    return tuple(counts.items())


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a transformer: it decides the weights, the KV cache and the cost of a forward pass.

    `mixers` and `mlps` say how many layers have which (`layers.py`); which of them share a layer does not matter.
    `weight_dtype` is a format of `quantization.py`, that of routed experts and, unless `attention_dtype` (of every
    mixer) or `mlp_dtype` (of dense and shared MLPs) differ, of all layers. Embeddings and LM head stay 16-bit beside
    quantized weights, unless `embedding_dtype` or `head_dtype` says otherwise. `tower_parameters`: 16-bit weights
    beside the language model (`keys/towers.py`), which take memory and are no part of its passes. `max_context` is in
    tokens. `config`: the `config.json` that the shape was read from, whole.
    """

    name: str
    family: str
    layers: int
    hidden: int
    vocab: int
    mixers: tuple[tuple[Mixer, int], ...]
    mlps: tuple[tuple[Part, int], ...]
    tied_embeddings: bool
    max_context: int
    weight_dtype: str = "bf16"
    attention_dtype: str | None = None
    mlp_dtype: str | None = None
    embedding_dtype: str | None = None
    head_dtype: str | None = None
    layer_inputs: LayerInputs | None = None
    tower_parameters: int = 0
    kv_dtype: str = "bf16"
    source: str = field(default="", compare=False)
    config: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert min(self.layers, self.hidden, self.vocab) > 0, self.name
        assert self.mixers and all(count > 0 for _, count in (*self.mixers, *self.mlps)), self.name

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of its sparse layers; None for a dense model."""
        return next((part for part, _ in self.mlps if isinstance(part, Experts)), None)

    @property
    def moe_layers(self) -> int:
        return sum(count for part, count in self.mlps if isinstance(part, Experts))

    @property
    def attention_parameters(self) -> int:
        """Weights of the mixers of all layers: projections, biases, norms of heads."""
        return sum(count * self.mixer_parameters(mixer) for mixer, count in self.mixers)

    def mixer_parameters(self, mixer: Mixer, inputs: int = 1) -> int:
        """Return the weights of one layer's mixer; `inputs`: width of what it projects, in hidden sizes."""
        products = mixer.products(self.hidden, inputs=inputs)
        return sum(product.parameters for product in products) + mixer.small_parameters(self.hidden)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, norms included; a tied LM head counts once."""
        return self._parameters(sum(count * part.parameters(self.hidden) for part, count in self.mlps))

    @property
    def active_parameters(self) -> int:
        """The weights that one token uses: `top_k` of the experts."""
        return self._parameters(sum(count * part.active_parameters(self.hidden) for part, count in self.mlps))

    def _parameters(self, mlps: int) -> int:
        total = self.attention_parameters + mlps + self._norm_parameters + self._wide_parameters
        return total + (self.layer_inputs.parameters(self.hidden, self.layers) if self.layer_inputs else 0)

    @property
    def _norm_parameters(self) -> int:
        """Weights of the norms: one before each mixer and each MLP, and the last."""
        return (sum(count for _, count in (*self.mixers, *self.mlps)) + 1) * self.hidden

    @property
    def _wide_parameters(self) -> int:
        """Weights outside the layers: the embeddings and the LM head."""
        return self.embedding_parameters * (1 if self.tied_embeddings else 2) + self._layer_table

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        mixers, dense = self.attention_parameters, self.dense_parameters
        rest = self.parameters - mixers - dense - self._wide_parameters
        narrow = (
            mixers * self.format_bytes(self.attention_dtype)
            + dense * self.format_bytes(self.mlp_dtype)
            + rest * self.format_bytes()
        )
        return math.ceil(narrow + self._table_bytes + self._layer_table_bytes + self._head_bytes + self._tower_bytes)

    @property
    def _table_bytes(self) -> float:
        """Bytes of the embeddings, which are the LM head's, too, where that is tied."""
        return self.embedding_parameters * self.format_bytes(self.embedding_dtype or "bf16")

    @property
    def _tower_bytes(self) -> float:
        return self.tower_parameters * self.format_bytes("bf16")

    @property
    def _layer_table(self) -> int:
        """Weights of the further embeddings of the layers, of which a pass looks up single rows."""
        inputs = self.layer_inputs
        return 0 if inputs is None else inputs.vocab * inputs.width * self.layers

    @property
    def _layer_table_bytes(self) -> float:
        return self._layer_table * self.format_bytes(self.embedding_dtype or "bf16")

    @property
    def _head_bytes(self) -> float:
        """Bytes of an LM head of its own."""
        return 0.0 if self.tied_embeddings else self.embedding_parameters * self.format_bytes(self.head_dtype or "bf16")

    @property
    def output_dtype(self) -> str:
        """The format of the weights that the LM head multiplies with."""
        return (self.embedding_dtype if self.tied_embeddings else self.head_dtype) or "bf16"

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that every pass reads at least: those that one token uses, without the input embeddings, of
        which a pass looks up single rows."""
        resting = (self.parameters - self.active_parameters) * self.format_bytes()
        looked_up = self._layer_table_bytes + (0 if self.tied_embeddings else self._table_bytes)
        return math.floor(self.weight_bytes - resting - looked_up - self._tower_bytes)

    @property
    def dense_parameters(self) -> int:
        """Weights of all MLPs that every token uses: dense ones, and those beside routed experts."""
        total = 0
        for part, count in self.mlps:
            products = part.products(self.hidden) if isinstance(part, Mlp) else part.shared(self.hidden)
            total += count * sum(product.parameters for product in products)
        return total

    def weight_bytes_per_device(self, tensor: int, devices: int, expert_ranks: int = 1) -> int:
        """Return the bytes of weights of one of `devices` devices. Routed experts are divided among all, in
        `expert_ranks` groups. Latents, indexers and routers are whole on every device; the rest is divided among
        `tensor`."""
        if devices == 1:
            return self.weight_bytes
        hidden, total = self.hidden, self._norm_parameters * self.format_bytes()
        for mixer, count in self.mixers:
            own = sum(product.parameters for product in mixer.products(hidden, tensor)) + mixer.small_parameters(hidden)
            total += count * own * self.format_bytes(self.attention_dtype)
        for part, count in self.mlps:
            if isinstance(part, Mlp):
                own = sum(product.parameters for product in part.products(hidden, tensor))
                total += count * own * self.format_bytes(self.mlp_dtype)
                continue
            shared = sum(product.parameters for product in part.shared(hidden, tensor))
            held = math.ceil(part.count / expert_ranks)
            routed = held * math.ceil(part.expert_parameters(hidden) * expert_ranks / devices)
            total += count * shared * self.format_bytes(self.mlp_dtype)
            total += count * (routed + part.router_parameters(hidden)) * self.format_bytes()
        if self.layer_inputs is not None:
            total += self.layer_inputs.parameters(hidden, self.layers) * self.format_bytes()
        wide = self._table_bytes + self._layer_table_bytes + self._head_bytes + self._tower_bytes
        return math.ceil(total + wide / tensor)

    def format_bytes(self, dtype: str | None = None) -> float:
        """Return the bytes of one weight in the format `dtype`, scales included; None is `weight_dtype`."""
        bits = bits_per_weight(dtype or self.weight_dtype)
        assert bits is not None, dtype or self.weight_dtype
        return bits / 8

    # -- what a request keeps -----------------------------------------------------------------------------------------

    def caches(self, tp: int = 1) -> tuple[tuple[Cache, int], ...]:
        """Return the caches of one device, with the number of layers that have each."""
        return tuple((cache, count) for mixer, count in self.mixers for cache in mixer.caches(tp))

    def token_bytes(self, tp: int = 1, *, windowed: bool | None = None) -> int:
        """Return the bytes that a token's entries take on one device over all layers; `windowed`: of those layers alone
        that keep a window (True), or of those that keep all (False)."""
        kept = ((c, n) for c, n in self.caches(tp) if c.is_kept)
        chosen = ((c, n) for c, n in kept if windowed is None or c.keeps_reach == windowed)
        return math.ceil(sum(count * self.cache_bytes(cache) for cache, count in chosen))

    def cache_bytes(self, cache: Cache) -> float:
        """Return the bytes of one token's share of the entries of a cache of this model: the mean over its layers."""
        form = KV_FORMATS[self.kv_dtype]
        entry = form.entry_bytes(cache)
        if form.has_wide_ends and not self.recurrent_state_bytes:
            share = 2 * min(END_LAYERS, self.layers // 2) / self.layers
            entry += share * (KV_FORMATS["bf16"].entry_bytes(cache) - entry)
        return cache.heads * entry / cache.tokens_per_entry

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's entries take over all layers (no tensor parallelism), while it is
        inside every window."""
        return self.token_bytes()

    @property
    def kv_heads(self) -> int:
        """KV heads of its first attention layer, 1 for a latent."""
        return next((mixer.kv_heads for mixer, _ in self.mixers if isinstance(mixer, Attention)), 1)

    @property
    def kv_layers(self) -> int:
        """Layers that cache tokens."""
        return sum(count for mixer, count in self.mixers if any(cache.is_kept for cache in mixer.caches()))

    @property
    def attention_window(self) -> int | None:
        """The tokens that windowed layers keep; None without such layers."""
        return max((c.reach or 0 for c, _ in self.caches() if c.keeps_reach), default=None)

    @property
    def recurrent_state_bytes(self) -> int:
        """Bytes of one request's state over all layers that have a state instead of KV (no tensor parallelism)."""
        return sum(count * mixer.state_bytes for mixer, count in self.mixers if isinstance(mixer, Recurrence))

    @property
    def reach(self) -> int | None:
        """The greatest reach of layers with a limited reach, in tokens per row: beyond it they read no more. None
        without such layers."""
        return max((cache.reach for cache, _ in self.caches() if cache.reach), default=None)

    def tensor_problem(self, tp: int) -> str | None:
        """Return why `tp` devices cannot share the heads; None if they can."""
        for mixer, _ in self.mixers:
            if mixer.heads % tp:
                return f"tensor parallelism {tp} does not divide the {mixer.heads} attention heads of {self.name}"
            kv_heads = getattr(mixer, "kv_heads", 1)
            if kv_heads % tp and tp % kv_heads:
                return f"tensor parallelism {tp} does not fit the {kv_heads} KV heads of {self.name}"
        return None

    # -- other forms --------------------------------------------------------------------------------------------------

    def with_dtypes(self, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
        """Return the same shape in other number formats; weights take those of `quantization.py`. Raises `UnknownModel`
        for an unknown format."""
        if weight_dtype is not None and bits_per_weight(weight_dtype) is None:
            known = ", ".join((*WEIGHT_BITS, "int4-g128"))
            raise UnknownModel(f"{self.name}: data type {weight_dtype!r} is none of {known} (bits and group size)")
        if kv_dtype is not None and kv_dtype not in KV_FORMATS:
            raise UnknownModel(f"{self.name}: data type {kv_dtype!r} of KV is none of {', '.join(KV_FORMATS)}")
        shape = replace(self, kv_dtype=kv_dtype or self.kv_dtype)
        if weight_dtype in (None, self.weight_dtype):
            return shape
        shape = replace(shape, attention_dtype=None, mlp_dtype=None, embedding_dtype=None, head_dtype=None)
        return replace(shape, weight_dtype=weight_dtype or shape.weight_dtype)

    def with_states(self, state: int | None, conv: int | None, usual: int) -> ModelShape:
        """Return the same shape with so many bytes in an element of recurrent states and of their convolutions; None:
        as the model's files say, or `usual` where they do not."""
        mixers = tuple(
            (replace(one, state_bytes_each=state or one.state_bytes_each or usual, conv_bytes_each=conv or 2), count)
            if isinstance(one, Recurrence)
            else (one, count)
            for one, count in self.mixers
        )
        return self if mixers == self.mixers else replace(self, mixers=mixers)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        formats = {"layers": self.weight_dtype, "attention": self.attention_dtype, "dense MLP": self.mlp_dtype}
        formats |= {"embeddings": self.embedding_dtype, "LM head": self.head_dtype}
        named = ", ".join(f"{part} {name}" for part, name in formats.items() if name and name != self.weight_dtype)
        rows: list[tuple[str, float, str, str]] = [
            (f"{self.name} parameters", self.parameters / 1e9, "billion", self.source),
            (
                f"{self.name} weights",
                self.weight_bytes / 1e9,
                "GB",
                f"computed, {self.weight_dtype}{', ' * bool(named)}{named}",
            ),
            (f"{self.name} KV per token", self.kv_bytes_per_token, "B", f"computed, {self.kv_dtype}"),
            (f"{self.name} layers", self.layers, "", self.source),
        ]
        if self.experts:
            rows.append((f"{self.name} active parameters", self.active_parameters / 1e9, "billion", self.source))
        if windowed := self.token_bytes(windowed=True):
            source = f"computed: of the KV per token, in layers that keep {self.attention_window} tokens"
            rows.append((f"{self.name} KV per token in windows", windowed, "B", source))
        if state := self.recurrent_state_bytes:
            rows.append((f"{self.name} recurrent state per request", state / 1e6, "MB", "computed"))
        return rows
