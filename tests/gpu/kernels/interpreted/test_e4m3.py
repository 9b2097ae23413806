"""Pools of 8-bit numbers: what is written to them, and attention over them, against float64 over the values that the
numbers stand for, every memory access checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from foredraft.gpu.kernels.layers.decode_attention import decode_attention_triton
from foredraft.gpu.kernels.layers.flash import INTERPRETED, KeyCut, assumed_traits
from foredraft.gpu.kernels.layers.verify_attention import verify_attention_triton
from foredraft.gpu.ops.torch_ops import TorchOps
from foredraft.gpu.ops.triton_ops import TritonOps
from foredraft.gpu.selftest.batches import (
    PagedBatch,
    decode_view,
    make_batch,
    random_tree_bits,
    rotary_table,
    softmaxes,
)
from foredraft.gpu.types.attention import E4M3, PLAIN, UNSCALED, KVScales
from foredraft.gpu.types.ops import KVTensors
from forward_cases import dense_decode, dense_extend, dense_verify, rotate_one
from memory_checker import checked_memory
from torch import Tensor

BOTH = TWINS, KERNELS = TorchOps(), TritonOps()
NAME = lambda ops: type(ops).__name__  # noqa: E731
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3}
SCALES = KVScales(0.6, 1.7)
# Every finite number, by the format's definition: 2^(e − 7) · (1 + m / 8), and 2⁻⁶ · m / 8 for e = 0.
NUMBERS = torch.tensor([
    sign * (2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8)
    for sign in (1, -1) for e in range(16) for m in range(8) if (e, m) != (15, 7)
], dtype=torch.float64)  # fmt: skip


@pytest.fixture(autouse=True, params=[80, 90], ids=["by bits", "by instruction"])
def capability(request: pytest.FixtureRequest) -> Iterator[int]:
    """The capability of the GPU that kernels are made for, times ten."""
    token = assumed_traits.set(replace(INTERPRETED, capability=request.param))
    yield request.param
    assumed_traits.reset(token)


def close(actual: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


def kept_as_bytes(batch: PagedBatch, scales: KVScales) -> tuple[PagedBatch, PagedBatch]:
    """Return a batch with its keys and values in 8-bit numbers, and in float64 with what these stand for."""
    parts = {name: getattr(batch, name).to(E4M3) for name in ("k", "v", "k_pool", "v_pool")}
    values = {name: x.double() * (scales.key if name[0] == "k" else scales.value) for name, x in parts.items()}
    return replace(batch, **parts), replace(batch, q=batch.q.double(), **values)


@pytest.mark.fast("by bits-*", ci="*")
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_the_nearest_number_is_kept(ops: TorchOps | TritonOps):
    """Values between neighbours, ties, what is too great, too small, or no number; written without a rotation."""
    ordered = NUMBERS.unique()
    middles = (ordered[1:] + ordered[:-1]) / 2
    edges = torch.tensor([449.0, 464.0, 1e9, 1e30, 2.0**-10, 2.0**-11, 1e-30, 0.0], dtype=torch.float64)
    x = torch.cat((ordered, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), edges, -edges))
    x = torch.cat((x, x.new_zeros(-len(x) % 16), x.new_full((16,), torch.nan))).float().view(-1, 1, 16)
    n = len(x)
    kv = KVTensors(*(torch.zeros(n + 1, 1, 16).to(E4M3) for _ in range(2)))
    table, positions, slots = (
        torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), 1),
        torch.zeros(n).long(),
        1 + torch.arange(n),
    )
    with checked_memory(read_only=[x, table], sinks=[kv.keys[0], kv.values[0]], shuffle=1) as seen:
        q, k, v = ops.rope_write(x, x, x, table, positions, slots, kv)
    assert seen.launches == (ops is KERNELS)
    exact = x.double()
    nearest = (exact.unsqueeze(-1) - ordered).abs().min(-1)
    known = exact.isfinite() & (exact.abs() <= 448)
    for found in (k, v, kv.keys[1:], kv.values[1:]):
        assert found.dtype is E4M3
        value = found.double()
        assert torch.equal((value - exact).abs()[known], nearest.values[known])
        assert (value[exact.abs() > 448] == 448 * exact[exact.abs() > 448].sign()).all()
        assert value[exact.isnan()].isnan().all()
        # Of two numbers that are as near the one with an even mantissa is kept.
        tie = (exact.unsqueeze(-1) - ordered).abs().eq(nearest.values.unsqueeze(-1)).sum(-1) == 2
        assert not (found.view(torch.uint8)[tie & known] & 1).any() and tie.any()
    assert torch.equal(q.nan_to_num(), x.nan_to_num())
    assert not x.isinf().any()
    _, _, v = ops.rope_write(
        x, x, x.new_tensor([torch.inf, -torch.inf] * 8).expand(x.shape), table, positions, slots, kv
    )
    assert (v.double() == torch.tensor([448.0, -448.0] * 8)).all(), "infinity saturates, too"


@pytest.mark.fast("by bits-*-dtype0", ci="*")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_rotated_keys_are_divided_by_their_scale(ops: TorchOps | TritonOps, dtype: torch.dtype):
    batch = make_batch(1, [0], [6], heads=6, kv_heads=2, d=24, dtype=dtype)
    table, positions = rotary_table(24), torch.tensor([0, 3, 3, 200, 511, 1])
    slots = torch.tensor([5, 2, 9, 0, 4, 0])
    kv = KVTensors(*(torch.zeros(*pool.shape).to(E4M3) for pool in batch.kv))
    sinks = [kv.keys[0], kv.values[0]]
    with checked_memory(read_only=[batch.q, batch.k, batch.v, table], sinks=sinks, shuffle=3):
        q, k, v = ops.rope_write(batch.q, batch.k, batch.v, table, positions, slots, kv, SCALES)
    for i, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        close(q[i], rotate_one(batch.q[i], table, position).double())
        for found, exact, scale in (
            (k, rotate_one(batch.k[i], table, position), SCALES.key),
            (v, batch.v[i], SCALES.value),
        ):
            exact = exact.double().clamp(-448 * scale, 448 * scale)
            # Half of the last digit of 4, beside what is rounded before.
            limit = exact.abs() / 16 * (1 + 16 * TOLERANCE[dtype]) + 2.0**-10 * scale
            assert ((found[i].double() * scale - exact).abs() <= limit).all()
        if slot:
            assert torch.equal(kv.keys[slot].double(), k[i].double())
            assert torch.equal(kv.values[slot].double(), v[i].double())
    assert not kv.keys[[1, 3, 6, 7, 8]].double().any()


@pytest.mark.parametrize("ops", BOTH, ids=NAME)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_is_read_as_it_is(dtype: torch.dtype, ops: TorchOps | TritonOps):
    """A query that sees one key has its value."""
    batch = make_batch(1, [1] * 16, [1] * 16, heads=1, kv_heads=1, dtype=dtype)
    slots = batch.table[batch.rows, 0].long()
    batch, _ = kept_as_bytes(batch, UNSCALED)
    batch.v_pool[slots, 0] = torch.cat((NUMBERS, NUMBERS[:2])).view(16, 16).to(E4M3)
    found = ops.decode_attention(batch.q, batch.kv, decode_view(batch, [1] * 16))
    assert torch.equal(found.flatten()[:254].double(), NUMBERS)


@pytest.mark.fast("by bits-dtype0-*-0", "by instruction-dtype1-*-3", ci="*")
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_numbers_of_8_bits(dtype: torch.dtype, ops: TorchOps | TritonOps, number: int):
    softmax = PLAIN if not number else softmaxes(4, dtype)[number - 1]
    exact = PLAIN if not number else softmaxes(4)[number - 1]
    batch, values = kept_as_bytes(make_batch(9, [40, 2, 0], [7] * 3, dtype=dtype), SCALES)
    softmax = softmax.over(SCALES, batch.q)
    bits = random_tree_bits(1, 3, 7, padding=True)
    tokens = batch.q, batch.k, batch.v, batch.kv
    view = decode_view(batch, [41, 3, 0])
    with checked_memory(read_only=[batch.k, batch.v, *batch.kv], shuffle=2):
        verified = ops.verify_attention(*tokens, batch.tree(bits), softmax)
        extended = ops.extend_attention(*tokens, batch.chunks(), softmax)
        decoded = ops.decode_attention(batch.q[:3], batch.kv, view, softmax)
    seen = bits.flatten() != 0
    close(verified[seen], dense_verify(values, bits, exact)[seen])
    close(extended, dense_extend(values, exact))
    close(decoded, dense_decode(replace(values, q=values.q[:3]), view, exact))


@pytest.mark.fast("by instruction-dtype1", ci="*")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_are_joined_times_the_scale_of_values(dtype: torch.dtype):
    """In the attention's own launch, and of tall tiles, which 16 bits have, in a second one."""
    lens = [130, 65, 0]
    batch, values = kept_as_bytes(make_batch(3, lens, [9] * 3, dtype=dtype), SCALES)
    softmax, cut = PLAIN.over(SCALES, batch.q), KeyCut(16 if dtype is torch.float32 else 64, 4, 5)
    view, bits = decode_view(batch, lens), random_tree_bits(1, 3, 9)
    with checked_memory() as checker:
        decoded = decode_attention_triton(batch.q[:3], batch.kv, view, softmax, cut)
        verified = verify_attention_triton(batch.q, batch.k, batch.v, batch.kv, batch.tree(bits), softmax, cut)
    assert checker.launches == (2 if dtype is torch.float32 else 3)
    close(decoded, dense_decode(replace(values, q=values.q[:3]), view))
    close(verified, dense_verify(values, bits))


