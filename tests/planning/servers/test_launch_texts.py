"""Launch commands as people have them: scripts, containers, manifests and files of configuration; and what of the
servers' own rules follows from their arguments."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import built_in_config
from foredraft.planning.servers.files import server_files
from foredraft.planning.servers.launch import LaunchCommand, read_launch
from foredraft.planning.servers.texts.kserve import MOUNTED
from foredraft.planning.servers.texts.yaml_text import parse_yaml
from foredraft.planning.tuning.tables import settings_of
from foredraft.sim.assembly import assemble
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import load_scenario, scenario_with

MODEL = "Qwen/Qwen3-8B"


def launch_of(command: str, server: str = "vllm") -> LaunchCommand:
    return read_launch(server, command, "--from", "H100")


def refusal_of(command: str, server: str = "vllm") -> str:
    with pytest.raises(ConfigError) as caught:
        read_launch(server, command, "--from", "H100")
    return str(caught.value)


def scenario_of(server: str, command: str, **more: Any) -> Scenario:
    settings = launch_of(command, server).settings
    return load_scenario(None, [f"{key}={value}" for key, value in more.items()], {"--from": settings})[0]


class TestScripts:
    @pytest.mark.parametrize(
        "text",
        [
            "MODEL=Qwen/Qwen3-8B\nTP=4\nvllm serve $MODEL --tensor-parallel-size ${TP}",
            "TP=${TP:-4}\nvllm serve Qwen/Qwen3-8B \\\n  -tp $TP 2>&1 | tee log.txt",
            'ARGS=(\n  --tensor-parallel-size 4  # devices\n)\nexec vllm serve Qwen/Qwen3-8B "${ARGS[@]}"',
            "cat > a.yaml <<EOF\ntensor-parallel-size: 4\nEOF\nvllm serve Qwen/Qwen3-8B --config a.yaml",
            "pip install vllm==0.10.2 && bash -c 'vllm serve Qwen/Qwen3-8B --tensor-parallel-size=4' &",
            "docker pull vllm/vllm-openai:latest\n"
            "docker run --gpus all -e A=b vllm/vllm-openai:latest --model Qwen/Qwen3-8B --tensor-parallel-size 4",
            "docker run --entrypoint vllm vllm/vllm-openai:latest vllm serve Qwen/Qwen3-8B -tp 4",
            "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 4 --port 1 &\n"
            "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 4 --port 2",
        ],
    )
    def test_a_command_is_found_with_its_values(self, text: str):
        settings = launch_of(text).settings
        assert (settings["model.target"], settings["hardware.tensor_parallel"]) == (MODEL, 4)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("vllm serve Qwen/Qwen3-8B --tensor-parallel-size $TP", "a variable of the shell or a placeholder"),
            ("vllm serve <model>", "a variable of the shell or a placeholder"),
            ("vllm serve a/b --max-num-seqs 4\nvllm serve a/b --max-num-seqs 8", "starts vLLM 2 times"),
            ("vllm serve a/b\n  --max-num-seqs 4", "the shell would not pass it"),
            ("vllm serve a/b 'c", "cannot be read as a command"),
            ("python app.py --model a/b", "'python' is no command of vLLM"),
            ("vllm serve a/b c/d", "c/d: is no argument of vLLM"),
        ],
    )
    def test_what_a_simulation_would_have_to_guess_is_refused(self, text: str, message: str):
        assert message in refusal_of(text)

    def test_a_variable_matters_only_where_it_has_an_effect(self):
        assert launch_of("vllm serve a/b --port $PORT --served-model-name ${NAME}").settings["model.target"] == "a/b"


class TestModels:
    def test_a_command_without_one_is_refused(self):
        for text in ("vllm serve --max-num-seqs 4", "--max-num-seqs 4"):
            assert "model: the command names none" in refusal_of(text)
        given = read_launch("vllm", "vllm serve --max-num-seqs 4", "--from", "H100", has_model=True)
        assert "model.target" not in given.settings

    @pytest.mark.parametrize("server", ["vllm", "sglang"])
    def test_it_may_stand_in_a_file_over_which_the_command_wins(self, server: str, tmp_path: Path):
        key = {"vllm": "model", "sglang": "model-path"}[server]
        start = {"vllm": "vllm serve", "sglang": "python -m sglang.launch_server"}[server]
        text = f"{key}: a/b\ntensor-parallel-size: 2\nmax-model-len: 4096\n".replace(
            "max-model-len", "max-model-len" if server == "vllm" else "context-length"
        )
        (tmp_path / "own.yaml").write_text(text)
        script = tmp_path / "start.sh"  # the file is looked for beside the script
        script.write_text(f"{start} --config own.yaml --tensor-parallel-size 4\n")
        settings = launch_of(str(script), server).settings
        found = tuple(settings[key] for key in ("model.target", "hardware.tensor_parallel", "model.context_len"))
        assert found == ("a/b", 4, 4096)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "cannot be read"),
            ("model: a/b\nmodel: c/d\n", "'model' is written twice"),
            ("model: a/b\nmax-num-seqs:\n", "max-num-seqs: has no value"),
            ("model: a/b\nmax-num-sqs: 4\n", "did you mean '--max-num-seqs'"),
            ("- a/b\n", "has no keys"),
        ],
    )
    def test_a_file_that_cannot_be_read_is_refused(self, text: str | None, message: str, tmp_path: Path):
        path = tmp_path / "own.yaml"
        if text is not None:
            path.write_text(text)
        assert message in refusal_of(f"vllm serve --config {path}")


DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: server
        image: vllm/vllm-openai:v0.10.2
        env:
        - {name: TP, value: "4"}
        args: ["--model", "Qwen/Qwen3-8B", "--tensor-parallel-size", "$(TP)", "--port", "8000"]
      - name: other
        image: nginx
        args: ["-g", "daemon off;"]
"""
COMMAND_LINE = """\
kind: Pod
spec:
  containers:
  - name: server
    image: vllm/vllm-openai:latest
    command: ["/bin/sh", "-c"]
    args:
    - |
      vllm serve Qwen/Qwen3-8B \\
        --tensor-parallel-size 4
"""
COMPOSE = """\
services:
  server:
    image: vllm/vllm-openai:latest
    command: --model Qwen/Qwen3-8B --tensor-parallel-size 4
"""


