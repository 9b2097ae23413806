"""Models to time without a checkpoint: well-known shapes by name, and drafts of the right form for any of them.

The shapes are those of the published `config.json` files. Weights are random, so acceptance must be simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.errors import ConfigError, Problem, nearest
from ..models.checkpoint import HEADS, over_positions, random_head, random_weights
from ..models.config import LLAMA, QWEN2, QWEN3, QWEN3_MOE, ModelConfig, read_json
from ..models.decoder import Decoder
from ..models.eagle import DraftHead
from ..models.head_config import EAGLE3, HeadConfig, default_aux_layers
from ..ops.port import Ops

EAGLE3_VOCABULARY = 32000  # tokens of published EAGLE-3 heads for vocabularies of 128 thousand and more
LOGIT_DEVIATION = 10.0  # of a random draft


def _shape(
    architecture: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    context: int,
    **others: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **others,
    }


def _llama3(factor: float, **others: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": scaling, **others}


_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _shape(LLAMA, 32, 4096, 32, 8, 128, 14336, 128256, 131072, **_llama3(8.0)),
    "llama-3.1-70b": _shape(LLAMA, 80, 8192, 64, 8, 128, 28672, 128256, 131072, **_llama3(8.0)),
    "llama-3.2-1b": _shape(LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, 131072, **_llama3(32.0, tie_word_embeddings=True)),
    "llama-3.2-3b": _shape(
        LLAMA, 28, 3072, 24, 8, 128, 8192, 128256, 131072, **_llama3(32.0, tie_word_embeddings=True)
    ),
    "llama-2-7b": _shape(LLAMA, 32, 4096, 32, 32, 128, 11008, 32000, 4096, rms_norm_eps=1e-5),
    "qwen2.5-7b": _shape(QWEN2, 28, 3584, 28, 4, 128, 18944, 152064, 131072, **_QWEN),
    "qwen3-0.6b": _shape(QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, 40960, tie_word_embeddings=True, **_QWEN),
    "qwen3-8b": _shape(QWEN3, 36, 4096, 32, 8, 128, 12288, 151936, 40960, **_QWEN),
    "qwen3-30b-a3b": _shape(QWEN3_MOE, 48, 2048, 32, 4, 128, 6144, 151936, 40960, **_EXPERTS, **_QWEN),
}


def shape_of(name: str, key: str = "random_weights") -> ModelConfig:
    """The shape of a built-in name, or of a `config.json` (or its directory). Raises ConfigError that names `key` or the file."""
    if name in BUILT_IN:
        return ModelConfig.from_dict(BUILT_IN[name], name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return ModelConfig.from_dict(read_json(path), str(path))
    message = f"{name!r} is no config.json and none of {', '.join(BUILT_IN)}{nearest(name, BUILT_IN)}"
    raise ConfigError("<arguments>", [Problem(key, message)])


def draft_shape(
    target: ModelConfig, algorithm: SpecAlgorithm, max_steps: int, given: str | None = None
) -> ModelConfig | HeadConfig | None:
    """A draft for `target`: of the shape `given` (a name or a config.json), else as published drafts are; None where none is needed.

    A small language model has a quarter of the width and an eighth of the layers. A head has one layer of the target's sizes.
    """
    if algorithm.drafter is Drafter.MODEL:
        return _small_model(target) if given is None else shape_of(given, "draft")
    if given is not None:
        message = f"{given!r} is a shape for STANDALONE drafts; {algorithm.name} needs none to be given"
        raise ConfigError("<arguments>", [Problem("draft", message)])
    if algorithm.drafter not in (Drafter.HEAD, Drafter.HEADS):
        return None
    if algorithm.draft_form not in HEADS:
        message = f"{algorithm.name} has no draft of a known form; known are {', '.join(HEADS)}"
        raise ConfigError("<arguments>", [Problem("algorithm", message)])
    return _head(target, algorithm.draft_form, max(max_steps, 1))


def _small_model(target: ModelConfig) -> ModelConfig:
    heads = max(1, target.num_heads // 4)
    kv_heads = max(count for count in range(1, heads + 1) if heads % count == 0 and count <= target.num_kv_heads)
    return replace(
        _plain_layers(target),
        hidden_size=heads * target.head_dim,
        intermediate_size=max(8, target.intermediate_size // 4),
        num_layers=max(1, target.num_layers // 8),
        num_heads=heads,
        num_kv_heads=kv_heads,
        tied_embeddings=True,
    )


def _head(target: ModelConfig, algorithm: str, max_steps: int) -> HeadConfig:
    is_eagle3 = algorithm == EAGLE3
    return HeadConfig(
        algorithm=algorithm,
        model=replace(_plain_layers(target), num_layers=1, tied_embeddings=False),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(EAGLE3_VOCABULARY, target.vocab_size) if is_eagle3 else target.vocab_size,
        aux_layers=default_aux_layers(target.num_layers) if is_eagle3 else (),
        num_heads=1 if algorithm in (EAGLE3, "EAGLE") else max_steps,
    )


def _plain_layers(target: ModelConfig) -> ModelConfig:
    """The sizes with the layers of a Llama: what drafts are made of whatever the target is."""
    return replace(
        target, architecture=LLAMA, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, moe=None
    )


def random_target(config: ModelConfig, ops: Ops, device: str, dtype: torch.dtype, seed: int) -> Decoder:
    return random_weights(config, ops, device, dtype, seed)


def random_draft(config: ModelConfig | HeadConfig, target: Decoder, seed: int) -> Decoder | DraftHead:
    """Random weights with logits spread as a trained model's are: a draft that is sure of nothing would make trees without depth."""
    if isinstance(config, HeadConfig):
        draft: Decoder | DraftHead = random_head(config, target, seed)
        output = target.output_embedding if draft.lm_head_weight is None else draft.lm_head_weight
    else:
        config = over_positions(config, target.config.max_position_embeddings)
        draft = random_weights(config, target.ops, target.device, target.dtype, seed)
        output = draft.output_embedding
    with torch.no_grad():
        # What comes out of a norm has entries of about 1, so a logit deviates as the weight's rows are long.
        row_length = output.shape[1] ** 0.5 * float(output.std())
        output.mul_(LOGIT_DEVIATION / row_length)
    return draft


def meta_models(
    target: ModelConfig, draft: ModelConfig | HeadConfig | None, dtype: torch.dtype
) -> tuple[Decoder, nn.Module | None]:
    """The models without memory behind them, to know their sizes."""
    model = Decoder(target, None, "meta", dtype)  # type: ignore[arg-type]
    if draft is None:
        return model, None
    if isinstance(draft, HeadConfig):
        return model, HEADS[draft.algorithm](draft, model)
    return model, Decoder(draft, None, "meta", dtype)  # type: ignore[arg-type]
