"""What an audit finds, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..harness.contract import SUITE_VERSION
from ..harness.invariants import invariant

MAX_FINDINGS = 100
"""How many flaws are kept; all are counted."""

AUDITED: dict[str, str] = {
    "ALLOC-01": "a plan says how many slots are held, and the engine how many there are",
    "ALLOC-06": "a request is given a row",
    "RELAY-01": "a row is released",
    "RELAY-03": "a request is given a row",
    "RELAY-05": "the executor writes down the tokens",
    "RELAY-07": "a step is launched, committed or lost",
    "RADIX-13": "a request starts from the prefix cache",
    "ACCEPT-02": "a decode step is committed",
    "DRAFT-02": "a decode step with a budget is committed",
    "DRAFT-03": "a decode step with a budget is committed",
    "ACCEPT-10": "a request ends at a stop",
    "ACCEPT-11": "a request ends at a stop or at its length",
    "ACCEPT-12": "a request ends at a stop or at its length",
    "STEPS-01": "the header says which numbers of steps there are to choose from",
    "ENGINE-01": "a plan says how many requests wait",
    "ENGINE-02": "a request changes its state",
    "ENGINE-03": "a retracted request begins again",
    "ENGINE-05": "a step is planned, and the engine says its limits",
    "ENGINE-08": "a request is accepted, and the engine says how long a text may be",
    "ENGINE-12": "an id is submitted while a live request has it",
    "ENGINE-13": "a request is aborted",
    "ENGINE-14": "a prompt is computed in chunks",
    "ENGINE-16": "a request enters while others of its priority wait",
    "HANDOFF-01": "a request decodes from KV that was received",
    "HANDOFF-02": "a row is given or released while transfers hold some",
    "HANDOFF-04": "a transfer ends",
    "HANDOFF-10": "an engine changes its role",
    "SIM-02": "anything happens",
    "SIM-03": "a request ends after its first token",
    "SIM-12": "a decode step is committed",
}
"""Invariant -> what must be in a log for it to be evaluated."""


class Flaw(NamedTuple):
    """One contradiction: the broken invariant, the line of the log, the engine, what was and what should have been."""

    id: str
    line: int
    replica: int
    was: str
    should: str


@dataclass(slots=True)
class Tally:
    """Counts how often each invariant was evaluated, and keeps the flaws.
    `line`, `replica`: of the record that is being audited."""

    evaluations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AUDITED, 0))
    flaws: list[Flaw] = field(default_factory=list)
    num_flaws: int = 0
    line: int = 0
    replica: int = 0

    def holds(self, id: str) -> None:
        self.evaluations[id] += 1

    def flaw(self, id: str, was: str, should: str) -> None:
        self.evaluations[id] += 1
        self.num_flaws += 1
        if len(self.flaws) < MAX_FINDINGS:
            self.flaws.append(Flaw(id, self.line, self.replica, was, should))

    def check(self, id: str, holds: object, was: str, should: str) -> None:
        if holds:
            self.evaluations[id] += 1
        else:
            self.flaw(id, was, should)


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of one audit."""

    path: str
    complete: bool  # the log has its last line, and it says that the run was complete
    num_records: int
    num_replicas: int
    num_requests: int
    num_tokens: int
    evaluations: dict[str, int]
    not_audited: dict[str, int]  # kind of record that is not audited -> how many there are
    flaws: tuple[Flaw, ...]
    num_flaws: int

    @property
    def ok(self) -> bool:
        return not self.num_flaws

    def text(self, limit: int = 10) -> str:
        replicas = f"{self.num_replicas} engine{'s' if self.num_replicas != 1 else ''}"
        lines = [
            f"{self.path}: {self.num_records:,} records, {replicas}, {self.num_requests:,} requests, "
            f"{self.num_tokens:,} tokens delivered"
        ]
        for flaw in self.flaws[:limit]:
            lines += [
                "",
                f"{flaw.id}  {invariant(flaw.id).sentence}",
                f"  at     line {flaw.line}, replica {flaw.replica}",
                f"  was    {flaw.was}",
                f"  should {flaw.should}",
            ]
        if self.num_flaws:
            lines.append("")
        if self.num_flaws > limit:
            lines.append(f"and {self.num_flaws - limit:,} more, which may follow from the first")
        broken = {flaw.id for flaw in self.flaws}
        held = [f"{id} {count:,}" for id, count in self.evaluations.items() if count and id not in broken]
        lines.append(f"held: {', '.join(held) or 'none'}")
        lines += [
            f"not evaluated: {id}, since nowhere in the log {AUDITED[id]}"
            for id, count in self.evaluations.items()
            if not count
        ]
        if self.not_audited:
            kinds = ", ".join(f"{kind} ({count:,})" for kind, count in self.not_audited.items())
            lines.append(f"not looked into: {kinds}")
        if not self.complete:
            lines.append("the run itself did not end as it should: what was still open is not a contradiction")
        count = "1 contradiction" if self.num_flaws == 1 else f"{self.num_flaws:,} contradictions"
        lines.append(f"FAILED: {count}" if self.num_flaws else "ok")
        return "\n".join(lines)

    def to_json(self) -> Mapping[str, Any]:
        return {
            "suite": SUITE_VERSION,
            "ok": self.ok,
            "log": self.path,
            "complete": self.complete,
            "records": self.num_records,
            "replicas": self.num_replicas,
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "invariants": {
                id: {"sentence": invariant(id).sentence, "evaluations": count} for id, count in self.evaluations.items()
            },
            "not_looked_into": self.not_audited,
            "num_findings": self.num_flaws,
            "findings": [
                {
                    "invariant": flaw.id,
                    "sentence": invariant(flaw.id).sentence,
                    "line": flaw.line,
                    "replica": flaw.replica,
                    "was": flaw.was,
                    "should": flaw.should,
                }
                for flaw in self.flaws
            ],
        }
