"""Quantized checkpoints against weights that are unpacked number by number, as their formats are defined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.models.checkpoint import load_target, random_weights, save_target
from foredraft.gpu.models.config import ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.families import CLAMPED_SWIGLU
from foredraft.gpu.models.stored import quantized
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.models.weights import products_of
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.memory import checkpoint_bytes
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.shards import WHOLE
from safetensors.torch import load_file, save_file

OPS = TorchOps()
GROUP = 8
SHAPE = ModelConfig("Qwen3MoeForCausalLM", 40, 32, 48, 2, 4, 2, 8, qk_norm=True, max_position_embeddings=32)
SHAPE = replace(SHAPE, moe=MoeConfig(2, 1, 16, mlp_only_layers=(0,)))
Tensors = dict[str, torch.Tensor]


def words_of(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack uint [a, b] along its last axis into int32, the first of each word in its lowest bits (or those
    named by `order`)."""
    per_word = 32 // bits
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for i in range(numbers.shape[0]):
        for j in range(out.shape[1]):
            for place in range(per_word):
                column = j * per_word + (order[place] if order else place)
                out[i, j] |= np.uint32(int(numbers[i, column]) << (bits * place))
    return torch.from_numpy(out.view(np.int32))


class Numbers:
    """Random numbers, zero points and scales of one matrix [out, in] in groups, and the weights that they mean."""

    def __init__(
        self, shape: tuple[int, int], bits: int, seed: int, *, symmetric: bool, shuffled: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        rows, columns = shape
        groups = columns // GROUP
        self.q = rng.integers(0, 1 << bits, (rows, columns))
        self.zeros = (
            rng.integers(0, 1 << bits, (rows, groups)) if not symmetric else np.full((rows, groups), 1 << (bits - 1))
        )
        self.scales = torch.from_numpy(rng.uniform(0.001, 0.01, (rows, groups))).half()
        self.group_of = rng.permutation(columns) // GROUP if shuffled else np.arange(columns) // GROUP
        weight = np.zeros(shape, np.float32)
        for i in range(rows):
            for j in range(columns):
                g = self.group_of[j]
                weight[i, j] = (int(self.q[i, j]) - int(self.zeros[i, g])) * float(self.scales[i, g])
        self.weight = torch.from_numpy(weight)


def awq(name: str, weight: torch.Tensor, seed: int) -> tuple[Tensors, torch.Tensor]:
    made, order = Numbers(tuple(weight.shape), 4, seed, symmetric=False), (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words_of(made.q.T, 4, order),
        "qzeros": words_of(made.zeros.T, 4, order),
        "scales": made.scales.t(),
    }
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, made.weight


def gptq(
    name: str, weight: torch.Tensor, seed: int, bits: int = 4, stored_less: int = 1, shuffled: bool = True
) -> tuple[Tensors, torch.Tensor]:
    made = Numbers(tuple(weight.shape), bits, seed, symmetric=False, shuffled=shuffled)
    parts = {
        "qweight": words_of(made.q, bits).t(),
        "qzeros": words_of((made.zeros.T - stored_less) % (1 << bits), bits),
        "scales": made.scales.t(),
        "g_idx": torch.from_numpy(made.group_of).int(),
    }
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, made.weight


def packed(name: str, weight: torch.Tensor, seed: int, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    made = Numbers(tuple(weight.shape), 4, seed, symmetric=symmetric)
    parts = {
        "weight_packed": words_of(made.q, 4),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words_of(made.zeros.T, 4).t()
    return {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}, made.weight


def fp8(
    name: str, weight: torch.Tensor, seed: int, scale: str = "block", suffix: str = "weight_scale"
) -> tuple[Tensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = weight.shape
    size = {"block": (-(-rows // 16), -(-columns // 12)), "row": (rows, 1), "tensor": ()}[scale]
    scales = torch.rand(size, generator=generator) * 0.01 + 0.01
    spread = {"block": np.ones((16, 12)), "row": np.ones((1, columns)), "tensor": np.ones((rows, columns))}[scale]
    expected = stored.float() * torch.from_numpy(np.kron(scales.numpy(), spread)).float()[:rows, :columns]
    return {f"{name}.weight": stored, f"{name}.{suffix}": scales, f"{name}.input_scale": torch.ones(1)}, expected


def groups(**weights) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMS = {
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 12]},
        lambda *a: fp8(*a, suffix="weight_scale_inv"),
    ),
    "fp8, per tensor": ({"quant_method": "fp8"}, lambda *a: fp8(*a, scale="tensor")),
    "fp8, per row": ({"quant_method": "fbgemm_fp8"}, lambda *a: fp8(*a, scale="row")),
    "fp8, modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda *a: fp8(*a, scale="tensor")),
    "fp8, compressed-tensors": (groups(type="float", num_bits=8, strategy="channel"), lambda *a: fp8(*a, scale="row")),
    "4 bits, compressed-tensors": (groups(type="int", num_bits=4, group_size=GROUP), packed),
    "4 bits with zeros, compressed-tensors": (
        groups(type="int", num_bits=4, group_size=GROUP, symmetric=False),
        lambda *a: packed(*a, symmetric=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq),
    "gptq, 8 bits, second form": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda *a: gptq(*a, bits=8, stored_less=0),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "packing_format": "auto_round:auto_gptq"},
        lambda *a: gptq(*a, shuffled=False),
    ),
    "fp8, quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            "exclude": ["lm_head"],
        },
        lambda *a: fp8(*a, scale="tensor"),
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Tensors]:
    directory = tmp_path_factory.mktemp("plain")
    save_target(random_weights(SHAPE, OPS, "cpu", torch.float32, 1), directory)
    return directory, load_file(directory / SINGLE)


def write(directory: Path, source: Path, tensors: Tensors, quantization: dict | None) -> None:
    config = json.loads((source / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / SINGLE)


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "proj" in name


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


# -- products that keep the numbers of the files ----------------------------------------------------------------------


def nvfp4(name: str, weight: torch.Tensor, seed: int, divides: bool = False) -> tuple[Tensors, torch.Tensor]:
    """A matrix in the form of ModelOpt, or (`divides`) of compressed-tensors, and its weights number by number."""
    rng = np.random.default_rng(seed)
    rows, columns = weight.shape
    numbers = rng.integers(0, 16, (rows, columns))
    scales = torch.from_numpy(rng.uniform(0.1, 4.0, (rows, columns // 16))).to(torch.float8_e4m3fn)
    whole = torch.tensor(8.0 if divides else 0.125)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.zeros((rows, columns), np.float32)
    for i, j in np.ndindex(rows, columns):
        value = magnitudes[numbers[i, j] & 7] * (-1 if numbers[i, j] & 8 else 1)
        expected[i, j] = value * float(scales[i, j // 16]) * 0.125
    codes = torch.from_numpy((numbers[:, ::2] | numbers[:, 1::2] << 4).astype(np.uint8))
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    parts = {names[0]: codes, "weight_scale": scales, names[1]: whole}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, torch.from_numpy(expected)


KEPT_FORMS = FORMS | {
    "nvfp4, modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "nvfp4, compressed-tensors": (
        groups(type="float", num_bits=4, group_size=16),
        lambda *a: nvfp4(*a, divides=True),
    ),
    "gptq in order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        lambda *a: gptq(*a, shuffled=False),
    ),
}
NOT_KEPT = ("gptq", "gptq, 8 bits, second form")  # groups of inputs that do not stand together, and 8 bits


def quantized_copy(directory: Path, source: Path, tensors: Tensors, form: str) -> Tensors:
    """Write a checkpoint with its matrices in `form`; return the weights that they mean."""
    quantization, quantize = KEPT_FORMS[form]
    stored, expected = {}, {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        parts, expected[name] = {name: tensor}, tensor
        if is_quantized(name, tensor) and name.endswith(".weight"):
            parts, expected[name] = quantize(name.removesuffix(".weight"), tensor, seed)
        stored |= parts
    write(directory, source, stored, quantization)
    return expected


@pytest.mark.fast("fp8, blocks", "awq", "gptq", "nvfp4, modelopt", "4 bits, compressed-tensors", ci="*")
@pytest.mark.parametrize("form", KEPT_FORMS)
def test_products_that_keep_the_stored_numbers_multiply_the_same_weights(plain, tmp_path: Path, form: str):
    expected = quantized_copy(tmp_path, *plain, form)
    unpacked, kept = (load_target(tmp_path, OPS, keep_quantized=keeps) for keeps in (False, True))
    for weight in unpacked.checkpoint_weights():
        torch.testing.assert_close(weight.view, expected[weight.name], rtol=1e-6, atol=0)
    pairs = list(zip(products_of(unpacked), products_of(kept), strict=True))
    matrices = [(a.parameter, b.coded) for a, b in pairs if b.coded is not None]
    assert len(matrices) == (0 if form in NOT_KEPT else 8)  # of two layers, one with experts; not the LM head
    for weight, coded in matrices:
        assert torch.equal(coded.dense(torch.float32), weight)
    tokens = torch.randint(0, SHAPE.vocab_size, (20,), generator=torch.Generator().manual_seed(0))
    hidden = [model(tokens, DenseAttention([20])).hidden for model in (unpacked, kept)]
    torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
    for x in (hidden[0][:1], hidden[0]):
        experts = kept.layers[1].mlp
        weights, chosen = experts.route(x)
        ways = [way(x, weights, chosen) for way in (experts._as_they_stand, experts._sorted)]
        torch.testing.assert_close(*ways, rtol=1e-5, atol=1e-5)
    assert bytes_of(kept) < bytes_of(unpacked) or form in NOT_KEPT


def bytes_of(model: Decoder) -> int:
    return model.weight_bytes


@pytest.mark.fast("fp8, blocks", "awq", "nvfp4, modelopt", ci="*")
@pytest.mark.parametrize("form", KEPT_FORMS)
def test_the_memory_that_kept_numbers_save_is_known_before_they_are_read(plain, tmp_path: Path, form: str):
    quantized_copy(tmp_path, *plain, form)
    config = ModelConfig.from_directory(tmp_path)
    sizes = [
        checkpoint_bytes(None, None, config, torch.float32, WHOLE, kept) for kept in (None, tmp_path)
    ]  # scales and zero points count as 32 bits, so a little too much is planned
    found = [load_target(tmp_path, OPS, keep_quantized=keeps).weight_bytes for keeps in (False, True)]
    assert sizes[0] == found[0] and found[1] <= sizes[1] <= found[1] * 1.4


@pytest.mark.fast("llama", "deepseek_v3", "qwen3_5", ci="*")
@pytest.mark.parametrize("label", SHAPES)
def test_every_family_keeps_quantized_weights(label: str, tmp_path: Path):
    """Their rows may stand in another order, or be fused: a product multiplies with what was published."""
    save_target(random_weights(SHAPES[label], OPS, "cpu", torch.float32, 1), tmp_path)
    quantized_copy(tmp_path, tmp_path, load_file(tmp_path / SINGLE), "fp8, per row")
    unpacked, kept = (load_target(tmp_path, OPS, keep_quantized=keeps) for keeps in (False, True))
    assert any(product.coded is not None for product in products_of(kept))
    for a, b in zip(products_of(unpacked), products_of(kept), strict=True):
        found = b.parameter if b.coded is None else b.coded.dense(torch.float32)
        torch.testing.assert_close(found, a.parameter, rtol=1e-6, atol=0)


def test_experts_of_gpt_oss_are_kept_in_mxfp4(tmp_path: Path):
    shape = replace(
        SHAPE, architecture="GptOssForCausalLM", qk_norm=False, intermediate_size=32, moe=MoeConfig(3, 2, 32, True),
        activation=CLAMPED_SWIGLU, sinks=True, qkv_bias=True, output_bias=True,
    )  # fmt: skip
    save_target(random_weights(shape, OPS, "cpu", torch.float32), tmp_path)
    tensors, rng = load_file(tmp_path / SINGLE), np.random.default_rng(4)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inner, out = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (count, out, inner // 32, 16), np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(120, 124, blocks.shape[:3], np.uint8))
    write(tmp_path, tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    unpacked, kept = (load_target(tmp_path, OPS, keep_quantized=keeps) for keeps in (False, True))
    coded = [product.coded for product in products_of(kept) if product.coded is not None]
    assert [one.shape for one in coded] == [(3, 64, 32), (3, 32, 32)] * 2
    for n in (1, 9):
        tokens = torch.arange(n)
        hidden = [model(tokens, DenseAttention([n])).hidden for model in (unpacked, kept)]
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("form", "part", "change", "message"),
    [
        ("fp8, per row", "weight_scale", lambda x: x.fill_(torch.nan), "not finite"),
        ("fp8, per row", "weight_scale", lambda x: x[:-1], "do not fit"),
        ("fp8, blocks", "weight_scale_inv", lambda x: torch.cat([x, x]), "do not fit"),
        ("fp8, per row", "weight", lambda x: x.view(torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn), "NaN"),
        ("awq", "scales", lambda x: x[:, :-1], "do not fit"),
        ("gptq", "qzeros", lambda x: x[:-1], "do not fit"),
        ("4 bits, compressed-tensors", "weight_scale", lambda x: x[:-1], "do not fit"),
        ("nvfp4, modelopt", "weight_scale", lambda x: x[:, :-1], "do not fit"),
    ],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_damaged_parts_are_named(plain, tmp_path: Path, form: str, part: str, change, message: str, keeps: bool):
    quantized_copy(tmp_path, *plain, form)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in sorted(tensors) if name.endswith(f"proj.{part}"))
    tensors[name] = change(tensors[name]).clone()
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_target(tmp_path, OPS, keep_quantized=keeps)
    assert name.rpartition(".")[0] in str(caught.value)
