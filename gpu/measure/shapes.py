"""Models to time without a checkpoint: built-in models by name, and drafts of the right form for any of them.

Weights are random, so acceptance must be simulated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...core.algorithm.algorithm import Drafter, SpecAlgorithm
from ...core.errors import ConfigError, nearest_name
from ...core.model_shape import BUILT_IN, built_in_config
from ...core.model_shape.block_heads import BLOCK_LAYERS, USUAL_PARTS, usual_fused_layers
from ...core.model_shape.matrices import matrix_named
from ..models.checkpoint import kept_products, network_of, new_head, over_positions, random_head, random_weights
from ..models.config import LLAMA, ModelConfig, read_json
from ..models.decoder import Decoder
from ..models.eagle import DraftHead
from ..models.heads.block_config import QWEN3
from ..models.heads.config import FUSING, MULTI_LAYER_EAGLE, P_EAGLE, HeadConfig, default_aux_layers
from ..models.heads.forms import HEADS
from ..models.rope import Rope
from ..models.stored.quantized import Quantization
from ..models.weights import allocate, initialize
from ..types.coded import Code, CodedWeight
from ..types.ops import NO_OPS, Ops
from ..types.shards import WHOLE, Shard

EAGLE3_VOCABULARY = 32000  # tokens of published EAGLE-3 heads for vocabularies of 128 thousand and more
LOGIT_DEVIATION = 10.0  # of a random draft


def shape_of(name: str, key: str = "random_weights") -> ModelConfig:
    """Return the shape of a built-in name, or of a `config.json` (or its directory).
    Raises ConfigError that names `key` or the file."""
    path = Path(name)
    if path.is_dir():
        return ModelConfig.from_directory(path)
    if path.is_file():
        return ModelConfig.from_dict(read_json(path), str(path))
    if (built_in := built_in_config(name)) is not None:
        return ModelConfig.from_dict(built_in[1], name)
    message = f"{name!r} is no config.json and none of {', '.join(BUILT_IN)}{nearest_name(name, BUILT_IN)}"
    raise ConfigError.of("<arguments>", key, message)


def draft_shape(
    target: ModelConfig, algorithm: SpecAlgorithm, max_steps: int, given: str | None = None
) -> ModelConfig | HeadConfig | None:
    """Return a draft for `target`: of the shape `given` (a name or a config.json), else as published drafts are; None
    where none is needed.

    A small language model has a quarter of the width and an eighth of the layers. A head has one layer of the target's
    sizes.
    """
    if algorithm.drafter is Drafter.MODEL:
        small = _small_model(target) if given is None else shape_of(given, "draft")
        mask = small.vocab_size - 1 if small.mask_token is None and algorithm.in_one_pass else small.mask_token
        return replace(small, mask_token=mask)
    if given is not None:
        message = f"{given!r} is a shape for STANDALONE drafts; {algorithm.name} needs none to be given"
        raise ConfigError.of("<arguments>", "draft", message)
    if algorithm.drafter in (Drafter.NONE, Drafter.LOOKUP):
        return None
    if algorithm.draft_form not in HEADS:
        message = f"{algorithm.name} has no draft of a known form; known are {', '.join(HEADS)}"
        raise ConfigError.of("<arguments>", "algorithm", message)
    form, steps = algorithm.draft_form, max(max_steps, 1)
    head = _block(target, form, steps) if algorithm.drafter is Drafter.BLOCK else _head(target, form, steps)
    return replace(head, network=network_of(algorithm))


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
    is_eagle3 = algorithm in FUSING
    return HeadConfig(
        algorithm=algorithm,
        model=replace(_plain_layers(target), num_layers=1, tied_embeddings=False),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(EAGLE3_VOCABULARY, target.vocab_size) if is_eagle3 else target.vocab_size,
        aux_layers=default_aux_layers(target.num_layers) if is_eagle3 else (),
        num_heads=max_steps if algorithm == MULTI_LAYER_EAGLE else 1,
        mask_token=target.vocab_size - 1 if algorithm == P_EAGLE else None,
    )


def _block(target: ModelConfig, algorithm: str, max_steps: int) -> HeadConfig:
    """Return a block drafter that drafts `max_steps` tokens, with the layers that published ones have, or as many as
    the target has different states for."""
    parts, layers = USUAL_PARTS[algorithm], max(1, min(BLOCK_LAYERS, target.num_layers - 3))
    body = replace(_plain_layers(target), architecture=QWEN3, qk_norm=True, num_layers=layers, tied_embeddings=False)
    parts = replace(parts, block_size=max_steps + (not parts.samples_anchor), mask_token=target.vocab_size - 1)
    if parts.conv_taps:
        group, top_k = math.gcd(parts.conv_group, target.hidden_size), min(parts.selector_top_k, target.vocab_size)
        parts = replace(parts, conv_group=group, selector_top_k=top_k)
    fused = usual_fused_layers(layers, target.num_layers)
    return HeadConfig(algorithm, body, target.hidden_size, target.vocab_size, fused, block=parts)


def _plain_layers(target: ModelConfig) -> ModelConfig:
    """Return the sizes with the layers of a Llama, which drafts have for every target."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    kept = (*sizes, "rms_norm_eps", "rope", "max_position_embeddings", "tied_embeddings", "dtype")
    fields = {name: getattr(target, name) for name in kept}
    if (latent := target.latent) is not None:  # whose one key-value head no draft has
        fields |= {"num_kv_heads": target.num_heads, "head_dim": latent.nope_dim + latent.rope_dim}
        fields["rope"] = Rope(target.rope.theta)
    return ModelConfig(LLAMA, **fields)


