"""A synthetic workload that resembles a trace: the keys of a scenario, found from the trace, and how near it comes.

Arrivals   a constant rate, or a curve of straight pieces where the rate changes by more than its own noise
           (quasi-likelihood BIC); gaps as bursty as make variance over mean of the arrivals in windows nearest to the
           trace's
Lengths    lognormal where that is near enough, else the recorded distribution in `SHARES`
Prefixes   groups of equal beginnings whose hit rates, in caches of several sizes, are nearest to the trace's
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ...core.draws import Purpose
from ...core.prompt import MAX_PROMPT_LENGTH
from ..load import make_workload
from ..scenario_file import scenario_with
from ..workload.arrivals import ArrivalProcess, RateCurve
from ..workload.description import Columns, Description, counts_in, describe, dispersion_of
from ..workload.lengths import FixedLength, LengthDistribution, LognormalLength
from ..workload.workload import TimedRequest

MOST_DISTANCE = 0.05
"""A lognormal replaces recorded lengths if it changes no share of them by more than this (Kolmogorov-Smirnov)."""
SHARES = np.unique(np.concatenate([np.arange(46) / 50, np.arange(90, 100) / 100, np.arange(990, 1000) / 1000, [1.0]]))
"""Bounds of the classes of an empirical length: finer towards the tail. The mean of a class stands for it, so the
overall mean does not change."""
CURVE_PIECES = (1, 2, 4, 8, 16, 32)
CURVE_BUCKETS = 128
MOST_FITTED = 50_000  # requests from which prefixes are fitted, the first ones
ZIPF = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # tried
CACHE_SHARES = (64, 16, 4)  # of the distinct tokens: caches whose hit rates count in the fit, beside an infinite one
LEAST_DISPERSION = 1e-3  # a clock has 0


@dataclass(frozen=True, slots=True)
class Synthesis:
    """A synthetic workload beside what it was made from.

    Attributes:
        table: The table `workload` of a scenario.
        description: The synthetic workload, drawn once, described as the trace was.
        distance: By "prompt" and "output" the greatest share of lengths by which the two distributions differ
            (Kolmogorov-Smirnov).
        losses: What the synthetic workload leaves out of the trace, in sentences.
    """

    table: Mapping[str, Any]
    description: Description
    distance: Mapping[str, float]
    losses: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        parts = {"workload": self.table, "distance": self.distance, "losses": list(self.losses)}
        return {**parts, "description": self.description.to_json()}


def synthesize(source: Iterable[TimedRequest], described: Description, columns: Columns) -> Synthesis:
    """Fit a synthetic workload to an open-loop one, which was described. `source` is read again for its prefixes."""
    table: dict[str, Any] = {"num_requests": described.num_requests, **_arrivals(described, columns.times_ns)}
    table["prompt"] = _lengths(columns.prompt_lens, Purpose.LENGTH)
    table["output"] = _lengths(columns.output_lens, Purpose.OUTPUT_LENGTH)
    if described.reuse is not None:
        table["prefixes"] = _prefixes(source, described, columns.prompt_lens)
    caches = described.reuse.caches if described.reuse is not None else ()
    made, drawn = describe(synthetic(table), tuple(caches))
    pairs = {"prompt": (columns.prompt_lens, drawn.prompt_lens), "output": (columns.output_lens, drawn.output_lens)}
    distance = {name: ks_distance(*pair) for name, pair in pairs.items()}
    return Synthesis(table, made, distance, tuple(_losses(described, made)))


def synthetic(table: Mapping[str, Any]) -> Iterable[TimedRequest]:
    """Return the requests of a table `workload`."""
    return make_workload(scenario_with({"workload": dict(table)}, {}), MAX_PROMPT_LENGTH)


def ks_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the greatest difference of two empirical distribution functions. int64 [n], int64 [m]."""
    values = np.unique(np.concatenate([one, other]))
    shares = (np.searchsorted(np.sort(part), values, side="right") / len(part) for part in (one, other))
    return float(np.abs(np.subtract(*shares)).max())


# -- arrivals ---------------------------------------------------------------------------------------------------------


