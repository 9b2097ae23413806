"""What the commands print that check engines, logs and endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...observe.output_files import Document


@dataclass(frozen=True)
class LosslessDocument(Document):
    """A comparison of endpoints (`check server`).

    Attributes:
        lossless: Whether no error was found.
        endpoints: By its role, the address, the model and what it offers.
        settings: Prompts, tokens, repetitions and the margin of a tie.
        outcome: Counts, and every finding with both texts and all log-probabilities.
    """

    FORMAT: ClassVar[str] = "foredraft-lossless"

    lossless: bool
    endpoints: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    outcome: Mapping[str, Any]


@dataclass(frozen=True)
class ReplayDocument(Document):
    """A replay of a log.

    Attributes:
        identical: Whether every decision is.
        decisions: Identical ones before the first difference, or all.
        results: Results that were fed back.
        replicas: Engines.
        complete: Whether the log ends as a whole run does.
        difference: The first difference, in words; null if there is none.
    """

    FORMAT: ClassVar[str] = "foredraft-replay"

    identical: bool
    decisions: int
    results: int
    replicas: int
    complete: bool
    difference: str | None


@dataclass(frozen=True)
class CheckDocument(Document):
    """Components checked against their invariants.

    Attributes:
        ok: Whether none of the components broke one.
        components: A report each, or why it was skipped.
    """

    FORMAT: ClassVar[str] = "foredraft-check"

    ok: bool
    components: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class MutantsDocument(Document):
    """Planted defects (`check --mutants`).

    Attributes:
        ok: Whether every defect was found.
        contracts: By contract, its defects and how each was found.
    """

    FORMAT: ClassVar[str] = "foredraft-mutants"

    ok: bool
    contracts: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class InvariantLine:
    """An invariant and how it is checked."""

    id: str
    group: str
    sentence: str
    how: str


@dataclass(frozen=True)
class InvariantsDocument(Document):
    """Every invariant, or those of one contract (`check --list`)."""

    FORMAT: ClassVar[str] = "foredraft-invariants"

    invariants: Sequence[InvariantLine]


@dataclass(frozen=True)
class CaseDocument(Document):
    """A stored case that ran again (`check --replay`).

    Attributes:
        case: Its file.
        contract: The contract of its component.
        subject: The component.
        history: The operations, in words.
        holds: Whether the invariant holds now.
        broken: The invariants that broke: id, sentence, what was, what should be and why.
        ends_in: Where they broke; null if the invariant holds.
    """

    FORMAT: ClassVar[str] = "foredraft-case"

    case: str
    contract: str
    subject: str
    history: Sequence[str]
    holds: bool
    broken: Sequence[Mapping[str, Any]]
    ends_in: str | None


@dataclass(frozen=True)
class AuditDocument(Document):
    """Contradictions in a log.

    Attributes:
        ok: Whether there is none.
        report: What was read, which invariants were evaluated, and every contradiction with its line.
    """

    FORMAT: ClassVar[str] = "foredraft-audit"

    ok: bool
    report: Mapping[str, Any]
