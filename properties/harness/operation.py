"""Operations as data: the actions of a driver on a component. Frozen, tagged, JSON both ways.

A trial declares its operations as methods:

    class AllocatorTrial(Trial):
        values: ClassVar = {"holder": HOLDERS, "num_slots": amounts}

        @operation(weight=10)
        def alloc(self, holder: str, num_slots: int) -> None:
            "Let `holder` take `num_slots` more slots."

`AllocatorTrial.alloc` is then a frozen data class with these fields: `AllocatorTrial.alloc("a", 2)` is an operation, to
be stored, drawn and shrunk. On a trial, `trial.alloc("a", 2)` carries that operation out and checks everything after
it.

An operation names its object ("holder a", "request r1"), so that its meaning stays when other operations are removed
from the sequence. Where it makes no sense, because its holder has nothing, it is left out, and is no error. Amounts are
arguments of a caller: they may be too large, negative or odd, on purpose.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass, replace
from dataclasses import field as dataclass_field
from functools import cache, partial
from typing import Any, ClassVar

from ...core.errors import ConfigError, Problem, nearest

Values = Sequence[Any] | Callable[[Any, Any], Sequence[Any]]
"""The values that an argument may have, the simplest first; repeated values are drawn more often. Or a function of the
configuration and the capabilities that returns them; no values at all: there is no such operation here."""


class Handles(tuple):
    """Names of one sort of thing, such as holders or requests, the simplest first.
    The shrinker renames within a sort only."""

    __slots__ = ()


class Operation:
    """Base of all operations. `tag` is its name in JSON and in reports, `arguments` are the values of its fields."""

    __slots__ = ("arguments",)
    tag: ClassVar[str]
    values: ClassVar[dict[str, Values]] = {}
    body: ClassVar[Callable[..., Any] | None] = None
    when: ClassVar[Callable[..., bool] | None] = None
    num_when: ClassVar[int] = 0  # how many of the arguments `when` takes

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(getattr(self, field.name) for field in fields(self)))

    def __str__(self) -> str:
        named = zip(self.__match_args__, self.arguments, strict=True)
        said = (f"{name}={list(value) if isinstance(value, tuple) else value}" for name, value in named)
        return f"{self.tag} {', '.join(said)}".rstrip()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print it for Hypothesis as a program would make it: `AllocatorTrial.alloc(holder='a', num_slots=1)`."""
        printer.text(repr(self))


# -- declarations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to draw an operation: how often, for which capabilities, with which values."""

    weight: int
    needs: tuple[str, ...]
    group: str  # what a run leaves out together: "" nothing, "hostile", or a capability
    values: dict[str, Values]


class Declared:
    """A method of a trial that is an operation. See the module for what it is on the class and on a trial."""

    def __init__(self, body: Callable[..., Any], when: Callable[..., bool] | None, probes: str) -> None:
        self.kind = _kind_of(body, when)
        self.probes = probes
        self.variants: list[Variant] = []

    def complete(self, values: dict[str, Values]) -> None:
        """Give the parameters that were left out the values that `operation` says; `values` are the trial's."""
        types = field_types(self.kind)
        assert all(variant.values.keys() <= types.keys() for variant in self.variants), f"{self.kind.tag}: odd values"
        for field in fields(self.kind):
            both = (False, True) if types[field.name] is bool else (field.default,)
            known = self.variants[0].values.get(field.name, values.get(field.name, both))
            assert known != (MISSING,), f"{self.kind.tag}: which values has {field.name}?"
            for variant in self.variants:
                variant.values.setdefault(field.name, known)
        self.kind.values = self.variants[0].values

    def __get__(self, trial: Any, owner: type) -> Any:
        return self.kind if trial is None else partial(self._apply, trial)

    def _apply(self, trial: Any, *arguments: Any, **named: Any) -> bool:
        return trial.apply(self.kind(*arguments, **named))


def operation(
    *,
    weight: int,
    needs: str | Sequence[str] = (),
    hostile: bool = False,
    when: Callable[..., bool] | None = None,
    probes: str = "",
    **values: Values,
) -> Callable[[Any], Any]:
    """Declare a method of a trial as an operation. The method's parameters are the fields, its docstring that of the
    data class.

    weight     how often it is drawn, beside the others
    needs      the capabilities that the component must declare; a run leaves the operations of a capability out
               together
    hostile    what no caller should do; a run leaves these out together
    when       `when(trial, …)` with the first arguments, as many as it takes: whether it makes sense in this state. If
               not, it is left out, as by `Trial.only_if` in the method
    probes     the id of the invariant that it does nothing but probe: for a component known to break that one, it is
               not drawn
    values     for each parameter the values that it may have (see `Values`). Those of a parameter that is left out are
               the trial's for its name (`Trial.values`), else both of a bool, else its default

    Applied once more on top, it adds another way to draw the same operation, with the same values where no others are
    given.
    """
    needs = (needs,) if isinstance(needs, str) else tuple(needs)
    assert weight > 0, "an operation that is never drawn"

    def declare(method: Callable[..., Any] | Declared) -> Declared:
        declared = method if isinstance(method, Declared) else Declared(method, when, probes)
        group = "hostile" if hostile else needs[0] if needs else ""
        declared.variants.append(Variant(weight, needs, group, dict(values)))
        return declared

    return declare


