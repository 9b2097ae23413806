"""The reader of mixers: which keys of a `config.json` each family of models uses for its attention or recurrence.

Every reader takes the family's name and the number of layers, and returns the mixer of each layer, None for a layer
without. It notes problems in its `ConfigReader`. Where a published configuration leaves a key out, the default is that
of the family's class in `transformers` (4.57) or of the checkpoint's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..parsing import MAX_INTEGER, ConfigReader
from .layers import WIDE_STATE, Attention, CompressedAttention, Index, LatentAttention, Mixer, Recurrence

Mixers = Iterable[Mixer | None]


def read_sizes(reader: ConfigReader, family: str | None) -> dict[str, Any]:
    """Read the sizes of a decoder with grouped attention, and what they share with its computation;
    problems are noted in `reader`."""
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    has_problems = bool(reader.problems)
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problem("num_key_value_heads", f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    if family == "qwen3":
        head_dim = reader.integer("head_dim", 128)
    else:
        head_dim = reader.integer("head_dim", hidden // heads)
        if reader.get("head_dim") is None and hidden % heads and not has_problems:
            reader.problem("hidden_size", f"{hidden} is no multiple of the {heads} heads, and head_dim is not given")
    return {
        "layers": reader.integer("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": reader.integer("intermediate_size"),
        "vocab": reader.integer("vocab_size"),
        "max_context": reader.integer("max_position_embeddings", 2048),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": reader.flag("attention_bias") or family in ("qwen2", "qwen2_moe", "mimo"),
        "qk_norm": family in ("qwen3", "qwen3_moe", "olmo2", "olmo3"),
    }


def replace_missing(reader: ConfigReader, **defaults: Any) -> ConfigReader:
    """Return a reader that finds `defaults` where the file has nothing, and notes its problems in the same place."""
    absent = {key: value for key, value in defaults.items() if reader.get(key) is None}
    return reader.with_data({**reader.data, **absent})


def grouped(reader: ConfigReader, family: str, layers: int, **others: Any) -> list[Attention]:
    """Read grouped attention in every layer, some with a window."""
    sizes = read_sizes(replace_missing(reader, intermediate_size=1), family)
    attention = Attention(
        sizes["heads"], sizes["kv_heads"], sizes["head_dim"], sizes["head_dim"],
        qkv_bias=sizes["qkv_bias"], qk_norm=sizes["qk_norm"] or reader.flag("use_qk_norm"), **others,
    )  # fmt: skip
    window, windowed = read_windows(reader, family, layers)
    return [replace(attention, window=window) if layer in windowed else attention for layer in range(layers)]


def read_windows(reader: ConfigReader, family: str, layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the attention window in tokens, and the layers that have it."""
    key = "attention_chunk_size" if family == "llama4" else "sliding_window"
    always = (
        "mistral", "ministral3", "mixtral", "phi3", "gemma2", "gemma3", "gemma4", "gpt_oss", "step3p7", "llama4", "olmo3",
    )  # fmt: skip
    if reader.get(key) is None or not reader.flag("use_sliding_window", family in always):
        return None, frozenset()
    window, kinds = reader.integer(key), reader.get("layer_types")
    if isinstance(kinds, list):
        chosen = {i for i, kind in enumerate(kinds[:layers]) if kind in ("sliding_attention", "chunked_attention")}
    elif family.startswith("qwen"):  # the layers below `max_window_layers` see everything
        chosen = set(range(reader.integer("max_window_layers", layers, minimum=0), layers))
    elif family in ("gemma2", "gpt_oss"):
        chosen = set(range(0, layers, 2))
    elif family == "smollm3":
        chosen = set(read_unrotated(reader, layers))
    elif family in ("gemma3", "gemma4", "llama4", "olmo3") or reader.get("sliding_window_pattern") is not None:
        pattern = reader.get("sliding_window_pattern")  # every sixth, every fourth layer sees everything
        if isinstance(pattern, str):  # EXAONE: LLLG
            pattern = len(pattern)
        else:
            pattern = reader.integer("sliding_window_pattern", 6 if family.startswith("gemma") else 4)
        chosen = {layer for layer in range(layers) if (layer + 1) % pattern}
    else:
        chosen = set(range(layers))
    if family == "gemma4":  # the last layer sees everything, whatever the file says
        chosen.discard(layers - 1)
    return (window, frozenset(chosen)) if chosen else (None, frozenset())


