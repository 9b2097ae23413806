"""Fits a few factors on a server's timing to measured points: on rounds, on rounds with drafts, and on prompts.

A factor and its slope in the logarithm of the requests at a time apply to whole rounds. Half of the variance of
published times is one constant of a deployment. The fit is linear in logarithms, and simulations give its slopes
(`prediction.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError, count_of
from ..cost.calibration import (
    DRAFTS_FACTOR,
    DRAFTS_SLOPE,
    FRONT_END,
    PARAMETERS,
    PROMPT_FACTOR,
    ROUND_FACTOR,
    ROUND_SLOPE,
    SLOPES,
    Calibration,
    FittedParameter,
    FittedParameters,
    MeasuredClients,
    profile_document,
)
from ..scenario import Scenario
from .points import BenchmarkPoint
from .prediction import WHAT_ELSE, Predictor, measured_scenario
from .result import CalibratedParameter, CalibratedResult, CalibrateResult
from .result_files import read_points

LEAST_POINTS = 3
DECODING = ("mean_tpot_ms", "output_tokens_per_s")
FIRST = "mean_ttft_ms"
NOISE = {"mean_tpot_ms": 0.1, "output_tokens_per_s": 0.1, FIRST: 0.3}
"""What two numbers leave of the logarithm of a result, as published deployments have it (docs/evidence/accuracy.md)."""
SPREADS = {
    ROUND_FACTOR: 1.0,  # wide: nothing forbids a slow host
    ROUND_SLOPE: 0.15,
    DRAFTS_FACTOR: 0.2,
    DRAFTS_SLOPE: 0.03,
    PROMPT_FACTOR: 0.5,
    FRONT_END: 20e6,
}
"""How far a parameter is from its default in other deployments: a factor's logarithm, a slope, ns."""
STEPS = 4
"""Steps of the fit, in which the slopes stay those at the start."""
SIZE = {FRONT_END: 5e6}
"""By how much a parameter is changed to see its slope; a factor or a slope by a tenth."""
QUANTILE = 1.645
"""Deviations of a normal distribution within which 90 % of it lie."""
CERTAIN = 0.5
"""What a benchmark that is repeated differs by, as a share of NOISE."""
CONTRADICTS = 4.0
"""A point contradicts the others if the fit is better without it by more than this many standard deviations."""
ASSUMED_ROWS = 3.0
"""The noise of NOISE counts as so many results of one's own."""
LENGTH_SPREAD = 0.2
"""If a file has no spread, lengths of clients that do not keep step vary by up to this share of their mean, up and
down."""
CANDIDATES = (1, 4, 16, 64, 256)
"""The numbers of clients of points that the fit may suggest to measure next."""
LEAST_FACTOR, MOST_FACTOR = 0.8, 3.0
"""The factors on rounds that a deployment of the model, the GPU and the format may have: the first for its usual number
of requests; the second for the number of which the factor is least, since a slow host may take any time for many."""

