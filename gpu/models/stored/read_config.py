"""Reads the fields of a model's configuration from its `config.json`, as its family has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....core.model_shape import (
    FAMILIES,
    read_experts,
    read_full_heads,
    read_sizes,
    read_unrotated,
    read_windows,
    replace_missing,
)
from ....core.parsing import ConfigReader
from ...types.attention import Latent
from ...types.recurrence import StateShape
from ..families import (
    CLAMPED_SWIGLU,
    GELU_TANH,
    MODEL_TYPES,
    RECURRENT,
    SILU,
    ModelFamily,
    Routing,
    ScaleKey,
    family_of,
)
from ..rope import Rope, read_ropes

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


PARD_KEYS = ("pard_token", "ptd_token_id")


def read_fields(reader: ConfigReader, architecture: str | None) -> dict[str, Any]:
    """Return the fields of `ModelConfig`; what is wrong or missing is noted in `reader`."""
    name = None if architecture is None else MODEL_TYPES[architecture]
    family = ModelFamily() if architecture is None else family_of(architecture)
    recurrent = _read_recurrent(reader) if family.has_states else {}
    if name is not None:
        reader = replace_missing(reader, **FAMILIES[name].defaults)
    if family.experts is not None and family.experts.has_own_width and reader.get("intermediate_size") is None:
        reader = replace_missing(
            reader, intermediate_size=reader.get("moe_intermediate_size")
        )  # all layers have experts
    if family.experts is not None and family.experts.routing is not Routing.SOFTMAX:
        _refuse_other_routing(reader, family.experts.routing)
    latent = _read_latent(reader) if family.has_latent else None
    if latent is not None:
        reader = reader.with_data({**reader.data, "num_key_value_heads": None, "head_dim": latent.rope_dim})
    sizes = read_sizes(reader, name)
    layers, head_dim = sizes["layers"], sizes["head_dim"]
    if latent is None and head_dim % 2:
        reader.problem("head_dim", f"must be even, its halves are rotated against each other; got {head_dim}")
    window, windowed = read_windows(reader, name or "", layers) if family.has_windows else (None, frozenset[int]())
    if reader.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images there are none
        reader.problem("use_bidirectional_attention", "only attention to earlier tokens is implemented")
    if family.activation == CLAMPED_SWIGLU and (limit := reader.number("swiglu_limit", 7.0)) != 7.0:
        reader.problem("swiglu_limit", f"only 7 is implemented, got {limit:g}")
    rope, local_rope = read_ropes(reader, sizes["max_context"], head_dim, family)
    if family.has_full_heads and local_rope is None:
        reader.problem("rope_parameters", "expected an object for full_attention, and one for sliding_attention")
    # Beyond the context a window hides nothing; but its layers may have a rotation of their own.
    if window and window >= sizes["max_context"] and local_rope is None:
        window, windowed = None, frozenset()
    scale, caps = family.attention_scale, family.softcaps
    config: dict[str, Any] = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_layers": layers,
        "num_heads": sizes["heads"],
        "num_kv_heads": sizes["kv_heads"],
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_position_embeddings": sizes["max_context"],
        "qkv_bias": _read_flag(reader, family.qkv_bias),
        "output_bias": _read_flag(reader, family.output_bias),
        "mlp_bias": _read_flag(reader, family.mlp_bias),
        "qk_norm": _read_flag(reader, family.has_head_norms),
        "tied_embeddings": sizes["tied_embeddings"],
        "moe": read_experts(reader, name),
        "mask_token": _mask_token(reader),
        "bos_token_id": next(iter(reader.token_ids("bos_token_id")), None),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": _read_dtype(reader),
        "activation": _read_activation(reader, family.activation),
        "window": window or 0,
        "windowed_layers": tuple(sorted(windowed)),
        "local_rope": local_rope if windowed else None,
        "unrotated_layers": _read_unrotated(reader, layers) if family.has_unrotated_layers else (),
        "attention_scale": reader.number(scale.name) ** scale.power if isinstance(scale, ScaleKey) else scale,
        "attention_softcap": 0.0 if caps is None else _read_softcap(reader, "attn_logit_softcapping", caps[0]),
        "logit_softcap": 0.0 if caps is None else _read_softcap(reader, "final_logit_softcapping", caps[1]),
        "sinks": family.has_sinks,
        **(_read_full_heads(reader, sizes, windowed) if family.has_full_heads else {}),
        **{field: reader.number(key, 1.0) for field, key in family.numbers.items()},
        **recurrent,
    }
    if latent is not None:
        config |= _latent_fields(latent, rope, reader.flag("rope_interleave", family.rotates_neighbours))
    return config


def _latent_fields(latent: Latent, rope: Rope, neighbours: bool) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that latent attention gives other values."""
    size = latent.rank + latent.rope_dim
    return {
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": size,
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * rope.score_factor,
        "rope": replace(rope, fraction=latent.rope_dim / size, neighbours=neighbours),
    }


