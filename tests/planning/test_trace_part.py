"""What a plan says about its trace before it searches, and in its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.candidates.candidate import make_candidates
from foredraft.planning.demand.question import PlanQuestion
from foredraft.planning.demand.trace_part import TracePart
from foredraft.planning.plan import Plan
from foredraft.planning.slo import parse_slo
from foredraft.sim.scenario_file import scenario_with

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SMALL = ("llama-3.1-8b", 1000)
FEW = range(20, 40)  # seconds of further requests, so that a trace has enough


def part_of(folder: Path, rows: list[tuple[int, int, int]], requests: int | None = None, **keys: Any) -> TracePart:
    """Return the part of a trace of rows (second, prompt, output)."""
    path = folder / "trace.csv"
    lines = [f"2024-01-01 00:{s // 60:02}:{s % 60:02},{prompt},{output}\n" for s, prompt, output in rows]
    path.write_text(HEADER + "".join(lines))
    scenario = scenario_with({}, {"workload.trace": str(path), **{f"workload.{key}": keys[key] for key in keys}})
    part = TracePart.of(scenario, requests)
    assert part is not None
    return part


def test_requests_beyond_the_context_are_counted_and_the_longest_is_named(tmp_path: Path):
    rows = [(0, 10, 5), (1, 1000, 5), (2, 0, 5), (3, 4000, 5), (4, 999, 2), *((second, 10, 5) for second in FEW)]
    notice, few = part_of(tmp_path, rows).notices([SMALL, ("large", 9000)])
    assert few.endswith("has only 24 requests: a load found with so few says little.")
    assert "the prompt fills the context of llama-3.1-8b (1,000 tokens) in 2 of 24 requests" in notice
    assert "the longest has 4,000 tokens (line 5)" in notice and "refused" in notice and "In 1 more" in notice
    assert part_of(tmp_path, rows).notices([("large", 9000)]) == [few]


def test_a_trace_without_a_request_that_fits_is_refused(tmp_path: Path):
    part = part_of(tmp_path, [(0, 1000, 5), (1, 2000, 5), *((second, 1000, 5) for second in FEW)])
    with pytest.raises(ConfigError, match=r"in every request; the longest has 2,000 tokens \(line 3\)"):
        part.notices([SMALL])
    assert len(part.notices([SMALL, ("large", 9000)])) == 2
    with pytest.raises(ConfigError, match="20 requests at one moment have no rate to plan for"):
        part_of(tmp_path, [(0, 10, 5)] * 20).notices([SMALL])
    with pytest.raises(ConfigError, match=r"has no request between workload\.start_s"):
        part_of(tmp_path, [(0, 10, 5)], start_s=60)


def test_a_plan_says_which_part_of_the_trace_a_run_takes(tmp_path: Path):
    rows = [(second, 10, 5) for second in range(1800)]
    whole, part = part_of(tmp_path, rows), part_of(tmp_path, rows, requests=100)
    assert whole.window_s is None and "replays the trace as it is, at 1 × the trace 1 requests/s" in whole.of_a_run()
    assert part.window_s == 60.0 and "as 100 of the 1,800 of the trace" in part.of_a_run()
    assert "at 1 × the trace 1 requests/s on average" in part.of_a_run()
    drawn = part_of(tmp_path, rows, resample_s=7.0)
    assert drawn.window_s == 7.0 and "as all 1,800 of the trace, in windows of 7 s" in drawn.of_a_run()
    assert part_of(tmp_path, rows[:5], requests=4).window_s == 4.0  # not longer than the trace


def test_a_trace_of_few_requests_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has 19 requests, too few for a load and a percentile; expected at least 20"):
        part_of(tmp_path, [(second, 10, 5) for second in range(19)]).notices([SMALL])
    (few,) = part_of(tmp_path, [(second, 10, 5) for second in range(20)]).notices([SMALL])
    assert "has only 20 requests" in few


def test_a_load_that_is_given_warns_that_bursts_change_their_length(tmp_path: Path):
    part = part_of(tmp_path, [(0, 10, 5), (1, 10, 5)])
    assert part.warnings(None) == part.warnings(1.0) == []
    (faster,), (slower,) = part.warnings(10.0), part.warnings(0.5)
    assert "replays it 10 times as fast, so its bursts are shorter" in faster
    assert "replays it 0.5 times as fast, so its bursts are longer" in slower


def test_a_trace_of_a_few_requests_has_a_first_round(tmp_path: Path):
    scenario = part_of(tmp_path, [(0, 10, 5), (1, 10, 5), (2, 10, 5)]).scenario
    candidates = make_candidates(scenario, {"speculation.steps": [1]}, None)
    whole = Plan(scenario, candidates, PlanQuestion(parse_slo("ttft_p99<1s"), None, None, range(2), None))
    assert whole._quarter["workload.num_requests"] == 1