OnProgress = Callable[[int], None]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A linear fit of logarithms, with a normal prior around no change.

    rest:        [n]     predicted − measured, as logarithms
    slopes:      [n, p]  of the logarithms of the predictions
    noise:       [n]     the standard deviation of each result
    values:      [p]     the parameters; factors as logarithms
    spreads:     [p]     their prior standard deviations
    """

    rest: Array
    slopes: Array
    noise: Array
    values: Array
    spreads: Array

    @property
    def covariance(self) -> Array:
        """The covariance of the parameters, [p, p]: with the noise of the results, or less where they agree better."""
        scaled, rest = self.slopes / self.noise[:, None], self.rest / self.noise
        scale = (rest @ rest + ASSUMED_ROWS) / (len(rest) + ASSUMED_ROWS)
        pull = np.diag(self.spreads**-2.0)
        return np.asarray(np.linalg.inv(scaled.T @ scaled / scale + pull), dtype=np.float64)

    def step(self, kept: NDArray[np.bool_] | None = None) -> Array:
        """Return the change of the parameters to the least squares of all results, or of the `kept` ones."""
        rows = np.ones(len(self.rest), bool) if kept is None else kept
        scaled = self.slopes[rows] / self.noise[rows, None]
        pull = np.diag(self.spreads**-2.0)
        right = -scaled.T @ (self.rest[rows] / self.noise[rows]) - pull @ self.values
        found: Array = np.linalg.solve(scaled.T @ scaled + pull, right)
        return found

    def left_out(self, groups: Sequence[object]) -> Array:
        """Return the rest of each result by a fit without its group, [n]."""
        found = np.empty(len(self.rest))
        for group in dict.fromkeys(groups):
            out = np.array([other == group for other in groups])
            found[out] = self.rest[out] + self.slopes[out] @ self.step(~out)
        return found


def calibrate_from_files(
    files: Sequence[str],
    base: Scenario,
    given: Mapping[str, str],
    name: str = "profile",
    on_progress: Callable[[int, int], None] = lambda points, simulations: None,
) -> CalibrateResult:
    """Fit the timing of `base` to the results in files of benchmarks, each with settings behind a colon if it lacks
    some.

    `given`: the keys of `base` that are not defaults, with their source; files set the others. `on_progress` gets the
    numbers of points and of simulations so far. Raises ConfigError for a file that cannot be used.
    """
    left_out: list[str] = []
    points = read_points(files, left_out.append)
    base = measured_scenario(points, base, given)
    return calibrate(points, base, name, lambda count: on_progress(len(points), count), left_out)


def calibrate(
    points: Sequence[BenchmarkPoint],
    base: Scenario,
    name: str = "profile",
    on_progress: OnProgress = lambda simulations: None,
    left_out: Sequence[str] = (),
) -> CalibrateResult:
    """Fit the timing of `base` to the points. `on_progress` is called after every simulation with how many there were.
    `left_out`: runs that are no points, in words.

    Raises ConfigError for too few points, with what to measure, for results and factors that are physically impossible,
    and CannotPredict for a point that cannot be simulated.
    """
    count = 0

    def simulated() -> None:
        nonlocal count
        count += 1
        on_progress(count)

    clients = MeasuredClients(*_clients(points))
    predictors = [Predictor(point, base, simulated, clients) for point in points]
    for predictor in predictors:
        predictor.refuse_unphysical()
    if len(points) < LEAST_POINTS:
        raise _too_few(points)
    predictors = [as_its_clients_send(predictor, base) for predictor in predictors]
    rows = [(predictor, column) for predictor in predictors for column in predictor.measured]
    names = tuple(name for name in PARAMETERS if _is_fitted(name, points))
    fit = _fitted(rows, names)
    results = _results(rows, fit)
    source = ", ".join(dict.fromkeys(Path(point.file).name for point in points))
    profile = _calibration(predictors, fit, names, results, source, name)
    fitted = profile.parameters
    assert fitted is not None
    _refuse_factors(fitted, predictors)
    return CalibrateResult(
        model=profile.model,
        gpu=profile.gpu,
        server=fitted.server,
        kernels=fitted.kernels,
        points=fitted.points,
        left_out=tuple(left_out),
        clients=fitted.clients.usual,
        error=fitted.error,
        left_out_error=fitted.left_out_error,
        left_out_ttft_error=fitted.left_out_ttft_error,
        parameters=tuple(
            CalibratedParameter(name, one.value, one.low, one.high) for name, one in fitted.values.items()
        ),
        results=results,
        next_run=_next_run(points, base),
        profile=profile_document(profile),
    )


def _results(rows: Sequence[tuple[Predictor, str]], fit: LinearFit) -> tuple[CalibratedResult, ...]:
    """Return every measured result beside the fit, and beside one without its run."""
    sources = [predictor.point.source for predictor, _ in rows]
    without = fit.left_out(sources)
    # By as many standard deviations does the fit become better without the result.
    scores = np.sqrt(np.maximum(fit.rest * without, 0.0)) / (fit.noise * CERTAIN)
    # The run that the others contradict most spoils the scores of the others.
    worst = max(
        dict.fromkeys(sources), key=lambda one: sum(scores[i] ** 2 for i, at in enumerate(sources) if at == one)
    )
    return tuple(
        CalibratedResult(
            predictor.point.title,
            source,
            column,
            predictor.measured[column],
            predictor.measured[column] * math.exp(rest),
            math.expm1(rest),
            math.expm1(rest_without),
            source == worst and bool(score > CONTRADICTS),
            column == FIRST and predictor.point.output_std > 0,
        )
        for (predictor, column), source, rest, rest_without, score in zip(
            rows, sources, fit.rest, without, scores, strict=True
        )
    )


def _clients(points: Sequence[BenchmarkPoint]) -> tuple[float, float, float]:
    """Return the fewest, the usual and the most requests at a time."""
    found = [requests_of(point) for point in points]
    return min(found), math.exp(float(np.mean(np.log(found)))), max(found)


def requests_of(point: BenchmarkPoint) -> float:
    """Return the requests at a time: clients of a closed loop; of an open loop those that decode, by Little's law."""
    if point.rate_per_s is None:
        return float(point.concurrency or 1)
    return max(1.0, point.rate_per_s * point.output_tokens * (point.mean_tpot_ms or 0.0) / 1e3)


