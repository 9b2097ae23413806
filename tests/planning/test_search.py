"""Searches and plans over a service whose answers are known: what they find, what they ask for, what they drop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.answer import limit_of
from foredraft.planning.candidates import make_candidates
from foredraft.planning.confidence.comparison import ModelErrors
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.confidence.ranking import rank_candidates
from foredraft.planning.plan import Plan, Question
from foredraft.planning.search import Finding, greatest_load, least_count, run_searches
from foredraft.planning.slo import excess, parse_slo
from foredraft.planning.trial import Trial
from foredraft.planning.workers import Job
from foredraft.sim.cost.published.evidence import Difference
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_with
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT = parse_slo("ttft_p99<100ms")
BALANCED = dict.fromkeys(("refused", "aborted", "failed", "unfinished"), 0) | {"overloaded": False, "saturation": 0.5}


def trial(ttft_ms: float, **more: Any) -> Trial:
    return Trial("done", "", {**BALANCED, "p99_ttft_ms": ttft_ms, **more})


class Service:
    """Workers that answer from a function of the settings, in an order of their own."""

    count = 4

    def __init__(self, answer: Callable[[Mapping[str, Any]], Trial]) -> None:
        self.answer = answer
        self.waiting: list[Job] = []
        self.runs: list[Mapping[str, Any]] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def next_ended(self) -> tuple[Job, Trial]:
        job = self.waiting.pop(len(self.runs) % len(self.waiting))
        self.runs.append(job.settings)
        return job, self.answer(job.settings)

    def close(self) -> None:
        pass


def noise(seed: int | str) -> float:
    return random.Random(seed).gauss(0, 1)


SHAPES: Mapping[str, Callable[[float], float]] = {  # ms by the share of the capacity
    "power": lambda share: 100 * share**3,
    "queue": lambda share: 20 / (1 - 0.8 * share) if share < 1.25 else math.inf,
    "cliff": lambda share: 40.0 if share < 1 else 1000.0,
    "late cliff": lambda share: 95.0 if share < 1 else 110 * share,
    "out of balance": lambda share: 60.0 if share < 1 else math.inf,
}


@settings(deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    capacity=st.floats(0.05, 500),
    start=st.floats(0.2, 5),
    factor=st.sampled_from([1.03, 1.2, 2.0]),
    at_once=st.sampled_from([1, 2, 4]),
)
def test_the_greatest_load_is_found_within_the_tolerance(
    shape: str, capacity: float, start: float, factor: float, at_once: int
):
    service = Service(lambda run: trial(SHAPES[shape](run["load"] / capacity)))
    search = greatest_load({}, "load", start * capacity, LIMIT, range(2), 0.03, factor, at_once=at_once)
    ((_, found),) = run_searches({0: search}, service)
    assert found.value == pytest.approx(capacity, rel=0.03 if "cliff" in shape or "out" in shape else 0.01)
    assert len({run["load"] for run in service.runs}) <= (16 if at_once == 1 else 10 * at_once)


@pytest.mark.parametrize(("at_once", "factor", "most"), [(1, 1.03, 3), (2, 1.1, 4)])
@pytest.mark.parametrize("capacity", [1.0, 1.013, 1.026])
def test_a_smooth_load_near_the_start_takes_few_runs(capacity: float, at_once: int, factor: float, most: int):
    service = Service(lambda run: trial(SHAPES["power"](run["load"] / capacity)))
    search = greatest_load({}, "load", 1.0, LIMIT, [0], 0.03, factor, at_once=at_once)
    ((_, found),) = run_searches({0: search}, service)
    assert found.value == pytest.approx(capacity, rel=0.001)
    assert len(service.runs) <= most


def test_the_interval_covers_the_mean_of_the_seeds():
    """Each seed has a capacity of its own, 5 % apart: 95 % of intervals of 4 seeds have the true mean;
    fewer than 50 of 60 is no chance."""
    covered = 0
    for first in range(0, 240, 4):
        service = Service(lambda run: trial(100 * (run["load"] / (8 * math.exp(0.05 * noise(run["seed"])))) ** 3))
        search = greatest_load({}, "load", 8, LIMIT, range(first, first + 4), tolerance=0.03)
        ((_, found),) = run_searches({0: search}, service)
        covered += found.interval.low <= 8 * math.exp(0.05**2 / 2) <= found.interval.high
    assert 50 <= covered <= 60


def test_the_interval_of_a_level_at_the_limit_is_as_wide_as_the_level():
    """Where the load grows by 5 % the excess grows by 1 %, and single runs differ by 3 %: the limit is hardly known."""
    covered, widths = 0, []
    for first in range(0, 240, 4):
        service = Service(
            lambda run: trial(100 * (run["load"] / 8) ** 0.2 * math.exp(0.03 * noise(f"{run['seed']} {run['load']}")))
        )
        search = greatest_load({}, "load", 6, LIMIT, range(first, first + 4), 0.03, 1.1)
        ((_, found),) = run_searches({0: search}, service)
        covered += found.interval.low <= 8 <= found.interval.high
        widths.append(found.interval.half_width / found.interval.mean)
    assert covered >= 50 and np.median(widths) > 0.1


@settings(deadline=None)
@given(need=st.integers(1, 70), start=st.integers(1, 70), unit=st.integers(1, 4))
def test_the_least_count_is_the_first_multiple_that_holds(need: int, start: int, unit: int):
    service = Service(lambda run: trial(50.0 if run["engines"] >= need else 200.0))
    ((_, found),) = run_searches({0: least_count({}, "engines", start, unit, LIMIT, [0, 1], most=64)}, service)
    least = -(-need // unit) * unit
    assert found.value == (least if least <= 64 else 0)
    assert all(run["engines"] % unit == 0 for run in service.runs)


def test_a_load_that_never_holds_says_how_near_it_comes():
    service = Service(lambda run: trial(300.0 + run["load"]))
    ((_, found),) = run_searches({0: greatest_load({}, "load", 8, LIMIT, [0, 1], 0.03)}, service)
    assert found.value == 0 and found.interval is None
    assert found.excess == pytest.approx(3.0, rel=0.001) and found.tightest.name == "ttft_p99"


def test_a_run_out_of_balance_holds_nothing():
    assert excess(LIMIT, trial(10.0).summary)[0] == pytest.approx(0.1)
    for broken in ({"overloaded": True}, {"refused": 1}, {"failed": 2}, {"p99_ttft_ms": None}):
        assert excess(LIMIT, {**trial(10.0).summary, **broken})[0] == math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p99<500", "500 has no unit; write 500ms or 500s"),
        ("tfft_p99<5ms", "did you mean 'ttft_p99'"),
        ("ttft_p98<5ms", "is not measured"),
        ("ttft_p99<5min", "'min' is no unit of time"),
        ("ttft_p99<0ms", "expected a time above 0"),
        ("ttft_p99<1s,ttft_p99<2s", "limited twice"),
        ("fast", "is no limit"),
        ("", "has no limit"),
    ],
)
def test_a_wrong_limit_is_refused_with_its_reason(text: str, message: str):
    with pytest.raises(ConfigError, match=r"^--slo: ") as caught:
        parse_slo(text)
    assert message in str(caught.value)


def test_limits_have_units():
    found = parse_slo("ttft_p99<1.5s, tpot_mean<=20ms,itl_median<900us")
    assert [(limit.key, limit.limit_ms) for limit in found] == [
        ("p99_ttft_ms", 1500.0),
        ("mean_tpot_ms", 20.0),
        ("median_itl_ms", pytest.approx(0.9)),
    ]


# -- candidates and plans ----------------------------------------------------------------------------------------------


def test_usual_candidates_and_those_that_are_tried():
    usual = make_candidates(Scenario(), {}, gpus=4)
    assert len(usual) == 8 * 3 and len({one.name for one in usual}) == 24
    assert {one.gpus_per_unit for one in usual} == {1, 2, 4}
    tried = make_candidates(Scenario(), {"speculation.steps": [0, 2], "disaggregation.ratio": ["2:1"]}, gpus=None)
    assert [one.name for one in tried] == ["EAGLE3, 0 steps, ratio 2:1", "EAGLE3, 2 steps, ratio 2:1"]
    assert [one.unit for one in tried] == [3, 3]
    (open_steps,) = make_candidates(Scenario(), {"speculation.policy": ["fixed"]}, gpus=None)
    assert open_steps.name == "EAGLE3, fixed"
    own = scenario_with({}, {"speculation.topk": 4, "speculation.policy": "goodput"})
    (kept,) = make_candidates(own, {"speculation.steps": [3]}, gpus=None)
    assert kept.settings["speculation.topk"] == 4 and kept.settings["speculation.policy"] == "fixed"


def capacity_of(settings: Mapping[str, Any]) -> float:
    """Requests/s of one engine of the toy: 2 for plain decoding, 2 more per draft step up to 3 and
    half of that beyond."""
    steps = settings.get("speculation.steps", 0)
    return 2.0 + 2.0 * min(steps, 3) - 2.5 * max(steps - 3, 0)


def toy(settings: Mapping[str, Any]) -> Trial:
    if settings.get("speculation.steps") == 4:
        return Trial("refused", "no room")
    load = settings["workload.rate"] / settings.get("hardware.replicas", 1)
    return trial(100 * (load / capacity_of(settings)) ** 2, output_throughput=1000.0, mean_output_tokens=100.0)


def plan_of(load: float | None, gpus: int | None) -> tuple[Plan, Service]:
    tried = {"speculation.algorithm": ["NONE", "EAGLE3"], "speculation.steps": [1, 2, 3, 4, 5]}
    candidates = make_candidates(Scenario(), tried, gpus)
    whole = Plan(Scenario(), candidates, Question(LIMIT, load, gpus, range(2), 400, model_error=0.05))
    service = Service(toy)
    for _ in whole.run(service):
        pass
    return whole, service


def test_a_plan_ranks_by_the_greatest_load():
    whole, service = plan_of(None, None)
    ranked = rank_candidates(whole)
    assert [item.candidate.name for item in ranked][:2] == ["EAGLE3, 3 steps", "EAGLE3, 2 steps"]
    assert ranked[0].load == pytest.approx(8.0, rel=0.01) and ranked[0].gpus == 1
    assert [item.candidate.name for item in ranked if item.dropped] == ["EAGLE3, 5 steps"]
    assert [(candidate.name, reason) for candidate, reason in whole.refused()] == [("EAGLE3, 4 steps", "no room")]
    needed = {run["workload.rate"]: max(400, math.ceil(60 * run["workload.rate"])) for run in service.runs}
    for run in service.runs:
        whole_run = needed[run["workload.rate"]]
        assert run["workload.num_requests"] in (
            whole_run,
            math.ceil(whole_run / 4),
            math.ceil(15 * run["workload.rate"]),
        )
    plain = next(item for item in ranked if item.candidate.name == "plain decoding")
    assert plain.load == pytest.approx(2.0, rel=0.01) and not plain.dropped


def test_a_plan_on_a_whole_trace_drops_candidates_on_its_slices(tmp_path: Path):
    """Twelve candidates: a thousand requests tell the far ones, a quarter of the trace those whose difference one run
    shows.

    Both are the trace's busiest, which come after an hour at half the rate; a whole trace holds 1.3 times what they do.
    """
    trace = tmp_path / "azure.csv"
    slow = "".join(f"2023-11-16 17:{i // 300:02}:{i // 5 % 60:02}.{i % 5 * 2}000000,100,10\n" for i in range(10_000))
    rows = slow + "".join(
        f"2023-11-16 18:{i // 600:02}:{i // 10 % 60:02}.{i % 10}000000,100,10\n" for i in range(10_000)
    )
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    scenario = scenario_with({}, {"workload.trace": str(trace)})
    candidates = make_candidates(scenario, {"speculation.steps": list(range(1, 13))}, None)
    capacity = {steps: 3.0 - 0.08 * abs(steps - 6) ** 1.5 for steps in range(1, 13)}

    def answer(settings: Mapping[str, Any]) -> Trial:
        own = capacity[settings["speculation.steps"]] * math.exp(0.005 * noise(settings["seed"]))
        own *= 1.0 if "workload.num_requests" in settings else 1.3
        return trial(100 * (settings["workload.rate_scale"] / own) ** 3, output_throughput=1.0)

    whole = Plan(scenario, candidates, Question(LIMIT, None, None, range(4), None, model_error=0.07))
    service = Service(answer)
    for _ in whole.run(service):
        pass
    ranked = rank_candidates(whole)
    assert ranked[0].candidate.name == "EAGLE3, 6 steps" and ranked[0].load == pytest.approx(3.9, rel=0.02)
    assert {item.candidate.name for item in ranked if not item.dropped} == {f"EAGLE3, {n} steps" for n in (5, 6, 7)}
    assert {item.candidate.name for item in ranked if item.dropped and item.equal} == {
        f"EAGLE3, {n} steps" for n in (4, 8)
    }
    sizes = [run.get("workload.num_requests", 20_000) for run in service.runs]
    assert set(sizes) == {1000, 5000, 20_000}
    assert all(run.get("workload.start_s", 0) >= 3600 for run in service.runs if "workload.num_requests" in run)
    assert sum(size == 20_000 for size in sizes) <= 3 * 8
    assert sum(sizes) < 34 * 20_000


def test_a_plan_finds_the_least_gpus_for_a_load():
    whole, _ = plan_of(25.0, None)
    ranked = rank_candidates(whole)
    assert [(item.candidate.name, item.gpus) for item in ranked][:2] == [("EAGLE3, 3 steps", 4), ("EAGLE3, 2 steps", 5)]
    assert next(item for item in ranked if item.candidate.name == "plain decoding").gpus == 13
    assert [item.equal for item in ranked][:2] == [True, False]


def test_a_load_beyond_the_given_gpus_holds_nowhere():
    whole, _ = plan_of(25.0, 2)
    assert not any(item.holds for item in rank_candidates(whole) if not item.dropped)
    far, service = plan_of(2500.0, 2)
    assert not any(item.holds for item in rank_candidates(far) if not item.dropped)
    assert max(run["workload.rate"] for run in service.runs) < 100  # what is out of reach is not run
    assert len(service.runs) < 20  # all candidates but the nearest give up early
    assert min(filter(None, map(far.needed, far.rough))) == pytest.approx(2500 / 8, rel=0.3)


def test_a_plan_with_prices_takes_the_cheapest_gpus():
    """One engine on the dear GPU serves as much as 1.5 on the cheap one, and costs three times as much."""

    def answer(settings: Mapping[str, Any]) -> Trial:
        capacity = 6.0 if settings["hardware.gpu"] == "H200" else 4.0
        load = settings["workload.rate"] / settings.get("hardware.replicas", 1)
        return trial(100 * (load / capacity) ** 2, output_throughput=1.0, mean_output_tokens=1.0)

    tried = {"speculation.steps": [1], "hardware.gpu": ["H100", "H200"]}
    candidates = make_candidates(Scenario(), tried, None)
    found = {}
    for prices in ({}, {"H100": 1.0, "H200": 3.0}):
        whole = Plan(Scenario(), candidates, Question(LIMIT, 11.0, None, range(2), 400, 0.05, prices))
        for _ in whole.run(Service(answer)):
            pass
        found[bool(prices)] = [(item.candidate.settings["hardware.gpu"], item.gpus) for item in rank_candidates(whole)]
    assert found == {False: [("H200", 2), ("H100", 3)], True: [("H100", 3), ("H200", 2)]}


def test_a_limit_that_is_never_met_bounds_the_load():
    ((_, found),) = run_searches({0: greatest_load({}, "load", 8, LIMIT, [0], 0.03)}, Service(lambda run: trial(1.0)))
    assert found.is_bound and found.value > 1000


@pytest.mark.parametrize(
    ("mean", "half_width", "is_equal"), [(0.0, 0.2, False), (0.0, 0.4, True), (-0.2, 0.2, True), (0.2, 0.4, False)]
)
def test_a_tie_is_a_ratio_within_the_error_of_the_comparison(
    monkeypatch, mean: float, half_width: float, is_equal: bool
):
    """Of 2 steps, which hold 6 where 3 steps hold 8. `mean`: of the error of log(load of the best / its load)."""
    monkeypatch.setattr(ModelErrors, "compare", lambda *_: Difference(mean, half_width))
    whole, _ = plan_of(None, None)
    best, second = rank_candidates(whole)[:2]
    assert (second.candidate.name, second.equal) == ("EAGLE3, 2 steps", is_equal)
    assert second.of_best_range == pytest.approx(
        [0.75 * math.exp(-mean + end) for end in (-half_width, half_width)], rel=0.02
    )
    assert best.equal and best.of_best_range is None


def test_a_plan_asks_the_same_again():
    """Its runs follow from the question alone, so that a stopped plan finds what it has asked for in its store."""
    runs = [sorted(map(repr, plan_of(None, None)[1].runs)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_prefill_and_decode_apart_are_described_by_their_smallest_deployment():
    tried = {"speculation.steps": [1], "disaggregation.ratio": ["2:2"]}
    [candidate] = make_candidates(Scenario(), tried, None)
    whole = Plan(Scenario(), [candidate], Question(LIMIT, None, None, range(2), 400, 0.05))
    numbers = ["kv_occupancy_max", "retractions", "max_queue_length", "decode_rounds", "device_busy_share", "duration"]
    summary = dict.fromkeys(numbers, 0.0) | dict.fromkeys(
        ["mean_running", "mean_input_tokens", "mean_output_tokens", "replicas"], 4
    )
    limited, timing = limit_of(whole, Ranked(candidate, Finding(1.0, summary=summary), 4, 1.0))
    assert limited.startswith("EAGLE3, 1 step, ratio 2:2 is limited by") and "foredraft" in timing
