"""A resolved scenario as TOML, with the source of each value as a comment; `load_scenario` reads it back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from .scenario import Scenario

DerivedRow = tuple[str, float | str, str, str]  # name, value, unit, source

DEFAULT = "default"
_COMMENT_COLUMN = 44


def scenario_text(
    scenario: Scenario,
    origins: Mapping[str, str],
    derived: Iterable[DerivedRow] = (),
    notices: Sequence[str] = (),
) -> str:
    """Return the whole text, with a newline at its end.

    origins: dotted key -> source, as `load_scenario` returns them; other keys are defaults. derived: numbers to add as
    comments.
    notices: sentences to add as comments.
    """
    lines = [*_table_lines(scenario, "", origins)]
    rows = list(derived)
    if rows:
        lines += ["", "# What follows from it: value, unit, and the source of each."]
        above = ["", *(source for *_, source in rows)]
        lines += [
            _derived_line(*row[:3], "as above" if row[3] == last else row[3])
            for row, last in zip(rows, above, strict=False)
        ]
    if notices:
        lines += ["", *(f"# Note: {notice}." for notice in notices)]
    return "\n".join(lines) + "\n"


def _table_lines(table: BaseModel, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of a table, then the tables below it, as TOML demands."""
    below: list[tuple[str, BaseModel]] = []
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            below.append((name, value))
            continue
        source = _source(f"{prefix}{name}", origins)
        text = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
        # The field's description says what a run does without the value.
        meaning = f" ({field.description})" if value is None and field.description else ""
        yield f"{text:<{_COMMENT_COLUMN}} # {source}{meaning}"
    for name, value in below:
        yield ""
        yield f"[{prefix}{name}]"
        yield from _table_lines(value, f"{prefix}{name}.", origins)


def _source(key: str, origins: Mapping[str, str]) -> str:
    """Return the source of `key`, or of the table around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def _derived_line(name: str, value: float | str, unit: str, source: str) -> str:
    shown = f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    text = f"# {name} = {shown} {unit}".rstrip()
    return f"{text:<{_COMMENT_COLUMN}} # {source}"


def workload_text(workload: Mapping[str, Any], source: str, without: Sequence[str]) -> str:
    """Return the table `workload` as TOML, for `foredraft simulate`. without: what it leaves out of its source."""
    lines = [f"# A workload that `foredraft trace` made from {source}.", *(f"# Without {what}." for what in without)]
    below = {name: value for name, value in workload.items() if isinstance(value, Mapping)}
    tables = [("workload", {name: value for name, value in workload.items() if name not in below})]
    for name, table in [*tables, *((f"workload.{name}", table) for name, table in below.items())]:
        lines += ["", f"[{name}]"]
        for key, value in table.items():
            lines += textwrap.wrap(f"{key} = {toml_value(value)}", 100, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return plain data as a TOML value; mappings become inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no TOML form")
