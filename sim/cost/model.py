"""The shape of a decoder-only transformer: what decides its weights, its KV cache and the cost of a forward pass.

The catalogue's shapes are those of the published `config.json` files; parameter totals are computed from the shape, and
a test holds them against the totals that the checkpoints state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...core.errors import ForetokenError, nearest

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp8": 1}


class UnknownModel(ForetokenError):
    """A model name that is not built in; the message lists the known ones and the nearest."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer's shape. Counts are dimensionless, sizes in elements, `attention_window` and `max_context` in
    tokens.

    A mixture of experts has `experts > 0`; then `intermediate` is the width of the `dense_layers` that have no experts.
    `windowed_layers` of the layers attend only to the last `attention_window` tokens.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_context: int
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    attention_window: int | None = None
    windowed_layers: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        assert min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab) > 0, self.name
        assert self.heads % self.kv_heads == 0, f"{self.name}: heads must be a multiple of kv_heads"
        assert self.experts >= self.experts_per_token >= 0, self.name
        assert (self.experts > 0) == (self.moe_intermediate > 0), self.name
        assert 0 <= self.windowed_layers <= self.layers, self.name
        assert (self.windowed_layers > 0) == (self.attention_window is not None), self.name
        assert 0 <= self.dense_layers <= self.layers, self.name

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention: q, k, v, o, their biases, and the per-head norms of q and k."""
        projected = (self.heads + 2 * self.kv_heads) * self.head_dim
        weights = self.hidden * projected + self.heads * self.head_dim * self.hidden
        return weights + (projected if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, norms included; a tied LM head counts once."""
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """The weights that one token uses: `experts_per_token` of the experts."""
        return self._parameters(self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        sparse = (
            self.hidden * self.experts + experts * self.expert_parameters + 3 * self.hidden * self.shared_intermediate
        )
        dense = 3 * self.hidden * self.intermediate
        mlp = self.moe_layers * sparse + (self.layers - self.moe_layers) * dense
        norms = (2 * self.layers + 1) * self.hidden
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.layers * self.attention_parameters + mlp + norms + embeddings

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. With 8-bit weights the embeddings and the LM head stay 16-bit, as checkpoints keep
        them."""
        wide = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return (self.parameters - wide) * DTYPE_BYTES[self.weight_dtype] + wide * 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take over all layers (no tensor parallelism)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    def with_dtypes(self, weight_dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
        """The same shape in other number formats ("bf16", "fp16", "fp8"). Raises `UnknownModel` for another format."""
        for dtype in (weight_dtype, kv_dtype):
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise UnknownModel(f"{self.name}: data type {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        return replace(self, weight_dtype=weight_dtype or self.weight_dtype, kv_dtype=kv_dtype or self.kv_dtype)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float, str, str]] = [
            (f"{self.name} parameters", self.parameters / 1e9, "billion", self.source),
            (f"{self.name} weights", self.weight_bytes / 1e9, "GB", f"computed, {self.weight_dtype}"),
            (f"{self.name} KV per token", self.kv_bytes_per_token, "B", f"computed, {self.kv_dtype}"),
            (f"{self.name} layers", self.layers, "", self.source),
        ]
        if self.experts:
            rows.append((f"{self.name} active parameters", self.active_parameters / 1e9, "billion", self.source))
        return rows


def _config(repository: str) -> str:
    return f"config.json of {repository}"


_BUILT_IN: tuple[ModelShape, ...] = (
    ModelShape(
        "llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 131072,
        source=_config("meta-llama/Llama-3.1-8B"),
    ),
    ModelShape(
        "llama-3.1-70b", "llama", 80, 8192, 64, 8, 128, 28672, 128256, False, 131072,
        source=_config("meta-llama/Llama-3.1-70B"),
    ),
    ModelShape(
        "llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, True, 131072,
        source=_config("meta-llama/Llama-3.2-1B"),
    ),
    ModelShape(
        "llama-2-7b", "llama", 32, 4096, 32, 32, 128, 11008, 32000, False, 4096,
        source=_config("meta-llama/Llama-2-7b-hf"),
    ),
    ModelShape(
        "qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, 40960, qk_norm=True,
        source=_config("Qwen/Qwen3-8B"),
    ),
    ModelShape(
        "qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 40960, qk_norm=True,
        source=_config("Qwen/Qwen3-0.6B"),
    ),
    ModelShape(
        "qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 40960, qk_norm=True,
        experts=128, experts_per_token=8, moe_intermediate=768,
        source=_config("Qwen/Qwen3-30B-A3B"),
    ),
    ModelShape(
        "qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False, 131072, qkv_bias=True,
        source=_config("Qwen/Qwen2.5-7B"),
    ),
)  # fmt: skip

_BY_NAME: dict[str, ModelShape] = {shape.name: shape for shape in _BUILT_IN}


def known_models() -> tuple[str, ...]:
    """Names of the built-in shapes, in the catalogue's order."""
    return tuple(_BY_NAME)


def lookup_model(name: str) -> ModelShape:
    """The built-in shape called `name`, without regard to case. Raises `UnknownModel` with the nearest known name."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key not in _BY_NAME:
        hint = nearest(key, known_models())
        raise UnknownModel(
            f"unknown model {name!r}{hint}; built in: {', '.join(known_models())}; "
            "any other: give the path of its config.json"
        )
    return _BY_NAME[key]
