"""`foredraft export`: what it writes is read back as the same deployment, with the load of one replica beside it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import foredraft
import pytest
import yaml
from foredraft.core.adaptive.config import resolve_initial_steps
from foredraft.core.errors import ConfigError, ForedraftError
from foredraft.planning.servers.export.deployment import export
from foredraft.planning.servers.launch import READERS, read_launch
from foredraft.planning.trial import RunOutcome
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import load_scenario, scenario_with


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


def keys_of(settings: dict) -> dict:
    """Return the dotted keys of a launch command."""
    below = settings.pop("speculation")
    return settings | {f"speculation.{key}": value for key, value in below.items()}


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


SHAPE = {
    "model.target": "meta-llama/Llama-3.1-70B", "model.kv_dtype": "fp8", "model.context_len": 8192, "engine.max_running": 32,
    "engine.chunk_size": 4096, "engine.page_size": 32, "speculation.algorithm": "NONE", "engine.prefix_cache": False,
    "engine.mode": "synchronous", "hardware.cuda_graphs": False,
}  # fmt: skip
FIXED = {"speculation.policy": "fixed", "speculation.steps": 4}
DEEPSEEK = {
    "model.target": "glm-4.5-air", "hardware.gpu": "H200", "hardware.expert_parallel": 8,
    "speculation.algorithm": "EAGLE", **FIXED,
}  # fmt: skip
DEPLOYMENTS = {
    "plain": ("vllm sglang trtllm", {"speculation.algorithm": "NONE"}),
    "look-ups": ("vllm trtllm", {**FIXED, "speculation.algorithm": "NGRAM"}),
    "two devices": ("vllm sglang trtllm", {**FIXED, "hardware.tensor_parallel": 2, "hardware.gpu": "L40S"}),
    "every size": ("sglang trtllm", {**SHAPE, "hardware.tensor_parallel": 8}),
    "one limit": ("vllm", {**SHAPE, "hardware.tensor_parallel": 8, "engine.max_step_tokens": 4096}),
    "pool": ("vllm sglang trtllm", {**FIXED, "engine.kv_slots": 320_000, "engine.page_size": 64}),
    "queue": ("vllm sglang", {**FIXED, "engine.max_queue": 50, "engine.preempt": True, "front_end.stream_interval": 5}),
    "graphs": ("vllm sglang trtllm", {**FIXED, "hardware.graph_sizes": [1, 2, 8, 64]}),
    "host memory": ("vllm sglang", {**FIXED, "engine.host_cache_gb": 100, "hardware.tensor_parallel": 2}),
    "memory for KV": ("vllm trtllm", {**FIXED, "hardware.kv_gb": 20.5}),
    "draft model": ("vllm sglang trtllm", {**FIXED, "speculation.algorithm": "STANDALONE", "model.draft": "llama-3.2-1b"}),
    "draft head": ("vllm sglang trtllm", {**FIXED, "model.draft": "someone/eagle3-head"}),
    "own layers": ("vllm sglang trtllm", {**DEEPSEEK, "hardware.tensor_parallel": 8}),
    "attention data": ("vllm sglang trtllm", {**DEEPSEEK, "hardware.attention_data_parallel": 8, "engine.max_running": 64}),
    "tree": ("sglang", {**FIXED, "speculation.topk": 4, "speculation.num_draft_tokens": 12}),
    "schedule": ("vllm trtllm", {"speculation.adaptive": {"1": {"candidate_steps": [4]}, "9": {"candidate_steps": [1]}}}),
    "choices": ("sglang", {"speculation.adaptive": "default"}),
    "choices from 0": ("sglang", {"speculation.adaptive": {"1": {"candidate_steps": [0, 2, 5]}}, "speculation.steps": 2}),
    "waits": ("trtllm", {**FIXED, "engine.batch_wait_rounds": 20, "engine.batch_wait_tokens": 0.5, "engine.guarantee_output": 0.0}),
    "apart": ("vllm", {**FIXED, "disaggregation.prefill": 1, "disaggregation.decode": 1}),
}  # fmt: skip
PROFILES = {"vllm": "vllm-0.18", "sglang": "sglang-0.5", "trtllm": "trtllm-1.x"}
WITHOUT_EFFECT = {"--host", "--port", "--return-perf-metrics", "--enable-iter-perf-stats"}
PAGES = {"vllm": 16, "sglang": 1, "trtllm": 32}


def deployment_of(scenario) -> dict:
    """Return what a run of a scenario has of its servers, without the reasons for it."""
    run = assemble(scenario)
    spec = run.spec
    config = asdict(spec.config)
    del config["mode_reason"]
    slots = zip(spec.adaptive.bounds, spec.adaptive.slots, strict=True)
    table = [(bound, asdict(slot)) for bound, slot in slots if bound <= spec.config.max_running]
    has_choices = any(len(slot.candidate_steps) > 1 for slot in spec.adaptive.slots)
    begin = resolve_initial_steps(spec.adaptive, spec.initial_steps) if has_choices else None
    hardware = scenario.hardware.model_dump(exclude={"reserved_fraction", "free_fraction", "graph_sizes"})
    return {
        "config": config, "table": table, "policy": spec.policy, "algorithm": spec.algorithm, "steps": begin,
        "nodes": spec.num_draft_tokens, "graphs": spec.graph_sizes, "hardware": hardware, "slots": run.memory and run.memory.slots,
        "model": (run.target.layers, run.target.hidden, run.target.kv_dtype), "draft": run.draft and run.draft.algorithm,
        "pools": run.pools, "front_end": run.deployment.front_end,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("server", "name"), [(server, name) for name, (servers, _) in DEPLOYMENTS.items() for server in servers.split()]
)
def test_what_is_exported_is_read_back_as_the_same_deployment(server, name, tmp_path):
    scenario = scenario_of(server, name, **{"engine.page_size": PAGES[server]})
    made = export("x", scenario, server, None)
    names_are_known(server, made.commands["launch.sh"])
    for file, text in made.files.items():
        (tmp_path / file).write_text(text)
    for file in ("launch.sh", "deployment.yaml"):
        if file not in made.files:
            assert name == "apart"
            continue
        launch = read_launch(server, str(tmp_path / file), "--from", scenario.hardware.gpu)
        assert not launch.not_modelled and set(launch.without_effect) <= WITHOUT_EFFECT
        # An image names a release, whose rules for memory hold.
        named = {"release": launch.settings.get("hardware.release")}
        assert (named["release"] is None) == (server != "vllm" or file == "launch.sh")
        same = scenario.model_copy(update={"hardware": scenario.hardware.model_copy(update=named)})
        assert deployment_of(scenario_read(launch, scenario)) == deployment_of(same)


@pytest.mark.parametrize(
    ("server", "file", "more"),
    [
        ("vllm", "deployment.yaml", {"hardware.replicas": 3}),
        ("vllm", "values.yaml", {"hardware.replicas": 3}),
        ("vllm", "values.yaml", {"hardware.replicas": 6, "disaggregation.ratio": "1:2"}),
        ("sglang", "deployment.yaml", {"hardware.replicas": 3}),
        ("sglang", "deployment.yaml", {"hardware.replicas": 6, "disaggregation.ratio": "1:2"}),
        ("trtllm", "deployment.yaml", {"hardware.replicas": 3}),
    ],
)
def test_replicas_are_read_back(server, file, more, tmp_path):
    settings = {"speculation.algorithm": "NONE", "hardware.tensor_parallel": 2, "hardware.server": PROFILES[server]}
    made = export("x", scenario_with({}, settings | more), server, None)
    (tmp_path / file).write_text(made.files[file])
    found = read_launch(server, str(tmp_path / file), "--from", "H100").settings
    assert found["model.target"] == "meta-llama/Llama-3.1-8B" and found["hardware.tensor_parallel"] == 2
    if "disaggregation.ratio" in more:
        assert (found["disaggregation.prefill"], found["disaggregation.decode"]) == (2, 4)
    else:
        assert found["hardware.replicas"] == 3


def scenario_of(server: str, name: str, **more):
    """Return the scenario of a deployment, on a server."""
    usual = {"hardware.server": PROFILES[server], "hardware.kernels": "roofline"}
    if server == "trtllm":  # whose steps have one limit for prompts and drafts
        usual |= {
            "engine.max_running": 512,
            "engine.max_step_tokens": DEPLOYMENTS[name][1].get("engine.chunk_size", 8192),
        }
    return scenario_with({}, usual | more | DEPLOYMENTS[name][1])


def scenario_read(launch, scenario):
    """Return the scenario of a launch command, with what it does not say as in the one that was exported."""
    kept = {"hardware.gpu": scenario.hardware.gpu, "hardware.kernels": scenario.hardware.kernels}
    return scenario_with({}, keys_of(dict(launch.settings)) | kept)


def names_are_known(server: str, command: str) -> None:
    """Check that the server has arguments of these whole names."""
    known = READERS[server][0]
    words = [word[2:].replace("_", "-") for word in command.split() if word.startswith("--")]
    bare = [word if word in known.known else word.removeprefix("no-") for word in words]
    assert words and all(word in known.known or word in known.other_names for word in bare), bare


def test_prefill_and_decode_servers_of_sglang_have_commands_of_their_own(command, tmp_path):
    settings = {**FIXED, "hardware.server": "sglang-0.5", "hardware.kernels": "roofline"}
    scenario = scenario_with({}, settings | {"disaggregation.ratio": "1:2", "hardware.replicas": 6})
    made = export("x", scenario, "sglang", None)
    assert list(made.commands) == ["prefill.sh", "decode.sh", "router.sh"] and "launch.sh" not in made.files
    one_each = scenario_with({}, settings | {"disaggregation.prefill": 1, "disaggregation.decode": 1})
    for role in ("prefill", "decode"):
        assert f"--disaggregation-mode {role}" in made.files[f"{role}.sh"]
        launch = read_launch("sglang", made.files[f"{role}.sh"], "--from", "H100")
        assert deployment_of(scenario_read(launch, scenario)) == deployment_of(one_each)
    prefill, decode = yaml.safe_load_all(made.files["deployment.yaml"])
    assert (prefill["spec"]["replicas"], decode["spec"]["replicas"]) == (2, 4)
    for one, role in ((prefill, "prefill"), (decode, "decode")):
        check_deployment(one, {})
        label = one["spec"]["template"]["metadata"]["labels"]
        assert (
            f"--{role}-selector {' '.join(f'{key}={value}' for key, value in label.items())}" in made.files["router.sh"]
        )
    assert prefill["spec"]["template"]["metadata"]["annotations"] == {"sglang.ai/bootstrap-port": "8998"}
    assert "--service-discovery-port 30000" in made.files["router.sh"]


def check_deployment(document: dict, files: dict) -> None:
    """Check a Deployment against the structure that Kubernetes takes (apps/v1), and its mounted files."""
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert (document["apiVersion"], document["kind"]) == ("apps/v1", "Deployment")
    assert re.fullmatch("[a-z]([a-z-]*[a-z])?", document["metadata"]["name"])
    spec, template = document["spec"], document["spec"]["template"]
    assert set(spec) == {"replicas", "selector", "template"} and isinstance(spec["replicas"], int)
    assert spec["selector"]["matchLabels"] == template["metadata"]["labels"] == document["metadata"]["labels"]
    assert set(template["spec"]) <= {"containers", "volumes"}
    (container,) = template["spec"]["containers"]
    known = {
        "name",
        "image",
        "command",
        "args",
        "ports",
        "resources",
        "volumeMounts",
        "env",
        "startupProbe",
        "readinessProbe",
    }
    assert set(container) <= known
    assert container["startupProbe"]["httpGet"]["port"] == container["ports"][0]["containerPort"]
    assert all(isinstance(word, str) for word in (*container["command"], *container["args"]))
    assert re.fullmatch("[a-z]([a-z-]*[a-z])?", container["name"])
    port = str(container["ports"][0]["containerPort"])
    assert container["args"][-4:] == ["--host", "0.0.0.0", "--port", port]
    mounts, volumes = container.get("volumeMounts", []), template["spec"].get("volumes", [])
    assert [one["name"] for one in mounts] == [one["name"] for one in volumes] == [*files][:1]
    for mount in mounts:
        named = [word for word in container["args"] if word.startswith(f"{mount['mountPath']}/")]
        assert [word.rpartition("/")[2] for word in named] == list(files[mount["name"]])


@pytest.mark.parametrize(
    ("server", "name", "file"), [("trtllm", "plain", "trtllm.yaml"), ("sglang", "choices", "sglang-adaptive.json")]
)
def test_files_that_a_command_names_are_in_a_config_map(server, name, file):
    made = export("x", scenario_of(server, name), server, None)
    config, deployment = yaml.safe_load_all(made.files["deployment.yaml"])
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap") and config["data"] == {file: made.files[file]}
    check_deployment(deployment, {config["metadata"]["name"]: config["data"]})
    assert file in made.commands["launch.sh"].split()


@pytest.mark.parametrize(
    ("server", "gpu", "image"),
    [
        ("vllm", "H100", "vllm/vllm-openai:v0.18.0"),
        ("vllm", "MI300X", "vllm/vllm-openai-rocm:v0.18.0"),
        ("sglang", "MI300X", "lmsysorg/sglang:v0.5.23-rocm700-mi30x"),
        ("sglang", "MI355X", "lmsysorg/sglang:v0.5.23-rocm700-mi35x"),
    ],
)
def test_the_image_is_for_the_maker_of_the_gpu(server, gpu, image):
    scenario = scenario_of(server, "plain", **{"hardware.gpu": gpu})
    (deployment,) = yaml.safe_load_all(export("x", scenario, server, None).files["deployment.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    maker = "amd" if gpu.startswith("MI") else "nvidia"
    assert container["image"] == image and set(container["resources"]["limits"]) == {f"{maker}.com/gpu"}


def test_tensorrt_llm_has_no_image_for_amd():
    with pytest.raises(ForedraftError, match="TensorRT-LLM runs on no GPU of AMD, such as MI300X"):
        export("x", scenario_of("trtllm", "plain", **{"hardware.gpu": "MI300X"}), "trtllm", None)


def test_several_devices_have_memory_that_they_share_and_what_is_left_to_do_is_said():
    for devices in (1, 2):
        scenario = scenario_of("vllm", "plain", **{"hardware.tensor_parallel": devices})
        made = export("x", scenario, "vllm", None)
        text = made.files["deployment.yaml"]
        (deployment,) = yaml.safe_load_all(text)
        pod = deployment["spec"]["template"]["spec"]
        mounts = [one["mountPath"] for one in pod["containers"][0].get("volumeMounts", ())]
        assert ("/dev/shm" in mounts) == (devices > 1)
        assert ("emptyDir: {medium: Memory}" in text or "medium: Memory" in text) == (devices > 1)
        assert ("medium: Memory" in made.files["values.yaml"]) == (devices > 1)
        comments = [line for line in text.splitlines() if line.startswith("# To do")]
        assert any("nvidia.com/gpu.product" in line for line in comments)
        assert any("secret hf-token" in line for line in comments)


@pytest.mark.parametrize(("server", "made"), [("vllm", True), ("sglang", True), ("trtllm", False)])
def test_a_format_of_weights_that_the_server_does_not_make_is_noted(server, made):
    notes = [
        " ".join(export("x", scenario_of(server, "plain", **{"model.weight_dtype": one}), server, None).notes)
        for one in ("fp8", "int4")
    ]
    assert ("whose weights are fp8" in notes[0]) is not made and "whose weights are int4" in notes[1]


@pytest.mark.parametrize(("server", "kv", "state"), [
    ("vllm", "turboquant_4bit_nc", "bf16"), ("sglang", "nvfp4", "bf16"), ("trtllm", "nvfp4", "fp16"),
])  # fmt: skip
def test_formats_of_kv_and_states_are_read_back(server, kv, state, tmp_path):
    keys = {"model.kv_dtype": kv, "model.state_dtype": state}
    made = export("x", scenario_of(server, "plain", **keys), server, None)
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    command = made.commands["launch.sh"].replace("trtllm.yaml", str(tmp_path / "trtllm.yaml"))
    settings = read_launch(server, command, "command", "H200").settings
    assert {key: settings[key] for key in keys} == keys
    other = export("x", scenario_of(server, "plain", **{"model.kv_dtype": "fp8_ds_mla"}), server, None)
    assert any("model.kv_dtype is fp8_ds_mla" in note for note in other.notes) is (server != "vllm")


def test_pages_of_one_token_are_left_to_the_server():
    made = export("x", scenario_of("trtllm", "graphs"), "trtllm", None)
    assert "tokens_per_block" not in made.files["trtllm.yaml"] and "engine.page_size = 32" in " ".join(made.notes)
    assert "speculative_model of speculative_config in trtllm.yaml" in " ".join(made.notes)
    assert "speculative_model" not in " ".join(export("x", scenario_of("trtllm", "own layers"), "trtllm", None).notes)


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        ("vllm", {"speculation.topk": 4, "speculation.policy": "fixed", "speculation.steps": 3}, "it drafts chains"),
        ("vllm", {"speculation.policy": "goodput"}, "it has no policy goodput"),
        ("vllm", {"speculation.policy": "ema"}, "`foredraft tune` finds such a schedule"),
        ("trtllm", {"speculation.policy": "ema"}, "`foredraft tune` finds such a schedule"),
        ("trtllm", {"disaggregation.ratio": "1:1", "hardware.replicas": 2}, "export without disaggregation"),
        (
            "vllm",
            {"disaggregation.ratio": "1:1", "hardware.replicas": 2, "hardware.decode.gpu": "H200"},
            "are not exported",
        ),
        ("trtllm", {"speculation.algorithm": "EAGLE", "speculation.steps": 3}, "it has no EAGLE$"),
        ("trtllm", {"speculation.topk": 4, "speculation.policy": "fixed", "speculation.steps": 3}, "it drafts chains"),
        (
            "sglang",
            {**DEEPSEEK, "hardware.attention_data_parallel": 8, "speculation.policy": "ema", "speculation.steps": 3},
            "without data-parallel attention",
        ),
    ],
)
def test_what_a_server_has_no_arguments_for_is_refused(server, settings, message):
    with pytest.raises(ForedraftError, match=message):
        export("x", scenario_with({}, settings), server, None)


def test_prefill_and_decode_apart_have_replicas_of_their_own():
    settings = {"disaggregation.ratio": "1:2", "hardware.replicas": 6, "speculation.algorithm": "NONE"}
    made = export("x", scenario_with({}, settings | {"hardware.server": "vllm-0.18"}), "vllm", None)
    values = yaml.safe_load(made.files["values.yaml"])
    assert (values["prefill"]["replicas"], values["decode"]["replicas"]) == (2, 4) and values["routing"]["proxy"][
        "enabled"
    ]
    assert "--kv-transfer-config" in values["prefill"]["containers"][0]["args"] and "deployment.yaml" not in made.files


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
