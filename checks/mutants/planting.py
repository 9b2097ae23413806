"""Planted defects: each is a subclass of a class that a component is built of, with something done wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        """Return the names of what is changed, (names of a module, name, class or function), in all modules."""
        if len(sys.modules) != self._num_modules:
            self._num_modules, changed = len(sys.modules), {id(good) for good in self.changed}
            self._places = [
                (names, name, value)
                for names in [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
                for name, value in list(names.items())
                if id(value) in changed  # it is asked nothing: some modules have names that warn
            ]
        return self._places
