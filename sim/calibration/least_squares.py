"""Regularised least squares for timing parameters: values with intervals, what the measurements tell, and leave-one-out
errors.

The model is `log measured = log predict(x) + noise`, with a normal prior on every parameter and bounds. The noise of
the measurements is
estimated together with the parameters, so that intervals need no assumed error:

    minimise over x    Σ (log predict(x)_i − log measured_i)² / (noise · weight_i)²  +  Σ ((x_j − prior_j) / spread_j)²

Gauss-Newton steps; each solves the bounded linear problem with `scipy.optimize.lsq_linear`. `predict` may be a
simulation: slopes are taken over a tenth of a parameter's spread, and again only where the solution has moved.

    parameters = [Parameter("gap_ns", "ns", value=500e3, spread=250e3), Parameter("draft_step_ns", "ns", 100e3, 100e3)]
    fit = fit_parameters(parameters, lambda x: kernels_ns + features @ x, rounds_ns)
    errors = left_out_errors(fit, groups=[row.shape for row in rows])
        # exact refits; linearised=True for costly predictions
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.special import stdtrit

INTERVAL = 0.9
"""Probability that an interval holds the true value."""
USUAL_NOISE = 0.03
"""Relative standard deviation of a benchmark's result that is assumed before its residuals are seen; counts as
USUAL_NOISE_ROWS rows.
Assumption: serving benchmarks that are repeated differ by a few percent."""
USUAL_NOISE_ROWS = 2.0

_SLOPE_STEP = 0.1  # of a spread
_MOVED = 0.5  # spreads: slopes are taken again after a step as long as this
_CONVERGED = 0.01  # spreads
_MAX_STEPS = 12
_HALVINGS = 4
_NOISE_PASSES = 20

Array = NDArray[np.float64]
Predict = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number to fit: its prior `value` and standard deviation `spread` (finite; wide: hardly any
    prior), and bounds."""

    name: str
    unit: str
    value: float
    spread: float
    low: float = 0.0
    high: float = np.inf


@dataclass(frozen=True, slots=True)
class Fit:
    """A solution. n measurements, p parameters; all arrays are float64.

    values, low, high:  [p]     the parameters, and the ends of their intervals (probability INTERVAL)
    errors:             [n]     predicted / measured − 1
    slopes:             [n, p]  derivative of log predicted by each parameter, at the solution or within half a spread
                                of it
    covariance:         [p, p]  of the parameters, prior included
    noise:              relative standard deviation of the measurements, for weight 1
    """

    parameters: tuple[Parameter, ...]
    predict: Predict
    measured: Array
    weights: Array
    values: Array
    low: Array
    high: Array
    errors: Array
    slopes: Array
    covariance: Array
    noise: float

    @property
    def spreads(self) -> Array:
        """The prior standard deviations, [p]."""
        return np.array([parameter.spread for parameter in self.parameters])

    @property
    def determined(self) -> Array:
        """The share of each parameter's uncertainty that the measurements took away: 0 (nothing) … 1 (all), [p]."""
        return 1.0 - np.sqrt(np.diag(self.covariance)) / self.spreads

    def directions(self) -> tuple[Array, Array]:
        """Return singular values [k] of the slopes in units of spread and noise, descending, and directions [k, p] in
        units of spreads.

        Along a direction with a value below 1 the prior determines more than the measurements do.
        """
        scaled = self.slopes * self.spreads / (self.noise * self.weights)[:, None]
        _, values, directions = np.linalg.svd(scaled, full_matrices=True)
        return np.pad(values, (0, len(self.parameters) - len(values))), directions


def fit_parameters(
    parameters: Sequence[Parameter],
    predict: Predict,
    measured: Array,
    weights: Array | None = None,
    start: Array | None = None,
) -> Fit:
    """Fit `parameters` so that `predict(values [p])` meets `measured`, both [n] and positive.

    `weights` [n]: standard deviations of the measurements relative to each other; default 1. `start` [p]: where to
    begin; default: the prior values.
    """
    measured = np.asarray(measured, dtype=float)
    weights = np.ones(len(measured)) if weights is None else np.asarray(weights, dtype=float)
    assert len(measured) == len(weights), "a weight for every measurement"
    assert (measured > 0).all() and np.isfinite(measured).all(), "measurements must be positive"
    prior, spread, low, high = _columns(parameters)
    assert (spread > 0).all() and np.isfinite(spread).all(), "spreads must be positive and finite"

    target = np.log(measured)

    def residuals(x: Array) -> Array:
        return (np.log(predict(x)) - target) / weights

    x = np.clip(prior if start is None else start, low, high)
    rest = residuals(x)
    slopes, stale = _slopes(residuals, x, rest, spread, high), False
    noise = USUAL_NOISE
    for _ in range(_MAX_STEPS):
        step, noise = _linear_step(rest, slopes, x, parameters)
        x, rest, moved = _along(step, x, residuals, rest, noise, prior, spread)
        if moved > _MOVED or (stale and moved == 0.0):
            slopes, stale = _slopes(residuals, x, rest, spread, high), False
        elif moved < _CONVERGED:
            break
        else:
            stale = True
    noise, covariance, freedom = _uncertainty(rest, slopes, spread, noise)
    reach = stdtrit(freedom, (1 + INTERVAL) / 2) * np.sqrt(np.diag(covariance))
    return Fit(
        tuple(parameters),
        predict,
        measured,
        weights,
        x,
        np.maximum(x - reach, low),
        np.minimum(x + reach, high),
        np.exp(rest * weights) - 1,
        slopes * weights[:, None],
        covariance,
        noise,
    )


