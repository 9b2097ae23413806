"""Changes of acceptance over an output and over a day."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..draws import Purpose, uniform
from ..errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Regimes:
    """Acceptance that changes its level for stretches of a request's output (prose, then code, then a table).

    Every `stretch_len` output positions one of `shifts` (standard deviations of quality) is drawn with `weights`.
    """

    stretch_len: int
    shifts: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        problems = []
        if self.stretch_len < 1:
            problems.append(Problem("regimes.stretch_len", f"{self.stretch_len}: expected at least 1"))
        if not self.shifts or len(self.shifts) != len(self.weights):
            problems.append(
                Problem(
                    "regimes.weights", f"{len(self.weights)} weights for {len(self.shifts)} shifts: expected one each"
                )
            )
        if not np.isfinite(np.array(self.shifts + self.weights, float)).all():
            problems.append(Problem("regimes", "not a finite number"))
        elif self.weights and (min(self.weights) < 0 or sum(self.weights) <= 0):
            problems.append(Problem("regimes.weights", f"{self.weights}: expected none negative and one positive"))
        if problems:
            raise ConfigError("<acceptance>", problems)

    def shift_at(self, seed: int, request_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the shifts, float64 [broadcast of keys and positions]."""
        coins = uniform(seed, Purpose.ACCEPTANCE_REGIME, request_keys, positions // self.stretch_len)
        edges = np.cumsum(self.weights) / sum(self.weights)
        return np.array(self.shifts)[np.minimum(np.searchsorted(edges, coins, side="right"), len(self.shifts) - 1)]


@dataclass(frozen=True, slots=True)
class DayCurve:
    """Acceptance over a day: a sinusoid that the simulator turns into `shifts`, one per request, at its arrival."""

    amplitude: float
    best_hour: float = 3.0

    def shift(self, time_ns: int) -> float:
        """Return the standard deviations of quality for a request that arrives `time_ns` after midnight."""
        hours = time_ns / 3.6e12
        return self.amplitude * float(np.cos((hours - self.best_hour) * 2 * np.pi / 24))
