"""Quantized checkpoints against weights that are unpacked number by number, as their formats are defined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.errors import ConfigError
from foredraft.gpu.measure.shapes import draft_shape
from foredraft.gpu.models.checkpoint import (
    load_draft,
    load_target,
    random_head,
    random_weights,
    save_draft,
    save_target,
)
from foredraft.gpu.models.config import ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.families import CLAMPED_SWIGLU
from foredraft.gpu.models.heads.config import HeadConfig
from foredraft.gpu.models.stored import quantized
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.models.weights import products_of
from safetensors.torch import load_file, save_file
from stored_formats import (
    FORMS,
    GROUP,
    OPS,
    SHAPE,
    Tensors,
    fp8,
    gptq,
    groups,
    is_quantized,
    packed,
    plain_checkpoint,
    write,
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Tensors]:
    return plain_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_the_format_defines(plain, tmp_path: Path, form: str):
    source, tensors = plain
    quantization, quantize = FORMS[form]
    stored, expected = {}, {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if not is_quantized(name, tensor):
            stored[name] = expected[name] = tensor
            continue
        parts, expected[name] = quantize(name.removesuffix(".weight"), tensor, seed)
        stored |= parts
    write(tmp_path, source, stored, quantization)
    loaded = load_target(tmp_path, OPS)
    for weight in loaded.checkpoint_weights():
        torch.testing.assert_close(weight.view, expected[weight.name], rtol=1e-6, atol=0)
    assert load_target(tmp_path, OPS, dtype=torch.bfloat16).layers[1].mixer.qkv_weight.dtype is torch.bfloat16
    # A part that is missing is named.
    missing = next(name for name in stored if name.endswith(("scales", "scale", "scale_inv")) and "input" not in name)
    save_file({name: tensor for name, tensor in stored.items() if name != missing}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"is missing|belongs to nothing|has dtype"):
        load_target(tmp_path, OPS)


@pytest.mark.fast("llama", "gpt_oss", "gemma4", "deepseek_v3", "qwen3_next", ci="*")
@pytest.mark.parametrize("label", SHAPES)
def test_every_family_takes_quantized_weights(label: str, tmp_path: Path):
    """Their rows may stand in another order, or be fused, in the model: what is loaded is what was published."""
    save_target(random_weights(SHAPES[label], OPS, "cpu", torch.float32, 1), tmp_path)
    quantization, quantize = FORMS["fp8, per row"]
    stored, expected = {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(tmp_path / SINGLE).items())):
        parts, expected[name] = {name: tensor}, tensor
        if is_quantized(name, tensor) and name.endswith(".weight"):
            parts, expected[name] = quantize(name.removesuffix(".weight"), tensor, seed)
        stored |= parts
    assert len(stored) > len(expected)
    write(tmp_path, tmp_path, stored, quantization)
    for weight in load_target(tmp_path, OPS).checkpoint_weights():
        torch.testing.assert_close(weight.published(), expected[weight.name], rtol=1e-6, atol=1e-7)


@pytest.mark.fast("fp8, blocks-DFLASH", ci=["awq-EAGLE3", "*-DFLASH"])
@pytest.mark.parametrize(
    "algorithm", ["EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "P_EAGLE", "DFLASH", "DFLASH2", "DSPARK"]
)
@pytest.mark.parametrize("form", FORMS)
def test_every_head_takes_quantized_weights(plain, algorithm: str, form: str, tmp_path: Path):
    """They are unpacked into the numbers of the session."""
    target = load_target(plain[0], OPS)
    config = draft_shape(target.config, get_algorithm(algorithm), 3)
    assert isinstance(config, HeadConfig)
    save_draft(random_head(config, target), tmp_path)
    quantization, quantize = FORMS[form]
    stored, expected = {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(tmp_path / SINGLE).items())):
        parts, expected[name] = {name: tensor}, tensor
        if is_quantized(name, tensor) and "layers." in name.replace("midlayer", "layers") and "conv" not in name:
            parts, expected[name] = quantize(name.removesuffix(".weight"), tensor, seed)
        stored |= parts
    assert len(stored) > len(expected)
    write(tmp_path, tmp_path, stored, quantization)
    for weight in load_draft(tmp_path, algorithm, target).checkpoint_weights():
        torch.testing.assert_close(weight.published(), expected[weight.name], rtol=1e-6, atol=1e-7)


def test_as_many_blocks_as_rows_are_no_scales_of_rows():
    """A matrix of 8 × 8 in blocks of 2 × 4 has 8 scales, as many as it has rows."""
    scale = torch.arange(1.0, 9.0).view(4, 2)
    found = quantized._scaled((2, 4), [torch.ones(8, 8).to(torch.float8_e4m3fn), scale])
    assert torch.equal(found.dense(torch.float32), scale.repeat_interleave(2, 0).repeat_interleave(4, 1))
    zeros = torch.arange(16, dtype=torch.int8).view(8, 2)  # of groups of 4 inputs
    found = quantized._scaled(None, [torch.zeros(8, 8), torch.ones(8, 2), zeros])
    assert torch.equal(found, -zeros.float().repeat_interleave(4, 1))


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path):
    shape = replace(
        SHAPE, architecture="GptOssForCausalLM", qk_norm=False, intermediate_size=32, moe=MoeConfig(3, 2, 32, True),
        activation=CLAMPED_SWIGLU, sinks=True, qkv_bias=True, output_bias=True,
    )  # fmt: skip
    model = Decoder(shape, OPS, "cpu", torch.float32)
    save_target(random_weights(shape, OPS, "cpu", torch.float32), tmp_path)
    tensors, expected, rng = load_file(tmp_path / SINGLE), {}, np.random.default_rng(3)
    for weight in model.checkpoint_weights():
        if not weight.name.endswith(("gate_up_proj", "down_proj")) or weight.view.dim() != 3:
            continue
        count, inner, out = tensors.pop(weight.name).shape
        blocks = rng.integers(0, 256, (count, out, inner // 32, 16), np.uint8)
        exponents = rng.integers(120, 130, blocks.shape[:3], np.uint8)
        value = np.zeros((count, inner, out), np.float32)
        magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        for e, o, b, i in np.ndindex(*blocks.shape):
            byte = int(blocks[e, o, b, i])
            for half, nibble in enumerate((byte & 15, byte >> 4)):
                sign = -1 if nibble & 8 else 1
                value[e, b * 32 + 2 * i + half, o] = (
                    sign * magnitudes[nibble & 7] * 2.0 ** (int(exponents[e, o, b]) - 127)
                )
        expected[weight.name] = torch.from_numpy(value)
        tensors |= {
            f"{weight.name}_blocks": torch.from_numpy(blocks),
            f"{weight.name}_scales": torch.from_numpy(exponents),
        }
    write(tmp_path, tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found = {weight.name: weight.view for weight in load_target(tmp_path, OPS).checkpoint_weights()}
    assert len(expected) == 4
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantization_config.quant_method"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantization_config.version"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "quantization_config.quant_algo"),
        (groups(type="float", num_bits=6), "quantization_config.config_groups.group_0.weights.num_bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quantization_config.quant_method"),
        (
            groups(type="float", num_bits=8) | {"transform_config": {"config_groups": {"r": {"type": "hadamard"}}}},
            "quantization_config.transform_config",
        ),
    ],
)
def test_other_forms_are_refused_with_their_key(plain, quantization: dict, key: str):
    data = json.loads((plain[0] / "config.json").read_text()) | {"quantization_config": quantization}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_every_matrix_is_unpacked_as_its_own_entry_says(plain, tmp_path: Path):
    """Groups of several formats, rules by expression, and an LM head that is quantized, too."""
    source, tensors = plain
    two = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
            "b": {"targets": ["re:.*mlp.*proj"], "weights": {"num_bits": 4, "type": "int", "group_size": GROUP}},
        },
    }
    own = {"bits": 8, "group_size": GROUP}
    rules = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "lm_head": True, "desc_act": True}
    rules["dynamic"] = {"-:.*experts.*": {}, r"+:.*\.self_attn\..*": own}
    rounded = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"}
    rounded["extra_config"] = {"model.layers.0.mlp.up_proj": own, ".*experts.*": {"bits": 16}}

    def by_rule(name: str, *rest):
        bits = 8 if "self_attn" in name else 4
        return None if "experts" in name else gptq(name, *rest, bits=bits)

    def by_name(name: str, *rest):
        bits = 8 if name == "model.layers.0.mlp.up_proj" else 4
        return None if "experts" in name or name == "lm_head" else gptq(name, *rest, bits=bits, shuffled=False)

    def by_group(name: str, *rest):
        return None if name == "lm_head" else fp8(name, *rest, scale="row") if "attn" in name else packed(name, *rest)

    for number, (quantization, quantize) in enumerate(((two, by_group), (rules, by_rule), (rounded, by_name))):
        directory, stored, expected = tmp_path / str(number), {}, {}
        directory.mkdir()
        for seed, (name, tensor) in enumerate(sorted(tensors.items())):
            is_matrix = is_quantized(name, tensor) or name == "lm_head.weight"
            made = quantize(name.removesuffix(".weight"), tensor, seed) if is_matrix else None
            parts, expected[name] = made or ({name: tensor}, tensor)
            stored |= parts
        write(directory, source, stored, quantization)
        for keeps in (False, True):
            loaded = load_target(directory, OPS, keep_quantized=keeps)
            coded = {p.parameter.untyped_storage().data_ptr() for p in products_of(loaded) if p.coded is not None}
            assert keeps or not coded
            for weight in loaded.checkpoint_weights():
                if weight.view.untyped_storage().data_ptr() not in coded:
                    torch.testing.assert_close(weight.view, expected[weight.name], rtol=1e-6, atol=0)
        broken = json.loads(json.dumps(quantization).replace("self_attn", "self_atn").replace("up_proj", "op_proj"))
        with pytest.raises(ConfigError, match="names no matrix of the model"):
            write(directory, source, stored, broken)
            load_target(directory, OPS)


def test_a_format_beside_the_configuration(plain, tmp_path: Path):
    write(tmp_path, plain[0], plain[1], None)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert ModelConfig.from_directory(tmp_path).quantization is not None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}')
    with pytest.raises(ConfigError, match="mxfp8"):
        ModelConfig.from_directory(tmp_path)
