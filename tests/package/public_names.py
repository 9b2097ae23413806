"""Lists what is public (docs/stability.md), a line each: `python tests/package/public_names.py --write` stores the list
anew.

Signatures have names and defaults. Types are left out: a more precise annotation breaks no code that runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import foredraft
import pydantic
import typer

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("public_names.txt")
CONTRACTS = tuple(
    f"foredraft.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}.contract"
    for path in sorted((ROOT / "properties").glob("*/contract.py"))
    if path.parent.name != "harness"
)
CONFORMANCE = ("foredraft.properties.conformance",)
ANSWERS = {  # module -> what the planning functions of the package return
    "foredraft.planning.answer": ("PlanAnswer", "PlannedCandidate", "PlannedRun", "RefusedCandidate"),
    "foredraft.planning.slo": ("Limit",),
    "foredraft.planning.demand.bill": ("Bill", "PerMillion", "Energy"),
    "foredraft.planning.demand.hours": ("Hours", "Hour"),
    "foredraft.planning.confidence.unknowns": ("Moved",),
    "foredraft.planning.tuning.result": ("TuneResult", "JudgedTable"),
    "foredraft.planning.rounds.doctor": ("Diagnosis", "Gain", "Compared"),
    "foredraft.planning.rounds.cost": ("Cost", "BatchCost", "RoundCost"),
    "foredraft.sim.calibration.result": (
        *("CalibrateResult", "CalibratedParameter", "CalibratedResult", "SuggestedPoint"),
    ),
    "foredraft.observe.output_files": ("Document",),
}
CHECKING = {  # module -> what users of the contracts take from it
    "foredraft.properties.conformance": ("check", "check_case", "Conformance", "Report"),
    "foredraft.properties.harness.contract": ("Capabilities", "needs"),
    "foredraft.properties.suites": ("suite_of",),
    "foredraft.properties.harness.machines": ("machine", "configs", "operations", "histories", "SETTINGS"),
}
DECODING = {  # module -> what `foredraft.Session` takes as keyword arguments and returns
    "foredraft.gpu.session.plan": ("SessionOptions",),
    "foredraft.gpu.session.prompts": ("RequestDefaults",),
    "foredraft.gpu.session.text_session": ("Output", "SessionStats"),
}
PLUGINS = {  # module -> what packages with algorithms of their own subclass, register or return
    "foredraft.core.algorithm.algorithm": ("AlgorithmShape", "DraftKV", "Drafter", "SpecAlgorithm"),
    "foredraft.core.algorithm.builtin": ("Standalone", "Eagle", "Eagle3", "MultiLayerEagle", "LookupDrafting"),
    "foredraft.core.algorithm.proposer": ("Proposal", "ProposalRequest", "Proposer"),
    "foredraft.core.algorithm.registry": ("register_algorithm",),
}


def public_lines() -> list[str]:
    """Return every public thing as a line, in a fixed order: a section per kind."""
    sections = {
        "python": (*_package(), *_listed(DECODING), *_listed(ANSWERS)),
        "contract": (line for name in CONTRACTS for line in _contract(importlib.import_module(name))),
        "checking": (*_listed(CHECKING), *_shortcuts()),
        "plugin": _listed(PLUGINS),
        "command": _commands(),
        "scenario": sorted(set(_keys(foredraft.Scenario))),
        "format": _formats(),
        "install": _packaging(),
        "metric": _metrics(),
    }
    return [f"{kind} {line}" for kind, lines in sections.items() for line in lines]


def _package() -> Iterator[str]:
    for name in foredraft.__all__:
        found = getattr(foredraft, name)
        if name == "Scenario":
            yield "foredraft.Scenario"  # its fields are the keys of scenarios
        else:
            yield from _thing(f"foredraft.{name}", found)


def _contract(module: ModuleType) -> Iterator[str]:
    """Yield what the classes of a contract have. Constants and drawing configurations are the suite's own business."""
    for name, found in vars(module).items():
        if inspect.isclass(found) and found.__module__ == module.__name__ and not name.startswith("_"):
            is_protocol = getattr(found, "_is_protocol", False)
            yield from _thing(f"{module.__name__}.{name}", found, with_methods=is_protocol)


