"""A hierarchical model of log(published / simulated): effects of servers, GPUs, formats, kinds of layers and models.

An observation is a sum of effects and noise. Each effect belongs to a level (a server, a model under a server, …); the
effects of one level are independent and normal around 0, with one variance per level and slope. So observations
covary as far as they share levels, and the effects of a place that was never measured are those of the levels that it
shares with measured ones (partial pooling). The variances are those of greatest restricted likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEAN_DEVIATION = 0.3
"""Deviation of the mean of all observations, about which nothing is assumed."""
USUAL_DEVIATION = 0.08
"""Scale of the half-normal prior of a level's deviation, which decides where few groups tell two levels apart."""

WAVES_DEVIATION = 0.3
"""The same for effects of the waves of equally long requests, which may last or not."""


class Place(NamedTuple):
    """What a deployment shares with others. `run`: a release of the server, or a day; empty for one to be predicted."""

    model: str
    kind: str
    gpu: str
    server: str
    number_format: str
    parallel: str
    run: str = ""


class Term(NamedTuple):
    """A level, as the fields of a place that it has, and the slope that its effects are multiplied by: 1, or one of
    `places.py`."""

    fields: tuple[str, ...]
    slope: str = ""


_GROUP = ("model", "gpu", "server", "number_format")
_DEPLOYMENT = (*_GROUP, "parallel")
TERMS = (
    Term((), "waves"),
    Term((), "equal"),
    Term(("server",)),
    Term(("server",), "load"),
    Term(("server",), "size"),
    Term(("server",), "waves"),
    Term(("server",), "equal"),
    Term(("server", "kind")),
    Term(("server", "kind"), "load"),
    Term(("server", "kind", "parallel")),
    Term(("server", "kind", "parallel"), "load"),
    Term(("server", "gpu")),
    Term(("server", "number_format")),
    Term(("server", "gpu", "number_format", "kind")),
    Term(("model",)),
    Term(("model", "server")),
    Term(("model", "gpu")),
    Term(_GROUP),
    Term(_GROUP, "load"),
    Term(_GROUP, "size"),
    Term(_GROUP, "waves"),
    Term(_GROUP, "equal"),
    Term(_DEPLOYMENT),
    Term(_DEPLOYMENT, "load"),
    Term((*_DEPLOYMENT, "run")),
)
"""The levels of effects. Their slopes: `load`, how many requests there are; `size`, how long the simulated time to the
first token is; `equal`, 1 if all requests are equally long, else 0; `waves`, the same times the share of the first
token in a request's time."""
SLOPES: dict[str, tuple[str, ...]] = {
    "tpot": ("", "load", "waves"),
    "ttft": ("", "load", "size", "equal"),
    "request": ("", "load", "waves"),
}
"""The slopes that matter, by what is predicted: the time per output token, to the first token, of a request."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The mean of `count` logarithms of published / simulated of one place (a weighted number, below that of points
    where some are doubted). `slopes`: what effects are multiplied by, by the name of a term's slope."""

    place: Place
    mean: float
    count: float
    slopes: Mapping[str, float]


class Prediction(NamedTuple):
    """The mean of a logarithm, and the deviation of its effects, without the noise of a point."""

    mean: float
    deviation: float


def covariance(rows: Sequence[Observation], columns: Sequence[Observation], deviations: Mapping[Term, float]) -> Floats:
    """Return the covariance [rows, columns] of the effects of observations."""
    total = np.full((len(rows), len(columns)), MEAN_DEVIATION**2)
    for term, deviation in deviations.items():
        if deviation:
            total += deviation**2 * gram(rows, columns, term)
    return total


def gram(rows: Sequence[Observation], columns: Sequence[Observation], term: Term) -> Floats:
    """Return [rows, columns] the products of the slopes of observations that share a term's level; 0 where they do
    not."""
    numbers: dict[tuple[str, ...], int] = {}

    def levels(items: Sequence[Observation]) -> NDArray[np.int64]:
        keys = [tuple(getattr(item.place, name) for name in term.fields) for item in items]
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])

    def slopes(items: Sequence[Observation]) -> Floats:
        return np.array([item.slopes[term.slope] if term.slope else 1.0 for item in items])

    shared = levels(rows)[:, None] == levels(columns)[None, :]
    products: Floats = shared * np.outer(slopes(rows), slopes(columns))
    return products


