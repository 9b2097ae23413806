"""Make a long failing run a short one that fails in the same way.

First whole stretches of operations are left out (delta debugging: Zeller and Hildebrandt, "Simplifying and isolating
failure-inducing input", IEEE TSE 28(2), 2002), then single ones. Then the arguments and the configuration are made
simpler until nothing can be. Every attempt is a run of its own on a fresh subject, and so is the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .cases import Case
from .contract import MISBEHAVIOURS, Adapter
from .importing import NotInstalled, load_make, resolved
from .invariants import Invariant, invariant
from .letters import Choices, simpler_choices, translated
from .operation import Operation, renamed, simpler
from .report import Failure
from .suite import Component
from .swarm import Found
from .trial import Violation

MAX_ATTEMPTS = 4000
MAX_HANGING_ATTEMPTS = 40
HANG_LIMIT_S = 0.1


def control_of(component: Component, subject: str) -> tuple[str, Component] | None:
    """Return the plainest component of ours that can do all that this one can, behind its import string. None from the
    module of `subject` itself: a defect of both would be called one of the suite."""
    module = resolved(subject).partition(":")[0]
    for name in component.suite.controls:
        if name.partition(":")[0] == module:
            continue
        try:
            make = load_make(name)
        except NotInstalled:
            continue
        if component.suite.component(make).capabilities.covers(component.capabilities):
            return name, component.suite.component(Adapter(make, component.capabilities, None))
    return None


class Shrinker:
    """Shrinks one failure; `operations` and `config` are the best so far, `drain` says whether draining them is part of
    it.

    Only a run that fails in the same way counts. Its first failure must have the id of the one that was found and, for
    a misbehaviour, the same kind, such as the same error from the same call. And `control`, a component of ours, must
    pass it: if `control` fails too, the failure is no fault of the component. `is_disputed` says that there was no such
    run. `is_repeatable` is False if the failure does not happen again when the operations that were found run again.
    """

    def __init__(
        self, component: Component, invariants: Sequence[Invariant], found: Found, control: Component | None = None
    ) -> None:
        self.component = component
        self.id, self.kind = found.violation.id, found.violation.broken[0].kind
        # What else is checked would only stop a run before the failure that is wanted.
        wanted = [item for item in invariants if item.id == self.id]
        self.invariants = wanted if self.id not in MISBEHAVIOURS else list(invariants)
        self.twice = self.id not in MISBEHAVIOURS and bool(invariant(self.id).twin)
        self.config = found.config
        self.operations = list(found.operations)
        self.drain = True
        self._choices = list(found.choices)
        self._trace = list(found.violation.trial.trace) if found.violation.trial is not None else []
        self.attempts_left = MAX_HANGING_ATTEMPTS if self.id == "HANGS" else MAX_ATTEMPTS
        self.control = control
        self.is_disputed = control is not None
        self.is_repeatable = True

    def shrink(self) -> None:
        """Make it as small as it gets within a bounded number of attempts."""
        if self._violation(self.config, self.operations) is None:
            self.is_repeatable = self.is_disputed = False  # so there is nothing to dispute
            return
        self._keeps(self.config, self.operations)
        self._shrink()
        if self.is_disputed:
            self.control = None
            self.attempts_left = MAX_HANGING_ATTEMPTS if self.id == "HANGS" else MAX_ATTEMPTS
            self._shrink()

    def _shrink(self) -> None:
        # Draining is many operations that the case does not list: a case without it is easier to read.
        self.drain = False
        if not self._keeps(self.config, self._trace):
            self.drain = True
        self._leave_out()
        while self.attempts_left > 0 and (self._simplify_config() | self._simplify_arguments()):
            self._leave_out()
        self._keeps(self.config, renamed(self.operations))

    def _violation(self, config: Any, operations: Sequence[Operation]) -> Violation | None:
        """Return the wanted failure of an attempt, None if it passes or fails in another way."""
        self.attempts_left -= 1
        how = {"drain": self.drain, "twice": self.twice, "limit_s": HANG_LIMIT_S if self.id == "HANGS" else None}
        try:
            self.component.execute(config, operations, self.invariants, **how)
        except Violation as violation:
            first = violation.broken[0]
            return violation if (first.id, first.kind) == (self.id, self.kind) else None
        return None

    def _keeps(self, config: Any, operations: list[Operation]) -> bool:
        """Adopt this configuration and these operations if they still fail in the same way. Returns whether they do."""
        violation = self._violation(config, operations) if self.attempts_left > 0 else None
        if violation is None:
            return False
        if self.control is not None:
            # What would come after the failure says nothing about it.
            if not self.drain and not self.twice and violation.trial is not None:
                operations = list(violation.trial.trace)
            try:
                self.control.execute(config, operations, drain=self.drain, twice=self.twice)
            except Violation:
                return False
            self.is_disputed = False
        self.config, self.operations = config, operations
        return True

    def _leave_out(self) -> None:
        """Remove stretches of operations, halves first, then ever shorter ones, down to single ones."""
        length = max(len(self.operations) // 2, 1)
        while length >= 1:
            at = 0
            removed = False
            while at < len(self.operations):
                if self._keeps(self.config, self.operations[:at] + self.operations[at + length :]):
                    removed = True
                else:
                    at += length
            if length == 1 and not removed:
                return
            length = max(length // 2, 1)

    def _simplify_arguments(self) -> bool:
        changed = False
        at = 0
        while at < len(self.operations):
            for candidate in simpler(self.operations[at], self.operations[:at]):
                if self._keeps(self.config, [*self.operations[:at], candidate, *self.operations[at + 1 :]]):
                    changed = True
                    break
            else:
                at += 1
        return changed

    def _simplify_config(self) -> bool:
        """Make the configuration simpler, and the operations with it: two pages stay two pages if pages become
        smaller."""
        changed = False
        while any(self._takes(*attempt) for attempt in self._simpler_configs()):
            changed = True
        return changed

    def _simpler_configs(self) -> Iterator[tuple[list[int], Any]]:
        """Yield simpler configurations, each with its choices."""
        for given in simpler_choices(self._choices):
            choose = Choices(given=given)
            config = self.component.configure(choose)
            if config != self.config and self.component.supports(config):
                yield choose.taken, config

    def _takes(self, choices: list[int], config: Any) -> bool:
        """Take a configuration over if the operations, as they are or as they read there, still fail under it."""
        before, after = self.component.vocabulary(self.config), self.component.vocabulary(config)
        there = [translated(operation, before, after) for operation in self.operations]
        if self._keeps(config, there) or (there != self.operations and self._keeps(config, self.operations)):
            self._choices = choices
            return True
        return False


def explain(
    component: Component,
    invariants: Iterable[Invariant],
    found: Found,
    subject: str,
    announced: Mapping[str, str] | None = None,
) -> Failure:
    """Shrink a failing run and tell its story."""
    control, ours = control_of(component, subject) or ("", None)
    shrinker = Shrinker(component, list(invariants), found, ours)
    shrinker.shrink()
    id = found.violation.id
    case = Case(
        suite=component.suite,
        subject=subject,
        capabilities=component.capabilities.declared,
        config=shrinker.config,
        seed=found.seed,
        run=found.run,
        invariant=id,
        drain=shrinker.drain,
        operations=tuple(shrinker.operations),
    )
    story = case.tell(component.make)
    violation = story.violation or found.violation
    broken = next((item for item in violation.broken if item.id == id), found.violation.broken[0])
    return Failure(
        id=id,
        sentence=broken.sentence,
        finding=broken.finding,
        also=tuple(item.id for item in found.violation.broken[1:]),
        case=case,
        operations_before=max(len(found.operations), len(shrinker.operations)),
        history=story.history,
        calls=story.calls,
        ends_in=story.ends_in or str(violation.operation),
        control=control,
        is_disputed=shrinker.is_disputed,
        is_repeatable=shrinker.is_repeatable,
        expected=(announced or {}).get(id, ""),
    )
