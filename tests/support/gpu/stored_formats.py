"""Weights in published formats, with the numbers that they mean, number by number."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from foredraft.gpu.models.checkpoint import random_weights, save_target
from foredraft.gpu.models.config import ModelConfig, MoeConfig
from foredraft.gpu.models.stored.tensor_files import SINGLE
from foredraft.gpu.ops.torch_ops import TorchOps
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


def plain_checkpoint(directory: Path) -> tuple[Path, Tensors]:
    """Write a small model without a format. Returns the directory and its tensors."""
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
