"""What a plan says about its trace before it searches, and in its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.candidates import make_candidates
from foredraft.planning.plan import Plan, Question
from foredraft.planning.slo import parse_slo
from foredraft.planning.trace_part import TracePart
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
    (notice,) = part_of(tmp_path, rows).notices([SMALL, ("large", 9000)])
    assert "the prompt fills the context of llama-3.1-8b (1,000 tokens) in 2 of 24 requests" in notice
    assert "the longest has 4,000 tokens (line 5)" in notice and "refused" in notice and "In 1 more" in notice
    assert part_of(tmp_path, rows).notices([("large", 9000)]) == []
    assert "fills" not in "".join(part_of(tmp_path, rows, requests=1).notices([SMALL]))  # the runs do not come so far


def test_a_trace_without_a_request_that_fits_is_refused(tmp_path: Path):
    part = part_of(tmp_path, [(0, 1000, 5), (1, 2000, 5), *((second, 1000, 5) for second in FEW)])
    with pytest.raises(ConfigError, match=r"in every request; the longest has 2,000 tokens \(line 3\)"):
        part.notices([SMALL])
    assert len(part.notices([SMALL, ("large", 9000)])) == 1
    with pytest.raises(ConfigError, match=r"has no request between workload\.start_s"):
        part_of(tmp_path, [(0, 10, 5)], start_s=60)


def test_the_busiest_stretch_is_named_if_the_first_requests_are_not_it(tmp_path: Path):
    times = [*range(0, 100, 10), *range(100, 110), *range(110, 210, 10)]
    rows = [(second, 10, 5) for second in times]
    (notice,) = part_of(tmp_path, rows, requests=10).notices([SMALL])
    assert "The runs take the first 10 of the 30 requests of the trace, 0.111 per second; the whole trace has" in notice
    assert "has 0.15, so 1 × the trace is 0.69 × its mean rate here" in notice
    assert "The busiest 10 begin at 100 s, 1.11 per second: --set workload.start_s=100 takes them" in notice
    (later,) = part_of(tmp_path, rows, num_requests=10, start_s=50).notices([SMALL])
    assert "first 10 of the 25" in later and "begin at 100 s" in later
    even = [(second, 10, 5) for second in range(30)]
    assert part_of(tmp_path, even, requests=10).first_only() == [
        "The runs take the first 10 of the 30 requests of the trace."
    ]
    assert part_of(tmp_path, even, requests=30).first_only() == part_of(tmp_path, even).first_only() == []


def test_a_part_that_is_denser_than_the_whole_is_told(tmp_path: Path):
    rows = [(second, 10, 5) for second in [*range(20), *range(20, 220, 10)]]
    (notice,) = part_of(tmp_path, rows, requests=20).first_only()
    assert notice.endswith("1.05 per second; the whole trace has 0.19, so 1 × the trace is 5.4 × its mean rate here.")


def test_a_trace_of_few_requests_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has 19 requests, too few for a load and a percentile; expected at least 20"):
        part_of(tmp_path, [(second, 10, 5) for second in range(19)]).notices([SMALL])
    assert part_of(tmp_path, [(second, 10, 5) for second in range(20)]).notices([SMALL]) == []


def test_an_answer_for_a_given_load_says_that_bursts_change_their_length(tmp_path: Path):
    part = part_of(tmp_path, [(0, 10, 5), (1, 10, 5)])
    assert part.qualifications(None) == part.qualifications(1.0) == []
    (faster,), (slower,) = part.qualifications(10.0), part.qualifications(0.5)
    assert "replays it 10 times as fast, so its bursts are shorter" in faster
    assert "replays it 0.5 times as fast, so its bursts are longer" in slower


def test_a_trace_of_a_few_requests_has_a_first_round(tmp_path: Path):
    scenario = part_of(tmp_path, [(0, 10, 5), (1, 10, 5), (2, 10, 5)]).scenario
    candidates = make_candidates(scenario, {"speculation.steps": [1]}, None)
    whole = Plan(scenario, candidates, Question(parse_slo("ttft_p99<1s"), None, None, range(2), None, 0.0))
    assert whole._quarter["workload.num_requests"] == 1
