"""Products with stored numbers and with the weights of chosen experts, as Triton kernels and in torch, against
float64, every memory access checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foredraft.gpu.kernels.jit import cdiv
from foredraft.gpu.kernels.layers.products import TILINGS, Tiling, padded_rows, usual_tiling
from foredraft.gpu.kernels.layers.silu_mul import silu_mul_torch
from foredraft.gpu.ops import tilings
from foredraft.gpu.ops.tilings import (
    TIMED_ROWS,
    measure_tilings,
    read_tilings,
    shape_of,
    take_tilings,
    tiling_for,
    write_tilings,
)
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.types.coded import Code, CodedWeight
from foredraft.gpu.types.experts import Router
from memory_checker import checked_memory
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)


def stored(code: Code, shape: tuple[int, ...], group: int, scales: torch.dtype, seed: int = 0) -> CodedWeight:
    """A random matrix, or one of each expert, in stored numbers."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * code.bits // 8), generator=generator, dtype=torch.uint8)
    if code is Code.E4M3:
        numbers[numbers & 0x7F == 0x7F] = 0  # not a number
    groups = (*shape[:-1], cdiv(shape[-1], group))
    zeros = torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8) if code is Code.UINT4 else None
    factors = torch.rand(shape[:-1], generator=generator) if code is Code.E2M1 and group == 16 else None
    return CodedWeight(code, numbers, (torch.rand(groups, generator=generator) + 0.1).to(scales), group, zeros, factors)


@pytest.mark.fast("5-*-dtype0", "3-*-dtype1", ci="*")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize(
    ("n", "shape", "group"),
    [
        (1, (40, 96), 16),
        (5, (33, 96), 32),
        (17, (70, 200), 128),
        (64, (64, 64), 64),
        (3, (8, 130), 130),
        (65, (8, 64), 64),
        (150, (70, 64), 32),
        (2049, (8, 64), 64),
    ],
)
def test_coded_product(dtype: torch.dtype, code: Code, n: int, shape: tuple[int, int], group: int):
    weight = stored(code, shape, group, torch.float16)
    x = torch.randn(n, shape[1], generator=torch.Generator().manual_seed(n)).to(dtype)
    exact = x.double() @ weight.dense(dtype).double().t()
    parts = [part for part in (weight.codes, weight.scales, weight.zeros, weight.factors) if part is not None]
    with checked_memory(read_only=[x, *parts], shuffle=1) as seen:
        found = TritonOps().coded_product(x, weight)
    assert seen.launches == (n <= 2048)  # for more rows the weights are unpacked
    assert (found - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    assert (TorchOps().coded_product(x, weight) - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


@pytest.fixture
def no_tilings(monkeypatch: pytest.MonkeyPatch):
    """No product has been timed."""
    monkeypatch.setattr(tilings, "_measured", {})


@pytest.mark.fast("1-Code.UINT4-*", ci="*")
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("n", [1, 128])
def test_every_tiling_computes_the_product(no_tilings, tiling: Tiling, code: Code, n: int):
    weight = stored(code, (150, 96), 32, torch.float16)
    x = torch.randn(n, 96, generator=torch.Generator().manual_seed(n))
    take_tilings({shape_of(weight, padded_rows(n), x.dtype): tiling})
    with checked_memory(read_only=[x, weight.codes, weight.scales], shuffle=1) as seen:
        found = TritonOps().coded_product(x, weight)
    exact = x.double() @ weight.dense(x.dtype).double().t()
    assert seen.launches == 1
    assert (found - exact).abs().max() <= TOLERANCE[x.dtype] * exact.abs().max()


def test_the_fastest_way_is_kept_and_another_process_takes_it(no_tilings, tmp_path: Path):
    """The clock is made up: of each shape one way is fast, and of one shape no way is clearly faster than the usual."""
    weights = [stored(Code.INT8, (40, 32), 32, torch.float16), stored(Code.UINT4, (24, 64), 32, torch.float16)]
    seconds = {
        shape_of(weight, rows, torch.float32): dict.fromkeys((*TILINGS, None), 1.0)
        for weight in weights
        for rows in TIMED_ROWS
    }
    shapes = [*seconds]
    seconds[shapes[0]][TILINGS[1]] = 0.5
    seconds[shapes[1]][None] = 0.5
    seconds[shapes[2]][TILINGS[2]] = 0.99
    seconds[shapes[3]][TILINGS[0]] = 0.1
    calls = iter([one for shape in shapes for one in seconds[shape].values()])
    lines: list[str] = []
    found = measure_tilings(weights, torch.float32, lambda call: (call(), next(calls))[1], lines.append, 60.0)
    usual = {shape: usual_tiling(shape.rows) for shape in shapes}
    assert found == usual | {shapes[0]: TILINGS[1], shapes[1]: None, shapes[3]: TILINGS[0]}
    assert lines[-1] == "timing products: 8 of 8"

    path = tmp_path / "products" / "a-gpu.json"
    write_tilings(path, dict([*found.items()][:3]))
    write_tilings(path, dict([*found.items()][3:]))
    take_tilings(read_tilings(path))
    assert tiling_for(weights[0], 9, torch.float32) == TILINGS[1]
    assert tiling_for(weights[0], 17, torch.float32) is None
    assert tiling_for(weights[0], 100, torch.float32) == TILINGS[0]
    assert tiling_for(weights[0], 129, torch.float32) == TILINGS[1]  # more than were timed
    assert tiling_for(weights[0], 2049, torch.float32) is None
    assert tiling_for(weights[0], 9, torch.float16) == TILINGS[0]  # not timed
    assert measure_tilings(weights, torch.float32, lambda call: 1.0, lines.append, 60.0) == {}  # nothing is left


def test_what_the_time_is_too_short_for_runs_the_usual_way(no_tilings):
    lines: list[str] = []
    weight = stored(Code.INT8, (40, 32), 32, torch.float16)
    assert measure_tilings([weight], torch.float32, lambda call: 1.0, lines.append, 0.0) == {}
    assert lines == ["timing products: 0 of 4 when the time ended; the others run the usual way"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "products": []}',
        '{"version": 1, "products": [{"shape": {"code": "int8"}, "tiling": null}]}',
        '{"version": 1, "products": [{"shape": {"code": "int8", "group": 32, "outputs": 40, "inputs": 32, '
        '"dtype": "float32", "rows": 16}, "tiling": {"features": 7, "warps": 4}}]}',
    ],
)
def test_a_file_that_was_not_written_here_is_replaced(no_tilings, text: str, tmp_path: Path):
    path = tmp_path / "a-gpu.json"
    path.write_text(text)
    assert read_tilings(path) == {}
    shape = shape_of(stored(Code.INT8, (40, 32), 32, torch.float16), 16, torch.float32)
    write_tilings(path, {shape: None})
    assert read_tilings(path) == {shape: None}


