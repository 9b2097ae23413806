"""A case: a failure as one JSON file that can be run again, with its operations, configuration, seed and the
suite's version."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import ConfigError, Problem, nearest
from ...core.parsing import ParseError, parse_json
from ...observe.input_files import read_text
from .contract import MISBEHAVIOURS, SUITE_VERSION
from .invariants import Invariant, of_contract
from .operation import Operation, decode, decode_fields, encode
from .suite import Component, Suite
from .trial import Trial, Violation

MAX_BYTES = 1_000_000
MAX_OPERATIONS = 10_000
MAX_CALLS = 60
"""Calls of one operation that a history shows, the last ones."""
SuiteOf = Callable[[str, str], Suite]
"""Returns the suite of a contract, or raises ConfigError that names the source."""
_KEYS = {
    "suite": str,
    "contract": str,
    "subject": str,
    "capabilities": list,
    "config": dict,
    "seed": int,
    "run": int,
    "invariant": str,
    "drain": bool,
    "operations": list,
}


class Story(NamedTuple):
    """The course of a case: the broken invariant (None if none breaks), the operations with their answers, and the last
    operation."""

    violation: Violation | None
    history: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...]  # of each operation: the calls that the component received, with their answers
    ends_in: str


@dataclass(frozen=True, slots=True)
class Case:
    """`subject` is an import string `module:make`, or a name if it has none; `invariant` what the case breaks.

    With `drain`, everything is given back after the operations, and that is where it breaks.
    """

    suite: Suite
    subject: str
    capabilities: tuple[str, ...]
    config: Any
    seed: int
    run: int
    invariant: str
    drain: bool
    operations: tuple[Operation, ...]

    @property
    def contract(self) -> str:
        return self.suite.name

    def to_json(self) -> dict[str, Any]:
        return (
            {"suite": SUITE_VERSION, "contract": self.contract}
            | {field.name: getattr(self, field.name) for field in fields(self) if field.name != "suite"}
            | {
                "capabilities": list(self.capabilities),
                "config": asdict(self.config),
                "operations": [encode(operation) for operation in self.operations],
            }
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        head = self.to_json()
        operations = head.pop("operations")
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        lines += ['  "operations": [', ",\n".join(f"    {json.dumps(operation)}" for operation in operations), "  ]"]
        path.write_text("\n".join(["{", *lines, "}"]) + "\n", encoding="utf-8")

    def tell(self, make: Callable[[Any], Any]) -> Story:
        """Run the case again and record its course."""
        history: list[str] = []
        calls: list[tuple[str, ...]] = []

        def note(operation: Operation, trial: Trial) -> None:
            history.append(f"{operation}  {trial.last_report()}")
            calls.append(tuple(trial.calls[-MAX_CALLS:]))
            trial.calls.clear()

        violation = self.replay(make, note)
        history, calls = history[: len(self.operations)], calls[: len(self.operations)]
        if violation is None:
            return Story(None, tuple(history), tuple(calls), "")
        # What fails is not noted any more: it is the last operation, or comes behind all of them.
        if violation.operation == "make":
            return Story(violation, (), (), "the start")
        if len(history) < len(self.operations) and violation.trial is not None:  # None: a comparison of two runs
            history.append(str(violation.operation))
            calls.append(tuple((violation.trial.calls or ())[-MAX_CALLS:]))
            ends_in = f"operation {len(history)}"
        else:
            ends_in = f"the end, when all is given back: {violation.operation}"
        return Story(violation, tuple(history), tuple(calls), ends_in)

    def replay(
        self, make: Callable[[Any], Any], watch: Callable[[Operation, Trial], None] | None = None
    ) -> Violation | None:
        """Run the operations on a fresh subject. Returns the failure, or None. `watch` is called after each operation
        that held."""
        component = self.suite.component(make, self.capabilities)
        if self.invariant not in MISBEHAVIOURS:
            # The one that the case is about is looked at alone first: another one may break on the way to it.
            wanted = [item for item in component.invariants if item.id == self.invariant]
            violation = self._run(component, wanted, watch)
            if violation is not None:
                return violation
            watch = None
        return self._run(component, component.invariants, watch)

    def _run(self, component: Component, invariants: Sequence[Invariant], watch: Any) -> Violation | None:
        try:
            component.execute(self.config, self.operations, invariants, drain=self.drain, twice=True, watch=watch)
        except Violation as violation:
            return violation
        return None


def load_case(path: Path, suite_of: SuiteOf) -> Case:
    """Read a case, whose suite `suite_of` returns. Raises ConfigError with the file and the key for a damaged one, or
    one of another version of the suite."""
    source = str(path)
    try:
        data = parse_json(read_text(path, MAX_BYTES))
    except ParseError as error:
        raise ConfigError.of(source, "", f"is not JSON: {error}") from None
    return parse_case(data, source, suite_of)


def parse_case(data: object, source: str, suite_of: SuiteOf) -> Case:
    """Parse a case from its JSON value; raises ConfigError as `load_case` does."""
    if not isinstance(data, dict) or "suite" not in data:
        raise ConfigError.of(source, "", 'this is no case: expected an object with the key "suite"')
    if data["suite"] != SUITE_VERSION:
        what = f"made with suite {data['suite']!r}, this is {SUITE_VERSION!r}: its operations may mean something else"
        raise ConfigError.of(source, "suite", what)
    problems = [
        Problem(key, "missing" if key not in data else f"{data[key]!r} is not of type {kind.__name__}")
        for key, kind in _KEYS.items()
        if type(data.get(key)) is not kind
    ]
    problems += [Problem(str(key), "unknown") for key in data if key not in _KEYS]
    if problems:
        raise ConfigError(source, problems)
    if len(data["operations"]) > MAX_OPERATIONS:
        message = f"{len(data['operations'])}, expected at most {MAX_OPERATIONS}"
        raise ConfigError.of(source, "operations", message)
    suite = suite_of(data["contract"], source)
    known = [item.id for item in of_contract(suite.name)] + list(MISBEHAVIOURS)
    if data["invariant"] not in known:
        what = f"{data['invariant']!r} is none of {suite.name}'s{nearest(data['invariant'], known)}"
        raise ConfigError.of(source, "invariant", what)
    capabilities = suite.capabilities.of(data["capabilities"], source)
    try:
        config = decode_fields(suite.config, data["config"], source, "config")
    except AssertionError as error:
        raise ConfigError.of(source, "config", f"impossible: {data['config']}") from error
    parsed = {
        "suite": suite,
        "capabilities": capabilities.declared,
        "config": config,
        "operations": tuple(
            decode(suite.operations, operation, source, f"operations[{number}]")
            for number, operation in enumerate(data["operations"])
        ),
    }
    return Case(**{key: value for key, value in data.items() if key != "contract"} | parsed)
