"""Products that keep the numbers of quantized files: weights, memory, and damaged parts of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_shapes import SHAPES
from foredraft.gpu.measure.shapes import random_target
from foredraft.gpu.models.checkpoint import load_target, random_weights, save_target
from foredraft.gpu.models.config import ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Decoder
from foredraft.gpu.models.families import CLAMPED_SWIGLU
from foredraft.gpu.models.stored.tensor_files import SINGLE, CheckpointError
from foredraft.gpu.models.weights import products_of
from foredraft.gpu.session.memory import checkpoint_bytes
from foredraft.gpu.tiny.dense import DenseAttention
from foredraft.gpu.types.coded import CodedWeight
from foredraft.gpu.types.shards import WHOLE
from safetensors.torch import load_file, save_file
from stored_formats import FORMS, GROUP, OPS, SHAPE, Tensors, gptq, groups, is_quantized, plain_checkpoint, write


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[Path, Tensors]:
    return plain_checkpoint(tmp_path_factory.mktemp("plain"))


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


@pytest.mark.fast("fp8, blocks", "awq", "gptq", "nvfp4, modelopt", ci="*")
@pytest.mark.parametrize("form", KEPT_FORMS)
def test_random_weights_are_kept_in_the_forms_of_the_files(plain, tmp_path: Path, form: str):
    """`bench --random-weights` and `--estimate` read as many bytes as a round over the files does."""
    quantized_copy(tmp_path, *plain, form)
    files = load_target(tmp_path, OPS, keep_quantized=True)
    config = replace(ModelConfig.from_directory(tmp_path), keeps_quantized=True)
    for device in ("meta", "cpu"):
        model = random_target(config, OPS, device, torch.float32)
        for ours, theirs in zip(products_of(model), products_of(files), strict=True):
            assert form_of(ours.coded) == form_of(theirs.coded)
    tokens = torch.arange(20) % SHAPE.vocab_size
    assert model(tokens, DenseAttention([20])).hidden.isfinite().all()


def form_of(coded: CodedWeight | None) -> object:
    """All of stored numbers but their values and how wide scales are, in which published files differ."""
    if coded is None:
        return None
    parts = (coded.codes, coded.scales, coded.zeros, coded.factors)
    return coded.code, coded.group, [None if part is None else tuple(part.shape) for part in parts]


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
