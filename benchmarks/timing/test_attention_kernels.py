"""The forward pass's Triton kernels on a GPU: what share of the memory's measured bandwidth they reach.

    pytest benchmarks/timing/test_attention_kernels.py -s

bfloat16, 32 query and 8 key heads of 128 channels, batch 1, KV in pages of 16 that lie scattered. Each kernel is
captured many times in one CUDA graph, over as many different pools as it takes to leave the caches behind, so that
neither a launch on the host nor a warm cache is measured. A kernel's bytes are those that it must move (`*_bytes`
beside it); the bandwidth is that of a big copy in the same process. Nothing is asserted by the clock: the goal for
verification at 32k is 60 %.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from foredraft.gpu.kernels.layers.decode_attention import decode_attention_bytes, decode_attention_triton
from foredraft.gpu.kernels.layers.rms_norm import add_rms_norm_triton, rms_norm_bytes
from foredraft.gpu.kernels.layers.rope_write import rope_write_bytes, rope_write_triton
from foredraft.gpu.kernels.layers.verify_attention import verify_attention_bytes, verify_attention_triton
from foredraft.gpu.measure.floor import copy_bandwidth
from foredraft.gpu.types.ops import DecodeBatch, KVTensors, VerifyBatch

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="times Triton kernels: needs an NVIDIA GPU")]

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 4096
DTYPE, ITEM = torch.bfloat16, 2
PAGE = 16
BEYOND_CACHES = 1 << 29  # bytes that one replay goes through
MAX_POOLS = 64
REPLAYS = 20


@pytest.fixture(scope="module")
def bandwidth() -> float:
    return copy_bandwidth("cuda")


def seconds_per_call(calls: list[Callable[[], object]]) -> float:
    """Of each of `calls`, captured together; the best of several replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiled before they are captured
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    del kept
    return min(times) / len(calls)


