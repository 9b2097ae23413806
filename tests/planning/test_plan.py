"""Candidates and plans over a service whose answers are known: what they rank, compare, drop and ask for again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.answers.answer import limit_of
from foredraft.planning.answers.ranking import rank_candidates
from foredraft.planning.candidates.candidate import make_candidates
from foredraft.planning.confidence.comparison import ModelErrors
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.demand.question import PlanQuestion
from foredraft.planning.grid import parse_grid
from foredraft.planning.plan import PAIRS, Plan
from foredraft.planning.search.judge import SearchFinding
from foredraft.planning.search.loads import greatest_load
from foredraft.planning.search.pace import SearchPace
from foredraft.planning.search.running import run_searches
from foredraft.planning.trial import RunOutcome
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import scenario_with
from known_service import LIMIT, Service, compare_within, noise, trial


def test_wrong_values_are_refused_before_the_first_run():
    for tried in ({"disaggregation.ratio": ["a:b", "1:1"]}, {"hardware.gpu": ["H100", "H999"]}):
        with pytest.raises(ConfigError, match=r"^--try: ") as caught:
            make_candidates(Scenario(), tried, None)
        assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="unknown key"):
        make_candidates(Scenario(), {"hardware.gpuu": ["H100"]}, None)


def test_prefill_and_decode_together_and_apart_are_one_question():
    tried = parse_grid(["disaggregation.ratio=none,1:1", "speculation.steps=2"], "--try")
    found = make_candidates(Scenario(), tried, None)
    assert [(one.name, one.unit) for one in found] == [
        ("EAGLE3, 2 steps, ratio none", 1),
        ("EAGLE3, 2 steps, ratio 1:1", 2),
    ]


def test_the_time_left_of_a_long_search_is_no_less_than_what_it_took():
    """Before a search of a round has ended, its usual number of runs says little."""
    pace = SearchPace(rounds=("third",), round="third")
    pace.begin("third", 1)
    left = []
    for _ in range(30):
        pace.note(RunOutcome("done", wall_s=3.0))
        left.append(pace.left_s(1))
    assert left[0] == 7 * 3.0 and left[-1] == 30 * 3.0
    assert min(left) > 9.0, "it never stays at the time of one run"


def test_the_time_left_follows_the_runs_that_have_ended():
    pace = SearchPace()
    assert pace.left_s(1) is None
    pace.begin("first", 4)
    for _ in range(6):
        pace.note(RunOutcome("done", wall_s=2.0))
    first = pace.left_s(1)
    assert first is not None and first > 18 * 2.0  # of this round alone
    assert pace.left_s(4) == pytest.approx(first / 4)
    pace.ended["first"] = 4
    pace.begin("second", 2)
    pace.note(RunOutcome("done", wall_s=8.0))
    second = pace.left_s(1)
    pace.begin("third", 2)
    pace.ended["second"], pace.ended["third"] = 2, 2
    pace.note(RunOutcome("done", wall_s=8.0))
    assert second is not None and pace.left_s(1) == 0 < second


def test_usual_candidates_and_those_that_are_tried():
    usual = make_candidates(Scenario(), {}, gpus=4)
    assert len(usual) == 8 * 3 and len({one.name for one in usual}) == 24
    assert {one.gpus_per_unit for one in usual} == {1, 2, 4}
    tried = make_candidates(Scenario(), {"speculation.steps": [0, 2], "disaggregation.ratio": ["2:1"]}, gpus=None)
    assert [one.name for one in tried] == ["EAGLE3, draft loaded, not used, ratio 2:1", "EAGLE3, 2 steps, ratio 2:1"]
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


def toy(settings: Mapping[str, Any]) -> RunOutcome:
    if settings.get("speculation.steps") == 4:
        return RunOutcome("refused", "no room")
    load = settings["workload.rate"] / settings.get("hardware.replicas", 1)
    return trial(100 * (load / capacity_of(settings)) ** 2, output_throughput=1000.0, mean_output_tokens=100.0)


def plan_of(load: float | None, gpus: int | None) -> tuple[Plan, Service]:
    tried = {"speculation.algorithm": ["NONE", "EAGLE3"], "speculation.steps": [1, 2, 3, 4, 5]}
    candidates = make_candidates(Scenario(), tried, gpus)
    whole = Plan(Scenario(), candidates, PlanQuestion(LIMIT, load, gpus, range(2), 400))
    compare_within(whole, 0.05)
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
    (dropped,) = (item for item in ranked if item.dropped)
    index, best = whole.candidates.index(dropped.candidate), whole.candidates.index(ranked[0].candidate)
    of_rough = whole.fine[best].value / whole.rough[best].value
    assert of_rough != 1 and dropped.load == pytest.approx(whole.rough[index].value * of_rough)


def test_candidates_are_compared_seed_by_seed():
    """Seeds differ by 10 %, but by the same for every candidate: so 4 % fewer requests/s are told apart by 4 seeds."""
    speed = {1: 8.0, 2: 7.7, 3: 7.0}

    def answer(settings: Mapping[str, Any]) -> RunOutcome:
        own = speed[settings["speculation.steps"]] * math.exp(0.1 * noise(settings["seed"]))
        return trial(100 * (settings["workload.rate"] / own) ** 2, mean_output_tokens=1.0)

    candidates = make_candidates(Scenario(), {"speculation.steps": [1, 2, 3]}, None)
    whole = Plan(Scenario(), candidates, PlanQuestion(LIMIT, None, None, range(48), 400))
    compare_within(whole, 0.0)
    service = Service(answer)
    rounds = [name for name, _, _ in whole.run(service)]
    assert rounds == ["first"] * 3 + ["second"] * 3 + ["third"] * 3
    ranked = rank_candidates(whole)
    assert [item.equal for item in ranked if not item.dropped] == [True, False, False]
    seeds = {item.candidate.name: len(item.finding.crossings) for item in ranked}
    assert seeds["EAGLE3, 1 step"] == 32 and seeds["EAGLE3, 2 steps"] == PAIRS
    assert {item.finding.seeds for item in ranked} == {32}  # the others rest on those of the best one
    for item in ranked:
        own = speed[item.candidate.settings["speculation.steps"]]
        held = sum(own * math.exp(0.1 * noise(seed)) >= item.load for seed in range(1000, 1400))
        assert held >= 360 and item.finding.excess < 1 and item.load < item.finding.interval.mean
    half_widths = [item.finding.interval.half_width / item.load for item in ranked]
    assert max(half_widths) < 1.1 * min(half_widths)  # pooled


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

    def answer(settings: Mapping[str, Any]) -> RunOutcome:
        own = capacity[settings["speculation.steps"]] * math.exp(0.005 * noise(settings["seed"]))
        own *= 1.0 if "workload.num_requests" in settings else 1.3
        return trial(100 * (settings["workload.rate_scale"] / own) ** 3, output_throughput=1.0)

    whole = Plan(scenario, candidates, PlanQuestion(LIMIT, None, None, range(4), None))
    compare_within(whole, 0.07)
    service = Service(answer)
    for _ in whole.run(service):
        pass
    ranked = rank_candidates(whole)
    assert ranked[0].candidate.name == "EAGLE3, 6 steps" and ranked[0].load == pytest.approx(3.9, rel=0.02)
    assert sum(3.9 * math.exp(0.005 * noise(seed)) >= ranked[0].load for seed in range(100, 500)) >= 360
    assert {item.candidate.name for item in ranked if not item.dropped} == {f"EAGLE3, {n} steps" for n in (5, 6, 7)}
    assert {item.candidate.name for item in ranked if item.dropped and item.equal} == {
        f"EAGLE3, {n} steps" for n in (4, 8)
    }
    sizes = [run.get("workload.num_requests", 20_000) for run in service.runs]
    assert set(sizes) == {1000, 5000, 20_000}
    assert all(run.get("workload.start_s", 0) >= 3600 for run in service.runs if "workload.num_requests" in run)
    assert sum(size == 20_000 for size in sizes) <= 4 + 3 * (4 + 4)
    assert not any("workload.resample_s" in run for run in service.runs)


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

    def answer(settings: Mapping[str, Any]) -> RunOutcome:
        capacity = 6.0 if settings["hardware.gpu"] == "H200" else 4.0
        load = settings["workload.rate"] / settings.get("hardware.replicas", 1)
        return trial(100 * (load / capacity) ** 2, output_throughput=1.0, mean_output_tokens=1.0)

    tried = {"speculation.steps": [1], "hardware.gpu": ["H100", "H200"]}
    candidates = make_candidates(Scenario(), tried, None)
    found = {}
    for prices in ({}, {"H100": 1.0, "H200": 3.0}):
        whole = Plan(Scenario(), candidates, PlanQuestion(LIMIT, 11.0, None, range(2), 400, prices))
        compare_within(whole, 0.05)
        for _ in whole.run(Service(answer)):
            pass
        found[bool(prices)] = [(item.candidate.settings["hardware.gpu"], item.gpus) for item in rank_candidates(whole)]
    assert found == {False: [("H200", 2), ("H100", 3)], True: [("H100", 3), ("H200", 2)]}


def test_a_limit_that_is_never_met_bounds_the_load():
    ((_, found),) = run_searches({0: greatest_load({}, "load", 8, LIMIT, [0], 0.03)}, Service(lambda run: trial(1.0)))
    assert found.is_bound and found.value > 1000


@pytest.mark.parametrize(("half_width", "is_equal"), [(0.2, False), (0.4, True)])
def test_a_tie_is_a_ratio_within_the_error_of_the_comparison(monkeypatch, half_width: float, is_equal: bool):
    """Of 2 steps, which hold 6 where 3 steps hold 8."""
    monkeypatch.setattr(ModelErrors, "compare", lambda *_: half_width)
    whole, _ = plan_of(None, None)
    best, second = rank_candidates(whole)[:2]
    assert (second.candidate.name, second.equal) == ("EAGLE3, 2 steps", is_equal)
    assert second.of_best_range == pytest.approx([0.75 * math.exp(end) for end in (-half_width, half_width)], rel=0.02)
    assert best.equal and best.of_best_range is None


def test_a_plan_asks_the_same_again():
    """Its runs follow from the question alone, so that a stopped plan finds what it has asked for in its store."""
    runs = [sorted(map(repr, plan_of(None, None)[1].runs)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_prefill_and_decode_apart_are_described_by_their_smallest_deployment():
    tried = {"speculation.steps": [1], "disaggregation.ratio": ["2:2"]}
    [candidate] = make_candidates(Scenario(), tried, None)
    whole = Plan(Scenario(), [candidate], PlanQuestion(LIMIT, None, None, range(2), 400))
    numbers = ["kv_occupancy_max", "retractions", "max_queue_length", "decode_rounds", "device_busy_share", "duration"]
    summary = dict.fromkeys(numbers, 0.0) | dict.fromkeys(
        ["mean_running", "mean_input_tokens", "mean_output_tokens", "replicas"], 4
    )
    limited, timing = limit_of(whole, Ranked(candidate, SearchFinding(1.0, summary=summary), 4, 1.0))
    assert limited.startswith("EAGLE3, 1 step, ratio 2:2 is limited by") and "foredraft" in timing


def test_a_plan_says_that_the_acceptance_of_its_drafts_was_not_published():
    scenario = scenario_with({}, {"model.target": "qwen2.5-7b"})
    grid = parse_grid(["speculation.algorithm=EAGLE3,NONE"], "--try")
    plan = Plan(scenario, make_candidates(scenario, grid, None), PlanQuestion((), None, None, (), None))
    drafting = [one for one in plan.candidates if "EAGLE3" in one.name]
    (text,) = plan.about_guesses(plan.candidates)
    assert text.startswith(
        f"{drafting[0].name}: no published acceptance for EAGLE3 on qwen2 chat; that of EAGLE3 on llama"
    )
    assert "times as fast, and its load changes about as much." in text
    known = Plan(Scenario(), make_candidates(Scenario(), {}, None), plan.question)
    assert not known.about_guesses(known.candidates[:1])