@pytest.mark.parametrize("capability", [8], indirect=True)  # where the instruction would be, the interpreter reads 480
@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_a_key_that_is_no_number_is_not_taken_for_one(ops: TorchOps | TritonOps):
    batch, _ = kept_as_bytes(make_batch(3, [5, 5], [2] * 2, dtype=torch.float32), UNSCALED)
    slot = batch.table[int(batch.rows[1]), 2]
    batch.k_pool.view(torch.uint8)[slot, :, 3] = 0xFF
    found = ops.decode_attention(batch.q[:2], batch.kv, decode_view(batch, [5, 5]))
    assert found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("ops", BOTH, ids=NAME)
def test_numbers_are_moved_by_their_bytes(ops: TorchOps | TritonOps):
    generator = torch.Generator().manual_seed(4)
    before = [torch.randint(0, 256, (2, 12, 2, 8), generator=generator, dtype=torch.uint8) for _ in range(2)]
    kv = KVTensors(*(x.clone().view(E4M3) for x in before))
    windows = torch.tensor([[1, 2, 3], [7, 5, 6]])
    index, lens = torch.tensor([[0, 2, -1], [3, 5, -1]], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    table = torch.tensor([[0, 0, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0]], dtype=torch.int32)
    with checked_memory(sinks=[pool[:, 0] for pool in kv]):
        ops.move_accepted_(kv, windows, index, lens)
        ops.move_slots_(kv, torch.tensor([4, 9]), torch.tensor([9, 4]))
        ops.duplicate_tails_(kv, table, torch.tensor([1]), torch.tensor([1]), 2, 2, 1)
    expected = [*range(12)]
    expected[2], expected[5] = 3, 6
    expected[4], expected[9] = 9, 4
    expected[10] = 8
    for found, was in zip(kv, before, strict=True):
        assert torch.equal(found.view(torch.uint8)[:, 1:], was[:, expected][:, 1:])
