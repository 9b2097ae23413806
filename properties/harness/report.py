"""What a check found, for people and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.errors import count_of
from .cases import Case, Story
from .contract import SUITE_VERSION
from .invariants import Finding, invariant


def history_lines(history: Sequence[str], calls: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a history: each operation, and under it the calls that the component received."""
    lines = []
    for number, line in enumerate(history):
        lines.append(f"  {number + 1:>3}. {line}")
        lines += [f"         {call}" for call in (calls[number] if number < len(calls) else ())]
    return lines


def outcome_of(case: Case, story: Story) -> list[str]:
    """Return the lines about a case that was run again."""
    lines = history_lines(story.history, story.calls)
    if story.violation is None:
        return [*lines, f"{case.invariant} holds: the case does not fail (any more)."]
    for broken in story.violation.broken:
        found = broken.finding
        lines += [f"{broken.id}  {broken.sentence}", f"  at     {story.ends_in}", f"  was    {found.was}"]
        lines += [f"  should {found.should}", f"  why    {found.why}"]
    return lines


@dataclass(frozen=True, slots=True)
class Failure:
    """One broken invariant (or misbehaviour), with the shortest history that was found to break it."""

    id: str
    sentence: str
    finding: Finding
    also: tuple[str, ...]
    case: Case
    operations_before: int
    history: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...]
    ends_in: str
    control: str = ""  # our component that goes through the same operations, if there is one that can
    is_disputed: bool = False  # every such history fails on that one, too: the suite is wrong here, not the component
    is_repeatable: bool = True  # False: the same operations, run again, did not fail
    expected: str = ""  # the reason, for a failure that was announced

    def text(self, replay: str = "") -> str:
        case = self.case
        sizes = ", ".join(f"{name} {value}" for name, value in asdict(case.config).items())
        shrunk = f"{self.operations_before} operations, {len(case.operations)} after shrinking"
        if not self.is_repeatable:
            shrunk = f"{self.operations_before} operations, which did not fail when they ran again"
        lines = [
            *self._dispute(),
            f"{self.id}  {self.sentence}",
            f"  seed {case.seed}, run {case.run}: {shrunk}",
            f"  {case.subject}: {sizes}",
            *history_lines(self.history, self.calls),
            f"  at     {self.ends_in}",
            f"  was    {self.finding.was}",
            f"  should {self.finding.should}",
            f"  why    {self.finding.why}",
        ]
        if not self.is_repeatable:
            lines.append(
                "  unrepeatable: the component depends on something beside its operations, such as time, chance or state "
                "that other runs share"
            )
        if self.also:
            lines.append(f"  also broken at the same point: {', '.join(self.also)}")
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if replay:
            lines.append(f"  replay {replay}")
        return "\n".join(lines)

    def _dispute(self) -> list[str]:
        if not self.is_disputed:
            return []
        return [
            f"A defect of this suite, not of the component: {self.control} fails in the same way. Please report the case."
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "invariant": self.id,
            "sentence": self.sentence,
            "was": self.finding.was,
            "should": self.finding.should,
            "why": self.finding.why,
            "also": list(self.also),
            "at": self.ends_in,
            "operations_before_shrinking": self.operations_before,
            "history": list(self.history),
            "calls": [list(calls) for calls in self.calls],
            "control": self.control,
            "disputed": self.is_disputed,
            "repeatable": self.is_repeatable,
            "expected": self.expected,
            "case": self.case.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The whole of one check. It is `ok` if exactly the announced failures occurred, every enabled check was made at
    least once, and no invariant is disputed: one that the suite cannot judge is not proved."""

    contract: str
    subject: str
    capabilities: tuple[str, ...]
    seed: int
    num_runs: int
    num_operations: int
    seconds: float
    evaluations: dict[str, int]  # of every enabled invariant
    executed: dict[str, int]  # of every enabled operation
    skipped: dict[str, str]  # invariant -> why it is not checked
    failures: tuple[Failure, ...]
    expected: tuple[Failure, ...]  # failures that were announced
    disputed: tuple[Failure, ...]  # failures that our own component has, too
    held: tuple[str, ...]  # announced as failing, but holding
    vacuous: tuple[str, ...]  # enabled, but never evaluated or never happened
    unreached: dict[str, tuple[str, ...]]  # invariant that was evaluated -> its clauses that no run came to
    unexercised: tuple[str, ...]  # invariants of which no run came to any clause
    parts: dict[str, int]  # optional part -> how often a run used it

    @property
    def ok(self) -> bool:
        return not (self.failures or self.held or self.vacuous or self.disputed)

    @property
    def shown(self) -> tuple[Failure, ...]:
        """All failures, in the order in which they are shown."""
        return (*self.failures, *self.expected, *self.disputed)

    def text(self, replay: Mapping[str, str] | None = None) -> str:
        """Format the report for people. `replay`: invariant -> the command that runs its case again."""
        rate = self.num_operations / self.seconds if self.seconds else 0.0
        operations = count_of(self.num_operations, "operation")
        lines = [
            f"{self.contract}: {self.subject} (seed {self.seed}, suite {SUITE_VERSION})",
            f"capabilities: {', '.join(self.capabilities) or 'none'}",
            f"{operations} in {count_of(self.num_runs, 'run')}, {self.seconds:.1f} s ({rate:,.0f} per second)",
        ]
        for failure in self.shown:
            lines += ["", failure.text((replay or {}).get(failure.id, ""))]
        if self.shown:
            lines.append("")
        for id in self.held:
            found = f"it held in {self.evaluations.get(id, 0):,} evaluations"
            if id in self.skipped:
                found = f"it is not checked: {self.skipped[id]}"
            lines.append(f"{id}: expected to fail, but {found}")
        lines += [f"vacuous: {what}" for what in self.vacuous]
        broken = [id for failure in self.shown for id in (failure.id, *failure.also)]
        held = [id for id, count in self.evaluations.items() if count and id not in (*broken, *self.unexercised)]
        label = f"not broken in {operations}" if self.failures else "held"
        lines.append(f"{label}: {', '.join(held) or 'none'}")
        if self.unexercised:
            lines.append(f"not exercised: {', '.join(self.unexercised)} (nothing that they are about has happened)")
        unused = [part for part, count in self.parts.items() if not count]
        if unused and not (self.vacuous or self.failures):
            lines.append(f"never used: {', '.join(unused)}")
        lines += [f"skipped: {id} ({why})" for id, why in self.skipped.items()]
        lines.append("FAILED: " + "; ".join(self.reasons()) if not self.ok else "ok")
        return "\n".join(lines)

    def reasons(self) -> list[str]:
        """Return why it is not ok, in a few words each."""
        reasons = [f"{failure.id} is broken" for failure in self.failures]
        reasons += [f"{id} was expected to fail and held" for id in self.held]
        reasons += [f"{failure.id} could not be judged, by a defect of this suite" for failure in self.disputed]
        if self.vacuous:
            reasons.append(f"{len(self.vacuous)} things were enabled and never happened")
        return reasons

    def in_short(self) -> str:
        """Return the outcome in a line: what is wrong, or what is broken as announced and that the rest holds."""
        if not self.ok:
            return "; ".join(self.reasons())
        ids = [failure.id for failure in self.expected]
        return f"{len(ids)} broken as expected ({', '.join(ids)}), the others hold" if ids else "all hold"

    def case_name(self, failure: Failure) -> str:
        """Return the name under which the command line stores a failure's case."""
        return f"{self.contract}-{failure.id}.case.json"

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": SUITE_VERSION,
            "ok": self.ok,
            "contract": self.contract,
            "subject": self.subject,
            "capabilities": list(self.capabilities),
            "seed": self.seed,
            "runs": self.num_runs,
            "operations": self.num_operations,
            "seconds": round(self.seconds, 3),
            "invariants": {
                id: {"sentence": invariant(id).sentence, "evaluations": count} for id, count in self.evaluations.items()
            },
            "executed": self.executed,
            "skipped": self.skipped,
            "failures": [failure.to_json() for failure in self.failures],
            "expected_failures": [failure.to_json() for failure in self.expected],
            "disputed_failures": [failure.to_json() for failure in self.disputed],
            "held_but_expected_to_fail": list(self.held),
            "vacuous": list(self.vacuous),
            "unexercised": list(self.unexercised),
            "parts": self.parts,
            "unreached": {id: list(clauses) for id, clauses in self.unreached.items()},
        }


