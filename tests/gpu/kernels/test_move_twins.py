"""The torch twins that move KV, compact outputs and relay values, against the NumPy specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foretoken.core.kv.moves import KVMovePlan, apply_moves, draft_branch_layout
from foretoken.gpu.ops.port import KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps

OPS = TorchOps()
LAYERS, HEADS, CHANNELS = 2, 2, 4


def pools(rng: np.random.Generator, slots: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (LAYERS, slots, HEADS, CHANNELS)
    return tuple(torch.from_numpy(rng.random(shape)).to(dtype) for _ in range(2))


def assert_moved(before: torch.Tensor, after: torch.Tensor, plan: KVMovePlan):
    """All slots but the sink are as the specification leaves them, in every layer."""
    for layer in range(LAYERS):
        expected = before[layer].double().numpy().copy()
        apply_moves(expected, plan)
        assert np.array_equal(after[layer].double().numpy()[1:], expected[1:])


def test_slots_that_alias_are_all_read_first():
    rng = np.random.default_rng(1)
    k, v = pools(rng, 8)
    old_k, old_v = k.clone(), v.clone()
    sources, targets = np.array([1, 2, 3, 4, 0]), np.array([2, 3, 1, 6, 0])
    OPS.move_slots_(KVTensors(k, v), torch.from_numpy(sources), torch.from_numpy(targets))
    plan = KVMovePlan(sources.astype(np.int32), targets.astype(np.int32))
    assert_moved(old_k, k, plan)
    assert_moved(old_v, v, plan)


@pytest.mark.parametrize(
    ("page_size", "topk", "steps"), [(1, 4, 3), (4, 1, 3), (4, 3, 0), (4, 3, 5), (2, 2, 1), (16, 4, 6)]
)
@pytest.mark.parametrize("bs", [0, 1, 4])
def test_tails_are_duplicated_as_specified(bs, page_size, topk, steps):
    rng = np.random.default_rng(page_size)
    for _ in range(10):
        lengths = rng.integers(1, 30, bs)
        layout = draft_branch_layout(lengths, page_size, topk, steps)
        width = int((lengths // page_size * page_size + topk * layout.pages_per_branch * page_size).max(initial=1))
        rows = rng.permutation(bs + 2)[:bs] + 1
        slots = (bs + 3) * width
        table = np.arange(slots, dtype=np.int32).reshape(bs + 3, width)
        table[0] = 0
        plan = layout.tail_moves(table, rows)
        k, v = pools(rng, slots)
        old_k, old_v = k.clone(), v.clone()
        OPS.duplicate_tails_(KVTensors(k, v), *map(torch.from_numpy, (table, rows, lengths)), page_size, topk, steps)
        assert_moved(old_k, k, plan)
        assert_moved(old_v, v, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_relay_cells_come_back_and_row_0_stays_zero(dtype):
    buffer = torch.zeros(5, 3, dtype=dtype)
    values = torch.arange(1, 13).view(4, 3).to(torch.float32)
    OPS.relay_scatter_(buffer, torch.tensor([3, 0, 1, 0]), values)
    expected = torch.zeros(5, 3, dtype=dtype)
    expected[3], expected[1] = values[0].to(dtype), values[2].to(dtype)
    assert torch.equal(buffer, expected)
    found = OPS.relay_gather(buffer, torch.tensor([1, 0, 3]))
    assert torch.equal(found, expected[[1, 0, 3]])
    lengths = torch.zeros(4, dtype=torch.int64)
    OPS.relay_scatter_(lengths, torch.tensor([2]), torch.tensor([9]))
    assert lengths.tolist() == [0, 0, 9, 0]
    OPS.relay_scatter_(lengths, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert OPS.relay_gather(lengths, torch.zeros(0, dtype=torch.int64)).shape == (0,)
