"""The names of the package itself: what a user imports, how light that is, and that it is the same as the commands."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import subprocess
import sys
import weakref
from pathlib import Path

import foredraft
import pytest
from foredraft.cli.__main__ import main
from foredraft.cli.simulation.schema import WITHOUT
from foredraft.core.errors import ConfigError, ForedraftError

SMALL = {"workload": {"num_requests": 30, "rate": 20.0}}


def test_the_package_loads_nothing_until_it_is_asked():
    code = (
        "import sys, foredraft\n"
        "print([name for name in sys.modules if name.startswith(('foredraft.', 'numpy'))])\n"
        "print(foredraft.Scenario.__name__, foredraft.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "Scenario 0.2.0"]


def test_every_name_is_there_and_no_other():
    assert dir(foredraft) == sorted(foredraft.__all__)
    assert all(getattr(foredraft, name) for name in foredraft.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'simulator'"):
        _ = foredraft.simulator


def test_simulate_is_the_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "scenario.toml"
    file.write_text("seed = 3\n[workload]\nnum_requests = 30\nrate = 5.0\n[slo]\nttft_ms = 100.0\n")
    command = [
        "foredraft",
        "simulate",
        str(file),
        "--set",
        "workload.rate=20.0",
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="0"):
        main()
    result = foredraft.simulate(file, {"workload.rate": 20.0})
    assert json.loads(json.dumps(result.summary)) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "\n".join(line.rstrip() for line in str(result).splitlines()[2:]) in "\n".join(
        line.rstrip() for line in capsys.readouterr().out.splitlines()
    )
    assert result.scenario.seed == 3 and result.requests.num_rows == 30
    assert sum(result.rounds["tokens"].to_pylist()) == result.summary["total_output_tokens"]


def test_the_package_runs_as_the_command(tmp_path):
    for words, code in ((["--version"], 0), (["simulat"], 2)):
        line = [sys.executable, "-m", "foredraft", *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code
        assert (done.stdout, done.stderr[:17]) in (("foredraft 0.2.0\n", ""), ("", "Usage: foredraft "))


def test_a_scenario_comes_as_tables_or_as_itself():
    tables = {**SMALL, "slo": {"ttft_ms": 10_000.0}}
    of_tables = foredraft.simulate(tables)
    of_itself = foredraft.simulate(foredraft.Scenario(**SMALL), {"slo.ttft_ms": 10_000.0})
    assert of_tables.summary == of_itself.summary and tables["workload"] == SMALL["workload"]
    assert of_tables.slo_attainment == 1.0 and of_tables.meets_slo()
    tight = foredraft.simulate(tables, {"slo.ttft_ms": 0.001})
    assert tight.slo_attainment == 0.0 and not tight.meets_slo(0.5)


def test_bad_scenarios_name_the_key():
    with pytest.raises(ConfigError, match=r"overrides: workload\.rte: unknown key"):
        foredraft.simulate(SMALL, {"workload.rte": 3})
    with pytest.raises(ForedraftError, match="sets no SLO"):
        foredraft.simulate(SMALL).meets_slo()


def command_json(monkeypatch, capsys, *words: object) -> dict:
    """What a command prints with --json."""
    monkeypatch.setattr(sys, "argv", ["foredraft", *map(str, words), "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main()
    return json.loads(capsys.readouterr().out)


def test_answers_are_the_documents_of_the_commands(monkeypatch, capsys):
    def told(*words: object) -> dict:
        return command_json(monkeypatch, capsys, *words)

    cost = foredraft.cost({"model": {"kv_dtype": "fp8"}}, {"hardware.gpu": "H200"}, batch=[1, 8], steps=[0, 2])
    wide = ("--set", "model.kv_dtype=fp8", "--set", "hardware.gpu=H200", "--batch", "1,8", "--steps", "0,2")
    assert json.loads(cost.to_text()) == told("doctor", "--round", *wide)
    assert cost.batches[1].rounds[1].break_even > 1
    doctor = foredraft.doctor(overrides={"hardware.gpu": "L40S"}, requests=20)
    assert json.loads(doctor.to_text()) == told("doctor", "--set", "hardware.gpu=L40S", "--requests", 20)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: foredraft.cost(batch=[], context=-1), r"batch: is \[\]; expected whole numbers from 1 on"),
        (lambda: foredraft.doctor(overrides={"speculation.algorithm": "NONE"}), "does not speculate"),
        (lambda: foredraft.plan(rate=-1.0, seeds=1), "rate: is -1.0; expected above 0\n.*seeds: is 1; expected from 2"),
        (lambda: foredraft.plan(prices={"H10": 1.0}), "did you mean 'H100'"),
        (lambda: foredraft.plan(compare={"speculation.stps": [1]}), "unknown key"),
        (lambda: foredraft.tune(trials=0, requests=1), "trials: is 0; expected 1 or more\n.*requests: is 1"),
        (lambda: foredraft.calibrate("none.csv"), "none.csv"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_typed_error(ask, message):
    with pytest.raises(ForedraftError, match=message):
        ask()


def test_check_reports_what_breaks():
    assert foredraft.check("allocator", "plain-allocator", budget=2000).ok
    report = foredraft.check("allocator", lambda config: object(), budget=100, capabilities=())
    assert not report.ok and report.failures
    with pytest.raises(ConfigError, match="alocator"):
        foredraft.check("alocator", "plain-allocator")


def test_closed_sessions_leave_nothing_without_a_collection_of_cycles(models):
    def opened() -> foredraft.Session:
        return foredraft.Session(models["target"], algorithm="NGRAM", steps=2, graphs=True)

    with opened() as first:  # Numba compiles for it, which leaves cycles
        first.generate("def add(a, b):", max_tokens=6, ignore_eos=True)
    del first
    held = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with opened() as session:
                session.generate("def add(a, b):", max_tokens=6, ignore_eos=True)
                executor = session._session.executor
                held += [weakref.ref(x) for x in (executor.pool.keys, executor.target, executor)]
                del executor
            assert session.stats().output_tokens == 6
            assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_a_session_decodes_and_streams_the_same_text(models):
    plain = foredraft.Session(models["target"], dtype="float64")
    drafted = foredraft.Session(str(models["target"]), draft=models["EAGLE3"], dtype="float64", steps=2)
    outputs = plain.generate(["def f(", "class A:"], max_tokens=12, ignore_eos=True)
    assert [output.text for output in outputs] == [
        drafted.generate(text, max_tokens=12, ignore_eos=True).text for text in ("def f(", "class A:")
    ]
    assert "".join(drafted.stream("def f(", max_tokens=12, ignore_eos=True)) == outputs[0].text
    assert drafted.stats().requests == 3 and drafted.stats().output_tokens == 36
    with pytest.raises(ConfigError, match="max_tokens"):
        plain.generate("x", max_tokens=0)


@pytest.mark.fast("300.0", ci="*")
@pytest.mark.parametrize("asked", [30_000.0, 300.0])
def test_prompts_have_the_mean_that_was_asked_for(asked):
    """The bounds follow the distribution: a mean of 30,000 once gave 7,712, cut at 8,192 without a word."""
    given = {"prompt": {"mean": asked, "sigma": 0.5}, "output": {"kind": "fixed", "value": 2}, "num_requests": 200}
    result = foredraft.simulate({"workload": given | {"rate": 1.0}})
    summary = result.summary
    assert summary["asked_mean_input_tokens"] == asked and summary["asked_mean_output_tokens"] == 2
    assert summary["mean_input_tokens"] == pytest.approx(asked, rel=0.08)
    assert summary["mean_output_tokens"] == 2
    assert not [notice for notice in summary["notices"] if "asked" in notice]
    assert f" / {asked:,.0f}" in str(result)


def test_prompts_end_where_the_context_ends_and_the_report_says_so():
    given = {"prompt": {"mean": 6000.0, "sigma": 1.0}, "output": {"kind": "fixed", "value": 2}, "num_requests": 100}
    result = foredraft.simulate({"workload": given, "model": {"context_len": 4096}})
    assert result.summary["completed"] == 100, "no prompt is refused for its length"
    assert result.summary["mean_input_tokens"] < 4096
    (notice,) = [notice for notice in result.summary["notices"] if "asked" in notice]  # outputs have their room
    assert "6,000 asked for" in notice and f"{result.summary['mean_input_tokens']:,.0f} achieved" in notice
    assert "Note: input tokens" in str(result)


def test_a_trace_asks_for_no_mean(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,5\n")
    summary = foredraft.simulate({"workload": {"trace": str(trace)}}).summary
    assert summary["asked_mean_input_tokens"] is None and summary["mean_input_tokens"] == 10


# -- docs/planning.md, "For other programs" ------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
TEXT = (
    (ROOT / "docs/planning.md")
    .read_text(encoding="utf-8")
    .partition("\n## For other programs\n")[2]
    .partition("\n## ")[0]
)
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SLOW = ("calibrate", "plan", "tune")


def name_of(program: str) -> str:
    return re.search(r"foredraft\.(\w+)\(", program)[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in (name_of(p) for p, _ in PROGRAMS)
    ],
)
def test_a_program_prints_what_is_shown(monkeypatch, name):
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    service = re.search(r"^service = .*$", TEXT, re.MULTILINE)
    exec("import foredraft\n" + service[0], names)
    (program, shown) = next(pair for pair in PROGRAMS if name_of(pair[0]) == name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, names)
    assert printed.getvalue() == shown


def test_every_function_has_a_program():
    assert [name_of(program) for program, _ in PROGRAMS] == ["cost", "doctor", "calibrate", "plan", "tune"]


def test_the_page_names_the_commands_without_json():
    for name, reason in WITHOUT.items():
        (row,) = (line for line in TEXT.splitlines() if line.startswith("| `") and f"`{name}`" in line)
        assert reason.split(maxsplit=1)[1].partition(";")[0] in row
