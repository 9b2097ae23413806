"""Opens packages of another server, without their `__init__` and without what they import for a device.

A server's scheduler is Python, and needs little of the rest of its package. So only the modules of the scheduler are
imported from their files: those of a wheel, of a folder into which a wheel was unpacked, or of the installed package.
All others have stand-ins: modules whose attributes are empty classes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import textwrap
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import ConfigError

LOGGING = ("critical", "debug", "error", "exception", "info", "isEnabledFor", "log", "warning")
"""The methods of a logger."""


class _AnyAttribute(type):
    """The type of empty classes: each attribute of such a class is an empty class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _AnyAttribute(name, (_Empty,), {})
        setattr(cls, name, made)
        return made

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Empty(metaclass=_AnyAttribute):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        """Return what takes a message for the log: an instance may stand in for a logger. It has nothing else."""
        if name.removesuffix("_once") in LOGGING:
            return lambda *message, **more: None
        raise AttributeError(name)

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _StandIn(ModuleType):
    real: Collection[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made = importlib.import_module(full) if full in self.real else _AnyAttribute(name, (_Empty,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real modules of one package in its folder, and a stand-in for each other module of it."""

    def __init__(self, package: str, root: str, real: Collection[str], absent: Collection[str]) -> None:
        self._package = package
        self._root = root
        self._real = real
        self._absent = absent

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to make a stand-in; None for a real module, whose folder `__path__` of its package says."""
        top = name.partition(".")[0]
        if top in self._absent:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if top != self._package or any(name == real or name.startswith(real + ".") for real in self._real):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = ["/".join([self._root, *name.split(".")])]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.real = self._real
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in makes its attributes when they are asked for."""


def open_wheel(
    path: Path, package: str, real: Collection[str], absent: Collection[str], known: Collection[str] = ()
) -> str:
    """Make `package` importable from a wheel, or from a folder into which one was unpacked. Returns its version.

    `real`: the modules and packages of it that are imported from their files, each with all below it; all others have
    stand-ins. `absent`: packages of others that need not be installed. `known`: the versions that are accepted, all if
    there are none. A process can open one release of a package. Raises ConfigError if `path` has no such package, or
    not all of its real modules.
    """
    version = _version(path, package)
    if known and version not in known:
        what = f"{package} {version}; the adapters are written for {', '.join(known)}"
        raise ConfigError.of(str(path), "", what)
    has_file = _has_file(path)
    for module in real:
        file = module.replace(".", "/")
        if not (has_file(f"{file}.py") or has_file(f"{file}/")):
            what = f"{package} {version} has no module {module}: a part of it is missing, or it is another release"
            raise ConfigError.of(str(path), "", what)
    sys.meta_path.insert(0, _Finder(package, str(path), real, absent))
    return version


def installed(package: str) -> Path:
    """Return the folder in which a package is installed. Raises ConfigError if it is not."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        what = f"is not installed; install it, or name its wheel: --wheel FILE (pip download --no-deps {package})"
        raise ConfigError.of(package, "", what) from None
    return Path(str(found.locate_file("")))


def read_source(path: Path, file: str) -> str:
    """Return the text of a file of an opened package, by its path in the wheel."""
    if path.is_dir():
        return (path / file).read_text(encoding="utf-8")
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(file).decode("utf-8")


def load_functions(path: Path, file: str, names: Collection[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Return functions of a file whose module is not imported, by name. They see `scope` and each other.

    A static method is returned as a function. Raises ConfigError for a function that the file does not have.
    """
    source = read_source(path, file)
    lines, found = source.splitlines(), dict(scope)
    nodes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    for name in names:
        if name not in nodes:
            raise ConfigError.of(str(path), "", f"{file} has no function {name}: it is another release")
        text = "\n".join(lines[nodes[name].lineno - 1 : nodes[name].end_lineno])
        future = "from __future__ import annotations\n"
        exec(compile(future + textwrap.dedent(text), file, "exec"), found)
    return {name: found[name] for name in names}


def _has_file(path: Path) -> Callable[[str], bool]:
    """Return a function that says whether a wheel or a folder has a file, or a folder if the name ends with "/"."""
    if path.is_dir():
        return lambda name: (path / name).exists()
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    return lambda name: any(each.startswith(name) for each in names) if name.endswith("/") else name in names


def has_package(path: Path, package: str) -> bool:
    """Return whether a wheel or a folder has a package. Raises ConfigError if it is neither."""
    return any(name.startswith(f"{package}-") and name.endswith(".dist-info") for name in _metadata(path))


def _version(path: Path, package: str) -> str:
    """Return the version in the wheel's metadata."""
    names = sorted(_metadata(path))
    for name in names:
        found, _, version = name.removesuffix(".dist-info").partition("-")
        if found == package and name.endswith(".dist-info"):
            return version
    shown = ", ".join(names[:5]) or "nothing"
    raise ConfigError.of(str(path), "wheel", f"expected the package {package}, found {shown}")


def _metadata(path: Path) -> list[str]:
    """Return the names of the folders that have metadata, in a folder all names in it."""
    if path.is_dir():
        return [found.name for found in path.iterdir()]
    if not zipfile.is_zipfile(path):
        raise ConfigError.of(str(path), "wheel", "is no wheel and no folder of an unpacked wheel")
    with zipfile.ZipFile(path) as wheel:
        return [name.partition("/")[0] for name in wheel.namelist() if name.endswith("/METADATA")]
