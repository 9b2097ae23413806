"""A deployment for those who run it: the launch command of its server, Kubernetes files with replicas and arguments,
and the load per replica that an autoscaler needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....core.adaptive.config import load_adaptive_config
from ....core.adaptive.interchange import export_table
from ....core.errors import ForedraftError
from ....observe.output_files import Document
from ....sim.assembly import Assembly, assemble
from ....sim.scenario import Scenario
from ...grid import NO_SPECULATION
from ..files import METHODS, sglang_scheduling, shape_arguments

SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
RUNNING = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
PORTS = {"vllm": 8000, "sglang": 30000}
IMAGES = {"vllm": "vllm/vllm-openai:v{}", "sglang": "lmsysorg/sglang:v{}"}
HF_CONFIG = "config.json of "
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
GIB = 1 << 30


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica holds at the limits of latencies.

    Attributes:
        running: Requests that run in a replica on average there.
        requests_per_s: Requests that one replica takes per second.
        interval: [low, high]: its 80 % interval if times are not as simulated; None where nothing is known.
        tokens_per_s: Output tokens of one replica per second.
        limits: The limits, in words.
        tightest: The limit that is taken the most.
        taken: The share of it.
    """

    running: float
    requests_per_s: float
    interval: tuple[float, float] | None
    tokens_per_s: float
    limits: Sequence[str]
    tightest: str
    taken: float


@dataclass(frozen=True)
class Export(Document):
    """A deployment as files, as `foredraft export --json` prints it.

    Attributes:
        name: The configuration.
        server: Its server.
        metric: The server's gauge of running requests, whose target value per replica is `load.running`.
        command: The launch command of one replica.
        replicas: Servers.
        gpus_per_replica: Devices of each.
        load: What one replica holds; None for a tuned table, which has no limits.
        files: The texts of files by name.
        notes: What is to be added or to be known.
    """

    FORMAT: ClassVar[str] = "foredraft-export"

    name: str
    server: str
    metric: str
    command: str
    replicas: int
    gpus_per_replica: int
    load: ReplicaLoad | None
    files: Mapping[str, str]
    notes: Sequence[str]


def export(name: str, scenario: Scenario, server: str, load: ReplicaLoad | None) -> Export:
    """Return the files of a scenario for "vllm" or "sglang".

    Raises ForedraftError for a scenario that cannot run, and for what the server has no arguments for.
    """
    run = assemble(scenario)
    notes: list[str] = []
    arguments = (_vllm if server == "vllm" else _sglang)(run, notes)
    model = _model(run)
    words = (
        ["vllm", "serve", model]
        if server == "vllm"
        else ["python", "-m", "sglang.launch_server", "--model-path", model]
    )
    command = _lines([*words, *_parallel(run, server), *arguments])
    prefill, decode = run.pools.num_prefill, run.pools.num_engines - run.pools.num_prefill
    values = _Values(run, server, model, arguments, decode, prefill)
    files = {"launch.sh": f"{command}\n"}
    if server == "vllm":
        files["values.yaml"] = _yaml(values.llm_d(), _about(name, notes, "llm-d-modelservice"))
    if not prefill:
        files["deployment.yaml"] = _yaml(values.deployment(), _about(name, notes, "Kubernetes"))
    if load is not None:
        parts = {
            "metric": RUNNING[server],
            "replicas": run.pools.num_engines,
            "gpus_per_replica": scenario.hardware.devices,
        }
        files["scaling.json"] = json.dumps(parts | _plain(load), indent=1) + "\n"
    return Export(
        name,
        SERVERS[server],
        RUNNING[server],
        command,
        run.pools.num_engines,
        scenario.hardware.devices,
        load,
        files,
        tuple(notes),
    )


def server_of(scenario: Scenario) -> str:
    """Return the server of a scenario, "vllm" or "sglang". Raises ForedraftError for another."""
    family = scenario.hardware.server.partition("-")[0]
    if family not in SERVERS:
        message = f"hardware.server is {scenario.hardware.server}, whose launch command is not written: name a server with --for"
        raise ForedraftError(message)
    return family


def _plain(load: ReplicaLoad) -> dict[str, Any]:
    return {name: getattr(load, name) for name in ReplicaLoad.__dataclass_fields__}


def _lines(words: Sequence[str]) -> str:
    """Return a command with an argument and its value in each line."""
    lines: list[list[str]] = [[]]
    for word in map(shlex.quote, words):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(" ".join(line) for line in lines)


def _model(run: Assembly) -> str:
    """Return the model as a server takes it: the checkpoint of a built-in name, else the name that was given."""
    target, source = run.scenario.model.target, run.target.source
    is_name = "/" not in target and source.startswith(HF_CONFIG)
    return source.removeprefix(HF_CONFIG).partition(" ")[0].rstrip(",;") if is_name else target


