"""Norms, gates and rotations of the kernels, against the operations of torch."""

from __future__ import annotations

import pytest
import torch
from foredraft.gpu.batch.pools import KVPool
from foredraft.gpu.models.rope import unrotated_table
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest.batches import decode_view, make_batch, rotary_table
from foredraft.gpu.types.attention import KVShape
from foredraft.gpu.types.ops import KVTensors
from forward_cases import BOTH, DTYPES, KERNELS, NAME, close, rotate_one, strided
from memory_checker import checked_memory


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 16), (5, 48), (3, 1500), (0, 16), (70, 17)])
def test_rms_norm(dtype: torch.dtype, n: int, width: int):
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((n, width), (n, width), (width,)))
    with checked_memory(read_only=[x, residual, weight], shuffle=1) as seen:
        normed = TritonOps().rms_norm(x, weight, 1e-5)
        added, total = TritonOps().add_rms_norm(x, residual, weight, 1e-5)
    assert seen.launches == (2 if n else 0)
    close(normed, TorchOps().rms_norm(x.double(), weight.double(), 1e-5))
    assert torch.equal(total, x + residual)
    close(added, TorchOps().rms_norm(total.double(), weight.double(), 1e-5))


def test_rms_norm_of_heads_inside_a_projection():
    x, weight = strided(torch.randn(5, 3, 16)), torch.randn(16)
    with checked_memory(read_only=[x, weight]):
        actual = TritonOps().rms_norm(x, weight, 1e-6)
    assert actual.is_contiguous()
    close(actual, TorchOps().rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 7), (4, 1030), (0, 8)])
def test_silu_mul(dtype: torch.dtype, n: int, width: int):
    x = torch.randn(n, 2 * width, dtype=dtype)
    with checked_memory(read_only=[x], shuffle=1):
        actual = TritonOps().silu_mul(x)
    close(actual, TorchOps().silu_mul(x.double()))


def test_gelu_mul():
    x = torch.randn(4, 2 * 1030, dtype=torch.float32)
    with checked_memory(read_only=[x]):
        close(TritonOps().gelu_mul(x), TorchOps().gelu_mul(x.double()))


def test_gradients_pass_through_the_norms_and_the_gate():
    x, weight = torch.randn(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    normed, total = TritonOps().add_rms_norm(TritonOps().rms_norm(x, weight, 1e-5), x, weight, 1e-5)
    (normed.sum() + TritonOps().silu_mul(total).sum()).backward()
    assert x.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "dtype"),
    [
        (1, 1, 16, torch.float32),
        (4, 2, 24, torch.float16),
        (8, 1, 16, torch.float32),
        (6, 2, 24, torch.float16),
        (5, 4, 16, torch.float16),
    ],
)
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_rope_write(ops: TorchOps, dtype: torch.dtype, heads: int, kv_heads: int, d: int):
    batch = make_batch(1, [0], [6], heads=heads, kv_heads=kv_heads, d=d, dtype=dtype)
    table, positions = rotary_table(d), torch.tensor([0, 3, 3, 200, 511, 1])
    slots = torch.tensor([5, 2, 9, 0, 4, 0])
    q, k, v = strided(batch.q), strided(batch.k), strided(batch.v)
    k_pools, v_pools = (torch.stack((pool, pool)) for pool in (batch.k_pool, batch.v_pool))
    with checked_memory(
        read_only=[q, k, v, table, positions, slots], sinks=[k_pools[:, 0], v_pools[:, 0]], shuffle=3
    ) as seen:
        q_out, k_out, v_out = ops.rope_write(q, k, v, table, positions, slots, KVTensors(k_pools[1], v_pools[1]))
    assert seen.launches == (ops is KERNELS)
    for i, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        close(q_out[i], rotate_one(batch.q[i], table, position))
        close(k_out[i], rotate_one(batch.k[i], table, position))
        if slot:
            assert torch.equal(k_pools[1, slot], k_out[i]) and torch.equal(v_pools[1, slot], batch.v[i])
    assert v_out is v
    others = [slot for slot in range(k_pools.shape[1]) if slot not in slots]
    assert torch.equal(k_pools[1, others], batch.k_pool[others]) and torch.equal(k_pools[0], batch.k_pool)
    assert torch.equal(v_pools[1, others], batch.v_pool[others]) and torch.equal(v_pools[0], batch.v_pool)


@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_cells_of_a_wider_row_and_one_rotation_for_all_positions(ops: TorchOps):
    """A pool whose layers keep different shapes of a token, and a layer that rotates nothing."""
    batch = make_batch(1, [9, 5], [1, 1], heads=4, kv_heads=2, d=16, dtype=torch.float32)
    mixed = KVPool((KVShape(2, 16, 16), KVShape(1, 48, 40)), batch.k_pool.shape[0], torch.float32, torch.device("cpu"))
    cells = mixed.layers[0]
    assert cells.keys.stride() == (48, 16, 1) and cells.values.stride() == (40, 16, 1)
    cells.keys.copy_(batch.k_pool), cells.values.copy_(batch.v_pool)
    table, positions, slots = unrotated_table(16, 512), torch.tensor([400, 3]), torch.tensor([0, 0])
    assert table.stride(0) == 0
    with checked_memory(read_only=[batch.q, batch.k, batch.v, table], sinks=[cells.keys[0], cells.values[0]]) as seen:
        q, k, _ = ops.rope_write(batch.q, batch.k, batch.v, table, positions, slots, cells)
    assert seen.launches == (ops is KERNELS)
    assert torch.equal(q, batch.q) and torch.equal(k, batch.k)
    view = decode_view(batch, [9, 5])
    assert torch.equal(ops.decode_attention(q, cells, view), ops.decode_attention(q, batch.kv, view))
    assert not mixed.keys[1].any() and not mixed.values[1].any()
