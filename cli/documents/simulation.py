"""What the commands around simulations print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...observe.output_files import Document


@dataclass(frozen=True)
class SimulateDocument(Document):
    """A simulated run.

    Attributes:
        scenario: The scenario with all its values.
        summary: Every number of the run by its name (docs/simulate.md).
        directory: The directory of the run's files; null if there is none.
    """

    FORMAT: ClassVar[str] = "foredraft-simulate"

    scenario: Mapping[str, Any]
    summary: Mapping[str, Any]
    directory: str | None


@dataclass(frozen=True)
class DerivedNumber:
    """A number that follows from a scenario, and where it comes from."""

    name: str
    value: float | str
    unit: str
    source: str


@dataclass(frozen=True)
class ExplainDocument(Document):
    """A scenario and what follows from it (`simulate --explain`).

    Attributes:
        scenario: The scenario with all its values.
        sources: Where each value comes from that is no default, by key.
        derived: The numbers that follow.
        notices: What a user may not expect.
    """

    FORMAT: ClassVar[str] = "foredraft-explain"

    scenario: Mapping[str, Any]
    sources: Mapping[str, str]
    derived: Sequence[DerivedNumber]
    notices: Sequence[str]


@dataclass(frozen=True)
class SweptResult:
    """The mean of a result over seeds, and half of its 95 % interval (Student's t); null for one run."""

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Combination:
    """A combination of a sweep.

    Attributes:
        settings: The keys of the scenario that it replaces.
        runs: How many of its runs are done.
        results: The numbers of their summaries by name.
        problems: Why the other runs are not done.
    """

    settings: Mapping[str, Any]
    runs: int
    results: Mapping[str, SweptResult]
    problems: Sequence[str]


@dataclass(frozen=True)
class SweepDocument(Document):
    """A sweep.

    Attributes:
        scenario: Its name.
        seeds: Those of each combination.
        combinations: Their results, in the order of the grid.
        notices: What the command set itself.
        table: The Parquet file with a row per run.
    """

    FORMAT: ClassVar[str] = "foredraft-sweep"

    scenario: str
    seeds: Sequence[int]
    combinations: Sequence[Combination]
    notices: Sequence[str]
    table: str


@dataclass(frozen=True)
class ReportDocument(Document):
    """The page that `report` wrote.

    Attributes:
        page: Its file.
        bytes: Its size.
        figures: The names of its figures.
        pictures: The directory of their pictures; null without --png.
    """

    FORMAT: ClassVar[str] = "foredraft-report"

    page: str
    bytes: int
    figures: Sequence[str]
    pictures: str | None


@dataclass(frozen=True)
class TraceDocument(Document):
    """What a trace is like.

    Attributes:
        trace: The file.
        trace_format: Its format.
        inferred: How it is read where it does not say so.
        rows_without_work: Rows without prompt or output tokens, which are left out.
        unknown: What the trace does not tell.
        description: Rates, lengths, burstiness and prefix reuse.
        synthetic: The workload that was fitted to it, with its description; null without --out and --check.
        check: The results of simulating both; null without --check.
    """

    FORMAT: ClassVar[str] = "foredraft-trace"

    trace: str
    trace_format: str
    inferred: Sequence[str]
    rows_without_work: int
    unknown: Sequence[str]
    description: Mapping[str, Any]
    synthetic: Mapping[str, Any] | None
    check: Mapping[str, Mapping[str, Any]] | None


@dataclass(frozen=True)
class FittedStatistic:
    """A statistic of recorded rounds, and of rounds by the fit; null where the files do not tell it."""

    name: str
    recorded: float | None
    fitted: float | None


@dataclass(frozen=True)
class AcceptanceDocument(Document):
    """Acceptance fitted to what a server wrote.

    Attributes:
        recognised: What the files are.
        statistics: Recorded and fitted numbers.
        histogram_distance: Share of rounds with another number of accepted drafts in the fit; null for means.
        left_out: Kinds of records that cannot be used, with their counts.
        inferred: What the files do not say but imply, each with the reason.
        unknown: What the files do not tell.
        acceptance: The table `acceptance` of a scenario.
    """

    FORMAT: ClassVar[str] = "foredraft-acceptance"

    recognised: str
    statistics: Sequence[FittedStatistic]
    histogram_distance: float | None
    left_out: Mapping[str, int]
    inferred: Sequence[str]
    unknown: Sequence[str]
    acceptance: Mapping[str, Any]


@dataclass(frozen=True)
class MeasureDocument(Document):
    """The measured steps of Foredraft's own executor (`calibrate --model`).

    Attributes:
        file: The profile that was written.
        profile: Its content.
        closures: Served steps by how they were decoded: the seconds that they took, and those of the profile.
    """

    FORMAT: ClassVar[str] = "foredraft-measure"

    file: str
    profile: Mapping[str, Any]
    closures: Sequence[Mapping[str, Any]]
