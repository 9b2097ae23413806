"""The lines of a server's log as keys of a scenario, and what in the log contradicts the scenario."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError, ForedraftError, Problem, count_of
from ....core.model_shape import ModelShape
from ....core.scheduler.config import EngineRole
from ....sim.assembly import Assembly, assemble
from ....sim.assembly.deployment import Deployment
from ....sim.assembly.models import model_shape
from ....sim.assembly.pools import pools_of
from ....sim.cost.memory import InsufficientMemory
from ....sim.cost.memory.rules import release_numbers
from ....sim.cost.server import NEWEST, nearest_profile, server_profile
from ....sim.scenario import Scenario
from ....sim.scenario_file import load_scenario
from .start_log import GIB, StartLog

Given = Mapping[str, Mapping[str, Any]]  # keys of a scenario by the place that they come from
MODEL, SERVER, TENSOR = "model.target", "hardware.server", "hardware.tensor_parallel"
POOL_KEYS = ("engine.kv_slots", "hardware.kv_gb")
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
ALIKE = 0.05  # by which weights and KV of a token may differ from what the shape says


@dataclass
class _Reading:
    """What is read from a log: keys by place, and sentences."""

    given: dict[str, dict[str, Any]] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    def set(self, place: str, key: str, value: Any) -> None:
        self.given.setdefault(place, {})[key] = value


def with_log(
    log: StartLog, path: Path | None, settings: Sequence[str], given: Given
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Return the keys that are given with those of a log behind them, and sentences about what was taken and what
    contradicts the scenario.

    `path`, `settings`, `given`: as for `load_scenario`. Raises ConfigError if the log is one of another server, release
    or model, or of other devices.
    """
    reading = _Reading()
    scenario, origins = load_scenario(path, settings, given)
    if pools_of(scenario).is_disaggregated:
        message = "is the log of one server, and this deployment has two kinds, of prefill and of decode"
        raise ConfigError.of(log.source, "", message)
    is_same_model = _read_names(log, scenario, origins, reading)
    _read_graphs(log, origins, reading)
    scenario, _ = load_scenario(path, settings, {**given, **reading.given})
    _read_pool(log, scenario, reading, is_same_model)
    return {**given, **reading.given}, _summary(log, reading)


def _read_names(log: StartLog, scenario: Scenario, origins: Mapping[str, str], reading: _Reading) -> bool | None:
    """Take server, release, model and devices where the scenario does not give them, else compare them. Returns whether
    the model is the same; None: its name does not say."""
    problems: list[tuple[str, Problem]] = []

    def refuse(fact: str, message: str, key: str | None = None) -> None:
        problems.append((log.place(fact), Problem(key or fact, message)))

    release = log.value("release")
    profile = (release and nearest_profile(f"{log.server}-{release}")) or NEWEST[log.server]
    first = next(iter(log.facts))
    if SERVER not in origins:
        reading.set(log.place("release" if release else first), SERVER, profile)
    elif scenario.hardware.server.partition("-")[0] != log.server:
        refuse(
            first, f"is {NAMES[log.server]}'s, and {SERVER} is {scenario.hardware.server} ({origins[SERVER]})", "server"
        )
    elif profile != scenario.hardware.server:
        reading.sentences.append(f"{profile} is nearer to release {release}: set {SERVER}")
    if release is not None:
        own = scenario.hardware.release
        if own is None and len(server_profile(profile).memory) > 1:
            reading.set(log.place("release"), "hardware.release", release)
        elif own is not None and release_numbers(own)[:2] != release_numbers(release)[:2]:
            refuse("release", f"is {release}, and hardware.release is {own} ({origins.get('hardware.release')})")
    is_same = _read_model(log, scenario, origins, reading, refuse)
    _read_devices(log, scenario, origins, reading, refuse)
    if problems:
        place = problems[0][0]
        raise ConfigError(
            place, [one if at == place else Problem(f"{one.key} ({at})", one.message) for at, one in problems]
        )
    return is_same


