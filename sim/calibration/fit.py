"""Fits the few parameters of a server's timing to measured points, and says which parameters the points determine.

The prior is the server's profile. A parameter may differ from it about as much as the profiles of servers differ from
each other (`spreads`). The noise of the points is estimated from the points. Predictions are simulations
(`prediction.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...core.errors import ConfigError, count_of
from ..cost.calibration import (
    DEVICE,
    LAUNCH_TIMES,
    PARAMETERS,
    Calibration,
    FittedParameter,
    FittedParameters,
    host_total_ns,
)
from ..cost.draft import EAGLE3
from ..cost.server import PROFILES
from ..scenario import Scenario
from .least_squares import Fit, Parameter, covariance_with, fit_parameters, left_out_errors
from .points import BenchmarkPoint
from .prediction import WHAT_ELSE, Predictor, bandwidth_of

LEAST_POINTS = 3
DETERMINED = 0.5
"""The points tell a parameter if they take away at least this share of its prior uncertainty."""
DEVICE_SPREAD = 0.15
"""The error of the kernel times of a roofline or a database against a device (docs/servers.md, "Measured kernels":
up to this much)."""
CONTRADICTS = 4.0
"""A point contradicts the others if a fit without it misses it by more than this many standard deviations."""
DECODING = ("mean_tpot_ms", "output_tokens_per_s")
"""The results that are fitted. The time to the first token is not fitted, because it depends on when clients send. It
shows which clients keep step."""
LENGTH_SPREAD = 0.2
"""If a file has no spread, lengths of clients that do not keep step vary by up to this share of their mean, up and
down."""
CANDIDATES = (1, 8, 64, 256)
"""The numbers of clients of points that the fit may suggest to measure next."""
SHORT = 32.0
"""The output tokens of such points in the simulations; a few are enough to show the speed of decoding."""
MOST_SUGGESTED = 3

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PointResult:
    """A result of a point: measured, predicted by the fit, and the errors (predicted / measured − 1) with and
    without the point."""

    point: BenchmarkPoint
    column: str
    measured: float
    predicted: float
    error: float
    left_out_error: float | None  # None: the result is not fitted
    score: float  # the left-out error in standard deviations


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A point that would tell more, and the parameters that it would tell."""

    title: str
    tells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PointFit:
    """A calibration, and the evidence for it."""

    fit: Fit
    results: tuple[PointResult, ...]
    calibration: Calibration
    suggestions: tuple[Suggestion, ...]
    by_server: Mapping[str, float]  # the parameters before the fit

    @property
    def undetermined(self) -> tuple[str, ...]:
        """The parameters that the points cannot tell."""
        return tuple(
            item.name
            for item, share in zip(self.fit.parameters, self.fit.determined, strict=True)
            if share < DETERMINED
        )

    @property
    def entangled(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of parameters of which the points tell only the sum."""
        names = [item.name for item in self.fit.parameters]
        deviations = np.sqrt(np.diag(self.fit.covariance))
        correlation = self.fit.covariance / np.outer(deviations, deviations)
        for i, j in zip(*np.nonzero(np.triu(correlation < -0.8, 1)), strict=True):
            yield names[i], names[j]

    @property
    def contradicting(self) -> tuple[PointResult, ...]:
        return tuple(item for item in self.results if abs(item.score) > CONTRADICTS)


def calibrate(
    points: Sequence[BenchmarkPoint],
    base: Scenario,
    source: str,
    name: str = "profile",
    on_progress: OnProgress | None = None,
) -> PointFit:
    """Fit the timing of `base` to the points. `on_progress` is called after every simulation with how many there were.

    Raises ConfigError for too few points, with what to measure, for results and factors on kernels that are physically
    impossible, and CannotPredict for a point that cannot be simulated.
    """
    count = 0

    def simulated() -> None:
        nonlocal count
        count += 1
        if on_progress is not None:
            on_progress(count)

    predictors = [Predictor(point, base, simulated) for point in points]
    for predictor in predictors:
        predictor.refuse_unphysical()
    predictors = [as_its_clients_send(predictor, base) for predictor in predictors]
    if len(points) < LEAST_POINTS:
        raise _too_few(points, base, predictors, simulated)
    parameters = _parameters(predictors)
    rows = [(predictor, column) for predictor in predictors for column in predictor.measured]
    fitted = [(predictor, column) for predictor, column in rows if column in DECODING]
    measured = np.array([predictor.measured[column] for predictor, column in fitted])
    fit = fit_parameters(parameters, partial(_predict, fitted, parameters), measured, _weights(predictors))
    left_out, scores = left_out_errors(fit, [predictor.point.source for predictor, _ in fitted], linearised=True)
    without = {
        (predictor.point.source, column): each
        for (predictor, column), *each in zip(fitted, left_out, scores, strict=True)
    }
    values = _named(parameters, fit.values)
    results = tuple(_result(predictor, column, values, without) for predictor, column in rows)
    found = PointFit(fit, results, _calibration(predictors, base, fit, results, source, name), (), _values(parameters))
    return (
        replace(found, suggestions=tuple(_suggestions(fit, points, base, simulated))) if found.undetermined else found
    )


def _named(parameters: Sequence[Parameter], x: np.ndarray) -> dict[str, float]:
    return {item.name: float(value) for item, value in zip(parameters, x, strict=True)}


def _predict(fitted: Sequence[tuple[Predictor, str]], parameters: Sequence[Parameter], x: np.ndarray) -> np.ndarray:
    """Return the value of each of these results with the parameters `x`."""
    values = _named(parameters, x)
    return np.array([predictor.predict(values)[column] for predictor, column in fitted])


def _result(
    predictor: Predictor, column: str, values: Mapping[str, float], without: Mapping[tuple[str, str], Sequence[float]]
) -> PointResult:
    point, measured, predicted = predictor.point, predictor.measured[column], predictor.predict(values)[column]
    left_out, score = without.get((point.source, column), (None, 0.0))
    return PointResult(point, column, measured, predicted, predicted / measured - 1, left_out, float(score))


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
    both = (predictor, Predictor(drifting, base, predictor.simulated))
    return min(both, key=lambda each: abs(np.log(each.predict({})["mean_ttft_ms"] / measured_ms)))


def spreads() -> dict[str, float]:
    """Return the prior standard deviation of each parameter, ns: that of the profiles of servers;
    a share for the device."""
    profiles = list(PROFILES.values())
    found = {
        "host_base_ns": np.std([host_total_ns(item.host, "base") for item in profiles]),
        "host_row_ns": np.std([host_total_ns(item.host, "row") for item in profiles]),
        **{time: np.std([getattr(item.launch, time) for item in profiles]) for time in LAUNCH_TIMES},
        # of the head that is not captured everywhere
        "draft_step_ns": np.std([item.launch.step_ns(EAGLE3) for item in profiles]),
    }
    # Few servers have been fitted, and to one kind of interconnect: their scatter is less than what others may have.
    found["collective_gap_ns"] = np.mean([item.launch.collective_gap_ns for item in profiles])
    return {DEVICE: DEVICE_SPREAD, **{name: float(value) for name, value in found.items()}}


def _parameters(predictors: Sequence[Predictor]) -> tuple[Parameter, ...]:
    """Return the parameters that at least one point depends on, around the values of the scenario's server.

    Points with one tensor parallelism cannot tell what further devices add to a pass, and points with one kind of head
    cannot tell the time of another. These parameters keep their values.
    """
    run, wide = predictors[0].assembly, spreads()
    values = {
        DEVICE: 1.0,
        "host_base_ns": host_total_ns(run.host, "base"),
        "host_row_ns": host_total_ns(run.host, "row"),
        **{time: getattr(predictors[0].cost.launch, time) for time in LAUNCH_TIMES},
    }
    used = {name for predictor in predictors for name in predictor.parameters()}
    if len({predictor.cost.tp for predictor in predictors}) == 1:
        used.discard("collective_gap_ns")
    if all(predictor.point.algorithm == EAGLE3 for predictor in predictors if predictor.point.is_speculative):
        used.discard("eagle3_step_ns")  # is determined as a part of the draft step
    low = {DEVICE: 0.2}
    return tuple(
        Parameter(name, "" if name == DEVICE else "ns", float(values[name]), wide[name], low.get(name, 0.0))
        for name in PARAMETERS
        if name in used
    )


def _weights(predictors: Sequence[Predictor]) -> np.ndarray:
    """Return the weights of all fitted results: two of one run count as one."""
    counts = [sum(column in DECODING for column in predictor.measured) for predictor in predictors]
    return np.array([count**0.5 for count in counts for _ in range(count)])


IMPLAUSIBLE = 2.0
"""If the fit misses the results by this factor on average, in either direction, they must belong to another deployment
or have other units."""


def _values(parameters: Sequence[Parameter]) -> dict[str, float]:
    return {item.name: item.value for item in parameters}


def _calibration(
    predictors: Sequence[Predictor], base: Scenario, fit: Fit, results: Sequence[PointResult], source: str, name: str
) -> Calibration:
    run = predictors[0].assembly
    values = {
        item.name: FittedParameter(*(float(number) for number in numbers))
        for item, *numbers in zip(
            fit.parameters, fit.values, fit.low, fit.high, np.maximum(fit.determined, 0.0), strict=True
        )
    }
    decoding = [item for item in results if item.column in DECODING]
    error, left_out = (
        float(np.mean(np.abs([getattr(item, key) for item in decoding]))) for key in ("error", "left_out_error")
    )
    factors = {item: abs(float(np.log1p(item.error))) for item in decoding}
    if np.mean([*factors.values()]) > np.log(IMPLAUSIBLE):
        worst = max(decoding, key=lambda item: factors[item])
        message = (
            f"{worst.measured:g} was measured, and {worst.predicted:.3g} is simulated whatever the parameters: is it in the "
            f"unit of its name? {WHAT_ELSE}"
        )
        raise ConfigError.of(worst.point.source, worst.column, message)
    _refuse_scale(predictors, values[DEVICE].value)
    fitted = FittedParameters(
        run.deployment.server.name, predictors[0].cost.kernels, values, len(predictors), error, left_out
    )
    tp = tuple(sorted({predictor.cost.tp for predictor in predictors}))
    return Calibration(name, source, run.deployment.gpu.name, run.target.name, tp, fitted)


MOST_SCALE = 3.0
"""No kernels of a server that is in use take longer than this many times what they are priced at."""


def _refuse_scale(predictors: Sequence[Predictor], scale: float) -> None:
    """Raise ConfigError for a factor on kernels below what reading the weights allows, or far above 1."""
    one = max(predictors, key=lambda each: each.least_scale)
    if one.least_scale <= scale <= MOST_SCALE:
        return
    files = ", ".join(dict.fromkeys(each.point.file for each in predictors))
    prices = {"roofline": "the roofline's", "measured": "those measured"}[one.cost.kernels]
    below = f", since below that a pass would read {one.cost.target.name} faster than {bandwidth_of(one.cost.gpu)}"
    message = (
        f"{scale:.3g}: by these results kernels on {one.cost.gpu.name} take {scale:.3g} times {prices}; expected "
        f"{one.least_scale:.2f} to {MOST_SCALE:g}{below if scale < 1 else ''}: {WHAT_ELSE}"
    )
    raise ConfigError.of(files, DEVICE, message)


def _too_few(
    points: Sequence[BenchmarkPoint], base: Scenario, predictors: Sequence[Predictor], simulated: Callable[[], None]
) -> ConfigError:
    """Return an error whose message says how many more points are needed, and which ones."""
    parameters, rows = _parameters(predictors), _weights(predictors)
    fitted = [(predictor, column) for predictor in predictors for column in predictor.measured if column in DECODING]
    predict = partial(_predict, fitted, parameters)
    at_prior = fit_parameters(parameters, predict, predict(np.array([item.value for item in parameters])), rows)
    wanted = [item.title for item in _suggestions(at_prior, points, base, simulated)]
    missing = LEAST_POINTS - len(points)
    most = f"; most would be learned by: {'; '.join(wanted)}" if wanted else ""
    message = f"{count_of(len(points), 'point')} for {count_of(len(parameters), 'parameter')}: at least {missing} more needed{most}"
    return ConfigError.of("--from", "", message)


def _suggestions(
    fit: Fit, points: Sequence[BenchmarkPoint], base: Scenario, simulated: Callable[[], None]
) -> Iterator[Suggestion]:
    """Yield the points to measure next, the best first: those that would tell most about the unknown parameters. Each
    is chosen with the earlier ones added."""
    values = _named(fit.parameters, fit.values)
    candidates = [Predictor(point, base, simulated) for point in _candidates(points, base)]
    slopes = [_slopes(candidate, fit, values) for candidate in candidates]
    chosen: list[int] = []
    covariance = fit.covariance
    for _ in range(MOST_SUGGESTED):
        shares = _determined(covariance, fit)
        if (shares >= DETERMINED).all():
            return
        left = [i for i in range(len(candidates)) if i not in chosen]
        with_each = [
            covariance_with(fit, np.vstack([slopes[j] for j in [*chosen, i]]), np.ones(len(chosen) + 1)) for i in left
        ]
        if not left:
            return
        gains = [
            float(np.minimum(_determined(each, fit), DETERMINED).sum() - np.minimum(shares, DETERMINED).sum())
            for each in with_each
        ]
        best = int(np.argmax(gains))
        if gains[best] < 0.05:
            return
        now = _determined(with_each[best], fit)
        tells = [
            item.name for item, before, after in zip(fit.parameters, shares, now, strict=True) if after - before > 0.1
        ]
        if not tells:
            return
        chosen.append(left[best])
        covariance = with_each[best]
        yield Suggestion(candidates[left[best]].point.load, tuple(tells))


def _determined(covariance: NDArray[np.float64], fit: Fit) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = 1.0 - np.sqrt(np.diag(covariance)) / fit.spreads
    return shares


def _slopes(candidate: Predictor, fit: Fit, values: Mapping[str, float]) -> np.ndarray:
    """Return the derivatives of the logarithm of a candidate's time per token by the parameters, [1, p]."""
    at = candidate.predict(values)["mean_tpot_ms"]
    slopes = np.zeros((1, len(fit.parameters)))
    for j, item in enumerate(fit.parameters):
        if item.name in candidate.parameters():
            step = 0.1 * item.spread
            slopes[0, j] = (
                np.log(candidate.predict({**values, item.name: values[item.name] + step})["mean_tpot_ms"] / at) / step
            )
    return slopes


def _candidates(points: Sequence[BenchmarkPoint], base: Scenario) -> Iterator[BenchmarkPoint]:
    """Yield short runs that were not measured: plain, and with each draft that was, at several numbers of clients."""
    arms = {("NONE", 0, 1, 1): 1.0}
    arms |= {(p.algorithm, p.steps, p.topk, p.num_draft_tokens): p.accept_length for p in points if p.is_speculative}
    done = {(p.algorithm, p.steps, p.topk, p.num_draft_tokens, p.concurrency) for p in points}
    prompt = float(np.median([point.input_tokens for point in points]))
    for arm, accept_length in arms.items():
        for clients in CANDIDATES:
            if clients <= (base.engine.max_running or clients) and (*arm, clients) not in done:
                yield replace(
                    points[0], source="a suggestion", concurrency=clients, rate_per_s=None, num_requests=clients, input_tokens=prompt,
                    output_tokens=SHORT, input_std=0.0, output_std=0.0, mean_tpot_ms=1.0, mean_ttft_ms=None, output_tokens_per_s=None,
                    input_lens=(), output_lens=(), algorithm=arm[0], steps=arm[1], topk=arm[2], num_draft_tokens=arm[3],
                    accept_length=accept_length,
                )  # fmt: skip
