"""The reader of MLPs: which keys of a `config.json` each family of models uses for its dense MLPs and its experts.

Every reader takes the family's name and the number of layers, and returns the MLP of each layer, None for a layer
without. It notes problems in its `ConfigReader`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..parsing import ConfigReader
from .layers import Experts, Mlp, Part
from .mixers import kinds_of, nas_blocks, nemotron_pattern, read_shared


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts as Qwen3 configures it: each token is sent to `top_k` of `num_experts` MLPs."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool = False  # the chosen experts' weights sum to 1
    decoder_sparse_step: int = 1  # every how many layers has experts, counted from the end of each group
    mlp_only_layers: tuple[int, ...] = ()
    shared_size: int = 0  # width of the experts that every token goes to, beside the chosen ones
    scale: float = 1.0  # of the chosen experts' weights
    num_groups: int = 1  # into which the experts are divided
    top_groups: int = 1  # from which a token's are chosen

    def is_sparse(self, layer: int) -> bool:
        """Return whether `layer` has experts instead of one MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def read_experts(reader: ConfigReader, family: str | None) -> MoeConfig | None:
    """Read a mixture of experts as Qwen, Mixtral, gpt-oss, DeepSeek and GLM configure it; None for other families."""
    if family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        return _read_grouped_experts(reader, family)
    if family not in ("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "mixtral", "gpt_oss"):
        return None
    has_one_width = family in ("mixtral", "gpt_oss")  # whose layers all have experts, with weights that sum to 1
    key = "num_local_experts" if has_one_width or reader.get("num_local_experts") is not None else "num_experts"
    moe = MoeConfig(
        num_experts=reader.integer(key),
        top_k=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("intermediate_size" if has_one_width else "moe_intermediate_size"),
        norm_topk_prob=has_one_width or reader.flag("norm_topk_prob", family in ("qwen3_next", "qwen3_5_moe")),
        decoder_sparse_step=reader.integer("decoder_sparse_step", 1),
        mlp_only_layers=reader.integers("mlp_only_layers"),
        shared_size=0 if has_one_width else reader.integer("shared_expert_intermediate_size", 0, minimum=0),
    )
    _check_top_k(reader, moe.top_k, moe.num_experts)
    return moe


def _read_grouped_experts(reader: ConfigReader, family: str) -> MoeConfig | None:
    """Read the experts of DeepSeek and GLM, which are chosen from groups, behind some dense layers; None if the file
    has no experts, which is noted for a GLM."""
    number = reader.integer
    if reader.get("n_routed_experts") is None:
        if family == "glm4_moe":  # another family's dense model would load, and rotate a part of each head alone
            reader.problem("n_routed_experts", "is missing")
        return None
    count, width = number("n_routed_experts"), number("moe_intermediate_size")
    has_groups = family != "deepseek_v2" or reader.get("topk_method") == "group_limited_greedy"
    groups, top_groups = (number("n_group", 1), number("topk_group", 1)) if has_groups else (1, 1)
    if count % groups or top_groups > groups:
        reader.problem("n_group", f"{count} experts in {groups} groups, of which {top_groups} are chosen")
    if (every := number("moe_layer_freq", 1)) != 1:
        reader.problem("moe_layer_freq", f"expected experts in every layer behind the dense ones (1), found {every}")
    moe = MoeConfig(
        num_experts=count,
        top_k=number("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=reader.flag("norm_topk_prob"),
        mlp_only_layers=tuple(range(number("first_k_dense_replace", 0, minimum=0))),
        shared_size=width * number("n_shared_experts", 0, minimum=0),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
    )
    _check_top_k(reader, moe.top_k, count)
    return moe


def _check_top_k(reader: ConfigReader, top_k: int, count: int) -> None:
    if top_k > count:
        reader.problem("num_experts_per_tok", f"{top_k} experts per token, but there are {count}")


# -- one for each layer, None for a layer without ---------------------------------------------------------------------

Parts = Iterable[Part | None]


def dense_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    width = reader.integer("intermediate_size")
    return [Mlp(width)] * layers


def ungated(reader: ConfigReader, family: str, layers: int) -> Parts:
    return [Mlp(reader.integer("intermediate_size"), gated=False)] * layers


def qwen_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    moe = read_experts(reader, family)
    assert moe is not None
    shared = moe.shared_size
    experts = Experts(moe.num_experts, moe.top_k, moe.intermediate_size, shared, shared_gate=bool(shared))
    has_dense = any(not moe.is_sparse(layer) for layer in range(layers))
    dense = Mlp(reader.integer("intermediate_size")) if has_dense else None
    return [experts if moe.is_sparse(layer) else dense for layer in range(layers)]


def _first_of(reader: ConfigReader, *keys: str) -> str:
    """Return the first of several names of a key that the file has."""
    return next((key for key in keys if reader.get(key) is not None), keys[0])


def _experts(reader: ConfigReader, width: int, *, shared_width: int = 0, **others: Any) -> Experts:
    count = reader.integer(_first_of(reader, "n_routed_experts", "num_local_experts", "num_experts"))
    top_k = reader.integer(_first_of(reader, "num_experts_per_tok", "num_experts_per_token", "top_k_experts"))
    _check_top_k(reader, top_k, count)
    return Experts(count, top_k, width, shared_width, **others)


def deepseek_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read experts with shared ones behind a few dense layers: DeepSeek, Kimi, GLM, MiniMax M3, Step, MiMo."""
    number = reader.integer
    if (
        reader.get("n_routed_experts") is None
        and reader.get(_first_of(reader, "num_experts", "num_local_experts")) is None
    ):
        return dense_mlps(reader, family, layers)  # the small models of a family
    width = number(_first_of(reader, "moe_intermediate_size", "intermediate_size"))
    shared = number(_first_of(reader, "n_shared_experts", "num_shared_experts"), 0, minimum=0)
    shared_width = shared * number(_first_of(reader, "share_expert_dim", "shared_intermediate_size"), width, minimum=0)
    experts = _experts(reader, width, shared_width=shared_width, latent=number("routed_expert_hidden_size", None))
    frequency = reader.get("moe_layer_freq", 1)
    if reader.get("mlp_layer_types") is not None:
        sparse = [kind == "sparse" for kind in kinds_of(reader, layers, "mlp_layer_types")]
    elif isinstance(frequency, list):
        sparse = [kind == 1 for kind in kinds_of(reader, layers, "moe_layer_freq")]
    else:
        first, every = number("first_k_dense_replace", 0, minimum=0), number("moe_layer_freq", 1)
        sparse = [layer >= first and layer % every == 0 for layer in range(layers)]
    if all(sparse):
        return [experts] * layers
    dense = Mlp(number(_first_of(reader, "dense_intermediate_size", "intermediate_size")))
    return [experts if is_sparse else dense for is_sparse in sparse]


def small_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read experts of every layer, whose width is `intermediate_size`: gpt-oss, MiniMax-01 and M2, Granite, OLMoE.
    Small hybrids of Granite have no experts, and the shared MLP alone."""
    shared = reader.integer("shared_intermediate_size", 0, minimum=0)
    if family == "granitemoehybrid" and not reader.integer("num_local_experts", 0, minimum=0):
        reader.get("num_experts_per_tok")
        return [Mlp(shared)] * layers
    width = reader.integer("intermediate_size")
    return [_experts(reader, width, shared_width=shared, biases=family == "gpt_oss")] * layers


def llama4_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    width, every = reader.integer("intermediate_size"), reader.integer("interleave_moe_layer_step", 1)
    experts = _experts(reader, width, shared_width=width)
    listed = reader.integers("moe_layers")
    sparse = set(listed) if listed else set(range(every - 1, layers, every))
    dense = Mlp(reader.integer("intermediate_size_mlp")) if len(sparse) < layers else None
    return [experts if layer in sparse else dense for layer in range(layers)]


def gemma4_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read a dense MLP in every layer, and the experts beside it in layers that have some."""
    width = reader.integer("intermediate_size")
    if not reader.flag("enable_moe_block"):
        own = layers - read_shared(reader, layers)
        wide = Mlp(2 * width) if reader.flag("use_double_wide_mlp") else Mlp(width)
        return [Mlp(width) if layer < own else wide for layer in range(layers)]
    return [_experts(reader, reader.integer("moe_intermediate_size"), shared_width=width)] * layers


def nemotron_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read MLPs without a gate (squared ReLU), dense or with experts that may work on a smaller latent vector."""
    pattern = nemotron_pattern(reader)
    dense = experts = None
    if "-" in pattern:
        dense = Mlp(reader.integer("intermediate_size"), gated=False)
    if "E" in pattern:
        shared = reader.integer("moe_shared_expert_intermediate_size", 0, minimum=0)
        latent = reader.integer("moe_latent_size", None)
        width = reader.integer("moe_intermediate_size")
        experts = _experts(reader, width, shared_width=shared, gated=False, latent=latent)
    return [{"-": dense, "E": experts}.get(kind) for kind in pattern]


def nas_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read widths as multiples of the hidden size, two thirds of them rounded up to 256 (the checkpoint's
    `modeling_decilm.py`)."""
    hidden = reader.integer("hidden_size")
    mlps: list[Part | None] = []
    for block in nas_blocks(reader, layers):
        part = block.under("ffn")
        skipped = part.flag("no_op") or part.flag("replace_with_linear")
        width = 0 if skipped else int(2 * part.number("ffn_mult") * hidden / 3)
        mlps.append(None if skipped else Mlp(-(-width // 256) * 256))
    return mlps


def ernie_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read the experts of ERNIE 4.5, which may end before the last layers do."""
    last = reader.integer("moe_layer_end_index", layers - 1, minimum=-1)
    parts = list(deepseek_experts(reader, family, layers))
    if 0 <= last < layers - 1:
        parts[last + 1 :] = [Mlp(reader.integer("intermediate_size"))] * (layers - 1 - last)
    return parts


def jamba_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    width = reader.integer("intermediate_size")
    every, first = reader.integer("expert_layer_period", 2), reader.integer("expert_layer_offset", 1, minimum=0)
    if reader.integer("num_experts", 16) == 1:
        return [Mlp(width)] * layers
    experts = _experts(reader, width)
    return [experts if layer % every == first else Mlp(width) for layer in range(layers)]


def lfm2_mlps(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read LFM2's width: two thirds of what the file says, rounded up, if that adjusts itself."""
    width = reader.integer("intermediate_size")
    if reader.flag("block_auto_adjust_ff_dim", True):
        multiple = reader.integer("block_multiple_of", 256)
        width = int(reader.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return [Mlp(width)] * layers


def longcat_experts(reader: ConfigReader, family: str, layers: int) -> Parts:
    """Read LongCat-Flash: experts beside two dense MLPs, each behind an attention of its own. Some of those that a
    token chooses are its own vector and no MLP; a usual token chooses as many as their share."""
    count, none = reader.integer("n_routed_experts"), reader.integer("zero_expert_num", 0, minimum=0)
    chosen = reader.integer("num_experts_per_tok")
    top_k = max(round(chosen * count / (count + none)), 1)
    width, both = reader.integer("moe_intermediate_size"), 2 * reader.integer("intermediate_size")
    return [Experts(count, top_k, width, both)] * layers
