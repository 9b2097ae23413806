"""When requests arrive: renewal processes at a rate that may change over time.

Arrivals are made in *operational time*, in which the mean gap is one unit whatever the rate, and carried to the clock
by the inverse of the cumulative rate Λ(t) = ∫ rate (Cox and Lewis, The Statistical Analysis of Series of Events, 1966,
§2.3):

    gap(i)   drawn by key (seed, arrival, i): exponential, Gamma of a given burstiness, or 1
    unit(i)  = gap(0) + … + gap(i)                      time(i) = Λ⁻¹(unit(i))

Gaps are integers of 2⁻³² units, so that their sum is exact and does not depend on how the stream is cut into chunks;
times are integer nanoseconds. Gap i is a function of its key alone, so a longer stream begins with the shorter one.
What a scenario may ask for is checked there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.draws import Purpose, normal, uniform

CHUNK_ARRIVALS = 65536
_UNIT = 2**32
_MAX_GAP = 2.0**20
_MAX_TIME_NS = float(2**62)


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Requests per second over time: straight lines between (times_s, rates), then the last rate, or the same again.

    times_s: strictly increasing, the first is 0. rates: one per time, none negative, some positive. period_s: if given,
    the curve repeats from then on; it is the last time.
    """

    times_s: tuple[float, ...]
    rates: tuple[float, ...]
    period_s: float | None = None
    _cumulative: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times, rates = np.array(self.times_s), np.array(self.rates)
        areas = np.diff(times) * (rates[:-1] + rates[1:]) / 2
        object.__setattr__(self, "_cumulative", (0.0, *np.cumsum(areas).tolist()))

    @classmethod
    def constant(cls, rate: float) -> RateCurve:
        """Return a constant rate of `rate` requests per second."""
        return cls((0.0,), (rate,))

    @classmethod
    def table(cls, times_s: Sequence[float], rates: Sequence[float], period_s: float | None = None) -> RateCurve:
        """Return straight lines between points; with `period_s` (the last time) they repeat."""
        return cls(tuple(times_s), tuple(rates), period_s)

    @classmethod
    def day(cls, mean_rate: float, amplitude: float, peak_hour: float = 14.0, period_s: float = 86400.0) -> RateCurve:
        """Return a sinusoid around the mean, of `amplitude` (0 … 1) times it, in 288 straight pieces.

        The peak is at `peak_hour` of a period that counts as 24 hours.
        """
        phase = np.arange(289) / 288
        rates = mean_rate * (1 + amplitude * np.cos(2 * np.pi * (phase - peak_hour / 24)))
        return cls(tuple((phase * period_s).tolist()), tuple(np.maximum(rates, 0.0).tolist()), period_s)

    def times_of(self, units: np.ndarray) -> np.ndarray:
        """Return Λ⁻¹, in seconds: float64 like `units`, infinite where the curve ends at rate 0 before
        that many arrivals."""
        cumulative, times, rates = np.array(self._cumulative), np.array(self.times_s), np.array(self.rates)
        cycles = 0.0
        if self.period_s is not None:
            cycles = np.floor(units / cumulative[-1])
            units = units - cycles * cumulative[-1]
        slopes = np.append(np.diff(rates) / np.diff(times), 0.0)
        i = np.searchsorted(cumulative, units, side="right") - 1
        if self.period_s is not None:
            i = np.minimum(i, len(times) - 2)
        area, rate = units - cumulative[i], rates[i]
        # The root of slope/2 · x² + rate · x = area in the form that neither divides by a zero slope nor cancels.
        root = np.sqrt(np.maximum(rate * rate + 2 * slopes[i] * area, 0.0))
        with np.errstate(divide="ignore", invalid="ignore"):
            within = np.where(area > 0, 2 * area / (rate + root), 0.0)
        return times[i] + within + cycles * (self.period_s or 0.0)


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Arrivals at `rate`, with gaps of a given coefficient of variation `burstiness` (standard deviation / mean), 0 or
    0.05 … 20.

    1 is Poisson, greater values come in bursts, smaller ones more evenly, 0 like a clock (first arrival at time 0).
    """

    rate: RateCurve
    burstiness: float = 1.0

    @classmethod
    def poisson(cls, rate: RateCurve | float) -> ArrivalProcess:
        return cls(_curve(rate))

    @classmethod
    def gamma(cls, rate: RateCurve | float, burstiness: float) -> ArrivalProcess:
        return cls(_curve(rate), burstiness)

    @classmethod
    def evenly(cls, rate: RateCurve | float) -> ArrivalProcess:
        return cls(_curve(rate), 0.0)

    def chunks(
        self, seed: int, num_arrivals: int | None = None, stop_s: float | None = None, chunk: int = CHUNK_ARRIVALS
    ) -> Iterator[np.ndarray]:
        """Yield arrival times, int64 ns, ascending, in arrays of at most `chunk`.

        Ends after `num_arrivals`, before the first arrival at or after `stop_s`, or when the rate stays 0; without any
        of these, never.
        """
        stop_ns = _MAX_TIME_NS if stop_s is None else min(stop_s * 1e9, _MAX_TIME_NS)
        first = base = 0
        while num_arrivals is None or first < num_arrivals:
            count = chunk if num_arrivals is None else min(chunk, num_arrivals - first)
            gaps = np.rint(np.minimum(self.gaps(seed, first, count), _MAX_GAP) * _UNIT).astype(np.int64)
            units = np.cumsum(gaps) + base
            base = int(units[-1])
            times = self.rate.times_of(units * (1.0 / _UNIT)) * 1e9
            inside = int(np.searchsorted(times, stop_ns, side="left"))
            if inside:
                yield np.rint(times[:inside]).astype(np.int64)
            if inside < count:
                return
            first += count

    def gaps(self, seed: int, first: int, count: int) -> np.ndarray:
        """Return gaps first … first + count − 1 in operational time, mean 1: float64 [count]."""
        index = np.arange(first, first + count, dtype=np.uint64)
        if self.burstiness == 0.0:
            return (index > 0).astype(np.float64)
        if self.burstiness == 1.0:
            return -np.log1p(-uniform(seed, Purpose.ARRIVAL, index, 0))
        shape = self.burstiness**-2
        return _gamma(seed, index, shape) / shape


def _curve(rate: RateCurve | float) -> RateCurve:
    return rate if isinstance(rate, RateCurve) else RateCurve.constant(rate)


def _gamma(seed: int, index: np.ndarray, shape: float) -> np.ndarray:
    """Return Gamma numbers of this shape and scale 1 by key: float64 like index.

    Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000); shapes below 1 by
    their §6 (a number of shape + 1 times a uniform to the power 1 / shape). Attempt n of a key is draw n of that
    key, so a rejection moves no other number. An attempt fails with a chance below 5 %.
    """
    boosted = shape if shape >= 1.0 else shape + 1.0
    d = boosted - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    out = np.empty(len(index))
    left = np.arange(len(index))
    attempt = 0
    while len(left):
        attempt += 1
        keys = index[left]
        x = normal(seed, Purpose.ARRIVAL, keys, 2 * attempt)
        coin = uniform(seed, Purpose.ARRIVAL, keys, 2 * attempt + 1)
        v = (1.0 + c * x) ** 3
        positive = v > 0
        log_v = np.log(np.where(positive, v, 1.0))
        accepted = positive & (np.log(np.maximum(coin, 1e-300)) < 0.5 * x * x + d * (1.0 - v + log_v))
        out[left[accepted]] = d * v[accepted]
        left = left[~accepted]
    if shape < 1.0:
        out *= (1.0 - uniform(seed, Purpose.ARRIVAL, index, 0)) ** (1.0 / shape)
    return out
