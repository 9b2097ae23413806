"""`foredraft export`: what it writes is read back as the same deployment, with the load of one replica beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import foredraft
import pytest
import yaml
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.launch import read_launch
from foredraft.planning.trial import RunOutcome
from foredraft.sim.scenario_file import load_scenario


class Linear:
    """Workers whose service has a p99 TPOT that rises with the load of an engine."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        job = self.jobs.pop()
        engines = job.settings["hardware.replicas"]
        load = job.settings["workload.rate_scale" if "workload.rate_scale" in job.settings else "workload.rate"]
        share = load / engines / (8 - 0.2 * job.settings["speculation.steps"])
        summary = dict.fromkeys(("refused", "aborted", "failed", "unfinished", "retractions", "max_queue_length"), 0)
        summary |= {"overloaded": False, "saturation": 0.5, "replicas": engines, "mean_running": 6.0 * engines}
        summary |= {"submitted": 600, "slo_attainment": 0.99, "slo_taken": share**2}
        summary |= {"p99_tpot_ms": 50 * share**2, "mean_tpot_ms": 10.0, "mean_ttft_ms": 100.0}
        summary |= {"mean_output_tokens": 200.0, "mean_input_tokens": 500.0, "decode_rounds": 9, "duration": 9.0}
        return job, RunOutcome("done", "", summary | {"kv_occupancy_max": 0.5, "device_busy_share": 0.5})

    def close(self) -> None:
        pass