class TestFormatsOfWeights:
    @pytest.mark.parametrize("model, argument, format_, note", [
        ("Qwen/Qwen3-8B-AWQ", "--dtype half", None, ""),
        ("Qwen/Qwen3-8B-AWQ", "--quantization awq_marlin --dtype half", None, ""),
        ("Qwen/Qwen3-8B-FP8", "--quantization awq", None, "the checkpoint's own format is taken, fp8, not int4"),
        ("Qwen/Qwen3-8B-FP8", "--quantization fp8", "fp8", ""),
        ("Qwen/Qwen3-8B", "--quantization fp8", "fp8", ""),
        ("Qwen/Qwen3-8B", "--dtype half", "fp16", ""),
    ])  # fmt: skip
    @pytest.mark.parametrize("server", ["vllm", "sglang"])
    def test_files_that_say_theirs_win(self, server: str, model: str, argument: str, format_: str | None, note: str):
        first = "vllm serve" if server == "vllm" else "python -m sglang.launch_server --model-path"
        found = launch_of(f"{first} {model} {argument}", server)
        assert found.settings.get("model.weight_dtype") == format_
        assert found.not_modelled.get("--quantization", "") == note

    def test_exceptions_of_a_checkpoint_stay_with_the_name_of_its_method(self, tmp_path: Path):
        rules = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*self_attn.*": {}}}
        config = dict(built_in_config("qwen3-8b")[1]) | {"quantization_config": rules}
        (tmp_path / "config.json").write_text(json.dumps(config))
        plain, named = (
            assemble(scenario_of("vllm", f"vllm serve {tmp_path}{more}")) for more in ("", " -q gptq_marlin")
        )
        assert named.target.attention_dtype == "bf16" and named.target == plain.target