def _read_recurrent(reader: ConfigReader) -> dict[str, Any]:
    """Read the sizes of a recurrent layer, none of which has a default, and which layers are recurrent: three of four
    if the file does not say it."""
    number = reader.integer
    state = StateShape(
        number("linear_num_value_heads"),
        number("linear_num_key_heads"),
        number("linear_key_head_dim"),
        number("linear_value_head_dim"),
        number("linear_conv_kernel_dim"),
    )
    if reader.get("linear_num_key_heads") is not None and state.heads % state.key_heads:
        found = f"{state.heads} value heads cannot share {state.key_heads} key heads evenly"
        reader.problem("linear_num_value_heads", found)
    if reader.get("linear_conv_kernel_dim") is not None and state.kernel < 2:
        reader.problem("linear_conv_kernel_dim", f"expected at least 2, got {state.kernel}")
    if not reader.flag("attn_output_gate", True):
        reader.problem("attn_output_gate", "attention without a gate is not implemented for this family")
    layers = number("num_hidden_layers")
    kinds = reader.get("layer_types")
    if kinds is None:
        every = number("full_attention_interval", 4)
        kinds = [RECURRENT if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        reader.problem("layer_types", f"must be a list with an entry for each of {layers} layers, got {kinds!r}")
        kinds = []
    elif all(kind == RECURRENT for kind in kinds):
        reader.problem("layer_types", "expected at least one layer with full_attention")
    recurrent = tuple(layer for layer, kind in enumerate(kinds) if kind == RECURRENT)
    return {"state": state, "recurrent_layers": recurrent, "output_gate": True}


def _read_latent(reader: ConfigReader) -> Latent:
    """Read the sizes of latent attention."""
    number = reader.integer
    latent = Latent(
        number("kv_lora_rank"),
        number("qk_rope_head_dim"),
        number("qk_nope_head_dim"),
        number("v_head_dim"),
        0 if reader.get("q_lora_rank") is None else number("q_lora_rank"),
    )
    for key, size in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rope_dim)):
        if reader.get(key) is not None and size % 2:
            reader.problem(key, f"must be even, half of it stands in each half of a key; got {size}")
    if reader.get("index_topk") is not None:
        reader.problem("index_topk", "sparse attention is not implemented")
    return latent


def _refuse_other_routing(reader: ConfigReader, routing: Routing) -> None:
    """Refuse ways to choose experts from groups that a family does not have here."""
    is_corrected = routing is Routing.CORRECTED
    scores = "sigmoid" if is_corrected else "softmax"
    if (found := reader.get("scoring_func", scores)) != scores:
        reader.problem("scoring_func", f"this family's experts are chosen by {scores}, found {found!r}")
    methods = ("greedy", "group_limited_greedy")
    if not is_corrected and (method := reader.get("topk_method", methods[0])) not in methods:
        reader.problem("topk_method", f"expected one of {', '.join(methods)}, found {method!r}")
    if not is_corrected and reader.flag("norm_topk_prob"):
        reader.problem("norm_topk_prob", "the shares of this family's chosen experts do not sum to 1 (false)")


def _read_full_heads(reader: ConfigReader, sizes: dict[str, Any], windowed: frozenset[int]) -> dict[str, Any]:
    """Read the heads of layers without a window (Gemma 4): from `per_layer_config`, or from keys of their own."""
    for key, neutral, what in (
        ("hidden_size_per_layer_input", 256, "embeddings of each layer"),
        ("num_kv_shared_layers", 0, "layers that read another one's keys and values"),
        ("enable_moe_block", False, "experts beside a dense MLP"),
    ):
        if reader.get(key, neutral):
            reader.problem(key, f"{what} are not implemented for this family")
    usual = sizes["head_dim"], sizes["kv_heads"]
    head_dim, kv_heads = read_full_heads(reader, sizes["layers"], windowed, usual)
    if head_dim % 2 or sizes["heads"] % kv_heads:
        found = f"{sizes['heads']} heads of {head_dim} channels cannot share {kv_heads} key-value heads in halves"
        reader.problem("global_head_dim", found)
    return {
        "full_head_dim": head_dim,
        "full_kv_heads": kv_heads,
        "values_are_keys": reader.flag("attention_k_eq_v"),
    }


def _read_activation(reader: ConfigReader, wanted: str) -> str:
    """Return the activation of the MLPs; Gemma names its own beside `hidden_act`, gpt-oss names none for what it
    computes."""
    key = "hidden_activation" if reader.get("hidden_activation") is not None else "hidden_act"
    published = SILU if wanted == CLAMPED_SWIGLU else wanted
    found = reader.get(key, published)
    if found != published and not (published == GELU_TANH and key == "hidden_act"):
        reader.problem(key, f"only {published} is implemented for this family, got {found!r}")
    return wanted


def _read_flag(reader: ConfigReader, key: str | bool) -> bool:
    return reader.flag(key) if isinstance(key, str) else key


def _read_unrotated(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return the layers that rotate nothing. A file that says nothing of them may be another model's."""
    if reader.get("no_rope_layers") is None and reader.get("no_rope_layer_interval") is None:
        reader.problem("no_rope_layers", "is missing: it says which layers rotate queries and keys")
    return read_unrotated(reader, layers)


def _read_softcap(reader: ConfigReader, key: str, default: float) -> float:
    """Return 0 for null, which says that there is none."""
    return 0.0 if reader.get(key, default) in (None, 0.0) else reader.number(key, default)


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    key = "torch_dtype" if reader.get("torch_dtype") is not None else "dtype"
    name = reader.get(key) or "float32"
    if name not in DTYPES:
        reader.problem(key, f"{name!r} is none of {', '.join(DTYPES)}")
        return torch.float32
    return DTYPES[name]


def _mask_token(reader: ConfigReader) -> int | None:
    """Read the token that a model takes for one to be drafted (PARD)."""
    vocab = reader.integer("vocab_size")
    for key in PARD_KEYS:
        mask = reader.integer(key, None, minimum=0)
        if mask is not None and mask >= vocab:
            reader.problem(key, f"must be a token from 0 to {vocab - 1}, got {mask}")
        if mask is not None:
            return mask
    return None
