"""The torch twins that move KV, compact outputs and relay values, against the NumPy specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foretoken.core.kv.moves import KVMovePlan, apply_moves, draft_branch_layout
from foretoken.core.tree.outputs import compaction_index
from foretoken.core.tree.verify import verify_greedy
from foretoken.gpu.ops.port import KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps
from foretoken.gpu.selftest.trees import random_targets, random_tree

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bs", [0, 1, 5])
@pytest.mark.parametrize("kind", ["chain", "beam", "lookup"])
def test_accepted_paths_are_moved_as_specified(kind, bs, dtype):
    rng = np.random.default_rng(5)
    num_moves = 0
    for _ in range(25):
        tree = random_tree(rng, bs, kind)
        verified = verify_greedy(tree, random_targets(rng, tree))
        nodes = tree.num_draft_tokens
        slots = bs * nodes + 3
        windows = (rng.permutation(slots - 1)[: bs * nodes] + 1).reshape(bs, nodes)
        plan = KVMovePlan.from_accept_index(verified.accept_index, verified.accept_lens, windows)
        k, v = pools(rng, slots, dtype)
        old_k, old_v = k.clone(), v.clone()
        accepted = torch.from_numpy(verified.accept_index), torch.from_numpy(verified.accept_lens)
        OPS.move_accepted_(KVTensors(k, v), torch.from_numpy(windows), *accepted)
        assert_moved(old_k, k, plan)
        assert_moved(old_v, v, plan)
        num_moves += len(plan.src)
        values = torch.from_numpy(rng.random((bs * nodes, 3))).to(dtype)
        compacted = OPS.compact(values, accepted[0], nodes)
        assert torch.equal(compacted, values[torch.from_numpy(compaction_index(verified.accept_index, nodes))])
        assert compacted.data_ptr() != values.data_ptr() or not values.numel()
    assert (num_moves > 0) == (kind != "chain" and bs > 0)


def test_padding_rows_move_only_the_sink():
    k, v = pools(np.random.default_rng(0), 6)
    before = k.clone()
    windows = torch.tensor([[0, 0, 0], [3, 4, 5]])
    accept_index = torch.tensor([[0, 2, -1], [3, 5, -1]], dtype=torch.int32)
    OPS.move_accepted_(KVTensors(k, v), windows, accept_index, torch.tensor([2, 2], dtype=torch.int32))
    expected = before.clone()
    expected[:, 4] = before[:, 5]
    assert torch.equal(k[:, 1:], expected[:, 1:])


def test_compaction_keeps_any_trailing_shape_and_dtype():
    accept_index = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    for values in (torch.arange(6), torch.arange(24, dtype=torch.int16).view(6, 2, 2), torch.rand(6, 1) < 0.5):
        assert torch.equal(OPS.compact(values, accept_index, 3), values[torch.tensor([0, 2, 2, 3, 4, 5])])


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