class TestHeads:
    def test_a_head_of_speculators_in_the_place_of_the_model_brings_its_target(self, tmp_path: Path):
        layer = dict(built_in_config("qwen3-8b")[1]) | {"num_hidden_layers": 1, "model_type": "llama"}
        verifier = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
        about = {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}], "verifier": verifier}
        head = {
            "speculators_model_type": "eagle3", "draft_vocab_size": 32000, "transformer_layer_config": layer,
            "architectures": ["Eagle3Speculator"], "speculators_config": about,
        }  # fmt: skip
        file = tmp_path / "config.json"
        file.write_text(json.dumps(head))
        for more, steps in (("", 5), (""" --speculative-config '{"num_speculative_tokens": 2}'""", 2)):
            scenario = scenario_of("vllm", f"vllm serve {tmp_path} -tp 2{more}")
            run = assemble(scenario)
            assert (scenario.model.target, scenario.hardware.tensor_parallel) == ("Qwen/Qwen3-8B", 2)
            assert (run.algorithm.name, run.draft.source, scenario.speculation.steps) == ("EAGLE3", str(file), steps)
        about["verifier"] = {}
        file.write_text(json.dumps(head))
        assert "speculators_config.verifier: a head is served by its own name" in refusal_of(f"vllm serve {tmp_path}")

    @pytest.mark.parametrize("command", [
        "docker run --rm --entrypoint vllm vllm/vllm-openai:latest serve {} --max-num-seqs 32",
        "docker run --rm --entrypoint=vllm own/image:1 serve {} --max-num-seqs 32",
        "podman run --device nvidia.com/gpu=all registry.example.com/lab/vllm-cuda:3.2 --model {} --max-num-seqs 32",
    ])  # fmt: skip
    def test_an_image_that_starts_the_server_by_its_entry_point(self, command: str):
        settings = launch_of(command.format(MODEL)).settings
        assert (settings["model.target"], settings["engine.max_running"]) == (MODEL, 32)

    def test_another_entry_point_is_no_server(self):
        assert "is no command of vLLM" in refusal_of(f"docker run --entrypoint bash vllm/vllm-openai:latest {MODEL}")


class TestManifests:
    @pytest.mark.parametrize("text", [DEPLOYMENT, COMMAND_LINE, COMPOSE, "---\n" + DEPLOYMENT + "---\n" + COMPOSE])
    def test_the_command_of_a_container_is_read(self, text: str, tmp_path: Path):
        for given in (text, str(tmp_path / "a.yaml")):
            (tmp_path / "a.yaml").write_text(text)
            settings = launch_of(given).settings
            assert (settings["model.target"], settings["hardware.tensor_parallel"]) == (MODEL, 4)

    def test_the_release_is_that_of_its_image(self):
        assert any("release 0.10.2" in line for line in launch_of(DEPLOYMENT).notes())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (DEPLOYMENT.replace("value:", "valueFrom:"), "a variable of the shell or a placeholder"),
            (DEPLOYMENT.replace("$(TP)", "4").replace("image:", "image: a\n        image:", 1), "written twice"),
            (DEPLOYMENT.replace("vllm/", "other/").replace("vllm-", "x-"), "no container of this manifest"),
            (DEPLOYMENT.replace("]", "", 1), "line"),
            (DEPLOYMENT + "---\n" + COMPOSE.replace("4", "8"), "starts vLLM 2 times"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, text: str, message: str):
        assert message in refusal_of(text)