def _read_model(
    log: StartLog, scenario: Scenario, origins: Mapping[str, str], reading: _Reading, refuse: Any
) -> bool | None:
    name = log.value("model")
    if name is None:
        return None
    if (snapshot := re.search(r"models--([^/]+)--([^/]+)/snapshots", name)) is not None:
        name = f"{snapshot[1]}/{snapshot[2]}"
    if MODEL not in origins:
        if _shape_of(name) is None:
            refuse("model", f"is {name}, which is not known here; give the path of its config.json as {MODEL}")
        reading.set(log.place("model"), MODEL, name)
        return True
    own = scenario.model.target
    if _last(own) == _last(name):
        return True
    one, other = _shape_of(own), _shape_of(name)
    if one is None or other is None:
        return None
    if _form(one) != _form(other):
        refuse("model", f"is {name}, and {MODEL} is {own} ({origins[MODEL]})")
    return True


def _last(name: str) -> str:
    return name.rstrip("/").removesuffix("/config.json").rpartition("/")[2].lower()


def _shape_of(name: str) -> ModelShape | None:
    try:
        return model_shape(name, MODEL)
    except ForedraftError:
        return None


def _form(shape: ModelShape) -> tuple[Any, ...]:
    return shape.layers, shape.hidden, shape.vocab, shape.mixers, shape.mlps


def _read_devices(
    log: StartLog, scenario: Scenario, origins: Mapping[str, str], reading: _Reading, refuse: Any
) -> None:
    hardware, groups = scenario.hardware, log.value("groups", 1)
    shares_groups = log.value("shares_groups", False)
    if (tensor := log.value("tensor")) is not None:
        if shares_groups:  # SGLang's tp_size counts the devices of all groups
            tensor //= groups
        if TENSOR not in origins:
            reading.set(log.place("tensor"), TENSOR, tensor)
        elif tensor != hardware.tensor_parallel:
            refuse("tensor", f"is {tensor}, and {TENSOR} is {hardware.tensor_parallel} ({origins[TENSOR]})")
    own = hardware.attention_data_parallel
    if "groups" in log.facts and (own > 1 or shares_groups) and own != groups:
        refuse("groups", f"is {groups}, and hardware.attention_data_parallel is {own}")
    if log.value("stages", 1) > 1:
        refuse("stages", f"is {log.value('stages')}: pipeline parallelism is not simulated")


def _read_graphs(log: StartLog, origins: Mapping[str, str], reading: _Reading) -> None:
    """Take the captured sizes. Graphs that the scenario's own keys switch off are a contradiction."""
    sizes, none = log.value("graph_sizes"), log.value("no_graphs")
    if none or sizes == ():
        reading.set(log.place("no_graphs" if none else "graph_sizes"), "hardware.cuda_graphs", False)
    elif sizes:
        if "hardware.cuda_graphs" in origins:
            reading.set(log.place("graph_sizes"), "hardware.cuda_graphs", True)
        reading.set(log.place("graph_sizes"), "hardware.graph_sizes", list(sizes))


def _read_pool(log: StartLog, scenario: Scenario, reading: _Reading, is_same_model: bool | None) -> None:
    """Take the KV pool: its tokens where each token takes the same, else its bytes."""
    deployment = Deployment.of(scenario, None, EngineRole.BOTH)
    model = scenario.model
    target = deployment.with_formats(model_shape(model.target, MODEL), model)
    drafts, own_drafts = log.value("drafts"), scenario.speculation.algorithm != "NONE"
    if "drafts" in log.facts and (drafts is not None) != own_drafts:
        said = "drafts" if drafts is not None else "does not draft"
        reading.sentences.append(
            f"CONTRADICTION: the server of the log {said}, and speculation.algorithm is {scenario.speculation.algorithm}: "
            "the pool has another size with a draft than without"
        )
    computed = _computed(scenario)
    differences = [] if computed is None else [*_differences(log, computed, target)]
    if len(differences) == 2 and is_same_model is None:
        message = f"is {log.value('model', 'not named')}, which does not look like {model.target}: {' and '.join(differences)}"
        raise ConfigError.of(log.place("model") if "model" in log.facts else log.source, "model", message)
    reading.sentences += [f"CONTRADICTION: {one}" for one in differences]
    tokens, num_bytes = log.value("kv_tokens"), log.value("kv_bytes")
    groups = scenario.hardware.attention_data_parallel
    tp = scenario.hardware.tensor_parallel
    if tokens is not None and (_counts_alike(target) or _keeps_windows_whole(target, tp, tokens, num_bytes)):
        reading.set(log.place("kv_tokens"), "engine.kv_slots", tokens * groups)
    elif num_bytes is not None:
        if num_bytes <= 0:
            raise ConfigError.of(log.place("kv_bytes"), "kv_bytes", "is not above 0: the server did not start")
        reading.set(log.place("kv_bytes"), "hardware.kv_gb", round(num_bytes / 1e9, 3))
        if scenario.hardware.free_fraction is not None:
            reading.set(log.place("kv_bytes"), "hardware.free_fraction", None)
    else:
        reading.sentences.append(_no_pool(target, tokens))
        return
    if computed is not None and computed.memory is not None and tokens is not None:
        own = computed.memory.capacity(computed.spec.config)[0]
        reading.sentences.append(
            f"the log's pool has {tokens * groups:,} tokens; computed for this scenario are {own:,} ({own / tokens / groups - 1:+.1%})"
        )


