"""Recorded runs, replayed for any step count; bad recordings named by line."""

import numpy as np
import pytest
from foredraft.core.acceptance.presets import TraceAcceptance
from foredraft.core.errors import ConfigError
from foredraft.sim.workload.acceptance.runs import AcceptanceTraceError, parse_recorded_runs

RECORDED = {"a": [3, 2, 1, 0, 2], "b": [0, 0, 7], "c": [1]}


KEYS = np.arange(2, dtype=np.uint64)  # with one recording every request replays it


def test_a_recording_is_replayed_for_any_step_count():
    process = TraceAcceptance.of_runs({"a": RECORDED["a"]})
    assert process.max_depth == 3
    assert process.longest_run(KEYS[:1], np.arange(5)).tolist() == RECORDED["a"]
    assert process.accept_lens(KEYS, np.array([0, 2]), 7, 1).tolist() == [[4, 2]]
    assert process.accept_lens(KEYS, np.array([0, 1]), 2, 2).tolist() == [[3, 3], [1, 3]]


def test_sampled_requests_replay_whole_recordings():
    process = TraceAcceptance.of_runs(RECORDED)
    runs = process.run_windows(np.arange(300, dtype=np.uint64), np.zeros(300, int), 5)
    kinds, counts = np.unique(runs, axis=0, return_counts=True)
    expected = sorted(np.resize(recorded, 5).tolist() for recorded in RECORDED.values())
    assert kinds.tolist() == expected
    assert counts.min() > 60
    np.testing.assert_array_equal(runs, process.run_windows(np.arange(300, dtype=np.uint64), np.zeros(300, int), 5))


def test_both_written_forms_are_one_recording():
    jsonl = ['{"request": "a", "runs": [3, 2, 1, 0, 2]}\n', "\n", '{"request": "b", "runs": [0, 0, 7]}\n']
    rows = [f"{request},{i},{run}\n" for request in "ab" for i, run in enumerate(RECORDED[request])]
    one = parse_recorded_runs(jsonl, "runs.jsonl")
    two = parse_recorded_runs(["request,position,longest_run\n", *rows], "runs.csv")
    assert one == two == {request: RECORDED[request] for request in "ab"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        (['{"request": "a", "runs": [1]}', '{"request": "b", "ru'], "line 2: is not JSON"),
        (['{"request": "a"}'], "line 1: expected an object"),
        (['{"request": "a", "runs": [1, -1]}'], "line 1: runs"),
        (['{"request": "a", "runs": [1.5]}'], "line 1: runs"),
        (['{"request": "a", "runs": []}'], "line 1: runs"),
        (['{"request": "a", "runs": [1]}'] * 2, "line 2: request 'a' occurs twice"),
        (["request,pos,run"], "line 1: 'request,pos,run': expected request,position,longest_run"),
        (["request,position,longest_run"], "no rows"),
        (["request,position,longest_run", "a,0,1", "a,2,1"], "line 3: position 2 of request 'a': expected 1"),
        (["request,position,longest_run", "a,0"], "line 2: 2 fields"),
        (["request,position,longest_run", "a,0,-1"], "line 2"),
        (["request,position,longest_run", "a,0,nan"], "line 2"),
    ],
)
def test_bad_recordings_are_refused_with_source_and_line(lines, words):
    with pytest.raises(AcceptanceTraceError) as caught:
        parse_recorded_runs(lines, "runs")
    assert str(caught.value).startswith("runs")
    assert words in str(caught.value)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="at least one"):
        TraceAcceptance.of_runs({})
    with pytest.raises(ConfigError, match="at least one"):
        TraceAcceptance.of_runs({"a": []})
