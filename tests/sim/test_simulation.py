"""A run as a whole: what actors do, what must hold of any queue, what is refused."""

import csv
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import foredraft
import pytest
from foredraft.core.contract.events import Committed, Planned
from foredraft.core.contract.request import FinishReason
from foredraft.core.contract.step import PLAIN_ROUND
from foredraft.core.kv.counting import CountingStore
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.cost.host import HOST_PRESETS
from foredraft.sim.faults.plan import KINDS, FaultPlan, fault_plan
from foredraft.sim.running.report import NothingFits
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from foredraft.sim.summary.summary import summarize_run
from foredraft.sim.workload.trace_inference import TraceError

SMALL = {
    "workload": {
        "num_requests": 80,
        "rate": 10.0,
        "prompt": {"kind": "fixed", "value": 200},
        "output": {"kind": "fixed", "value": 50},
    },
    "model": {"context_len": 2048},
}


def merged(base: dict, **tables: dict) -> dict:
    return {**base, **{name: {**base.get(name, {}), **table} for name, table in tables.items()}}


def simulate(scenario: dict):
    metrics = RunMetrics(None)
    simulation = Simulation(scenario_from_dict(scenario, "test"), sinks=lambda replica: [metrics.sink(replica)])
    report = simulation.run()
    for replica, busy_ns in enumerate(report.device_busy_ns):
        metrics.observe_device(replica, busy_ns)
    return simulation, report, metrics.summary(report.duration_ns)


def test_clients_that_could_still_leave_do_not_stretch_the_run():
    """A deadline's timer goes off after its request has ended:
    it is no part of the run, and no share of its throughput."""
    _, report, summary = simulate(SMALL)
    _, patient, same = simulate(merged(SMALL, clients={"deadline_s": 600.0}))
    assert patient.duration_ns == report.duration_ns and same["output_throughput"] == summary["output_throughput"]


RESERVED_AHEAD = ("committed_steps", "kv_occupancy_mean", "kv_occupancy_max", "timeline_kv_occupancy")
BUSY = {
    "seed": 5,
    "model": {"context_len": 1024},
    "engine": {"max_running": 8, "max_queue": 12, "kv_slots": 4000, "chunk_size": 256},
    "speculation": {"algorithm": "EAGLE3", "adaptive": "with-zero"},
    "workload": {"num_requests": 20, "rate": 12.0, "prompt": {"mean": 120.0, "high": 600}, "output": {"mean": 50.0}},
}
SERVICES = {
    "device": {},
    "either": {"model": {"target": "qwen3-0.6b"}, "hardware": {"host": "vllm-0.10"}},
    "host": {"model": {"target": "qwen3-0.6b"}, "hardware": {"host": "vllm-0.10", "gpu": "B200"}},
    "room": {"engine": {"guarantee_output": 1.0, "kv_slots": 2600}, "hardware": {"server": "trtllm-1.x"}},
    "look-ups": {"speculation": {"algorithm": "NGRAM"}},
    "polls": {"front_end": {"poll_steps": 7}},
    "front end": {"front_end": {"request_us": 4000.0, "prompt_token_us": 20.0, "poll_steps": 3}},
    "chunks of output": {
        "front_end": {"stream_interval": 9, "chunk_us": 2500.0, "output_token_us": 150.0},
        "workload": {"concurrency": 6},
    },
    "others": {
        "engine": {"batch_wait_rounds": 12, "batch_wait_tokens": 0.9},
        "hardware": {"server": "trtllm-1.x", "correction": "off"},
    },
    "share": {"engine": {"guarantee_output": 0.7, "kv_slots": 2600}, "workload": {"max_tokens": 800}},
    "estimate": {
        "model": {"context_len": 600},
        "engine": {"guarantee_rounds": 60, "kv_slots": 2600, "chunk_size": 64},
        "hardware": {"server": "sglang-0.5", "correction": "off"},
        "workload": {"max_tokens": 500, "output": {"mean": 120.0, "high": 500}},
    },
    "retractions": {
        "model": {"context_len": 600},
        "engine": {"guarantee_output": 0.05, "guarantee_rounds": 60, "kv_slots": 1800, "chunk_size": 64},
        "hardware": {"server": "sglang-0.5", "correction": "off"},
        "workload": {"max_tokens": 300, "output": {"mean": 240.0, "high": 500}},
    },
}
"""What a round takes longer for: a small model on a fast device is done before the host is; requests that wait for room
for outputs, also for a share that falls, or give way by the rules of SGLang; requests that wait for the scheduler to
look at its queue, or for more requests; and clients that wait for their tokens."""


