"""The registry: every invariant of the catalogue, its checker if it has one, and the clauses of the checker that a
check has reached."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from .catalogue import CATALOGUE
from .operation import Operation


class Finding(NamedTuple):
    """A failed check: the found value, the expected value, and why the difference matters."""

    was: str
    should: str
    why: str


Outcome = Finding | bool | None
"""A checker's answer: None where it does not apply, True where it holds, a Finding where it does not."""

Checker = Callable[[Any], Outcome]


def unchanged(m: Any, why: str, unordered: tuple[str, ...] = ()) -> Outcome:
    """Return whether a component shows the same after a refused operation as before it.

    `before` and `after` are named tuples. The order within the fields in `unordered` may differ.
    """
    if m.after == m.before:
        return True
    for name, was, now in zip(m.after._fields, m.before, m.after, strict=True):
        if was != now and not (name in unordered and sorted(was) == sorted(now)):
            found = f"refused ({m.refusal}), but {name} went from {was} to {now}"
            return Finding(found, "nothing has changed", why)
    return True


def first_difference(runs: tuple[Any, Any]) -> tuple[int, Any, Any] | None:
    """Return where the transcripts of two trials first differ, counted from 1, and both entries;
    None if they do not."""
    pairs = enumerate(zip(*(trial.transcript for trial in runs), strict=False), 1)
    return next(((number, one, other) for number, (one, other) in pairs if one != other), None)


WHEN = {
    "E": "after every operation",
    "S": "at each scheduler step",
    "T": "when a request ends",
    "I": "idle, drained",
    "R": "over a whole run",
    "M": "two runs compared",
}

# The reference executor and its driver raise these in every cell of the matrix (`tests/support/matrix`).
BY_THE_MATRIX = {
    *("ALLOC-06", "ALLOC-07", "ALLOC-12", "ALLOC-15", "RADIX-10"),
    *("RELAY-01", "RELAY-02", "RELAY-03", "RELAY-05", "RELAY-06", "RELAY-07"),
    *("ACCEPT-02", "ACCEPT-03", "ACCEPT-06", "ACCEPT-10", "ACCEPT-16", "STEPS-01", "STEPS-10"),
    *("ENGINE-01", "ENGINE-02", "ENGINE-04", "ENGINE-11", "ENGINE-13", "ENGINE-14", "SIM-12"),
}


@dataclass(frozen=True, slots=True)
class Invariant:
    """One statement. `contract` and `needs` (capabilities, all of them) say for which components `check` is run.

    `on` are the tags of the operations that it has something to say about; () is all of them.

    Almost any defect breaks a `general` one. With `twin`, it is about two runs of the same operations: `check` gets
    both trials, and `twin_config(twin, config)` of the contract's trial says how the second one was configured.
    """

    id: str
    sentence: str
    group: str
    when: str
    contract: str = ""
    needs: tuple[str, ...] = ()
    check: Checker | None = None
    on: tuple[str | type[Operation], ...] = ()
    general: bool = False
    twin: str = ""

    @property
    def how(self) -> str:
        """How it is checked."""
        with_what = f" with {', '.join(self.needs)}" if self.needs else ""
        in_the_matrix = "; in every cell of the matrix" if self.id in BY_THE_MATRIX else ""
        return f"contract {self.contract}{with_what}, {self.when_in_words}{in_the_matrix}"

    @property
    def telling(self) -> int:
        """How specific it is. Of several that are broken at once, the one with the greatest value names the failure."""
        return 0 if self.general else 1 if not self.on else 2

    @property
    def when_in_words(self) -> str:
        return " and ".join(WHEN[letter] for letter in self.when.split(","))

    def concerns(self, kind: type) -> bool:
        """Return whether it has something to say about an operation of this kind;
        `str` is the kind of "make" and "drained"."""
        return not self.on or kind in self.on or getattr(kind, "tag", "") in self.on

    def missing(self, capabilities: object) -> tuple[str, ...]:
        return tuple(name for name in self.needs if not getattr(capabilities, name))


_REGISTRY: dict[str, Invariant] = {
    id: Invariant(id, sentence, group, when) for group, members in CATALOGUE.items() for id, sentence, when in members
}


