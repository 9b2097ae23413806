"""The configuration of a block drafter: its layers, which are Qwen3's in every published form, and its other parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ....core.model_shape import BlockParts, family_of_type, read_block_config, read_sizes, replace_missing
from ....core.model_shape.block_heads import DFLASH, DFLASH2, DSPARK
from ....core.parsing import ConfigReader
from ..config import ModelConfig, quantization_of, read_model_config

BLOCKS = (DFLASH, DFLASH2, DSPARK)
QWEN3 = "Qwen3ForCausalLM"
_NAMES = re.compile(r"(?:Qwen3(?:Omni)?)?(?:DFlash2?|DSpark)(?:Draft)?(?:Model|Speculator|ForCausalLM)?")
_PUBLISHED = {DFLASH: "DFlashDraftModel", DFLASH2: "DFlash2DraftModel", DSPARK: "Qwen3DSparkModel"}
_WINDOWED = "sliding_attention"
_ELSEWHERE = {  # what other layers than Qwen3's have, with the values of those that have it not
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "use_gemma_norm": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "gating": (None, False, "disabled"),
}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a target that a drafter is compared with."""

    name: str
    layers: int
    hidden: int
    vocab: int


def read_block(whole: ConfigReader, algorithm: str, target: ModelConfig, names: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a `HeadConfig` for a parsed config.json of a block drafter, whose files have tensors of
    these `names`. Raises ConfigError with what does not fit the target."""
    sizes = _Sizes("the target", target.num_layers, target.hidden_size, target.vocab_size)
    found = read_block_config(whole, "the draft", sizes, algorithm)
    reader, parts = found.reader, found.parts
    for name in architectures if isinstance(architectures := whole.get("architectures"), list) else ():
        if not _NAMES.fullmatch(str(name)):
            whole.problem("architectures", f"{name}: block drafters with other layers than Qwen3's are not implemented")
    for key, usual in _ELSEWHERE.items():
        if reader.get(key) not in usual:
            reader.problem(key, f"{reader.get(key)!r}: layers with this are not implemented for block drafters")
    if parts.mask_token is None:
        reader.problem("mask_token_id", "is missing: the draft does not say which token stands for one to be drafted")
    reader.integer("block_size")
    fused = found.fused_layers
    if fused is None:
        reader.problem("use_aux_hidden_state", "false: drafters that take one hidden state are not implemented")
    elif any(after <= before for before, after in pairwise(fused)):
        reader.problem("target_layer_ids", f"must be an ascending list of layers, got those behind {list(fused)}")
    if algorithm == DFLASH2 and found.vocab != target.vocab_size:
        reader.problem("draft_vocab_size", f"{found.vocab}: {DFLASH2} drafts all {target.vocab_size} tokens")
    layers = _layers(reader, target)
    model = read_model_config(layers, QWEN3)
    quantization = None if model is None else quantization_of(layers, model)
    whole.raise_problems()
    assert model is not None and fused is not None
    if names and not any(".confidence_head." in f".{name}" for name in names):
        parts = replace(parts, has_confidence=False)
    return {
        "model": model,
        "target_hidden_size": found.fused_size,
        "draft_vocab_size": found.vocab,
        "aux_layers": fused,
        "block": parts,
        "quantization": quantization,
    }


def _layers(reader: ConfigReader, target: ModelConfig) -> ConfigReader:
    """Return a reader of the layers as those of a Qwen3."""
    kinds = reader.get("layer_types")
    own = {"architectures": [QWEN3], "model_type": "qwen3", "tie_word_embeddings": False}
    if isinstance(kinds, list):
        own["use_sliding_window"] = _WINDOWED in kinds
    missing = {"max_position_embeddings": target.max_position_embeddings}
    if family_of_type(reader.get("model_type")) not in (None, "qwen3"):  # whose heads have 128 channels without the key
        missing["head_dim"] = read_sizes(reader, None)["head_dim"]
    return replace_missing(reader.with_data({**reader.data, **own}), **missing)


def block_keys(
    parts: BlockParts, algorithm: str, aux_layers: tuple[int, ...], draft_vocab_size: int
) -> Mapping[str, Any]:
    """Return the keys of config.json that `read_block` reads beside those of the layers."""
    own: dict[str, Any] = {
        "mask_token_id": parts.mask_token,
        "aux_hidden_state_layer_ids": list(aux_layers),
        "sample_from_anchor": parts.samples_anchor,
        "sliding_window_non_causal": not parts.windows_are_causal,
        "input_embedding_scale": parts.input_scale,
        "output_multiplier": parts.logit_scale,
        "final_logit_softcapping": parts.logit_softcap or None,
    }
    if parts.is_causal is not None:
        own["causal"] = parts.is_causal
    if algorithm == DFLASH2:
        own |= {"conv_kernel_size": parts.conv_taps, "conv_group_size": parts.conv_group}
        own |= {"selector_rank": parts.selector_rank, "selector_top_k": parts.selector_top_k}
    top = {"architectures": [_PUBLISHED[algorithm]], "block_size": parts.block_size}
    if algorithm == DSPARK:
        top |= {"markov_rank": parts.markov_rank, "markov_head_type": parts.markov_head}
        top |= {"enable_confidence_head": parts.has_confidence}
        top |= {"confidence_head_with_markov": parts.confidence_with_markov}
    return {**top, "draft_vocab_size": draft_vocab_size, "dflash_config": own}
