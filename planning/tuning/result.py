"""The result of a search of draft steps, and the files that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from ...observe.output_files import Document, write_text
from ...sim.assembly.confidence import rests_on
from ...sim.scenario.scenario_text import scenario_text
from ...sim.scenario_file import scenario_with
from ..search.intervals import Estimate
from ..servers.files import server_files
from ..store import StoredWorkers, TrialStore
from .tables import Table, settings_of
from .tune import Judged, Tune

RESULT = "result.json"


@dataclass(frozen=True)
class JudgedTable:
    """A table that was compared and is not taken: by phase, the share that it is slower than the best fixed number of
    steps."""

    table: Table
    behind_best_fixed: Mapping[str, float]


@dataclass(frozen=True)
class TuneResult(Document):
    """The table of draft steps that was found, as `foredraft tune --json` prints it.

    Attributes:
        scenario: Its name.
        phases: The loads by name: `about` says what each is, the other keys are those of the scenario.
        seeds: Of the comparison.
        intervals_rest_on: The published points behind the simulated times.
        holds: Whether the table is at most 1 % behind the best fixed number of steps in every phase.
        table: The table, in the form of `speculation.adaptive`; if none holds, the one that is the least behind.
        behind_best_fixed: By phase, the share that it is slower than the best fixed number of steps; below 0 it is
            faster.
        schedule: The best table with one number of steps per range, for servers that take no other; None if none holds.
        gain_over: By what it replaces and by phase, how much faster the table is, as a share, and half of the 95 %
            interval; None for what cannot run. The phase "all" is their mean.
        passed_over: Better tables that do not hold.
        files: The texts of files that use the table, by name: adaptive.json, scenario.toml and those of the server
            that was simulated. Empty if the table does not hold.
        not_written: By server, why there is no file; of those that were not simulated, that the table is not theirs.
    """

    FORMAT: ClassVar[str] = "foredraft-tune"

    scenario: str
    phases: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    intervals_rest_on: str
    holds: bool
    table: Table
    behind_best_fixed: Mapping[str, float]
    schedule: Table | None
    gain_over: Mapping[str, Mapping[str, tuple[float, float] | None]]
    passed_over: tuple[JudgedTable, ...]
    files: Mapping[str, str]
    not_written: Mapping[str, str]


def search_table(whole: Tune, pool: StoredWorkers, store: TrialStore, on_progress: Callable[[str], None]) -> TuneResult:
    """Search and compare tables. Returns the result, which is stored beside the runs with its files.

    `on_progress` gets a line for each group of tables, each comparison and each run.
    """
    for text in chain(whole.search(pool), whole.compare(pool)):
        on_progress(text)
    result = _result(whole)
    for name, text in ((RESULT, result.to_text()), *result.files.items()):
        write_text(store.path / name, text, replace=True)
    return result


def gains_of(whole: Tune, best: Judged) -> dict[str, dict[str, Estimate | None]]:
    """Return by setting and phase how much faster the table is; the last phase is all of them. The least
    gain comes last."""
    others = whole.others()
    schedule = whole.best_schedule
    if schedule is not None and schedule is not best:
        others["schedule"] = settings_of(schedule.table)
    rows = {}
    for name, settings in others.items():
        row = {phase.name: whole.gain(best.table, settings, [phase]) for phase in whole.phases}
        rows[name] = {**row, "all": whole.gain(best.table, settings, whole.phases)}
    return dict(sorted(rows.items(), key=lambda item: -(item[1]["all"].mean if item[1]["all"] else -1.0)))


def best_of(whole: Tune) -> Judged:
    """Return the table to use, or the one that is the least behind."""
    best = whole.best or whole.nearest
    assert best is not None, "a search that has ended has judged a table"
    return best


def _result(whole: Tune) -> TuneResult:
    best, schedule = best_of(whole), whole.best_schedule
    files, left_out = dict[str, str](), dict[str, str]()
    if whole.best is not None:
        tuned = scenario_with(whole.tables, settings_of(best.table))
        most = whole.model.plain.spec.config.max_running
        files, left_out = server_files(tuned, best.table, schedule.table if schedule else None, most)
        files["scenario.toml"] = scenario_text(tuned, {})
    return TuneResult(
        scenario=whole.scenario.name,
        phases={phase.name: {"about": phase.about, **phase.settings} for phase in whole.phases},
        seeds=list(whole.question.seeds),
        intervals_rest_on=rests_on(whole.model.plain),
        holds=whole.best is not None,
        table=best.table,
        behind_best_fixed=best.shortfall,
        schedule=schedule.table if schedule else None,
        gain_over={
            name: {phase: (found.mean, found.half_width) if found else None for phase, found in row.items()}
            for name, row in gains_of(whole, best).items()
        },
        passed_over=tuple(JudgedTable(one.table, one.shortfall) for one in whole.judged if not one.holds),
        files=files,
        not_written=left_out,
    )
