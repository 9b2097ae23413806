"""The planner's questions from Python, as the functions of the package ask them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from foredraft.core.errors import count_of
from foredraft.observe.output_files import JsonRecord
from foredraft.planning.answers.answer import PlanAnswer, search_plan
from foredraft.planning.candidates.candidate import base_tables
from foredraft.planning.demand.question import question_of
from foredraft.planning.plan import make_plan
from foredraft.planning.rounds.cost import Cost, cost_of_rounds
from foredraft.planning.rounds.doctor import Diagnosis, diagnose
from foredraft.planning.store import kept_runs
from foredraft.planning.tuning.result import TuneResult, search_table
from foredraft.planning.tuning.tune import Tune, question_of_tune
from foredraft.sim.calibration.fit import calibrate_from_files
from foredraft.sim.calibration.result import CalibrateResult
from foredraft.simulation import ScenarioLike, resolve

Progress = Callable[[str], None] | None
Place = str | PathLike[str] | None


def ask_plan(
    scenario: ScenarioLike,
    overrides: Mapping[str, Any] | None,
    compare: Mapping[str, Sequence[Any]] | None,
    asked: Mapping[str, Any],
    out: Place,
    workers: int | None,
    cluster: str | None,
    on_progress: Progress,
) -> PlanAnswer:
    """Answer `foredraft.plan`; `asked` has the arguments of `question_of` by name."""
    question, resolved = question_of(resolve(scenario, overrides)[0], **asked)
    whole = make_plan(resolved, compare or {}, question)
    for notice in whole.notices():
        (on_progress or _ignore)(notice)
    with kept_runs("plan", base_tables(resolved), _path(out), workers, cluster, **whole.asked) as (pool, store):
        return search_plan(whole, pool, store, on_progress or _ignore)[1]


def ask_tune(
    scenario: ScenarioLike,
    overrides: Mapping[str, Any] | None,
    asked: Mapping[str, int],
    out: Place,
    workers: int | None,
    cluster: str | None,
    on_progress: Progress,
) -> TuneResult:
    """Answer `foredraft.tune`; `asked` has the arguments of `question_of_tune` by name."""
    resolved, _ = resolve(scenario, overrides)
    question = question_of_tune(resolved, **asked)
    whole = Tune(resolved, question)
    with kept_runs("tune", whole.tables, _path(out), workers, cluster, asked=question.to_json()) as (pool, store):
        return search_table(whole, pool, store, on_progress or _ignore)


def ask_doctor(scenario: ScenarioLike, overrides: Mapping[str, Any] | None, requests: int) -> Diagnosis:
    """Answer `foredraft.doctor`."""
    return diagnose(resolve(scenario, overrides)[0], requests)


def ask_cost(
    scenario: ScenarioLike,
    overrides: Mapping[str, Any] | None,
    batch: Sequence[int],
    context: int,
    steps: Sequence[int],
) -> Cost:
    """Answer `foredraft.cost`."""
    return cost_of_rounds(resolve(scenario, overrides)[0], batch, context, steps)


def ask_calibrate(
    files: Sequence[str | PathLike[str]] | str | PathLike[str],
    scenario: ScenarioLike,
    overrides: Mapping[str, Any] | None,
    out: Place,
    on_progress: Progress,
) -> CalibrateResult:
    """Answer `foredraft.calibrate`."""
    place = _path(out)
    record = JsonRecord(place)
    base, given = resolve(scenario, overrides)
    named = [files] if isinstance(files, str | PathLike) else files
    name = "profile" if place is None else place.stem
    show = on_progress or _ignore

    def count(points: int, simulations: int) -> None:
        show(f"{count_of(points, 'point')}, {count_of(simulations, 'simulation')}")

    found = calibrate_from_files([fspath(file) for file in named], base, given, name, count)
    record.write(dict(found.profile))
    return found


def _path(out: Place) -> Path | None:
    return None if out is None else Path(out)


def _ignore(text: str) -> None:
    """Show nothing."""
