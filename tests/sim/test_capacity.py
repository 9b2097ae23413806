"""Saturation and overload: an estimate that agrees with what the simulator serves, and what shows an overload."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft import simulate
from foredraft.sim.load import make_workload
from foredraft.sim.scenario import Scenario
from foredraft.sim.summary.capacity import OpenLoad, is_overloaded
from foredraft.sim.summary.steady import steady_window
from hypothesis import given
from hypothesis import strategies as st

FIXED = {"prompt": {"kind": "fixed", "value": 500}, "output": {"kind": "fixed", "value": 200}}
SMALL_BATCH = {"engine": {"max_running": 64}}


def summary_of(workload: dict, **tables) -> dict:
    return simulate({"workload": {**FIXED, **workload}, **SMALL_BATCH, **tables}).summary


@pytest.mark.fast("NONE", ci="*")
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NONE"])
def test_full_batches_are_saturation(algorithm):
    """More clients than the batch holds: what is served is what can be served."""
    full = summary_of({"concurrency": 100, "num_requests": 300}, speculation={"algorithm": algorithm})
    assert full["mean_running"] > 0.9 * 64
    assert full["saturation"] == pytest.approx(1.0, abs=0.1)
    assert full["overloaded"] is None, "clients of a closed loop wait for each other"
    few = summary_of({"concurrency": 4, "num_requests": 100}, speculation={"algorithm": algorithm})
    assert few["saturation"] < 0.5 and few["device_busy_share"] > 0.9, "busy is not full"


def test_the_figure_follows_the_rate_and_says_where_the_queue_begins_to_grow():
    slow, fast = (summary_of({"rate": rate, "num_requests": 300}) for rate in (10.0, 60.0))
    assert slow["saturation"] < 0.5 and slow["overloaded"] is False
    assert fast["saturation"] > 1.2 and fast["overloaded"] is True
    # The rates offered are those asked for, up to chance; accept lengths differ with the batch.
    assert fast["saturation"] / slow["saturation"] == pytest.approx(6, rel=0.25)


def test_two_replicas_serve_twice_as_much():
    one, two = (summary_of({"rate": 20.0, "num_requests": 200}, hardware={"replicas": n}) for n in (1, 2))
    assert two["saturation"] == pytest.approx(one["saturation"] / 2, rel=0.1)


@pytest.mark.ci
def test_the_narrower_of_two_pools_decides():
    tables = {"engine": {"max_running": 64, "page_size": 16}}
    for prefill, decode, is_over in ((1, 4, False), (4, 1, True)):
        pools = {"prefill": prefill, "decode": decode}
        summary = summary_of({"rate": 70.0, "num_requests": 200}, disaggregation=pools, **tables)
        assert (summary["saturation"] > 1) is is_over


def test_a_queue_that_sheds_is_overloaded():
    summary = summary_of({"rate": 80.0, "num_requests": 300}, engine={"max_running": 64, "max_queue": 10})
    assert summary["refused"] > 50 and summary["overloaded"] is True and summary["saturation"] > 1


def load(waiting, bucket_s=1.0, last_s=None, num_arrivals=400, num_shed=0, **more) -> OpenLoad:
    last_s = len(waiting) * bucket_s if last_s is None else last_s
    fields = {"mean_life_s": None, "saturation": 0.9, "margin": 0.0, "in_system": waiting, **more}
    numbers = {"per_s": num_arrivals / last_s, "num_arrivals": num_arrivals, "num_shed": num_shed}
    return OpenLoad(arrivals_s=last_s, bucket_s=bucket_s, waiting=waiting, **numbers, **fields)


def queue(lengths, num_shed=0) -> bool:
    return is_overloaded(load([*map(float, lengths)] or [0.0], num_shed=num_shed))


def test_what_counts_as_an_overload():
    assert queue(np.linspace(0, 200, 100))
    assert not queue(np.linspace(0, 20, 100)), "as much as chance explains"
    assert not queue(np.linspace(200, 0, 100)), "it shrinks"
    assert not queue([*np.linspace(0, 200, 60), *np.linspace(200, 60, 40)]), "a burst that is worked off"
    assert not queue([0.0] * 100) and not queue([])
    assert queue([3.0] * 100, num_shed=21) and not queue([3.0] * 100, num_shed=20)
    tail = [*np.linspace(0, 200, 100), *np.zeros(300)]
    assert is_overloaded(load(tail, last_s=100.0)), "the time after the last arrival does not count"
    assert not is_overloaded(load([1.0, 2.0], last_s=100.0)), "the last requests had no output"
    noise = 30 + 3 * np.random.default_rng(1).standard_normal(100)
    assert not queue(noise)


def test_requests_that_run_count_once_the_first_ones_have_ended():
    grows, none = [*np.linspace(0, 200, 100)], [0.0] * 100
    assert not is_overloaded(load(none, in_system=grows, mean_life_s=40.0)), "they may still be the first ones"
    assert is_overloaded(load(none, in_system=grows, mean_life_s=10.0))
    assert load(none, in_system=grows).about_overload.startswith("4/s is asked, about 2/s is the most; ")


def test_a_load_beyond_full_batches_is_an_overload_however_short_the_run():
    few = {"num_arrivals": 20, "saturation": 1.3}
    assert is_overloaded(load([0.0] * 10, **few))
    assert not is_overloaded(load([0.0] * 10, margin=0.4, **few)), "as much as chance explains"
    told = "2/s is asked, about 1.5/s is the most; all latencies grow with the length of the run"
    assert load([0.0] * 10, **few).about_overload == told
    near = load([0.0] * 10, num_arrivals=16_000, last_s=1_000.0, saturation=1.01)
    assert near.about_overload.startswith("16/s is asked, about 15.8/s is the most")


def test_an_overload_whose_drain_is_much_longer_than_its_arrivals():
    """The arrivals then fill few of the buckets, however many there are."""
    waiting = [36, 106, 163, 215, 279, 347, 368, 365, 360, 340, 300, 250, 200, 150, 100, 50, 0]
    assert is_overloaded(load(waiting, 8.59, 50.0))
    assert is_overloaded(load(waiting[3:], 40.0, 50.0)) and is_overloaded(load(waiting[3:], 80.0, 50.0))
    assert is_overloaded(load([200], 1.0, 1.0)), "the last arrival is at the end of the run"
    assert not is_overloaded(load([36, 38, 41, 44, 47, 49, 50, 30, 0], 8.59, 50.0)), "as much as chance explains"
    assert not is_overloaded(load([36, 30, 20, 0], 40.0, 50.0))
    assert not is_overloaded(load([163, 215, 279, 200, 100], 8.59, 50.0)), "it shrinks at the end"


@given(
    share=st.one_of(st.floats(0.1, 0.88), st.floats(1.5, 5.0)),
    per_bucket=st.floats(10, 200),
    buckets=st.integers(60, 120),
    seed=st.integers(0, 1 << 30),
)
def test_a_queue_alone_shows_an_overload_on_both_sides_of_the_capacity(share, per_bucket, buckets, seed):
    """Poisson arrivals at a share of what a server takes of its queue; no estimate of full batches helps."""
    arrivals = np.random.default_rng(seed).poisson(per_bucket, buckets)
    waiting, length = [], 0.0
    for came in arrivals:
        length = max(0.0, length + came - per_bucket / share)
        waiting.append(length)
    one = load(waiting, num_arrivals=int(arrivals.sum()), saturation=None)
    assert is_overloaded(one) is (share > 1)


VARIED = {"prompt": {"kind": "lognormal", "mean": 500, "sigma": 0.7}, "output": {"kind": "lognormal", "mean": 200}}
POOLS = {"disaggregation": {"prefill": 1, "decode": 1}, "engine": {"max_running": 64, "page_size": 16}}


def of_share(share: float, num_requests: int, seed: int, arrivals: str = "poisson", **tables) -> dict:
    """Return the summary of a run at a share of what full batches serve, whose queue has no bound."""
    scenario = {
        "speculation": {"algorithm": "NONE"},
        "hardware": {"server": "vllm-0.18", "kernels": "roofline"},
        **tables,
    }
    scenario["engine"] = {"max_running": 512, **tables.get("engine", {})}
    probe = simulate({"workload": {**VARIED, "rate": 1.0, "num_requests": 60}, **scenario}).summary
    workload = {**VARIED, "rate": share / probe["saturation"], "num_requests": num_requests, "arrivals": arrivals}
    return simulate({"workload": workload, "seed": seed, **scenario}).summary


@pytest.mark.parametrize("num_requests", [60, 400])
def test_every_length_of_an_overloaded_run_says_it_and_has_no_interval(num_requests):
    """Without a queue: `engine.max_running` is more than these runs reach."""
    summary = of_share(1.2, num_requests, seed=1)
    assert summary["max_queue_length"] < 20 and summary["overloaded"] is True
    assert not [key for key in summary if key.endswith("_interval") and key.startswith("mean")]
    assert "/s is asked, about " in summary["overload"]


@pytest.mark.fast("poisson-tables0-1", ci="*")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("arrivals", "tables"),
    [
        ("poisson", {}),
        ("constant", {}),
        ("gamma", {}),
        pytest.param("poisson", {"hardware": {"replicas": 2, "kernels": "roofline"}}, marks=pytest.mark.slow),
        pytest.param("poisson", POOLS, marks=pytest.mark.slow),
        pytest.param("poisson", {"speculation": {"algorithm": "EAGLE3"}}, marks=pytest.mark.slow),
    ],
)
def test_a_loaded_service_in_balance_is_no_overload(arrivals, tables, seed):
    for num_requests in (40, 400):
        summary = of_share(0.9, num_requests, seed, arrivals, **tables)
        assert summary["overloaded"] is False and summary["overload"] is None
        assert "mean_tpot_ms_interval" in summary or "hardware" in tables


def test_the_steady_window_leaves_out_ramp_and_drain():
    assert steady_window(arrivals_s=100.0, mean_life_s=5.0, bucket_s=2.0) == (8, 50)
    assert steady_window(100.0, 60.0, 2.0) == (25, 50), "of an overload the second half of the arrivals"
    assert steady_window(3.0, 1.0, 2.0) is None and steady_window(0.0, 1.0, 1.0) is None
    assert steady_window(100.0, None, 2.0) is None and steady_window(100.0, 1.0, 0.0) is None


@pytest.mark.parametrize("workload", [{"rate": 20.0, "num_requests": 400}, {"concurrency": 60, "num_requests": 400}])
def test_rates_of_the_load_are_those_while_it_was_on(workload):
    summary = summary_of(workload, speculation={"algorithm": "NONE"})
    begin, end = summary["steady_from"], summary["steady_until"]
    assert 0 < begin < end < summary["duration"]
    bucket_s, tokens = summary["timeline_bucket_s"], summary["timeline_tokens_per_s"]
    counted = tokens[round(begin / bucket_s) : round(end / bucket_s)]
    assert summary["steady_output_throughput"] == pytest.approx(np.mean(counted))
    assert summary["output_throughput"] < 0.985 * summary["steady_output_throughput"], (
        "the whole run has ramp and drain"
    )
    assert summary["output_throughput"] == pytest.approx(summary["total_output_tokens"] / summary["duration"])
    if "concurrency" in workload:
        assert summary["steady_mean_concurrency"] == pytest.approx(60, rel=0.02)
        assert summary["mean_concurrency"] < 58


def test_rates_of_an_overload_do_not_depend_on_its_length():
    """The drain of a short run has batches that only shrink."""
    short, long = (of_share(1.5, count, 3, engine={"max_running": 48}) for count in (400, 1600))
    assert short["overloaded"] and long["overloaded"]
    assert short["steady_output_throughput"] == pytest.approx(long["steady_output_throughput"], rel=0.15)


def test_a_closed_loop_is_long_enough_for_its_ramp():
    scenario = {"workload": {**FIXED, "concurrency": 50}}
    assert make_workload(Scenario.model_validate(scenario), 8192).num_requests == 1150


def test_a_trace_that_begins_late_has_its_window_from_its_first_arrival(tmp_path):
    rows = [f"{1000 + i / 20},300,40" for i in range(400)]
    trace = tmp_path / "late.csv"
    trace.write_text("\n".join(["arrival_s,prompt,output", *rows]) + "\n")
    columns = "arrival=arrival_s,prompt=prompt,output=output"
    workload = {"trace": str(trace), "columns": columns, "start_s": 0.0}
    summary = simulate({"workload": workload, "speculation": {"algorithm": "NONE"}, **SMALL_BATCH}).summary
    assert summary["overloaded"] is False
    assert summary["steady_request_throughput"] == pytest.approx(20, rel=0.05)