def read_unrotated(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return the layers of SmolLM3 whose queries and keys are not rotated: those with a 0 in `no_rope_layers`, else
    every `no_rope_layer_interval`-th."""
    if reader.get("no_rope_layers") is not None:
        kinds = kinds_of(reader, layers, "no_rope_layers")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == 0)
    interval = reader.integer("no_rope_layer_interval", 4)
    return tuple(range(interval - 1, layers, interval))


def gpt_oss(reader: ConfigReader, family: str, layers: int) -> Mixers:
    return grouped(reader, family, layers, sinks=True, output_bias=True)


def gemma4(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read layers with a window, and global ones whose heads are larger and fewer and whose values are their keys. The
    last layers may read the keys and values of the last layer below them of their kind."""
    heads, dim = reader.integer("num_attention_heads"), reader.integer("head_dim")
    kv_heads, window = reader.integer("num_key_value_heads"), reader.integer("sliding_window")
    _, windowed = read_windows(reader, family, layers)
    local = Attention(heads, kv_heads, dim, dim, window=window, qk_norm=True)
    large, few = read_full_heads(reader, layers, windowed, (dim, kv_heads))
    wide = Attention(heads, few, large, large, qk_norm=True, values_are_keys=reader.flag("attention_k_eq_v"))
    own = layers - read_shared(reader, layers)
    kinds = [local if layer in windowed else wide for layer in range(layers)]
    return [kind if layer < own else replace(kind, has_kv=False) for layer, kind in enumerate(kinds)]


def read_shared(reader: ConfigReader, layers: int) -> int:
    """Return how many of the last layers have no keys and values of their own (Gemma 4)."""
    shared = reader.integer("num_kv_shared_layers", 0, minimum=0)
    if shared >= layers:
        reader.problem("num_kv_shared_layers", f"{shared} of {layers} layers: expected one with its own at least")
        return 0
    return shared


def read_full_heads(
    reader: ConfigReader, layers: int, windowed: frozenset[int], heads: tuple[int, int]
) -> tuple[int, int]:
    """Return the channels and the number of the key-value heads of Gemma 4's layers without a window. `heads`: those of
    the layers with one.

    Published files have keys for them. Those that `transformers` 5.23 saves say in `per_layer_config` what is different
    in which layer, by its number with zeros in front.
    """
    if "per_layer_config" not in reader.data:
        reader.get("num_global_key_value_heads", None)  # it says nothing where values are projected
        few = reader.integer("num_global_key_value_heads", heads[1]) if reader.flag("attention_k_eq_v") else heads[1]
        return reader.integer("global_head_dim", 512), few
    found = _different_layers(reader, layers)
    names = ("head_dim", "num_key_value_heads")
    of_layer = [
        tuple(found.get(layer, {}).get(name, usual) for name, usual in zip(names, heads, strict=True))
        for layer in range(layers)
    ]
    full = {pair for layer, pair in enumerate(of_layer) if layer not in windowed} or {heads}
    has_others = any(set(about) - set(names) for about in found.values())
    if has_others or len(full) > 1 or any(of_layer[layer] != heads for layer in windowed):
        reader.problem("per_layer_config", "expected one kind of heads for all layers without a window")
        return heads
    return full.pop()


def _different_layers(reader: ConfigReader, layers: int) -> dict[int, Mapping[str, Any]]:
    """Return the entries of `per_layer_config` by layer."""
    given, found = reader.get("per_layer_config"), {}
    for key, about in given.items() if isinstance(given, Mapping) else ():
        is_layer = key.isascii() and key.isdecimal() and len(key) < 8 and int(key) < layers
        if not is_layer or not isinstance(about, Mapping):
            reader.problem("per_layer_config", f"expected an object for each of some layers, found {key!r}")
        elif any(type(value) is not int or not 0 < value <= MAX_INTEGER for value in about.values()):
            reader.problem("per_layer_config", f"expected whole numbers above 0, found {dict(about)!r}")
        else:
            found[int(key)] = about
    if given is not None and not isinstance(given, Mapping):
        reader.problem("per_layer_config", f"must be an object, got {given!r}")
    return found


def kinds_of(reader: ConfigReader, layers: int, key: str = "layer_types") -> list[Any]:
    """Return the entry of a list for each layer; if there is no list, every layer has full attention."""
    kinds = reader.get(key)
    if kinds is None:
        return ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) < layers:
        reader.problem(key, f"must be a list with an entry for each of the {layers} layers")
        return ["full_attention"] * layers
    return kinds[:layers]


