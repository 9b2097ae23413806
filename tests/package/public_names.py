"""Lists what is public (docs/stability.md), a line each: the names of the package, the commands, the keys of scenarios.
`python tests/package/public_names.py --write` stores the list anew.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import click
import foredraft
import pydantic
import typer

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("public_names.txt")


def public_lines() -> list[str]:
    """Return every public thing as a line, in a fixed order: a section per kind."""
    sections = {"python": _package(), "command": _commands(), "scenario": sorted(set(_keys(foredraft.Scenario)))}
    return [f"{kind} {line}" for kind, lines in sections.items() for line in lines]


def _package() -> Iterator[str]:
    """Yield what `__all__` of each module of api/ names."""
    for path in sorted((ROOT / "api").glob("*.py")):
        module = "foredraft" if path.stem == "__init__" else f"foredraft.{path.stem}"
        if "\n__all__ = " in path.read_text(encoding="utf-8"):
            yield from (f"{module}.{name}" for name in importlib.import_module(module).__all__)


def _commands() -> Iterator[str]:
    from foredraft.cli.app import app

    def walk(name: str, command: click.Command) -> Iterator[str]:
        for below, found in sorted(getattr(command, "commands", {}).items()):
            if not found.hidden:
                yield f"{name} {below}"
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the list instead of printing it")
    text = "\n".join(public_lines()) + "\n"
    if parser.parse_args().write:
        STORED.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
