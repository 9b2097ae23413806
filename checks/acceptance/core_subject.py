"""Our processes, `core.acceptance`, behind the contract of simulated acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.acceptance.presets import TraceAcceptance
from ...core.acceptance.process import (
    AcceptanceProcess,
    DayCurve,
    FixedMeanAcceptance,
    GaussianAcceptance,
    Regimes,
    walk_to_end,
)
from .contract import SHIFTS, WEIGHTS, ProcessCapabilities, ProcessConfig

HOUR_NS = 3_600_000_000_000


class CoreProcess:
    """One process of `core.acceptance`."""

    capabilities = ProcessCapabilities.all()

    def __init__(self, config: ProcessConfig) -> None:
        self.process = self.build(config)

    def build(self, config: ProcessConfig) -> AcceptanceProcess:
        if config.kind == "fixed":
            return FixedMeanAcceptance(config.mean + 1, config.seed)
        if config.kind == "recorded":
            return self.replay(config.recorded, config.seed)
        regimes = Regimes(config.stretch_len, SHIFTS, WEIGHTS) if config.stretch_len else None
        return GaussianAcceptance(
            config.conditional,
            config.seed,
            config.request_share,
            config.field_share,
            config.correlation_len,
            config.drift,
            regimes,
            config.max_depth,
        )

    def replay(self, recorded: Sequence[Sequence[int]], seed: int) -> AcceptanceProcess:
        return TraceAcceptance.of_runs({f"recording {number}": runs for number, runs in enumerate(recorded)}, seed)

    def longest_run(self, requests: np.ndarray, positions: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        return self.process.longest_run(requests, positions, shifts)

    def windows(self, requests: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
        return self.process.run_windows(requests, starts, width)

    def accept_lens(self, requests: np.ndarray, starts: np.ndarray, steps: int, rounds: int) -> np.ndarray:
        return self.process.accept_lens(requests, starts, steps, rounds)

    def to_end(self, requests: np.ndarray, lengths: np.ndarray, steps: int, width: int) -> np.ndarray:
        return walk_to_end(self.windows(requests, np.zeros(len(requests), np.int64), width), steps, lengths)

    def tree_survival(self, topk: int, steps: int, num_nodes: int, rank_ratio: float) -> np.ndarray:
        return np.array(self.process.for_tree(topk, steps, num_nodes, rank_ratio).survival)

    def day_shift(self, amplitude: float, best_hour: float, hour: float) -> float:
        return DayCurve(amplitude, best_hour).shift(int(hour * HOUR_NS))


make = CoreProcess
