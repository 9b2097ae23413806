"""Arrival processes: their rates and burstiness, and that neither chunks nor length change an arrival."""

import numpy as np
import pytest
from foredraft.sim.workload.arrivals import ArrivalProcess, RateCurve

PROCESSES = {
    "poisson": ArrivalProcess.poisson(20.0),
    "bursty": ArrivalProcess.gamma(20.0, 2.5),
    "even": ArrivalProcess.gamma(20.0, 0.4),
    "clock": ArrivalProcess.evenly(20.0),
    "day": ArrivalProcess.poisson(RateCurve.day(20.0, 0.7, period_s=600.0)),
}


def times_of(process, seed=3, **arguments):
    return np.concatenate([np.empty(0, np.int64), *process.chunks(seed, **arguments)])


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
class TestEveryProcess:
    def test_chunks_and_length_change_nothing(self, process):
        whole = times_of(process, num_arrivals=2000)
        assert whole.dtype == np.int64
        assert (np.diff(whole) >= 0).all()
        np.testing.assert_array_equal(times_of(process, num_arrivals=2000, chunk=37), whole)
        np.testing.assert_array_equal(times_of(process, num_arrivals=500), whole[:500])

    def test_the_mean_rate(self, process):
        times = times_of(process, num_arrivals=60_000)
        assert len(times) / (times[-1] / 1e9) == pytest.approx(20.0, rel=0.03)

    def test_stop_ends_before_that_time(self, process):
        whole = times_of(process, num_arrivals=2000)
        stop_s = 40.0
        np.testing.assert_array_equal(times_of(process, stop_s=stop_s, chunk=100), whole[whole < stop_s * 1e9])


@pytest.mark.parametrize("stop_s", [None, 1e300])
@pytest.mark.parametrize("rate", [1e-100, 1e-12, 3e-8])
@pytest.mark.parametrize("burstiness", [0.0, 1.0, 20.0])
def test_times_that_no_clock_can_count_are_no_arrivals(rate, burstiness, stop_s):
    times = times_of(ArrivalProcess.gamma(rate, burstiness), num_arrivals=1000, stop_s=stop_s)
    assert len(times) < 1000 and (times >= 0).all() and (times < 2**62).all() and (np.diff(times) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.0, 0.3, 1.0, 1.7, 4.0])
def test_burstiness_is_the_coefficient_of_variation(burstiness):
    gaps = np.diff(times_of(ArrivalProcess.gamma(5.0, burstiness), num_arrivals=100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.03, abs=1e-6)


def test_a_clock_ticks_from_zero():
    assert times_of(ArrivalProcess.evenly(4.0), num_arrivals=4).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]


def expected_arrivals(curve: RateCurve, time_s: float) -> float:
    """The area under the curve from 0 to `time_s`."""
    cycles, rest = divmod(time_s, curve.period_s) if curve.period_s is not None else (0.0, time_s)

    def area(until: float) -> float:
        times = [t for t in curve.times_s if t < until] + [until]
        return float(np.trapezoid(np.interp(times, curve.times_s, curve.rates), times))

    return (cycles * area(curve.period_s) if cycles else 0.0) + area(rest)


class TestRateCurve:
    def test_a_ramp_by_hand(self):
        """From 0 to 10 per second in 20 s: t²/4 arrivals until then, 10 per second after 100 of them."""
        curve = RateCurve.table((0.0, 20.0), (0.0, 10.0))
        assert curve.times_of(np.array([0.0, 1.0, 25.0, 100.0, 110.0])) == pytest.approx([0, 2, 10, 20, 21])

    @pytest.mark.parametrize(
        "curve",
        [
            RateCurve.constant(3.0),
            RateCurve.table((0.0, 50.0), (9.0, 1.0)),
            RateCurve.day(5.0, 1.0),
            RateCurve.table((0, 10, 11, 30), (2, 2, 0, 8)),
            RateCurve.table((0, 5, 6, 10), (0, 4, 0, 0), period_s=10),
        ],
        ids=["constant", "ramp", "day", "table", "repeated"],
    )
    def test_the_inverse_is_an_inverse(self, curve):
        units = np.linspace(0.01, 500.0, 333)
        again = [expected_arrivals(curve, time_s) for time_s in curve.times_of(units)]
        assert again == pytest.approx(units, rel=1e-6, abs=1e-6)

    def test_a_day_is_busy_at_its_peak(self):
        curve = RateCurve.day(10.0, 0.5, peak_hour=14.0)
        hours = times_of(ArrivalProcess.poisson(curve), stop_s=86400.0 / 8 * 8, num_arrivals=10**6) / 3.6e12
        counts = np.histogram(hours, bins=24, range=(0, 24))[0] / 3600
        assert counts[13:15].mean() == pytest.approx(15.0, rel=0.03)
        assert counts[1:3].mean() == pytest.approx(5.0, rel=0.03)

    def test_arrivals_end_where_the_rate_ends(self):
        process = ArrivalProcess.evenly(RateCurve.table((0.0, 8.0), (10.0, 0.0)))
        times = times_of(process)
        assert len(times) == 41
        assert (times[0], times[-1]) == (0, 8_000_000_000)
