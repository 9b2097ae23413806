"""The torch twins of verification at an exhausted residual, and of coins. The acceptance contract covers the rest."""

from __future__ import annotations

import numpy as np
import torch
from foretoken.core.draws import Purpose, uniform
from foretoken.core.tree import build as spec_build
from foretoken.core.tree import verify as spec
from foretoken.gpu.batch.tree import DeviceVerified
from foretoken.gpu.kernels.rounds.coins import hashed_coins
from foretoken.gpu.ops.torch_ops import TorchOps
from foretoken.gpu.selftest.trees import VOCAB, on_device

OPS = TorchOps()


def assert_same_verdict(found: DeviceVerified, expected: spec.Verified):
    for ours, theirs, dtype in (
        (found.accept_index, expected.accept_index, torch.int32),
        (found.accept_lens, expected.accept_lens, torch.int32),
        (found.predict, expected.predict, torch.int64),
        (found.failed, expected.target_failed, torch.bool),
    ):
        assert ours.dtype == dtype
        assert ours.cpu().tolist() == theirs.tolist()


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
