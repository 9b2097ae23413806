"""Fits acceptance processes to recordings of rounds, and reports the goodness of fit.

A recording tells what happened in *rounds*: at depth d, how often the d-th draft was accepted. A process is defined by
*positions*, and rounds are a biased sample of positions (see `process.py`). `calibrate` finds the position
probabilities whose rounds look as recorded; `fit` finds the shares and the correlation length as well.

Both are method-of-moments estimates by simulation on fixed keys (McFadden, Econometrica 57, 1989): deterministic, no
derivative, each iteration one vectorised pass over the simulated rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ForetokenError
from .process import AcceptanceProcess, GaussianAcceptance, walk_to_end

_LAGS = 8
_ITERATIONS = 18
_DAMPING = 0.45
_CORRELATION_LENS = (2, 4, 8, 16, 32, 64, 128)
_MIN_ROUNDS_PER_REQUEST = 5


class AcceptanceFitError(ForetokenError):
    """Recorded rounds from which no process can be found; the message says what is wrong or missing."""


@dataclass(frozen=True, slots=True)
class RoundStatistics:
    """Statistics of a set of rounds; of those with the greatest step count only.

    mean_accept_length: tokens per round, bonus included, all rounds pooled
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
    conditional: tuple[float, ...]
    lag_correlation: tuple[float, ...]
    request_p5: float
    request_p95: float
    histogram: tuple[float, ...]

    @classmethod
    def of_rounds(cls, lens: np.ndarray, steps: int) -> RoundStatistics:
        """Compute them from accept lengths int [rounds, requests], 0 where a request has no such round, all of `steps` steps."""
        live = lens > 0
        num_rounds = int(live.sum())
        correct = lens[live] - 1
        counts = np.bincount(correct, minlength=steps + 1)[: steps + 1]
        reached = np.cumsum(counts[::-1])[::-1]
        conditional = reached[1:] / np.maximum(reached[:-1], 1)
        per_request = live.sum(axis=0)
        means = lens.sum(axis=0)[per_request >= _MIN_ROUNDS_PER_REQUEST] / np.maximum(
            per_request[per_request >= _MIN_ROUNDS_PER_REQUEST], 1
        )
        p5, p95 = np.percentile(means, [5, 95]) if len(means) else (np.nan, np.nan)
        lags = tuple(_correlation(lens, live, lag) for lag in range(1, _LAGS + 1))
        return cls(
            steps, lens.shape[1], num_rounds, float(correct.mean() + 1), tuple(conditional.tolist()), lags,
            float(p5), float(p95), tuple((counts / num_rounds).tolist()),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AcceptanceFit:
    """A fitted process, and the statistics it was fitted to.

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
    """Simulate rounds of requests 0 … num_requests − 1 until each has its output: accept lengths int32 [rounds, requests], 0-padded."""
    lens = np.broadcast_to(np.asarray(output_lens, np.int64), num_requests)
    keys = np.arange(num_requests, dtype=np.uint64)
    runs = process.run_windows(keys, np.zeros(num_requests, np.int64), int(lens.max()))
    return walk_to_end(runs, steps, lens)


def calibrate(
    start: GaussianAcceptance,
    conditional: Sequence[float],
    num_requests: int = 1024,
    output_lens: np.ndarray | int = 384,
    iterations: int = 8,
) -> GaussianAcceptance:
    """Return `start` with the position probabilities whose rounds of len(conditional) steps accept as given, depth by depth.

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
    copies = -(-512 // len(output_lens))
    sample = np.tile(output_lens, copies)[:2048]
    best, least = None, np.inf
    for correlation_len in _CORRELATION_LENS:
        process = _fit_shares(recorded, correlation_len, sample, lens, seed)
        simulated = RoundStatistics.of_rounds(simulate_rounds(process, most_steps, len(sample), sample), most_steps)
        error = float(np.sum(np.subtract(recorded.lag_correlation, simulated.lag_correlation) ** 2))
        if error < least:
            best, least = (process, simulated), error
    process, simulated = best
    distance = 0.5 * float(np.abs(np.subtract(recorded.histogram, simulated.histogram)).sum())
    return AcceptanceFit(process, recorded, simulated, distance)


def _fit_shares(
    recorded: RoundStatistics, correlation_len: int, output_lens: np.ndarray, lens: np.ndarray, seed: int
) -> GaussianAcceptance:
    """Fit the shares for one correlation length: move them and the probabilities together until variance and lag 1 agree.

    Steps are damped: probabilities and shares answer for each other's last move, and where the field carries most of
    the variance (n-gram drafting) full steps circle around the solution.
    """
    wanted = np.clip(np.asarray(recorded.conditional), 1e-3, 1 - 1e-3)
    wanted_variance, wanted_lag = _request_variance(lens), recorded.lag_correlation[0]
    request_share, field_share = 0.05, 0.1
    process = GaussianAcceptance(tuple(wanted.tolist()), seed, request_share, field_share, correlation_len)
    for _ in range(_ITERATIONS):
        rounds = simulate_rounds(process, recorded.steps, len(output_lens), output_lens)
        process, simulated = _calibration_step(process, wanted, rounds)
        variance, lag = max(_request_variance(rounds), 1e-6), simulated.lag_correlation[0]
        explained = max(request_share + 0.2 * field_share, 0.02)
        request_share = float(np.clip(request_share + 0.5 * explained * (wanted_variance / variance - 1), 0.0, 0.9))
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
    if len(first) < 8 or len(requests) < 200:
        raise AcceptanceFitError(
            f"{len(requests)} rounds of {len(first)} requests at {most} steps: "
            "a fit needs at least 200 rounds of 8 requests"
        )
    column = np.repeat(np.arange(len(first)), count)
    row = np.arange(len(requests)) - np.repeat(first, count)
    lens = np.zeros((int(count.max()), len(first)), np.int32)
    lens[row, column] = correct + 1
    return lens, lens.sum(axis=0, dtype=np.int64), most


def _request_variance(lens: np.ndarray) -> float:
    """Return the variance of the requests' mean accept lengths, each weighted by its rounds."""
    rounds = np.count_nonzero(lens, axis=0)
    means = lens.sum(axis=0) / np.maximum(rounds, 1)
    mean = np.average(means, weights=rounds)
    return float(np.average((means - mean) ** 2, weights=rounds))


def _correlation(lens: np.ndarray, live: np.ndarray, lag: int) -> float:
    """Return the correlation between a round and the one `lag` later of the same request, over all such pairs; 0 if none varies."""
    pairs = live[lag:]
    before, after = lens[:-lag][pairs].astype(float), lens[lag:][pairs].astype(float)
    if len(before) < 2 or before.std() == 0 or after.std() == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])
