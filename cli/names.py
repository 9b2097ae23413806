"""Names: those that keys of a scenario take (`foredraft simulate --list` prints them, shells complete them), and those
of commands and options that are gone."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from typing import Any, Literal, get_args, get_origin

import typer

KINDS = ("gpus", "models", "servers")
BEFORE = "_FOREDRAFT_KEY"  # in the environment: the key whose value bash completes


GONE: dict[str, str] = {
    "acceptance": "`foredraft calibrate --acceptance`",
    "adaptive": "`foredraft tune --table` (show, import) or `foredraft export` (export)",
    "cost": "`foredraft doctor --round`",
    "twin": "`foredraft bench --twin`",
    "lossless": "`foredraft check server URL --against URL`, the plain endpoint behind --against",
    "tiny --device": "`foredraft tiny`, which trains on the CPU",
    "tiny --time-budget-s": "`foredraft tiny`, whose training has the same steps everywhere, about a minute on two cores",
    "plan --model-error": "its default: comparisons have the error of published points",
    "plan --power": "`--price` with the kWh that a GPU takes in an hour, such as H100=0.6",
    "warmup": "`foredraft serve --warm-only`, or `foredraft bench --warm`",
    "replay": "`foredraft audit --replay`",
    "simulate --models": "`foredraft simulate --list models`",
    "schema": "`foredraft simulate --schema scenario|COMMAND`, or `foredraft simulate --list models`",
}
"""Removed commands ("name") and options ("command --option") -> what does the same now."""


def print_names(kind: str) -> None:
    """Print the names of a kind, one per line; say on standard error how to have more. Raises ConfigError."""
    from ..core.errors import ConfigError, nearest
    from ..observe.distribution.install_hint import install_command
    from ..sim.cost.measured import packaged_models

    if kind not in KINDS:
        raise ConfigError.of("--list", kind, f"expected gpus, models or servers{nearest(kind, KINDS)}")
    typer.echo("\n".join(names_of(kind)))
    if kind == "models" and not packaged_models():
        typer.echo(f"foredraft: more names: {install_command('measured')}", err=True)


def names_of(kind: str) -> list[str]:
    """Return the names of "gpus", "servers" or "models": the built-in ones, those of the extra `measured`, then other
    names of both."""
    from ..core.model_shape import known_models, known_repositories
    from ..sim.cost.hardware import known_gpus
    from ..sim.cost.measured import packaged_models
    from ..sim.cost.server import PROFILES

    if kind != "models":
        return list(known_gpus() if kind == "gpus" else PROFILES)
    others = packaged_models()
    return list(dict.fromkeys([*known_models(), *others, *known_repositories(others)]))


def complete_setting(incomplete: str) -> list[str]:
    """Return what a shell offers for the beginning of KEY=VALUE: keys, or the values of a key that has names."""
    import os

    key, equals, _ = incomplete.partition("=")
    if before := os.environ.get(BEFORE):  # bash completes the value alone
        return list(_values_of(before))
    return [f"{key}={value}" for value in _values_of(key)] if equals else [f"{one}=" for one in _keys()]


def split_setting(environ: MutableMapping[str, str]) -> None:
    """Note the key before the word that bash completes: bash makes three words of KEY=VALUE, and completes the last."""
    if environ.get("_FOREDRAFT_COMPLETE") != "complete_bash":
        return
    text, at = environ.get("COMP_WORDS", ""), int(environ.get("COMP_CWORD", "0"))
    separator = "\n" if "\n" in text else " "
    words = [*text.split(separator), ""]
    at -= words[at - 1 : at] == ["="] and at > 1  # then `at` is that of "="
    if at < 2 or words[at] != "=":
        return
    environ[BEFORE] = words[at - 1]
    environ["COMP_WORDS"] = separator.join([*words[: at - 1], *words[at + 1 :]])
    environ["COMP_CWORD"] = str(at - 1)


def _keys() -> list[str]:
    from ..sim.scenario import Scenario
    from ..sim.scenario.table import declared_keys

    keys = [key for key, _ in declared_keys(Scenario)]
    tables = {key.rpartition(".")[0] for key in keys}
    return [key for key in dict.fromkeys(keys) if key not in tables]


def _values_of(key: str) -> Iterator[str]:
    """Yield the names that a key takes; none for numbers, lengths and files."""
    from ..sim.scenario import Scenario

    kinds = {"hardware.server": "servers", "model.target": "models", "model.draft": "models"}
    if kind := "gpus" if re.fullmatch(r"hardware\.(\w+\.)?gpu", key) else kinds.get(key):
        yield from (name.replace(" ", "") for name in names_of(kind))  # a blank would end the word
        return
    model: Any = Scenario
    annotation: Any = None
    for name in key.split("."):
        info = getattr(model, "model_fields", {}).get(name)
        if info is None:
            return
        annotation = info.annotation
        model = next((one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields")), None)
    for one in (annotation, *get_args(annotation)):
        if one is bool:
            yield from ("true", "false")
        elif get_origin(one) is Literal:
            yield from map(str, get_args(one))
