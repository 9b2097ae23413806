"""The keys that a page gives, as a scenario file and as the commands that say the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.parsing import ParseError, parse_toml
from ..sim.scenario.scenario_text import toml_value
from .dropped import shown_name

TRACE = "workload.trace"


def scenario_toml(given: Mapping[str, Any]) -> str:
    """Return a scenario file with these keys, by their dotted names."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in sorted(given.items(), key=lambda item: item[0].rpartition(".")[0]):
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {toml_value(_shown(key, value))}")
    parts = ["\n".join([*([f"[{table}]"] if table else []), *lines]) for table, lines in tables.items() if lines]
    return "\n\n".join(parts) + "\n" if parts else "# Every key has its default.\n"


def commands(given: Mapping[str, Any], more: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the commands that ask the same as the page, by their names. more: further words of a command."""
    settings = [word for key, value in given.items() if key != TRACE for word in ("--set", f"{key}={_setting(value)}")]
    trace = ["--trace", shown_name(given[TRACE])] if TRACE in given else []
    words = {name: [*settings, *trace] for name in ("simulate", "doctor", "plan")} | {"doctor --round": settings}
    return {name: shlex.join(["foredraft", *name.split(), *same, *more.get(name, ())]) for name, same in words.items()}


def _shown(key: str, value: Any) -> Any:
    return shown_name(value) if key == TRACE else value


def _setting(value: Any) -> str:
    """Return a value for `--set`: a bare word where it is read back as the same text."""
    if not isinstance(value, str):
        return toml_value(value)
    try:
        parse_toml(f"value = {value}")
    except ParseError:
        return value if value.strip() == value and value != "none" else toml_value(value)
    return toml_value(value)
