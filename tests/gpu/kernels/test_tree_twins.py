"""The torch twins of coins against the core. The acceptance contract and the interpreted kernels cover the rest."""

from __future__ import annotations

import numpy as np
import torch
from foredraft.core.draws import Purpose, uniform
from foredraft.gpu.kernels.rounds.coins import hashed_coins
from foredraft.gpu.ops.torch_ops import TorchOps

OPS = TorchOps()


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