def _counts_alike(target: ModelShape) -> bool:
    """Return whether a request takes the same of the pool for each of its tokens, and nothing beside."""
    return not target.token_bytes(1, windowed=True) and not target.recurrent_state_bytes


def _keeps_windows_whole(target: ModelShape, tp: int, tokens: int, num_bytes: int | None) -> bool:
    """Return whether the server keeps all tokens of layers with a window, so that each token takes the same."""
    if not tokens or not num_bytes or target.recurrent_state_bytes:
        return False
    whole = target.token_bytes(tp, windowed=False) + target.token_bytes(tp, windowed=True)
    return abs(num_bytes / tokens / whole - 1) <= ALIKE


def _no_pool(target: ModelShape, tokens: int | None) -> str:
    if tokens is None:
        return "WARNING: the log has no line of the KV pool; the computed one holds"
    return (
        f"WARNING: the log says the tokens of the pool but not its bytes, which {target.name} needs: its layers with a "
        "window or a state do not take the same for each token; the computed pool holds"
    )


def _computed(scenario: Scenario) -> Assembly | None:
    """Return the deployment with the pool that is computed; None if it is given, or does not fit."""
    if scenario.engine.kv_slots is not None:
        return None
    try:
        return assemble(scenario)
    except InsufficientMemory:
        return None


def _differences(log: StartLog, computed: Assembly, target: ModelShape) -> Iterator[str]:
    """Yield what the log says otherwise than the shape of the scenario's models."""
    plan = computed.memory
    if plan is None:
        return
    drafts = log.value("drafts", "unknown") is not None
    weights, measured = plan.target_weights_bytes, log.value("weight_bytes")
    most = weights + (plan.draft_weights_bytes if drafts else 0)
    if measured is not None and not weights * (1 - ALIKE) <= measured <= most * (1 + ALIKE):
        yield (
            f"the weights take {measured / GIB:.2f} GiB of a device ({log.place('weight_bytes')}), those of the "
            f"scenario {most / GIB:.2f} GiB"
        )
    tokens, num_bytes = log.value("kv_tokens"), log.value("kv_bytes")
    if not tokens or not num_bytes or not _counts_alike(target):
        return
    each, least = num_bytes / tokens, plan.target_slot_bytes
    greatest = least + (plan.draft_slot_bytes if drafts else 0)
    if not least * (1 - ALIKE) <= each <= greatest * (1 + ALIKE):
        yield (
            f"a token takes {each:,.0f} B of the pool ({log.place('kv_tokens')}), with the scenario's models and "
            f"model.kv_dtype {greatest:,} B"
        )


def _summary(log: StartLog, reading: _Reading) -> list[str]:
    """Return what was taken, line by line, before the other sentences."""
    taken = [
        f"{key} = {_shown(value)} (line {place.rpartition(':')[2]})"
        for place, keys in reading.given.items()
        for key, value in keys.items()
    ]
    lines = [f"taken from {log.source}: {', '.join(taken)}"] if taken else [f"nothing is taken from {log.source}"]
    if log.earlier:
        lines.append(f"the file has {count_of(log.earlier, 'earlier start')}, which do not count")
    return [*lines, *reading.sentences]


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{value[0]} … {value[-1]} ({len(value)} sizes)"
    return str(value)