def not_of_steps() -> FaultPlan:
    """Every kind of fault that does not hit a step."""
    families: dict[str, dict] = {}
    for name, kind in KINDS.items():
        if kind.occasion in ("request", "message"):
            family, _, of_family = name.partition(".")
            families.setdefault(family, {})[of_family] = {"probability": 0.1}
    return fault_plan(families, "test")


@pytest.mark.fast(
    "device-faults-overlap",
    "host-calm-synchronous",
    "room-faults-overlap",
    "chunks*-calm-synchronous",
    "others-faults-overlap",
    ci=("*-calm-synchronous", "*-faults-overlap"),
)
@pytest.mark.parametrize("mode", ["overlap", "synchronous"])
@pytest.mark.parametrize("faults", [None, not_of_steps()], ids=["calm", "faults"])
@pytest.mark.parametrize("waits_for", SERVICES)
def test_multi_steps_say_what_single_rounds_say(mode, faults, waits_for):
    """To the last digit, except for what a multi-step reserves ahead and how often promises are checked.
    A fault of a step hits a whole multi-step: such plans are left out."""
    summaries = []
    for multi_step_rounds in (1, 32):
        tables = merged(
            merged(BUSY, engine={"mode": mode, "multi_step_rounds": multi_step_rounds}), **SERVICES[waits_for]
        )
        scenario = scenario_from_dict(tables, "test")
        metrics = RunMetrics()
        report = Simulation(scenario, sinks=lambda replica: [metrics.sink(replica)], faults=faults).run()  # noqa: B023
        summaries.append(summarize_run(scenario, report, metrics))
    singles, multi = summaries
    assert multi["committed_steps"] < singles["committed_steps"]
    assert waits_for != "retractions" or multi["retractions"] > 0
    # Each commit of a multi-step checks once what each commit of a single round checks of a request that was aborted.
    for name in (*RESERVED_AHEAD, "promises_checked"):
        singles.pop(name, None), multi.pop(name, None)
    assert multi == singles


@pytest.mark.fast("engine1-True", ci="*")
@pytest.mark.parametrize(
    ("engine", "waits"),
    [({}, False), ({"guarantee_floor": 1.0}, True), ({"guarantee_floor": 1.0, "guarantee_output": 0.098}, False)],
)
def test_a_share_that_falls_lets_requests_enter_that_ask_for_more_than_they_emit(engine, waits):
    """25 requests per second under SGLang's rules, each with room for 2,048 tokens of output."""
    workload = {"num_requests": 300, "rate": 25.0, "max_tokens": 2048}
    hardware = {"server": "sglang-0.5", "correction": "off"}
    tables = {"hardware": hardware, "engine": {"kv_slots": 120_000, **engine}, "workload": workload}
    _, _, summary = simulate({**tables, "speculation": {"algorithm": "NONE"}})
    assert (summary["median_ttft_ms"] > 900) == waits and (summary["median_ttft_ms"] < 200) != waits


