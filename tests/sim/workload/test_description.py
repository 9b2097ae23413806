"""Workloads described and resembled: reuse as a cache that is searched naively, and fits that find what was drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from foredraft import simulate
from foredraft.core.prompt import Prompt
from foredraft.sim.calibration.synthesis import ks_distance, synthesize, synthetic
from foredraft.sim.workload.description import ArrivalDescription, ReuseMeter, describe
from foredraft.sim.workload.workload import TimedRequest
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = {
    "prompt": {"kind": "lognormal", "mean": 500.0, "sigma": 0.7, "low": 8, "high": 9000},
    "output": {"value": 50},
}


@st.composite
def prompts(draw) -> Prompt:
    """Few ids, so that beginnings, and the same block behind other beginnings, occur again;
    the last block may be partial."""
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    return Prompt.of_blocks(ids, 4, 4 * len(ids) - draw(st.integers(0, 3)))


@given(st.lists(prompts(), min_size=1, max_size=8))
def test_an_infinite_cache_finds_the_longest_beginning_that_any_earlier_prompt_had(asked):
    meter = ReuseMeter([10**6])
    seen: list[list[int]] = []
    found = 0
    for prompt in asked:
        meter.add(prompt)
        tokens = prompt.materialize().tolist()
        common = (sum(np.cumprod([a == b for a, b in zip(tokens, other, strict=False)]).tolist()) for other in seen)
        found += min(max(common, default=0), len(tokens) - 1)
        seen.append(tokens)
    reuse = meter.read()
    assert reuse.infinite == pytest.approx(found / sum(map(len, seen)))
    assert reuse.caches == {10**6: reuse.infinite}


def test_the_least_recently_used_prompt_leaves_the_cache_first():
    a, b, c = (Prompt.of_blocks([first, first + 1], 8, 16) for first in (10, 20, 30))
    meter = ReuseMeter([32])
    for prompt in (a, b, a, c, a, b):  # c takes the place of b
        meter.add(prompt)
    reuse = meter.read()
    assert reuse.caches[32] == pytest.approx(2 * 15 / 96) and reuse.infinite == pytest.approx(3 * 15 / 96)
    assert reuse.distinct_tokens == 48 and reuse.requests == 0.5


def test_the_simulator_finds_as_much_as_the_infinite_cache_where_nothing_is_evicted(tmp_path):
    rng = np.random.default_rng(5)
    rows = []
    for i in range(60):
        path = [0, *(100 * int(rng.integers(1, 4)) + j for j in range(int(rng.integers(1, 4)))), 10_000 + i]
        length = 512 * len(path) - int(rng.integers(0, 500))
        rows.append({"timestamp": 3000 * i, "input_length": length, "output_length": 4, "hash_ids": path})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = simulate(None, {"workload.trace": str(trace), "speculation.algorithm": "NONE"})
    described, _ = describe(synthetic({"trace": str(trace)}))
    # The simulator's cache has the outputs, too, 4 tokens each, and the description has only the prompts.
    outputs = 4 * len(rows) / sum(row["input_length"] for row in rows)
    assert described.reuse.infinite <= result.summary["prefix_cache_hit_rate"] < described.reuse.infinite + outputs


def test_prompts_of_unknown_content_tell_nothing_about_reuse():
    described, _ = describe([TimedRequest(i * 10**9, Prompt(9 + i), 4) for i in range(9)])
    assert described.reuse is None and described.sessions is None and described.arrivals.gap_cv == 0.0


def test_requests_that_share_their_times_tell_no_gaps():
    batches = np.repeat(np.arange(400) * 3_000_000_000, 10)
    found = ArrivalDescription.of(batches)
    assert found.tick_s == 3.0 and min(found.dispersion) == 10.0
    poisson = np.cumsum(np.random.default_rng(1).exponential(1e8, 4000)).astype(np.int64)
    found = ArrivalDescription.of(poisson)
    assert found.tick_s is None and found.gap_cv == pytest.approx(1, abs=0.05)
    assert all(value == pytest.approx(1, abs=0.35) for window, value in found.dispersion.items() if window < 60)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"arrivals": "poisson", "rate": 20.0}, {"arrivals": "poisson"}),
        ({"arrivals": "constant", "rate": 20.0}, {"arrivals": "constant", "rate": pytest.approx(20, rel=0.01)}),
        ({"arrivals": "gamma", "rate": 20.0, "burstiness": 2.5}, {"arrivals": "gamma", "burstiness": pytest.approx(2.5, rel=0.15)}),
        ({"arrivals": "gamma", "rate": 20.0, "burstiness": 0.3}, {"arrivals": "gamma", "burstiness": pytest.approx(0.3, rel=0.15)}),
    ],
    ids=["poisson", "clock", "bursty", "even"],
)  # fmt: skip
def test_a_fit_finds_the_arrivals_and_lengths_that_were_drawn(table, found):
    source = synthetic({**LENGTHS, "num_requests": 6000, **table})
    made = synthesize(source, *describe(source))
    assert {key: made.table[key] for key in found} == found
    assert made.table["prompt"]["kind"] == "lognormal" and made.table["output"] == {"kind": "fixed", "value": 50}
    assert made.table["prompt"]["mean"] == pytest.approx(500, rel=0.05) and max(made.distance.values()) < 0.03


def test_a_fit_follows_a_rate_that_changes():
    source = synthetic(
        {**LENGTHS, "arrivals": "curve", "curve": [1, 3, 0], "rate": 10.0, "period_s": 400, "num_requests": 3900}
    )
    described, columns = describe(source)
    made = synthesize(source, described, columns)
    rates, times = made.table["curve"], columns.times_ns / 1e9
    assert made.table["arrivals"] == "curve" and "burstiness" not in made.table
    for share, rate in zip(np.linspace(0, 1, len(rates)), rates, strict=True):
        assert rate == pytest.approx(np.interp(share * times[-1], [0, 200, 400], [4 / 7, 12 / 7, 0]), abs=0.25)


def test_lengths_that_no_lognormal_has_keep_their_mean_and_percentiles():
    lens = np.random.default_rng(2).choice([10, 11, 400, 5000], 3000, p=[0.3, 0.3, 0.3, 0.1])
    source = [TimedRequest(i * 10**8, Prompt(int(n)), 7) for i, n in enumerate(lens)]
    made = synthesize(source, *describe(source))
    assert made.table["prompt"]["kind"] == "empirical" and made.distance["prompt"] < 0.04
    table = made.table["prompt"]
    assert np.average(table["values"], weights=table["weights"]) == pytest.approx(lens.mean(), rel=0.01)


def test_the_distance_is_that_of_the_distribution_functions():
    assert ks_distance(np.array([1, 2, 3]), np.array([1, 2, 3, 1, 2, 3])) == 0
    assert ks_distance(np.array([1, 1]), np.array([2])) == 1
    assert ks_distance(np.arange(100), np.arange(100) + 10) == pytest.approx(0.1)


def test_a_fit_of_shared_prefixes_finds_their_hit_rates():
    source = synthetic({**LENGTHS, "num_requests": 3000, "prefixes": {"groups": 64, "length": 256, "zipf": 1.0}})
    described, columns = describe(source, [30_000])
    made = synthesize(source, described, columns)
    assert made.description.reuse.infinite == pytest.approx(described.reuse.infinite, abs=0.03)
    assert made.description.reuse.caches[30_000] == pytest.approx(described.reuse.caches[30_000], abs=0.05)