def _is_fitted(name: str, points: Sequence[BenchmarkPoint]) -> bool:
    if name in (DRAFTS_FACTOR, DRAFTS_SLOPE):
        return any(point.is_speculative for point in points)
    return name != FRONT_END or any(point.mean_ttft_ms is not None for point in points)


def _fitted(rows: Sequence[tuple[Predictor, str]], names: Sequence[str]) -> LinearFit:
    """Return the fit to these results. Its slopes are those of the server's own timing."""
    measured = np.log([predictor.measured[column] for predictor, column in rows])
    of_run = [sum(each in DECODING for each in predictor.measured) for predictor, _ in rows]
    noise = np.array([
        NOISE[column] * (math.sqrt(count) if column in DECODING else 1.0)
        for (_, column), count in zip(rows, of_run, strict=True)
    ])  # fmt: skip

    def rest(x: Array) -> Array:
        values = values_of(names, x)
        return np.log([predictor.predict(values)[column] for predictor, column in rows]) - measured

    x = np.zeros(len(names))
    found, slopes = rest(x), np.empty((len(rows), len(names)))
    for j, name in enumerate(names):
        moved = x.copy()
        moved[j] = SIZE.get(name, 0.1)
        slopes[:, j] = (rest(moved) - found) / moved[j]
    spreads = np.array([SPREADS[name] for name in names])
    fit = LinearFit(found, slopes, noise, x, spreads)
    for _ in range(STEPS):
        x = fit.values + fit.step()
        x = np.where(np.array(names) == FRONT_END, np.maximum(x, 0.0), x)
        fit = replace(fit, rest=rest(x), values=x)
    return fit


def values_of(names: Sequence[str], x: Array) -> dict[str, float]:
    """Return the parameters as a profile has them; the fit has the logarithms of factors."""
    return {name: _value(name, float(value)) for name, value in zip(names, x, strict=True)}


def _value(name: str, value: float) -> float:
    return float(value) if name in (*SLOPES, FRONT_END) else math.exp(value)


def as_its_clients_send(predictor: Predictor, base: Scenario) -> Predictor:
    """Return the predictor for equally long requests, or for lengths with a spread, whichever meets the time to the
    first token better.

    Clients of equally long requests keep step: all prompts come at once. A file with only mean lengths does not say
    which of the two it was.
    """
    point = predictor.point
    has_lengths = point.input_std or point.output_std or point.input_lens or point.output_lens
    measured_ms = point.mean_ttft_ms
    if has_lengths or measured_ms is None or (point.concurrency or 1) == 1:
        return predictor
    share = LENGTH_SPREAD / 3**0.5  # of uniform lengths
    drifting = replace(point, input_std=share * point.input_tokens, output_std=share * point.output_tokens)
    both = (predictor, Predictor(drifting, base, predictor.simulated, predictor.clients))
    return min(both, key=lambda each: abs(np.log(each.predict({})[FIRST] / measured_ms)))


