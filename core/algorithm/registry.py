"""Algorithms by name: the built-in ones, and plugins from a decorator or the entry-point group `foredraft.algorithms`.

An entry point is loaded only when its name is asked for. All problems of a plugin are reported in one `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeGuard, TypeVar

from ..errors import ConfigError, Problem, nearest_name
from .algorithm import SpecAlgorithm
from .builtin import BUILT_IN
from .plugin_check import answer_problems, interface_problems

ENTRY_POINT_GROUP = "foredraft.algorithms"


_RESERVED = {cls.name: cls() for cls in BUILT_IN}
_plugins: dict[str, type[SpecAlgorithm]] = {}
_instances: dict[str, SpecAlgorithm] = {}  # of plugins that have been asked for


ClassT = TypeVar("ClassT", bound=type)


def register_algorithm(name: str) -> Callable[[ClassT], ClassT]:
    """Return a class decorator that makes an algorithm known under `name` (case-insensitive).

    The class must offer every attribute and method of `SpecAlgorithm` with the same signature; subclassing it is the
    easy way. The class is inspected and not called: its methods' answers are checked when the name is first asked for.
    Raises `ConfigError` if the name is taken, or with a list of everything that is missing.
    """

    def register(cls: ClassT) -> ClassT:
        if not isinstance(cls, type):
            problem = Problem("", f"{cls!r} is no class; register a subclass of SpecAlgorithm")
            raise ConfigError(f"algorithm plugin {name}", [problem])
        key, plugin = name.upper(), cls
        problems = _name_problems(name, cls) + interface_problems(cls)
        if not _is_algorithm(plugin, problems):
            raise ConfigError(f"algorithm plugin {cls.__qualname__}", problems)
        plugin.name = key
        _plugins[key] = plugin
        return cls

    return register


def _is_algorithm(cls: type, problems: list[Problem]) -> TypeGuard[type[SpecAlgorithm]]:
    """Return whether a class offers the interface: no problem was found."""
    return not problems


def unregister_algorithm(name: str) -> None:
    """Forget a plugin (tests and reloads); a built-in name or an unknown one is a ConfigError."""
    _instances.pop(name.upper(), None)
    if _plugins.pop(name.upper(), None) is None:
        raise ConfigError.of("<algorithm registry>", "name", f"{name!r} is not a registered plugin")


def _name_problems(name: str, cls: type) -> list[Problem]:
    key = name.upper()
    problems = []
    if not key.isidentifier():
        problems.append(Problem("name", f"{name!r} is no identifier"))
    if key in _RESERVED:
        problems.append(Problem("name", f"{key} is reserved for the built-in algorithm"))
    elif key in _plugins:
        problems.append(Problem("name", f"{key} is registered already, by {_plugins[key].__qualname__}"))
    for other, plugin in _plugins.items():
        if plugin is cls and other != key:
            problems.append(Problem("name", f"the class is registered already, as {other}; derive one for {key}"))
    return problems


# -- by name ----------------------------------------------------------------------------------------------------------


_OF_SERVERS = {"NEXTN": "EAGLE", "MTP": "EAGLE", "DRAFT_MODEL": "STANDALONE"}


def get_algorithm(name: str) -> SpecAlgorithm:
    """Return the algorithm called `name`, case-insensitive, also by the name of a server (NEXTN, MTP, DRAFT_MODEL);
    ConfigError with the nearest known name."""
    key = name.upper()
    if key not in _RESERVED and key not in _plugins:
        _load_entry_point(key)
    if key not in _plugins:
        key = _OF_SERVERS.get(key, key)
    if key in _RESERVED:
        return _RESERVED[key]
    if key not in _plugins:
        known = list(dict.fromkeys([*algorithm_names(), *sorted(entry.name.upper() for entry in _entry_points())]))
        message = f"unknown algorithm {name!r}{nearest_name(key, known)}; known: {', '.join(known)}"
        raise ConfigError.of("<arguments>", "algorithm", message)
    if key not in _instances:
        _instances[key] = _instance_of(_plugins[key])
    return _instances[key]


def _instance_of(cls: type[SpecAlgorithm]) -> SpecAlgorithm:
    """Make a plugin's algorithm. Raises ConfigError with all of its unusable answers."""
    try:
        algorithm = cls()
    except Exception as error:
        problem = Problem("__init__", f"raised {type(error).__name__}: {error}")
        raise ConfigError(f"algorithm plugin {cls.__qualname__}", [problem]) from error
    if problems := answer_problems(algorithm):
        raise ConfigError(f"algorithm plugin {cls.__qualname__}", problems)
    return algorithm


def algorithm_names() -> list[str]:
    """Return the names of all algorithms that are loaded, the built-in ones first."""
    return [*_RESERVED, *sorted(_plugins)]


def is_known_everywhere(name: str) -> bool:
    """Return whether other processes of this installation know `name`:
    a built-in algorithm or an entry point, not a mere registration."""
    key = name.upper()
    return key in _RESERVED or any(entry.name.upper() == key for entry in _entry_points())


def _entry_points() -> Iterable[EntryPoint]:
    return entry_points(group=ENTRY_POINT_GROUP)


def _load_entry_point(key: str) -> None:
    """Load the entry point called `key`, if there is one. If the plugin cannot be used, the registry stays as it
    was."""
    # One distribution may be found twice, in two places of the path; two values for one name are two plugins.
    entries = list({entry.value: entry for entry in _entry_points() if entry.name.upper() == key}.values())
    if not entries:
        return
    if len(entries) > 1:
        values = " and ".join(sorted(entry.value for entry in entries))
        message = f"{key} is offered twice, by {values}"
        raise ConfigError.of(f"entry points {ENTRY_POINT_GROUP}", "algorithm", message)
    (entry,) = entries
    before = dict(_plugins)
    try:
        loaded = entry.load()
        if key not in _plugins:
            register_algorithm(entry.name)(loaded)
        _instances[key] = _instance_of(_plugins[key])
    except ConfigError as error:
        _restore(before)
        raise ConfigError(f"entry point {entry.value}", error.problems) from error
    except (Exception, SystemExit) as error:
        _restore(before)
        message = f"plugin {entry.name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError.of(f"entry point {entry.value}", "algorithm", message) from error


def _restore(plugins: dict[str, type]) -> None:
    _plugins.clear()
    _plugins.update(plugins)
