"""The matrices of a model by the names that its checkpoints give them, which entries of a quantization refer to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .layers import Attention, CompressedAttention, Experts, LatentAttention, Mixer, Mlp, Part, Recurrence

EXPERTS, MIXERS, MLPS, EMBEDDINGS, HEAD = "experts", "mixers", "mlps", "embeddings", "head"
_LAYER = re.compile(r"(?:(?P<before>.*)\.)?(?P<kind>layers|mtp_layers|mtp)\.(?P<number>[0-9]+|\*)\.(?P<own>.+)")
_TOWERS = ("vis", "image", "audio", "video", "speech", "tower", "encoder", "vit", "sam_", "draft", "eagle")
ANY_LAYER = "*", "-*"  # of the model, of those that draft for it
_EXPERT = re.compile(r"experts\.([0-9]+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a layer, of all its experts, or outside the layers.

    `names`: those behind the number of the layer, that of the matrix first, then those under which servers and older
    files have it together with others. `experts`: how many have the matrix, under the number 0. `layer`: layers below
    `mtp`, which draft for the model, are −1, −2, …
    """

    names: tuple[str, ...]
    layer: int | None = None
    part: str = ""
    weights: int = 0
    experts: int = 1

    def __str__(self) -> str:
        return self.names[0] if self.layer is None else f"{layer_prefix(self.layer)}{self.names[0]}"


def matrix_named(module: str) -> Matrix:
    """Return what the name of a module in a checkpoint refers to."""
    found = layer_named(module)
    if found is not None and found[0] not in ANY_LAYER:
        return Matrix((first_expert(found[1]),), int(found[0]))
    last = module.rpartition(".")[2]
    return Matrix((last if last in ("lm_head", "embed_tokens") else module,))


def layer_named(pattern: str) -> tuple[str, str] | None:
    """Return the number of the layer in a name, one of `ANY_LAYER` for a *, and what stands behind it; None if that is
    no layer of the language model."""
    found = _LAYER.fullmatch(pattern)
    if found is None or any(word in (found["before"] or "") for word in _TOWERS):
        return None
    number = found["number"]
    if found["kind"] != "layers" or "mtp" in (found["before"] or "").split("."):
        number = ANY_LAYER[1] if number == "*" else str(-1 - int(number))
    return number, found["own"]


def layer_prefix(layer: int) -> str:
    """Return what stands before the name of a layer's matrix, without what the whole model has before it."""
    return f"layers.{layer}." if layer >= 0 else f"mtp.layers.{-1 - layer}."


def first_expert(name: str, number: int = 0) -> str:
    """Return a name with the number 0, or another one, for that of an expert."""
    return _EXPERT.sub(f"experts.{number}", name)


def expert_number(name: str) -> int | None:
    """Return the number of the expert in a name."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def matrices_of(
    family: str,
    hidden: int,
    vocab: int,
    mixers: Iterable[Mixer | None],
    mlps: Iterable[Part | None],
    tied: bool,
) -> list[Matrix]:
    """Return all matrices that may be quantized, by the mixers and MLPs of the layers in their order."""
    style, found = _STYLES.get(family, _Style()), [Matrix(("embed_tokens",), None, EMBEDDINGS, vocab * hidden)]
    mixers, mlps = list(mixers), list(mlps)
    for place, mixer in enumerate(mixers):
        if mixer is not None:
            layer = place % len(mlps)  # a layer may have two mixers side by side
            parts = _mixer_parts(family, style, mixer, hidden)
            found += [Matrix(names, layer, MIXERS, weights) for names, weights in parts]
    for layer, mlp in enumerate(mlps):
        if mlp is not None:
            count = mlp.count if isinstance(mlp, Experts) else 1
            for part, names, weights in _mlp_parts(style, mlp, hidden):
                found.append(Matrix(names, layer, part, weights, count if part == EXPERTS else 1))
    return found if tied else [*found, Matrix(("lm_head",), None, HEAD, vocab * hidden)]


@dataclass(frozen=True, slots=True)
class _Style:
    """How a family calls its layers' parts: `projections` are gate, up and down."""

    attention: str = "self_attn"
    mlp: str = "mlp"
    sparse: str | None = None  # the MLP of a layer with experts; None: as `mlp`
    shared: str = "shared_experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    dense: tuple[str, str, str] | None = None  # of MLPs that are no routed experts; None: the usual or `projections`
    experts: str = "experts.0"
    output: str = "o_proj"
    gate: str | None = None  # of the attention's output; None: a part of the queries' matrix


