"""The forward pass's Triton kernels on a GPU, at the shapes they are made for, against the torch twins in float64 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from foretoken.gpu.kernels.layers.decode_attention import decode_attention_triton
from foretoken.gpu.ops.port import DecodeBatch, KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps
from foretoken.gpu.session.devices import ops_for
from forward_cases import Batch, decode_view, make_batch, random_tree_bits, rotary_table
from torch import Tensor

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
LAYOUTS = [(32, 8, 128), (28, 4, 128), (16, 16, 64), (12, 2, 80)]


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def close(actual: Tensor, expected: Tensor) -> None:
    """`expected` was computed in float64 from the same rounded inputs."""
    limit = TOLERANCE[actual.dtype]
    assert actual.is_cuda
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=limit, atol=limit)


def wide(batch: Batch) -> Batch:
    return Batch(
        **{n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in vars(batch).items()}
    )


def to_gpu(view: DecodeBatch) -> DecodeBatch:
    return DecodeBatch(*(x.cuda() for x in (view.table, view.rows, view.bases, view.tails, view.lens)), view.max_len)


def verify(ops, batch: Batch, bits: Tensor, max_prefix_len: int | None = None) -> Tensor:
    return ops.verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits, max_prefix_len))


def extend(ops, batch: Batch) -> Tensor:
    return ops.extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lens", [[1], [4097], [700, 0, 33, 2048]])
def test_decode(dtype: torch.dtype, layout: tuple[int, int, int], lens: list[int]):
    heads, kv_heads, d = layout
    batch = make_batch(1, lens, [1] * len(lens), heads=heads, kv_heads=kv_heads, d=d, page=16, dtype=dtype)
    view, exact = decode_view(batch, lens), wide(batch)
    expected = TorchOps().decode_attention(exact.q, exact.kv, view)
    there = batch.to("cuda")
    for splits in (None, 1, 128):
        actual = decode_attention_triton(there.q, *there.kv, to_gpu(view), num_splits=splits)
        close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("prefix_lens", "nd"), [([3000], 4), ([900, 0, 64, 17], 16), ([2000, 5], 64), ([40] * 40, 8)])
def test_verify(dtype: torch.dtype, layout: tuple[int, int, int], prefix_lens: list[int], nd: int):
    heads, kv_heads, d = layout
    bs = len(prefix_lens)
    batch = make_batch(2, prefix_lens, [nd] * bs, heads=heads, kv_heads=kv_heads, d=d, page=16, dtype=dtype)
    bits = random_tree_bits(nd, bs, nd, padding=True)
    close(verify(ops_for("cuda"), batch.to("cuda"), bits.cuda()), verify(TorchOps(), wide(batch), bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"), [([0], [513]), ([1000], [3]), ([300, 0, 77, 12], [64, 129, 0, 1])]
)
def test_extend(dtype: torch.dtype, layout: tuple[int, int, int], prefix_lens: list[int], new_lens: list[int]):
    heads, kv_heads, d = layout
    batch = make_batch(3, prefix_lens, new_lens, heads=heads, kv_heads=kv_heads, d=d, page=16, dtype=dtype)
    close(extend(ops_for("cuda"), batch.to("cuda")), extend(TorchOps(), wide(batch)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_write(dtype: torch.dtype, layout: tuple[int, int, int]):
    heads, kv_heads, d = layout
    batch = make_batch(4, [0], [33], heads=heads, kv_heads=kv_heads, d=d, dtype=dtype)
    table, positions = rotary_table(d), torch.arange(33) * 15
    slots = torch.randperm(batch.k_pool.shape[0] - 1)[:33] + 1
    exact, there = wide(batch), batch.to("cuda")
    expected = TorchOps().rope_write(exact.q, exact.k, exact.v, table, positions, slots, exact.kv)
    actual = ops_for("cuda").rope_write(
        there.q, there.k, there.v, table.cuda(), positions.cuda(), slots.cuda(), there.kv
    )
    for mine, right in zip((*actual, there.k_pool, there.v_pool), (*expected, exact.k_pool, exact.v_pool), strict=True):
        close(mine, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 4096), (70, 1536), (513, 128)])
def test_norms_and_gate(dtype: torch.dtype, n: int, width: int):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((n, width), (n, width), (width,)))
    ops, exact = ops_for("cuda"), TorchOps()
    close(ops.rms_norm(x.cuda(), weight.cuda(), 1e-5), exact.rms_norm(x.double(), weight.double(), 1e-5))
    normed, total = ops.add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-5)
    assert torch.equal(total.cpu(), x + residual)
    close(normed, exact.rms_norm((x + residual).double(), weight.double(), 1e-5))
    close(ops.silu_mul(x.cuda()), exact.silu_mul(x.double()))


def test_a_captured_graph_follows_the_lengths_on_the_device():
    """Captured for one batch and replayed for another: the grid and the split depend on the host's bounds alone."""
    ops, nd = ops_for("cuda"), 8
    batch = make_batch(5, [900, 400], [nd, nd], heads=32, kv_heads=8, d=128, page=16, dtype=torch.bfloat16)
    bits, there = random_tree_bits(5, 2, nd), batch.to("cuda")
    bits_there = bits.cuda()
    verify(ops, there, bits_there, 900)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = verify(ops, there, bits_there, 900)
    for lens in ([900, 400], [1, 0], [257, 399]):
        there.prefix_lens.copy_(torch.tensor(lens))
        batch.prefix_lens = torch.tensor(lens)
        graph.replay()
        torch.cuda.synchronize()
        close(out, verify(TorchOps(), wide(batch), bits))


def test_pools_beyond_two_to_the_31_elements():
    """The last slots of a pool of 4.3 GB and more than 2³¹ elements: their addresses need 64 bits."""
    num_slots, heads, d = (1 << 31) // (8 * 128) + 64, 8, 128
    try:
        k_pool = torch.zeros(num_slots, heads, d, dtype=torch.bfloat16, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 4.3 GB of GPU memory")
    batch = make_batch(6, [30], [1], heads=32, kv_heads=8, d=128, page=16, dtype=torch.bfloat16)
    last = num_slots - batch.k_pool.shape[0]
    k_pool[last:] = batch.k_pool.cuda()
    there, view, exact = batch.to("cuda"), decode_view(batch, [30]), wide(batch)
    expected = TorchOps().decode_attention(exact.q, KVTensors(exact.k_pool, exact.k_pool), view)
    moved = replace(to_gpu(view), table=there.table + last)
    actual = ops_for("cuda").decode_attention(there.q, KVTensors(k_pool, k_pool), moved)
    close(actual, expected)
