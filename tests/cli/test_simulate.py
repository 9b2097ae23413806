"""`foredraft simulate`: what it prints, what it writes, what it starts."""

from __future__ import annotations

import json
import os
import pty
import re
import time
import tomllib
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from foredraft.cli.progress import simulation_progress
from foredraft.core.model_shape import known_models
from foredraft.sim.running.report import RunProgress
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario.scenario_text import toml_value
from foredraft.sim.scenario_file import flat_items, load_scenario

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--set", "workload.num_requests=40", "--set", "workload.rate=40", "--quiet")
FILES = {"summary.json", "scenario.toml", "requests.parquet", "rounds.parquet", "events.jsonl", "trace.json"}


def summary_of(directory: Path) -> dict:
    return json.loads(
        (directory / "summary.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} in JSON")
    )


def test_a_run_is_corrected_by_published_services_like_it(command):
    known = (
        "--set",
        "hardware.server=trtllm-1.x",
        "--set",
        "speculation.algorithm=NONE",
        "--set",
        "workload.num_requests=3",
    )
    plain = json.loads(command("simulate", *known, "--json", "-q").out)
    corrected = json.loads(command("simulate", *known, "--correct", "--json", "-q").out)
    assert "published points of this deployment, which took 1." in plain["summary"]["intervals_rest_on"]
    assert corrected["summary"]["mean_tpot_ms"] > 1.05 * plain["summary"]["mean_tpot_ms"]


def test_the_table_alone(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = command("simulate", *SMALL)
    assert outcome.code == 0 and not outcome.err
    for words in ("llama-3.1-8b on H100", "EAGLE3 ema", "overlap", "Throughput", "Latency", "accept length"):
        assert words in outcome.out
    assert not list(tmp_path.iterdir()), "without --out nothing is written"


def test_text_in_brackets_is_shown_as_it_is(command):
    outcome = command("simulate", *SMALL, "--set", "name='[bold]x'")
    assert outcome.code == 0 and "[bold]x: llama-3.1-8b" in outcome.out


def test_the_files_of_a_run(command, tmp_path):
    run = tmp_path / "deep" / "run"
    outcome = command("simulate", *SMALL, "--out", run, "--set", "slo.ttft_ms=1000", "--set", "name=small")
    assert outcome.code == 0 and str(run) in outcome.out
    assert {path.name for path in run.iterdir()} == FILES
    summary = summary_of(run)
    assert summary["completed"] == 40 and summary["incomplete"] is False
    assert (summary["name"], summary["seed"]) == ("small", 0)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "p90", "p95", "p99"):
            assert summary[f"{statistic}_{name}_ms"] > 0
    for name in [
        "request_throughput",
        "output_throughput",
        "request_goodput",
        "accept_length",
        "accept_rate",
        "refused",
    ]:
        assert summary[name] is not None
    assert all(not isinstance(value, dict) for value in summary.values()), "the summary is flat"

    requests = parquet.read_table(run / "requests.parquet").to_pydict()
    assert len(requests["request_id"]) == 40 and sum(requests["num_output"]) == summary["total_output_tokens"]
    assert parquet.read_table(run / "rounds.parquet").num_rows >= summary["decode_rounds"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[0]["scenario"]["name"] == "small"
    assert events[-1]["t"] == "end" and events[-1]["complete"] is True
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in trace if event.get("name") == "thread_name"} == {"device", "scheduler"}


def test_files_not_asked_for_and_files_of_an_earlier_run(command, tmp_path):
    assert command("simulate", *SMALL, "--out", tmp_path).code == 0
    (tmp_path / "notes.txt").write_text("mine")
    assert command("simulate", *SMALL, "--out", tmp_path, "--no-events", "--no-perfetto").code == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES - {"events.jsonl", "trace.json"} | {"notes.txt"}