POD = """\
          containers:
          - {name: server, image: "vllm/vllm-openai:latest", args: ["--model", "Qwen/Qwen3-8B"]}
"""
REPLICAS = {
    "a StatefulSet": (f"kind: StatefulSet\nspec:\n  replicas: 3\n  template:\n        spec:\n{POD}", 3),
    "values of a chart": (f"replicaCount: 2\npod:\n{POD}", 2),
    "services of Compose": (
        COMPOSE + "    deploy:\n      replicas: 2\n  another:\n    image: vllm/vllm-openai:latest\n"
        "    command: --model Qwen/Qwen3-8B --tensor-parallel-size 4 --port 8001\n",
        3,
    ),
    "a scale of Compose": (f"{COMPOSE}    scale: 4\n", 4),
    "an InferenceService of KServe": (
        "kind: InferenceService\nspec:\n  predictor:\n    minReplicas: 2\n    maxReplicas: 5\n    model:\n"
        "      image: vllm/vllm-openai:latest\n      args: [--model, Qwen/Qwen3-8B]\n",
        2,
    ),
    "services of one graph": (
        "kind: DynamoGraphDeployment\nspec:\n  services:\n    Frontend:\n      replicas: 1\n      extraPodSpec:\n"
        "        mainContainer: {image: x, command: [python3, -m, dynamo.frontend]}\n    Worker:\n      replicas: 5\n"
        "      extraPodSpec:\n        mainContainer: {image: x, command: [vllm, serve, Qwen/Qwen3-8B]}\n",
        5,
    ),
    "two Deployments": (DEPLOYMENT.replace("spec:", "spec:\n  replicas: 2", 1) + "---\n" + DEPLOYMENT, 3),
    "a pod": (COMMAND_LINE, 1),
    "none": (f"kind: Deployment\nspec:\n  replicas: 0\n  template:\n        spec:\n{POD}", 1),
}
WORKER = "image: vllm-runtime:1.4.0, command: [python3, -m, dynamo.vllm], args: [--model, Qwen/Qwen3-8B, --dyn-tool-call-parser, hermes"
CONTROLLED = {
    "an LLMInferenceService of KServe": (
        "kind: LLMInferenceService\nspec:\n  model: {uri: hf://Qwen/Qwen3-8B, name: served}\n  replicas: 3\n"
        "  parallelism: {tensor: 2}\n  template:\n    containers:\n    - name: main\n"
        "      env: [{name: VLLM_ADDITIONAL_ARGS, value: --max-model-len 16000}]\n",
        {"hardware.replicas": 3, "hardware.tensor_parallel": 2, "model.context_len": 16_000},
    ),
    "one that scales, with another model's place": (
        "kind: LLMInferenceService\nspec:\n  model: {uri: oci://registry/x, name: Qwen/Qwen3-8B}\n"
        "  scaling: {minReplicas: 2, maxReplicas: 5}\n  template: {containers: [{name: main, args: [--max-num-seqs, '64']}]}\n",
        {"hardware.replicas": 2, "engine.max_running": 64},
    ),
    "one with prefill": (
        "kind: LLMInferenceService\nspec:\n  model: {uri: hf://Qwen/Qwen3-8B}\n  replicas: 3\n"
        "  prefill: {replicas: 2, template: {containers: [{name: main}]}}\n  template: {containers: [{name: main}]}\n",
        {"disaggregation.prefill": 2, "disaggregation.decode": 3},
    ),
    "an InferenceService with the server for Hugging Face": (
        "kind: InferenceService\nspec:\n  predictor:\n    minReplicas: 2\n    model:\n      modelFormat: {name: huggingface}\n"
        "      args: [--model_name=x, --model_id=Qwen/Qwen3-8B, --backend=vllm, --max_model_len=16000]\n",
        {"hardware.replicas": 2, "model.context_len": 16_000},
    ),
    "an InferenceService that names its runtime": (
        "kind: ServingRuntime\nmetadata: {name: own}\nspec:\n  containers:\n  - name: kserve-container\n    image: x\n"
        f"    command: [python, -m, vllm.entrypoints.openai.api_server]\n    args: [--model={MOUNTED}, --max-num-seqs=64]\n---\n"
        "kind: InferenceService\nspec:\n  predictor:\n    model:\n      runtime: own\n      modelFormat: {name: vLLM}\n"
        "      storageUri: hf://Qwen/Qwen3-8B\n      args: [--tensor-parallel-size=2]\n",
        {"hardware.tensor_parallel": 2, "engine.max_running": 64},
    ),
    "components of a DynamoGraphDeployment": (
        "kind: DynamoGraphDeployment\nspec:\n  components:\n  - name: Frontend\n    replicas: 1\n"
        f"  - name: Worker\n    replicas: 2\n    podTemplate: {{spec: {{containers: [{{name: main, {WORKER}]}}]}}}}\n",
        {"hardware.replicas": 2},
    ),
    "services of a DynamoGraphDeployment with a role as an argument": (
        "kind: DynamoGraphDeployment\nspec:\n  services:\n"
        f"    A: {{replicas: 2, extraPodSpec: {{mainContainer: {{{WORKER}, --disaggregation-mode, decode]}}}}}}\n"
        f"    B: {{replicas: 1, extraPodSpec: {{mainContainer: {{{WORKER}, --disaggregation-mode, prefill]}}}}}}\n",
        {"disaggregation.prefill": 1, "disaggregation.decode": 2},
    ),
    "services with the earlier argument of a role": (
        "kind: DynamoGraphDeployment\nspec:\n  services:\n"
        f"    VllmDecodeWorker: {{replicas: 2, extraPodSpec: {{mainContainer: {{{WORKER}]}}}}}}\n"
        f"    VllmPrefillWorker: {{replicas: 1, extraPodSpec: {{mainContainer: {{{WORKER}, --is-prefill-worker]}}}}}}\n",
        {"disaggregation.prefill": 1, "disaggregation.decode": 2},
    ),
}
GROUP = """\
kind: LeaderWorkerSet
spec:
  replicas: 3
  leaderWorkerTemplate:
    size: 2
    leaderTemplate: {spec: {containers: [CONTAINER]}}
    workerTemplate: {spec: {containers: [CONTAINER]}}
""".replace(
    "CONTAINER",
    '{name: a, command: [sglang, serve, --model-path, Qwen/Qwen3-8B, --tp, "16", --nnodes, $(LWS_GROUP_SIZE), --node-rank, "0"]}',
)
NODES = """\
kind: StatefulSet
spec:
  replicas: 2
  template:
    spec:
      containers:
      - {name: a, command: [sglang, serve, --model-path, Qwen/Qwen3-8B, --tp, "16", --nnodes, "2", --node-rank, $RANK]}
"""
POOLS = """\
decode:
  replicas: 4
  containers:
  - {name: a, command: [sglang, serve, --model-path, Qwen/Qwen3-8B, --disaggregation-mode, decode]}
prefill:
  replicas: 2
  containers:
  - {name: a, command: [sglang, serve, --model-path, Qwen/Qwen3-8B, --disaggregation-mode, prefill]}
"""


