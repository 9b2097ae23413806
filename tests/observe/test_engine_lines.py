"""Log lines of engines: one for each switch, fallback and recovery, the same for every executor, and none
unless asked for."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys

import pytest
from foredraft.core.errors import ConfigError
from foredraft.observe.engine_lines import (
    LOGGER,
    EngineLines,
    active_level,
    forward_lines,
    start_logging,
    stop_logging,
    write_forwarded,
)
from foredraft.sim.faults.plan import FaultPlan
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict

BUSY = {"workload": {"num_requests": 60, "rate": 60.0}}


@pytest.fixture(autouse=True)
def _silence():
    yield
    stop_logging()


def lines_of(scenario: dict, faults: dict | None = None, level: int = logging.INFO) -> tuple[list[dict], list]:
    """The facts of the lines of a simulated run, and its events."""
    lines, events = [], []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append({"level": record.levelname, **record.fields, "message": record.getMessage()})

    handler = Keep()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        plan = None if faults is None else FaultPlan.model_validate(faults)
        Simulation(scenario_from_dict(scenario, "test"), sinks=lambda replica: [events.append], faults=plan).run()
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)
    return lines, events


def decode_steps(events: list) -> list[tuple[int, int, int]]:
    """(time, steps, rows) of every planned decode step."""
    planned = [event for event in events if type(event).__name__ == "Planned" and event.step is not None]
    return [
        (event.now_ns, event.step.decode.shape.steps, len(event.step.decode.rows))
        for event in planned
        if event.step.decode is not None
    ]


def test_each_switch_is_one_line_with_its_numbers():
    lines, events = lines_of(BUSY)
    steps = decode_steps(events)
    expected = [
        (round(after[0] / 1e9, 6), before[1], after[1], after[2])
        for before, after in itertools.pairwise(steps)
        if before[1] != after[1]
    ]
    told = [line for line in lines if line["event"] == "steps"]
    assert (
        expected and [(line["time_s"], line["before"], line["after"], line["batch_size"]) for line in told] == expected
    )
    assert all(line["level"] == "INFO" and line["engine"] == "engine 0" for line in told)
    first = told[0]
    switch = f"{first['before']} -> {first['after']} draft steps at {first['batch_size']} request"
    assert switch + ("" if first["batch_size"] == 1 else "s") == first["message"].partition(" s: ")[2]


@pytest.mark.parametrize(("batch_size", "words"), [(1, "at 1 request"), (2, "at 2 requests")])
def test_one_request_is_not_several(caplog, batch_size, words):
    with caplog.at_level(logging.INFO, LOGGER.name):
        EngineLines("engine 0").round_ran(False, batch_size)
    assert caplog.messages[-1].endswith(words)


def test_the_mode_and_its_reason_stand_at_the_start():
    lines, _ = lines_of({**BUSY, "engine": {"mode": "synchronous"}})
    assert (lines[0]["event"], lines[0]["mode"], lines[0]["reason"]) == (
        "start", "synchronous", "synchronous mode was asked for",
    )  # fmt: skip


def test_batches_beyond_the_captured_sizes_are_a_fallback_and_told_once_each_way():
    lines, events = lines_of({**BUSY, "hardware": {"graph_sizes": [1, 2, 4]}})
    graph = [rows <= 4 for _, _, rows in decode_steps(events)]
    changes = [after for before, after in zip([True, *graph], graph, strict=False) if before != after]
    told = [line for line in lines if line["event"] == "graph"]
    assert False in changes and [line["graph"] for line in told] == changes
    assert [line["level"] for line in told] == ["INFO" if has_graph else "WARNING" for has_graph in changes]


def test_a_failed_step_its_limits_and_their_end_are_lines():
    lines, events = lines_of(BUSY, {"device": {"raises": {"probability": 0.02}}})
    lost = [event for event in events if type(event).__name__ == "StepsLost"]
    failures = [line for line in lines if line["event"] == "failure"]
    assert lost and [line["step"] for line in failures] == [event.failure.step_id for event in lost]
    assert all(line["level"] == "WARNING" and line["lost_steps"] >= 1 for line in failures)
    limits = [line for line in lines if line["event"] == "limits"]
    assert limits[0]["fewer_steps"] and limits[0]["level"] == "WARNING"
    back = [line for line in limits if not line["fewer_steps"] and line["row_limit"] is None]
    assert back and "without limits again" in back[-1]["message"]
    warnings, _ = lines_of(BUSY, {"device": {"raises": {"probability": 0.02}}}, logging.WARNING)
    assert warnings == [line for line in lines if line["level"] == "WARNING"]


def test_engines_of_two_roles_have_names():
    scenario = {**BUSY, "disaggregation": {"prefill": 1, "decode": 1}, "engine": {"page_size": 16}}
    lines, _ = lines_of(scenario)
    assert {line["engine"] for line in lines if line["event"] == "start"} == {"prefill 0", "decode 1"}


def test_a_library_is_silent():
    code = """
import logging
from foredraft import simulate
simulate({"workload": {"num_requests": 20, "rate": 60.0}})
from foredraft.observe.engine_lines import LOGGER, engine_lines
LOGGER.warning("not shown: %s", 1)
assert engine_lines("engine") is None
assert isinstance(logging.getLogger("foredraft").handlers[0], logging.NullHandler)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_lines_of_another_process_are_written_here(capsys):
    sent = []
    forward_lines("INFO", sent.append)
    EngineLines("engine").round_ran(False, 3)
    assert len(sent) == 1 and sent == json.loads(json.dumps(sent)), "plain data"
    start_logging("info", "json")
    assert active_level() == "INFO"
    write_forwarded(sent[0], "decode0")
    line = json.loads(capsys.readouterr().err)
    assert (line["engine"], line["level"], line["batch_size"], line["graph"]) == ("decode0", "warning", 3, False)
    assert line["message"] == "decode0, 0.000000 s: rounds run without a CUDA graph at 3 requests"
    forward_lines(None, sent.append)
    EngineLines("engine").round_ran(False, 3)
    assert len(sent) == 1


def test_only_levels_and_formats_that_there_are():
    with pytest.raises(
        ConfigError, match=r"--log-level: 'inof' is none of .*did you mean 'info'(.|\n)*--log-format: 'xml'"
    ):
        start_logging("inof", "xml")
