"""One suite per contract: what the drivers need to know of it. The next contract adds its own here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..core.errors import ConfigError, Problem, nearest
from . import operations as ops
from .alarm import Hanging, alarm
from .allocator_draws import WEIGHTS, AllocatorDraws, draw_config, draw_features
from .allocator_trial import AllocatorTrial
from .contracts import MISBEHAVIOURS, AllocatorCapabilities, AllocatorConfig
from .invariants import Finding, Invariant, of_contract
from .operations import Operation
from .trial import Broken, Trial, Violation

RUN_LIMIT_S = 2.0
"""How long one run of a few hundred operations may take before it counts as hanging; a good one takes milliseconds."""

WARM_UP_LIMIT_S = 60.0


class Draws(Protocol):
    """The operations of one configuration."""

    def draw(
        self, seed: int, run: int, count: int, features: Sequence[str], without: Sequence[type] = ()
    ) -> list[Operation]: ...


@dataclass(frozen=True, slots=True)
class Suite:
    """Everything about a contract that a driver needs.

    `start(make, config, capabilities, invariants)` makes a subject and its trial; `draw_config` and `draw_features` turn 64 random bits
    into a configuration and into the kinds of operations of a run; `probes` names, for an invariant that a subject is known
    to break, the operations that do nothing but probe it.
    """

    name: str
    config: type
    capabilities: type
    start: Callable[[Callable[[Any], Any], Any, Any, Iterable[Invariant]], Trial]
    draw_config: Callable[[int, Any], Any]
    draw_features: Callable[[int, Any], tuple[str, ...]]
    draws: Callable[[Any, Any], Draws]
    weights: dict[str, tuple[tuple[type[Operation], int], ...]]
    simpler_configs: Callable[[Any], Iterator[Any]]
    probes: dict[str, tuple[type[Operation], ...]]

    def invariants(self, capabilities: Any) -> tuple[Invariant, ...]:
        """Those that are checked for a subject of these capabilities."""
        return tuple(item for item in of_contract(self.name) if not item.missing(capabilities))

    def operations(self, capabilities: Any) -> tuple[type[Operation], ...]:
        """The operations that are tried on such a subject."""
        features = ("", "hostile", *capabilities.declared)
        kinds = [kind for feature in features for kind, _ in self.weights.get(feature, ())]
        return tuple(dict.fromkeys(kinds))

    def warm_up(self, make: Callable[[Any], Any], config: Any) -> None:
        """Make a subject once, and forget it: what loads libraries does so now, and not within the limit of a run."""
        with suppress(Exception, Hanging), alarm(WARM_UP_LIMIT_S):
            make(config)

    def execute(
        self,
        make: Callable[[Any], Any],
        config: Any,
        capabilities: Any,
        invariants: Sequence[Invariant],
        operations: Sequence[Operation],
        *,
        drain: bool = True,
        twice: bool = False,
        limit_s: float | None = None,
        watch: Callable[[Operation, Trial], None] | None = None,
    ) -> Trial:
        """Run the operations on a fresh subject, then drain it. Raises Violation, also if the subject raises or hangs; its `trial`
        says how far that came.

        With `twice`, a second subject goes through the same, and must answer the same. `watch` is called after each operation.
        """
        limit_s = RUN_LIMIT_S if limit_s is None else limit_s
        first = self._execute_once(make, config, capabilities, invariants, operations, drain, limit_s, watch)
        over_runs = [item for item in invariants if item.when == "R"]
        if twice and over_runs:
            second = self._execute_once(make, config, capabilities, invariants, operations, drain, limit_s, None)
            for item in over_runs:
                outcome = item.check((first.transcript, second.transcript))
                first.evaluations[first.invariants.index(item)] += 1
                if isinstance(outcome, Finding):
                    raise Violation("the same operations again", [Broken(item.id, outcome)])
        return first

    def _execute_once(self, make, config, capabilities, invariants, operations, drain, limit_s, watch) -> Trial:
        trial = None
        try:
            with alarm(limit_s):
                trial = self.start(make, config, capabilities, invariants)
                apply = trial.apply
                for operation in operations:
                    if apply(operation) and watch is not None:
                        watch(operation, trial)
                if drain:
                    trial.drain()
        except Hanging:
            at = trial.operation if trial is not None else "make"
            finding = Finding(f"{at} did not return within {limit_s:g} s", "an answer", MISBEHAVIOURS["HANGS"])
            violation = Violation(at, [Broken("HANGS", finding)])
            violation.trial = trial
            raise violation from None
        except Violation as violation:
            violation.trial = trial
            raise
        return trial


# -- allocator --------------------------------------------------------------------------------------------------------


def _start_allocator(make, config, capabilities, invariants) -> AllocatorTrial:
    try:
        subject = make(config)
    except Exception as error:
        finding = Finding(
            f"make({config}) raised {type(error).__name__}: {error}", "an allocator", MISBEHAVIOURS["RAISES"]
        )
        raise Violation("make", [Broken("RAISES", finding)]) from error
    return AllocatorTrial(subject, config, capabilities, invariants)


def _simpler_allocators(config: AllocatorConfig) -> Iterator[AllocatorConfig]:
    for size in sorted({1, 2, config.page_size // 2, config.page_size - 1}):
        if 1 <= size < config.page_size:
            yield replace(config, page_size=size, row_width=config.row_width // config.page_size * size)
    for pages in sorted({1, 2, config.num_pages - 1}):
        if 1 <= pages < config.num_pages:
            yield replace(config, num_pages=pages)
    if config.num_rows > 1:
        yield replace(config, num_rows=config.num_rows - 1)
    if config.row_width > config.page_size:
        yield replace(config, row_width=config.row_width - config.page_size)


ALLOCATOR = Suite(
    name="allocator",
    config=AllocatorConfig,
    capabilities=AllocatorCapabilities,
    start=_start_allocator,
    draw_config=draw_config,
    draw_features=draw_features,
    draws=AllocatorDraws,
    weights=WEIGHTS,
    simpler_configs=_simpler_allocators,
    probes={"ALLOC-10": (ops.FreeStray, ops.FreeTwice)},
)

SUITES: dict[str, Suite] = {suite.name: suite for suite in (ALLOCATOR,)}

PLANNED = ("prefix-cache", "relay", "accept", "step-controller", "engine", "executor", "transport")
"""Contracts of the catalogue that have no suite yet."""


def suite_of(contract: str, source: str = "contract") -> Suite:
    """The suite of a contract; raises ConfigError for one that is not there, and says so for one that is not there yet."""
    if contract in SUITES:
        return SUITES[contract]
    if contract in PLANNED:
        what = f"the contract {contract} has no suite yet; there is {', '.join(SUITES)}"
    else:
        what = f"there is no contract {contract!r}{nearest(contract, SUITES)}; there is {', '.join(SUITES)}"
    raise ConfigError(source, [Problem("", what)])
