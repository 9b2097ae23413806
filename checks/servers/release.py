"""A release of another server that is opened for a check: its version, where it is, and the calls of its components."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...properties.harness.importing import NotInstalled
from .wheel import has_package, installed, open_wheel


@dataclass(frozen=True, slots=True)
class Release:
    """An opened release. `path`: its wheel, or the folder that has it."""

    package: str
    version: str
    path: Path


OPENED = ("vllm", "sglang")
_named: dict[str, Path] = {}
_opened: dict[str, Release] = {}


def name_wheel(package: str, path: Path) -> None:
    """Use this wheel or folder when the package is opened, and not the installed one."""
    _named[package] = path


def name_any_wheel(path: Path) -> None:
    """Use this wheel or folder for the package that it has. Raises ConfigError if that is none that can be opened."""
    for package in OPENED:
        if has_package(path, package):
            name_wheel(package, path)
            return
    raise ConfigError.of(str(path), "wheel", f"expected one of the packages {', '.join(OPENED)}")


def open_release(
    package: str, known: Collection[str], real: Collection[str], absent: Collection[str] = ()
) -> tuple[Release, bool]:
    """Return the release of a package, and whether this call has opened it.

    It is the one that `name_wheel` has named, else the installed one. Raises ConfigError if there is none, if it is
    none of the `known` versions, if modules are missing, or if another one is open in this process; and NotInstalled if
    there is no torch.
    """
    path = _named.get(package)
    found = _opened.get(package)
    if found is not None:
        if path is not None and path != found.path:
            what = f"{found.version} of {found.path} is open; a process can open one release of a package"
            raise ConfigError.of(package, "", what)
        return found, False
    if importlib.util.find_spec("torch") is None:
        raise NotInstalled(package, "torch")
    path = installed(package) if path is None else path
    version = open_wheel(path, package, real, absent, known)
    _opened[package] = Release(package, version, path)
    return _opened[package], True


class Recorded:
    """An object of another server, whose calls are noted as text in `owner.own_calls` while that is a list.

    Its attributes are those of the object.
    """

    def __init__(self, target: Any, name: str, owner: Any, tell: Callable[[Any], str] = repr) -> None:
        self._target, self._name, self._owner, self._tell = target, name, owner, tell

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if self._owner.own_calls is None or not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            shown_arguments = [
                *map(self._tell, arguments),
                *(f"{key}={self._tell(item)}" for key, item in named.items()),
            ]
            self._owner.own_calls.append(f"{self._name}.{name}({', '.join(shown_arguments)})")
            answer = value(*arguments, **named)
            if answer is not None:
                self._owner.own_calls[-1] += f"  # {self._tell(answer)}"
            return answer

        return call


def installed_version(package: str, known: Collection[str]) -> Release:
    """Return the installed release of a package that is imported whole. Raises ConfigError as `open_release` does."""
    if package in _named:
        what = "it is imported as a whole, so it must be installed; --wheel is for vllm and sglang"
        raise ConfigError.of(str(_named[package]), "", what)
    path = installed(package)
    version = importlib.metadata.version(package)
    if version not in known:
        raise ConfigError.of(package, "", f"{version}; the adapters are written for {', '.join(known)}")
    return Release(package, version, path)
