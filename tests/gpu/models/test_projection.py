"""Layouts of weights on a CPU: which one is chosen, and that they change the speed only; dtypes of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_shapes import SHAPES
from foredraft.core.errors import ConfigError
from foredraft.gpu.kernels import host
from foredraft.gpu.measure.floor import decoder_pass_bytes
from foredraft.gpu.models import projection
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.projection import (
    BLOCKS,
    COMPILED,
    INT8,
    ROWS,
    HostProduct,
    Projection,
    has_blocks,
    has_integers,
    in_integers,
    layout_for,
    pack_projections,
    rounded,
)
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.session.devices import check_kernels, resolve_dtype
from foredraft.gpu.tiny.dense import DenseAttention


def tokens_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(seed))


LAYOUTS = [
    (dtype, layout)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for layout in (ROWS, COMPILED, BLOCKS)
    if (layout != BLOCKS or has_blocks(dtype)) and (layout != COMPILED or (dtype != torch.bfloat16 and host.HAS_NUMBA))
]


@pytest.mark.parametrize("dtype, layout", LAYOUTS)
@torch.no_grad()
def test_packed_weights_change_the_speed_only(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch):
    config = ModelConfig(
        QWEN3_MOE, 70, 48, 80, 3, 4, 2, 16, qkv_bias=True, moe=MoeConfig(4, 2, 24, mlp_only_layers=(0,))
    )
    plain, small, packed = (random_weights(config, TorchOps(), "cpu", dtype, seed=4) for _ in range(3))
    pack_projections(small)
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 0)
    monkeypatch.setattr(projection, "layout_for", lambda *_: layout)
    pack_projections(packed)
    for model in small, packed:
        owned = [p for module in model.modules() for p in getattr(module, "projections", ())]
        assert len(owned) == 3 * 2 + 2 + 1, "attention twice a layer, the one dense MLP, the LM head"
        small_layout = ROWS if dtype is torch.bfloat16 or not host.HAS_NUMBA else COMPILED
        expected = layout if model is packed else small_layout
        assert {p.layout for p in owned} == {expected}
        for p in owned:
            assert bool(p._weight.isnan().all()) == (expected == BLOCKS), "a weight is in memory once"
        assert model.weight_bytes == plain.weight_bytes
    tolerance = {} if dtype is not torch.bfloat16 else {"rtol": 0.05, "atol": 0.05}
    for n in (1, 2, 3, 5, 40):
        tokens = tokens_of(n) % 70
        expected = plain(tokens, DenseAttention([n])).hidden
        for model in small, packed:
            out = model(tokens, DenseAttention([n])).hidden
            torch.testing.assert_close(out, expected, **tolerance)
            torch.testing.assert_close(model.logits(out), plain.logits(expected), **tolerance)


@pytest.mark.parametrize("native", [True, False])
def test_large_models_keep_bfloat16_where_the_cpu_has_it(native: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "is_native", lambda dtype: native and dtype is torch.bfloat16)
    large = ModelConfig(LLAMA, 70, 2048, 8192, 2, 16, 4, 128, dtype=torch.bfloat16)
    small = ModelConfig(LLAMA, 70, 64, 128, 2, 4, 2, 16, dtype=torch.bfloat16)
    assert resolve_dtype("auto", large, "cpu") is (torch.bfloat16 if native else torch.float32)
    assert resolve_dtype("auto", small, "cpu") is torch.float32, (
        "calls take longer than reading: 32 bits have quicker ones"
    )
    assert resolve_dtype("auto", replace(large, dtype=torch.float16), "cpu") is torch.float32
    assert resolve_dtype("bfloat16", small, "cpu") is torch.bfloat16


def test_heads_that_are_wider_than_a_gpus_kernels_are_refused_there():
    for known, key in ((replace(SHAPES["deepseek_v3"], head_dim=576), "kv_lora_rank"), (SHAPES["llama"], "head_dim")):
        wide = replace(known, head_dim=640)
        with pytest.raises(ConfigError, match=rf"m: {key}: 640 channels: a GPU's kernels have at most 576"):
            check_kernels(wide, "cuda", "m")
        check_kernels(wide, "cpu", "m")
        check_kernels(known, "cuda:1", "m")
    check_kernels(replace(SHAPES["gemma4"], full_head_dim=512), "cuda", "m")


def test_other_dtypes_are_the_models_own_and_unknown_ones_are_refused():
    small = ModelConfig(LLAMA, 70, 64, 128, 2, 4, 2, 16, dtype=torch.bfloat16)
    assert resolve_dtype("auto", small, "cuda") is torch.bfloat16
    assert resolve_dtype("auto", replace(small, dtype=torch.float64), "cpu") is torch.float64
    with pytest.raises(ConfigError, match=r"'float33' is none of auto, .*float32"):
        resolve_dtype("float33", small, "cpu")


@pytest.mark.parametrize("layout", [BLOCKS, *([COMPILED] if host.HAS_NUMBA else [])])
@torch.no_grad()
def test_tied_embeddings_are_read_beside_the_packed_head(layout: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "layout_for", lambda *_: layout)
    config = ModelConfig(LLAMA, 70, 48, 80, 1, 4, 2, 16, tied_embeddings=True)
    plain, packed = (random_weights(config, TorchOps(), "cpu", torch.float32, seed=4) for _ in range(2))
    pack_projections(packed)
    expected = plain(tokens_of(3) % 70, DenseAttention([3])).hidden
    out = packed(tokens_of(3) % 70, DenseAttention([3])).hidden
    torch.testing.assert_close(packed.logits(out), plain.logits(expected))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_there", [True, False])
def test_compiled_kernels_read_large_weights_on_one_core_only(
    threads: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "HAS_NUMBA", is_there)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(projection, "has_blocks", lambda dtype: dtype is not torch.float64)
    dtypes = torch.float32, torch.float64, torch.bfloat16
    found = {d: [layout_for(torch.empty(n, 128, dtype=d)) for n in (1023, 1024)] for d in dtypes}
    on_one, small = is_there and threads == 1, COMPILED if is_there else ROWS
    assert found == {
        torch.float32: [small, COMPILED if on_one else BLOCKS],
        torch.float64: [small, COMPILED if on_one else ROWS],
        torch.bfloat16: [ROWS, BLOCKS],
    }


needs_integers = pytest.mark.skipif(not has_integers(), reason="this CPU or torch does not multiply 8-bit integers")


@needs_integers
@pytest.mark.parametrize("shape", [(96, 64), (33, 130), (1, 1)])
def test_products_of_integers_are_exact_and_each_row_is_rounded_by_itself(shape: tuple[int, int]):
    """Against the numbers that both sides are rounded to, multiplied in float64."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    weight[0] = 0.0
    x = torch.randn(7, shape[1], generator=generator) * torch.tensor([1e-4, 1.0, 1.0, 3e4, 1.0, 0.0, 1.0]).unsqueeze(1)
    product = in_integers(*rounded(weight), bias)

    def at_both_sides(rows: torch.Tensor) -> torch.Tensor:
        scales = (rows.abs().amax(1, True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        return (rows / scales).round().double() * scales.double()

    exact = at_both_sides(x) @ at_both_sides(weight).t() + bias.double()
    found = product(x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(product(x[n : n + 1])[0], found[n]) for n in range(len(x)))
    x[2, 0] = torch.nan
    assert product(x)[2].isnan().all() and torch.equal(product(x)[[0, 1, 3, 4, 5, 6]], found[[0, 1, 3, 4, 5, 6]])


@pytest.mark.parametrize("bits", [pytest.param(8, marks=needs_integers), 16])
@torch.no_grad()
def test_the_error_of_integers(bits: int, record_property):
    """Of a product of random matrices, by both ways, and of the rows alone, against the weights as they are rounded."""
    weight, x = (torch.randn(n, 768, generator=torch.Generator().manual_seed(n)) for n in (2304, 32))
    integers, scales = rounded(weight)
    if bits == 8:
        found = in_integers(integers, scales)(x).double()
    elif host.HAS_NUMBA:
        found = HostProduct.of(integers, scales, None).outputs(x).double()
    else:
        pytest.skip("Numba is not installed")

    def error(of: torch.Tensor) -> float:
        exact = x.double() @ of.double().t()
        return float((found - exact).norm() / exact.norm())

    whole, of_rows = error(weight), error(integers.double() * scales.double().unsqueeze(1))
    record_property("note", f"rows of {bits} bits: products differ from float32 by {whole:.3%}, by rows {of_rows:.4%}")
    assert 0.005 < whole < 0.02 and (0.005 < of_rows < 0.01 if bits == 8 else 1e-6 < of_rows < 1e-4)


@pytest.mark.skipif(not (host.HAS_NUMBA or has_integers()), reason="neither Numba nor VNNI")
@torch.no_grad()
def test_large_weights_become_integers_when_asked_for(monkeypatch: pytest.MonkeyPatch):
    config = ModelConfig(LLAMA, 70, 48, 80, 2, 4, 2, 16, qkv_bias=True, tied_embeddings=True)
    plain, rounded = (random_weights(config, TorchOps(), "cpu", torch.float32, seed=4) for _ in range(2))
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 48 * 64 + 1)
    pack_projections(rounded, in_int8=True)
    owned = [p for module in rounded.modules() for p in getattr(module, "projections", ())]
    assert {p.layout for p in owned} > {INT8}
    assert all((p.layout == INT8) == (p._weight.numel() > 48 * 64) for p in owned)
    in_integers = [p._weight for p in owned if p.layout == INT8]
    saved = sum(3 * weight.numel() - 4 * len(weight) for weight in in_integers)  # 4 bytes for the scale of each row
    assert rounded.weight_bytes == plain.weight_bytes - saved == decoder_pass_bytes(rounded, 1)
    tokens = tokens_of(9) % 70
    expected, out = (model(tokens, DenseAttention([9])).hidden for model in (plain, rounded))
    error = (rounded.logits(out) - plain.logits(expected)).norm() / plain.logits(expected).norm()
    assert 1e-4 < error < 0.05


@pytest.mark.skipif(not host.HAS_NUMBA, reason="Numba is not installed")
@pytest.mark.parametrize("shape", [(96, 64), (35, 130), (1, 1)])
@torch.no_grad()
def test_compiled_products_of_integers_round_the_weights_alone(shape: tuple[int, int], monkeypatch):
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 0)
    generator = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(size, generator=generator) for size in (shape, shape[:1]))
    integers, scales = rounded(weight)
    exact = integers.double() * scales.double().unsqueeze(1)
    product = Projection(torch.nn.Parameter(weight, requires_grad=False), bias)
    product.pack(in_int8=True)
    assert product.layout == INT8 and product.parameter.isnan().all()
    for n in (1, 2, 5, host.MAX_TOKENS + 1):
        x = torch.randn(n, shape[1], generator=generator)
        expected = (x.double() @ exact.t() + bias.double()).float()
        torch.testing.assert_close(product(x), expected, rtol=1e-4, atol=2e-3)  # rows of 16 bits
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # torch multiplies many rows then, which stay as they are
    torch.testing.assert_close(product(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not host.HAS_NUMBA, reason="Numba is not installed")
@pytest.mark.parametrize("in_int8", [False, True])
@torch.no_grad()
def test_weights_with_gaps_and_a_part_of_the_outputs(in_int8: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "MIN_PACKED_ELEMENTS", 0)
    generator = torch.Generator().manual_seed(1)
    wide, bias, x = (torch.randn(size, generator=generator) for size in ((70, 96), (70,), (5, 48)))
    for part in wide[:, :48], wide[:, 1::2], wide[:, :70].t()[:, :48]:
        part_bias = bias[: len(part)]
        product = Projection(torch.nn.Parameter(part, requires_grad=False), part_bias)
        expected = x @ part.t() + part_bias
        product.pack(in_int8=in_int8)
        assert product.layout == (INT8 if in_int8 else COMPILED)
        found = product(x)
        torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0.2} if in_int8 else {}))
        for first in (0, 1, 16, 33, 69):
            exact = {"rtol": 0, "atol": 0} if in_int8 else {}  # sums of integers
            torch.testing.assert_close(product.outputs_from(first, x), found[:, first:], **exact)


def test_integers_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch):
    small = ModelConfig(LLAMA, 70, 64, 128, 2, 4, 2, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(projection, "has_integers", lambda: True)
    assert resolve_dtype("auto", small, "cpu", "int8") is torch.float32
    with pytest.raises(ConfigError, match=r"quantized: int8 is for a CPU; choose keep or unpack on cuda:1"):
        resolve_dtype("auto", small, "cuda:1", "int8")
    with pytest.raises(ConfigError, match=r"dtype: bfloat16: with quantized int8 everything else is float32"):
        resolve_dtype("bfloat16", small, "cpu", "int8")
    monkeypatch.setattr(projection, "has_integers", lambda: False)
    monkeypatch.setattr(host, "HAS_NUMBA", True)
    assert resolve_dtype("auto", small, "cpu", "int8") is torch.float32
    monkeypatch.setattr(host, "HAS_NUMBA", False)
    with pytest.raises(ConfigError, match=r"quantized: int8 needs Numba \(pip install numba\), or a CPU that"):
        resolve_dtype("auto", small, "cpu", "int8")
