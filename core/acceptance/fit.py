"""Fits acceptance processes to recordings of rounds, and reports the goodness of fit.

A recording tells what happened in *rounds*: at depth d, how often the d-th draft was accepted. A process is defined by
*positions*, and rounds are a biased sample of positions (see `process.py`). `calibrate` finds the position
probabilities whose rounds look as recorded; `fit` finds the shares and the correlation length as well. If a recording
tells less, the functions below take the missing values from a given process. `fit_histograms` does not need the order
of rounds, `fit_counts` does not need requests either, and `fit_means` needs only mean accept lengths.

All are method-of-moments estimates by simulation on fixed keys (McFadden, Econometrica 57, 1989): deterministic, each
iteration one vectorised pass over the simulated rounds. Only `fit_means` takes derivatives, by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ForedraftError
from .process import AcceptanceProcess, GaussianAcceptance, walk_to_end

_LAGS = 8
_ITERATIONS = 18
_DAMPING = 0.45
_CORRELATION_LENS = (2, 4, 8, 16, 32, 64, 128)
_MIN_ROUNDS_PER_REQUEST = 5
MIN_REQUESTS = 8
MIN_ROUNDS = 200
"""A fit of shares needs at least this many requests, and this many rounds over all requests."""
_SAMPLE_POSITIONS = 1 << 20
_USUAL = (512, 300)  # requests and their output, where a recording does not tell lengths


class AcceptanceFitError(ForedraftError):
    """Recorded rounds from which no process can be found; the message says what is wrong or missing."""


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Statistics of the rounds with the greatest step count of a set. A value that the recording cannot tell is NaN.

    mean_accept_length: tokens per round, bonus included, all rounds pooled: weighted by tokens
    request_mean:       mean over requests of their mean accept lengths: long outputs count as much as short ones
    conditional:        acceptance at depth 1 … steps, given that the drafts before were accepted
    lag_correlation:    correlation of the accept lengths of rounds i and i + 1, … i + 8 of one request, pooled over
                        requests
    request_p5, _p95:   percentiles of the requests' mean accept lengths (requests of at least 5 rounds)
    histogram:          share of rounds with 0 … steps correct drafts
    """

    steps: int
    num_requests: int
    num_rounds: int
    mean_accept_length: float
    request_mean: float
    conditional: tuple[float, ...]
    lag_correlation: tuple[float, ...]
    request_p5: float
    request_p95: float
    histogram: tuple[float, ...]

    @classmethod
    def of_rounds(cls, lens: np.ndarray, steps: int) -> RoundStatistics:
        """Compute them from accept lengths int [rounds, requests], 0 where a request has no such round, all
        of `steps` steps."""
        live = lens > 0
        num_rounds = int(live.sum())
        correct = lens[live] - 1
        counts = np.bincount(correct, minlength=steps + 1)[: steps + 1]
        per_request = live.sum(axis=0)
        means = lens.sum(axis=0) / np.maximum(per_request, 1)
        long_means = means[per_request >= _MIN_ROUNDS_PER_REQUEST]
        p5, p95 = np.percentile(long_means, [5, 95]) if len(long_means) else (np.nan, np.nan)
        lags = tuple(_correlation(lens, live, lag) for lag in range(1, _LAGS + 1))
        return cls(
            steps, lens.shape[1], num_rounds, float(correct.mean() + 1), float(means[per_request > 0].mean()),
            _conditional(counts), lags, float(p5), float(p95), tuple((counts / num_rounds).tolist()),
        )  # fmt: skip

    @classmethod
    def of_counts(cls, counts: np.ndarray) -> RoundStatistics:
        """Compute the statistics that follow from the numbers of rounds with 0 … steps correct drafts, [steps + 1]."""
        shares = counts / counts.sum()
        mean = float(shares @ np.arange(len(counts)) + 1)
        unknown = (np.nan,) * _LAGS
        return cls(
            len(counts) - 1, 0, int(counts.sum()), mean, np.nan, _conditional(counts), unknown,
            np.nan, np.nan, tuple(shares.tolist()),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AcceptanceFit:
    """A fitted process, and the statistics that it was fitted to.

    histogram_distance: total variation distance between recorded and simulated correct drafts per round, 0 … 1
    """

    process: GaussianAcceptance
    recorded: RoundStatistics
    simulated: RoundStatistics
    histogram_distance: float

    def report(self) -> str:
        """Describe the goodness of fit in four lines."""
        recorded, simulated = self.recorded, self.simulated
        return "\n".join(
            (
                f"{recorded.num_rounds} rounds of {recorded.num_requests} requests at {recorded.steps} steps",
                f"mean accept length {recorded.mean_accept_length:.3f} recorded, "
                f"{simulated.mean_accept_length:.3f} simulated; histograms differ by {self.histogram_distance:.3f}",
                f"lag-1 correlation {recorded.lag_correlation[0]:.3f} recorded, "
                f"{simulated.lag_correlation[0]:.3f} simulated",
                f"5th-95th percentile of requests {recorded.request_p5:.2f}-{recorded.request_p95:.2f} recorded, "
                f"{simulated.request_p5:.2f}-{simulated.request_p95:.2f} simulated",
            )
        )


def simulate_rounds(
    process: AcceptanceProcess, steps: int, num_requests: int = 1024, output_lens: np.ndarray | int = 384
) -> np.ndarray:
    """Simulate rounds of requests 0 … num_requests − 1 until each has its output:
    accept lengths int32 [rounds, requests], 0-padded."""
    lens = np.broadcast_to(np.asarray(output_lens, np.int64), num_requests)
    keys = np.arange(num_requests, dtype=np.uint64)
    runs = process.run_windows(keys, np.zeros(num_requests, np.int64), int(lens.max()))
    return walk_to_end(runs, steps, lens)


def mean_accept_length(process: AcceptanceProcess, steps: int) -> float:
    """Return the mean tokens of a round with these steps, bonus token included, over all rounds of usual requests."""
    lens = simulate_rounds(process, steps, *_USUAL)
    return float(lens.sum() / np.count_nonzero(lens))


def calibrate(
    start: GaussianAcceptance,
    conditional: Sequence[float],
    num_requests: int = 1024,
    output_lens: np.ndarray | int = 384,
    iterations: int = 8,
) -> GaussianAcceptance:
    """Return `start` with other position probabilities. With them, rounds of len(conditional) steps accept as
    `conditional` says at each depth.

    Each iteration multiplies the odds of a depth by the ratio of wanted and simulated odds. Deeper drafts keep the
    last value.
    """
    wanted = np.clip(np.asarray(conditional, float), 1e-4, 1 - 1e-4)
    steps = len(wanted)
    process = replace(start, conditional=tuple(wanted.tolist()))
    for _ in range(iterations):
        process, _ = _calibration_step(process, wanted, simulate_rounds(process, steps, num_requests, output_lens))
    return process


def fit(
    requests: np.ndarray, positions: np.ndarray, steps: np.ndarray, correct_drafts: np.ndarray, seed: int = 0
) -> AcceptanceFit:
    """Fit a process to recorded rounds: int [n] each, in any order; rounds of the greatest step count are used.

    request: any number that tells requests apart. position: output position at which the round began. Shares are
    found by their moments: the lag correlations, and the variance between requests' means (of which simulation has
    the same sampling noise, since it has the same output lengths). Errors: AcceptanceFitError.
    """
    lens, output_lens, most_steps = _recorded_rounds(requests, positions, steps, correct_drafts)
    recorded = RoundStatistics.of_rounds(lens, most_steps)
    sample = _sample(output_lens)
    best: tuple[GaussianAcceptance, RoundStatistics] | None = None
    least = np.inf
    for correlation_len in _CORRELATION_LENS:
        start = GaussianAcceptance((0.5,), seed, 0.05, 0.1, correlation_len)
        process = _fit_shares(recorded, start, sample, lens)
        simulated = RoundStatistics.of_rounds(simulate_rounds(process, most_steps, len(sample), sample), most_steps)
        error = float(np.sum(np.subtract(recorded.lag_correlation, simulated.lag_correlation) ** 2))
        if error < least:
            best, least = (process, simulated), error
    assert best is not None, "every error is a number"
    return _fit_of(best[0], recorded, best[1])


def fit_histograms(histograms: np.ndarray, start: GaussianAcceptance) -> AcceptanceFit:
    """Fit probabilities and `request_share` to the rounds of each request by their correct drafts: int [requests, steps
    + 1].

    The order of the rounds is not known, so `field_share` and `correlation_len` stay those of `start`. Errors:
    AcceptanceFitError.
    """
    histograms = histograms[histograms.sum(axis=1) > 0]
    rounds = histograms.sum(axis=1)
    _refuse_few(int(rounds.sum()), len(rounds), histograms.shape[1] - 1)
    lens = np.zeros((int(rounds.max()), len(rounds)), np.int32)
    by_length = np.broadcast_to(np.arange(1, histograms.shape[1] + 1), histograms.shape)
    for column, (values, counts) in enumerate(zip(by_length, histograms, strict=True)):
        lens[: rounds[column], column] = np.repeat(values, counts)
    steps = histograms.shape[1] - 1
    recorded = replace(RoundStatistics.of_rounds(lens, steps), lag_correlation=(np.nan,) * _LAGS)
    sample = _sample(lens.sum(axis=0, dtype=np.int64))
    process = _fit_shares(recorded, start, sample, lens)
    return _fit_of(
        process, recorded, RoundStatistics.of_rounds(simulate_rounds(process, steps, len(sample), sample), steps)
    )


def fit_counts(counts: np.ndarray, start: GaussianAcceptance) -> AcceptanceFit:
    """Fit probabilities to the number of rounds with 0 … steps correct drafts, [steps + 1]; all other values are those
    of `start`."""
    recorded = RoundStatistics.of_counts(counts)
    process = calibrate(start, recorded.conditional, *_USUAL)
    simulated = RoundStatistics.of_rounds(simulate_rounds(process, recorded.steps, *_USUAL), recorded.steps)
    return _fit_of(process, recorded, simulated)


def fit_means(
    means: Sequence[tuple[int, float]],
    start: GaussianAcceptance,
    drafted_as: Callable[[GaussianAcceptance], AcceptanceProcess] | None = None,
) -> tuple[GaussianAcceptance, tuple[float, ...]]:
    """Fit to mean accept lengths, (steps, length) each. Returns the process and its mean lengths, in the same order.

    logit p(d) = that of `start` + a + b · log d by Gauss-Newton; b = 0 if there is one step count only. The lengths are
    those of chains, or of what `drafted_as` makes of the process: of a tree (`GaussianAcceptance.for_tree`).
    """
    depths = np.arange(1, max(steps for steps, _ in means) + 1)
    base = np.array(start.conditional)[np.minimum(depths, len(start.conditional)) - 1]
    base = np.log(base / (1 - base))

    def of(point: np.ndarray) -> GaussianAcceptance:
        logits = np.clip(base + point[0] + point[1] * np.log(depths), -12, 12)
        return replace(start, conditional=tuple((1 / (1 + np.exp(-logits))).tolist()))

    def lengths(process: GaussianAcceptance) -> np.ndarray:
        drafted = process if drafted_as is None else drafted_as(process)
        simulated = {steps: mean_accept_length(drafted, steps) for steps in {steps for steps, _ in means}}
        return np.array([simulated[steps] for steps, _ in means])

    wanted = np.array([length for _, length in means])
    free = 1 if len({steps for steps, _ in means}) == 1 else 2
    point = np.zeros(2)
    for _ in range(_ITERATIONS):
        now = lengths(of(point))
        if np.abs(now - wanted).max() < 1e-4:
            break
        nudges = np.eye(2)[:free] * 0.05
        slopes = np.stack([(lengths(of(point + nudge)) - now) / 0.05 for nudge in nudges], axis=1)
        step = np.clip(np.linalg.lstsq(slopes, wanted - now, rcond=None)[0], -1, 1)
        point[:free] += step
        if np.abs(step).max() < 1e-4:
            break
    process = of(point)
    return process, tuple(lengths(process).tolist())


def _fit_of(process: GaussianAcceptance, recorded: RoundStatistics, simulated: RoundStatistics) -> AcceptanceFit:
    distance = 0.5 * float(np.abs(np.subtract(recorded.histogram, simulated.histogram)).sum())
    return AcceptanceFit(process, recorded, simulated, distance)


def _sample(output_lens: np.ndarray) -> np.ndarray:
    """Return output lengths to simulate. A few lengths are repeated; of too many positions an even selection is taken
    and cut."""
    output_lens = np.minimum(output_lens, _SAMPLE_POSITIONS // 128)
    most = min(2048, int(_SAMPLE_POSITIONS // output_lens.max()))
    if len(output_lens) > most:
        return output_lens[np.linspace(0, len(output_lens) - 1, most).astype(np.int64)]
    return np.tile(output_lens, -(-512 // len(output_lens)))[:most]


def _fit_shares(
    recorded: RoundStatistics, start: GaussianAcceptance, output_lens: np.ndarray, lens: np.ndarray
) -> GaussianAcceptance:
    """Fit the shares for one correlation length: move them and the probabilities together until variance and lag 1
    agree.

    Without a recorded correlation the field's share stays that of `start`. Steps are damped because probabilities and
    shares depend on each other. If the field carries most of the variance (n-gram drafting), full steps circle around
    the solution.
    """
    wanted = np.clip(np.asarray(recorded.conditional), 1e-3, 1 - 1e-3)
    wanted_variance, wanted_lag = _request_variance(lens), recorded.lag_correlation[0]
    request_share, field_share = start.request_share, start.field_share
    process = replace(start, conditional=tuple(wanted.tolist()))
    for _ in range(_ITERATIONS):
        rounds = simulate_rounds(process, recorded.steps, len(output_lens), output_lens)
        process, simulated = _calibration_step(process, wanted, rounds)
        variance, lag = max(_request_variance(rounds), 1e-6), simulated.lag_correlation[0]
        explained = max(request_share + 0.2 * field_share, 0.02)
        most = 0.9 if np.isfinite(wanted_lag) else min(0.9, 0.98 - field_share)
        request_share = float(np.clip(request_share + 0.5 * explained * (wanted_variance / variance - 1), 0.0, most))
        if np.isfinite(wanted_lag):
            field_share = float(np.clip(field_share + _DAMPING * (wanted_lag - lag), 0.0, 0.98 - request_share))
        process = replace(process, request_share=request_share, field_share=field_share)
    return calibrate(process, recorded.conditional, len(output_lens), output_lens, 4)


def _calibration_step(
    process: GaussianAcceptance, wanted: np.ndarray, rounds: np.ndarray
) -> tuple[GaussianAcceptance, RoundStatistics]:
    steps = len(wanted)
    simulated = RoundStatistics.of_rounds(rounds, steps)
    seen = np.clip(np.asarray(simulated.conditional), 1e-4, 1 - 1e-4)
    now = np.clip(np.asarray(process.conditional[:steps]), 1e-4, 1 - 1e-4)
    odds = now / (1 - now) * (wanted / (1 - wanted)) / (seen / (1 - seen))
    return replace(process, conditional=tuple((odds / (1 + odds)).tolist())), simulated


def _recorded_rounds(requests, positions, steps, correct_drafts) -> tuple[np.ndarray, np.ndarray, int]:
    """Return accept lengths [rounds, requests] in order of position, the output lengths, and the steps."""
    columns = [np.asarray(column).astype(np.int64) for column in (requests, positions, steps, correct_drafts)]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise AcceptanceFitError("requests, positions, steps and correct drafts must be columns of one length")
    requests, positions, steps, correct = columns
    if len(steps) == 0 or steps.max() < 1:
        raise AcceptanceFitError("no round with drafts: a fit needs rounds of at least 1 step")
    if correct.min() < 0 or (correct > steps).any():
        raise AcceptanceFitError("a round with more correct drafts than steps, or a negative number of them")
    most = int(steps.max())
    kept = steps == most
    requests, positions, correct = requests[kept], positions[kept], correct[kept]
    order = np.lexsort((positions, requests))
    requests, positions, correct = requests[order], positions[order], correct[order]
    _, first, count = np.unique(requests, return_index=True, return_counts=True)
    _refuse_few(len(requests), len(first), most)
    column = np.repeat(np.arange(len(first)), count)
    row = np.arange(len(requests)) - np.repeat(first, count)
    lens = np.zeros((int(count.max()), len(first)), np.int32)
    lens[row, column] = correct + 1
    return lens, lens.sum(axis=0, dtype=np.int64), most


def _refuse_few(num_rounds: int, num_requests: int, steps: int) -> None:
    if num_requests < MIN_REQUESTS or num_rounds < MIN_ROUNDS:
        raise AcceptanceFitError(
            f"{num_rounds} rounds of {num_requests} requests at {steps} steps: "
            f"a fit needs at least {MIN_ROUNDS} rounds of {MIN_REQUESTS} requests"
        )


def _conditional(counts: np.ndarray) -> tuple[float, ...]:
    """Return the acceptance at depth 1 … steps, given the drafts before, of rounds with 0 … steps correct drafts."""
    reached = np.cumsum(counts[::-1])[::-1]
    return tuple((reached[1:] / np.maximum(reached[:-1], 1)).tolist())


def _request_variance(lens: np.ndarray) -> float:
    """Return the variance of the requests' mean accept lengths, each weighted by its rounds."""
    rounds = np.count_nonzero(lens, axis=0)
    means = lens.sum(axis=0) / np.maximum(rounds, 1)
    mean = np.average(means, weights=rounds)
    return float(np.average((means - mean) ** 2, weights=rounds))


def _correlation(lens: np.ndarray, live: np.ndarray, lag: int) -> float:
    """Return the correlation between a round and the one `lag` later of the same request, over all such pairs;
    0 if none varies."""
    pairs = live[lag:]
    before, after = lens[:-lag][pairs].astype(float), lens[lag:][pairs].astype(float)
    if len(before) < 2 or before.std() == 0 or after.std() == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])