class TestReplicas:
    @pytest.mark.parametrize("name", REPLICAS)
    def test_those_of_a_manifest_count(self, name: str):
        text, replicas = REPLICAS[name]
        launch = launch_of(text)
        assert launch.settings["hardware.replicas"] == replicas
        assert any(f"the text starts {replicas} servers" in line for line in launch.notes()) == (replicas > 1)
        assert any("0 replicas: one server" in line for line in launch.notes()) == (name == "none")

    def test_each_server_has_the_engines_of_its_command(self):
        text = REPLICAS["a StatefulSet"][0].replace('"Qwen/Qwen3-8B"', '"Qwen/Qwen3-8B", "--data-parallel-size", "2"')
        assert launch_of(text).settings["hardware.replicas"] == 6

    def test_the_nodes_of_an_engine_are_no_servers(self):
        for text, replicas in ((GROUP, 3), (NODES, 1), (NODES.replace("replicas: 2", "replicas: 4"), 2)):
            launch = read_launch("sglang", text.replace("$RANK", '"0"'), "--from-sglang", "H100")
            assert launch.settings["hardware.replicas"] == replicas

    def test_pools(self):
        settings = read_launch("sglang", POOLS, "--from-sglang", "H100").settings
        assert (settings["disaggregation.prefill"], settings["disaggregation.decode"]) == (2, 4)
        nixl = '\'{"kv_connector":"NixlConnector","kv_role":"kv_both"}\''
        text = POOLS.replace("sglang, serve, --model-path", "vllm, serve")
        for role in ("decode", "prefill"):
            text = text.replace(f"--disaggregation-mode, {role}", f"--kv-transfer-config, {nixl}")
        settings = launch_of(text).settings
        assert (settings["disaggregation.prefill"], settings["disaggregation.decode"]) == (2, 4)

    @pytest.mark.parametrize(("text", "expected"), CONTROLLED.values(), ids=CONTROLLED)
    def test_what_a_controller_adds_counts(self, text: str, expected: dict):
        settings = read_launch("vllm", text, "--from", "H100").settings
        assert settings["model.target"] == "Qwen/Qwen3-8B"
        assert {key: settings.get(key) for key in expected} == expected

    @pytest.mark.parametrize("replicas", ["$REPLICAS", "'{{ .Values.replicas }}'", "-1", "1.5", "many"])
    def test_what_is_no_number_is_refused(self, replicas: str):
        text = REPLICAS["a StatefulSet"][0].replace("replicas: 3", f"replicas: {replicas}")
        assert "expected a whole number of servers" in refusal_of(text)