def _parallel(run: Assembly, server: str) -> list[str]:
    """Return the arguments for the devices of one replica."""
    hardware = run.scenario.hardware
    tensor, groups = hardware.tensor_parallel, hardware.attention_data_parallel
    if server == "vllm":
        given = {"--tensor-parallel-size": tensor, "--data-parallel-size": groups}
        flags = ["--enable-expert-parallel"] if hardware.expert_parallel > 1 else []
    else:
        given = {"--tp-size": tensor * groups, "--dp-size": groups, "--ep-size": hardware.expert_parallel}
        flags = ["--enable-dp-attention"] if groups > 1 else []
    return [*(word for name, value in given.items() if value > 1 for word in (name, str(value))), *flags]


def _given(values: Mapping[str, Any]) -> list[str]:
    return [word for name, value in values.items() if value is not None for word in (name, str(value))]


# -- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm(run: Assembly, notes: list[str]) -> list[str]:
    """Return the arguments of vLLM, without the model and the devices."""
    scenario, config = run.scenario, run.spec.config
    engine, hardware, model = scenario.engine, scenario.hardware, scenario.model
    arguments = _given(
        {
            "--max-model-len": model.context_len,
            "--max-num-seqs": config.max_running,
            "--max-num-batched-tokens": engine.max_step_tokens or engine.chunk_size,
            "--block-size": engine.page_size,
            "--kv-cache-dtype": "fp8" if model.kv_dtype == "fp8" else None,
            "--quantization": "fp8" if model.weight_dtype == "fp8" else None,
            "--gpu-memory-utilization": _utilization(hardware.reserved_fraction),
            "--stream-interval": scenario.front_end.stream_interval,
        }
    )
    if engine.prefix_cache is False:
        arguments.append("--no-enable-prefix-caching")
    if engine.mode in ("synchronous", "overlap"):
        arguments.append("--async-scheduling" if engine.mode == "overlap" else "--no-async-scheduling")
    if not hardware.cuda_graphs:
        arguments.append("--enforce-eager")
    if run.pools.is_disaggregated:
        arguments += ["--kv-transfer-config", json.dumps(TRANSFER)]
    if (speculative := _vllm_speculation(run, notes)) is not None:
        arguments += ["--speculative-config", json.dumps(speculative)]
    return arguments


def _utilization(reserved: float | None) -> float | None:
    return None if reserved is None else round(1 - reserved, 6)


def _vllm_speculation(run: Assembly, notes: list[str]) -> dict[str, Any] | None:
    table = run.scenario.speculation
    if table.algorithm == NO_SPECULATION:
        return None
    _refuse(run, "vLLM", trees=False)
    _note_head(run, notes, '"model" of --speculative-config')
    found: dict[str, Any] = {"method": METHODS[table.algorithm][1]}
    if table.algorithm == "STANDALONE" and run.scenario.model.draft is not None:
        found["model"] = run.scenario.model.draft
    steps = run.spec.adaptive.candidate_steps
    if len(steps) == 1:
        return found | {"num_speculative_tokens": steps[0]}
    config = load_adaptive_config(table.adaptive if table.adaptive is not None else "default")
    schedule: dict[str, Any] = json.loads(export_table(config, "vllm", run.spec.config.max_running))
    return found | schedule


def _refuse(run: Assembly, server: str, *, trees: bool) -> None:
    """Raise ForedraftError for speculation that a server has no arguments for. trees: it has them for draft trees."""
    table, slots = run.scenario.speculation, run.spec.adaptive.slots
    reason = None
    if table.algorithm not in METHODS:
        reason = f"it has no {table.algorithm}"
    elif run.spec.topk > 1 and not trees:
        reason = f"the configuration has trees (top-{run.spec.topk}), and it drafts chains"
    elif table.policy == "goodput":
        reason = "it has no policy goodput: tune a table of steps, or plan with --try speculation.steps=0..7"
    elif any(len(slot.candidate_steps) > 1 for slot in slots):
        reason = "it takes one number of draft steps for each batch size: `foredraft tune` finds such a schedule"
    if reason is not None:
        raise ForedraftError(f"{server} has no arguments for this configuration: {reason}")


def _note_head(run: Assembly, notes: list[str], where: str) -> None:
    algorithm = run.scenario.speculation.algorithm
    if algorithm in ("EAGLE", "EAGLE3") or (algorithm == "STANDALONE" and run.scenario.model.draft is None):
        notes.append(f"add the path of the {algorithm} draft as {where}")


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang(run: Assembly, notes: list[str]) -> list[str]:
    """Return the arguments of SGLang, without the model and the devices."""
    scenario, config = run.scenario, run.spec.config
    engine, hardware, model = scenario.engine, scenario.hardware, scenario.model
    groups = hardware.attention_data_parallel
    arguments = _given(
        {
            "--context-length": model.context_len,
            "--chunked-prefill-size": None if engine.chunk_size is None else engine.chunk_size * groups,
            "--page-size": engine.page_size,
            "--kv-cache-dtype": "fp8_e4m3" if model.kv_dtype == "fp8" else None,
            "--quantization": "fp8" if model.weight_dtype == "fp8" else None,
            "--mem-fraction-static": hardware.static_fraction,
        }
    )
    arguments += sglang_scheduling(scenario, config.max_running)
    if engine.prefix_cache is False:
        arguments.append("--disable-radix-cache")
    if engine.mode == "synchronous":
        arguments.append("--disable-overlap-schedule")
    if engine.mixed:
        arguments.append("--enable-mixed-chunk")
    if not hardware.cuda_graphs:
        arguments.append("--disable-cuda-graph")
    if run.pools.is_disaggregated:
        raise ForedraftError(
            "SGLang's prefill and decode servers have no common arguments: export without disaggregation"
        )
    return [*arguments, *_sglang_speculation(run, notes)]


