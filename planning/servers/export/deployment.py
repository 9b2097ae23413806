"""A deployment for those who run it: the launch command of its server, Kubernetes files with replicas and arguments,
and the load per replica that an autoscaler needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from ....core.errors import ForedraftError
from ....observe.output_files import Document
from ....sim.assembly import Assembly, assemble
from ....sim.cost.server import NEWEST
from ....sim.scenario import Scenario
from ....sim.scenario_file import scenario_with
from ..files import SGLANG_VERSION, server_family, tuned_for_another
from . import sglang, trtllm, vllm
from .arguments import Arguments, model_name
from .kubernetes import APP, Pods, maker_of, yaml_text


@dataclass(frozen=True)
class Target:
    """A server that runs a deployment.

    Attributes:
        name: As messages call it.
        gauge: Its gauge of running requests.
        command: The words of its command before the model.
        in_image: The same in its image.
        port: Where it listens.
        image: Its image, without a tag.
        rocm_image: The one for AMD's GPUs, and what follows the release in its tag; None if it runs on none.
        profile: The profile by which it runs a scenario of another server.
        tags: The tag of the release that a profile simulates; where it names none, a word to replace.
        devices: Makes the arguments for the devices of a replica.
        arguments: Makes the others.
    """

    name: str
    gauge: str
    command: tuple[str, ...]
    in_image: tuple[str, ...]
    port: int
    image: str
    rocm_image: tuple[str, str] | None
    profile: str
    tags: Mapping[str, str]
    devices: Callable[[Assembly], list[str]]
    arguments: Callable[[Assembly], Arguments]


SERVERS = {
    "vllm": Target(
        name="vLLM",
        gauge="vllm:num_requests_running",
        command=("vllm", "serve"),
        in_image=("vllm", "serve"),
        port=8000,
        image="vllm/vllm-openai",
        rocm_image=("vllm/vllm-openai-rocm", ""),
        profile=NEWEST["vllm"],
        tags={"vllm-0.9": "v0.9.0", "vllm-0.18": "v0.18.0"},
        devices=vllm.devices,
        arguments=vllm.arguments,
    ),
    "sglang": Target(
        name="SGLang",
        gauge="sglang:num_running_reqs",
        command=("python", "-m", "sglang.launch_server", "--model-path"),
        in_image=("python3", "-m", "sglang.launch_server", "--model-path"),
        port=30000,
        image="lmsysorg/sglang",
        rocm_image=("lmsysorg/sglang", "-rocm700-{chip}"),
        profile=NEWEST["sglang"],
        tags={"sglang-0.5": f"v{SGLANG_VERSION}"},
        devices=sglang.devices,
        arguments=sglang.arguments,
    ),
    "trtllm": Target(
        name="TensorRT-LLM",
        gauge="trtllm_num_requests_running",
        command=("trtllm-serve",),
        in_image=("trtllm-serve",),
        port=8000,
        image="nvcr.io/nvidia/tensorrt-llm/release",
        rocm_image=None,
        profile=NEWEST["trtllm"],
        tags={"trtllm-1.x": "RELEASE"},
        devices=trtllm.devices,
        arguments=trtllm.arguments,
    ),
}


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
        commands: The launch command of one replica by the name of its file; where the servers that prefill start in
            another way than those that decode, the commands of both and of the router in front of them.
        replicas: Servers; None where the plan computed them for another server.
        gpus_per_replica: Devices of each.
        load: What one replica holds; None for a tuned table, which has no limits, and where the plan simulated
            another server.
        files: The texts of files by name.
        notes: What is to be added or to be known.
    """

    FORMAT: ClassVar[str] = "foredraft-export"

    name: str
    server: str
    metric: str
    commands: Mapping[str, str]
    replicas: int | None
    gpus_per_replica: int
    load: ReplicaLoad | None
    files: Mapping[str, str]
    notes: Sequence[str]