BOMB = "a: &a [1, 1]\n" + "\n".join(f"{two}: &{two} [*{one}, *{one}]" for one, two in itertools.pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "alias"),
        ("a: &x {b: 1}\nc: {<<: *x}", "alias"),
        ("a: 1\nb: {c: 1, c: 2}", "'c' is written twice"),
        ("a: !!python/object/apply:os.system [ls]", "python/object"),
        ("[" * 5000, "deep"),
        ("a: [1", "line"),
        ("? [1, 2]\n: 3", "key"),
        ("a: \x00", ""),
    ],
    ids=range(8),
)
def test_yaml_that_is_not_plain_is_refused(text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        list(parse_yaml(text, "a.yaml"))
    assert message in str(caught.value) and "a.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("server", "argument", "known"),
    [
        ("vllm", "--dtype int3", "bfloat16"),
        ("vllm", "--quantization fp6", "fp8"),
        ("vllm", "--kv-cache-dtype fp7", "fp8_e4m3"),
        ("sglang", "--dtype int3", "bfloat16"),
        ("sglang", "--quantization fp6", "w8a8_fp8"),
        ("sglang", "--kv-cache-dtype fp7", "fp8_e5m2"),
    ],
)
def test_an_unknown_format_is_refused_with_the_known_ones(server: str, argument: str, known: str):
    start = {"vllm": "vllm serve a/b", "sglang": "sglang serve --model-path a/b"}[server]
    message = refusal_of(f"{start} {argument}", server)
    assert argument.split()[0] in message and "knows" in message and known in message


