"""Histories of other servers' components, recorded from the real packages and played back without them.

    python -m foredraft.checks.servers.recording vllm vllm-0.33.0-….whl tests/checks/servers/recorded

A history has the operations of one run and every answer that the component gave. Played back, the component gives the
same answers again; the trial and its invariants run as they do on the real one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from ...properties.harness.cases import Case, parse_case
from ...properties.harness.contract import Adapter
from ...properties.harness.importing import load_make
from ...properties.harness.suite import Component
from ...properties.harness.swarm import Swarm
from ...properties.suites import suite_of
from .packages import ServerComponent, package_of
from .release import name_wheel

OPERATIONS = 40
FEWEST = 30
"""A recorded run carries out so many of its operations at least."""
SEED = 7
AS_BEFORE = "="


class _Recorder:
    """A component whose answers are noted: (method, answer, error). An object in an answer becomes a text."""

    def __init__(self, component: Any, notes: list[list[Any]], methods: Sequence[str]) -> None:
        self._handles: dict[str, Any] = {}
        for name in methods:
            if callable(getattr(component, name, None)):
                setattr(self, name, self._noting(name, getattr(component, name), notes))

    def _noting(self, name: str, method: Callable[..., Any], notes: list[list[Any]]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            given = [self._handles.get(item, item) if isinstance(item, str) else item for item in arguments]
            try:
                answer = self._plain(method(*given))
            except Exception as error:
                notes.append([name, str(error), type(error).__name__])
                raise
            notes.append([name, answer])
            return answer

        call.__name__ = name
        return call

    def _plain(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        handle = f"#{len(self._handles)}"
        self._handles[handle] = value
        return handle


class _Playback:
    """A component that gives recorded answers, in their order."""

    def __init__(self, notes: Iterator[list[Any]], methods: Sequence[str]) -> None:
        self._last: dict[str, Any] = {}
        for name in methods:
            setattr(self, name, self._playing(name, notes))

    def _playing(self, name: str, notes: Iterator[list[Any]]) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            recorded, answer, *error = next(notes)
            assert recorded == name, f"{name} is called, and {recorded} was recorded: the trial has changed"
            if error:
                raise ValueError(answer)
            if answer == AS_BEFORE:
                answer = self._last[name]
            self._last[name] = answer
            return answer

        call.__name__ = name
        return call


def _recorded(make: Callable[[Any], Any], notes: list[list[Any]], methods: Sequence[str], config: Any) -> _Recorder:
    return _Recorder(make(config), notes, methods)


def record(component: ServerComponent) -> dict[str, Any]:
    """Return the history of the first run that carries out enough operations, as JSON."""
    suite, make = suite_of(component.contract), load_make(component.subject)
    checked = suite.component(make)
    methods = [name for names in suite.trial.methods.values() for name in names]
    for run in count():
        notes: list[list[Any]] = []
        config, operations = Swarm(checked, SEED).drawn(run)
        adapter = Adapter(partial(_recorded, make, notes, methods), checked.capabilities, None)
        trial = Component(suite, adapter, checked.capabilities).execute(config, operations[:OPERATIONS])
        if trial.num_operations >= FEWEST:
            case = Case(
                suite,
                component.subject,
                checked.capabilities.declared,
                config,
                SEED,
                run,
                checked.invariants[0].id,
                True,
                tuple(operations[:OPERATIONS]),
            )
            return {"component": component.name, "case": case.to_json(), "answers": list(_shortened(notes))}
    raise AssertionError("runs do not end")


def _shortened(notes: list[list[Any]]) -> Iterator[list[Any]]:
    """Yield the notes, with a mark for an answer that is the method's last one."""
    last: dict[str, Any] = {}
    for name, answer, *error in notes:
        yield [name, AS_BEFORE if not error and name in last and last[name] == answer else answer, *error]
        if not error:
            last[name] = answer


def play(history: dict[str, Any], source: str) -> tuple[Component, Case]:
    """Return the component of a history, and its case. Raises ConfigError if it was recorded by another suite."""
    case = parse_case(history["case"], source, suite_of)
    suite = case.suite
    methods = [name for names in suite.trial.methods.values() for name in names]
    capabilities = suite.capabilities.of(case.capabilities)
    adapter = Adapter(lambda _: _Playback(iter(history["answers"]), methods), capabilities, None)
    return Component(suite, adapter, capabilities), case


def main(arguments: Sequence[str]) -> None:
    """Record a history of each component of a package that holds."""
    name, wheel, folder = arguments
    package = package_of(name)
    name_wheel(name, Path(wheel))
    release = package.open()
    for component in package.components:
        if component.defects_of(release.version):
            continue
        text = json.dumps(record(component), separators=(",", ":"))
        adapter = component.subject.rpartition(".")[2].replace(":", "-")
        (Path(folder) / f"{adapter}-{release.version}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