def random_draft(config: ModelConfig | HeadConfig, target: Decoder, seed: int) -> Decoder | DraftHead:
    """Set random weights with logits spread as a trained model's are: with flat ones all trees would be shallow."""
    if isinstance(config, HeadConfig):
        draft: Decoder | DraftHead = random_head(config, target, seed)
        output = target.output_embedding if draft.lm_head_weight is None else draft.lm_head_weight
    else:
        config = over_positions(config, target.config.max_position_embeddings)
        draft = random_weights(config, target.ops, target.device, target.dtype, seed, kv_dtype=target.kv_dtype)
        output = draft.output_embedding
    with torch.no_grad():
        # What comes out of a norm has entries of about 1, so a logit deviates as the weight's rows are long.
        row_length = output.shape[1] ** 0.5 * float(output.std())
        output.mul_(LOGIT_DEVIATION / row_length)
    return draft


def random_target(
    config: ModelConfig,
    ops: Ops,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    shard: Shard = WHOLE,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Return a model of this shape with random weights, on "meta" without memory; quantized matrices that it keeps are
    in the formats of its configuration. All its shards have the same numbers."""
    model = Decoder(config, ops, device, dtype, shard, kv_dtype)
    if config.keeps_quantized:
        _keep_stand_ins(model, seed)
    if model.device.type != "meta":
        initialize(model, seed)
    return model


def _keep_stand_ins(model: Decoder, seed: int) -> None:
    """Give the products of a model that keeps quantized matrices random numbers in the formats of its configuration,
    and those memory whose matrices a checkpoint would have to unpack."""
    quantization, device = model.config.quantization, model.device
    assert quantization is not None, "the configuration names the formats"
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for product, weights in kept_products(model):
        names = {quantization.scheme.format_of(matrix_named(w.name.removesuffix(".weight"))) for w in weights}
        inputs = product.parameter.shape[-1]
        form = _stored_form(names.pop() or "", inputs, quantization) if len(names) == 1 else None
        if form is None:
            allocate(product.parameter)
        else:
            product.keep(_stand_in(*form, tuple(product.parameter.shape), device, generator))


def _stored_form(name: str, inputs: int, quantization: Quantization) -> tuple[Code, int, bool] | None:
    """Return how the numbers of a format are kept, the inputs that share a scale, and whether a matrix has a scale
    beside these; None if a checkpoint in it is unpacked."""
    if name == "fp8":
        return Code.E4M3, inputs if quantization.block is None else quantization.block[1], False
    if name == "int8":
        return (Code.INT8, inputs, False) if quantization.layout == "compressed-tensors" else None
    if name == "mxfp4" or name.startswith("nvfp4"):
        return Code.E2M1, 32 if name == "mxfp4" else 16, name != "mxfp4"
    found = _GROUPED_4_BITS.fullmatch(name)
    return None if found is None or quantization.shuffled else (Code.UINT4, min(int(found[1] or 128), inputs), False)


_GROUPED_4_BITS = re.compile(r"int4(?:-g([0-9]+)(?:-s[0-9]+)?)?")
_SCALES = {  # of each code: the dtype, and the size with which random weights deviate by about 0.02
    Code.E4M3: (torch.float32, 1e-4), Code.INT8: (torch.float32, 3e-4),
    Code.UINT4: (torch.float16, 4e-3), Code.E2M1: (torch.bfloat16, 6e-3),
}  # fmt: skip


def _stand_in(
    code: Code,
    group: int,
    has_factors: bool,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
) -> CodedWeight:
    """Return random numbers for matrices of `shape` […, out, in]; without a generator they have no memory."""
    *outputs, inputs = shape
    groups = (*outputs, -(-inputs // group))

    def numbers(size: Sequence[int], end: int) -> Tensor:
        if generator is None:
            return torch.empty(tuple(size), dtype=torch.uint8, device=device)
        return torch.randint(0, end, tuple(size), generator=generator, dtype=torch.uint8, device=device)

    codes = numbers((*outputs, inputs * code.bits // 8), 256)
    if code is Code.E4M3:
        codes = codes.masked_fill_(codes & 0x7F == 0x7F, 0)  # which is no number
    dtype, scale = _SCALES[code]
    scales = torch.full(groups, scale, dtype=dtype, device=device)
    zeros = numbers(groups, 16) if code is Code.UINT4 else None
    return CodedWeight(code, codes, scales, group, zeros, torch.ones(outputs, device=device) if has_factors else None)


def meta_models(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    dtype: torch.dtype,
    ops: Ops = NO_OPS,
    shard: Shard = WHOLE,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Decoder, Decoder | DraftHead | None]:
    """Return the models without memory behind them, to know their sizes, or with `ops` what they launch; of the target
    the part `shard`."""
    model = random_target(target, ops, "meta", dtype, 0, shard, kv_dtype)
    if not isinstance(draft, HeadConfig):
        return model, None if draft is None else Decoder(draft, ops, "meta", dtype)
    head = new_head(draft, model)
    if head.vocab_size != model.vocab_size:
        head.set_vocabulary(torch.arange(head.vocab_size, device="meta"))
    return model, head
