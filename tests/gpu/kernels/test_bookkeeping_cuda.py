"""The Triton kernels on a GPU against their torch twins on the CPU, without a synchronisation, and inside a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bookkeeping_cases import (
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
from foretoken.gpu.ops.port import KVTensors
from foretoken.gpu.ops.torch_ops import TorchOps

pytestmark = pytest.mark.gpu

TWINS = TorchOps()


@pytest.fixture(scope="module")
def kernels():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from foretoken.gpu.ops.triton_ops import TritonOps

    return TritonOps()


def moved(value: Any, device: str) -> Any:
    """A tensor, or a dataclass or tuple of them, on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value):
        return type(value)(*(moved(getattr(value, f.name), device) for f in fields(value)))
    if isinstance(value, tuple):
        return tuple(moved(v, device) for v in value)
    return value


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def both(kernels, name: str, *arguments):
    """The kernel's result on the GPU, found equal to the twin's; compiled and its constants made first, as in a warm-up."""
    expected = getattr(TWINS, name)(*arguments)
    there = moved(arguments, "cuda")
    getattr(kernels, name)(*there)
    with no_synchronisation():
        found = getattr(kernels, name)(*there)
    assert_same(found, expected)
    return expected


@pytest.mark.parametrize("bs", [0, 1, 7])
@pytest.mark.parametrize(("topk", "steps", "nodes"), [(1, 3, 4), (4, 4, 20), (2, 2, 1), (16, 7, 64), (8, 5, 64)])
def test_trees(kernels, bs, topk, steps, nodes):
    rng = np.random.default_rng(topk)
    for _ in range(5):
        candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
        roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
        both(kernels, "build_tree", roots, *candidates, lengths, nodes, MAX_POSITION)
        drafts = torch.from_numpy(rng.integers(-1, VOCAB, (bs, steps)))
        both(kernels, "build_chain", roots, drafts, lengths, MAX_POSITION)