_W = ("w1", "w3", "w2")
_LINEAR = ("input_linear", "input_linear", "output_linear")
_GRANITE = _Style(
    sparse="", experts="block_sparse_moe", projections=_LINEAR, dense=_LINEAR, shared="shared_mlp", mlp="shared_mlp"
)
_STYLES = {
    "mixtral": _Style(sparse="block_sparse_moe", projections=_W),
    "minimax": _Style(sparse="block_sparse_moe", projections=_W, shared="shared_mlp"),
    "minimax_m2": _Style(sparse="block_sparse_moe", projections=_W),
    "minimax_m3": _Style(sparse="block_sparse_moe", projections=_W),
    "kimi_linear": _Style(sparse="block_sparse_moe", projections=_W),
    "qwen2_moe": _Style(shared="shared_expert"),
    "qwen3_next": _Style(shared="shared_expert"),
    "qwen3_5_moe": _Style(shared="shared_expert"),
    "llama4": _Style(mlp="feed_forward", shared="shared_expert"),
    "gemma4": _Style(sparse="", shared="mlp"),
    "falcon_h1": _Style(mlp="feed_forward"),
    "step3p7": _Style(shared="share_expert"),
    "deepseek_v4": _Style(attention="attn", mlp="ffn", projections=_W),
    "nemotron_h": _Style(attention="mixer", mlp="mixer"),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "phimoe": _Style(sparse="block_sparse_moe", projections=_W),
    **dict.fromkeys(("hunyuan_v1_moe", "hy_v3"), _Style(shared="shared_mlp")),
    "afmoe": _Style(gate="gate_proj"),
    "bamba": _Style(mlp="feed_forward"),
    "jamba": _Style(mlp="feed_forward"),
    "lfm2": _Style(mlp="feed_forward", projections=_W, output="out_proj"),
    "lfm2_moe": _Style(mlp="feed_forward", projections=_W, output="out_proj"),
    "phi": _Style(projections=("", "fc1", "fc2"), output="dense"),
    "opt": _Style(mlp="", projections=("", "fc1", "fc2"), output="out_proj"),
    "starcoder2": _Style(projections=("", "c_fc", "c_proj")),
}
Named = tuple[tuple[str, ...], int]


def _mixer_parts(family: str, style: _Style, mixer: Mixer, hidden: int) -> Iterator[Named]:
    """Yield the names and sizes of one layer's mixer."""
    if isinstance(mixer, Attention):
        yield from _grouped_parts(style, mixer, hidden)
    elif isinstance(mixer, LatentAttention):
        yield from _latent_parts(style.attention, mixer, hidden)
    elif isinstance(mixer, CompressedAttention):
        yield from _compressed_parts(style.attention, mixer, hidden)
    else:
        yield from _recurrent_parts(family, mixer, hidden)


def _grouped_parts(style: _Style, mixer: Attention, hidden: int) -> Iterator[Named]:
    at = style.attention
    together = (f"{at}.qkv_proj",)
    keys = mixer.kv_heads * mixer.head_dim if mixer.has_kv else 0
    queries = hidden * mixer.heads * mixer.head_dim
    if mixer.output_gate and style.gate:
        yield (f"{at}.{style.gate}",), queries
    yield (f"{at}.q_proj", *together), queries * (2 if mixer.output_gate and not style.gate else 1)
    if keys:
        yield (f"{at}.k_proj", *together), hidden * keys
    if keys and not mixer.values_are_keys:
        yield (f"{at}.v_proj", *together), hidden * mixer.kv_heads * mixer.value_dim
    yield (f"{at}.{style.output}",), mixer.heads * mixer.value_dim * hidden
    if mixer.index is not None and mixer.index.present:
        for name, product in zip(("index_q_proj", "index_k_proj"), mixer.index.products(hidden, hidden), strict=True):
            yield (f"{at}.{name}",), product.parameters


def _latent_parts(at: str, mixer: LatentAttention, hidden: int) -> Iterator[Named]:
    first, *others = mixer.products(hidden)
    into = ("q_a_proj" if mixer.q_rank else "q_proj", "kv_a_proj_with_mqa")
    latent = mixer.kv_rank + mixer.rope_dim
    yield from _divided(at, into, first.inner, first.columns, first.columns - latent, f"{at}.fused_qkv_a_proj")
    if mixer.q_rank:
        query, *others = others
        yield (f"{at}.q_b_proj",), query.parameters
    keys, values, output, *others = others
    yield (f"{at}.kv_b_proj",), keys.parameters + values.parameters
    yield (f"{at}.o_proj",), output.parameters
    if mixer.output_gate:
        gate, *others = others
        yield (f"{at}.g_proj",), gate.parameters
    if others and mixer.index is not None:
        yield (f"{at}.indexer.wq_b",), others[0].parameters
        yield from _divided(f"{at}.indexer", ("wk", "weights_proj"), hidden, others[1].columns, mixer.index.dim)


