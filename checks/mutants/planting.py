"""Planted defects as text: the defect, its place, and the changed source.

    FreesForEverybody (ALLOC-03, ALLOC-05): The first of several holders to leave frees the page.
        PlainAllocator.drop
            - if self.count[page] == 0:
            + if page not in self.free_list:

    PromisesTooLittle (ALLOC-14): The last page is never promised.
        KVAllocator.can_allocate = good(self, num_slots) and num_slots != self.num_free_slots

A defect has a name, the invariants of which one must catch it, a sentence, and below that one or more places. A place
is a method or function, `Class.method` or `module.function`, and is followed by one of these:

    ` = expression`    the method returns this instead
    `:`, then lines    its whole body instead; also of a method that the class does not have, `Class.method(self, x):`
    `-`, `+` lines     a piece of its source that stands there once, and what stands there instead; of several lines
    each replaces that
                       piece, indented as it is

In all of them `good` is the method as it was, `memory` a dictionary that all places of a defect share, and the names of
the method's own module are known. A place that has changed so that a text no longer fits is an error at once.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from ..mutant import Mutant


class Defects:
    """The planted defects of what `make` makes, in the order in which they are declared.

    A defect is a subclass of a class that the component is built of. Its docstring is one sentence that says what is
    wrong. `capabilities` is what is declared, if not all that the good component has; `prefix` stands before the names.
    """

    def __init__(self, contract: str, make: Any, capabilities: Any = None, prefix: str = "") -> None:
        self.contract, self.make, self.prefix = contract, make, prefix
        self.capabilities = capabilities
        self.mutants: list[Mutant] = []

    def breaks(
        self, *caught_by: str, also: Sequence[type] = (), functions: Mapping[Any, Any] | None = None
    ) -> Callable[[type], Any]:
        """Declare a defect that one of these invariants must catch. `also` are subclasses of other classes that are
        part of it, `functions` what stands in the place of functions. The class's name then stands for a component
        that has the defect: for the class itself if it breaks the component's own class, and nothing else."""

        def declare(kind: type) -> Any:
            is_whole = kind.__base__ is self.make and self.capabilities is None and not also and not functions
            make = kind if is_whole else Subclassed(self.make, (*also, kind), functions, self.capabilities)
            defect = " ".join(kind.__doc__.split())
            self.mutants.append(Mutant(self.prefix + kind.__name__, defect, self.contract, make, caught_by))
            return make

        return declare


class Subclassed:
    """Makes what `make` makes, with subclasses in the place of what they break. They are there only within `planted`,
    which every execution of a trial enters: nothing else has the defect."""

    def __init__(
        self, make: Any, kinds: Sequence[type], functions: Mapping[Any, Any] | None = None, capabilities: Any = None
    ) -> None:
        self.changed = {kind.__base__: kind for kind in kinds} | dict(functions or {})
        self.make = self.changed.get(make, make)
        self.capabilities = capabilities or getattr(make, "capabilities", None)
        self._packages = {kind.__module__.partition(".")[0] for kind in (Subclassed, *kinds)}
        self._num_modules = 0
        self._places: list[tuple[dict[str, Any], str, Any]] = []

    def __call__(self, config: Any) -> Any:
        return self.make(config)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have each module that names a class or function use the broken one, for as long as the context lasts."""
        places = self.places()
        for names, name, good in places:
            names[name] = self.changed[good]
        try:
            yield
        finally:
            for names, name, good in places:
                names[name] = good

    def places(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the names of what is changed, (names of a module, name, class or function), in the modules of this
        package and of the one that declares the defect."""
        if len(sys.modules) != self._num_modules:
            self._num_modules = len(sys.modules)
            modules = [
                vars(module) for key, module in list(sys.modules.items()) if key.partition(".")[0] in self._packages
            ]
            self._places = [
                (names, name, value)
                for names in modules
                for name, value in names.items()
                if isinstance(value, type | FunctionType) and value in self.changed
            ]
        return self._places


_HEAD = re.compile(r"(\w+) \(([A-Z]+(?:-\d+)?(?:, [A-Z]+(?:-\d+)?)*)\): (.+)", re.DOTALL)
_PLACE = re.compile(r"(\w+)\.(\w+)(?:\((.*?)\))?(:| = .+)?", re.DOTALL)


def defects(
    contract: str,
    make: Any,
    places: Iterable[Any],
    text: str,
    capabilities: Any = None,
    prefix: str = "",
    **names: Any,
) -> tuple[Mutant, ...]:
    """Return the mutants that a text describes: what `make` makes, with a defect.

    The text names `places`, classes and modules, and what else is among them or in `names`. `capabilities` is what is
    declared, if not all that the good one has; `prefix` stands before the defects' names.
    """
    return tuple(
        Mutant(prefix + name, defect, contract, Planted(make, changes, capabilities), caught_by)
        for name, caught_by, defect, changes in _read(text, places, names)
    )


def subclasses(
    contract: str, kind: type, places: Iterable[Any], text: str, module: str, **names: Any
) -> tuple[Mutant, ...]:
    """Return the mutants that a text describes, each a subclass of `kind` that `module` has under its name:
    another process finds it."""
    found = []
    for name, caught_by, defect, changes in _read(text, places, names):
        memory: dict[Any, Any] = {}
        methods = {change.name: change.function(memory) for change in changes}
        make = type(name, (kind,), {"__doc__": defect, "__module__": module, **methods})
        found.append(Mutant(name, defect, contract, make, caught_by))
    return tuple(found)


