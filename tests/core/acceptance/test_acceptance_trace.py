"""Recorded runs, replayed for any step count; bad recordings named by line."""

import numpy as np
import pytest
from foretoken.core.acceptance.recorded import AcceptanceTraceError, TraceAcceptance
from foretoken.core.draws import request_key
from foretoken.core.errors import ConfigError

RECORDED = {"a": [3, 2, 1, 0, 2], "b": [0, 0, 7], "c": [1]}


def key(*requests):
    return np.array([request_key(request) for request in requests], np.uint64)


def test_a_recording_is_replayed_for_any_step_count():
    process = TraceAcceptance.of_runs(RECORDED, assign="same")
    assert process.max_depth == 7
    assert process.longest_run(key("a"), np.arange(5)).tolist() == RECORDED["a"]
    assert process.accept_lens(key("a", "b"), np.array([0, 2]), 7, 1).tolist() == [[4, 8]]
    assert process.accept_lens(key("a", "b"), np.array([0, 2]), 2, 2).tolist() == [[3, 3], [1, 3]]


def test_a_longer_request_begins_its_recording_again():
    process = TraceAcceptance.of_runs(RECORDED, assign="same")
    assert process.longest_run(key("b"), np.arange(7)).tolist() == [0, 0, 7, 0, 0, 7, 0]


def test_sampled_requests_replay_whole_recordings():
    process = TraceAcceptance.of_runs(RECORDED)
    runs = process.run_windows(np.arange(300, dtype=np.uint64), np.zeros(300, int), 5)
    kinds, counts = np.unique(runs, axis=0, return_counts=True)
    expected = sorted(np.resize(recorded, 5).tolist() for recorded in RECORDED.values())
    assert kinds.tolist() == expected
    assert counts.min() > 60
    np.testing.assert_array_equal(runs, process.run_windows(np.arange(300, dtype=np.uint64), np.zeros(300, int), 5))


def test_an_unrecorded_key_is_an_error_when_the_same_is_asked_for():
    with pytest.raises(ConfigError, match="was not recorded"):
        TraceAcceptance.of_runs(RECORDED, assign="same").longest_run(key("z"), np.array([0]))


def test_both_written_forms_are_one_recording():
    jsonl = ['{"request": "a", "runs": [3, 2, 1, 0, 2]}\n', "\n", '{"request": "b", "runs": [0, 0, 7]}\n']
    rows = [f"{request},{i},{run}\n" for request in "ab" for i, run in enumerate(RECORDED[request])]
    one = TraceAcceptance.from_lines(jsonl, "runs.jsonl", "same")
    two = TraceAcceptance.from_lines(["request,position,longest_run\n", *rows], "runs.csv", "same")
    for request in "ab":
        expected = RECORDED[request]
        for process in (one, two):
            assert process.longest_run(key(request), np.arange(len(expected))).tolist() == expected


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        (['{"request": "a", "runs": [1]}', '{"request": "b", "ru'], "line 2: not JSON"),
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
        TraceAcceptance.from_lines(lines, "runs")
    assert str(caught.value).startswith("runs")
    assert words in str(caught.value)


def test_bad_arguments():
    with pytest.raises(ConfigError, match="assign"):
        TraceAcceptance.of_runs(RECORDED, assign="random")
    with pytest.raises(ConfigError, match="at least one"):
        TraceAcceptance.of_runs({})
    with pytest.raises(ConfigError, match="at least one"):
        TraceAcceptance.of_runs({"a": []})