@pytest.mark.fast("*-7-*-dtype0", "None-1-*", "None-0-*", ci="*")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "shape"),
    [(1, 2, 6, (40, 64)), (7, 2, 5, (33, 70)), (40, 1, 2, (24, 32)), (70, 4, 5, (8, 32)), (0, 2, 4, (8, 32))],
)
@pytest.mark.parametrize("code", [None, Code.E4M3, Code.UINT4, Code.E2M1])
def test_expert_product(dtype: torch.dtype, tokens: int, top_k: int, experts: int, shape: tuple[int, int], code):
    """The cases have more choices of an expert than a program takes at once, and experts that no token chose."""
    generator = torch.Generator().manual_seed(tokens)
    full = (experts, *shape)
    weight = torch.randn(full, generator=generator).to(dtype) if code is None else stored(code, full, 32, torch.float16)
    dense = weight if isinstance(weight, Tensor) else weight.dense(dtype)
    chosen = torch.stack([torch.randperm(max(1, experts - 1), generator=generator)[:top_k] for _ in range(tokens)] or
                         [torch.zeros(top_k, dtype=torch.int64)])[:tokens]  # fmt: skip
    for size, gated in (
        ((tokens, shape[1]), False),
        ((tokens, top_k, shape[1]), False),
        ((tokens, top_k, 2 * shape[1]), True),
    ):
        x = torch.randn(size, generator=generator).to(dtype)
        rows = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, top_k, -1)
        rows = silu_mul_torch(rows.float()).to(dtype) if gated else rows
        exact = torch.einsum("nkoi,nki->nko", dense[chosen].double(), rows.double())
        parts = [weight] if isinstance(weight, Tensor) else [weight.codes, weight.scales]
        with checked_memory(read_only=[x, chosen, *parts], shuffle=1):
            found = TritonOps().expert_product(x, weight, chosen, gated)
        assert found.shape == exact.shape
        if tokens:
            assert (found - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def test_an_expert_that_nobody_chose_is_not_read():
    weight = torch.full((3, 16, 32), torch.nan)
    weight[1] = 1.0
    out = TritonOps().expert_product(torch.ones(2, 32), weight, torch.tensor([[1], [1]]))
    assert torch.equal(out, torch.full((2, 1, 16), 32.0))


ROUTERS = {
    "shares": Router(3),
    "shares that sum to 1": Router(3, normalized=True),
    "one group": Router(2, num_groups=3, top_groups=1, scale=16.0),  # DeepSeek V2
    "sigmoids": Router(4, True, num_groups=5, top_groups=3, normalized=True, epsilon=1e-20, scale=2.5),  # V3
}


@pytest.mark.fast("sigmoids-*", ci="*")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_are_chosen_as_torch_chooses_them(kind: str, dtype: torch.dtype):
    router, generator = ROUTERS[kind], torch.Generator().manual_seed(3)
    bias = torch.randn(15, generator=generator) if router.is_sigmoid else None
    logits = torch.randn(6, 20, generator=generator)[:, :15]  # of wider rows
    with checked_memory(read_only=[logits], shuffle=1) as seen:
        weights, experts = TritonOps().route(logits, router, bias, dtype)
    expected = TorchOps().route(logits, router, bias, dtype)
    assert seen.launches == 1 and weights.dtype is dtype
    assert torch.equal(experts, expected[1])
    torch.testing.assert_close(weights, expected[0])


@pytest.mark.fast("gate-dtype0", ci="*")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", ["nothing", "shared", "gate"])
def test_experts_are_summed_as_torch_sums_them(beside: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(4)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    out, weights, x = normal(5, 3, 700), normal(5, 3), normal(5, 1100)
    shared, gate = None if beside == "nothing" else normal(5, 700), normal(1, 1100) / 30 if beside == "gate" else None
    with checked_memory(read_only=[out, weights, x], shuffle=1) as seen:
        found = TritonOps().combine(out, weights, shared, x, gate)
    exact = [None if part is None else part.double() for part in (out, weights, shared, x, gate)]
    assert seen.launches == 1
    expected = TorchOps().combine(*exact)
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_of_attention_lies_between_the_queries_of_one_projection(dtype: torch.dtype):
    qkv, out = torch.randn(3, 9, 8).to(dtype), torch.randn(3, 4, 8).to(dtype)
    gate = qkv[:, 4:8]
    with checked_memory(read_only=[qkv, out]) as seen:
        found = TritonOps().sigmoid_mul(out, gate)
    assert seen.launches == 1
    assert (found - TorchOps().sigmoid_mul(out.double(), gate.double())).abs().max() <= TOLERANCE[dtype] * 4
