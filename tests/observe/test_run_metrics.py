import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from foredraft.core.contract.events import EngineStarted, Planned
from foredraft.core.contract.request import Request
from foredraft.core.errors import InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.engine import Engine
from foredraft.observe.measuring import metrics as metrics_module
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.observe.measuring.summary import SLO
from observed_run import ALGORITHM, VARIANTS, ToyExecutor, make_config, make_controller, recorded_events
from slow_metrics import SlowMetrics


def merged(*streams):
    """Events of several replicas, ordered by time as a driver would see them."""
    tagged = [(event, replica) for replica, stream in enumerate(streams) for event in stream]
    starts = [(replica, event) for event, replica in tagged if isinstance(event, EngineStarted)]
    others = [(replica, event) for event, replica in tagged if not isinstance(event, EngineStarted)]
    return starts + sorted(others, key=lambda pair: pair[1].now_ns)


def fed(events, *, out_dir=None):
    metrics = RunMetrics(out_dir)
    sinks = {replica: metrics.sink(replica) for replica in sorted({replica for replica, _ in events})}
    for replica, event in events:
        sinks[replica](event)
    return metrics


def close_to(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def check_against(metrics, slow):
    first, last = slow.samples[0][0], slow.samples[-1][0]
    summary = metrics.summary()
    completed = slow.completed
    reasons = [request["reason"] for request in slow.requests]
    assert summary["completed"] == len(completed) > 0
    assert (summary["failed"], summary["aborted"]) == (reasons.count("error"), reasons.count("abort"))
    assert summary["refused"] == slow.refused
    assert summary["submitted"] == len(slow.requests) + slow.refused + slow.open
    assert summary["unfinished"] == slow.open
    assert summary["incomplete"] == (slow.open > 0)
    assert summary["retractions"] == slow.retractions
    assert summary["truncated"] == sum(r["reason"] == "length" and r["tokens"] < r["asked"] for r in slow.requests)
    assert summary["duration"] == close_to((last - first) / 1e9)
    assert summary["total_input_tokens"] == sum(r["prompt"] for r in completed)
    assert summary["total_output_tokens"] == sum(r["tokens"] for r in completed)
    assert summary["delivered_tokens"] == slow.delivered
    assert summary["request_throughput"] == close_to(len(completed) / summary["duration"])
    assert summary["output_throughput"] == close_to(summary["total_output_tokens"] / summary["duration"])
    check_latencies(summary, slow)
    verified = sum(slow.correct_histogram.values())
    correct = sum(drafts * rows for drafts, rows in slow.correct_histogram.items())
    assert summary["verified_rows"] == verified
    assert summary["accept_length"] == close_to(1 + correct / verified)
    assert summary["accept_rate"] == close_to(correct / slow.proposed)
    assert summary["wasted_draft_tokens"] == slow.proposed - correct
    assert {n: rows for n, rows in enumerate(summary["correct_drafts_histogram"]) if rows} == dict(
        slow.correct_histogram
    )
    at_steps = {
        (int(key.rpartition("_")[2]), drafts): rows
        for key in summary
        if key.startswith("correct_drafts_at_steps_")
        for drafts, rows in enumerate(summary[key])
        if rows
    }
    assert at_steps == dict(slow.correct_at_steps)
    decoding = [r["steps"] for r in slow.rounds if r["steps"] is not None]
    for steps in range(8):
        assert summary.get(f"rounds_at_steps_{steps}", 0.0) == close_to(decoding.count(steps) / len(decoding))
    assert summary["switches"] == slow.switches
    assert summary["prefix_cache_hit_rate"] == (slow.cached / slow.looked_up if slow.looked_up else None)
    running, waiting, held = slow.means(last - first)
    assert summary["mean_running"] == close_to(running)
    assert summary["mean_queue_length"] == close_to(waiting)
    assert summary["mean_concurrency"] == close_to(running + waiting)
    assert summary["kv_occupancy_mean"] == close_to(held / summary["kv_capacity_slots"])
    assert (summary["max_running"], summary["max_queue_length"]) == slow.maxima()[:2]
    json.dumps(summary, allow_nan=False)


def check_latencies(summary, slow):
    columns = {"ttft": [], "tpot": [], "e2el": []}
    for request in slow.completed:
        columns["ttft"].append(request["first"] - request["arrival"])
        columns["e2el"].append(request["finish"] - request["arrival"])
        if request["tokens"] > 1:
            columns["tpot"].append((request["finish"] - request["first"]) / (request["tokens"] - 1))
    for name, values in columns.items():
        assert summary[f"mean_{name}_ms"] == close_to(np.mean(values) / 1e6)
        assert summary[f"std_{name}_ms"] == close_to(np.std(values) / 1e6)
        assert summary[f"median_{name}_ms"] == close_to(np.median(values) / 1e6)
        assert summary[f"p99_{name}_ms"] == close_to(np.percentile(values, 99) / 1e6)
    assert summary["mean_itl_ms"] == close_to(np.mean(slow.itl) / 1e6)
    assert summary["std_itl_ms"] == pytest.approx(np.std(slow.itl) / 1e6, rel=1e-6)
    for key, share in (("median", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert summary[f"{key}_itl_ms"] == pytest.approx(np.percentile(slow.itl, share) / 1e6, rel=1e-3)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_dictionaries_on_random_runs(variant, seed, monkeypatch):
    # Small notes: many flushes in the middle of requests.
    monkeypatch.setattr(metrics_module, "_FLUSH_ENTRIES", (1, 40, 1 << 14)[seed])
    events = [(0, event) for event in recorded_events(seed, 90, **VARIANTS[variant])]
    check_against(fed(events), SlowMetrics(events))


def test_agrees_on_two_replicas_and_on_a_run_that_breaks_off():
    events = merged(recorded_events(5, 60), recorded_events(6, 80, overlap=False))
    events = events[: int(len(events) * 0.8)]
    slow = SlowMetrics(events)
    assert slow.open > 0
    check_against(fed(events), slow)


def test_the_random_runs_meet_what_matters():
    """The comparison above would prove little on runs without blocks, retractions, departures in flight, …"""
    seen = {
        "blocks": 0,
        "retracted": 0,
        "departed": 0,
        "left_a_multi_step": 0,
        "cached": 0,
        "failed": 0,
        "refused": 0,
        "switches": 0,
        "again": 0,
    }
    for seed, variant in product(range(3), VARIANTS):
        events = [(0, event) for event in recorded_events(seed, 90, **variant)]
        slow = SlowMetrics(events)
        commits = [event for _, event in events if hasattr(event, "kept") and event.kept is not None]
        seen["blocks"] += sum(event.result.decode.rounds > 1 for event in commits)
        seen["departed"] += sum(bool((event.kept == 0).any()) for event in commits)
        seen["left_a_multi_step"] += slow.left_a_multi_step
        seen["retracted"] += slow.retractions
        seen["cached"] += slow.cached
        seen["refused"] += slow.refused
        seen["switches"] += slow.switches
        seen["failed"] += sum(r["reason"] == "error" for r in slow.requests)
        seen["again"] += len(slow.requests) - len({r["id"] for r in slow.requests})
    assert all(seen.values()), seen


def test_writes_a_row_per_request_and_per_round(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("foredraft.observe.output_files.ROW_GROUP", 40)
    monkeypatch.setattr(metrics_module, "_FLUSH_ENTRIES", 100)
    events = merged(recorded_events(2, 70), recorded_events(3, 70, num_pages=45))
    slow = SlowMetrics(events)
    metrics = fed(events, out_dir=tmp_path)
    metrics.close()
    metrics.close()
    assert parquet.ParquetFile(tmp_path / "requests.parquet").num_row_groups > 1
    rounds = parquet.read_table(tmp_path / "rounds.parquet").to_pylist()
    assert rounds == [{key: row[key] for key in rounds[0]} for row in slow.rounds]
    table = parquet.read_table(tmp_path / "requests.parquet").to_pylist()
    written = [row for row in table if row["reason"] != "refused"]
    assert len(table) - len(written) == slow.refused > 0
    expected = [
        {
            "request_id": r["id"],
            "replica": r["replica"],
            "arrival_ns": r["arrival"],
            "first_scheduled_ns": r["scheduled"],
            "first_token_ns": r["first"],
            "finish_ns": r["finish"],
            "prompt_len": r["prompt"],
            "num_cached": r.get("cached", 0),
            "num_output": r["tokens"],
            "correct_drafts": r["correct"],
            "verify_rounds": r["verified"],
            "retractions": r["retractions"],
            "reason": r["reason"],
        }
        for r in slow.requests
    ]

    def by_id(row):
        return (row["request_id"], row["replica"], row["arrival_ns"])

    assert sorted(written, key=by_id) == sorted(expected, key=by_id)


def test_goodput_asks_every_demand():
    metrics = RunMetrics()
    # ttft 10, 20, 30 ms; e2el 10, 120, 230 ms; 1, 11, 11 tokens: tpot 0, 10, 20 ms
    metrics.measured.ttft_ns.extend(np.array([10, 20, 30]) * 10**6)
    metrics.measured.e2el_ns.extend(np.array([10, 120, 230]) * 10**6)
    metrics.measured.num_output.extend(np.array([1, 11, 11]))
    metrics.measured.counts.update(length=3, error=1, abort=5)

    def goodput(**limits):
        summary = metrics.summary(2 * 10**9, SLO(**limits))
        return summary["request_goodput"], summary["slo_attainment"]

    assert goodput(ttft_ms=20) == (1.0, 0.5)
    assert goodput(ttft_ms=19.99) == (0.5, 0.25)
    assert goodput(tpot_ms=10) == (1.0, 0.5)
    assert goodput(e2el_ms=230) == (1.5, 0.75)
    assert goodput(ttft_ms=20, tpot_ms=5, e2el_ms=230) == (0.5, 0.25)
    assert goodput() == (None, None)

    def taken(share, **limits):
        return metrics.summary(2 * 10**9, SLO(attainment=share, **limits))["slo_taken"]

    assert taken(0.25, ttft_ms=20) == 0.5 and taken(0.5, ttft_ms=20) == 1.0  # of four that ended
    assert taken(0.51, ttft_ms=20) == taken(0.75, ttft_ms=20) == 1.5
    assert taken(0.76, ttft_ms=20) is taken(0.5) is None  # the failed one is within no limits
    assert taken(0.5, ttft_ms=40, tpot_ms=8) == 1.25
    assert metrics.summary(2 * 10**9)["request_goodput"] is None


def test_a_run_without_requests_has_no_numbers_but_is_json():
    summary = RunMetrics().summary()
    json.dumps(summary, allow_nan=False)
    assert summary["completed"] == 0 and summary["mean_ttft_ms"] is None and summary["accept_length"] is None
    assert summary["output_throughput"] is None and summary["incomplete"] is False
    assert RunMetrics().timeline()["running"] == []


def test_a_state_that_lasts_no_time_is_not_seen():
    metrics = RunMetrics()
    engine = Engine(make_config(), ALGORITHM, make_controller(), events=metrics.sink(0))
    executor = ToyExecutor(0)
    for i in range(5):
        engine.submit(Request(str(i), Prompt.of_length(4), 3), 0)
    while not engine.is_idle:
        while (step := engine.plan(executor.clock_ns)) is not None:
            executor.launch(step)
        engine.commit(executor.collect(), executor.clock_ns)
    summary = metrics.summary()
    assert (summary["max_queue_length"], summary["max_running"], summary["max_concurrency"]) == (0, 5, 5)


def test_an_aborted_request_is_over_at_once_and_closed_with_the_next_commit(tmp_path):
    metrics = RunMetrics(tmp_path)
    engine = Engine(make_config(overlap=False), ALGORITHM, make_controller(), events=metrics.sink(0))
    executor = ToyExecutor(0, stop_share=0.0)
    engine.submit(Request("a", Prompt.of_length(4), 50), 0)
    engine.submit(Request("b", Prompt.of_length(4), 50), 0)
    for _ in range(2):
        executor.launch(engine.plan(executor.clock_ns))
        engine.commit(executor.collect(1), executor.clock_ns)
    executor.launch(engine.plan(executor.clock_ns))
    abort_ns = executor.clock_ns + 5
    engine.abort("a", abort_ns)
    summary = metrics.summary()
    assert (summary["aborted"], summary["unfinished"]) == (1, 1)
    engine.commit(executor.collect(1), executor.clock_ns)
    metrics.flush()
    assert metrics.measured.counts["abort"] == 1 == metrics.summary()["aborted"]
    engine.abort("b", executor.clock_ns)
    metrics.close()
    assert metrics.summary()["aborted"] == 2 and not metrics.summary()["incomplete"]
    rows = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "requests.parquet").to_pylist()
    assert [(row["request_id"], row["finish_ns"]) for row in rows] == [("a", abort_ns), ("b", executor.clock_ns)]
    assert all(row["num_output"] > 1 for row in rows)


def test_device_time_is_shared_by_the_duration():
    metrics = RunMetrics()
    metrics.observe_device(0, 300)
    metrics.observe_device(0, 300)
    metrics.observe_device(1, 200)
    metrics.sink(2)
    summary = metrics.summary(1000)
    assert summary["device_busy_share_per_replica"] == [0.6, 0.2, None]
    assert summary["device_busy_share"] == pytest.approx(0.4)


def test_more_than_the_whole_is_no_share():
    metrics = RunMetrics()
    metrics.sink(0)
    metrics.observe_device(0, 1001)
    with pytest.raises(InvariantViolation, match="SIM-07: 1001 of 1000 is no share"):
        metrics.summary(1000)


def test_means_do_not_depend_on_flushes_and_end_with_the_run(monkeypatch):
    """What is held after the last request has left counts up to the end of the run, and no further."""
    events = [(0, event) for event in recorded_events(2, 80, num_pages=1000)]
    last_ns = max(event.now_ns for _, event in events if hasattr(event, "now_ns"))
    plan = next(event for _, event in reversed(events) if isinstance(event, Planned))
    summaries = []
    for flush_every in (1, 1 << 11):
        monkeypatch.setattr(metrics_module, "_FLUSH_EVENTS", flush_every)
        metrics = fed([*events, (0, replace(plan, now_ns=last_ns + 10**12, step=None, num_waiting=0))])
        summaries.append(json.dumps(metrics.summary(last_ns)))
    whole = fed(events).summary(last_ns)
    assert summaries[0] == summaries[1] == json.dumps(whole)


def test_the_timeline_adds_up_to_the_totals():
    events = [(0, event) for event in recorded_events(5, 120, num_pages=1000)]
    metrics = fed(events)
    summary, timeline = metrics.summary(), metrics.timeline()
    assert 60 < len(timeline["running"]) <= 120
    widths = np.full(len(timeline["running"]), timeline["bucket_s"])
    widths[-1] = summary["duration"] - widths[:-1].sum()
    assert 0 < widths[-1] <= timeline["bucket_s"]
    total = summary["duration"]
    assert (np.array(timeline["running"]) * widths).sum() == close_to(summary["mean_running"] * total)
    assert (np.array(timeline["waiting"]) * widths).sum() == close_to(summary["mean_queue_length"] * total)
    assert (np.array(timeline["kv_occupancy"]) * widths).sum() == close_to(summary["kv_occupancy_mean"] * total)
    assert (np.array(timeline["tokens_per_s"]) * widths).sum() == close_to(summary["delivered_tokens"])
    assert all(steps is None or 0 <= steps <= 5 for steps in timeline["steps"])


def test_memory_follows_the_open_requests_and_not_the_run():
    metrics = RunMetrics()
    config = make_config(max_queue=None, prefix_cache=False, num_pages=400)
    engine = Engine(config, ALGORITHM, make_controller("fixed3"), events=metrics.sink(0))
    executor = ToyExecutor(0)
    for wave in range(12):
        for i in range(100):
            engine.submit(Request(f"{wave}-{i}", Prompt.of_length(20), 12), executor.clock_ns)
        while not engine.is_idle:
            while (step := engine.plan(executor.clock_ns)) is not None:
                executor.launch(step)
            engine.commit(executor.collect(), executor.clock_ns)
        metrics.flush()
    assert metrics.summary()["completed"] == 1200
    assert metrics.lives.open.capacity == 256
    assert len(metrics._samples) <= 2 * 5 and not metrics._steps