def left_out_errors(fit: Fit, groups: Sequence[Hashable], *, linearised: bool = False) -> tuple[Array, Array]:
    """Return each measurement's error by parameters that were fitted without its group, and this error in standard
    deviations, both [n].

    `linearised`: take predictions near the solution from the slopes, so that nothing is predicted again.
    """
    assert len(groups) == len(fit.measured), "a group for every measurement"
    errors, scores = np.empty(len(fit.measured)), np.empty(len(fit.measured))
    at_solution = np.log1p(fit.errors) + np.log(fit.measured)
    for group in dict.fromkeys(groups):
        out = np.array([other == group for other in groups])
        kept = ~out

        def predict(x: Array, rows: NDArray[np.bool_] = kept) -> Array:
            if linearised:
                return np.asarray(np.exp(at_solution[rows] + fit.slopes[rows] @ (x - fit.values)))
            return np.asarray(fit.predict(x)[rows])

        other = fit_parameters(fit.parameters, predict, fit.measured[kept], fit.weights[kept], fit.values)
        predicted = predict(other.values, out)
        errors[out] = predicted / fit.measured[out] - 1
        slopes = fit.slopes[out]
        variance = (other.noise * fit.weights[out]) ** 2 + np.einsum("ij,jk,ik->i", slopes, other.covariance, slopes)
        scores[out] = np.log1p(errors[out]) / np.sqrt(variance)
    return errors, scores


def covariance_with(fit: Fit, slopes: Array, weights: Array) -> Array:
    """Return the covariance [p, p] if measurements with these `slopes` [m, p] and `weights` [m] were made as well."""
    rows = np.vstack([fit.slopes / fit.weights[:, None], slopes / weights[:, None]])
    return _covariance(rows, fit.spreads, fit.noise)


def _columns(parameters: Sequence[Parameter]) -> tuple[Array, ...]:
    table: Array = np.array([(item.value, item.spread, item.low, item.high) for item in parameters], dtype=float)
    return tuple(table.reshape(-1, 4).T)


def _slopes(
    residuals: Predict,
    x: Array,
    rest: Array,
    spread: Array,
    high: Array,
) -> Array:
    """Return the derivatives of the residuals, [n, p], over a step upwards, or downwards at the upper bound."""
    slopes = np.empty((len(rest), len(x)))
    for j in range(len(x)):
        step = _SLOPE_STEP * spread[j]
        step = step if x[j] + step <= high[j] else -step
        moved = x.copy()
        moved[j] += step
        slopes[:, j] = (residuals(moved) - rest) / step
    return slopes


def _linear_step(rest: Array, slopes: Array, x: Array, parameters: Sequence[Parameter]) -> tuple[Array, float]:
    """Return the step [p] to the solution of the linear problem, and the noise for which it is consistent."""
    prior, spread, low, high = _columns(parameters)
    noise, step = USUAL_NOISE, np.zeros_like(x)
    for _ in range(_NOISE_PASSES):
        matrix = np.vstack([slopes * spread / noise, np.eye(len(x))])
        right = np.concatenate([-rest / noise, (prior - x) / spread])
        bounds = ((low - x) / spread - 1e-12, (high - x) / spread + 1e-12)
        step = lsq_linear(matrix, right, bounds).x * spread
        before, noise = noise, _uncertainty(rest + slopes @ step, slopes, spread, noise)[0]
        if abs(noise / before - 1) < 1e-3:
            break
    return np.clip(x + step, low, high) - x, noise


def _along(
    step: Array,
    x: Array,
    residuals: Predict,
    rest: Array,
    noise: float,
    prior: Array,
    spread: Array,
) -> tuple[Array, Array, float]:
    """Return the parameters after the step, or after a half, a quarter … of it if the whole is no better; residuals;
    spreads moved."""

    def objective(x: Array, rest: Array) -> float:
        return float(((rest / noise) ** 2).sum() + (((x - prior) / spread) ** 2).sum())

    before = objective(x, rest)
    for halving in range(_HALVINGS):
        moved = step / 2**halving
        if np.abs(moved / spread).max(initial=0.0) < _CONVERGED:
            break
        found = residuals(x + moved)
        if objective(x + moved, found) < before:
            return x + moved, found, float(np.abs(moved / spread).max())
    return x, rest, 0.0


def _covariance(slopes: Array, spread: Array, noise: float) -> Array:
    scaled = slopes * spread / noise
    return spread[:, None] * np.linalg.inv(scaled.T @ scaled + np.eye(len(spread))) * spread


def _uncertainty(rest: Array, slopes: Array, spread: Array, noise: float) -> tuple[float, Array, float]:
    """Return noise, covariance [p, p] and degrees of freedom. The prior on the noise counts as some rows more."""
    scaled = slopes * spread / noise
    used = float(np.trace(scaled @ np.linalg.inv(scaled.T @ scaled + np.eye(len(spread))) @ scaled.T))
    freedom = USUAL_NOISE_ROWS + max(len(rest) - used, 0.0)
    noise = float(np.sqrt((USUAL_NOISE_ROWS * USUAL_NOISE**2 + rest @ rest) / freedom))
    return noise, _covariance(slopes, spread, noise), freedom
