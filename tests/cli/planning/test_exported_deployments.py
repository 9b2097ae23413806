"""What `export` writes for a server is read back as the same deployment."""

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np
import pytest
import yaml
from foredraft.core.adaptive.config import resolve_initial_steps
from foredraft.core.errors import ForedraftError
from foredraft.planning.servers.export.deployment import export
from foredraft.planning.servers.launch import READERS, read_launch
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario_file import scenario_with

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
    "drawn drafts": ("vllm sglang", {**FIXED, "model.draft": "someone/head", "speculation.accept_rule": "rejection"}),
    "block verification": ("vllm sglang", {**FIXED, "model.draft": "someone/head", "speculation.accept_rule": "block"}),
    "own layers": ("vllm sglang trtllm", {**DEEPSEEK, "hardware.tensor_parallel": 8}),
    "attention data": ("vllm sglang trtllm", {**DEEPSEEK, "hardware.attention_data_parallel": 8, "engine.max_running": 64}),
    "tree": ("sglang", {**FIXED, "speculation.topk": 4, "speculation.num_draft_tokens": 12}),
    "schedule": ("vllm trtllm", {"speculation.adaptive": {"1": {"candidate_steps": [4]}, "9": {"candidate_steps": [1]}}}),
    "choices": ("sglang", {"speculation.adaptive": "default"}),
    "choices from 0": ("sglang", {"speculation.adaptive": {"1": {"candidate_steps": [0, 2, 5]}}, "speculation.steps": 2}),
    "verification": (
        "vllm sglang",
        {"speculation.algorithm": "DSPARK", "speculation.policy": "confidence", "speculation.steps": 5, "model.draft": "a/b"},
    ),
    "waits": ("trtllm", {**FIXED, "engine.batch_wait_rounds": 20, "engine.batch_wait_tokens": 0.5, "engine.guarantee_output": 0.0}),
    "apart": ("vllm", {**FIXED, "disaggregation.prefill": 1, "disaggregation.decode": 1}),
}  # fmt: skip
PROFILES = {"vllm": "vllm-0.18", "sglang": "sglang-0.5", "trtllm": "trtllm-1.x"}
WITHOUT_EFFECT = {"--host", "--port", "--return-perf-metrics", "--enable-iter-perf-stats"}
PAGES = {"vllm": 16, "sglang": 1, "trtllm": 32}


def keys_of(settings: dict) -> dict:
    """Return the dotted keys of a launch command."""
    below = settings.pop("speculation")
    return settings | {f"speculation.{key}": value for key, value in below.items()}


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
        "rule": scenario.speculation.accept_rule, "pools": run.pools, "front_end": run.deployment.front_end,
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


@pytest.mark.parametrize(("server", "name", "is_noted"), [
    ("sglang", "draft model", True), ("sglang", "draft head", False), ("trtllm", "draft head", True), ("vllm", "draft model", False),
])  # fmt: skip
def test_a_rule_that_the_server_has_no_argument_for_is_noted(server, name, is_noted):
    notes = export("x", scenario_of(server, name, **{"speculation.accept_rule": "rejection"}), server, None).notes
    assert ("speculation.accept_rule is rejection, for which the server has no argument" in notes) is is_noted


def test_what_adaptive_verification_decides_by_goes_with_the_deployment(tmp_path):
    """SGLang's times have no contexts: those of the middle of an output are written."""
    more = {"speculation.confidence_temperatures": {"temperatures": [1.5, 1.2, 1.1, 1.0, 0.9]}}
    lengths = {"workload.prompt": {"value": 3000}, "workload.output": {"value": 400}}
    scenario = scenario_of("sglang", "verification", **more, **lengths)
    costs = assemble(scenario).spec.cost_table
    made = export("x", scenario, "sglang", None)
    assert "contexts of 3,200 tokens" in " ".join(made.notes)
    for file, text in made.files.items():
        (tmp_path / file).write_text(text)
    for file in ("launch.sh", "deployment.yaml"):
        launch = read_launch("sglang", str(tmp_path / file), "--from", "H100")
        spec = assemble(scenario_read(launch, scenario)).spec
        assert spec.temperatures == (1.5, 1.2, 1.1, 1.0, 0.9)
        for rows in (1, 5, 40):
            for tokens in (rows, rows + 7, rows * 6):
                passes = costs.verify_times(costs.padded(5, np.array([tokens])))
                wanted = costs.draft_time(5, rows, 3200 * rows) + passes[0]
                found = spec.cost_table.draft_time(5, rows) + spec.cost_table.verify_times(np.array([tokens]))[0]
                assert found == pytest.approx(wanted, abs=5), (file, rows, tokens)


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
        ("vllm", {"speculation.policy": "confidence"}, "with one number of draft steps: give speculation.steps"),
        (
            "sglang",
            {"speculation.policy": "confidence", "speculation.steps": 3},
            "only vLLM .*, and SGLang those of DSPARK",
        ),
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
