"""The JSON schemas of scenario files and of what commands print."""

from __future__ import annotations

import json
import re
from importlib import import_module
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ...observe.output_files import Document

SCENARIO_FILES = "scenario"
_OWN = "cli.documents."
DOCUMENTS: dict[str, tuple[str, ...]] = {
    "simulate": (f"{_OWN}simulation:SimulateDocument", f"{_OWN}simulation:ExplainDocument"),
    "plan": ("planning.answers.answer:PlanAnswer",),
    "tune": ("planning.tuning.result:TuneResult",),
    "doctor": ("planning.rounds.doctor:Diagnosis", "planning.rounds.cost:Cost"),
    "sweep": (f"{_OWN}simulation:SweepDocument",),
    "export": ("planning.servers.export.deployment:Export",),
    "report": (f"{_OWN}simulation:ReportDocument",),
    "trace": (f"{_OWN}simulation:TraceDocument",),
    "calibrate": (
        "sim.calibration.result:CalibrateResult",
        *(f"{_OWN}simulation:{kind}Document" for kind in ("Acceptance", "Measure")),
    ),
    "generate": (f"{_OWN}decoding:GenerateDocument",),
    "bench": tuple(f"{_OWN}decoding:{kind}Document" for kind in ("Bench", "Estimate", "Twin", "Warm")),
    "serve": (f"{_OWN}decoding:WarmDocument",),
    "tiny": (f"{_OWN}decoding:TinyDocument",),
    "selftest": (f"{_OWN}decoding:SelftestDocument",),
    "check": tuple(f"{_OWN}checking:{kind}Document" for kind in ("Check", "Mutants", "Invariants", "Case", "Lossless")),
    "audit": (f"{_OWN}checking:AuditDocument", f"{_OWN}checking:ReplayDocument"),
}
"""What each command prints with `--json`: a document of one of these kinds, as module and class."""
WITHOUT = {
    "ui": "serves a page until it is stopped",
}
"""The commands without `--json`, and why."""


def print_schema(kind: str) -> None:
    """Print the JSON schema of scenario files (`scenario`), or of what a command prints with --json.

    Raises ConfigError for a name that is neither.
    """
    from ...sim.scenario import Scenario

    typer.echo(json.dumps(Scenario.model_json_schema() if kind == SCENARIO_FILES else schema_of(kind), indent=2))


def documents_of(command: str) -> list[type[Document]]:
    """Return the kinds of documents that a command prints. Raises ConfigError for a command without `--json`."""
    from ...core.errors import ConfigError, nearest
    from ..names import GONE

    if command in GONE:
        raise ConfigError.of("--schema", command, f"is gone: use {GONE[command]}")
    if command in WITHOUT:
        raise ConfigError.of("--schema", command, f"has no --json: it {WITHOUT[command]}")
    if command not in DOCUMENTS:
        names = (SCENARIO_FILES, *DOCUMENTS)
        message = f"is no command{nearest(command, names)}; expected one of {', '.join(names)}"
        raise ConfigError.of("--schema", command, message)
    return [_loaded(kind) for kind in DOCUMENTS[command]]


def _loaded(place: str) -> type[Document]:
    module, _, name = place.partition(":")
    found: type[Document] = getattr(import_module(f"foredraft.{module}"), name)
    return found


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON schema of what a command prints with `--json`. Raises ConfigError for a command without it."""
    kinds = [_schema(kind) for kind in documents_of(command)]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if len(kinds) == 1:
        return dialect | kinds[0]
    below = {name: schema for kind in kinds for name, schema in kind.pop("$defs", {}).items()}
    return dialect | {"anyOf": kinds, "$defs": below}


def _schema(kind: type[Document]) -> dict[str, Any]:
    """Return the schema of one kind, with what every document begins with."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(kind).json_schema(mode="serialization")
    first = {
        "format": {"const": kind.FORMAT},
        "version": {"const": kind.VERSION},
        "foredraft": {"type": "string", "description": "The version of Foredraft that made the document."},
    }
    schema["properties"] = first | schema["properties"]
    schema["required"] = [*first, *schema["required"]]
    for one in (schema, *schema.get("$defs", {}).values()):
        _describe(one)
    return schema


_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)


def _describe(schema: dict[str, Any]) -> None:
    """Move the section "Attributes" of a class's docstring to its properties."""
    text, _, attributes = dedent(schema.get("description", "")).partition("Attributes:\n")
    if text:
        schema["description"] = " ".join(text.split())
    for name, meaning in _ATTRIBUTE.findall(attributes):
        schema["properties"][name]["description"] = " ".join(meaning.split())