@pytest.mark.parametrize("engine", [{"mode": "synchronous"}, {"page_size": 16}, {"mixed": False, "preempt": True}])
def test_counted_slots_decide_what_named_slots_decide(engine):
    """A small pool, so that requests wait, are retracted and lose what their multi-steps have reserved."""
    scenario = merged(BUSY, engine={**engine, "kv_slots": 1120}, workload={"num_requests": 60, "rate": 40.0})
    told = []
    for named in (True, False):
        events = []
        simulation = Simulation(
            scenario_from_dict(scenario, "test"), sinks=lambda replica, to=events: [to.append], named_slots=named
        )
        simulation.run()
        assert (type(simulation.replicas[0].engine.store) is CountingStore) == (not named)
        simulation.replicas[0].engine.check()
        planned = [one for one in events if type(one) is Planned]
        committed = [one for one in events if type(one) is Committed]
        told.append(
            (
                [(one.now_ns, one.retracted, one.num_waiting, one.num_held_slots) for one in planned],
                [(one.now_ns, one.finished, None if one.kept is None else one.kept.tolist()) for one in committed],
            )
        )
    assert told[0] == told[1] and any(retracted for _, retracted, *_ in told[0][0])


def test_an_idle_service_answers_in_the_time_of_its_steps():
    """One request alone: time to first token is link, host and one prefill step; nothing queues."""
    scenario = merged(
        SMALL, workload={"num_requests": 1}, speculation={"algorithm": "NONE"}, engine={"mode": "synchronous"}
    )
    simulation, _, summary = simulate(scenario)
    host, cost = simulation.assembly.host, simulation.assembly.cost
    step_ns = cost.step_ns([(200, 0)])
    size_ns = int(200 * 4 / (10e9 / 8) * 1e9)
    expected_ns = 50_000 + size_ns + host.plan_ns(1) + host.launch_ns(1) + step_ns + host.commit_ns(0, 1)
    # A request arrives when the replica receives it; the link's time belongs to the client.
    assert summary["mean_ttft_ms"] * 1e6 == pytest.approx(expected_ns - 50_000 - size_ns, rel=1e-9)