class Posterior:
    """What observations say of places. `deviations`: of the effects, by term; `noise`: of a single point."""

    def __init__(self, observations: Sequence[Observation], deviations: Mapping[Term, float], noise: float) -> None:
        self.observations: tuple[Observation, ...] = tuple(observations)
        self.deviations = deviations
        self.noise = noise

    @cached_property
    def _precision(self) -> Floats:
        noise = [self.noise**2 / item.count for item in self.observations]
        whole = covariance(self.observations, self.observations, self.deviations) + np.diag(noise)
        full: Floats = np.asarray(np.linalg.inv(whole), dtype=np.float64)
        return full

    @cached_property
    def _weights(self) -> Floats:
        found: Floats = self._precision @ np.array([item.mean for item in self.observations])
        return found

    def predict(self, place: Place, slopes: Mapping[str, float]) -> Prediction:
        """Return the prediction of a new point at `place`."""
        return self.predict_all([(place, slopes)])[0]

    def predict_all(self, points: Sequence[tuple[Place, Mapping[str, float]]]) -> list[Prediction]:
        """Return the prediction of each new point."""
        asked = [Observation(place, 0.0, 1.0, slopes) for place, slopes in points]
        prior = np.full(len(asked), MEAN_DEVIATION**2)
        for term, deviation in self.deviations.items():
            prior += [deviation**2 * (item.slopes[term.slope] if term.slope else 1.0) ** 2 for item in asked]
        shared = covariance(asked, self.observations, self.deviations)
        left = np.maximum(0.0, prior - ((shared @ self._precision) * shared).sum(axis=1))
        return [Prediction(*map(float, row)) for row in zip(shared @ self._weights, np.sqrt(left), strict=True)]

    def difference(
        self, points: tuple[tuple[Place, Mapping[str, float]], tuple[Place, Mapping[str, float]]]
    ) -> Prediction:
        """Return the prediction of the first of two new points minus the second. Effects of levels that both points
        share are in both, and cancel."""
        asked = [Observation(place, 0.0, 1.0, slopes) for place, slopes in points]
        signs = np.array([1.0, -1.0])
        shared = covariance(asked, self.observations, self.deviations)
        left = covariance(asked, asked, self.deviations) - shared @ self._precision @ shared.T
        return Prediction(float(signs @ shared @ self._weights), float(np.sqrt(max(0.0, signs @ left @ signs))))


def fit(observations: Sequence[Observation], terms: Sequence[Term]) -> tuple[dict[Term, float], float]:
    """Return the deviations of the effects by term, and of a point's noise, of greatest restricted likelihood under the
    half-normal priors. Needs SciPy."""
    from scipy.optimize import minimize

    grams = [gram(observations, observations, term) for term in terms]
    means, counts = np.array([item.mean for item in observations]), np.array([item.count for item in observations])
    scales = np.array(
        [*(WAVES_DEVIATION if term.slope in ("waves", "equal") else USUAL_DEVIATION for term in terms), 10.0]
    )

    def loss(logs: Floats) -> tuple[float, Floats]:
        """Return minus twice the logarithm of the posterior density, halved, and its slopes."""
        variances = np.exp(2 * logs)
        full = np.full_like(grams[0], MEAN_DEVIATION**2) + np.diag(variances[-1] / counts)
        for variance, each in zip(variances, grams, strict=False):
            full += variance * each
        precision = np.linalg.inv(full)
        weights = precision @ means
        rises = [(precision * each).sum() - weights @ each @ weights for each in grams]
        rises.append(float(((np.diag(precision) - weights**2) / counts).sum()))
        value = (means @ weights + np.linalg.slogdet(full)[1]) / 2 + (variances / scales**2).sum() / 2
        return float(value), variances * np.array(rises) + variances / scales**2

    start = np.full(len(terms) + 1, np.log(USUAL_DEVIATION))
    bounds = [(np.log(1e-3), np.log(0.8))] * len(start)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 60})
    deviations = np.exp(found.x)
    return dict(zip(terms, map(float, deviations), strict=False)), float(deviations[-1])
