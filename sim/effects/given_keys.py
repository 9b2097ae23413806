"""The given keys of a scenario that a run does not use, by the conditions that the keys name (`NoEffect`).

A key counts as given if an option or a call gave it, or if a file has it with another value than the default: a
resolved scenario lists every key. A setting of the command line that has no effect is refused
(`refuse_without_effect`), because it was meant for this run. A setting of a file that has no effect is reported in a
sentence (`notices.notices_of`), because other runs may share the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from ...core.errors import ConfigError, Problem
from ..assembly import Assembly
from ..scenario import Scenario
from ..scenario.table import NoEffect, declared_keys
from ..scenario_file import OVERRIDES, SCENARIO, SETTINGS, origin_of

COMMAND_LINE = (SETTINGS, "--trace", "--seed")
EXPLICIT = (*COMMAND_LINE, OVERRIDES)


@dataclass(frozen=True, slots=True)
class Ineffective:
    """A key that was given and is not used."""

    key: str
    value: Any
    origin: str
    reason: str  # with what happens to the key before it

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.origin}) {self.reason}"


def without_effect(run: Assembly, origins: Mapping[str, str]) -> Iterator[Ineffective]:
    """Yield the given keys that the run does not use.
    `origins`: key -> the place that it came from, as `load_scenario` returns them."""
    declared = conditions_of(Scenario)
    for key, value, default in _leaves(run.scenario, Scenario()):
        origin = origins.get(key)
        if origin not in EXPLICIT:
            origin = origin_of(key, origins) if value not in (None, default) else None
        if origin is None:
            continue
        for one in declared[key]:
            if one.says != value and (reason := _reason(one, run, key)) is not None:
                yield Ineffective(key, value, origin, f"{one.outcome}: {reason}")
                break


def said_anyway(run: Assembly, origins: Mapping[str, str]) -> Iterator[Ineffective]:
    """Yield the keys of the command line whose value says what the run does without it, too, where this is reported."""
    declared = conditions_of(Scenario)
    for key, value, _ in _leaves(run.scenario, Scenario()):
        for one in declared[key] if origins.get(key) in COMMAND_LINE else ():
            if one.tells and one.says == value and (reason := _reason(one, run, key)) is not None:
                yield Ineffective(key, value, origins[key], f"says what happens anyway: {reason}")


def _reason(one: NoEffect, run: Assembly, key: str) -> str | None:
    return one.condition(run, key, *one.of)


def refuse_without_effect(run: Assembly, origins: Mapping[str, str]) -> None:
    """Raise ConfigError with every key from the command line that the run does not use."""
    found = [item for item in without_effect(run, origins) if item.origin in COMMAND_LINE]
    if found:
        raise ConfigError(SCENARIO, [Problem(item.key, f"{item.value!r} {item.reason}") for item in found])


def given_keys(scenario: Scenario, origin: str) -> dict[str, str]:
    """Return every key whose value is not the default, as given at `origin`: for a scenario that was made in Python."""
    return {key: origin for key, value, default in _leaves(scenario, Scenario()) if value != default}


@cache
def conditions_of(table: type[BaseModel]) -> dict[str, list[NoEffect]]:
    """Return the conditions of every leaf of a table by its dotted key: those of the tables around it, then its own.
    A key's own declaration stands in the place of its table's with the same condition."""
    found = {}
    for key, declared in declared_keys(table):
        all_of_them = [one for part in declared for one in part if isinstance(one, NoEffect)]
        found[key] = [*{one.condition: one for one in all_of_them}.values()]
    return found


def _leaves(table: BaseModel, usual: BaseModel | None, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value, default) of every leaf.
    `usual` is the table with all defaults, None if there is none by default."""
    for name, info in type(table).model_fields.items():
        value = getattr(table, name)
        default = info.get_default() if usual is None else getattr(usual, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, default if isinstance(default, BaseModel) else None, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, default