class TestSpeculation:
    def test_vllm_drops_its_schedule_under_data_parallelism(self):
        table = (
            '\'{"method":"eagle3","model":"d/e","num_speculative_tokens":4,'
            '"num_speculative_tokens_per_batch_size":[[1,8,4],[9,64,1]]}\''
        )
        alone = launch_of(f"vllm serve {MODEL} --speculative-config {table}")
        parallel = launch_of(f"vllm serve {MODEL} --speculative-config {table} -dp 2")
        assert "adaptive" in alone.settings["speculation"] and not any("WARNING" in line for line in alone.notes())
        assert parallel.settings["speculation"] == {"algorithm": "EAGLE3", "policy": "fixed", "steps": 4}
        assert any("WARNING: with data parallelism vLLM drops" in line for line in parallel.notes())

    @pytest.mark.parametrize(
        "more", ["--speculative-eagle-topk 4 --speculative-num-draft-tokens 8", "--tp 2 --dp 2 --enable-dp-attention"]
    )
    def test_sglang_ignores_adaptive_steps_where_it_cannot(self, more: str):
        command = (
            f"sglang serve --model-path {MODEL} --speculative-algorithm EAGLE3 --speculative-num-steps 3 {more} "
            "--speculative-adaptive"
        )
        launch = launch_of(command, "sglang")
        assert launch.settings["speculation"]["policy"] == "fixed"
        assert any("SGLang ignores --speculative-adaptive" in line for line in launch.notes())

    def test_look_ups_of_sglang_are_trees(self):
        command = (
            f"sglang serve --model-path {MODEL} --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
            "--sampling-backend pytorch"
        )
        spec = assemble(scenario_of("sglang", command)).spec
        assert (spec.num_draft_tokens, spec.topk) == (16, 10)

    def test_own_layers_are_one_deployment_on_every_server(self, tmp_path: Path):
        pytest.importorskip("aiconfigurator_core")
        (tmp_path / "o.yaml").write_text(
            "speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 2}\ntensor_parallel_size: 8\n"
        )
        model = "deepseek-ai/DeepSeek-V3"
        commands = {
            "sglang": f"sglang serve --model-path {model} --tp 8 --speculative-algorithm NEXTN "
            "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
            "vllm": f'vllm serve {model} -tp 8 --speculative-config \'{{"method":"mtp","num_speculative_tokens":2}}\'',
            "trtllm": f"trtllm-serve {model} --config {tmp_path / 'o.yaml'}",
        }
        found = {}
        for server, command in commands.items():
            scenario = scenario_of(server, command, **{"engine.kv_slots": 100_000})
            assembled = assemble(scenario)
            found[server] = (scenario.speculation.algorithm, scenario.speculation.steps, assembled.acceptance)
        assert found["sglang"] == found["vllm"] == found["trtllm"]

    @pytest.mark.parametrize(("steps", "algorithm"), [(3, "MULTI_LAYER_EAGLE"), (4, "EAGLE")])
    def test_several_own_layers_draft_one_token_each(self, steps: int, algorithm: str, tmp_path: Path):
        config = dict(built_in_config("qwen3-8b")[1]) | {"num_nextn_predict_layers": 3}
        (tmp_path / "config.json").write_text(json.dumps(config))
        table = json.dumps({"method": "mtp", "num_speculative_tokens": steps})
        settings = launch_of(f"vllm serve {tmp_path} --speculative-config '{table}'").settings
        assert settings["speculation"]["algorithm"] == algorithm

    def test_eagle_of_tensorrt_is_eagle3_unless_its_backend_says_otherwise(self, tmp_path: Path):
        options = tmp_path / "o.yaml"
        options.write_text(
            "speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: some/head}\n"
        )
        command = f"trtllm-serve {MODEL} --config {options}"
        assert launch_of(command, "trtllm").settings["speculation"]["algorithm"] == "EAGLE3"
        assert launch_of(f"{command} --backend tensorrt", "trtllm").settings["speculation"]["algorithm"] == "EAGLE"
        options.write_text(options.read_text() + "max_batch_size: 4\nmax_batch_size: 8\n")
        assert "'max_batch_size' is written twice" in refusal_of(command, "trtllm")

    def test_eagle_is_not_written_for_tensorrt(self):
        table = {"1": {"candidate_steps": [3]}}
        keys = {"speculation.algorithm": "EAGLE", "hardware.server": "trtllm-1.x"}
        scenario = scenario_with({}, settings_of(table) | keys)
        files, left_out = server_files(scenario, table, table, 64)
        assert "trtllm.yaml" not in files and "EAGLE" in left_out["TensorRT-LLM"]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_weights_in_host_memory_are_named(server: str):
    start = {"vllm": "vllm serve a/b", "sglang": "sglang serve --model-path a/b"}[server]
    reason = launch_of(f"{start} --cpu-offload-gb 20", server).not_modelled["--cpu-offload-gb"]
    assert "weights" in reason


def test_all_to_all_kernels_divide_the_experts_among_all_devices():
    command = "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend"
    assert launch_of(f"{command} deepep", "sglang").settings["hardware.expert_parallel"] == 8
    assert "hardware.expert_parallel" not in launch_of(f"{command} none", "sglang").settings