def _kind_of(body: Callable[..., Any], when: Callable[..., bool] | None) -> type[Operation]:
    """Make the data class of an operation from the method that carries it out."""
    hints = typing.get_type_hints(body)
    columns = []
    for parameter in list(inspect.signature(body).parameters.values())[1:]:
        default = {} if parameter.default is parameter.empty else {"default": parameter.default}
        columns.append((parameter.name, hints[parameter.name], dataclass_field(**default)))
    taken = [*inspect.signature(when).parameters][1:] if when is not None else []
    assert taken == [name for name, *_ in columns[: len(taken)]], f"{body.__name__}: `when` takes the first arguments"
    name = "".join(word.title() for word in body.__name__.split("_"))
    kind = make_dataclass(
        name,
        columns,
        bases=(Operation,),
        namespace={"__doc__": body.__doc__, "__module__": body.__module__},
        frozen=True,
        slots=True,
    )
    kind.tag, kind.__qualname__ = body.__name__.replace("_", "-"), body.__qualname__
    kind.body, kind.when, kind.num_when = body, when, len(taken)
    return kind


# -- JSON -------------------------------------------------------------------------------------------------------------


def encode(operation: Operation) -> dict[str, Any]:
    """Encode an operation as a JSON object: `{"op": tag, field: value, …}`."""
    return {"op": operation.tag, **{field.name: _plain(getattr(operation, field.name)) for field in fields(operation)}}


def decode(operations: Iterable[type[Operation]], data: object, source: str, key: str) -> Operation:
    """Decode the operation, one of these kinds, that `encode` wrote;
    raises ConfigError with `source` and `key` for anything else."""
    kinds = {kind.tag: kind for kind in operations}
    if not isinstance(data, dict) or not isinstance(data.get("op"), str):
        raise ConfigError.of(source, key, 'expected an object with the key "op"')
    kind = kinds.get(data["op"])
    if kind is None:
        hint = nearest(data["op"], kinds)
        raise ConfigError.of(source, f"{key}.op", f"this contract has no operation {data['op']!r}{hint}")
    return decode_fields(kind, {name: value for name, value in data.items() if name != "op"}, source, key)


def decode_fields(kind: type, data: dict[str, Any], source: str, key: str) -> Any:
    """Decode a dataclass of integers, strings, booleans and tuples of integers from a JSON object with exactly its
    fields. One with a default may be missing, as in what an earlier suite wrote."""
    wanted = field_types(kind)
    usual = {field.name for field in fields(kind) if field.default is not MISSING}
    problems = [Problem(f"{key}.{name}", f"unknown{nearest(name, wanted)}") for name in data if name not in wanted]
    values: dict[str, Any] = {}
    for name, expected in wanted.items():
        if name not in data:
            if name not in usual:
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
    """Return a map from field to int, str, bool or tuple."""
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
    """Return operations like this one, but simpler, the simplest first:
    smaller numbers, shorter lists, names that are declared earlier."""
    used = [
        (field.name, getattr(n, field.name))
        for n in neighbours
        for field in fields(n)
        if field_types(type(n))[field.name] is str
    ]
    for field in fields(operation):
        value = getattr(operation, field.name)
        declared = operation.values.get(field.name)
        if declared is not None and not callable(declared):
            names = [name for name in dict.fromkeys(declared) if isinstance(name, str)]
            names = names[: names.index(value)] if value in names else names
        else:
            # An empty name means "none" in the field that has it (say, no namespace); no other field takes it.
            names = [name for place, name in used if name or place == field.name]
            names = sorted({name for name in names if (len(name), name) < (len(str(value)), str(value))})
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
            yield from names
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


def renamed(operations: Sequence[Operation]) -> list[Operation]:
    """Return the same operations with the handles of each sort renamed in the order of their first use."""
    names: dict[Handles, dict[str, str]] = {}
    found = []
    for operation in operations:
        changes = {}
        for name, sort in operation.values.items():
            value = getattr(operation, name)
            if not isinstance(sort, Handles) or value not in sort:
                continue
            of_sort = names.setdefault(sort, {})
            if value not in of_sort:
                of_sort[value] = sort[len(of_sort)]
            changes[name] = of_sort[value]
        found.append(replace(operation, **changes) if changes else operation)
    return found
