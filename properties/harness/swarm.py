"""The seeded swarm: many short runs, each with a configuration of its own and some kinds of operations left out at
random.

A run is a function of (seed, number of the run), so a failure can be repeated. Leaving kinds out matters as much as
drawing them: a sequence with no frees at all, or with nothing but one kind, reaches states that an even mix does not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.draws import Purpose, hash64
from ...core.errors import ConfigError
from .contract import parts_of
from .invariants import Invariant, clauses_of, collected
from .letters import Vocabulary, draw, kept_features
from .operation import Operation
from .suite import Component
from .trial import Trial, Violation

REPEAT_EVERY = 16  # every so many runs the same operations run twice, for what must hold over runs
_KEPT_VOCABULARIES = 512


@dataclass(frozen=True, slots=True)
class Budget:
    """How long to go on: a number of operations, or seconds of wall time. Only the first gives the same runs
    everywhere.

    `is_extended`: `conformance.check` goes on past this budget, up to the contract's quick one, until every operation
    has happened."""

    operations: int | None = None
    seconds: float | None = None
    is_extended: bool = False

    @classmethod
    def of(cls, text: str | int | Budget) -> Budget:
        """Read a budget: 200000, "200000", "60s" or "2m". Raises ConfigError for anything else."""
        if isinstance(text, Budget):
            return text
        match = re.fullmatch(r"(\d[\d_,]*|\d+\.\d+)(s|m)?", str(text).strip())
        amount = float(match[1].replace(",", "").replace("_", "")) if match else 0.0
        if amount <= 0 or (match[2] is None and amount != int(amount)):
            what = f"expected a number of operations (200000) or a time (60s, 2m), got {text!r}"
            raise ConfigError.of("budget", "", what)
        if match[2] is None:
            return cls(operations=int(amount))
        # How much fits into a time is the machine's affair. What is rare gets the operations of the quick budget to
        # happen in.
        return cls(seconds=amount * (60 if match[2] == "m" else 1), is_extended=True)

    def is_spent(self, operations: int, seconds: float) -> bool:
        if self.operations is not None:
            return operations >= self.operations
        return seconds >= self.seconds

    def divided(self, parts: int) -> Budget:
        """Return an equal share of the budget."""
        if self.operations is not None:
            return replace(self, operations=max(self.operations // parts, 1))
        return replace(self, seconds=self.seconds / parts)

    def __str__(self) -> str:
        return f"{self.operations:,} operations" if self.operations is not None else f"{self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class Found:
    """A failing run, as it was drawn; `choices` are those of its configuration."""

    seed: int
    run: int
    config: Any
    operations: tuple[Operation, ...]
    violation: Violation
    choices: tuple[int, ...] = ()


class Swarm:
    """Random runs of one subject. `search` goes on from where the last one stopped, so that it can be called again
    after a failure."""

    def __init__(self, component: Component, seed: int, left_out: Sequence[type[Operation]] = ()) -> None:
        self.component = component
        self.seed = seed
        self.num_runs: int = 0
        self.num_operations: int = 0
        self.seconds: float = 0.0
        self.evaluations: dict[str, int] = {}
        self.executed: dict[type[Operation], int] = {}
        promised = component.suite.trial.parts.items()
        of_contract = [part for part, needed in promised if not needed or getattr(component.capabilities, needed)]
        self.used: dict[str, int] = dict.fromkeys((*of_contract, *parts_of(component.make)), 0)
        self._vocabularies: dict[Any, Vocabulary] = {}
        self.left_out = tuple(left_out)  # kinds that are never drawn
        self.kinds = tuple(kind for kind in component.operations if kind not in left_out)
        # What only operations that are left out would evaluate is not checked.
        self.enabled = tuple(item for item in component.invariants if any(map(item.concerns, (*self.kinds, str))))
        self._clauses = {item.id: clauses_of(item.check) for item in self.enabled}
        self._reached: set[int] = set()

    def search(
        self,
        invariants: Sequence[Invariant],
        budget: Budget,
        without: Sequence[type[Operation]] = (),
        progress: Callable[[Swarm], None] | None = None,
        until: Callable[[], bool] = lambda: False,
    ) -> Found | None:
        """Run until the budget is spent or `until` says so (None), or until one run fails."""
        before_s = self.seconds
        begin = time.perf_counter()
        while not budget.is_spent(self.num_operations, self.seconds) and not until():
            run = self.num_runs
            self.num_runs += 1
            config, operations = self.drawn(run, without)
            try:
                with collected(self._reached):
                    trial = self._execute(config, invariants, operations, twice=run % REPEAT_EVERY == 0)
            except Violation as violation:
                if violation.trial is not None:
                    self._count(violation.trial)
                return Found(self.seed, run, config, tuple(operations), violation, self._configured(run)[1])
            finally:
                self.seconds = before_s + time.perf_counter() - begin
            self._count(trial)
            if progress is not None:
                progress(self)
        return None

    def _execute(self, config: Any, invariants: Sequence[Invariant], operations: list[Operation], twice: bool) -> Trial:
        """Execute a run. One that hangs is executed once more: a machine that stalls is no fault of the component."""
        try:
            return self.component.execute(config, operations, invariants, twice=twice)
        except Violation as violation:
            if violation.id != "HANGS":
                raise
        return self.component.execute(config, operations, invariants, twice=twice)

    @property
    def is_restricted(self) -> bool:
        """Whether the subject does not go through all that its capabilities allow."""
        return bool(self.left_out) or hasattr(self.component.make, "supports") or self.component.suite.draws_a_part

    def vacuous(self) -> tuple[str, ...]:
        """Return what is enabled but has not happened so far: invariants never evaluated, operations never carried
        out, optional parts never used."""
        never = [f"{item.id} was never evaluated" for item in self.enabled if not self.evaluations.get(item.id)]
        return (
            *never,
            *(f"the operation {kind.tag} never happened" for kind in self.kinds if not self.executed.get(kind)),
            *(f"never used: {part}" for part in self.unused()),
        )

    def unused(self) -> tuple[str, ...]:
        """Return the optional parts that no run has used."""
        return tuple(part for part, count in self.used.items() if not count)

    def unreached(self) -> dict[str, tuple[str, ...]]:
        """Return, of the invariants that were evaluated, the clauses that no run has come to."""
        found = {
            id: tuple(str(clause) for clause in clauses if clause.number not in self._reached)
            for id, clauses in self._clauses.items()
            if self.evaluations.get(id)
        }
        return {id: clauses for id, clauses in found.items() if clauses}

    def unexercised(self) -> tuple[str, ...]:
        """Return the invariants that were evaluated, and of which no run has come to any clause."""
        return tuple(id for id, clauses in self.unreached().items() if len(clauses) == len(self._clauses[id]))

    def _count(self, trial: Trial) -> None:
        self.num_operations += trial.num_operations
        for item, count in zip(trial.invariants, trial.evaluations, strict=True):
            self.evaluations[item.id] = self.evaluations.get(item.id, 0) + count
        for kind, count in trial.executed.items():
            self.executed[kind] = self.executed.get(kind, 0) + count
        used = trial.all_used()
        self.used = {part: count + used.get(part, 0) for part, count in self.used.items()}

    def drawn(self, run: int, without: Sequence[type[Operation]] = ()) -> tuple[Any, list[Operation]]:
        """Return the configuration and the operations of a run."""
        config, _ = self._configured(run)
        vocabulary = self._vocabularies.get(config)
        if vocabulary is None:
            if len(self._vocabularies) >= _KEPT_VOCABULARIES:
                self._vocabularies.clear()
            vocabulary = self._vocabularies[config] = self.component.vocabulary(config)
        features = kept_features(vocabulary, self._bits(run, 0) >> 32)
        without = (*without, *self.left_out)
        return config, draw(vocabulary, self.seed, run, self.component.suite.run_length, features, without)

    def _configured(self, run: int) -> tuple[Any, tuple[int, ...]]:
        """Return a run's configuration, the first one drawn that the subject supports, and its choices."""
        return self.component.first_supported(lambda attempt: self._bits(run, attempt))

    def _bits(self, run: int, attempt: int) -> int:
        return int(hash64(self.seed, Purpose.SWARM, run, attempt))
