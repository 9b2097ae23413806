"""The forward pass's torch operations against sums over one query at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from foretoken.gpu.ops.port import KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps
from foretoken.gpu.selftest.batches import decode_view, make_batch, random_tree_bits, rotary_table
from forward_cases import dense_decode, dense_extend, dense_verify, rotate_one

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
HEADS = [(1, 1), (4, 2), (8, 1), (3, 3)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype]
    )


def test_silu_mul_gates_the_second_half():
    x = torch.randn(5, 14, dtype=torch.float64)
    close(TorchOps().silu_mul(x), x[:, :7] / (1 + torch.exp(-x[:, :7])) * x[:, 7:])


def test_norms_and_gate_are_differentiable():
    ops = TorchOps()
    x, y, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (3, 8), (8,)))
    assert torch.autograd.gradcheck(lambda a, w: ops.rms_norm(a, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b, w: ops.add_rms_norm(a, b, w, 1e-5), (x, y, weight))
    assert torch.autograd.gradcheck(ops.silu_mul, (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_rope_write_rotates_pairs_and_writes_the_slots(dtype: torch.dtype, heads: int, kv_heads: int):
    batch = make_batch(1, [0], [6], heads=heads, kv_heads=kv_heads, dtype=dtype)
    table = rotary_table(16)
    positions, slots = torch.tensor([0, 3, 3, 200, 511, 1]), torch.tensor([5, 2, 9, 0, 4, 0])
    k_pool, v_pool = batch.k_pool.clone(), batch.v_pool.clone()
    q, k = TorchOps().rope_write(batch.q, batch.k, batch.v, table, positions, slots, KVTensors(k_pool, v_pool))
    for i, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        close(q[i], rotate_one(batch.q[i], table, position))
        close(k[i], rotate_one(batch.k[i], table, position))
        if slot:
            assert torch.equal(k_pool[slot], k[i]) and torch.equal(v_pool[slot], batch.v[i])
    others = [slot for slot in range(len(k_pool)) if slot not in slots]
    assert torch.equal(k_pool[others], batch.k_pool[others]) and torch.equal(v_pool[others], batch.v_pool[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("lens", [[1], [0], [7, 0, 4, 8], []])
def test_decode_reads_the_first_columns(dtype: torch.dtype, heads: int, kv_heads: int, lens: list[int]):
    batch = make_batch(2, lens, [1] * len(lens), heads=heads, kv_heads=kv_heads, dtype=dtype)
    view = decode_view(batch, lens)
    actual = TorchOps().decode_attention(batch.q, batch.kv, view)
    close(actual, dense_decode(batch, view))


def test_decode_follows_base_and_tail():
    batch = make_batch(3, [20, 20, 20, 0], [1] * 4)
    view = decode_view(batch, lens=[11, 8, 3, 0], bases=[8, 8, 0, 0], tails=[16, 12, 4, 0])
    assert view.bases is not view.lens
    actual = TorchOps().decode_attention(batch.q, batch.kv, view)
    close(actual, dense_decode(batch, view))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("prefix_lens", "nd"), [([5], 1), ([0], 3), ([9], 64), ([0, 8, 3], 1), ([4, 0, 13], 7), ([3, 2], 64), ([], 4)]
)
def test_verify_sees_the_prefix_and_its_ancestors(
    dtype: torch.dtype, heads: int, kv_heads: int, prefix_lens: list[int], nd: int
):
    bs = len(prefix_lens)
    batch = make_batch(4, prefix_lens, [nd] * bs, heads=heads, kv_heads=kv_heads, dtype=dtype)
    bits = random_tree_bits(nd, bs, nd, padding=True)
    actual = TorchOps().verify_attention(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits, batch.max_prefix_len))
    close(actual, dense_verify(batch, bits))
    if nd == 7:
        assert (bits == 0).any() and not actual[bits.flatten() == 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"),
    [([0], [9]), ([6], [5]), ([0, 0], [3, 8]), ([5, 0, 12, 3], [4, 7, 0, 1]), ([4], [0]), ([], [])],
)
def test_extend_is_causal_after_the_prefix(
    dtype: torch.dtype, heads: int, kv_heads: int, prefix_lens: list[int], new_lens: list[int]
):
    batch = make_batch(5, prefix_lens, new_lens, heads=heads, kv_heads=kv_heads, dtype=dtype)
    close(extend(TorchOps(), batch), dense_extend(batch))


def extend(ops: TorchOps, batch) -> torch.Tensor:
    return ops.extend_attention(
        batch.q, batch.k, batch.v, batch.kv, batch.chunks(batch.max_prefix_len, batch.max_new_len)
    )


def test_padding_tokens_and_loose_bounds_change_nothing():
    """A captured graph has more tokens than the batch, and bounds that hold for every batch."""
    batch = make_batch(6, [5, 2], [3, 4])
    expected = dense_extend(batch)
    batch.q, batch.k, batch.v = (torch.cat((x, torch.ones_like(x[:2]))) for x in (batch.q, batch.k, batch.v))
    actual = TorchOps().extend_attention(batch.q, batch.k, batch.v, batch.kv, batch.chunks(batch.table.shape[1], 9))
    close(actual[:7], expected)
    assert actual.isfinite().all()


@pytest.mark.parametrize("kind", ["decode", "verify", "extend"])
def test_what_is_kept_between_layers_follows_writes_to_the_index_tensors(kind: str):
    """Same tensors, new content: as when a batch is copied into buffers that stay."""
    ops = TorchOps()
    batch = make_batch(7, [6, 3], [2, 2])
    view = decode_view(batch, [4, 3, 4, 3])
    view = type(view)(batch.table, batch.rows.repeat(2), view.lens, view.tails, view.lens, 8)
    bits = random_tree_bits(0, 2, 2)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "decode":
            return ops.decode_attention(batch.q, batch.kv, view), dense_decode(batch, view)
        tokens = (batch.q, batch.k, batch.v, batch.kv)
        if kind == "verify":
            return ops.verify_attention(*tokens, batch.tree(bits, 8)), dense_verify(batch, bits)
        return ops.extend_attention(*tokens, batch.chunks(8, 4)), dense_extend(batch)

    before = run()
    close(*before)
    for change in (
        lambda: batch.table.copy_(batch.table.flip(1)),
        lambda: batch.prefix_lens.sub_(1),
        lambda: view.lens.sub_(1),
        lambda: bits.fill_(1),
    ):
        change()
        close(*run())
    assert not torch.equal(before[0], run()[0])


def test_the_rotation_kept_between_layers_follows_the_positions():
    ops, batch, table = TorchOps(), make_batch(7, [0], [2]), rotary_table(16)
    positions, slots = torch.tensor([4, 5]), torch.tensor([1, 2])
    for _ in range(2):
        q, _ = ops.rope_write(batch.q, batch.k, batch.v, table, positions, slots, batch.kv)
        for i in range(2):
            close(q[i], rotate_one(batch.q[i], table, int(positions[i])))
        positions += 7


def test_inference_tensors_have_no_versions_so_nothing_is_kept():
    ops, batch = TorchOps(), make_batch(8, [6, 3], [1, 1])
    with torch.inference_mode():
        view = decode_view(batch, [6, 3])
        view = type(view)(view.table, view.rows, view.lens, view.tails, view.lens, 6)
        for _ in range(2):
            actual = ops.decode_attention(batch.q, batch.kv, view)
            close(actual, dense_decode(batch, view))
            view.lens.sub_(1)


def test_float64_takes_no_detour():
    """A difference that float32 cannot hold must come through."""
    ops = TorchOps()
    for prefix, new in itertools.product([[0], [40]], [[1], [3]]):
        batch = make_batch(9, prefix, new)
        batch.v_pool[:], batch.v[:] = 1 + 2.0**-40, 1 + 2.0**-40
        assert (extend(ops, batch) - 1 - 2.0**-40).abs().max() < 1e-15