def _calibration(
    predictors: Sequence[Predictor],
    fit: LinearFit,
    names: Sequence[str],
    results: Sequence[CalibratedResult],
    source: str,
    name: str,
) -> Calibration:
    run = predictors[0].assembly
    reach = QUANTILE * np.sqrt(np.diag(fit.covariance))
    ends = zip(names, fit.values, fit.values - reach, fit.values + reach, strict=True)
    values = {
        name: FittedParameter(
            _value(name, value), max(0.0, low) if name == FRONT_END else _value(name, low), _value(name, high)
        )
        for name, value, low, high in ends
    }

    def mean(key: str, *columns: str) -> float | None:
        found = [abs(getattr(item, key)) for item in results if item.name in columns]
        return float(np.mean(found)) if found else None

    fitted = FittedParameters(
        run.deployment.server.name,
        predictors[0].cost.kernels,
        values,
        predictors[0].clients,
        len(predictors),
        mean("error", *DECODING) or 0.0,
        mean("left_out_error", *DECODING) or 0.0,
        mean("left_out_error", FIRST),
    )
    tp = tuple(sorted({predictor.cost.tp for predictor in predictors}))
    return Calibration(name, source, run.deployment.gpu.name, run.target.name, tp, fitted)


def _refuse_factors(fitted: FittedParameters, predictors: Sequence[Predictor]) -> None:
    """Raise ConfigError for factors on rounds that no such deployment has."""
    factors = {
        each.point: fitted.round_factor(requests_of(each.point), has_drafts=each.point.is_speculative)
        for each in predictors
    }
    usual = [
        fitted.round_factor(fitted.clients.usual, has_drafts=kind)
        for kind in {each.point.is_speculative for each in predictors}
    ]
    wrong = min(usual) if min(usual) < LEAST_FACTOR else min(factors.values())
    if LEAST_FACTOR <= wrong <= MOST_FACTOR:
        return
    cost = predictors[0].cost
    prices = {"roofline": "the roofline's", "measured": "those of measured kernels"}[cost.kernels]
    message = (
        f"{wrong:.3g}: by these results rounds on {cost.gpu.name} take {wrong:.3g} times {prices}; expected "
        f"{LEAST_FACTOR:g} to {MOST_FACTOR:g}: {WHAT_ELSE}"
    )
    raise ConfigError.of(", ".join(dict.fromkeys(each.point.file for each in predictors)), ROUND_FACTOR, message)


def _too_few(points: Sequence[BenchmarkPoint]) -> ConfigError:
    """Return an error whose message says how many more points are needed, and which ones."""
    missing = LEAST_POINTS - len(points)
    message = (
        f"{count_of(len(points), 'point')}: at least {missing} more needed; three buy most: plain decoding at one, "
        "several and many clients, each with its mean TTFT; then a run with drafts at several"
    )
    return ConfigError.of("--from", "", message)


def _next_run(points: Sequence[BenchmarkPoint], base: Scenario) -> str:
    """Return the run, in words, after which all candidates together are known best: plain, or with the draft that was
    measured."""
    plain = replace(points[0], algorithm="NONE", steps=0, topk=1, num_draft_tokens=1)
    drafts = [point for point in points if point.is_speculative]
    candidates = [
        replace(kind, concurrency=clients, rate_per_s=None)
        for kind in (plain, *drafts[:1])
        for clients in CANDIDATES
        if clients <= (base.engine.max_running or clients)
    ]
    usual = _clients(points)[1]
    spreads = np.array([SPREADS[name] for name in (ROUND_FACTOR, ROUND_SLOPE, DRAFTS_FACTOR, DRAFTS_SLOPE)])

    def columns(some: Sequence[BenchmarkPoint]) -> Array:
        power = np.log([requests_of(point) / usual for point in some])
        kind = np.array([float(point.is_speculative) for point in some])
        found: Array = np.c_[np.ones(len(some)), power, kind, kind * power]
        return found

    known, wanted = columns(points), columns(candidates)

    def unknown(more: Array) -> float:
        """Return the variance that is left of all candidates after a run with these columns."""
        rows = np.vstack([known, more]) / NOISE[DECODING[0]]
        covariance = np.linalg.inv(rows.T @ rows + np.diag(spreads**-2.0))
        return float(np.einsum("ij,jk,ik->", wanted, covariance, wanted))

    return candidates[int(np.argmin([unknown(row) for row in wanted]))].load