def _compressed_parts(at: str, mixer: CompressedAttention, hidden: int) -> Iterator[Named]:
    first, *others = mixer.products(hidden)
    yield from _divided(at, ("wq_a", "wkv"), hidden, mixer.q_rank + mixer.head_dim, mixer.q_rank)
    if (compressor := first.columns - mixer.q_rank - mixer.head_dim) > 0:
        yield from _divided(f"{at}.compressor", ("wkv", "wgate"), hidden, compressor, compressor // 2)
    yield from (
        ((f"{at}.{name}",), part.parameters) for name, part in zip(("wq_b", "wo_a", "wo_b"), others, strict=False)
    )
    if mixer.index is not None:
        index = mixer.index
        yield (f"{at}.indexer.wq_b",), others[3].parameters
        yield (f"{at}.indexer.weights_proj",), hidden * index.heads
        keys = others[4].columns - index.heads
        yield from _divided(f"{at}.indexer.compressor", ("wkv", "wgate"), hidden, keys, keys // 2)


def _divided(at: str, names: tuple[str, str], inner: int, columns: int, first: int, *more: str) -> Iterator[Named]:
    yield (f"{at}.{names[0]}", *more), inner * first
    yield (f"{at}.{names[1]}", *more), inner * (columns - first)


_RECURRENCES = {
    "nemotron_h": "mixer", "lfm2": "conv", "lfm2_moe": "conv",
    **dict.fromkeys(("falcon_h1", "granitemoehybrid", "bamba", "jamba"), "mamba"),
}  # fmt: skip


def _recurrent_parts(family: str, mixer: Recurrence, hidden: int) -> Iterator[Named]:
    first, *others = mixer.products(hidden)
    at = _RECURRENCES.get(family, "linear_attn")
    values = mixer.heads * mixer.value_dim
    if family == "qwen3_next":
        yield (f"{at}.in_proj_qkvz",), first.inner * (mixer.conv_channels + values)
        yield (f"{at}.in_proj_ba",), first.inner * 2 * mixer.heads
    elif family in ("qwen3_5", "qwen3_5_moe"):
        yield (f"{at}.in_proj_qkv", f"{at}.in_proj_qkvz"), first.inner * mixer.conv_channels
        yield (f"{at}.in_proj_z", f"{at}.in_proj_qkvz"), first.inner * values
        for name in ("in_proj_b", "in_proj_a"):
            yield (f"{at}.{name}", f"{at}.in_proj_ba"), first.inner * mixer.heads
    elif at == "linear_attn":  # Kimi's and MiniMax's have names like those of attention
        yield ("self_attn.qkv_proj", "self_attn.q_proj"), first.parameters
        for product in others[:-1]:
            yield ("self_attn.f_b_proj",), product.parameters
        yield ("self_attn.o_proj", "self_attn.out_proj"), others[-1].parameters
        return
    else:
        yield (f"{at}.in_proj",), first.parameters
        for name, product in zip(("x_proj", "dt_proj"), others[:-1], strict=False):  # Mamba-1
            yield (f"{at}.{name}",), product.parameters
    yield (f"{at}.out_proj",), others[-1].parameters


def _mlp_parts(style: _Style, part: Part, hidden: int) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield the part, the names and the size of each matrix of one layer's MLP; all experts count as one matrix."""
    if isinstance(part, Mlp):
        yield from _projections(MLPS, style.mlp, "", _dense(style), part.gated, hidden, part.width)
        return
    at = style.mlp if style.sparse is None else style.sparse
    yield from _projections(
        EXPERTS, at, style.experts, style.projections, part.gated, part.latent or hidden, part.width, part.count
    )
    if part.shared_width:
        names, shared = _dense(style), style.shared
        yield from _projections(MLPS, at, shared, names, part.gated, hidden, part.shared_width)
    if part.latent:
        for name in ("fc1_latent_proj", "fc2_latent_proj"):
            yield MLPS, (_joined(at, name),), hidden * part.latent


def _dense(style: _Style) -> tuple[str, str, str]:
    """Return the names of a dense MLP's matrices: another style has its own alone where all MLPs have it."""
    return (
        style.dense or style.projections
        if style.sparse is None or style.dense
        else ("gate_proj", "up_proj", "down_proj")
    )


def _projections(
    part: str, at: str, below: str, names: Sequence[str], gated: bool, hidden: int, width: int, count: int = 1
) -> Iterator[tuple[str, tuple[str, ...], int]]:
    whole = _joined(at, below)
    for place, name in enumerate(names):
        if place == 0 and not gated:
            continue
        others = [_joined(whole, "gate_up_proj")] if place < 2 and gated else []
        if below.startswith("experts"):
            others.append(_joined(at, f"experts.{'down_proj' if place == 2 else 'gate_up_proj'}"))
        yield part, (_joined(whole, name), *others), count * hidden * width


def _joined(at: str, below: str) -> str:
    return f"{at}.{below}" if at and below else at or below
