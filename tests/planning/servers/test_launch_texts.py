"""Launch commands as people have them: scripts, containers, manifests and files of configuration."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from foredraft.core.errors import ConfigError
from foredraft.core.model_shape import built_in_config
from foredraft.planning.servers.launch import read_launch
from foredraft.planning.servers.texts.kserve import MOUNTED
from foredraft.planning.servers.texts.yaml_text import parse_yaml
from foredraft.sim.assembly import assemble
from launch_commands import launch_of, refusal_of, scenario_of

MODEL = "Qwen/Qwen3-8B"


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
