import json
from itertools import pairwise

import pytest
from foredraft.core.contract.events import Planned
from foredraft.observe.perfetto import PerfettoError, PerfettoTrace
from observed_run import recorded_events


def load(path):
    trace = json.loads(path.read_text())
    return trace, trace["traceEvents"]


def test_spans_are_exact_and_on_named_tracks(tmp_path):
    trace = PerfettoTrace(tmp_path / "trace.json")
    trace.span(0, "device", "decode", 1_234_567_891_234_567, 1_001, {"steps": 3})
    trace.span(0, "scheduler", 'plan "x"', 5_000, 20)
    trace.span(1, "device", "prefill", 0, 0)
    trace.close()
    trace.close()
    text = (tmp_path / "trace.json").read_text()
    assert '"ts":1234567891234.567,"dur":1.001' in text
    _, events = load(tmp_path / "trace.json")
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert [(processes[e["pid"]], tracks[e["pid"], e["tid"]], e["name"]) for e in slices] == [
        ("replica 0", "device", "decode"),
        ("replica 0", "scheduler", 'plan "x"'),
        ("replica 1", "device", "prefill"),
    ]
    assert slices[0]["args"] == {"steps": 3} and slices[1]["ts"] == 5 and slices[1]["dur"] == 0.02


def test_counters_follow_the_engine(tmp_path):
    events = recorded_events(3, 60)
    trace = PerfettoTrace(tmp_path / "trace.json")
    sink = trace.sink(0)
    for event in events:
        sink(event)
    trace.close()
    _, written = load(tmp_path / "trace.json")
    assert not [e for e in written if e["ph"] == "X"]
    last = {e["name"]: e["args"]["value"] for e in written if e["ph"] == "C"}
    assert last["running"] == last["waiting"] == 0
    held = [event.num_held_slots for event in events if isinstance(event, Planned)]
    changes = [held[0]] + [b for a, b in pairwise(held) if a != b]
    assert [e["args"]["value"] for e in written if e["name"] == "KV slots"] == changes
    assert max(e["args"]["value"] for e in written if e["name"] == "running") == 8


def test_a_long_run_stops_and_says_so(tmp_path):
    trace = PerfettoTrace(tmp_path / "trace.json", max_events=10)
    for i in range(25):
        trace.span(0, "device", "decode", i, 1)
    trace.close()
    whole, events = load(tmp_path / "trace.json")
    assert sum(e["ph"] == "X" for e in events) == 10
    notes = [e for e in events if e["ph"] == "i"]
    assert len(notes) == 1 and notes[0]["ts"] == 0.01 and "10 events" in notes[0]["name"]
    assert whole["otherData"] == {"events": 10, "dropped": 15}


def test_large_traces_are_written_as_they_grow(tmp_path):
    trace = PerfettoTrace(tmp_path / "trace.json")
    for i in range(30_000):
        trace.span(0, "device", "decode", i, 1)
    assert (tmp_path / "trace.json").stat().st_size > 1_000_000
    trace.close()
    assert sum(e["ph"] == "X" for e in load(tmp_path / "trace.json")[1]) == 30_000


def test_an_empty_trace_is_json_and_a_bad_path_is_named(tmp_path):
    PerfettoTrace(tmp_path / "trace.json").close()
    assert load(tmp_path / "trace.json")[1] == []
    with pytest.raises(PerfettoError, match="cannot be written"):
        PerfettoTrace(tmp_path / "no" / "trace.json")