@pytest.mark.fast("NGRAM-foredraft", ci="*")
@pytest.mark.parametrize("host", ["foredraft", "vllm-0.10"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM", "SUFFIX", "HYBRID"])
def test_a_round_of_look_ups_is_launched_when_the_one_before_has_ended(algorithm, host):
    """From one commit to the next: planning and commit run beside the device, the launch of look-ups does not. With the
    slower host the device waits for planning and commit, too."""
    scenario = merged(
        SMALL,
        model={"target": "qwen3-0.6b"},
        hardware={"host": host},
        engine={"mode": "overlap"},
        speculation={"algorithm": algorithm, "policy": "fixed", "steps": 0},
        workload={"num_requests": 1},
    )
    events = []
    simulation = Simulation(scenario_from_dict(scenario, "test"), sinks=lambda replica: [events.append])
    simulation.run()
    rounds = [event.result for event in events if isinstance(event, Committed) and event.step.prefill is None]
    ends = [end for result in rounds for end in result.round_end_ns.tolist()]
    cost, times = simulation.assembly.cost, simulation.assembly.host
    launch_ns, beside_ns = times.launch_ns(1), times.plan_ns(1) + times.commit_ns(1, 1)
    kv, between = 200, []
    for _ in ends[1:]:
        kv += 1
        device_ns = cost.decode_ns(1, PLAIN_ROUND, kv)
        waits = algorithm != "EAGLE3"
        between.append(launch_ns + max(device_ns, beside_ns) if waits else max(device_ns, launch_ns + beside_ns))
    assert len(ends) > 40
    # Another step runs before the first round, and none is launched behind the last one.
    assert [later - end for end, later in pairwise(ends)][1:-1] == between[1:-1]


@pytest.mark.parametrize(("mode", "steps"), [("synchronous", 3), ("synchronous", 0), ("overlap", 3)])
def test_a_synchronous_server_reads_row_by_row_what_was_accepted(mode, steps, monkeypatch):
    scenario = merged(
        SMALL,
        hardware={"host": "sglang-overlap"},
        engine={"mode": mode},
        speculation={"policy": "fixed", "steps": steps},
        workload={"num_requests": 1},
    )
    _, before, summary = simulate(scenario)
    host = HOST_PRESETS["sglang-overlap"]
    monkeypatch.setitem(HOST_PRESETS, host.name, replace(host, verify_row_ns=host.verify_row_ns + 50_000))
    _, after, _ = simulate(scenario)
    waits = summary["verified_rows"] if (mode, steps) == ("synchronous", 3) else 0
    assert after.duration_ns - before.duration_ns == 50_000 * waits


@pytest.mark.fast("16-*")
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3"])
@pytest.mark.parametrize("concurrency", [1, 16])
def test_overlap_is_faster_than_synchronous_where_outputs_are_long(algorithm, concurrency):
    """Overlap wastes one round per request, whose end is seen a round late;
    outputs of a few rounds do not win that back."""
    load = {"concurrency": concurrency, "output": {"kind": "fixed", "value": 256}}
    scenario = merged(SMALL, workload=load, speculation={"algorithm": algorithm})
    durations = {
        mode: simulate(merged(scenario, engine={"mode": mode}))[1].duration_ns for mode in ("synchronous", "overlap")
    }
    assert durations["overlap"] < durations["synchronous"]


def test_one_request_too_long_is_refused_alone():
    scenario = merged(SMALL, workload={"prompt": {"kind": "empirical", "values": [100, 5000], "weights": [9.0, 1.0]}})
    _, report, summary = simulate(scenario)
    (reason,) = {text.split(":")[0] for text in report.refusals}
    assert reason == "too long" and summary["refused"] == sum(report.refusals.values())
    assert summary["completed"] + summary["refused"] == 80 and 0 < summary["refused"] < 30


def test_a_workload_of_which_nothing_fits_is_an_error():
    with pytest.raises(NothingFits, match="none of 80 requests"):
        simulate(merged(SMALL, workload={"prompt": {"kind": "fixed", "value": 4000}}))


def test_the_default_queue_sheds_nothing_and_a_bounded_one_says_so():
    burst = merged(SMALL, workload={"rate": 5000.0}, engine={"max_running": 4})
    assert simulate(burst)[2]["refused"] == 0
    _, report, summary = simulate(merged(burst, engine={"max_queue": 10}))
    assert 0 < summary["refused"] < 80
    assert all(text.startswith("queue full") for text in report.refusals)


def test_acceptance_reaches_the_report():
    """With an acceptance pinned at 3 tokens per round, rounds have 3 on average, chains and trees;
    a mean out of reach accepts all."""
    pinned = merged(SMALL, acceptance={"mean_length": 3.0}, workload={"output": {"kind": "fixed", "value": 600}})
    for steps, topk, expected in ((4, 1, 3.0), (4, 3, 3.0), (1, 1, 2.0)):
        summary = simulate(merged(pinned, speculation={"policy": "fixed", "steps": steps, "topk": topk}))[2]
        assert summary["accept_length"] == pytest.approx(expected, rel=0.03 if steps > 1 else 1e-3)


def test_a_pinned_mean_keeps_the_spread_of_requests():
    """Tails of TPOT are those of benchmarks/published/acceptance_tails.csv:
    real drafts, and independent coins of the same mean."""
    path = Path(__file__).parents[2] / "benchmarks" / "published" / "acceptance_tails.csv"
    with path.open(newline="", encoding="utf-8") as file:
        published = {row["acceptance"]: row for row in csv.DictReader(file)}
    work = {"concurrency": 64, "num_requests": 640, "prompt": {"value": 67}, "output": {"value": 128}}
    base = {"speculation": {"policy": "fixed", "steps": 3}, "workload": work}
    independent = {"request_share": 0.0, "field_share": 0.0}
    spread = {}
    for name, shares, off in (("real drafts", {}, 0.12), ("independent by position", independent, 0.05)):
        summary = simulate({**base, "acceptance": {"mean_length": 2.6, **shares}})[2]
        assert summary["accept_length"] == pytest.approx(2.6, rel=0.02)
        for tail in ("p90", "p99"):
            expected = float(published[name][f"{tail}_tpot_ms"]) / float(published[name]["mean_tpot_ms"])
            spread[name] = summary[f"{tail}_tpot_ms"] / summary["mean_tpot_ms"]
            assert spread[name] == pytest.approx(expected, rel=off)
    assert spread["real drafts"] > 1.15 * spread["independent by position"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mean": 100.0}, {"kind": "lognormal", "mean": 100.0, "sigma": 0.8, "low": 1, "high": None}),
        ({"kind": "lognormal", "high": 64}, {"kind": "lognormal", "mean": 256.0, "sigma": 0.8, "low": 1, "high": 64}),
        ({"value": 7}, {"kind": "fixed", "value": 7}),
        ({"values": [3, 9]}, {"kind": "empirical", "values": [3, 9]}),
        ({"kind": "uniform", "high": 64}, {"kind": "uniform", "low": 1, "high": 64}),
    ],
)
def test_a_length_says_only_what_differs(given, expected):
    output = scenario_from_dict({"workload": {"output": given}}, "test").workload.output
    assert {key: getattr(output, key) for key in expected} == expected


def test_adaptive_trees_are_as_large_as_their_own_steps_allow():
    """The smallest candidate, one step, fills 5 nodes; the trees of 3 and 7 steps are larger all the same."""
    adaptive = {"topk": 4, "policy": "ema", "adaptive": {"1": {"candidate_steps": [1, 3]}}}
    lengths = [
        simulate(merged(SMALL, speculation=choice))[2]["accept_length"]
        for choice in (adaptive, {"topk": 4, "policy": "fixed", "steps": 3})
    ]
    assert lengths[0] > 0.97 * lengths[1]


def test_a_trace_that_breaks_while_it_is_replayed(tmp_path):
    """The file was whole when the run began; what the reader finds then reaches the user as it is."""
    trace = tmp_path / "trace.csv"
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
    trace.write_text(rows)
    simulation = Simulation(scenario_from_dict({"workload": {"trace": str(trace)}}, "test"))
    trace.write_text(rows.replace("48", "many"))
    with pytest.raises(TraceError, match=r"trace\.csv, line 2: column 'ContextTokens': found 'many'"):
        simulation.run()


def test_rows_that_cannot_be_replayed_are_counted(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.0,10,5", "2023-11-16 18:15:47.0,10,0"]
    trace.write_text("\n".join(rows) + "\n")
    scenario = {"workload": {"trace": str(trace)}}
    _, report, summary = simulate(scenario)
    assert (report.num_skipped_rows, summary["completed"]) == (1, 1)
    trace.write_text("\n".join([rows[0], rows[2]]) + "\n")
    with pytest.raises(NothingFits, match="; 1 row without prompt or output"):
        simulate(scenario)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_between_two_events(number):
    """Once it was raised inside of what takes an event:
    half of the event was noted, and the summary of the run failed."""
    before, seen = signal.signal(number, signal.default_int_handler), []

    def sink(event):
        if isinstance(event, Committed):
            if not seen:
                signal.raise_signal(number)
            seen.append(event)

    try:
        report = Simulation(scenario_from_dict({**SMALL, "seed": 3}, "test"), sinks=lambda replica: [sink]).run()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert not report.complete and seen


def test_the_second_signal_ends_the_run_at_once():
    seen = []

    def sink(event):
        if isinstance(event, Committed):
            seen.append(event)
            signal.raise_signal(signal.SIGINT)

    report = Simulation(scenario_from_dict({**SMALL, "seed": 3}, "test"), sinks=lambda replica: [sink]).run()
    assert not report.complete and len(seen) == 2


def test_what_a_run_accepts_depends_on_the_draft():
    def summary(algorithm, **tables):
        scenario = {
            "speculation": {"algorithm": algorithm, "policy": "fixed", "steps": 3},
            "workload": {"num_requests": 80, "rate": 20.0, "output": {"kind": "fixed", "value": 200}},
        }
        return foredraft.simulate(scenario | tables).summary

    of = {name: summary(name) for name in ("EAGLE", "EAGLE3", "STANDALONE", "MULTI_LAYER_EAGLE", "NGRAM")}
    lengths = {name: each["accept_length"] for name, each in of.items()}
    assert lengths["EAGLE"] == pytest.approx(2.25, rel=0.03)
    assert lengths["EAGLE3"] == pytest.approx(2.79, rel=0.03)
    assert len({round(length, 1) for length in lengths.values()}) == 5
    assert not [notice for notice in of["EAGLE3"]["notices"] if "acceptance" in notice]
    (borrowed,) = [notice for notice in of["MULTI_LAYER_EAGLE"]["notices"] if "acceptance" in notice]
    assert borrowed.startswith(
        "no published acceptance for MULTI_LAYER_EAGLE on llama chat; that of MULTI_LAYER_EAGLE on another model's math "
        "is used (preset multi-layer-eagle-math; vLLM pull 48892"
    )
    (lookup,) = [notice for notice in of["NGRAM"]["notices"] if "look-ups" in notice]
    assert "ngram-code" in lookup
    edit = summary("NGRAM", acceptance={"preset": "edit"})
    assert edit["accept_length"] > lengths["NGRAM"] + 0.3
    given = summary("EAGLE", acceptance={"conditional": [0.9]}, model={"target": "qwen3-8b"})
    assert given["accept_length"] > 3 and not [notice for notice in given["notices"] if "no published" in notice]


def test_the_more_rows_draft_by_look_up_the_faster_is_hybrid():
    def summary(algorithm, **acceptance):
        scenario = {
            "speculation": {"algorithm": algorithm, "policy": "fixed", "steps": 3},
            "acceptance": acceptance,
            "workload": {"num_requests": 40, "concurrency": 4, "output": {"kind": "fixed", "value": 150}},
        }
        return foredraft.simulate(scenario).summary

    head, none = summary("EAGLE3"), summary("HYBRID")
    some, all_rows = (summary("HYBRID", look_up_share=share) for share in (0.5, 1.0))
    # Its rounds are those of the head, and wait for tokens and searches.
    assert none["accept_length"] == head["accept_length"] and none["mean_tpot_ms"] > 1.01 * head["mean_tpot_ms"]
    assert none["mean_tpot_ms"] > some["mean_tpot_ms"] > all_rows["mean_tpot_ms"]
    assert all_rows["round_part_draft_catch_up_us"] == 0 < some["round_part_draft_catch_up_us"]
    about = [[notice for notice in each["notices"] if "look-up" in notice] for each in (none, some)]
    assert [len(found) for found in about] == [1, 1]
    assert "acceptance.look_up_share says" in about[0][0] and "preset ngram-edit (an assumption)" in about[1][0]
    given = summary("HYBRID", look_up_share=1.0, look_up_conditional=[0.5])
    assert given["accept_length"] < none["accept_length"]
    assert not [notice for notice in given["notices"] if "look-up" in notice]


@pytest.mark.parametrize("server", ["sglang-0.5", "vllm-0.18"])
@pytest.mark.parametrize(
    "cap, end", [("output", FinishReason.LENGTH), (30, FinishReason.LENGTH), (31, FinishReason.STOP)]
)
def test_a_request_that_reaches_its_limit_ends_with_length(server, cap, end):
    """As with a client that asks for so many tokens and ignores the model's own end."""
    scenario = scenario_from_dict({
        "hardware": {"server": server, "kernels": "roofline"},
        "workload": {"num_requests": 4, "output": {"value": 30}, "max_tokens": cap},
    }, "test")  # fmt: skip
    ends = []
    Simulation(scenario, sinks=lambda replica: [ends.append]).run()
    finished = [one for event in ends if isinstance(event, Committed) for one in event.finished]
    assert [(one.reason, one.num_output) for one in finished] == [(end, 30)] * 4
