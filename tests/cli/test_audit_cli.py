"""`foredraft audit`: what it prints, what it leaves behind, how it ends."""

import json

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a simulated run."""
    from foredraft.cli.simulation.run_record import RunRecord
    from foredraft.sim.running.run import Simulation
    from foredraft.sim.scenario_file import load_scenario

    scenario, _ = load_scenario(None, ["workload.num_requests=20"])
    directory = tmp_path_factory.mktemp("runs") / "a"
    with RunRecord(scenario, directory, perfetto=False) as record:
        report = Simulation(scenario, sinks=record.sinks, spans=record.spans).run()
        record.finish(report)
    return directory


def test_a_run_is_audited_with_the_steps_that_its_scenario_allows(command, run):
    outcome = command("audit", run)
    assert outcome.code == 0 and outcome.out.endswith("ok\n") and "20 requests" in outcome.out
    report = json.loads(command("audit", run, "--json").out)["report"]
    assert report["ok"] and report["complete"] and report["invariants"]["STEPS-01"]["evaluations"] > 10
    assert command("audit", run / "events.jsonl").out == outcome.out


def tampered(run, tmp_path, change):
    path = tmp_path / "events.jsonl"
    path.write_text(change((run / "events.jsonl").read_text()))
    return path


def test_a_contradiction_is_exit_code_1_with_its_line(command, run, tmp_path):
    lines = (run / "events.jsonl").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if '"waiting":0' in text)
    path = tampered(run, tmp_path, lambda text: text.replace('"waiting":0', '"waiting":3', 1))
    outcome = command("audit", path)
    assert outcome.code == 1 and f"line {line}, replica 0" in outcome.out and "3 requests wait" in outcome.out
    assert "ENGINE-01" in outcome.out and outcome.out.splitlines()[-1].startswith("FAILED")
    assert "Traceback" not in outcome.err


def test_what_is_no_log_is_exit_code_2(command, run, tmp_path):
    outcome = command("audit", tampered(run, tmp_path, lambda text: text[: len(text) // 2]))
    assert outcome.code == 2 and "breaks off" in outcome.err and "events.jsonl" in outcome.err and outcome.out == ""


def test_a_killed_run_is_audited_when_that_is_allowed(command, run, tmp_path):
    path = tampered(run, tmp_path, lambda text: text[: len(text) // 2])
    outcome = command("audit", path, "--allow-truncated")
    assert outcome.code == 0 and "did not end as it should" in outcome.out


def test_a_log_of_an_engine_that_is_not_ours_is_audited_without_its_header(command, run, tmp_path):
    def foreign(text):
        return '{"t":"header","schema":1,"engine":{"made":"elsewhere"}}\n' + text.split("\n", 1)[1]

    outcome = command("audit", tampered(run, tmp_path, foreign))
    assert outcome.code == 0 and "not evaluated: STEPS-01" in outcome.out