def _sglang_speculation(run: Assembly, notes: list[str]) -> list[str]:
    table, spec = run.scenario.speculation, run.spec
    if table.algorithm == NO_SPECULATION:
        return []
    _refuse(run, "SGLang", trees=True)
    _note_head(run, notes, "--speculative-draft-model-path")
    arguments = ["--speculative-algorithm", METHODS[table.algorithm][0]]
    if table.algorithm == "MULTI_LAYER_EAGLE":
        arguments.append("--enable-multi-layer-eagle")
    if table.algorithm == "STANDALONE" and run.scenario.model.draft is not None:
        arguments += ["--speculative-draft-model-path", run.scenario.model.draft]
    steps = spec.adaptive.candidate_steps
    if len(steps) > 1:
        raise ForedraftError(
            "SGLang takes a table of steps as a file: `foredraft tune` writes it (sglang-adaptive.json)"
        )
    return [*arguments, *shape_arguments(steps[0], spec.topk, spec.draft_shape.num_draft_tokens(steps[0], 1))]


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def _about(name: str, notes: Sequence[str], of: str) -> list[str]:
    return [f"{of}: {name}", *(f"To do: {note}." for note in notes)]


def _yaml(value: Mapping[str, Any], about: Sequence[str]) -> str:
    import yaml

    return "".join(f"# {line}\n" for line in about) + yaml.safe_dump(value, sort_keys=False, width=100)


@dataclass(frozen=True)
class _Values:
    """What Kubernetes files say of a deployment. decode, prefill: their replicas."""

    run: Assembly
    server: str
    model: str
    arguments: Sequence[str]
    decode: int
    prefill: int

    @property
    def image(self) -> str:
        """The image of the release that was simulated; the newest one if the scenario is of another server."""
        family, _, release = self.run.deployment.server.name.partition("-")
        tag = f"v{release}.0" if family == self.server and release.count(".") == 1 else "latest"
        return IMAGES[self.server].removesuffix("v{}") + tag

    def llm_d(self) -> dict[str, Any]:
        """Return values of the chart llm-d-modelservice, which adds the model and the parallelism to the arguments."""
        hardware = self.run.scenario.hardware
        parallelism = {"tensor": hardware.tensor_parallel, "data": hardware.attention_data_parallel}
        flags = ["--enable-expert-parallel"] if hardware.expert_parallel > 1 else []
        container = {
            "name": "vllm",
            "image": self.image,
            "modelCommand": "vllmServe",
            "args": [*flags, *self.arguments],
        }
        pods = {"parallelism": parallelism, "containers": [container | {"mountModelVolume": True}]}
        artifacts = {"name": self.model, "uri": f"hf://{self.model}"}
        if self.run.memory is not None:  # of the volume for the weights, a quarter more than these
            weights = self.run.memory.target_weights_bytes * hardware.devices
            artifacts["size"] = f"{-(-weights * 5 // (4 * GIB))}Gi"
        return {
            "multinode": hardware.devices > (hardware.gpus_per_node or 8),
            "modelArtifacts": artifacts,
            "accelerator": {"type": "nvidia" if not hardware.gpu.startswith("MI") else "amd"},
            "routing": {"proxy": {"enabled": bool(self.prefill)}},
            "decode": {"create": True, "replicas": self.decode, **pods},
            "prefill": {"create": bool(self.prefill), "replicas": self.prefill, **(pods if self.prefill else {})},
        }

    def deployment(self) -> dict[str, Any]:
        """Return a Deployment with so many replicas."""
        label = {"app": "llm"}
        command = ["vllm", "serve", self.model]
        if self.server == "sglang":
            command = ["python3", "-m", "sglang.launch_server", "--model-path", self.model]
        key = "amd.com/gpu" if self.run.scenario.hardware.gpu.startswith("MI") else "nvidia.com/gpu"
        port = PORTS[self.server]
        container = {
            "name": self.server,
            "image": self.image,
            "command": command,
            "args": [*_parallel(self.run, self.server), *self.arguments, "--host", "0.0.0.0", "--port", str(port)],
            "ports": [{"containerPort": port}],
            "resources": {"limits": {key: self.run.scenario.hardware.devices}},
        }
        template = {"metadata": {"labels": label}, "spec": {"containers": [container]}}
        spec = {"replicas": self.decode, "selector": {"matchLabels": label}, "template": template}
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "llm", "labels": label},
            "spec": spec,
        }