def test_the_kept_scenario_runs_again(command, tmp_path):
    assert command("simulate", *SMALL, "--set", "engine.page_size=16", "--seed", 5, "--out", tmp_path / "a").code == 0
    assert command("simulate", tmp_path / "a" / "scenario.toml", "--quiet", "--out", tmp_path / "b").code == 0
    first, second = ((tmp_path / name / "events.jsonl").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.ci
def test_several_processes_write_the_files_of_one(command, tmp_path):
    replicas = ("--set", "hardware.replicas=2", "--set", "router.policy=round_robin", "--no-perfetto", "--quiet")
    told = [
        command("simulate", *SMALL, *replicas, "--out", tmp_path / workers, "--workers", workers) for workers in "12"
    ]
    assert told[0].code == told[1].code == 0
    assert told[0].out.replace(str(tmp_path / "1"), "") == told[1].out.replace(str(tmp_path / "2"), "")
    for name in ("summary.json", "scenario.toml", "events.jsonl"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    coupled = command("simulate", *SMALL, "--set", "hardware.replicas=2", "--workers", 2)
    assert coupled.code == 2 and "--workers: one process has to simulate this run: router.policy" in coupled.err


def test_options_are_the_keys_that_they_name(command, tmp_path):
    trace = tmp_path / 'a "trace".csv'
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n")
    scenario = tmp_path / "scenario.toml"
    scenario.write_text('seed = 1\n[workload]\nrate = 3.0\ntrace = "other.csv"\n')
    assert command("simulate", scenario, "--trace", trace, "--seed", 2, "--out", tmp_path / "run", "--quiet").code == 0
    kept = tomllib.loads((tmp_path / "run" / "scenario.toml").read_text())
    assert (kept["seed"], kept["workload"]["trace"], kept["workload"]["rate"]) == (2, str(trace), 3.0)
    assert summary_of(tmp_path / "run")["completed"] == 1


FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from foredraft.cli.__main__ import main
main()
"""


@pytest.mark.slow  # with every test a log that finds no room is an error: tests/observe/test_event_log.py
@pytest.mark.parametrize(
    "options", [[], ["--no-perfetto"], ["--no-perfetto", "--no-events"]], ids=["all", "log", "tables"]
)
def test_a_disk_that_is_full_is_said_and_nothing_claims_to_be_complete(options, process, tmp_path):
    settings = ["--set", "workload.num_requests=400", "--set", "workload.rate=1000", "--quiet"]
    running = process("simulate", *settings, "--out", tmp_path, *options, code=FULL_DISK)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 2, err
    assert str(tmp_path) in err and "cannot be written" in err and "Traceback" not in err
    assert not out and not (tmp_path / "summary.json").exists()


@pytest.mark.ci
def test_progress_on_a_terminal(process):
    settings = ["--set", "workload.num_requests=60"]
    controller, terminal = pty.openpty()
    running = process("simulate", *settings, stderr=terminal, env={"TERM": "xterm", "COLUMNS": "100"})
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and "Throughput" in out and "rounds/s" not in out
    assert re.search(rb"simulated \S+ s? *.*60 of 60 requests.* [\d,]+ rounds/s", shown), shown


def test_a_run_that_takes_no_time_says_nothing_in_a_log(command, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    outcome = command("simulate", "--set", "workload.num_requests=60")
    assert outcome.code == 0 and not outcome.err


def test_a_long_run_says_where_it_is_in_a_log(monkeypatch, capsys):
    clock_s = iter([100.0, 105.0, 111.0, 112.0, 122.0])  # one reading when it starts, one per report
    monkeypatch.setattr(time, "monotonic", lambda: next(clock_s))
    with simulation_progress(quiet=False) as show:
        for ended in (1, 2, 3, 4):
            show(RunProgress(3_725_000_000_000, 10, ended, 2200, 5000 if ended == 2 else None))
    assert capsys.readouterr().err.splitlines() == [
        "simulated 1:02:05, 2 of 5,000 requests, 200 rounds/s",
        "simulated 1:02:05, 4 requests, 100 rounds/s",
    ]


# -- --explain ---------------------------------------------------------------------------------------------------------


def test_explain_names_a_source_for_every_number(command, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[hardware]\ngpu = "H200"\n[workload.prompt]\nkind = "fixed"\nvalue = 77\n')
    outcome = command("simulate", path, "--set", "engine.page_size=16", "--seed", 9, "--explain")
    assert outcome.code == 0 and "Throughput" not in outcome.out
    scenario, derived = outcome.out.split("# What follows from it")
    sources, table = {}, ""
    for line in scenario.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line.strip():
            setting, source = re.fullmatch(r"(?:# )?(\w+) (?:=.*?|is not set) +# (\S.*)", line).groups()
            sources[table + setting] = source
    assert set(sources) == {key for key, _, _ in flat_items(load_scenario(path)[0])}
    assert sources["hardware.gpu"] == sources["workload.prompt.value"] == str(path)
    assert (sources["engine.page_size"], sources["seed"]) == ("--set", "--seed")
    assert sources["workload.rate"] == "default"
    assert sources["model.context_len"].startswith("default (")

    rows = derived.splitlines()[1:]
    assert len(rows) > 30
    for row in rows:
        assert re.fullmatch(r"# \S.* = \S.*# \S.*", row), row
    for number in ("H200 memory bandwidth", "KV slots", "draft steps from batch size 8", "reserve of a request"):
        assert any(row.startswith(f"# {number} = ") for row in rows)


def test_explain_is_a_scenario(command, tmp_path):
    path = tmp_path / "explained.toml"
    given = [
        "--set",
        'speculation.adaptive={"1" = {candidate_steps = [1, 2]}}',
        "--set",
        "acceptance.conditional=[0.5,0.25]",
    ]
    path.write_text(command("simulate", *given, "--set", "acceptance.regimes={shifts=[1e-05]}", "--explain").out)
    explained, _ = load_scenario(path)
    assert explained == load_scenario(None, [*given[1::2], "acceptance.regimes={shifts=[1e-05]}"])[0]


@pytest.mark.parametrize(
    "value",
    [
        True,
        3,
        -2,
        0.1,
        1e-05,
        1e22,
        'a "b" \\ c',
        "ü \t\n\x7f\x00",
        [1, [2.5, "x"]],
        {"a b": [1], "c": {"d": True}},
        [],
        {},
    ],
)
def test_toml_values_come_back(value):
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


# -- examples, schema, start -------------------------------------------------------------------------------------------


EXAMPLES = sorted(path for folder in ("", "scenarios") for path in (ROOT / "examples" / folder).glob("*.toml"))


@pytest.mark.fast("chat_on_h100", "closed_loop", ci="*")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path, command, tmp_path):
    outcome = command("simulate", path, "--set", "workload.num_requests=30", "--out", tmp_path, "--quiet")
    assert outcome.code == 0, outcome.err
    summary = summary_of(tmp_path)
    assert summary["completed"] + summary["aborted"] == 30
    assert command("audit", "--replay", tmp_path).code == 0


def test_schema(command):
    schema = json.loads(command("simulate", "--schema", "scenario").out)
    assert set(schema["properties"]) == set(Scenario.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Workload"]["properties"]["rate"]["minimum"] > 0


def test_schema_prints_the_names_of_models(command, monkeypatch):
    of_the_extra = "example/only-in-the-extra"
    monkeypatch.setattr("foredraft.sim.cost.measured.packaged_models", lambda: [of_the_extra])
    names = command("simulate", "--list", "models").out.splitlines()
    assert names[: len(known_models()) + 1] == [*known_models(), of_the_extra]
    assert {"deepseek-ai/DeepSeek-V3-0324", "zai-org/GLM-4.5-FP8"} < set(names) and len(set(names)) == len(names)
    monkeypatch.setattr("foredraft.sim.cost.measured.packaged_models", list)
    built_in = command("simulate", "--list", "models")
    assert "measured" in built_in.err and of_the_extra not in built_in.out and "GLM-4.5-FP8" in built_in.out


def test_version_and_help(command):
    assert re.fullmatch(r"foredraft \d+\.\d+\.\d+\n", command("--version").out)
    assert all(name in command("--help").out for name in ("simulate", "audit", "check"))
    assert "foredraft simulate --set workload.rate=20" in command("simulate", "--help").out


def test_a_run_loads_only_what_it_needs(process):
    code = (
        "import sys; sys.argv = ['foredraft', 'simulate', '--quiet', '--set', 'workload.num_requests=5']\n"
        "from foredraft.cli.__main__ import main\n"
        "heavy = {'numpy', 'pydantic', 'simpy', 'rich.progress'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "heavy = {'torch', 'pyarrow', 'plotly', 'hypothesis', 'scipy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print('light')\n"
    )
    running = process(code=code)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0 and out.endswith("light\n"), err


def test_a_run_replaces_no_file_of_others(command, refused, tmp_path):
    run, arguments = tmp_path / "run", ("simulate", "--set", "workload.num_requests=5", "--quiet")
    run.mkdir()
    (run / "scenario.toml").write_text("# mine\n[workload]\nnum_requests = 5\n")
    assert "scenario.toml: is not of an earlier run" in refused(*arguments, "--out", run)
    (run / "summary.json").write_text('{"mine": 1}')
    assert "summary.json: is not of an earlier run" in refused(*arguments, "--out", run)
    assert {path.name: path.read_text() for path in run.iterdir()} == {
        "scenario.toml": "# mine\n[workload]\nnum_requests = 5\n",
        "summary.json": '{"mine": 1}',
    }
    again = tmp_path / "again"
    assert [command(*arguments, "--out", again).code for _ in range(2)] == [0, 0]


def test_a_trace_is_not_replaced_by_its_description(refused, tmp_path):
    trace = tmp_path / "requests.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,5\n")
    assert "is the trace itself" in refused("trace", trace, "--out", trace)
    assert trace.read_text().startswith("TIMESTAMP")