def export(name: str, scenario: Scenario, server: str, load: ReplicaLoad | None, is_tuned: bool = False) -> Export:
    """Return the files of a scenario for "vllm", "sglang" or "trtllm". `is_tuned`: its steps are the result of a tune.

    What was computed holds for the server that was simulated: another gets the configuration by its own rules, and
    neither load nor replicas of a plan. Raises ForedraftError for a scenario that cannot run, for what the server has
    no arguments for, and for steps that were tuned for another server.
    """
    target, simulated = SERVERS[server], scenario.hardware.server
    left_out = ""
    if server_family(scenario) != server:
        if is_tuned:
            raise ForedraftError(f"no files for {target.name}: {tuned_for_another(scenario, target.profile)}")
        # Nothing here takes time, and what was measured or fitted of one server may not be there for another.
        times = {"hardware.profile": None, "hardware.kernels": "roofline", "hardware.kernels_of": None}
        tables = scenario.model_dump(mode="json")
        scenario = scenario_with(tables, {**times, "hardware.server": target.profile})
        if load is not None:
            left_out = (
                f"plan with --set hardware.server={target.profile}: this plan simulated {simulated}, so its load and "
                f"its number of replicas are not written for {target.name}"
            )
            load = None
    run = assemble(scenario)
    if run.pools.is_disaggregated and (scenario.hardware.prefill or scenario.hardware.decode):
        raise ForedraftError("hardware.prefill and hardware.decode are not exported: all servers get the same devices")
    made, devices, model = target.arguments(run), target.devices(run), model_name(run)
    made.notes[:0] = [left_out] if left_out else []
    variables = [f"{name}={value}" for name, value in made.environment.items()]
    words = [*variables, *target.command, model, *devices, *made.words]
    commands = {"launch.sh": _lines(words)}
    if made.of_role:
        commands = {f"{role}.sh": _lines([*words, *more]) for role, more in made.of_role.items()}
        commands["router.sh"] = _router(target.port)
    image = _image(target, run, made)
    pods = Pods(run, model, target.in_image, devices, made, image, target.port, has_replicas=not left_out)
    files = {file: f"{command}\n" for file, command in commands.items()} | made.files
    to_do = [*made.notes, *pods.to_do]
    if server == "vllm":
        files["values.yaml"] = yaml_text([pods.llm_d()], _about(name, to_do, "llm-d-modelservice"))
    if made.of_role or not run.pools.is_disaggregated:
        files["deployment.yaml"] = yaml_text(pods.deployments(), _about(name, to_do, "Kubernetes"))
    replicas, per_replica = None if left_out else run.pools.num_engines, scenario.hardware.devices
    if load is not None or left_out:  # a file without a load replaces one of another server
        files["scaling.json"] = _scaling(scenario, target, replicas, load, left_out)
    return Export(name, target.name, target.gauge, commands, replicas, per_replica, load, files, tuple(made.notes))


def _image(target: Target, run: Assembly, made: Arguments) -> str:
    """Return the image of a server for the maker of the GPU. Raises ForedraftError if it runs on none of that maker."""
    hardware = run.scenario.hardware
    release = hardware.release
    tag = target.tags[hardware.server] if release is None or target.name != "vLLM" else f"v{release}"
    if maker_of(run) != "amd":
        return f"{target.image}:{tag}"
    if target.rocm_image is None:
        raise ForedraftError(f"{target.name} runs on no GPU of AMD, such as {run.deployment.gpu.name}")
    image, rest = target.rocm_image
    if rest:
        made.notes.append(
            "take the tag of the image that the release has for your GPU: its end names ROCm and the chip"
        )
    return f"{image}:{tag}{rest.format(chip='mi35x' if run.deployment.gpu.name.startswith('MI35') else 'mi30x')}"


def _scaling(scenario: Scenario, target: Target, replicas: int | None, load: ReplicaLoad | None, left_out: str) -> str:
    """Return the numbers for an autoscaler, with what they were computed for; without a load, the reason."""
    hardware = scenario.hardware
    parts: dict[str, object] = {"metric": target.gauge, "gpus_per_replica": hardware.devices}
    if load is None:
        return json.dumps(parts | {"load": None, "reason": left_out}, indent=1) + "\n"
    computed_for = {"server": hardware.server, "gpu": hardware.gpu, "model": scenario.model.target}
    return json.dumps(parts | {"replicas": replicas} | asdict(load) | {"computed_for": computed_for}, indent=1) + "\n"


def server_of(scenario: Scenario) -> str:
    """Return the server of a scenario, a key of SERVERS. Raises ForedraftError for another."""
    family = server_family(scenario)
    if family not in SERVERS:
        message = f"hardware.server is {scenario.hardware.server}, whose launch command is not written: name a server with --for"
        raise ForedraftError(message)
    return family


def _about(name: str, notes: Sequence[str], of: str) -> list[str]:
    return [f"{of}: {name}", *(f"To do: {note}." for note in notes)]


def _lines(words: Sequence[str]) -> str:
    """Return a command with an argument and its value in each line."""
    lines: list[list[str]] = [[]]
    for word in map(shlex.quote, words):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(" ".join(line) for line in lines)


def _router(port: int) -> str:
    """Return the command of SGLang's router, which finds the servers of deployment.yaml by their labels."""
    selectors = [(f"--{role}-selector", f"app={APP}", f"role={role}") for role in sglang.ROLES]
    words = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--service-discovery"]
    return _lines([*words, "--service-discovery-port", str(port), *(word for one in selectors for word in one)])