def _arrivals(described: Description, times_ns: np.ndarray) -> dict[str, Any]:
    found = described.arrivals
    if found.rate is None or found.gap_cv is None:
        return {"rate": 1e9}  # all at once
    rate = _rounded(found.rate)
    if found.gap_cv < 0.05 and found.tick_s is None:
        return {"arrivals": "constant", "rate": rate}
    curve = _curve(times_ns, found.tick_s or 0.0)
    shape = RateCurve.constant(found.rate)
    table: dict[str, Any] = {"arrivals": "poisson", "rate": rate}
    if curve is not None:
        table = {"arrivals": "curve", "rate": rate, "curve": curve, "period_s": round(found.span_s, 3)}
        shape = RateCurve.table(
            np.linspace(0, found.span_s, len(curve)).tolist(), [found.rate * part for part in curve], found.span_s
        )
    burstiness = _burstiness(shape, found.dispersion, len(times_ns))
    if burstiness != 1.0:
        table["burstiness"] = burstiness
        if curve is None:
            table["arrivals"] = "gamma"
    return table


def _curve(times_ns: np.ndarray, tick_s: float) -> list[float] | None:
    """Return rates relative to their mean, between straight pieces of equal length;
    None if a constant rate explains as much."""
    span_s = (times_ns[-1] - times_ns[0]) / 1e9
    buckets = int(min(CURVE_BUCKETS, len(times_ns) // 8, span_s / tick_s if tick_s else CURVE_BUCKETS))
    pieces = [count for count in (0, *CURVE_PIECES) if 4 * count <= buckets]
    if len(pieces) < 2:
        return None
    counts = np.histogram(times_ns, np.linspace(times_ns[0], times_ns[-1], buckets + 1))[0]
    middles = (np.arange(buckets) + 0.5) / buckets
    fits: list[tuple[int, np.ndarray, float]] = []
    for count in pieces:
        if count:
            distances = np.abs(middles[:, None] * count - np.arange(count + 1))
            basis = np.maximum(1 - distances, 0.0)
        else:
            basis = np.ones((buckets, 1))
        heights = np.maximum(np.linalg.lstsq(basis, counts.astype(float), rcond=None)[0], 0.0)
        fits.append((count, heights, float(((counts - basis @ heights) ** 2).sum() / counts.mean())))
    noise = fits[-1][2] / (buckets - fits[-1][0] - 1) or 1.0
    count, heights, _ = min(fits, key=lambda fit: fit[2] / noise + (fit[0] + 1) * np.log(buckets))
    if not count:
        return None
    mean = (heights.sum() - (heights[0] + heights[-1]) / 2) / count
    return [_rounded(height / mean) for height in heights.tolist()]


def _burstiness(shape: RateCurve, wanted: Mapping[float, float], num_arrivals: int) -> float:
    """Return the coefficient of variation of gaps with which dispersions in all windows are nearest to those wanted."""
    if not wanted:
        return 1.0

    def dispersion(value: float) -> dict[float, float]:
        chunks = ArrivalProcess.gamma(shape, value).chunks(0, num_arrivals)
        times = np.concatenate(list(chunks))
        return dispersion_of({window: counts_in(times, window) for window in wanted})

    def distance(value: float) -> float:
        found = dispersion(value)
        return sum(_log_ratio(found[w], wanted[w]) ** 2 for w in wanted if w in found)

    poisson = dispersion(1.0)
    windows = {w: shape_s // w for w in wanted if (shape_s := num_arrivals / max(shape.rates)) and w in poisson}
    if all(abs(_log_ratio(poisson[w], wanted[w])) < 2 * (2 / max(count, 1)) ** 0.5 for w, count in windows.items()):
        return 1.0
    low, high = np.log(0.05), np.log(20.0)
    for _ in range(3):
        grid = np.linspace(low, high, 9)
        place = int(np.argmin([distance(float(np.exp(value))) for value in grid]))
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, 8)]
    return round(float(np.exp(grid[place])), 2)


def _log_ratio(one: float, other: float) -> float:
    return float(np.log(max(one, LEAST_DISPERSION) / max(other, LEAST_DISPERSION)))


# -- lengths ----------------------------------------------------------------------------------------------------------


def _lengths(lengths: np.ndarray, purpose: int) -> dict[str, Any]:
    least, greatest = int(lengths.min()), int(lengths.max())
    if least == greatest:
        return {"kind": "fixed", "value": least}
    logs = np.log(lengths)
    sigma = float(logs.std())
    mean = _rounded(float(np.exp(logs.mean() + sigma**2 / 2)))
    lognormal = LognormalLength(mean, _rounded(sigma), least, greatest)
    if ks_distance(lengths, _drawn(lognormal, purpose, len(lengths))) <= MOST_DISTANCE:
        return {"kind": "lognormal", "mean": mean, "sigma": lognormal.sigma, "low": least, "high": greatest}
    ordered = np.sort(lengths)
    bounds = np.unique(np.rint(SHARES * len(ordered)).astype(int))
    means = np.add.reduceat(ordered, bounds[:-1]) / np.diff(bounds)
    merged: Counter[int] = Counter()
    for value, weight in zip(np.rint(means).astype(int).tolist(), np.diff(bounds).tolist(), strict=True):
        merged[value] += weight
    return {"kind": "empirical", "values": list(merged), "weights": list(merged.values())}


def _drawn(lengths: LengthDistribution | FixedLength, purpose: int, count: int) -> np.ndarray:
    return lengths.draw(0, purpose, np.arange(count, dtype=np.uint64))


# -- prefixes ---------------------------------------------------------------------------------------------------------


def _prefixes(source: Iterable[TimedRequest], described: Description, lens: np.ndarray) -> dict[str, Any]:
    """Return the groups of shared prefixes whose hit rates, over the first requests, are nearest to the trace's."""
    first = list(islice(source, MOST_FITTED))
    reuse = described.reuse
    assert reuse is not None, "asked only of a workload that says what its prompts contain"
    sizes = [max(reuse.distinct_tokens // share, 1) for share in CACHE_SHARES]
    wanted, _ = describe(first, sizes)
    assert wanted.reuse is not None
    target = np.array([wanted.reuse.caches[size] for size in sizes] + [wanted.reuse.infinite])
    lens = lens[: len(first)]
    tried: list[tuple[float, dict[str, Any]]] = []
    for length in _doublings(64, max(int(lens.max()) - 1, 64)):
        means = _mean_parts(length, lens)
        for groups in _doublings(1, len(first)):
            for zipf in ZIPF:
                found = [_hit_rate(groups, zipf, *means, len(first), size) for size in (*sizes, np.inf)]
                distance = float(((np.array(found) - target) ** 2).sum())
                tried.append((distance, {"groups": groups, "length": length, "zipf": zipf}))
    return min(tried, key=lambda one: one[0])[1]


def _doublings(low: int, high: int) -> list[int]:
    return [low << power for power in range((high // low).bit_length())]


def _mean_parts(length: int, prompt_lens: np.ndarray) -> tuple[float, float]:
    """Return the mean tokens of a prompt that belong to its prefix, and those that are its own."""
    shared = float(np.minimum(length, prompt_lens - 1).mean())
    return shared, float(prompt_lens.mean()) - shared


def _hit_rate(groups: int, zipf: float, shared: float, own: float, count: int, cache_tokens: float) -> float:
    """Return the share of the tokens of `count` prompts that are found; `shared` and `own` are the mean tokens of a
    prompt's parts.

    By the characteristic time of a least-recently-used cache (Che, Tung, Wang: "Hierarchical web caching systems", IEEE
    JSAC 20, 2002). A prefix is found if it occurred among the last T requests, and T requests fill the cache.
    """
    ranks = np.unique(np.geomspace(1, groups + 1, min(groups, 100) + 1).astype(np.int64))
    alike = np.diff(ranks)  # groups whose popularity is taken as that of the middle one
    chance = ((ranks[:-1] + ranks[1:] - 1) / 2) ** -zipf
    chance /= (alike * chance).sum()

    def held(requests: float) -> float:
        """Return the tokens of so many successive requests, each prefix counted once."""
        return requests * own + shared * float((alike * -np.expm1(-chance * requests)).sum())

    low, high = 0.0, float(count)
    if held(high) > cache_tokens:
        while high - low > 1e-2 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if held(middle) <= cache_tokens else (low, middle)
    # The mean over requests: the first ones, up to T, have fewer before them.
    began = high + np.expm1(-chance * high) / chance
    found = began + (count - high) * -np.expm1(-chance * high)
    return float((alike * chance * found).sum() / count) * shared / (shared + own)


# -- what is lost -----------------------------------------------------------------------------------------------------


def _losses(described: Description, made: Description) -> Iterable[str]:
    correlation = described.length_correlation
    if correlation is not None and abs(correlation) > 2 / described.num_requests**0.5:
        yield f"the correlation of prompt and output lengths ({correlation:+.2f}): they are drawn independently"
    if described.reuse is None:
        yield "prefix reuse, of which the trace says nothing: no prompt begins like another"
    elif made.reuse is not None:
        yield "prefixes that grow from turn to turn: every request of a group shares the same tokens"
    if described.sessions is not None:
        yield f"its {described.sessions:,} sessions: requests belong to none"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