class KernelPools:
    """KV of one row of `length` tokens, as often as it takes to leave the caches behind."""

    def __init__(self, length: int) -> None:
        per_pool = 2 * length * KV_HEADS * HEAD_DIM * ITEM
        self.count = min(MAX_POOLS, max(2, -(-BEYOND_CACHES // per_pool)))
        pages = -(-length // PAGE) + 5
        generator = torch.Generator(device="cuda").manual_seed(0)
        shape = (self.count, (pages + 1) * PAGE, KV_HEADS, HEAD_DIM)
        self.keys, self.values = (torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE) for _ in range(2))
        order = 1 + torch.randperm(pages, generator=generator, device="cuda")
        slots = (order[:, None] * PAGE + torch.arange(PAGE, device="cuda")).view(-1)
        self.table = torch.zeros((2, pages * PAGE), dtype=torch.int32, device="cuda")
        self.table[1] = slots
        self.rows = torch.ones(1, dtype=torch.int64, device="cuda")
        self.lens = torch.full((1,), length, dtype=torch.int64, device="cuda")

    def kv(self, i: int) -> KVTensors:
        return KVTensors(self.keys[i], self.values[i])


def tree_bits(num_nodes: int) -> torch.Tensor:
    """int64 [1, nd]: a binary tree in order of depth; node i hangs below node (i − 1) / 2."""
    bits = [1]
    for node in range(1, num_nodes):
        bits.append(bits[(node - 1) // 2] | 1 << node)
    return torch.tensor([[b - (1 << 64) if b >> 63 else b for b in bits]], dtype=torch.int64, device="cuda")


def note(benchmark, name: str, num_bytes: int, seconds: float, bandwidth: float) -> None:
    share = num_bytes / seconds / bandwidth
    benchmark.extra_info.update(
        bytes=num_bytes,
        microseconds=seconds * 1e6,
        gb_per_s=num_bytes / seconds / 1e9,
        copy_gb_per_s=bandwidth / 1e9,
        share=share,
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
    )
    print(
        f"\n{name}: {seconds * 1e6:.1f} µs, {num_bytes / 1e6:.2f} MB, {num_bytes / seconds / 1e9:,.0f} GB/s = "
        f"{share:.0%} of copies at {bandwidth / 1e9:,.0f} GB/s"
    )


@pytest.mark.parametrize("length", [1 << 10, 1 << 12, 1 << 15, 1 << 17], ids=lambda n: f"{n >> 10}k")
def test_decode_attention(benchmark, bandwidth, length):
    pools = KernelPools(length)
    q = torch.randn(1, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    queries = DecodeBatch(pools.table, pools.rows, pools.lens, pools.lens, pools.lens, length)
    calls = [lambda i=i: decode_attention_triton(q, pools.kv(i), queries) for i in range(pools.count)]
    seconds = benchmark.pedantic(seconds_per_call, args=(calls,), rounds=1)
    num_bytes = decode_attention_bytes([length], HEADS, KV_HEADS, HEAD_DIM, ITEM, ITEM)
    note(benchmark, f"decode attention, {length} tokens", num_bytes, seconds, bandwidth)


@pytest.mark.parametrize("num_nodes", [1, 8, 16, 64])
@pytest.mark.parametrize("length", [1 << 10, 1 << 12, 1 << 15, 1 << 17], ids=lambda n: f"{n >> 10}k")
def test_verify_attention(benchmark, bandwidth, length, num_nodes):
    pools = KernelPools(length)
    q = torch.randn(num_nodes, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    k, v = torch.randn(2, num_nodes, KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    nodes = VerifyBatch(pools.table, pools.rows, pools.lens, length, tree_bits(num_nodes))
    calls = [lambda i=i: verify_attention_triton(q, k, v, pools.kv(i), nodes) for i in range(pools.count)]
    seconds = benchmark.pedantic(seconds_per_call, args=(calls,), rounds=1)
    num_bytes = verify_attention_bytes([length], num_nodes, HEADS, KV_HEADS, HEAD_DIM, ITEM, ITEM)
    note(benchmark, f"verify attention, {num_nodes} nodes, {length} tokens", num_bytes, seconds, bandwidth)


@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_add_rms_norm(benchmark, bandwidth, num_tokens):
    count = min(MAX_POOLS, max(2, BEYOND_CACHES // (4 * num_tokens * HIDDEN * ITEM)))
    x, residual = torch.randn(2, count, num_tokens, HIDDEN, device="cuda", dtype=DTYPE)
    weight = torch.rand(HIDDEN, device="cuda", dtype=DTYPE)
    calls = [lambda i=i: add_rms_norm_triton(x[i], residual[i], weight, 1e-5) for i in range(count)]
    seconds = benchmark.pedantic(seconds_per_call, args=(calls,), rounds=1)
    num_bytes = rms_norm_bytes(num_tokens, HIDDEN, ITEM, residual=True)
    note(benchmark, f"RMSNorm with residual, {num_tokens} tokens", num_bytes, seconds, bandwidth)


@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
def test_rope_write(benchmark, bandwidth, num_tokens):
    pools = KernelPools(max(num_tokens, 1 << 12))
    heads = HEADS + 2 * KV_HEADS
    qkv = torch.randn(pools.count, num_tokens, heads, HEAD_DIM, device="cuda", dtype=DTYPE)
    table = torch.rand(num_tokens, HEAD_DIM, device="cuda")
    positions = torch.arange(num_tokens, device="cuda")
    slots = pools.table[1, :num_tokens].long()

    def call(i: int) -> object:
        q, k, v = qkv[i].split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        return rope_write_triton(q, k, v, table, positions, slots, pools.kv(i))

    calls = [lambda i=i: call(i) for i in range(pools.count)]
    seconds = benchmark.pedantic(seconds_per_call, args=(calls,), rounds=1)
    num_bytes = rope_write_bytes(num_tokens, HEADS, KV_HEADS, HEAD_DIM, ITEM)
    note(benchmark, f"rotation with KV write, {num_tokens} tokens", num_bytes, seconds, bandwidth)
