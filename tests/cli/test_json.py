"""`--json`: every command has the same flag, prints one document and nothing else, and `schema` has its schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer
from foredraft.cli.app import app
from foredraft.cli.simulation.schema import DOCUMENTS, WITHOUT, documents_of
from foredraft.observe.output_files import Document
from foredraft.planning.trial import RunOutcome

ROOT = Path(__file__).resolve().parents[2]
FEW = ("--set", "workload.num_requests=20", "--quiet")
SHORT = {"mean_e2el_ms": 100.0, "mean_output_tokens": 10.0, "mean_running": 2.0, "replicas": 1}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the app with its name."""
    below: Mapping[str, Any] = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, found in below.items():
        yield from commands(found, f"{name} {word}".strip())


ALL = dict(commands(typer.main.get_command(app)))


def test_every_command_has_the_flag_or_is_named_with_a_reason():
    with_flag = {name for name, found in ALL.items() if any("--json" in option.opts for option in found.params)}
    assert with_flag == set(DOCUMENTS) and set(ALL) - with_flag == set(WITHOUT), "see cli/simulation/schema.py"
    for name in with_flag:
        (option,) = (one for one in ALL[name].params if "--json" in one.opts)
        assert option.is_flag and option.default is False, name
        assert f"schema {name}" in option.help or "schema COMMAND" in option.help, name


def test_formats_are_told_apart():
    kinds = {kind for name in DOCUMENTS for kind in documents_of(name)}  # some commands share one
    assert all(issubclass(kind, Document) and kind.FORMAT.startswith("foredraft-") for kind in kinds)
    assert len({kind.FORMAT for kind in kinds}) == len(kinds)