def checks(
    id: str,
    contract: str,
    *needs: str,
    on: tuple[str | type[Operation], ...] = (),
    general: bool = False,
    twin: str = "",
) -> Callable[[Checker], Checker]:
    """Return a decorator for the one checker of invariant `id`, for components of `contract` that
    declare all of `needs`."""

    def register(check: Checker) -> Checker:
        assert _REGISTRY[id].check is None, f"{id} has a checker already"
        _REGISTRY[id] = replace(
            _REGISTRY[id], contract=contract, needs=needs, check=check, on=on, general=general, twin=twin
        )
        return check

    return register


def all_invariants() -> tuple[Invariant, ...]:
    return tuple(_REGISTRY.values())


def invariant(id: str) -> Invariant:
    return _REGISTRY[id]


def of_contract(contract: str) -> tuple[Invariant, ...]:
    return tuple(item for item in _REGISTRY.values() if item.contract == contract)


# -- clauses -----------------------------------------------------------------------------------------------------------
#
# A checker has several clauses; a clause that no run reached has proved nothing. A clause is an `if` whose body ends
# with `return Finding(…)`. The last operand of its condition is what is judged, those before it are preconditions: in
# `if m.impossible and m.promise is not None` the clause is reached when `m.promise is not None` is evaluated. The code
# of the checkers, and of the functions of their module that they call, is compiled once more with a mark before that
# operand.

_MARK = "__clause_reached__"


class Clause(NamedTuple):
    """One condition under which a checker has a finding. `number` is what its mark adds to the set of those reached."""

    number: int
    condition: str
    why: str  # why it matters, as the finding says, as far as that is a constant

    def __str__(self) -> str:
        return f"{self.why} (if {self.condition})" if self.why else f"if {self.condition}"


_reached: set[int] = set()
_clauses: dict[FunctionType, tuple[Clause, ...]] = {}  # those of the function itself
_count = 0


@contextmanager
def collected(into: set[int]) -> Iterator[None]:
    """Add the numbers of the clauses that are reached meanwhile."""
    outer = set(_reached)
    _reached.clear()
    try:
        yield
    finally:
        into |= _reached
        _reached.update(outer)


def clauses_of(check: Callable[..., Any]) -> tuple[Clause, ...]:
    """Return the clauses of a checker, which is marked from now on; none where its source is not at hand."""
    seen: dict[FunctionType, None] = {}
    _collect(check, seen)
    return tuple(clause for function in seen for clause in _clauses[function])


def _collect(function: Any, seen: dict[FunctionType, None]) -> None:
    if not isinstance(function, FunctionType) or function in seen or function.__closure__:
        return
    if function not in _clauses:
        _clauses[function] = _marked(function)
    seen[function] = None
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if getattr(called, "__module__", "") == function.__module__:
            _collect(called, seen)


def _marked(function: FunctionType) -> tuple[Clause, ...]:
    """Put the marks into a function and return its clauses."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return ()
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return ()
    clauses = tuple(_mark(node) for node in ast.walk(definition) if isinstance(node, ast.If) and _finds(node))
    if not clauses:
        return ()
    definition.decorator_list = []
    ast.increment_lineno(ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1)
    module = compile(tree, function.__code__.co_filename, "exec")
    (code,) = [
        item for item in module.co_consts if isinstance(item, CodeType) and item.co_name == function.__code__.co_name
    ]
    function.__globals__[_MARK] = _reached.add
    function.__code__ = code
    return clauses


def _finds(node: ast.If) -> bool:
    last = node.body[-1]
    call = last.value if isinstance(last, ast.Return) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Finding"


def _mark(node: ast.If) -> Clause:
    """Mark the last operand of a condition as reached before it is evaluated."""
    global _count
    _count += 1
    condition, call = ast.unparse(node.test), node.body[-1].value
    why = call.args[-1].value if isinstance(call.args[-1], ast.Constant) else ""
    is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
    judged = node.test.values[-1] if is_and else node.test
    reached = ast.Call(ast.Name(_MARK, ast.Load()), [ast.Constant(_count)], [])
    marked = ast.copy_location(ast.BoolOp(ast.Or(), [reached, judged]), judged)
    node.test = ast.BoolOp(ast.And(), [*node.test.values[:-1], marked]) if is_and else marked
    return Clause(_count, condition, why)
