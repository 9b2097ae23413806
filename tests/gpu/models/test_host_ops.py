"""Layers on the host give what the same layers give in torch, for every pass of one row;
and what is no such pass goes the long way."""

from __future__ import annotations

import pytest
import torch
from foredraft.gpu.batch.pools import KVPool, PagedAttention
from foredraft.gpu.models.checkpoint import random_weights
from foredraft.gpu.models.config import LLAMA, QWEN3_MOE, ModelConfig, MoeConfig
from foredraft.gpu.models.decoder import Capture
from foredraft.gpu.models.eagle import Eagle3Head, EagleHead, MultiLayerEagleHeads
from foredraft.gpu.models.head_config import HeadConfig
from foredraft.gpu.models.layer import Layer
from foredraft.gpu.models.projection import pack_projections
from foredraft.gpu.models.weights import initialize
from foredraft.gpu.ops.host_ops import HostOps, host_pass_of, view_keys, window_keys
from foredraft.gpu.types.attention import KVShape
from foredraft.gpu.types.ops import DecodeBatch, VerifyBatch

SLOTS = 40
OPS = HostOps()
MODELS = {
    "llama": ModelConfig(LLAMA, 70, 48, 80, 3, 4, 2, 16),
    "qwen2, biases": ModelConfig(
        "Qwen2ForCausalLM", 70, 48, 80, 2, 4, 1, 16, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
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
    for plain, host in zip(*found, strict=True):
        torch.testing.assert_close(host, plain, rtol=tolerance, atol=tolerance)


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


def test_what_is_no_pass_of_one_row():
    table = table_of(NEIGHBOURS, SCATTERED)
    one, two, lens = torch.tensor([1]), torch.tensor([1, 2]), torch.tensor([5, 5])
    new = torch.tensor([10, 11])

    def window_of(rows, lens, bits):
        return window_keys(VerifyBatch(table, rows, lens, 5, torch.tensor(bits)), new, new)

    def view_of(rows, bases, lens):
        return view_keys(DecodeBatch(table, rows, bases, bases, lens, 8), new, new)

    assert window_of(one, lens[:1], [[1, 3]]) is not None
    assert window_of(two, lens, [[1], [1]]) is None
    assert window_of(one, lens[:1], [[1, 0]]) is None, "a token that sees nothing"
    ends = torch.tensor([6, 7])
    assert view_of(one.expand(2), ends, ends) is not None
    assert view_of(one.expand(2), ends.clone(), ends) is None, "branches with tails of their own"
    assert view_of(two, ends, ends) is None
    for lens in ([6, 6], [7, 6], [6, 8], [0, 1]):
        ends = torch.tensor(lens)
        assert view_of(one.expand(2), ends, ends) is None
    pool = KVPool([KVShape(2, 8, 8)], SLOTS, torch.bfloat16, torch.device("cpu"))
    assert host_pass_of(window(pool, NEIGHBOURS, 5, [1, 3])) is None


def test_neighbours_are_read_where_they_are():
    pool = KVPool([KVShape(2, 8, 8)], SLOTS, torch.float32, torch.device("cpu"))
    keys = host_pass_of(window(pool, NEIGHBOURS, 5, [1, 3])).keys
    assert (keys.read, keys.write, keys.own) == (slice(5, 12), slice(10, 12), False)
    keys = host_pass_of(window(pool, SCATTERED, 5, [1, 3])).keys
    assert keys.own and keys.read.tolist() == SCATTERED[:5] and keys.write.tolist() == SCATTERED[5:7]


def test_experts_stay_with_torch():
    config = ModelConfig(QWEN3_MOE, 70, 48, 80, 2, 4, 2, 16, moe=MoeConfig(4, 2, 24, mlp_only_layers=(0,)))
    model = random_weights(config, OPS, "cpu", torch.float32, seed=4)
    pack_projections(model)
    pool = pool_of(model, torch.float32)
    out = model(torch.tensor([1, 2]), window(pool, NEIGHBOURS, 5, [1, 3]), Capture(routed_experts=True))
    assert out.routed_experts is not None and out.routed_experts.shape == (2, 1, 2)