def closed(schema: Any) -> Any:
    """Return a schema that allows no other properties than those that it describes."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    return found | {"additionalProperties": False} if "properties" in schema else found


class Speeds:
    """Workers whose runs all take the same time."""

    count = 1

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job) -> None:
        self.jobs.append(job)

    def next_ended(self):
        return self.jobs.pop(), RunOutcome("done", "", SHORT)

    def close(self) -> None:
        pass


@pytest.fixture
def run(command, tmp_path) -> Path:
    """The directory of a small run."""
    assert command("simulate", *FEW, "--out", tmp_path / "run").code == 0
    return tmp_path / "run"


Lines = Callable[[Any, Path], tuple[object, ...]]
LINES: dict[str, Lines] = {
    "simulate": lambda get, folder: ("simulate", *FEW),
    "simulate, explained": lambda get, folder: ("simulate", "--explain"),
    "simulate, with faults": lambda get, folder: ("simulate", *FEW, "--faults", "swarm", "--seed", 7),
    "plan": lambda get, folder: (
        *("plan", "--slo", "e2el_p99<1s", "--try", "speculation.steps=1", "--requests", 100, "--seeds", 2),
        *("--set", "workload.output.value=8", "--set", "engine.max_running=2", "--workers", 1, "--quiet"),
        *("--out", folder),
    ),
    "tune": lambda get, folder: ("tune", "--trials", 2, "--requests", 10, "--quiet", "--out", get("speeds") / "tune"),
    "doctor": lambda get, folder: ("doctor", "--requests", 20),
    "doctor, a round": lambda get, folder: (
        *("doctor", "--round", "--batch", "1,2", "--steps", "0,3", "--set", "hardware.server=vllm-0.18"),
    ),
    "sweep": lambda get, folder: (
        *("sweep", "--grid", "speculation.steps=1,30", "--seeds", 2, "--workers", 1, *FEW, "--out", folder / "sweep"),
    ),
    "export": lambda get, folder: ("export", get("tuned"), "--for", "vllm"),
    "report": lambda get, folder: ("report", get("run")),
    "trace": lambda get, folder: ("trace", ROOT / "examples/tutorial/requests.csv", *FEW, "--out", folder / "w.toml"),
    "calibrate, acceptance": lambda get, folder: ("calibrate", "--acceptance", get("run")),
    "calibrate": lambda get, folder: (
        *("calibrate", "--from", ROOT / "examples/calibration/sglang_h200.csv", "--out", folder / "profile.json"),
        *("--set", "hardware.gpu=H200", "--set", "hardware.server=sglang-0.5", "--quiet"),
    ),
    "generate": lambda get, folder: (
        *("generate", "--model", get("models")["target"], "--prompt", "def f(", "--max-tokens", 4, "--logprobs"),
    ),
    "bench": lambda get, folder: (
        *("bench", "--model", get("models")["target"], "--algorithm", "NGRAM", "--steps", 1, "--quiet", "--repeat", 1),
        *("--batch-sizes", 1, "--context-lengths", 8, "--output-tokens", 8, "--prompts", 1, "--device", "cpu"),
    ),
    "bench, a twin": lambda get, folder: (
        *("bench", "--twin", "--model", get("models")["target"], "--loads", "light", "--seconds", 0.5, "--quiet"),
        *("--repeat", 1, "--max-running", 2, "--threads", 1),
    ),
    "tiny": lambda get, folder: ("tiny", folder / "pair", "--size", "nano", "--quiet"),
    "bench, warm": lambda get, folder: (
        *("bench", "--warm", "--model", get("models")["target"], "--algorithm", "NGRAM", "--device", "cpu"),
        *("--context-lengths", 8),
    ),
    "serve": lambda get, folder: ("serve", "--warm-only", "--model", get("models")["target"], "--device", "cpu"),
    "selftest": lambda get, folder: ("selftest", "--device", "cpu", "--budget", "1s", "--out", folder, "--quiet"),
    "check, a server": lambda get, folder: ("check", "server", get("endpoint"), "--max-tokens", 2, "--quiet"),
    "audit,replay": lambda get, folder: ("audit", "--replay", get("run")),
    "check": lambda get, folder: ("check", "allocator", "plain-allocator", "--budget", 500),
    "check, the list": lambda get, folder: ("check", "allocator", "--list"),
    "audit": lambda get, folder: ("audit", get("run")),
}
LATER = {"calibrate": "slow", "plan": "slow", "tiny": "slow", "bench, a twin": "slow"}  # some seconds each
LATER |= {"calibrate, acceptance": "ci", "bench": "ci", "selftest": "ci"}


@pytest.fixture
def speeds(monkeypatch, tmp_path) -> Path:
    """Runs that take no time. Returns a directory for them."""
    monkeypatch.setattr("foredraft.planning.store.make_workers", lambda tables, count, cluster: Speeds())
    return tmp_path


@pytest.fixture
def tuned(tmp_path) -> Path:
    """The directory of a tune that found four steps for every batch."""
    (tmp_path / "question.json").write_text('{"kind": "tune"}')
    (tmp_path / "scenario.toml").write_text(
        '[hardware]\nserver = "vllm-0.18"\n[speculation]\npolicy = "fixed"\nsteps = 4\n'
    )
    return tmp_path


@pytest.fixture
def endpoint(monkeypatch) -> str:
    """The address of an endpoint that always answers the same."""
    import httpx
    from foredraft.serve.lossless import endpoint, prompts

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "one"}]})
        tokens = {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2], "top_logprobs": [{"a": -0.1}, {"b": -0.2}]}
        choice = {"text": "ab", "finish_reason": "length", "logprobs": tokens}
        return httpx.Response(200, json={"choices": [choice]})

    made = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(endpoint, "make_client", lambda *given: made)
    monkeypatch.setattr(prompts, "BUILT_IN", prompts.BUILT_IN[:2])
    return "http://one"


def test_every_command_is_tried():
    assert {name.partition(",")[0] for name in LINES} == set(DOCUMENTS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, LATER[name])) if name in LATER else name for name in LINES]
)
def test_a_command_prints_one_document_by_its_schema(command, request, tmp_path, monkeypatch, name):
    monkeypatch.setattr("foredraft.planning.plan.LEAST_ARRIVALS_S", 1.0)
    monkeypatch.setattr("foredraft.gpu.measure.floor.CPU_BYTES", 1 << 20)
    line = LINES[name](request.getfixturevalue, tmp_path)
    done = command(*line, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert list(found)[:3] == ["format", "version", "foredraft"] and found["version"] == 1
    schema = command("simulate", "--schema", line[0])
    problems = [one.message for one in jsonschema_rs.validator_for(closed(json.loads(schema.out))).iter_errors(found)]
    assert schema.code == 0 and not problems, problems[:3]


def test_a_document_of_another_form_does_not_fit():
    """The check above can fail: on a key that the schema lacks, and on one that the document lacks."""
    from foredraft.cli.simulation.schema import schema_of

    validator = jsonschema_rs.validator_for(closed(schema_of("audit")))
    whole = {"format": "foredraft-replay", "version": 1, "foredraft": "0", "identical": True, "decisions": 1}
    whole |= {"results": 1, "replicas": 1, "complete": True, "difference": None}
    assert validator.is_valid(whole) and not validator.is_valid(whole | {"more": 1})
    assert not validator.is_valid({key: value for key, value in whole.items() if key != "replicas"})


def test_schema_names_what_it_does_not_have(refused):
    assert "has no --json: it serves a page until it is stopped" in refused("simulate", "--schema", "ui")
    assert "cost: is gone: use `foredraft doctor --round`" in refused("simulate", "--schema", "cost")
    assert "did you mean 'plan'?" in refused("simulate", "--schema", "pln")