@pytest.mark.parametrize(
    ("server", "command"),
    [
        ("vllm", "vllm serve a/b -tp 8 --nnodes 2 --node-rank 0"),
        ("sglang", "sglang serve --model-path a/b --tp 8 --nnodes 2 --node-rank 1"),
        ("trtllm", "trtllm-serve a/b --tp_size 8 --gpus_per_node 4"),
    ],
)
def test_nodes_end_the_fast_link_but_in_a_rack(server: str, command: str):
    assert launch_of(command, server).settings["hardware.gpus_per_node"] == 4
    assert "hardware.gpus_per_node" not in read_launch(server, command, "--from", "GB200").settings
    if server != "trtllm":
        assert "--nnodes: is 3, which does not divide the 8 devices" in refusal_of(
            command.replace("s 2", "s 3"), server
        )
        assert "hardware.gpus_per_node" not in launch_of(command.replace("8", "16"), server).settings


class TestMemory:
    @pytest.mark.parametrize("size", ["10G", "10GiB", "10737418240", "10.73741824g"])
    @pytest.mark.parametrize("name", ["--kv-cache-memory-bytes {}", "--kv-cache-memory={}"])
    def test_the_memory_of_kv_is_as_large_as_the_command_says(self, name: str, size: str):
        scenario = scenario_of("vllm", f"vllm serve {MODEL} {name.format(size)}", **{"hardware.gpu": "H200"})
        assert assemble(scenario).memory.slots == 72_800  # 147,456 bytes each, in blocks of 16 beside one for padding

    def test_tensorrt_llm_bounds_it_in_bytes(self):
        config = json.dumps({"max_gpu_total_bytes": 10 << 30})
        command = f"trtllm-serve {MODEL} --kv_cache_config '{config}'"
        memory = assemble(scenario_of("trtllm", command, **{"hardware.gpu": "H200"})).memory
        assert memory.kv_pool_bytes == pytest.approx(10 << 30, rel=1e-3)

    def test_sizes_that_are_none_are_refused(self):
        for size in ("10X", "ten", "1.5"):
            assert "expected an integer" in refusal_of(f"vllm serve {MODEL} --kv-cache-memory-bytes {size}")

    @pytest.mark.parametrize("server, argument, key, value", [
        ("vllm", "--kv-cache-dtype nvfp4", "model.kv_dtype", "nvfp4"),
        ("vllm", "--kv-cache-dtype turboquant_3bit_nc", "model.kv_dtype", "turboquant_3bit_nc"),
        ("vllm", "--kv-cache-dtype fp8_ds_mla", "model.kv_dtype", "fp8_ds_mla"),
        ("vllm", "--mamba-ssm-cache-dtype float32", "model.state_dtype", "fp32"),
        ("vllm", "--mamba-cache-dtype float16", "model.state_dtype", "fp16"),
        ("vllm", "--mamba-cache-dtype float32 --mamba-ssm-cache-dtype bfloat16", "model.state_dtype", "bf16"),
        ("vllm", "--mamba-cache-dtype float32 --mamba-ssm-cache-dtype bfloat16", "model.conv_dtype", "fp32"),
        ("sglang", "--mamba-ssm-dtype bfloat16", "model.state_dtype", "bf16"),
        ("sglang", "--kv-cache-dtype fp4_e2m1", "model.kv_dtype", "nvfp4"),
        ("sglang", "--max-mamba-cache-size 500", "hardware.state_slots", 500),
        ("sglang", "--swa-full-tokens-ratio 0.5", "hardware.window_ratio", 0.5),
    ])  # fmt: skip
    def test_formats_of_kv_and_states_become_keys(self, server: str, argument: str, key: str, value: object):
        first = "vllm serve" if server == "vllm" else "python -m sglang.launch_server --model-path"
        found = launch_of(f"{first} {MODEL} {argument}", server)
        assert found.settings[key] == value
        assert not [name for name in found.not_modelled if name in argument]