@pytest.fixture
def planned(command, tmp_path, monkeypatch) -> Path:
    """The directory of a plan for vLLM with two engines of two GPUs, whose best candidate has one draft step."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Linear())
    asked = ("plan", "--slo", "tpot_p99<50ms", "--try", "speculation.steps=1,3", "--gpus", 4, "--quiet")
    server = ("--set", "hardware.server=vllm-0.18", "--set", "engine.max_running=64", "--seeds", 2)
    parallel = ("--try", "hardware.tensor_parallel=2", "--out", tmp_path / "plan")
    assert command(*asked, *server, *parallel).code == 0
    return tmp_path / "plan"


def test_a_plan_becomes_files(command, planned):
    code, out, errors = command("export", planned)
    assert (code, errors) == (0, "") and max(len(line) for line in out.splitlines() if str(planned) not in line) <= 80
    assert out.startswith("EAGLE3, 1 step, tensor_parallel 2: 2 replicas of vLLM with 2 GPUs each\n")
    assert 'add the path of the EAGLE3 draft as "model" of --speculative-config' in " ".join(out.split())
    folder = planned / "export"
    assert {path.name for path in folder.iterdir()} == {"launch.sh", "values.yaml", "deployment.yaml", "scaling.json"}
    values, deployment = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("values", "deployment"))
    decode = values["decode"]
    (container,) = decode["containers"]
    assert decode["replicas"] == deployment["spec"]["replicas"] == 2 and not values["prefill"]["create"]
    assert decode["parallelism"] == {"tensor": 2, "data": 1} and container["modelCommand"] == "vllmServe"
    assert values["modelArtifacts"]["name"] == "meta-llama/Llama-3.1-8B" and container["image"].endswith(":v0.18.0")
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    assert pod["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert pod["args"][:2] == ["--tensor-parallel-size", "2"] and set(container["args"]) < set(pod["args"])


def test_the_load_of_a_replica_is_that_of_the_plan(command, planned):
    answer = json.loads((planned / "answer.json").read_text())
    found = json.loads(command("export", planned, "--json").out)
    best = answer["candidates"][0]
    assert best["engines"] == 2 and best["running_per_engine"] == 6.0 and best["requests_per_s"] == best["load"]
    load = found["load"]
    assert load["requests_per_s"] == pytest.approx(best["load"] / 2) and load["running"] == 6.0
    assert load["interval"] == pytest.approx([end / 2 for end in best["load_interval"]])
    assert (found["metric"], load["limits"]) == ("vllm:num_requests_running", ["tpot_p99 < 50 ms"])
    written = json.loads((planned / "export" / "scaling.json").read_text())
    assert written["running"] == 6.0 and written["replicas"] == 2 and written["metric"] == found["metric"]
    assert written["computed_for"] == {"server": "vllm-0.18", "gpu": "H100", "model": "llama-3.1-8b"}


@pytest.mark.parametrize(("server", "profile"), [("sglang", "sglang-0.5"), ("trtllm", "trtllm-1.x")])
def test_no_load_leaves_the_server_that_it_was_computed_for(command, planned, server, profile):
    """Neither the load nor the replicas of a plan for vLLM are written for another server; the files say why, also in
    the place of an earlier export."""
    assert command("export", planned).code == 0
    code, out, _ = command("export", planned, "--for", server)
    why = f"plan with --set hardware.server={profile}: this plan simulated vllm-0.18"
    told = " ".join(out.split())
    assert (
        code == 0
        and f"To do: {why}" in told
        and "requests/s" not in told
        and re.search(r": replicas of \S+ with", told)
    )
    scaling = json.loads((planned / "export" / "scaling.json").read_text())
    assert set(scaling) == {"metric", "gpus_per_replica", "load", "reason"}
    assert scaling["load"] is None and scaling["reason"].startswith(why)
    text = (planned / "export" / "deployment.yaml").read_text()
    (deployment,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    assert f"# To do: {why}" in text and set(deployment["spec"]) == {"selector", "template"}
    found = json.loads(command("export", planned, "--for", server, "--json").out)
    assert found["load"] is None and found["replicas"] is None and found["gpus_per_replica"] == 2


def test_a_plan_for_another_server_is_written_for_vllm_by_its_own_rules(command, planned):
    """What the scenario leaves to the server is left to the new one, and its number of replicas to the chart."""
    question = json.loads((planned / "question.json").read_text())
    question["scenario"]["hardware"]["server"] = "sglang-0.5"
    question["scenario"]["engine"]["max_running"] = None
    (planned / "question.json").write_text(json.dumps(question))
    own, other = (json.loads(command("export", planned, *more, "--json").out) for more in ((), ("--for", "vllm")))
    assert own["replicas"] == 2 and "--max-running-requests 48" in own["commands"]["launch.sh"]
    assert other["replicas"] is None and "--max-num-seqs 1024" in other["commands"]["launch.sh"]
    values = yaml.safe_load(other["files"]["values.yaml"])
    assert not {"replicas"} & {*values["decode"], *values["prefill"]} and ":v0.18.0" in other["files"]["values.yaml"]


def test_a_tune_is_exported_with_its_schedule(command, tmp_path):
    (tmp_path / "question.json").write_text(json.dumps({"kind": "tune"}))
    schedule = '{"1" = {candidate_steps = [4]}, "8" = {candidate_steps = [2]}}'
    text = f'name = "chat"\n[hardware]\nserver = "vllm-0.18"\n[speculation]\nadaptive = {schedule}\n'
    (tmp_path / "scenario.toml").write_text(text)
    scenario, _ = load_scenario(tmp_path / "scenario.toml")
    found = json.loads(command("export", tmp_path, "--json").out)
    assert found["name"] == "chat, tuned steps" and found["load"] is None and "scaling.json" not in found["files"]
    (tmp_path / "export" / "launch.sh").write_text(found["commands"]["launch.sh"])
    read = read_launch("vllm", str(tmp_path / "export" / "launch.sh"), "--from", scenario.hardware.gpu)
    steps = {
        bound: slot["candidate_steps"]
        for bound, slot in read.settings["speculation"]["adaptive"].items()
        if bound.isdigit()
    }
    assert steps == {"1": [4], "8": [2]}


def test_steps_that_were_tuned_for_another_server_are_refused(refused, tmp_path):
    (tmp_path / "question.json").write_text(json.dumps({"kind": "tune"}))
    text = (
        'name = "chat"\n[hardware]\nserver = "vllm-0.18"\n[speculation]\nadaptive = {"1" = {candidate_steps = [4]}}\n'
    )
    (tmp_path / "scenario.toml").write_text(text)
    message = refused("export", tmp_path, "--for", "sglang")
    assert "SGLang" in message and "tuned for vllm-0.18" in message and "hardware.server=sglang-0.5" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("{}/none",),
            "none: no such directory or file; expected that of plan or tune, or a table: default, with-zero",
        ),
        (("{}", "--for", "vlm"), "--for: vlm: expected vllm, sglang or trtllm (did you mean 'vllm'?)"),
        (("{}", "--candidate", "EAGLE3, 2 steps"), "is none of this plan"),
    ],
)
def test_bad_input_is_one_message(refused, planned, arguments, message):
    assert message in refused("export", *(str(word).replace("{}", str(planned)) for word in arguments))
    (planned / "answer.json").rename(planned / "away.json")
    assert "the same `foredraft plan` goes on" in refused("export", planned)
    (planned / "answer.json").write_text('{"candidates": [{"name": "x", "status": "best"}]}')
    assert "answer.json: is not of this version" in refused("export", planned)
    (planned / "question.json").write_text('{"kind": "sweep"}')
    assert "is no directory of a plan or a tune" in refused("export", planned)


def test_plan_answers_from_python_as_the_command_does(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Linear())
    lines: list[str] = []
    asked = {"slo": "tpot_p99<50ms", "compare": {"speculation.steps": [1, 3]}, "seeds": 2, "prices": {"h100": 2.5}}
    plan = foredraft.plan(**asked, out=tmp_path / "python", on_progress=lines.append)
    words = ("--slo", "tpot_p99<50ms", "--try", "speculation.steps=1,3", "--seeds", 2, "--price", "H100=2.5", "--quiet")
    assert json.loads(plan.to_text()) == json.loads(
        command("plan", *words, "--json", "--out", tmp_path / "command").out
    )
    assert json.loads((tmp_path / "python" / "answer.json").read_text()) == plan.to_json() | json.loads(plan.to_text())
    assert plan.best is not None and plan.best.name == "EAGLE3, 1 step" and plan.best.bill is not None
    assert plan.best.load <= plan.best.half_load and plan.best.run.seeds == 2
    assert len(lines) == 6 and lines[-1].startswith("third round, ") and lines[0].startswith("first round, EAGLE3, ")
    assert foredraft.plan(**asked).candidates == plan.candidates, "the runs need not be kept"


def test_the_replicas_of_a_day_are_the_same_from_python_and_from_the_command(command, tmp_path, monkeypatch):
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Linear())
    trace, limits = tmp_path / "day.csv", "attainment>95%,ttft<1s"
    seconds = [*range(0, 3600, 60), *range(3600, 7200, 10)]
    lines = [f"2024-01-01 0{one // 3600}:{one // 60 % 60:02}:{one % 60:02},100,50\n" for one in seconds]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    asked = {"slo": limits, "compare": {"speculation.steps": [1]}, "seeds": 2, "by_hour": True, "warm_up_s": 600}
    plan = foredraft.plan({"workload": {"trace": str(trace)}}, **asked, headroom=0.5, prices={"H100": 2.0})
    words = ("plan", "--trace", trace, "--slo", limits, "--try", "speculation.steps=1", "--seeds", 2, "--by-hour")
    words = (*words, "--warm-up", 600, "--headroom", 50, "--price", "H100=2", "--quiet")
    assert json.loads(command(*words, "--json", "--out", tmp_path / "json").out) == json.loads(plan.to_text())
    (limit,) = plan.limits
    assert (limit.key, limit.limit_ms, limit.share) == ("slo_attainment", None, 0.95)
    assert limit.text == "95 % of requests with ttft < 1000 ms" and plan.best.tightest == "attainment"
    hours = plan.hours
    assert [one.start_s for one in hours.hours] == [0, 3600] and hours.capacity == plan.best.requests_per_s
    assert (hours.headroom, hours.warm_up_s, hours.bill) == (0.5, 600, 2 * hours.gpu_hours)
    out = command(*words, "--details", "--out", tmp_path / "text").out
    assert "a replica (1 GPU) holds" in " ".join(out.split()) and all(
        " ".join(one.split()) in " ".join(out.split()) for one in (plan.sentences[0], *plan.sentences[2:], plan.timing)
    )
    with pytest.raises(ConfigError, match="give --trace"):
        foredraft.plan(by_hour=True)
    with pytest.raises(ConfigError, match=r"headroom: is -1; expected a share from 0 to 10\n.*warm_up_s"):
        foredraft.plan(headroom=-1, warm_up_s=-1)


def test_a_search_ends_with_an_exception_of_on_progress(monkeypatch):
    def stop(line: str) -> None:
        raise TimeoutError(line)

    closed: list[bool] = []
    monkeypatch.setattr(Linear, "close", lambda self: closed.append(True))
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Linear())
    with pytest.raises(TimeoutError, match="first round"):
        foredraft.plan(slo="tpot_p99<50ms", compare={"speculation.steps": [1, 3]}, on_progress=stop)
    assert closed == [True]
