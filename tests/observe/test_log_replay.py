import json

import pytest
from foredraft.core.contract.events import Committed, Submitted
from foredraft.core.scheduler.engine import Engine
from foredraft.observe.log import EventLog, LogError
from foredraft.observe.replay import replay
from observed_run import ALGORITHM, VARIANTS, make_config, make_controller, recorded_events


def write(path, *streams, complete=True):
    log = EventLog(path, {})
    sinks = [log.sink(replica) for replica in range(len(streams))]
    queues = [list(stream) for stream in streams]
    while any(queues):  # one event of each in turn
        for sink, queue in zip(sinks, queues, strict=True):
            if queue:
                sink(queue.pop(0))
    log.close(complete)
    return path


def factory(controller="ema", **config):
    def make_engine(header, replica, events):
        return Engine(make_config(**config), ALGORITHM, make_controller(controller), events=events)

    return make_engine


def edit(path, kind, change, number=0):
    """Change the n-th record of a kind; returns its line number."""
    lines = path.read_text().splitlines()
    places = [i for i, line in enumerate(lines) if f'"t":"{kind}"' in line]
    place = places[number]
    record = json.loads(lines[place])
    changed = change(record)
    lines[place : place + 1] = [] if changed is None else [json.dumps(changed)]
    path.write_text("\n".join(lines) + "\n")
    return place + 1


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_a_fresh_engine_decides_the_same(tmp_path, variant):
    for seed in range(3):
        events = recorded_events(seed, 60, **VARIANTS[variant])
        report = replay(write(tmp_path / "log", events), factory(**VARIANTS[variant]))
        assert report.identical and report.complete, report.difference
        kinds = [type(event).__name__ for event in events]
        assert (report.num_decisions, report.num_commits) == (kinds.count("Planned"), kinds.count("Committed"))


def test_another_configuration_differs_in_the_first_line(tmp_path):
    path = write(tmp_path / "log", recorded_events(0))
    report = replay(path, factory(chunk_size=47))
    assert report.difference.line == 2 and report.num_decisions == 0
    assert "config" in report.difference.explanation


def test_another_controller_differs_where_it_first_matters(tmp_path):
    path = write(tmp_path / "log", recorded_events(0, 90))
    report = replay(path, factory("fixed5"))
    assert not report.identical and report.num_decisions > 0
    difference = report.difference
    assert difference.expected["t"] == "plan" and "S was" in difference.explanation
    assert difference.expected["S"] != difference.got["S"] == 5
    assert str(difference).startswith(f"line {difference.line}, replica 0: ")
    assert json.loads(path.read_text().splitlines()[difference.line - 1]) == difference.expected


def test_every_edit_of_the_log_is_found(tmp_path):
    events = recorded_events(0, 60)
    refused = [event.refusal for event in events if isinstance(event, Submitted)]
    results = [event.result for event in events if isinstance(event, Committed)]

    def difference_after(kind, change, number=0):
        path = write(tmp_path / "log", events)
        line = edit(path, kind, change, number)
        report = replay(path, factory())
        assert report.difference is not None and report.difference.line >= line
        return report.difference

    assert "writes" in difference_after("plan", lambda r: {**r, "writes": 1}).explanation
    assert "held was 3" in difference_after("plan", lambda r: {**r, "held": 3}, 20).explanation
    assert "finished" in difference_after("commit", lambda r: {**r, "finished": [["x", "stop", 1]]}, 3).explanation
    assert "refusal" in difference_after("submit", lambda r: {**r, "refusal": "no"}, refused.index("")).explanation
    long_runs = [bool(r.decode is not None and r.decode.accept_lens.max() > 1) for r in results]
    difference_after("commit", lambda r: {**r, "lens": 1}, long_runs.index(True))
    difference_after("plan", lambda r: None, 5)
    difference_after("submit", lambda r: None, 3)


def test_spaces_and_rows_written_out_are_no_difference(tmp_path):
    path = write(tmp_path / "log", recorded_events(3, 60))
    rows = None
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "decode" in record:
            rows = record["decode"] if record["decode"] != "=" else rows
            record["decode"] = rows
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    assert replay(path, factory()).identical


def test_a_broken_log_is_an_error_and_not_a_difference(tmp_path):
    path = write(tmp_path / "log", recorded_events(0))
    line = edit(path, "submit", lambda r: {**r, "max_tokens": 0})
    with pytest.raises(LogError, match=f"log:{line}: .*max_tokens must be >= 1"):
        replay(path, factory())
    path = write(tmp_path / "log", recorded_events(0))
    edit(path, "commit", lambda r: None, 5)
    with pytest.raises(LogError, match=r"the result of step 7, expected that of step 6"):
        replay(path, factory())
    path = write(tmp_path / "log", recorded_events(0))
    edit(path, "engine", lambda r: None)
    with pytest.raises(LogError, match="no 'engine' record before this one"):
        replay(path, factory())


def test_a_truncated_log_is_replayed_as_far_as_it_goes_when_asked(tmp_path):
    path = write(tmp_path / "log", recorded_events(0))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(LogError, match="breaks off"):
        replay(path, factory())
    report = replay(path, factory(), allow_truncated=True)
    assert report.identical and not report.complete and report.num_decisions > 10
