"""Algorithms by name: the built-in ones, and plugins from a decorator or the entry-point group `foretoken.algorithms`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from .algorithm import SpecAlgorithm
from .algorithms import BUILT_IN
from .errors import ConfigError, Problem, nearest

ENTRY_POINT_GROUP = "foretoken.algorithms"

_RESERVED = {cls.name: cls() for cls in BUILT_IN}
_plugins: dict[str, SpecAlgorithm] = {}


def register_algorithm(name: str) -> Callable[[type], type]:
    """Class decorator: make an algorithm known under `name` (case-insensitive).

    The class must offer every attribute and method of `SpecAlgorithm` with the same signature; subclassing it is the easy way.
    Raises `ConfigError` that lists all that is missing, or says that the name is taken.
    """

    def register(cls: type) -> type:
        key = name.upper()
        problems = []
        if not key.isidentifier():
            problems.append(Problem("name", f"{name!r} is no identifier"))
        if key in _RESERVED:
            problems.append(Problem("name", f"{key} is reserved for the built-in algorithm"))
        elif key in _plugins:
            problems.append(Problem("name", f"{key} is registered already, by {type(_plugins[key]).__qualname__}"))
        problems += interface_problems(cls)
        if problems:
            raise ConfigError(f"algorithm plugin {cls.__qualname__}", problems)
        cls.name = key
        _plugins[key] = cls()
        return cls

    return register


def unregister_algorithm(name: str) -> None:
    """Forget a plugin (tests and reloads); a built-in name or an unknown one is a ConfigError."""
    if _plugins.pop(name.upper(), None) is None:
        raise ConfigError("<algorithm registry>", [Problem("name", f"{name!r} is not a registered plugin")])


def interface_problems(cls: type) -> list[Problem]:
    """How `cls` differs from the interface of `SpecAlgorithm`: missing names and other signatures, all of them."""
    problems = []
    for attribute, expected in vars(SpecAlgorithm).items():
        if attribute.startswith("_") or attribute == "name":
            continue
        found = inspect.getattr_static(cls, attribute, None)
        if found is None:
            problems.append(Problem(attribute, "is missing"))
        elif inspect.isfunction(expected):
            if not inspect.isfunction(found):
                problems.append(Problem(attribute, "must be a method"))
            elif (want := _parameters(expected)) != (got := _parameters(found)):
                problems.append(Problem(attribute, f"takes ({', '.join(got)}), expected ({', '.join(want)})"))
    try:
        inspect.signature(cls).bind()
    except TypeError:
        problems.append(Problem("__init__", "must take no arguments: an algorithm carries no state"))
    return problems


def _parameters(function: Callable) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def get_algorithm(name: str) -> SpecAlgorithm:
    """The algorithm called `name`, case-insensitive; ConfigError with the nearest known name."""
    key = name.upper()
    if key not in _RESERVED and key not in _plugins:
        _load_entry_points(key)
    found = _RESERVED.get(key) or _plugins.get(key)
    if found is None:
        known = algorithm_names()
        raise ConfigError(
            "<arguments>",
            [Problem("algorithm", f"unknown algorithm {name!r}{nearest(key, known)}; known: {', '.join(known)}")],
        )
    return found


def algorithm_names() -> list[str]:
    """All known names, the built-in ones first."""
    return [*_RESERVED, *sorted(_plugins)]


def _load_entry_points(key: str) -> None:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name.upper() == key:
            try:
                loaded = entry.load()
            except (ImportError, AttributeError) as error:
                source = f"entry point {entry.value}"
                raise ConfigError(
                    source, [Problem("algorithm", f"plugin {entry.name!r} cannot be loaded: {error}")]
                ) from error
            if key not in _plugins:
                register_algorithm(entry.name)(loaded)
