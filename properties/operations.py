"""Operations as data: what a driver does to a component. Frozen, tagged, JSON both ways.

An operation names what it acts on ("holder a", "request r1"), so that its meaning survives when others are taken out of the sequence.
Where it makes no sense, because its holder has nothing, it is left out, and is no error. Amounts are what a caller would say:
they may be too large, negative or odd, on purpose.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, ClassVar

from ..core.errors import ConfigError, Problem, nearest


class Operation:
    """Base of all operations. `tag` is its name in JSON and in reports."""

    __slots__ = ()
    tag: ClassVar[str]

    def __str__(self) -> str:
        values = (getattr(self, field.name) for field in fields(self))
        return " ".join([self.tag, *(str(list(v)) if isinstance(v, tuple) else str(v) for v in values)])


# -- JSON -------------------------------------------------------------------------------------------------------------


def encode(operation: Operation) -> dict[str, Any]:
    """A JSON object: `{"op": tag, field: value, …}`."""
    return {"op": operation.tag, **{field.name: _plain(getattr(operation, field.name)) for field in fields(operation)}}


def decode(operations: Iterable[type[Operation]], data: object, source: str, key: str) -> Operation:
    """The operation, one of these kinds, that `encode` wrote; raises ConfigError with `source` and `key` for anything else."""
    kinds = {kind.tag: kind for kind in operations}
    if not isinstance(data, dict) or not isinstance(data.get("op"), str):
        raise ConfigError(source, [Problem(key, 'expected an object with the key "op"')])
    kind = kinds.get(data["op"])
    if kind is None:
        hint = nearest(data["op"], kinds)
        raise ConfigError(source, [Problem(f"{key}.op", f"this contract has no operation {data['op']!r}{hint}")])
    return decode_fields(kind, {name: value for name, value in data.items() if name != "op"}, source, key)


def decode_fields(kind: type, data: dict[str, Any], source: str, key: str) -> Any:
    """A dataclass of integers, strings, booleans and tuples of integers, from a JSON object with exactly its fields."""
    wanted = field_types(kind)
    problems = [Problem(f"{key}.{name}", f"unknown{nearest(name, wanted)}") for name in data if name not in wanted]
    values = {}
    for name, expected in wanted.items():
        if name not in data:
            problems.append(Problem(f"{key}.{name}", "missing"))
        elif not _is(data[name], expected):
            said = "a list of integers" if expected is tuple else f"of type {expected.__name__}"
            problems.append(Problem(f"{key}.{name}", f"{data[name]!r} is not {said}"))
        else:
            values[name] = tuple(data[name]) if expected is tuple else data[name]
    if problems:
        raise ConfigError(source, problems)
    return kind(**values)


@cache
def field_types(kind: type) -> dict[str, type]:
    """Field -> int, str, bool or tuple."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in fields(kind):
        hint = hints[field.name]
        found[field.name] = typing.get_origin(hint) or hint
        assert found[field.name] in (int, str, bool, tuple), f"{kind.__name__}.{field.name}: {hint}"
    return found


def _is(value: object, expected: type) -> bool:
    if expected is tuple:
        return isinstance(value, list) and all(type(item) is int for item in value)
    return type(value) is expected


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# -- simpler ones, for shrinking --------------------------------------------------------------------------------------


def simpler(operation: Operation, neighbours: Sequence[Operation]) -> Iterator[Operation]:
    """Operations like this one, but simpler, the simplest first: smaller numbers, shorter lists, names used before."""
    used = [
        (field.name, getattr(n, field.name))
        for n in neighbours
        for field in fields(n)
        if field_types(type(n))[field.name] is str
    ]
    for field in fields(operation):
        value = getattr(operation, field.name)
        # Nothing is a name for what may have none, say a namespace; nobody else is called that.
        names = [name for place, name in used if name or place == field.name]
        for candidate in _simpler_values(value, names):
            yield replace(operation, **{field.name: candidate})


def _simpler_values(value: object, names: Sequence[str]) -> Iterator[object]:
    match value:
        case bool():
            if value:
                yield False
        case int():
            yield from _smaller(value)
        case str():
            yield from sorted({name for name in names if (len(name), name) < (len(value), value)})
        case tuple():
            for at in range(len(value)):
                yield value[:at] + value[at + 1 :]
            for at, item in enumerate(value):
                for smaller in _smaller(item):
                    yield (*value[:at], smaller, *value[at + 1 :])
        case types.NoneType():
            pass


def _smaller(value: int) -> Iterator[int]:
    if value < 0:
        yield -value
    yield from sorted({n for n in (0, 1, value // 2, value - 1) if 0 <= n < value})
