"""How far single points are from what their effects say, which differs by server, kind of layers and load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .hierarchy import Place

FREEDOM = 4.0
"""Degrees of freedom of Student's distribution, which the points are taken to have around their prediction."""
USUAL_CHANGE = 0.5
"""Deviation of the normal prior of every logarithm below."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The deviation of a new point around its prediction.

    `noise`: that of a point with known effects, at the usual load; `effects`: a factor on the deviation of effects;
    `changes`: logarithms of factors on the noise, by the name of a server or a kind of layers, and by slope.
    """

    noise: float
    effects: float
    changes: Mapping[str, float]

    def deviation(self, place: Place, slopes: Mapping[str, float], effects: float) -> float:
        """Return the deviation of a new point, whose effects have the deviation `effects`."""
        change = sum(self.changes.get(name, 0.0) for name in (place.server, place.kind))
        change += sum(self.changes.get(name, 0.0) * value for name, value in slopes.items())
        return math.hypot(self.effects * effects, self.noise * math.exp(change))


def fit_spread(
    places: Sequence[Place],
    slopes: Sequence[Mapping[str, float]],
    effects: NDArray[np.float64],
    residuals: NDArray[np.float64],
    along: Sequence[str],
) -> Spread:
    """Return the spread of greatest posterior density of points that were left out, with the deviations of their
    effects. `along`: the slopes along which the noise changes. Needs SciPy."""
    from scipy.optimize import minimize

    names = [*sorted({place.server for place in places}), *sorted({place.kind for place in places}), *along]
    features = np.array(
        [
            [float(name in (place.server, place.kind)) if name not in along else each[name] for name in names]
            for place, each in zip(places, slopes, strict=True)
        ]
    )

    def loss(x: NDArray[np.float64]) -> float:
        noise = np.exp(x[0] + features @ x[2:])
        variances = (math.exp(x[1]) * effects) ** 2 + noise**2
        density = -0.5 * np.log(variances) - (FREEDOM + 1) / 2 * np.log1p(residuals**2 / FREEDOM / variances)
        return float(-density.sum() + (x[1:] ** 2).sum() / 2 / USUAL_CHANGE**2)

    found = minimize(loss, np.array([math.log(0.06), *np.zeros(len(names) + 1)]), method="L-BFGS-B").x
    return Spread(math.exp(found[0]), math.exp(found[1]), dict(zip(names, map(float, found[2:]), strict=True)))
