"""Replicas by the hour of a trace, and what a service costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from foredraft.planning.answers.bill import bill_of
from foredraft.planning.candidates.candidate import make_candidates
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.demand.hours import Day, busiest_hour, replicas_by_hour
from foredraft.planning.demand.question import PlanQuestion
from foredraft.planning.demand.trace_part import TracePart
from foredraft.planning.plan import Plan
from foredraft.planning.search.judge import SearchFinding
from foredraft.planning.slo import parse_slo
from foredraft.sim.scenario_file import scenario_with

HOURS = (36, 360, 72)
"""Requests of three hours: 0.01, 0.1 and 0.02 a second."""


def day(folder: Path) -> TracePart:
    path = folder / "day.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens\n"]
    for hour, count in enumerate(HOURS):
        seconds = (round(i * 3600 / count) for i in range(count))
        rows += [f"2024-01-01 0{hour}:{second // 60:02}:{second % 60:02},100,50\n" for second in seconds]
    rows.append("2024-01-01 02:59:59.999,100,50\n")  # so that the third hour is whole
    path.write_text("".join(rows))
    part = TracePart.of(scenario_with({}, {"workload.trace": str(path)}), None)
    assert part is not None
    return part


def test_replicas_follow_the_rate_of_each_hour(tmp_path: Path):
    part = day(tmp_path)
    hours = replicas_by_hour(part, capacity=0.03, headroom=0.2, warm_up_s=600.0)
    assert [hour.replicas for hour in hours] == [1, 4, 1]  # 0.012, 0.12 and 0.024 by 0.03
    # Three more replicas start ten minutes before the second hour.
    assert [hour.replica_hours for hour in hours] == pytest.approx([1 + 3 / 6, 4, 1], rel=1e-4)
    assert [hour.rate for hour in hours] == pytest.approx([0.01, 0.1, 73 / 3600])
    found = Day(part, 0.2, 600.0).answer("one", 0.03, gpus=2, price=2.5)
    assert found.hours == tuple(hours) and found.hours_long == pytest.approx(3.0)
    assert found.gpu_hours == pytest.approx(13.0, rel=1e-4) and found.bill == pytest.approx(32.5, rel=1e-4)
    assert replicas_by_hour(part, 0.1 / 4, 0.0, 0.0)[1].replicas == 4  # just enough


def test_a_warm_up_longer_than_an_hour_reaches_over_it(tmp_path: Path):
    slow = replicas_by_hour(day(tmp_path), 0.03, 0.2, 5400.0)
    assert [hour.replica_hours for hour in slow] == pytest.approx([4.0, 4.0, 1.0], rel=1e-3)


def test_a_replica_is_planned_for_the_busiest_hour(tmp_path: Path):
    part = day(tmp_path)
    chosen = busiest_hour(part.scenario, part)
    assert (chosen.workload.start_s, chosen.workload.stop_s) == (3600.0, 7200.0)
    hour = TracePart.of(chosen, None)
    assert hour is not None and len(hour.rows.lines) == 360
    assert busiest_hour(chosen, hour) is chosen


def test_a_bill_is_the_price_of_the_gpus_over_the_output_tokens():
    scenario = scenario_with({}, {"workload.rate": 4.0})
    [candidate] = make_candidates(scenario, {"speculation.steps": [1]}, None)
    plan = Plan(scenario, [candidate], PlanQuestion(parse_slo("ttft_p99<1s"), None, None, range(2), 400))
    summary = {"mean_input_tokens": 300.0, "mean_output_tokens": 100.0}
    item = Ranked(candidate, SearchFinding(10.0, summary=summary), 2, 10.0)
    bill = bill_of(plan, item, 3.6)  # 2 GPUs: 0.002 a second, for 1,000 output tokens
    assert bill.planned == pytest.approx(2.0) and bill.month == pytest.approx(7.2 * 730)
    assert bill.own == pytest.approx(5.0)  # at 4 instead of 10 requests/s
    assert bill_of(plan, Ranked(candidate, item.finding, 2, 3.0), 3.6).own is None  # it does not hold that load


def test_a_load_of_a_trace_is_a_multiple_of_its_mean_rate(tmp_path: Path):
    part = day(tmp_path)
    [candidate] = make_candidates(part.scenario, {"speculation.steps": [1]}, None)
    plan = Plan(part.scenario, [candidate], PlanQuestion(parse_slo("ttft_p99<1s"), None, None, range(2), None))
    assert plan.requests_per_s(2.0) == pytest.approx(2 * 469 / 10_800, rel=1e-4)
