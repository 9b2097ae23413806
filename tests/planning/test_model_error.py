"""Loads and numbers of engines if times are not as simulated, against services whose times can be made longer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest
from foredraft.planning.candidates.candidate import base_tables, make_candidates
from foredraft.planning.confidence.comparison import curve_of, curve_of_counts
from foredraft.planning.confidence.model_error import LimitCurve, SimulationErrors, count_range, load_range
from foredraft.planning.demand.question import PlanQuestion
from foredraft.planning.plan import Plan
from foredraft.planning.search.counts import least_count
from foredraft.planning.search.judge import SearchFinding
from foredraft.planning.search.loads import greatest_load
from foredraft.planning.search.running import run_searches
from foredraft.planning.slo import parse_slo
from foredraft.planning.trial import run_trial
from foredraft.sim.cost.deployments.evidence import REQUEST, TPOT, TTFT, Evidence, Interval
from foredraft.sim.scenario_file import load_scenario
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search import Service, trial

LIMIT = parse_slo("ttft_p99<100ms")
SURE = Interval(1.0, 1.0)
SERVICE_MS = 10.0


def queue_ms(load: float, longer: float = 1.0) -> float:
    """Milliseconds that a request spends in a queue with one server: whose service may be longer, which makes the load
    higher and the times longer."""
    busy = load * longer * SERVICE_MS / 1000
    return longer * SERVICE_MS / (1 - busy) if busy < 1 else math.inf


def search(time_ms: Callable[[float], float], start: float = 50.0, tolerance: float = 0.03) -> SearchFinding:
    service = Service(lambda run: trial(time_ms(run["load"])))
    ((_, found),) = run_searches({0: greatest_load({}, "load", start, LIMIT, range(2), tolerance)}, service)
    return found


@settings(max_examples=40)
@given(st.floats(0.75, 1.5), st.floats(20.0, 99.0))
def test_the_range_is_what_a_service_with_other_times_holds(longer: float, start: float):
    """The ends are those of two more searches, in which the service takes so much longer or shorter."""
    found = search(queue_ms, start)
    rough = search(lambda load: 0.9 * queue_ms(load), 20.0, 0.1)
    curve = curve_of(found, rough, 1.0, 1.0)
    ends = Interval(min(1.0, longer), max(1.0, longer))
    low, high = load_range(curve, found.value, SimulationErrors(ends, (ends,)))
    least, most = (search(lambda load, end=end: queue_ms(load, end)).value for end in (ends.high, ends.low))
    assert low == pytest.approx(least, rel=0.1)  # beyond the loads that were searched
    assert high == pytest.approx(most, rel=0.05)


def test_the_first_round_gives_the_shape_beyond_the_last():
    """Its runs hold more, since they are shorter; what it says is by how much the latency falls at half the load."""
    fine = LimitCurve.of({load: [math.log(load / 10)] for load in (9.9, 10.1)})
    rough = LimitCurve.of(
        {load: [0.5 * math.log(load / 10) - 0.3] for load in (2.0, 5.0, 9.0, 12.0, 40.0)} | {50.0: [math.inf]}
    )
    curve = fine.extended(rough, math.log(9.9))
    assert (len(curve.loads), curve.wall) == (7, math.log(50.0))
    for level, load in (
        (0.5 * math.log(5 / 9.9) + math.log(0.99), 5.0),
        (0.5 * math.log(40 / 9.9) + math.log(0.99), 40.0),
    ):
        assert curve.greatest(0.0, [-level]) == pytest.approx(math.log(load))


def test_a_latency_may_be_longer_where_passes_are_right():
    found = search(lambda load: load**2)
    low, high = load_range(
        curve_of(found, None, 1.0, 1.0), found.value, SimulationErrors(SURE, (Interval(0.81, 1.21),))
    )
    assert found.value == pytest.approx(10.0, rel=0.01)
    assert (low, high) == (pytest.approx(10 / 1.1, rel=0.03), pytest.approx(10 / 0.9, rel=0.03))


def test_the_limit_that_is_met_first_decides():
    """A load of 10 takes all of the first limit and 0.9 of the second, whose latency may be 1.3 times as long."""
    tried = {
        load: [2 * math.log(load / 10), 2 * math.log(load / 10) + math.log(0.9)] for load in (5.0, 9.9, 10.1, 14.0)
    }
    low, high = load_range(LimitCurve.of(tried), 10.0, SimulationErrors(SURE, (SURE, Interval(1.0, 1.3))))
    assert low == pytest.approx(10 / math.sqrt(0.9 * 1.3), rel=0.01)
    assert high == pytest.approx(10.0)


def test_no_load_may_hold():
    """Of a latency that hardly depends on the load nothing is left if it is a third longer; a service that was out of
    balance stays so."""
    found = search(lambda load: 90.0 if load < 10 else math.inf)
    assert found.value == pytest.approx(10, rel=0.03)
    curve = curve_of(found, None, 1.0, 1.0)
    low, high = load_range(curve, found.value, SimulationErrors(SURE, (Interval(0.5, 1.3),)))
    assert (low, high) == (0.0, pytest.approx(found.value))
    assert load_range(curve, found.value, SimulationErrors(Interval(0.8, 1.25), (SURE,))) == pytest.approx(
        (0.8 * found.value, 1.25 * found.value)
    )


@pytest.mark.parametrize("longer", [0.7, 0.85, 1.0, 1.2, 1.4])
def test_the_engines_are_those_that_a_service_with_other_times_needs(longer: float):
    load = 890.0

    def needed(time_ms: Callable[[float], float]) -> SearchFinding:
        service = Service(lambda run: trial(time_ms(load / run["engines"])))
        ((_, found),) = run_searches({0: least_count({}, "engines", 9, 1, LIMIT, [0, 1], most=64)}, service)
        return found

    found = needed(queue_ms)
    curve = curve_of_counts(found, search(queue_ms, 20.0, 0.1), load, 1)
    ends = Interval(min(1.0, longer), max(1.0, longer))
    least, most = (needed(lambda load, end=end: queue_ms(load, end)).value for end in ends)
    assert found.value == 10
    assert count_range(curve, load, 1, SimulationErrors(ends, (ends,))) == (least, most)
    flat = LimitCurve.of({load / 10: [-0.1], load / 9: [math.inf]})
    assert count_range(flat, load, 1, SimulationErrors(SURE, (Interval(1.0, 2.0),)))[1] is None


def test_loads_follow_times_as_much_as_the_curve_says():
    for power in (0.5, 1.0, 3.0):
        curve = LimitCurve.of({load: [power * math.log(load / 10)] for load in (2.0, 5.0, 9.9, 10.1, 20.0)})
        assert curve.sensitivity(1) == pytest.approx(1 + 1 / power, rel=0.01)
    assert LimitCurve.of({10.0: [-0.5], 11.0: [math.inf]}).sensitivity(1) == pytest.approx(1.0)


def test_each_limit_has_the_interval_of_its_time():
    factors = {TPOT: Interval(0.9, 1.1), TTFT: Interval(0.6, 1.5), REQUEST: Interval(0.8, 1.2)}
    objectives = parse_slo("ttft_p99<1s,tpot_mean<9ms,itl_p50<9ms,e2el_p90<9s")
    found = SimulationErrors.of(factors, objectives)
    assert found.passes == factors[TPOT]
    assert found.latencies == (factors[TTFT], factors[TPOT], factors[TPOT], factors[REQUEST])
    del factors[TTFT]
    assert SimulationErrors.of(factors, objectives).latencies[0] == factors[TPOT]


@pytest.mark.slow
def test_the_range_is_what_a_plan_with_longer_passes_finds(monkeypatch):
    """The service of the tutorial, whose passes take 1.15 times as long by another factor of published points."""
    pytest.importorskip("aiconfigurator_core", reason="needs the extra measured")
    monkeypatch.setenv("FOREDRAFT_KERNELS", "auto")
    monkeypatch.chdir(Path(__file__).parents[2])
    scenario, _ = load_scenario("examples/tutorial/service.toml")
    tried = {"speculation.algorithm": ["NONE", "EAGLE3"], "speculation.steps": [2]}
    limits, longer = parse_slo("ttft_p99<1s,tpot_p99<40ms"), Interval(1.0, 1.15)

    def plan() -> Plan:
        whole = Plan(scenario, make_candidates(scenario, tried, None), PlanQuestion(limits, None, None, range(2), None))
        for _ in whole.run(Service(lambda run: run_trial(base_tables(scenario), run))):
            pass
        return whole

    right = plan()
    estimated = {
        index: load_range(
            curve_of(found, right.rough[index], 1.0, 1.0), found.value, SimulationErrors(longer, (longer, longer))
        )[0]
        for index, found in right.fine.items()
    }
    usual = Evidence.factor.func
    slower = cached_property(lambda evidence: 1.15 * usual(evidence))
    slower.__set_name__(Evidence, "factor")
    monkeypatch.setattr(Evidence, "factor", slower)
    wrong = plan()
    for index, load in estimated.items():
        assert load < 0.95 * right.fine[index].value
        assert load == pytest.approx(wrong.fine[index].value, rel=0.05)
