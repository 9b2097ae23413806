"""How sure the comparison of two candidates is: what both share cancels; draft steps have the error of speed-ups."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from foredraft.planning.candidates.candidate import make_candidates
from foredraft.planning.confidence.comparison import ModelErrors, about_speed_ups, speed_up_error
from foredraft.planning.confidence.model_error import LimitCurve
from foredraft.planning.confidence.ranked import Ranked
from foredraft.planning.search.judge import SearchFinding
from foredraft.planning.slo import parse_slo
from foredraft.sim.cost.deployments.evidence import DRAFTED_BATCHES, NOTHING, TPOT, published_errors
from foredraft.sim.scenario_file import scenario_with

LIMITS = parse_slo("ttft_p99<1s,tpot_p99<50ms")
SUMMARY = {"mean_ttft_ms": 100.0, "mean_tpot_ms": 10.0, "mean_output_tokens": 200.0, "mean_running": 8.0, "replicas": 1}
STEEP = LimitCurve.of(
    {load: [-9.0, 50 * math.log(load / 10)] for load in (9.0, 9.9, 10.1, 11.0)}
)  # loads follow times by 1.02
TABLES = {"hardware": {"server": "vllm-0.18", "kernels": "roofline"}, "model": {"target": "llama-3.1-8b"}}


def errors_and_candidates(tried, server="vllm-0.18") -> tuple[ModelErrors, list[Ranked]]:
    scenario = scenario_with(TABLES, {"hardware.server": server})
    candidates = make_candidates(scenario, tried, None)
    found = SearchFinding(10.0, summary=SUMMARY, tightest=LIMITS[1], excess=0.97)
    return ModelErrors(scenario, LIMITS), [Ranked(one, found, one.gpus_per_unit, 10.0) for one in candidates]


def half_widths(tried, **more) -> list[float]:
    errors, (best, *others) = errors_and_candidates(tried, **more)
    return [errors.compare(best, other, (STEEP, STEEP)) for other in others]


STEPS = {"speculation.algorithm": ["NONE", "EAGLE3"], "speculation.steps": [3]}
DEVICES = {"speculation.steps": [3], "hardware.tensor_parallel": [1, 2]}
GPUS = {"speculation.steps": [3], "hardware.gpu": ["H100", "L40S"]}


def test_what_two_candidates_share_cancels():
    steps, devices, gpus = (half_widths(tried)[0] for tried in (STEPS, DEVICES, GPUS))
    errors, (one, other) = errors_and_candidates(GPUS)
    assert steps == pytest.approx(1.02 * speed_up_error(errors.run_of(one)), rel=1e-3)
    assert steps < devices < gpus
    wide = [errors.errors_of(item).passes for item in (one, other)]
    assert gpus < 1.02 * math.hypot(*(math.log(high / low) for low, high in wide))


def test_without_published_points_gpus_are_apart_by_an_order_of_magnitude():
    steps, gpus = (half_widths(tried, server="foredraft")[0] for tried in (STEPS, GPUS))
    known = published_errors()["roofline"]
    assert steps == pytest.approx(1.02 * known.speed_ups[NOTHING], rel=1e-3)
    assert gpus == pytest.approx(1.02 * known.times[TPOT][NOTHING][1], rel=1e-3)


def test_loads_that_follow_times_more_are_less_sure():
    errors, (best, other) = errors_and_candidates(STEPS)
    flat = LimitCurve.of({load: [-9.0, 0.5 * math.log(load / 10)] for load in (5.0, 9.9, 10.1, 20.0)})
    assert errors.compare(best, other, (flat, flat)) == pytest.approx(
        3 / 1.02 * errors.compare(best, other, (STEEP, STEEP)), rel=0.02
    )


def test_ranges_are_there_where_something_is_published():
    errors, (item, _) = errors_and_candidates(STEPS)
    factor = errors.errors_of(item).latencies[1]
    expected = [10.0 * end**-1.02 for end in reversed(factor)]
    assert errors.load_range(item, STEEP) == pytest.approx(expected, rel=0.02)
    assert expected[0] < 10.0 <= expected[1]
    taken = errors.taken_range(item)
    assert taken == pytest.approx((0.97 * factor.low, 0.97 * factor.high))
    assert "published points of this GPU and server" in errors.rests_on(item)
    unknown, (item, _) = errors_and_candidates(STEPS, server="foredraft")
    low, high = unknown.load_range(item, STEEP)
    assert low < 0.6 * 10.0 and high > 1.6 * 10.0
    assert unknown.rests_on(item).startswith("no benchmark of this server: order of magnitude")


def test_the_published_speed_ups_are_of_these_batches():
    with (Path(__file__).parents[2] / "benchmarks" / "published" / "rounds.csv").open(
        newline="", encoding="utf-8"
    ) as file:
        batches = {int(row["concurrency"]) for row in csv.DictReader(file)}
    assert tuple(sorted(batches)) == DRAFTED_BATCHES
    errors, (item, _) = errors_and_candidates(STEPS)
    run = errors.run_of(item)
    text = about_speed_ups(run)
    assert "at batch 1 and 8" in text and "Nothing is published for larger batches" in text
    assert f"±{math.expm1(speed_up_error(run)):.0%}" in text