TEST = """\
from pathlib import Path

from foredraft.properties.conformance import check_case


def test_{name}():
    check_case(Path(__file__).with_name("{file}"){make})
"""


def left_behind(failure: Failure, folder: Path) -> str:
    """Store the case of a failed test. Returns how it is run again: the command, and a test to put beside the case."""
    case = failure.case
    subject = re.sub(r"\W+", "-", case.subject).strip("-")
    path = folder / f"{subject}-{failure.id}.case.json"
    # What a function or a lambda has made cannot be imported by its name.
    is_named = ":" in case.subject and "<" not in case.subject
    make = "" if is_named else ", make"  # of the failed test
    try:
        case.save(path)
    except OSError as error:
        return f"the case cannot be written to {path}: {error.strerror}"
    line = "" if is_named else f"{case.contract} MODULE:MAKE "
    test = TEST.format(name=failure.id.lower().replace("-", "_"), file=path.name, make=make)
    return f"replay foredraft check {line}--replay {path}\n\n{test}"


class PropertiesBroken(AssertionError):
    """A check has failed; `report` says how, `failures` are those that are to be seen."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report
        self.failures = report.shown

    def __str__(self) -> str:
        return "\n" + self.report.text()


class InvariantBroken(AssertionError):
    """One invariant is broken in a test of its own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failures = (failure,)

    def __str__(self) -> str:
        return "\n" + self.failures[0].text()
