"""Find the component that a user names: by an import string, or by the name of an adapter that an
installed package offers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, Problem, nearest
from .contract import Adapter

ENTRY_POINTS = "foredraft.adapters"
"""The entry-point group in which other packages offer components under a name of their own."""


class NotInstalled(ConfigError):
    """A component that needs a package which is not there. `package` is its name."""

    def __init__(self, source: str, package: str) -> None:
        super().__init__(source, [Problem("", f"needs {package}, which is not installed")])
        self.package = package


def load_make(text: str) -> Callable[[Any], Any]:
    """Load the callable behind `module:make`, or behind a name of the entry-point group. Modules of the current
    directory are found, too.

    `make.capabilities` and `make.supports` are taken from the module's CAPABILITIES and `supports` where it has none of
    its own. Raises ConfigError with the problem, or NotInstalled if the only problem is a missing package.
    """
    module_name, separator, path = text.partition(":")
    if not separator:
        return _load_entry_point(text)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = _missing_package(error, module_name)
        if missing:
            raise NotInstalled(text, missing) from error
        what = f"the module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError.of(text, "", what) from error
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError.of(text, "", f"{module_name} has no {path!r}{nearest(name, vars(module))}")
        found = getattr(found, name)
    if not callable(found):
        message = f"{path} is {type(found).__name__}, expected a callable that takes a config"
        raise ConfigError.of(text, "", message)
    if hasattr(found, "as_adapter"):  # a class of tests, which says how its component is made
        return found.as_adapter()
    capabilities, supports = getattr(module, "CAPABILITIES", ()), getattr(module, "supports", None)
    if not capabilities and supports is None:
        return found
    return Adapter(found, getattr(found, "capabilities", capabilities), getattr(found, "supports", supports))


def resolved(text: str) -> str:
    """Return the `module:make` behind the name of an adapter. Another text is returned as it is."""
    point = next((point for point in entry_points(group=ENTRY_POINTS) if point.name == text), None)
    return text if point is None else _behind(point)


def _behind(point: EntryPoint) -> str:
    return f"{point.module}:{point.attr}"


def _missing_package(error: Exception, module_name: str) -> str:
    """Return the package that an import did not find, empty if it failed for another reason, such as a wrong name of
    the module itself."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return "" if package == module_name.partition(".")[0] else package


def _load_entry_point(name: str) -> Callable[[Any], Any]:
    known = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in known:
        what = f"expected module:make, or the name of an adapter{nearest(name, known)}; installed: {', '.join(known) or 'none'}"
        raise ConfigError.of(name, "", what)
    return load_make(_behind(known[name]))


def name_of(make: Callable[[Any], Any]) -> str:
    """Return `module:name`, as the command line takes it, or what comes close."""
    module, name = getattr(make, "__module__", ""), getattr(make, "__qualname__", type(make).__qualname__)
    return f"{module}:{name}" if module else name