def _read(
    text: str, places: Iterable[Any], names: dict[str, Any]
) -> Iterator[tuple[str, tuple[str, ...], str, tuple[Change, ...]]]:
    """Yield name, invariants, sentence and changes of each defect."""
    names |= {item.__name__.rpartition(".")[2]: item for item in places}
    for block in re.split(r"\n\n(?=\S)", text.strip("\n")):
        sentence, indented = re.split(r"\n(?=    )", block, maxsplit=1)
        name, ids, defect = _HEAD.fullmatch(" ".join(sentence.split())).groups()
        changes = tuple(Change.of(name, place, names) for place in re.split(r"\n(?=\S)", textwrap.dedent(indented)))
        yield name, tuple(ids.split(", ")), defect, changes


def lookup(mutants: Iterable[Mutant]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, by which `foredraft check CONTRACT module:Name` finds what has one defect."""
    makes: dict[str, Any] = {}
    for mutant in mutants:
        makes.setdefault(mutant.name.rpartition(":")[2], mutant.make)

    def find(name: str) -> Any:
        if name in makes:
            return makes[name]
        raise AttributeError(f"there is no defect {name!r}")

    return find


class Planted:
    """Makes what `make` makes. The defect is there only within `planted`, which every execution of a trial enters:
    nothing else has it."""

    def __init__(self, make: Any, changes: Sequence[Change], capabilities: Any = None) -> None:
        self.make = make
        self.capabilities = capabilities or getattr(make, "capabilities", None)
        self.changes = changes
        self._functions: list[Any] = []

    def __call__(self, config: Any) -> Any:
        return self.make(config)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the functions read as the defect says, for as long as the context lasts."""
        if not self._functions:
            memory: dict[Any, Any] = {}
            self._functions = [change.function(memory) for change in self.changes]
        before = []
        for change, function in zip(self.changes, self._functions, strict=True):
            before.append((change.owner, change.name, vars(change.owner).get(change.name)))
            setattr(change.owner, change.name, function)
        try:
            yield
        finally:
            for owner, name, good in reversed(before):
                if good is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, good)


@dataclass(frozen=True, slots=True)
class Change:
    """One function that reads otherwise: `parameters` if it is a new one; `edits`, or the lines of its body."""

    defect: str
    owner: type
    name: str
    parameters: str | None
    body: str | None
    edits: tuple[tuple[str, str], ...]
    names: Mapping[str, Any]

    @classmethod
    def of(cls, defect: str, text: str, names: Mapping[str, Any]) -> Change:
        """Read a place and what stands below it."""
        place, _, rest = text.partition("\n")
        owner, name, parameters, how = _PLACE.fullmatch(place).groups()
        rest = textwrap.dedent(rest)
        body, edits = rest, []
        if how is None:
            body = None
            for edit in re.split(r"^(?=- )", rest, flags=re.MULTILINE)[1:]:
                old, *new = edit.rstrip("\n").split("\n")
                edits.append((old[2:], "\n".join(line[2:] for line in new)))
        elif how != ":":
            body = "return " + how[3:] + (f"\n{rest}" if rest else "")
        return cls(defect, names[owner], name, parameters, body, tuple(edits), names)

    def function(self, memory: dict[Any, Any]) -> Any:
        """Return the changed function, as what it was: a property, a static or class method, or plain."""
        found = inspect.getattr_static(self.owner, self.name) if self.parameters is None else None
        good = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        known = {**self.names, **(good.__globals__ if good else {}), "good": good, "memory": memory}
        source = self._source(good)
        file = f"<{self.defect}: {self.owner.__name__}.{self.name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        code = compile(source, file, "exec")
        unknown = sorted(_globals_of(code) - known.keys() - vars(builtins).keys())
        assert not unknown, f"{file}: what are {unknown}?"
        exec(code, known)
        function: Callable[..., Any] = known["_of"](self.owner)
        function.__name__ = self.name
        return type(found)(function) if isinstance(found, property | staticmethod | classmethod) else function

    def _source(self, good: Any) -> str:
        """Return the source of a function that returns the changed one, given the class that `super()` looks for."""
        if self.parameters is not None:
            head, body = f"def changed({self.parameters}):", self.body
        else:
            source = textwrap.dedent(inspect.getsource(good))
            tree = ast.parse(source).body[0]
            tree.decorator_list = []
            head = f"def changed({ast.unparse(tree.args)}):"
            first = tree.body[1] if ast.get_docstring(tree) and len(tree.body) > 1 else tree.body[0]
            whole = textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :]))
            body = self._edited(whole) if self.body is None else self.body
        return f"def _of(__class__):\n    {head}\n{textwrap.indent(body, ' ' * 8)}\n    return changed\n"

    def _edited(self, source: str) -> str:
        for old, new in self.edits:
            where = f"{self.defect}, {self.owner.__name__}.{self.name}"
            assert source.count(old) == 1, f"{where}: {old!r} stands there {source.count(old)} times, not once"
            before = source[: source.index(old)].rpartition("\n")[2]
            indent = before[: len(before) - len(before.lstrip())]
            source = source.replace(old, new.replace("\n", "\n" + indent))
        return source


def _globals_of(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
