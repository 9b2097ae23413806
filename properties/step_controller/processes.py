"""Stationary acceptance: for every round and row, how many drafts would be accepted at most; the same in every run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.draws import Purpose, hash64

DEPTH = 8

PERMILLE: dict[str, tuple[int, ...]] = {
    "useless": (0,),
    "poor": (150, 200),
    "chat": (605, 596, 647, 695, 729),
    "code": (608, 641, 692, 749, 769),
    "shallow": (950, 100),
    "excellent": (900,),
}
"""Conditional acceptance by position, in permille; the last one goes on."""

CONSTANT: dict[str, tuple[int, ...]] = {
    "always-0": (0,),
    "always-1": (1,),
    "always-2": (2,),
    "mixed-1-3": (1, 3, 1, 3, 1, 3, 1, 3),
    "always-all": (DEPTH,),
}
"""The same runs in every round, over the rows in turn."""

PROCESSES = (*PERMILLE, *CONSTANT)


@lru_cache(maxsize=64)
def longest_runs(process: str, batch_size: int, rounds: int, lift: int) -> np.ndarray:
    """Return int64 [rounds, batch_size]; `lift` more in every row, up to DEPTH."""
    if process in CONSTANT:
        row = np.resize(np.array(CONSTANT[process]), batch_size)
        runs = np.broadcast_to(row, (rounds, batch_size))
    else:
        given = PERMILLE[process]
        limits = np.array([given[min(j, len(given) - 1)] for j in range(DEPTH)], np.uint64)
        position = np.arange(rounds * DEPTH).reshape(rounds, 1, DEPTH)
        bits = hash64(2026, Purpose.SWARM, np.arange(batch_size)[None, :, None], position, lane=5)
        runs = np.cumprod((bits >> np.uint64(32)) % np.uint64(1000) < limits, axis=2).sum(axis=2)
    return np.minimum(runs + lift, DEPTH).astype(np.int64)


@lru_cache(maxsize=256)
def correct_drafts(process: str, batch_size: int, rounds: int, lift: int, steps: int) -> np.ndarray:
    """Return int64 [rounds, batch_size]: what rounds of `steps` steps accept."""
    return np.minimum(longest_runs(process, batch_size, rounds, lift), steps)
