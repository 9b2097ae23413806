"""The Triton kernels that build, verify, compact, move and relay, against their torch twins, with every memory access checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from foretoken.gpu.kernels.rounds import verify_sampling
from foretoken.gpu.ops.port import DeviceTree, KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps
from foretoken.gpu.ops.triton_ops import TritonOps
from foretoken.gpu.selftest.trees import (
    KINDS,
    MAX_POSITION,
    VOCAB,
    assert_same,
    flat_candidates,
    on_device,
    random_candidates,
    random_probs,
    random_targets,
    random_tree,
)
from memory_checker import Ownership, checked_memory

TWINS, KERNELS = TorchOps(), TritonOps()
TREE_COLUMNS = ("tokens", "parents", "positions", "depths", "next_token", "next_sibling", "ancestor_bits")


@contextlib.contextmanager
def inputs_only_read(*inputs: torch.Tensor, **more) -> Iterator[None]:
    with checked_memory(read_only=inputs, shuffle=1, **more) as seen:
        yield
    assert seen.launches > 0 and seen.accesses > 0


def columns(tree: DeviceTree) -> list[torch.Tensor]:
    return [getattr(tree, name) for name in TREE_COLUMNS]


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(1, 3, 4), (2, 3, 7), (4, 4, 20), (3, 1, 3), (2, 2, 1), (16, 7, 64)]
)
def test_trees_are_built_like_the_twins(topk, steps, nodes):
    rng = np.random.default_rng(topk)
    for bs in (1, 3):
        candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
        roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
        arguments = (roots, *candidates, lengths, nodes, MAX_POSITION)
        expected = TWINS.build_tree(*arguments)
        with inputs_only_read(roots, *candidates[:3], lengths):
            found = KERNELS.build_tree(*arguments)
        assert_same(found, expected)


@pytest.mark.parametrize("steps", [0, 1, 5, 63])
def test_chains_are_built_like_the_twins(steps):
    rng = np.random.default_rng(steps)
    roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, 3)) for _ in range(2))
    drafts = torch.from_numpy(rng.integers(-1, VOCAB, (3, steps)))
    with inputs_only_read(roots, drafts, lengths):
        found = KERNELS.build_chain(roots, drafts, lengths, MAX_POSITION)
    assert_same(found, TWINS.build_chain(roots, drafts, lengths, MAX_POSITION))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_verification_is_the_twins(kind):
    rng = np.random.default_rng(7)
    for bs in (1, 4) * 2:
        tree = random_tree(rng, bs, kind)
        ours, targets = on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()
        with inputs_only_read(targets, *columns(ours)):
            found = KERNELS.verify_greedy(ours, targets)
        assert_same(found, TWINS.verify_greedy(ours, targets))
        with inputs_only_read(found.predict, found.accept_index, found.accept_lens):
            emitted, bonus = KERNELS.gather_emitted(found.predict, found.accept_index, found.accept_lens)
        assert_same((emitted, bonus), TWINS.gather_emitted(found.predict, found.accept_index, found.accept_lens))


@pytest.mark.fast("beam-1024-*")
@pytest.mark.parametrize(
    ("kind", "chunk", "dtype"),
    [(kind, chunk, dtype) for chunk, dtype in ((1024, np.float32), (2, np.float64)) for kind in KINDS],
)
def test_sampling_verification_is_the_twins(kind, chunk, dtype, monkeypatch):
    """`chunk` 2 spreads five tokens over three parts."""
    monkeypatch.setattr(verify_sampling, "MIN_CHUNK", chunk)
    rng = np.random.default_rng(11)
    lengths, failures = set(), 0
    for bs in (1, 5) * (4 if kind == "chain" else 1):  # a chain seldom accepts a draft
        tree = random_tree(rng, bs, kind)
        ours, probs = on_device(tree), torch.from_numpy(random_probs(rng, tree).astype(dtype))
        accept, bonus = (torch.from_numpy(rng.random((bs, tree.width))) for _ in range(2))
        accept[torch.from_numpy(rng.random(accept.shape) < 0.1)] = 1.0 - 2.0**-53
        bonus[torch.from_numpy(rng.random(accept.shape) < 0.1)] = 1.0 - 2.0**-53
        with inputs_only_read(probs, accept, bonus, *columns(ours)):
            found = KERNELS.verify_sampling(ours, probs, accept, bonus)
        expected = TWINS.verify_sampling(ours, probs, accept, bonus)
        assert_same(found, expected)
        lengths.update(expected.accept_lens.tolist())
        failures += int(expected.failed.sum())
    assert len(lengths) >= 2 and failures > 0


@pytest.mark.parametrize("chunk", [1024, 2])
def test_an_exhausted_residual_takes_the_last_possible_child(chunk, monkeypatch):
    monkeypatch.setattr(verify_sampling, "MIN_CHUNK", chunk)
    tree = TWINS.build_tree(
        torch.tensor([4]),
        torch.tensor([[0, 1, 2]]),
        torch.full((1, 3), 0.5),
        torch.full((1, 3), -1, dtype=torch.int32),
        (1, 1, 1),
        torch.tensor([3]),
        4,
        MAX_POSITION,
    )
    probs = torch.zeros(4, VOCAB, dtype=torch.float64)
    probs[:, :3] = 1.0 / 3.0
    ones = torch.ones(1, 2, dtype=torch.float64)  # no coin is 1; it stands for every coin that misses a sum by rounding
    found = KERNELS.verify_sampling(tree, probs, ones, ones)
    assert found.accept_index.tolist() == [[0, 3]]
    assert_same(found, TWINS.verify_sampling(tree, probs, ones, ones))


def test_coins_are_the_twins_bit_for_bit():
    rng = np.random.default_rng(3)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63, 50))
    positions = torch.from_numpy(rng.integers(0, 2**40, (50, 5)))
    for seed, purpose in ((0, 1), (2**63 + 5, 2), (-3, 4)):
        with inputs_only_read(keys, positions):
            found = KERNELS.coins(keys, positions, seed, purpose)
        assert torch.equal(found, TWINS.coins(keys, positions, seed, purpose))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((), torch.int64), ((3,), torch.float16), ((2, 2), torch.bfloat16), ((5,), torch.bool), ((1200,), torch.float64)],
)
def test_compaction_is_the_twins(shape, dtype):
    rng = np.random.default_rng(2)
    for kind in KINDS:
        tree = random_tree(rng, 3, kind)
        accepted = TWINS.verify_greedy(on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()).accept_index
        values = torch.from_numpy(rng.integers(0, 100, (tree.parents.size, *shape))).to(dtype)
        with inputs_only_read(values, accepted):
            found = KERNELS.compact(values, accepted, tree.num_draft_tokens)
        assert found.dtype == dtype
        assert torch.equal(found, TWINS.compact(values, accepted, tree.num_draft_tokens))


def pools(rng: np.random.Generator, slots: int, dtype=torch.float16, width: int = 6) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.random((2, slots, 2, width))).to(dtype) for _ in range(2)]


def assert_same_pools(found: list[torch.Tensor], expected: list[torch.Tensor]):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[:, 1:], theirs[:, 1:])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 6), (torch.float32, 100), (torch.bfloat16, 8)])
def test_accepted_paths_are_moved_within_their_rows(dtype, width):
    rng = np.random.default_rng(5)
    moved = 0
    for kind in KINDS:
        tree = random_tree(rng, 4, kind)
        nodes = tree.num_draft_tokens
        verified = TWINS.verify_greedy(on_device(tree), torch.from_numpy(random_targets(rng, tree)).long())
        slots = 4 * nodes + 2
        windows = torch.from_numpy(rng.permutation(slots - 1)[: 4 * nodes] + 1).view(4, nodes)
        windows[3] = 0  # a padding row
        owners = torch.full((slots,), 99)
        owners[0] = 0
        for row in range(3):
            owners[windows[row]] = row + 1
        k, v = pools(rng, slots, dtype, width)
        before, expected = k.clone(), [k.clone(), v.clone()]
        arguments = windows, verified.accept_index, verified.accept_lens
        TWINS.move_accepted_(KVTensors(*expected), *arguments)
        rules = [Ownership(pool, owners.tolist(), lambda row, layer, block: row + 1, axis=1) for pool in (k, v)]
        with inputs_only_read(*arguments, sinks=(k[:, 0], v[:, 0]), ownership=rules):
            KERNELS.move_accepted_(KVTensors(k, v), *arguments)
        assert_same_pools([k, v], expected)
        moved += int((before != k).any())
    assert moved >= 1


def test_what_stands_where_it_belongs_is_not_moved():
    k, v = pools(np.random.default_rng(0), 8)
    windows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    accept_index, accept_lens = torch.tensor([[0, 1, 2], [3, 4, -1]]).int(), torch.tensor([3, 2]).int()
    with inputs_only_read(k, v):
        KERNELS.move_accepted_(KVTensors(k, v), windows, accept_index, accept_lens)


def test_slots_are_moved_across_rows_after_all_were_read():
    rng = np.random.default_rng(1)
    for _ in range(2):
        k, v = pools(rng, 12)
        targets = torch.from_numpy(rng.permutation(11)[:8] + 1)
        sources = torch.from_numpy(rng.integers(1, 12, 8))
        sources, targets = (torch.cat((x, torch.zeros(2, dtype=torch.int64))) for x in (sources, targets))
        expected = [k.clone(), v.clone()]
        TWINS.move_slots_(KVTensors(*expected), sources, targets)
        with inputs_only_read(sources, targets, sinks=(k[:, 0], v[:, 0])):
            KERNELS.move_slots_(KVTensors(k, v), sources, targets)
        assert_same_pools([k, v], expected)


@pytest.mark.parametrize(("page_size", "topk", "steps"), [(4, 3, 5), (2, 2, 1), (16, 4, 6)])
def test_tails_are_duplicated_like_the_twins(page_size, topk, steps):
    rng = np.random.default_rng(page_size)
    for bs in (1, 3):
        lengths = torch.from_numpy(rng.integers(1, 30, bs))
        pages = (lengths % page_size + steps + page_size - 1) // page_size
        width = int((lengths // page_size * page_size + topk * pages * page_size).max())
        rows = torch.from_numpy(rng.permutation(bs + 1) + 1)[:bs]
        table = torch.arange((bs + 3) * width, dtype=torch.int32).view(bs + 3, width)
        owners = (torch.arange(table.numel()) // width).tolist()
        k, v = pools(rng, table.numel())
        expected = [k.clone(), v.clone()]
        TWINS.duplicate_tails_(KVTensors(*expected), table, rows, lengths, page_size, topk, steps)
        numbers = rows.tolist()
        rules = [Ownership(pool, owners, lambda entry, layer, block, n=numbers: n[entry], axis=1) for pool in (k, v)]
        with inputs_only_read(table, rows, lengths, ownership=rules):
            KERNELS.duplicate_tails_(KVTensors(k, v), table, rows, lengths, page_size, topk, steps)
        assert_same_pools([k, v], expected)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.int64), ((3,), torch.float32), ((5,), torch.bfloat16), ((600,), torch.float64)]
)
def test_relay_cells_are_the_twins(shape, dtype):
    rng = np.random.default_rng(0)
    rows = torch.tensor([3, 0, 1, 0])
    values = torch.from_numpy(rng.random((4, *shape)) * 9 + 1).to(dtype)
    buffer = torch.zeros(5, *shape, dtype=dtype)
    expected = buffer.clone()
    TWINS.relay_scatter_(expected, rows, values)
    with inputs_only_read(rows, values, buffer[0]):  # row 0 is never written
        KERNELS.relay_scatter_(buffer, rows, values)
    assert torch.equal(buffer, expected)
    with inputs_only_read(rows, buffer):
        found = KERNELS.relay_gather(buffer, rows)
    assert torch.equal(found, expected[rows])


def test_an_idle_batch_launches_nothing():
    none, pairs = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int64)
    short, coins = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.float64)
    k, v = pools(np.random.default_rng(0), 3)
    table = torch.zeros(2, 4, dtype=torch.int32)
    with checked_memory() as seen:
        chain = KERNELS.build_chain(none, pairs[:, :1], none, MAX_POSITION)
        tree = KERNELS.build_tree(none, pairs, coins.float(), pairs.int(), (1, 1), none, 2, MAX_POSITION)
        assert_same(chain, TWINS.build_chain(none, pairs[:, :1], none, MAX_POSITION))
        assert_same(tree, chain)
        greedy = KERNELS.verify_greedy(chain, none)
        assert_same(greedy, TWINS.verify_greedy(chain, none))
        sampled = KERNELS.verify_sampling(chain, torch.zeros(0, VOCAB), coins, coins)
        assert_same(sampled, TWINS.verify_sampling(chain, torch.zeros(0, VOCAB), coins, coins))
        assert KERNELS.coins(none, pairs, 1, 1).shape == (0, 2)
        assert [x.shape for x in KERNELS.gather_emitted(none, pairs.int(), short)] == [(0, 2), (0,)]
        assert KERNELS.compact(torch.zeros(0, 3), pairs.int(), 2).shape == (0, 3)
        KERNELS.move_accepted_(KVTensors(k, v), pairs, pairs.int(), short)
        KERNELS.move_slots_(KVTensors(k, v), none, none)
        KERNELS.duplicate_tails_(KVTensors(k, v), table, none, none, 4, 2, 2)
        assert KERNELS.relay_gather(table, none).shape == (0, 4)
        KERNELS.relay_scatter_(table, none, table[:0])
    assert seen.launches == 0
