"""Published launch commands: each is understood, or what is not modelled is named, or it is refused with the reason.

What each says was noted by reading it (the .toml files beside this one); nothing that a command says may be lost.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foredraft.core.errors import ConfigError
from foredraft.planning.servers.arguments import read_arguments
from foredraft.planning.servers.launch import READERS, LaunchCommand, read_launch

HERE = Path(__file__).parent
NAMES = {
    "tp": "hardware.tensor_parallel",
    "adp": "hardware.attention_data_parallel",
    "replicas": "hardware.replicas",
    "ep": "hardware.expert_parallel",
    "per_node": "hardware.gpus_per_node",
    "running": "engine.max_running",
    "slots": "engine.kv_slots",
    "page": "engine.page_size",
    "cache": "engine.prefix_cache",
    "host_ratio": "engine.host_cache_ratio",
    "mode": "engine.mode",
    "context": "model.context_len",
    "kv": "model.kv_dtype",
    "weights": "model.weight_dtype",
    "draft": "model.draft",
    "static": "hardware.static_fraction",
    "state_ratio": "hardware.state_ratio",
    "free": "hardware.free_fraction",
    "reserved": "hardware.reserved_fraction",
    "stream": "front_end.stream_interval",
}
ONLY_MODEL = {"vllm": "vllm serve {}", "sglang": "sglang serve --model-path {}", "trtllm": "trtllm-serve {}"}


class Published(NamedTuple):
    """A command with what was noted of it."""

    server: str
    where: str
    noted: Mapping[str, Any]


def published() -> Iterator[Published]:
    for name in ("vllm", "sglang", "trtllm", "manifests"):
        for source in tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))["source"]:
            for number, noted in enumerate(source["command"]):
                where = f"{source['repository']}/{source['path']}"
                yield Published(noted.get("server", name), f"{where}-{number}", noted)


ALL = list(published())


def read(command: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchCommand:
    for name, text in command.noted.get("files", {}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return read_launch(command.server, command.noted["text"], "--from", "H100")


def expected_of(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a scenario that were noted."""
    keys = dict(noted.get("keys", {}))
    expected: dict[str, Any] = {"model.target": noted["model"]}
    if chunk := keys.pop("chunk", None):
        expected["engine.chunk_size"] = chunk
    if keys.pop("disagg", None):
        expected |= {"disaggregation.prefill": 1, "disaggregation.decode": 1}
    keys.pop("graphs", None)  # a list, of which the largest was noted
    algorithm, *shape = keys.pop("spec", "NONE").split()
    speculation = {"algorithm": algorithm} | ({"policy": "fixed"} if shape else {})
    speculation |= dict(zip(("steps", "topk", "num_draft_tokens"), map(int, shape), strict=False))
    return expected | {"speculation": speculation} | {NAMES[name]: value for name, value in keys.items()}


def test_there_are_a_hundred_and_each_says_where_it_stands():
    assert len(ALL) >= 100 and len({command.where for command in ALL}) == len(ALL)
    assert {command.server for command in ALL} == set(READERS)
    sources = {command.where.rsplit("-", 1)[0] for command in ALL}
    assert all(source.count("/") >= 2 for source in sources) and len(sources) >= 40
    outcomes = ["refused" in command.noted for command in ALL]
    assert outcomes.count(True) >= 25 and outcomes.count(False) >= 75


@pytest.mark.parametrize("command", ALL, ids=[command.where for command in ALL])
def test_each_is_understood_or_says_why_not(command: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    noted = command.noted
    if "refused" in noted:
        with pytest.raises(ConfigError) as caught:
            read(command, tmp_path, monkeypatch)
        assert noted["refused"] in str(caught.value)
        return
    launch = read(command, tmp_path, monkeypatch)
    expected = expected_of(noted)
    found = {key: launch.settings.get(key) for key in expected}
    assert found == expected
    assert set(launch.not_modelled) == set(noted.get("named", []))
    largest = noted.get("keys", {}).get("graphs")
    assert largest is None or max(launch.settings["hardware.graph_sizes"]) == largest
    # All that differs from the model alone was noted, and every argument is accounted for.
    plain = read_launch(command.server, ONLY_MODEL[command.server].format(noted["model"]), "--from", "H100").settings
    differs = {key for key, value in launch.settings.items() if plain.get(key) != value}
    follows = {"engine.max_step_tokens"} | ({"hardware.graph_sizes"} if largest else set())  # from the chunk
    if (release := launch.settings.get("hardware.release")) is not None:
        assert release in noted["text"], "of the image"
        follows |= {"hardware.release", "hardware.flashinfer_sampler"}
        if "reserved" not in command.noted.get("keys", {}):
            follows.add("hardware.reserved_fraction")  # the default of the release
    assert differs - follows <= set(expected)
    server = READERS[command.server][0]
    given = read_arguments(server, noted["text"], "--from").values
    accounted = {*launch.without_effect, *launch.not_modelled}
    for name in given:
        assert server.known[name].reason == "" or f"--{name}" in accounted or given[name] is False, name


@pytest.mark.parametrize("command", [one for one in ALL if "model" in one.noted], ids=lambda one: one.where)
def test_no_argument_of_the_text_is_lost(command: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Arguments are looked for in the text by a plain search, which knows no shell and no manifest."""
    launch = read(command, tmp_path, monkeypatch)
    server = READERS[command.server][0]
    given = read_arguments(server, command.noted["text"], "--from").values
    words = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"(?m)^\s*#.*$", "", command.noted["text"])))
    known = {name for word in words if (name := server.find(word.removeprefix("--").removeprefix("no-"))) is not None}
    assert known - set(given) <= {"model", "config", *OF_OTHERS}, "an argument of the text was not read"
    assert launch.settings["model.target"] == command.noted["model"]


OF_OTHERS = {"port", "host", "device", "base-gpu-id"}  # which docker, sidecars, clients and the other pool have, too
