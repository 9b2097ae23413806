"""The JSON text of a table of steps, and the words for its keys and values in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..parsing import ParseError, parse_json


class _Pairs(dict[str, Any]):
    """A JSON object that remembers which of its keys were written twice.

    A plain dict would silently keep the last one.
    """

    repeated: tuple[str, ...] = ()


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> _Pairs:
    result = _Pairs(pairs)
    seen: set[str] = set()
    repeated: list[str] = []
    for key, _ in pairs:
        if key in seen and key not in repeated:
            repeated.append(key)
        seen.add(key)
    result.repeated = tuple(repeated)
    return result


def parse_table(text: str, source: str) -> Any:
    """Return the value of a JSON text; its objects remember keys that are written twice. Raises ConfigError."""
    try:
        return parse_json(text, _object_of_pairs)
    except ParseError as error:
        raise ConfigError.of(source, "", f"is not JSON: {error}") from None


def repeated_keys(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that were written twice in the text of this object; none of one that was not parsed here."""
    return table.repeated if isinstance(table, _Pairs) else ()


def key_path(key: str, name: str) -> str:
    """Return the place of `name` in the entry `key` of a table, for messages; the table itself has no key."""
    return f"{key}.{name}" if key else name


def json_kind(value: Any) -> str:
    """Return the JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}")