@pytest.mark.parametrize("bs", [0, 1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_verification(kernels, kind, bs):
    rng = np.random.default_rng(7)
    for _ in range(15):
        tree = random_tree(rng, bs, kind)
        ours, targets = on_device(tree), torch.from_numpy(random_targets(rng, tree)).long()
        verified = both(kernels, "verify_greedy", ours, targets)
        both(kernels, "gather_emitted", verified.predict, verified.accept_index, verified.accept_lens)
        values = torch.from_numpy(rng.random((tree.parents.size, 3))).to(torch.bfloat16)
        both(kernels, "compact", values, verified.accept_index, tree.num_draft_tokens)
        probs = torch.from_numpy(random_probs(rng, tree)).float()
        coins = [torch.from_numpy(rng.random((bs, tree.width))) for _ in range(2)]
        both(kernels, "verify_sampling", ours, probs, *coins)


@pytest.mark.parametrize("vocab", [32_000, 151_936])
def test_sampling_over_a_large_vocabulary(kernels, vocab):
    rng = np.random.default_rng(vocab)
    drafts = torch.from_numpy(rng.integers(0, vocab, (3, 4)))
    tree = TWINS.build_chain(drafts[:, 0], drafts, torch.full((3,), 9), MAX_POSITION)
    for peak in (0.0, 0.7):
        probs = torch.from_numpy(rng.random((15, vocab))) ** 40
        probs = (1 - peak) * probs / probs.sum(1, keepdim=True)
        probs.view(3, 5, vocab)[:, :4].scatter_add_(2, drafts.unsqueeze(2), torch.full((3, 4, 1), peak).double())
        coins = [torch.from_numpy(rng.random((3, 5))) for _ in range(2)]
        both(kernels, "verify_sampling", tree, probs.float(), *coins)


def test_coins(kernels):
    rng = np.random.default_rng(3)
    keys = torch.from_numpy(rng.integers(-(2**63), 2**63, 300))
    positions = torch.from_numpy(rng.integers(0, 2**40, (300, 5)))
    for seed, purpose in ((0, 1), (2**63 + 5, 2), (-3, 4)):
        both(kernels, "coins", keys, positions, seed, purpose)


def both_in_place(kernels, name: str, pools: list[torch.Tensor], *arguments):
    """Pools after the kernel equal to those after the twin, but for the sink; many times, since a race would not always show."""
    expected = [pool.clone() for pool in pools]
    getattr(TWINS, name)(KVTensors(*expected), *arguments)
    there = moved(arguments, "cuda")
    for _ in range(5):
        found = [pool.to("cuda") for pool in pools]
        getattr(kernels, name)(KVTensors(*found), *there)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu()[:, 1:], theirs[:, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_moves(kernels, dtype):
    rng = np.random.default_rng(5)
    for kind in KINDS * 4:
        bs = 6
        tree = random_tree(rng, bs, kind)
        nodes = tree.num_draft_tokens
        verified = TWINS.verify_greedy(on_device(tree), torch.from_numpy(random_targets(rng, tree)).long())
        windows = torch.from_numpy(rng.permutation(bs * nodes) + 1).view(bs, nodes)
        pools = [torch.from_numpy(rng.random((3, bs * nodes + 2, 8, 128))).to(dtype) for _ in range(2)]
        both_in_place(kernels, "move_accepted_", pools, windows, verified.accept_index, verified.accept_lens)
        targets = torch.from_numpy(rng.permutation(bs * nodes) + 1)
        both_in_place(kernels, "move_slots_", pools, targets.roll(1), targets)
    table = torch.arange(4 * 60, dtype=torch.int32).view(4, 60)
    pools = [torch.from_numpy(rng.random((1, 240, 2, 64))).to(dtype) for _ in range(2)]
    rows, lengths = torch.tensor([3, 1]), torch.tensor([14, 5])
    both_in_place(kernels, "duplicate_tails_", pools, table, rows, lengths, 8, 3, 4)


def test_relay_cells(kernels):
    rng = np.random.default_rng(0)
    buffer = torch.from_numpy(rng.random((9, 130))).to(torch.bfloat16)
    rows, values = torch.tensor([3, 0, 8, 0]), torch.from_numpy(rng.random((4, 130)))
    buffer[0] = 0
    both(kernels, "relay_gather", buffer, rows)
    found, expected = buffer.cuda(), buffer.clone()
    kernels.relay_scatter_(found, rows.cuda(), values.cuda())
    TWINS.relay_scatter_(expected, rows, values)
    assert torch.equal(found.cpu(), expected)


def test_a_round_in_a_graph(kernels):
    """Captured once, replayed on other inputs: build, verify, compact, move."""
    rng = np.random.default_rng(1)
    bs, topk, steps, nodes = 4, 3, 3, 8
    depths = flat_candidates(random_candidates(rng, bs, topk, steps), bs)[3]

    def inputs() -> list[torch.Tensor]:
        candidates = flat_candidates(random_candidates(rng, bs, topk, steps), bs)
        roots, lengths = (torch.from_numpy(rng.integers(1, MAX_POSITION, bs)) for _ in range(2))
        targets = torch.from_numpy(rng.integers(0, VOCAB, bs * nodes))
        windows = torch.from_numpy(rng.permutation(bs * nodes) + 1).view(bs, nodes)
        return [roots, *candidates[:3], lengths, targets, windows, torch.from_numpy(rng.random((bs * nodes, 16)))]

    def round_of(ops, roots, tokens, scores, parents, lengths, targets, windows, values, k, v):
        tree = ops.build_tree(roots, tokens, scores, parents, depths, lengths, nodes, MAX_POSITION)
        verified = ops.verify_greedy(tree, targets)
        ops.move_accepted_(KVTensors(k, v), windows, verified.accept_index, verified.accept_lens)
        emitted = ops.gather_emitted(verified.predict, verified.accept_index, verified.accept_lens)
        return tree, verified, *emitted, ops.compact(values, verified.accept_index, nodes)

    pools = [torch.from_numpy(rng.random((2, bs * nodes + 1, 2, 64))) for _ in range(2)]
    static = [x.cuda() for x in inputs()]
    there = [pool.cuda() for pool in pools]
    round_of(kernels, *static, *there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = round_of(kernels, *static, *there)
    for _ in range(3):
        fresh, here = inputs(), [pool.clone() for pool in pools]
        for old, new in zip([*static, *there], [*fresh, *pools], strict=True):
            old.copy_(new)
        graph.replay()
        assert_same(captured, round_of(TWINS, *fresh, *here))
        assert_same(tuple(there), tuple(here))
