"""Layers on the host give what the same layers give in torch, for every pass of one row;
and what is no such pass goes the long way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.gpu.batch.pools import KVPool, PagedAttention
from foredraft.gpu.kernels import host
from foredraft.gpu.kernels.tiles import packed, unpacked
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Capture
from foredraft.gpu.models.eagle import Eagle3Head, EagleHead, MultiLayerEagleHeads
from foredraft.gpu.models.heads.config import HeadConfig
from foredraft.gpu.models.layer import Layer
from foredraft.gpu.models.projection import pack_projections
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.host_ops import HostOps, host_pass_of
from foredraft.gpu.types.attention import KVShape
from foredraft.gpu.types.ops import DecodeBatch, VerifyBatch

pytestmark = pytest.mark.skipif(not host.HAS_NUMBA, reason="Numba is not installed")
SLOTS = 40
OPS = HostOps()
MODELS = {
    "llama": ModelConfig(LLAMA, 70, 48, 80, 3, 4, 2, 16),
    "qwen2, biases": ModelConfig(
        "Qwen2ForCausalLM", 70, 48, 80, 2, 4, 1, 16, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "mistral, a window": ModelConfig("MistralForCausalLM", 70, 48, 80, 2, 4, 2, 16, window=4, windowed_layers=(0, 1)),
    "qwen3, head norms": ModelConfig("Qwen3ForCausalLM", 70, 48, 80, 2, 6, 6, 8, qk_norm=True),
}


def table_of(*rows: list[int]) -> torch.Tensor:
    table = torch.zeros((len(rows) + 1, 24), dtype=torch.int32)
    for number, slots in enumerate(rows, 1):
        table[number, : len(slots)] = torch.tensor(slots)
    return table


NEIGHBOURS = list(range(5, 21))
SCATTERED = [9, 4, 30, 31, 32, 33, 8, 7, 6, 5, 20, 21, 22, 23, 24, 25]


def pool_of(model, dtype: torch.dtype) -> KVPool:
    torch.manual_seed(3)
    pool = KVPool(model.kv_shapes, SLOTS, dtype, torch.device("cpu"))
    pool.keys.normal_()
    pool.values.normal_()
    return pool


def window(pool: KVPool, slots: list[int], prefix: int, bits: list[int], sunk: int = 0) -> PagedAttention:
    """`sunk` of the last new tokens write to the sink."""
    n = len(bits)
    table = table_of(slots)
    new = table[1, prefix : prefix + n].long()
    new[n - sunk :] = 0
    rows, lens = torch.tensor([1]), torch.tensor([prefix])
    positions = prefix + torch.arange(n)
    batch = VerifyBatch(table, rows, lens, prefix + 2, torch.tensor([bits]))
    return PagedAttention(OPS, pool, batch, positions, new)


def branches(pool: KVPool, slots: list[int], first: int, n: int) -> PagedAttention:
    table = table_of(slots)
    lens = torch.arange(first, first + n) + 1
    batch = DecodeBatch(table, torch.ones(n, dtype=torch.int64), lens, lens, lens, first + n)
    return PagedAttention(OPS, pool, batch, lens - 1, table[1, first : first + n].long())


def two_rows(pool: KVPool) -> PagedAttention:
    table, lens = table_of(NEIGHBOURS, SCATTERED), torch.tensor([6, 3])
    batch = VerifyBatch(table, torch.tensor([1, 2]), lens, 7, torch.tensor([[1, 3, 5], [0, 0, 0]]))
    positions = (lens[:, None] + torch.arange(3)).flatten()
    new = torch.cat([table[1, 6:9], torch.zeros(3, dtype=torch.int32)]).long()
    return PagedAttention(OPS, pool, batch, positions, new)


def tails(pool: KVPool) -> PagedAttention:
    """Three branches of two rows: columns [0, base), then those from `tail` on."""
    bases, lens = torch.tensor([4, 4, 2]), torch.tensor([6, 6, 3])
    ends = torch.tensor([6, 10, 9])
    table = table_of(NEIGHBOURS, SCATTERED)
    rows = torch.tensor([1, 1, 2])
    batch = DecodeBatch(table, rows, bases, ends - (lens - bases), lens, 8)
    return PagedAttention(OPS, pool, batch, lens - 1, table[rows, ends - 1].long())


PASSES = {
    "one token": lambda pool: window(pool, NEIGHBOURS, 6, [1]),
    "the first token of all": lambda pool: window(pool, NEIGHBOURS, 0, [1]),
    "a chain": lambda pool: window(pool, NEIGHBOURS, 5, [1, 3, 7]),
    "a chain without a prefix": lambda pool: window(pool, SCATTERED, 0, [1, 3, 7]),
    "a tree": lambda pool: window(pool, NEIGHBOURS, 7, [1, 3, 5, 11, 21]),
    "a tree over scattered slots": lambda pool: window(pool, SCATTERED, 7, [1, 3, 5, 11, 21]),
    "a window into the sink": lambda pool: window(pool, NEIGHBOURS, 4, [1, 3, 7, 15], sunk=2),
    "a step of a chain": lambda pool: branches(pool, NEIGHBOURS, 6, 1),
    "a step with its root": lambda pool: branches(pool, NEIGHBOURS, 6, 2),
    "a step over scattered slots": lambda pool: branches(pool, SCATTERED, 8, 2),
    "chains of two rows, one of which is padding": lambda pool: two_rows(pool),
    "branches with tails of their own": lambda pool: tails(pool),
}


def both_ways(make, attention_of, dtype: torch.dtype, run):
    """`run(model, attention)` in torch and on the host: what both give, and the pools that they leave."""
    found = []
    for on_host in (False, True):
        model = make()
        pool = pool_of(model, dtype)
        if on_host:
            pack_projections(model)
        attention = attention_of(pool)
        assert host_pass_of(attention) is not None
        assert bool(OPS._layers_on_host(layers_of(model))) == on_host
        found.append((*run(model, attention), pool.keys[:, 1:], pool.values[:, 1:]))
    return found


def layers_of(model) -> tuple:
    return tuple(module for module in model.modules() if isinstance(module, Layer))


def agree(found, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_decoders(config, dtype):
    def run(model, attention):
        n = len(attention.positions)
        tokens = torch.arange(3, 3 + n)
        out = model(tokens, attention, Capture((0, 1, config.num_layers)))
        return out.hidden, out.aux, model.logits(out.hidden)

    for attention_of in PASSES.values():
        agree(both_ways(lambda: random_weights(config, OPS, "cpu", dtype, seed=4), attention_of, dtype, run), dtype)


def head_of(kind: str, dtype: torch.dtype):
    target = random_weights(MODELS["llama"], OPS, "cpu", dtype, seed=5)
    model = ModelConfig(LLAMA, 70, 48, 64, 1 if kind != "EAGLE of two layers" else 2, 4, 2, 16)
    if kind.startswith("EAGLE-3"):
        config = HeadConfig(
            "EAGLE3",
            model,
            target_hidden_size=48,
            draft_vocab_size=40,
            aux_layers=(0, 1, 2),
            norm_before_residual=kind.endswith("normed"),
        )
        head = Eagle3Head(config, target)
        head.set_vocabulary(torch.arange(40) + 20)
    elif kind == "multi-layer":
        head = MultiLayerEagleHeads(
            HeadConfig("MULTI_LAYER_EAGLE", model, target_hidden_size=48, draft_vocab_size=70, num_heads=2),
            target,
            fc_bias=True,
        )
    else:
        head = EagleHead(HeadConfig("EAGLE", model, target_hidden_size=48, draft_vocab_size=70), target)
    initialize(head, 6, std=0.1)
    return head


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE of two layers", "EAGLE-3", "EAGLE-3, normed", "multi-layer"])
def test_heads(kind, dtype):
    def run(head, attention):
        torch.manual_seed(1)
        n = len(attention.positions)
        hidden = torch.randn(n, 48, dtype=dtype)
        outs = [head(torch.arange(n), hidden, attention, step) for step in range(getattr(head, "num_heads", 1))]
        return [x for out in outs for x in (out.hidden, out.logits_hidden, head.logits(out.logits_hidden))]

    for name in ("a chain", "a window into the sink", "a step of a chain"):
        agree(both_ways(lambda: head_of(kind, dtype), PASSES[name], dtype, run), dtype)


def test_what_compiled_kernels_do_not_take():
    pool = KVPool([KVShape(2, 8, 8)], SLOTS, torch.bfloat16, torch.device("cpu"))
    assert host_pass_of(window(pool, NEIGHBOURS, 5, [1, 3])) is None, "NumPy has no bfloat16"
    pool = KVPool([KVShape(2, 8, 8)], SLOTS, torch.float32, torch.device("cpu"))
    assert host_pass_of(window(pool, NEIGHBOURS, 5, [1, 3])) is not None
    lens = torch.full((host.MAX_TOKENS + 1,), 5)
    many = DecodeBatch(table_of(NEIGHBOURS), torch.ones_like(lens), lens, lens, lens, 5)
    assert host_pass_of(PagedAttention(OPS, pool, many, lens - 1, torch.zeros_like(lens))) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_exponential(dtype: type):
    """By the gate of an MLP: silu(g) · 1 through the identity, for gates of every size."""
    gates = np.concatenate([np.linspace(-30, 30, 4001), [0.0, -1e3, 1e3, -87.5, 87.5, np.nan]]).astype(dtype)
    one, nothing = np.ones((len(gates), 1), dtype), np.zeros(0, dtype)
    out = np.zeros((len(gates), 1), dtype)
    host.gate_multiply(np.column_stack([gates, one]).astype(dtype), one[:1], nothing, nothing, out)
    wide = gates.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = wide / (1 + np.exp(-wide))
    np.testing.assert_allclose(out[:, 0], expected, rtol=4 * np.finfo(dtype).eps, atol=1e-35)


def test_experts_stay_with_torch():
    config = ModelConfig(QWEN3_MOE, 70, 48, 80, 2, 4, 2, 16, moe=MoeConfig(4, 2, 24, mlp_only_layers=(0,)))
    model = random_weights(config, OPS, "cpu", torch.float32, seed=4)
    pack_projections(model)
    pool = pool_of(model, torch.float32)
    out = model(torch.tensor([1, 2]), window(pool, NEIGHBOURS, 5, [1, 3]), Capture(routed_experts=True))
    assert out.routed_experts is not None and out.routed_experts.shape == (2, 1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_products_of_any_number_of_rows_and_outputs(dtype: str):
    rng = np.random.default_rng(5)
    for n, num_outputs, inputs in [
        (n, o, i) for n in (1, 2, 3, 4, 5, 9) for o in (1, 2, 3, 7, 12) for i in (1, 19, 67)
    ]:
        of = np.float64 if dtype == "float64" else np.float32
        weight = torch.from_numpy(rng.integers(-9, 10, (num_outputs, inputs))).to(getattr(torch, dtype))
        stored = packed(weight.numpy()) if dtype == "int8" else weight.numpy()
        x, out = rng.integers(-9, 10, (n, inputs)).astype(of), rng.integers(-9, 10, (n, num_outputs)).astype(of)
        scales, bias = (rng.integers(1, 5, num_outputs).astype(of) for _ in range(2))
        expected, nothing = x @ weight.double().numpy().T, np.zeros(0, of)
        added = out.copy()
        host.multiply(x, stored, nothing, nothing, True, added)
        rounded = {"rtol": 1e-6, "atol": 9 * 9 / 65_000 * inputs} if dtype == "int8" else {"rtol": 0}  # to 16 bits
        np.testing.assert_allclose(added, out + expected, **rounded)
        host.multiply(x, stored, scales, bias, False, out)
        np.testing.assert_allclose(out, expected * scales + bias, rtol=0, atol=4 * rounded.get("atol", 0))


@pytest.mark.parametrize("shape", [(1, 1), (16, 4), (17, 6), (40, 67)])
def test_packed_integers_stand_in_blocks(shape: tuple[int, int]):
    integers = np.random.default_rng(7).integers(-128, 128, shape).astype(np.int8)
    blocks = packed(integers)
    num_blocks, pairs, width, two = blocks.shape
    assert two == 2 and not pairs % 2 and num_blocks * width >= shape[0] > (num_blocks - 1) * width
    for o, i in np.ndindex(*shape):
        assert blocks[o // width, i // 2, o % width, i % 2] == integers[o, i]
    assert np.count_nonzero(blocks) == np.count_nonzero(integers), "the rest is 0"
    np.testing.assert_array_equal(unpacked(blocks, *shape), integers)


@pytest.mark.parametrize("inputs", [64, 4096])
def test_rows_are_rounded_to_16_bits_and_each_by_itself(inputs: int):
    rng = np.random.default_rng(6)
    factors = np.array([1e-4, 1, 1, 3e4, 1, 0, 1], np.float32)
    x = rng.standard_normal((7, inputs)).astype(np.float32) * factors[:, None]
    x[1, 0], x[4] = 1e3, 1.0  # one channel far above the others; sums as great as they can be
    weight, nothing = rng.integers(-127, 128, (24, inputs)).astype(np.int8), np.zeros(0, np.float32)
    weight[0] = 127

    def product(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), len(weight)), np.float32)
        host.multiply(rows, packed(weight), nothing, nothing, False, out)
        return out

    found, exact = product(x), x.astype(np.float64) @ weight.astype(np.float64).T
    norms = np.abs(x).max(1, keepdims=True).astype(np.float64) * np.linalg.norm(weight.astype(np.float64), axis=1)
    assert (np.abs(found - exact) <= 1e-4 * norms).all()
    for n in (1, 2, 3):
        assert all((product(x[r : r + n]) == found[r : r + n]).all() for r in range(8 - n))
    x[2, 0], x[3, 1] = np.nan, np.inf
    again = product(x)
    assert np.isnan(again[2:4]).all() and (again[[0, 1, 4, 5, 6]] == found[[0, 1, 4, 5, 6]]).all()
