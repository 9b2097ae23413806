"""The torch twins of tree building and verification against their NumPy specification, on random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bookkeeping_cases import (
    MAX_POSITION,
    VOCAB,
    flat_candidates,
    on_device,
    random_candidates,
    random_probs,
    random_targets,
    random_tree,
)
from foretoken.core.draws import Purpose, uniform
from foretoken.core.tree import build as spec_build
from foretoken.core.tree import verify as spec
from foretoken.core.tree.finalize import emitted_tokens, gather_last
from foretoken.gpu.batch.tree import DeviceTree, DeviceVerified
from foretoken.gpu.kernels.rounds.bookkeeping import TorchBookkeeping
from foretoken.gpu.kernels.rounds.coins import hashed_coins

OPS = TorchBookkeeping()
KINDS = ["chain", "beam", "lookup"]


def assert_same_tree(found: DeviceTree, expected: spec_build.VerifyTree):
    wanted = on_device(expected, found.tokens.device)
    for name in ("tokens", "parents", "positions", "depths", "next_token", "next_sibling", "ancestor_bits"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), f"{name}:\n{ours}\n{theirs}"
    assert found.width == wanted.width


def assert_same_verdict(found: DeviceVerified, expected: spec.Verified):
    for ours, theirs, dtype in (
        (found.accept_index, expected.accept_index, torch.int32),
        (found.accept_lens, expected.accept_lens, torch.int32),
        (found.predict, expected.predict, torch.int64),
        (found.failed, expected.target_failed, torch.bool),
    ):
        assert ours.dtype == dtype
        assert ours.cpu().tolist() == theirs.tolist()


@pytest.mark.parametrize("bs", [0, 1, 5])
@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(1, 3, 4), (2, 3, 7), (4, 4, 20), (3, 1, 3), (2, 2, 1), (16, 7, 64), (8, 5, 64)]
)
def test_a_tree_is_built_as_specified(bs, topk, steps, nodes):
    rng = np.random.default_rng(100 * topk + steps)
    for _ in range(4):
        levels = random_candidates(rng, bs, topk, steps)
        roots, lengths = rng.integers(0, VOCAB, bs), rng.integers(1, MAX_POSITION + 1, bs)
        expected = spec_build.build_tree(roots, levels, lengths, nodes, MAX_POSITION)
        candidates = flat_candidates(levels, bs)
        found = OPS.build_tree(torch.from_numpy(roots), *candidates, torch.from_numpy(lengths), nodes, MAX_POSITION)
        assert_same_tree(found, expected)


@pytest.mark.parametrize("bs", [0, 1, 5])
@pytest.mark.parametrize("steps", [0, 1, 3, 63])
def test_a_chain_is_built_as_specified(bs, steps):
    rng = np.random.default_rng(steps)
    roots, drafts = rng.integers(0, VOCAB, bs), rng.integers(-1, VOCAB, (bs, steps))
    lengths = rng.integers(1, MAX_POSITION + 1, bs)
    found = OPS.build_chain(*map(torch.from_numpy, (roots, drafts, lengths)), MAX_POSITION)
    assert_same_tree(found, spec_build.build_chain(roots, drafts, lengths, MAX_POSITION))


def as_tree(rng: np.random.Generator, bs: int, kind: str) -> tuple[spec_build.VerifyTree, DeviceTree]:
    """A specified tree and ours. Chains are half the time built by `build_chain`, which verification may tell from other trees."""
    tree = random_tree(rng, bs, kind)
    ours = on_device(tree)
    if kind == "chain" and rng.random() < 0.5:
        lengths = ours.positions[:, 0]
        ours = OPS.build_chain(ours.tokens[:, 0], ours.tokens[:, 1:], lengths, MAX_POSITION)
    return tree, ours


@pytest.mark.parametrize("bs", [0, 1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_verification_is_as_specified(kind, bs):
    rng = np.random.default_rng(7)
    lengths = set()
    for _ in range(60):
        tree, ours = as_tree(rng, bs, kind)
        targets = random_targets(rng, tree)
        found = OPS.verify_greedy(ours, torch.from_numpy(targets).long())
        expected = spec.verify_greedy(tree, targets)
        assert_same_verdict(found, expected)
        lengths.update(expected.accept_lens.tolist())
        emitted, bonus = OPS.gather_emitted(found.predict, found.accept_index, found.accept_lens)
        assert emitted.tolist() == emitted_tokens(expected.predict, expected.accept_index).tolist()
        assert bonus.tolist() == gather_last(emitted.numpy(), expected.accept_lens).tolist()
        assert emitted.dtype == bonus.dtype == torch.int64
    assert bs == 0 or len(lengths) >= 3


@pytest.mark.parametrize("bs", [0, 1, 6])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_verification_is_as_specified(kind, dtype, bs):
    rng = np.random.default_rng(11)
    lengths, failures = set(), 0
    for _ in range(60):
        tree, ours = as_tree(rng, bs, kind)
        probs = random_probs(rng, tree).astype(dtype)
        coins = spec.Coins(rng.random((bs, tree.width)), rng.random((bs, tree.width)))
        coins.accept[rng.random((bs, tree.width)) < 0.3] = 1.0 - 2.0**-53
        coins.bonus[rng.random((bs, tree.width)) < 0.3] = 1.0 - 2.0**-53
        found = OPS.verify_sampling(ours, *map(torch.from_numpy, (probs, coins.accept, coins.bonus)))
        expected = spec.verify_sampling(tree, probs, coins)
        assert_same_verdict(found, expected)
        lengths.update(expected.accept_lens.tolist())
        failures += int(expected.target_failed.sum())
    assert bs == 0 or (len(lengths) >= 3 and failures > 0)


def test_an_exhausted_residual_takes_the_last_possible_child():
    """The children hold all the mass, and rounding lets the coin miss their sum: no token of probability 0 may come out."""
    third = np.float64(1.0) / 3.0
    tokens, scores = np.array([[0, 1, 2]], np.int32), np.full((1, 3), 0.5, np.float32)
    for count in (1, 2, 3):
        levels = [spec_build.Candidates(tokens[:, :count], scores[:, :count], np.full((1, count), -1, np.int32))]
        tree = spec_build.build_tree(np.array([4]), levels, np.array([3]), count + 1)
        probs = np.zeros((count + 1, VOCAB))
        probs[:, :count] = third
        one = np.array([[1.0, 1.0]])  # no coin is 1; it stands for every coin that misses a sum by rounding
        expected = spec.verify_sampling(tree, probs, spec.Coins(one, one * 0.5))
        assert expected.accept_lens.tolist() == [2]
        ours = on_device(tree) if count > 1 else OPS.build_chain(*(torch.tensor(x) for x in ([4], [[0]], [3])), 40)
        found = OPS.verify_sampling(ours, *map(torch.from_numpy, (probs, one, one * 0.5)))
        assert_same_verdict(found, expected)


def test_coins_are_the_cores_bit_for_bit():
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 2**64, 7, dtype=np.uint64)
    keys[:2] = 0, 2**64 - 1
    positions = rng.integers(0, 2**40, (7, 5))
    for seed, purpose in ((0, Purpose.ACCEPT_COIN), (2**63 + 5, Purpose.BONUS_COIN), (-3, Purpose.SAMPLE)):
        for coins in (OPS.coins, hashed_coins):
            found = coins(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions), seed, purpose)
            assert found.dtype == torch.float64
            assert found.numpy().tobytes() == uniform(seed, purpose, keys[:, None], positions).tobytes()
    assert OPS.coins(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64), 1, 2).shape == (0, 4)