def mimo_flash(reader: ConfigReader, family: str, layers: int) -> Mixers:
    def attention(prefix: str, window: int | None) -> Attention:
        number = reader.integer
        return Attention(
            number(f"{prefix}num_attention_heads"), number(f"{prefix}num_key_value_heads"), number(f"{prefix}head_dim"),
            number(f"{prefix}v_head_dim"), window=window, sinks=bool(window),
        )  # fmt: skip

    full, local = attention("", None), attention("swa_", reader.integer("sliding_window"))
    return [local if kind == 1 else full for kind in kinds_of(reader, layers, "hybrid_layer_pattern")]


def minimax_m3(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read block-sparse attention: small heads score blocks, and the best ones are read.
    The first layers see everything."""
    dense = grouped(reader, family, 1)[0]
    sparse = reader.under("sparse_attention_config")
    if not sparse.flag("use_sparse_attention"):
        return [dense] * layers
    reach = sparse.integer("sparse_topk_blocks") * sparse.integer("sparse_block_size")
    index = Index(sparse.integer("sparse_num_index_heads"), sparse.integer("sparse_index_dim"), reach)
    chosen = kinds_of(sparse, layers, "sparse_attention_freq")
    return [replace(dense, index=index) if kind == 1 else dense for kind in chosen]


def latent(reader: ConfigReader, family: str, layers: int) -> list[LatentAttention]:
    """Read multi-head latent attention, with an indexer in DeepSeek-V3.2 and GLM-5."""
    number = reader.integer
    latent = LatentAttention(
        number("num_attention_heads"), number("q_lora_rank", 0), number("kv_lora_rank"), number("qk_nope_head_dim"),
        number("qk_rope_head_dim"), number("v_head_dim"), output_gate=reader.flag("mla_use_output_gate"),
    )  # fmt: skip
    if reader.get("index_topk") is None:
        return [latent] * layers
    index = Index(number("index_n_heads"), number("index_head_dim"), number("index_topk"))
    kinds = kinds_of(reader, layers, "indexer_types")  # GLM-5.3: several layers use one choice
    return [replace(latent, index=replace(index, present=kind != "shared")) for kind in kinds]


def latent_pairs(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read LongCat-Flash, whose layers have two latent attentions."""
    return latent(reader, family, 2 * layers)


def compressed(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read the attention of DeepSeek-V4, whose layers compress 0, 4 or 128 tokens to one;
    those of 4 have an indexer."""
    number = reader.integer
    ratios = kinds_of(reader, layers, "compress_ratios")
    plain = CompressedAttention(
        number("num_attention_heads"), number("head_dim"), number("q_lora_rank"), number("o_lora_rank"),
        number("o_groups"), number("sliding_window"), 0,
    )  # fmt: skip
    index = Index(number("index_n_heads"), number("index_head_dim"), number("index_topk") * 4, tokens_per_entry=4)
    if any(ratio not in (0, 4, 128) for ratio in ratios):
        reader.problem("compress_ratios", f"expected 0, 4 or 128 for each layer, found {ratios!r}")
        return [plain]
    return [replace(plain, ratio=ratio, index=index if ratio == 4 else None) for ratio in ratios]


def _state_bytes(reader: ConfigReader) -> int | None:
    """Return the bytes of an element of the recurrent state; None if the file does not say it."""
    found = reader.get("mamba_ssm_dtype") or reader.get("mamba_ssm_cache_dtype")
    return None if found is None else WIDE_STATE if found == "float32" else 2


def delta_rule(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Qwen3-Next and Qwen3.5: gated delta nets, and gated attention in every
    `full_attention_interval`-th layer."""
    number = reader.integer
    key_heads, heads = number("linear_num_key_heads"), number("linear_num_value_heads")
    key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + heads * value_dim
    linear = Recurrence(
        heads, key_dim, value_dim, projected=channels + heads * value_dim + 2 * heads, output=heads * value_dim,
        conv_channels=channels, conv_kernel=number("linear_conv_kernel_dim", 4), other_parameters=2 * heads + value_dim,
        # All published files of Qwen3.5 say 32 bits; those of Qwen3-Next say nothing.
        state_bytes_each=_state_bytes(reader) or (None if family == "qwen3_next" else WIDE_STATE),
    )  # fmt: skip
    dim = number("head_dim", 256)
    gate = reader.flag("attn_output_gate", True)
    full = Attention(
        number("num_attention_heads"), number("num_key_value_heads"), dim, dim, qk_norm=True, output_gate=gate
    )
    interval = number("full_attention_interval", 4)
    if reader.get("layer_types"):
        return [linear if kind == "linear_attention" else full for kind in kinds_of(reader, layers)]
    return [linear if (layer + 1) % interval else full for layer in range(layers)]


def kimi_linear(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Kimi Linear and K3: delta attention with a gate per channel, and latent attention in the listed
    layers (from 1)."""
    full = latent(reader, family, 1)[0]
    about = reader.under("linear_attn_config")
    heads, dim = about.integer("num_heads"), about.integer("head_dim")
    width, full_gate = heads * dim, about.flag("use_full_rank_gate")
    low_rank = ((dim, width),) if full_gate else ((dim, width), (dim, width))
    linear = Recurrence(
        heads, dim, dim, projected=(4 if full_gate else 3) * width, output=width, conv_channels=3 * width,
        conv_kernel=about.integer("short_conv_kernel_size", 4), shared_projected=heads + dim * len(low_rank),
        low_rank=low_rank, other_parameters=heads + width + dim, state_bytes_each=WIDE_STATE,
    )  # fmt: skip
    full_layers = set(about.integers("full_attn_layers"))
    return [full if layer + 1 in full_layers else linear for layer in range(layers)]


def lightning(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read MiniMax-01: lightning attention where `attn_type_list` has a 0, else softmax attention."""
    full = grouped(reader, family, 1)[0]
    width = full.heads * full.head_dim
    linear = Recurrence(
        full.heads, full.head_dim, full.head_dim, projected=4 * width, output=width, other_parameters=width
    )
    kinds = kinds_of(reader, layers, "attn_type_list" if reader.get("layer_types") is None else "layer_types")
    return [linear if kind in (0, "linear_attention") else full for kind in kinds]


def _mamba(
    reader: ConfigReader, *, heads: int, dim: int, groups: int, state: int, kernel: int, norm: bool
) -> Recurrence:
    inner = heads * dim
    channels = inner + 2 * groups * state
    return Recurrence(
        heads, state, dim, projected=inner + channels + heads, output=inner, conv_channels=channels, conv_kernel=kernel,
        other_parameters=3 * heads + (inner if norm else 0),
        state_bytes_each=_state_bytes(reader),
    )  # fmt: skip


def nemotron_letters(names: list[Any]) -> str:
    """Return the letters for the names of Nemotron-H's layers."""
    letters = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
    return "".join(letters.get(name, "?") if isinstance(name, str) else "?" for name in names)


def nemotron_pattern(reader: ConfigReader) -> str:
    """Return Nemotron-H's pattern of layers: M mamba, * attention, - MLP, E experts;
    newer files list the names instead."""
    pattern, names = reader.get("hybrid_override_pattern"), reader.get("layers_block_type")
    if pattern is None and isinstance(names, list):
        pattern = nemotron_letters(names)
    if not isinstance(pattern, str) or set(pattern) - set("M*-E") or not set("M*") & set(pattern):
        reader.problem("hybrid_override_pattern", f"must be a text of M, *, - and E, found {pattern!r}")
        return "*"
    return pattern


def nemotron(reader: ConfigReader, family: str, layers: int) -> Mixers:
    number = reader.integer
    mamba = _mamba(
        reader, heads=number("mamba_num_heads"), dim=number("mamba_head_dim"), groups=number("n_groups"),
        state=number("ssm_state_size"), kernel=number("conv_kernel", 4), norm=True,
    )  # fmt: skip
    dim = number("head_dim" if reader.get("head_dim") is not None else "attention_head_dim")
    attention = Attention(number("num_attention_heads"), number("num_key_value_heads"), dim, dim)
    mixers: dict[str, Mixer] = {"M": mamba, "*": attention}
    return [mixers.get(kind) for kind in nemotron_pattern(reader)]


def falcon(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Falcon-H1: every layer has attention and mamba side by side."""
    number = reader.integer
    inner = number("mamba_d_ssm", number("mamba_expand", 2) * number("hidden_size"))
    heads = number("mamba_n_heads", 128)
    mamba = _mamba(
        reader, heads=heads, dim=inner // heads, groups=number("mamba_n_groups", 1), state=number("mamba_d_state", 256),
        kernel=number("mamba_d_conv", 4), norm=reader.flag("mamba_rms_norm", True),
    )  # fmt: skip
    return [*grouped(reader, family, layers), *[mamba] * layers]


def mamba_hybrid(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Granite 4 and Bamba: mamba in most layers, attention in the others."""
    number = reader.integer
    heads, dim = number("mamba_n_heads", 128), reader.get("mamba_d_head")
    inner = number("mamba_expand", 2) * number("hidden_size")
    mamba = _mamba(
        reader, heads=heads, dim=inner // heads if dim in (None, "auto") else number("mamba_d_head"),
        groups=number("mamba_n_groups", 1), state=number("mamba_d_state", 256), kernel=number("mamba_d_conv", 4), norm=True,
    )  # fmt: skip
    full = grouped(reader, family, layers)
    listed = reader.get("attn_layer_indices") or ()
    kinds = ["attention" if isinstance(listed, list) and layer in listed else "mamba" for layer in range(layers)]
    for key in ("layer_types", "layers_block_type"):
        if reader.get(key) is not None:
            kinds = kinds_of(reader, layers, key)
    return [
        full[layer] if "attention" in str(kind) and kind != "linear_attention" else mamba
        for layer, kind in enumerate(kinds)
    ]


def jamba(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Jamba: Mamba-1, whose states are `mamba_d_state` for each channel, and attention in every
    `attn_layer_period`-th layer."""
    number = reader.integer
    inner, state = number("mamba_expand", 2) * number("hidden_size"), number("mamba_d_state", 16)
    rank = number("mamba_dt_rank", -(-number("hidden_size") // 16))
    mamba = Recurrence(
        inner, state, 1, projected=2 * inner, output=inner, conv_channels=inner, conv_kernel=number("mamba_d_conv", 4),
        low_rank=((inner, rank + 2 * state), (rank, inner)), other_parameters=(state + 2) * inner,
        state_bytes_each=_state_bytes(reader),
    )  # fmt: skip
    every, first = number("attn_layer_period", 8), number("attn_layer_offset", 4, minimum=0)
    full = grouped(reader, family, layers)
    return [full[layer] if layer % every == first else mamba for layer in range(layers)]


def short_convolutions(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read LFM2: gated convolutions over a few tokens, and attention in the listed layers."""
    hidden = reader.integer("hidden_size")
    conv = Recurrence(
        0,
        0,
        0,
        projected=3 * hidden,
        output=hidden,
        conv_channels=hidden,
        conv_kernel=reader.integer("conv_L_cache", 3),
    )
    full, listed = grouped(reader, family, layers), reader.get("full_attn_idxs")
    kinds = kinds_of(reader, layers)
    if isinstance(listed, list) and reader.get("layer_types") is None:
        kinds = ["full_attention" if layer in listed else "conv" for layer in range(layers)]
    return [full[layer] if kind == "full_attention" else conv for layer, kind in enumerate(kinds)]


def nas_blocks(reader: ConfigReader, layers: int) -> list[ConfigReader]:
    blocks = reader.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(block, Mapping) for block in blocks):
        reader.problem("block_configs", f"must be a list of {layers} objects, one for each layer")
        return []
    return [
        ConfigReader(block, reader.source, f"block_configs[{i}].", reader.problems) for i, block in enumerate(blocks)
    ]


def nas_attention(reader: ConfigReader, family: str, layers: int) -> Mixers:
    """Read Nemotron NAS (Puzzle): each layer has its own grouping of heads, or no attention."""
    heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    mixers: list[Mixer | None] = []
    for block in nas_blocks(reader, layers):
        part = block.under("attention")
        if part.flag("no_op") or part.flag("replace_with_linear"):
            mixers.append(None)
            continue
        mixers.append(Attention(heads, heads // part.integer("n_heads_in_group"), hidden // heads, hidden // heads))
    return mixers