def _shortcuts() -> Iterator[str]:
    """Yield the functions and base classes for tests, one each per contract."""
    for module in CONFORMANCE:
        for name in vars(importlib.import_module(module)):
            if name.startswith("check_") or name.endswith("Conformance"):
                yield f"{module}.{name}"


def _listed(names: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for module, members in names.items():
        for name in members:
            yield from _thing(f"{module}.{name}", getattr(importlib.import_module(module), name))


def _thing(name: str, found: object, with_methods: bool = True) -> Iterator[str]:
    """Yield a function with its signature, or a class with what it adds to its bases."""
    if not inspect.isclass(found):
        yield name + (_signature(found) if callable(found) else "")
        return
    fields = _fields(found)
    has_constructor = "__init__" in vars(found) and not fields and not getattr(found, "_is_protocol", False)
    yield name + (_signature(found) if has_constructor else "")
    yield from (f"{name}.{field}" for field in fields)
    for member, value in vars(found).items():
        if member.startswith("_") or member in fields:
            continue
        if isinstance(value, property):
            yield f"{name}.{member}"
        elif with_methods and inspect.isroutine(value):
            yield f"{name}.{member}{_signature(getattr(found, member))}"


def _fields(found: type) -> list[str]:
    if issubclass(found, enum.Enum):
        return list(found.__members__)
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found) if not field.name.startswith("_")]
    return list(getattr(found, "_fields", ()))  # of a NamedTuple


def _signature(found: object) -> str:
    signature = inspect.signature(found)  # type: ignore[arg-type]
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _commands() -> Iterator[str]:
    from foredraft.cli.app import app

    def walk(name: str, command: click.Command) -> Iterator[str]:
        yield name
        for parameter in command.params:
            options = [*parameter.opts, *parameter.secondary_opts]
            words = options if parameter.param_type_name == "option" else [parameter.name.upper()]
            yield from (f"{name} {word}" for word in words)
        for below, found in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{name} {below}", found)

    yield from walk("foredraft", typer.main.get_command(app))


def _keys(model: type[pydantic.BaseModel], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a model, with those of the models that its fields may hold."""
    for name, field in model.model_fields.items():
        key = f"{above}{field.alias or name}"
        yield key
        for below in _models_in(field.annotation):
            yield from _keys(below, f"{key}.")


def _models_in(annotation: object) -> Iterator[type[pydantic.BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _formats() -> Iterator[str]:
    from foredraft.cli.simulation.schema import DOCUMENTS, documents_of
    from foredraft.observe import log
    from foredraft.planning import store
    from foredraft.properties.harness.contract import SUITE_VERSION
    from foredraft.sim.cost import calibration

    yield f"events.jsonl: schema {log.SCHEMA}"
    yield f"question.json: {store.FORM}"
    yield f"profile.json: {calibration.FORMAT} {calibration.VERSION}"
    yield f"case.json: suite {SUITE_VERSION}"
    kinds = sorted((kind.FORMAT, kind.VERSION) for command in DOCUMENTS for kind in documents_of(command))
    yield from (f"--json: {name} {version}" for name, version in kinds)


def _packaging() -> Iterator[str]:
    from foredraft.core.algorithm.registry import ENTRY_POINT_GROUP
    from foredraft.observe.distribution.former_name import NAME, VARIABLES
    from foredraft.properties.harness.importing import ENTRY_POINTS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from (f"extra {extra}" for extra in project["optional-dependencies"])
    yield from (f"command {name}" for name in project["scripts"])
    yield from (f"entry points {group}" for group in (ENTRY_POINT_GROUP, ENTRY_POINTS))
    yield from (f"adapter {name}" for name in project["entry-points"][ENTRY_POINTS])
    yield from (f"variable {NAME.upper()}_{name}" for name in VARIABLES)


def _metrics() -> Iterator[str]:
    from foredraft.serve.metrics.series import STYLES

    for style, series in STYLES.items():
        given = "" if style == "foredraft" else f" (--metrics-as {style})"
        yield from (f"{prefix}:{one.name}{given}" for prefix, one in series)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the list instead of printing it")
    text = "\n".join(public_lines()) + "\n"
    if parser.parse_args().write:
        STORED.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
