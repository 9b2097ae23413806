"""The answer of a plan, which is stored beside its runs and printed, and which `foredraft report` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...core.errors import count_of
from ...observe.output_files import Document, write_text
from ...sim.assembly.explaining import timing_line
from ..confidence.comparison import SOURCE
from ..confidence.ranked import Ranked
from ..demand.hours import Hours
from ..plan import Plan
from ..rounds.bottleneck import REMEDIES, bottleneck
from ..search.bounds import CONFIDENCE, SHARE
from ..search.judge import SearchFinding
from ..search.pace import WatchedWorkers
from ..slo import TAKEN, Limit, Objective
from ..store import TrialStore
from ..trial import RunOutcome
from ..workers import JobWorkers
from .bill import Bill, bill_of
from .ranking import rank_candidates

ANSWER = "answer.json"
HELD = f"{SHARE * 100:g} % of runs"


@dataclass(frozen=True)
class PlannedRun:
    """The runs at a candidate's load.

    Attributes:
        submitted: Requests of a run.
        duration: Its seconds.
        seeds: Runs that the load rests on.
    """

    submitted: int
    duration: float
    seeds: int


@dataclass(frozen=True)
class PlannedPool:
    """The engines of one role.

    Attributes:
        role: "prefill" or "decode"; "both" where each engine does all of a request.
        engines: How many there are.
        gpu: The GPU that they have.
        gpus: Devices of all of them.
    """

    role: Literal["prefill", "decode", "both"]
    engines: int
    gpu: str
    gpus: int


@dataclass(frozen=True)
class PlannedCandidate:
    """A configuration with its result.

    Attributes:
        name: What distinguishes it from the others, in words.
        settings: The keys of the scenario that it replaces.
        status: "best"; "equal" and "behind" were compared with it; "dropped" was not searched on after the first
            round; "hopeless" holds no load.
        load: The load that nearly all runs hold (`PlanAnswer.share_of_runs`); None if it holds none. Of a dropped
            candidate about that load: its rough one, by what the best candidate's rough one became.
        half_load: The load that half of the runs hold; None for a given load.
        half_width: Half of the 95 % interval of `half_load` over seeds.
        load_interval: [low, high]: the 80 % interval of the load if times are not as simulated.
        gpus: Devices.
        gpus_interval: [low, high] of the devices for a given load; an end that is not known is None.
        of_best_interval: [low, high] of the load as a share of the best one's, if the comparison is wrong.
        engines: Engines on these devices.
        pools: The same by their role; empty if it holds no load.
        requests_per_s: The load as requests per second of all engines.
        running_per_engine: Requests that run in one engine on average at the load.
        tokens_per_s: Output tokens of all devices at the load.
        bill: What the devices cost; None without a price of the device.
        run: The runs at the load.
        needs_seeds: The seeds that would show that `PlanAnswer.share_of_runs` hold the load, if the runs of all of
            them hold it; None where that is shown.
        tightest: The limit that is taken the most, by its name.
        taken: The share of it.
        taken_interval: [low, high] of the share.
        intervals_rest_on: The published points behind the intervals of the cost model.
        round: The numbers of the mean round at the load, of the best alone.
    """

    name: str
    settings: Mapping[str, Any]
    status: Literal["best", "equal", "behind", "dropped", "hopeless"]
    load: float | None
    half_load: float | None
    half_width: float | None
    load_interval: tuple[float, float] | None
    gpus: int | None
    gpus_interval: tuple[int | None, int | None] | None
    of_best_interval: tuple[float, float] | None
    engines: int | None
    pools: tuple[PlannedPool, ...]
    requests_per_s: float | None
    running_per_engine: float | None
    tokens_per_s: float | None
    bill: Bill | None
    run: PlannedRun | None
    needs_seeds: int | None
    tightest: str | None
    taken: float | None
    taken_interval: tuple[float, float] | None
    intervals_rest_on: str | None
    round: Mapping[str, Any] | None


@dataclass(frozen=True)
class RefusedCandidate:
    """A configuration that cannot run, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PlanAnswer(Document):
    """The answer of a plan, as `foredraft plan --json` prints it.

    Attributes:
        sentences: What was asked, then what holds and what limits it, for readers.
        timing: A sentence: whose timing this is; empty if nothing holds.
        limits: The limits within which a load is held.
        load: The load that was asked for; None if the greatest was.
        load_key: The key of the scenario that sets the load.
        load_unit: What a load is counted in.
        share_of_runs: The share of runs that hold a load.
        hours: The best candidate's replicas by the hour of the trace; None if they were not asked for, or none holds.
        model_error_source: Where the error of comparisons comes from.
        candidates: The configurations that could run, the best first.
        refused: The others.
    """

    FORMAT: ClassVar[str] = "foredraft-plan"

    sentences: tuple[str, ...]
    timing: str
    limits: tuple[Limit, ...]
    load: float | None
    load_key: str
    load_unit: str
    share_of_runs: float
    hours: Hours | None
    model_error_source: str
    candidates: tuple[PlannedCandidate, ...]
    refused: tuple[RefusedCandidate, ...]

    @property
    def best(self) -> PlannedCandidate | None:
        """The configuration that holds the most load, or needs the fewest devices; None if none holds."""
        return next((one for one in self.candidates if one.status == "best"), None)


def search_plan(
    whole: Plan,
    pool: JobWorkers,
    store: TrialStore,
    on_progress: Callable[[str], None],
    on_run: Callable[[str], None] | None = None,
) -> tuple[list[Ranked], PlanAnswer]:
    """Search all candidates, and return them by their results with the answer, which is stored beside the runs.
    `on_progress` gets a line for each candidate that a round ends with, `on_run` how far the search is after each
    run."""

    def note(trial: RunOutcome) -> None:
        whole.pace.note(trial)
        if on_run is not None and (text := whole.pace.in_words(pool.count)) is not None:
            on_run(text)

    for which, index, found in whole.run(WatchedWorkers(pool, note)):
        if not found.reason:  # else `refused` says it
            on_progress(f"{which} round, {_progress(whole, which, index, found)} ({count_of(len(store), 'run')})")
    ranked = rank_candidates(whole)
    answer = answer_of(whole, ranked)
    write_text(store.path / ANSWER, answer.to_text(), replace=True)
    return ranked, answer


def _progress(whole: Plan, which: str, index: int, found: SearchFinding) -> str:
    is_load = which != "second" or whole.question.load is None
    value = f"{found.value:.3g} {whole.load_unit}" if is_load else count_of(round(found.value), "engine")
    nothing = f"holds {'no load' if is_load else 'with no number of engines that may be'}"
    return f"{whole.candidates[index].name}: {value if found.value else nothing}"


def answer_of(whole: Plan, ranked: Sequence[Ranked]) -> PlanAnswer:
    """Return the answer of a plan whose candidates were searched."""
    asked = whole.question
    first = next((item for item in ranked if item.holds and not item.dropped), None)
    sentences, timing = [_title(whole)], ""
    if first is not None and first is ranked[0]:
        remarks = _remarks(whole, [item for item in ranked if not item.dropped])
        sentences += [_best(whole, first), *remarks[:-1]]
        timing = remarks[-1]
    elif ranked:
        sentences.append(_nothing_holds(whole, min(ranked, key=lambda item: item.finding.excess)))
    return PlanAnswer(
        tuple(sentences),
        timing,
        tuple(one.described() for one in asked.objectives),
        asked.load,
        whole.load_key,
        whole.load_unit,
        SHARE,
        _hours(whole, ranked[0]) if ranked and ranked[0].holds else None,
        SOURCE,
        tuple(_candidate(whole, item, item is first) for item in ranked),
        tuple(RefusedCandidate(candidate.name, reason) for candidate, reason in whole.refused()),
    )


def _candidate(whole: Plan, item: Ranked, is_first: bool) -> PlannedCandidate:
    found, holds = item.finding, item.holds
    status: Literal["best", "equal", "behind", "dropped", "hopeless"]
    if is_first:
        status = "best"
    elif not holds:
        status = "hopeless"
    else:
        status = "dropped" if item.dropped else "equal" if item.equal else "behind"
    price = item.candidate.per_gpu(whole.question.prices)
    bill = bill_of(whole, item, price) if holds and price is not None else None
    half_width = None if found.interval is None else found.interval.half_width
    summary = found.summary
    return PlannedCandidate(
        name=item.candidate.name,
        settings=dict(item.candidate.settings),
        status=status,
        load=item.load if holds else None,
        half_load=None if found.interval is None else found.interval.mean,
        half_width=half_width if half_width is not None and math.isfinite(half_width) else None,
        load_interval=item.load_range,
        gpus=item.gpus if holds else None,
        gpus_interval=item.gpu_range,
        of_best_interval=item.of_best_range,
        engines=item.candidate.engines_on(item.gpus) if holds else None,
        pools=_pools(item) if holds else (),
        requests_per_s=whole.requests_per_s(item.load) if holds else None,
        running_per_engine=summary["mean_running"] / summary["replicas"] if holds else None,
        tokens_per_s=tokens_per_s(whole, item) if holds else None,
        bill=bill,
        run=PlannedRun(summary["submitted"], summary["duration"], found.seeds) if holds else None,
        needs_seeds=(found.needs_seeds or None) if holds else None,
        tightest=None if found.tightest is None else found.tightest.name,
        taken=found.excess if math.isfinite(found.excess) else None,
        taken_interval=item.taken_range,
        intervals_rest_on=item.rests_on or None,
        round=_mean_round(found.summary) if is_first else None,
    )


def _pools(item: Ranked) -> tuple[PlannedPool, ...]:
    times = item.gpus // item.candidate.gpus_per_unit
    return tuple(
        PlannedPool(pool.role.value, times * pool.engines, pool.gpu, times * pool.gpus) for pool in item.candidate.pools
    )


def _hours(whole: Plan, best: Ranked) -> Hours | None:
    day, candidate = whole.question.day, best.candidate
    if day is None:
        return None
    capacity = whole.requests_per_s(best.load) * candidate.gpus_per_unit / best.gpus
    price = candidate.per_gpu(whole.question.prices)
    return day.answer(candidate.name, capacity, candidate.gpus_per_unit, price)


# -- sentences --------------------------------------------------------------------------------------------------------


def _title(whole: Plan) -> str:
    asked, is_trace = whole.question, whole.scenario.workload.trace is not None
    limits = ", ".join(map(str, asked.objectives))
    if asked.load is not None:
        what = f"least GPUs for {asked.load:g} {whole.load_unit} that {HELD} hold"
    else:
        on = count_of(asked.gpus, "GPU") if asked.gpus else "the GPUs of one engine"
        what = f"greatest {'load' if is_trace else 'rate'} on {on} that {HELD} hold"
    return f"{whole.scenario.name}: {what} within {limits}"


def _best(whole: Plan, best: Ranked) -> str:
    unit = "times the trace" if whole.scenario.workload.trace is not None else whole.load_unit
    gpus, found = count_of(best.gpus, "GPU"), best.finding
    share = f"{found.held} of {count_of(found.runs, 'run')}" if found.needs_seeds else HELD
    limits = ", ".join(map(str, whole.question.objectives))
    return (
        f"{best.candidate.name} holds {best.load:.3g} {unit} on {gpus} in {share}, "
        f"{tokens_per_s(whole, best):,.0f} output tokens/s, within {limits}."
    )


def _length_of_runs(whole: Plan, best: Ranked) -> str:
    """Say how long a run is, and how the stated load was found."""
    summary = best.finding.summary
    text = f"A run has {count_of(summary['submitted'], 'request')} in {summary['duration']:.0f} s."
    if whole.trace_part is not None:
        text = f"{text} {whole.trace_part.of_a_run()}"
    seeds = best.finding.seeds
    if best.finding.level is not None and seeds > 1:
        text += (
            f" The load is a tolerance bound over {seeds} seeds: with {CONFIDENCE:.0%} confidence {SHARE:.0%} of runs "
            "of this length hold it. A longer run meets more bursts."
        )
    return text


def too_few_seeds(shown: Sequence[Ranked]) -> str:
    """Say which results hold in all of their runs, but in too few to show that HELD hold them; empty if none."""
    counts = [
        f"{item.candidate.name}: held in {item.finding.held} of {item.finding.runs}; {SHARE * 100:g} % needs "
        f"{item.finding.needs_seeds} seeds (--seeds {item.finding.needs_seeds})"
        for item in shown
        if item.holds and item.finding.needs_seeds
    ]
    return f"Not yet shown with {CONFIDENCE:.0%} confidence. {'. '.join(counts)}." if counts else ""


def _nothing_holds(whole: Plan, nearest: Ranked) -> str:
    found, gpus = nearest.finding, whole.question.gpus
    needed = {index: whole.needed(index) for index in whole.rough} if whole.question.load is not None else {}
    least = min((index for index in needed if needed[index]), key=lambda index: needed[index], default=None)
    if least is not None:
        there = f"the {count_of(gpus, 'GPU')}" if gpus else "the engines that are tried"
        return f"Nothing holds on {there}. {whole.candidates[least].name} needs the least: about {count_of(needed[least], 'GPU')}."
    devices = f" on {count_of(gpus, 'GPU')}" if gpus else ""
    if refused := found.summary.get("refused"):
        count = f"{refused:,} of {count_of(found.summary['submitted'], 'request')}"
        return f"Nothing holds{devices}: at any load the engines refuse {count}. `foredraft simulate` says for which reason."
    at = found.summary.get("request_throughput")
    tightest = tightest_of(found)
    if math.isinf(found.excess):
        within = "it is an overloaded run"
    elif tightest.key == TAKEN:
        within = f"all limits would have to be {found.excess:.3g} times as long for {tightest}"
    else:
        value = found.excess * tightest.limit_ms
        within = f"{tightest.name} is {value:.3g} ms, {found.excess:.3g} times the limit of {tightest.limit_ms:g} ms"
    return f"Nothing holds{devices}. Nearest is {nearest.candidate.name}: at {at:.3g} requests/s {within}."


def _remarks(whole: Plan, shown: list[Ranked]) -> list[str]:
    """Return what limits the best candidate, what the marks mean, what the runs took of a trace, and at the end whose
    timing it is."""
    limited, timing = limit_of(whole, shown[0])
    texts = [limited]
    if len(shown[0].candidate.pools) > 1:
        pools = [f"{count_of(one.engines, f'{one.role} engine')} on {one.gpus} × {one.gpu}" for one in _pools(shown[0])]
        texts.append(f"Its {count_of(shown[0].gpus, 'GPU')}: {', '.join(pools)}.")
    if any(item.equal for item in shown[1:]) and whole.question.load is not None:
        texts.append(
            "= serves the load at no more cost than the first; the one that takes less of the limits stands first."
        )
    elif any(item.equal for item in shown[1:]):
        texts.append(
            f"= no clear difference from the first, compared seed by seed, with a cost model that may be wrong about the ratio "
            f"of two candidates, but not about what they share (80 % intervals; {SOURCE})."
        )
    texts += whole.about_guesses(item.candidate for item in shown if item.holds)
    texts += [text for text in (too_few_seeds(shown), _length_of_runs(whole, shown[0])) if text]
    if whole.trace_part is not None:
        texts += whole.trace_part.warnings(whole.question.load)
    return [*texts, timing]


# -- numbers ----------------------------------------------------------------------------------------------------------


def _mean_round(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a run's mean round, which a report draws."""
    return {key: value for key, value in summary.items() if key.startswith("round_") or key == "accept_length"}


def tokens_per_s(plan: Plan, item: Ranked) -> float:
    """Return the output tokens per second of a candidate at the load found. (A run's own throughput counts its ramp and
    its drain, too.)"""
    return plan.requests_per_s(item.load) * float(item.finding.summary["mean_output_tokens"])


def tightest_of(found: SearchFinding) -> Objective:
    """Return the objective that takes the most of its limit, of a candidate that could be searched."""
    assert found.tightest is not None
    return found.tightest


def limit_of(whole: Plan, item: Ranked) -> tuple[str, str]:
    """Return sentences about what limits a candidate at its load, what would raise this limit, and whose timing is
    simulated."""
    run = whole.errors.assembly(item.candidate, item.candidate.unit)
    limit = bottleneck(run, item.finding.summary)
    return f"{item.candidate.name} is limited by {limit}; what would move it: {REMEDIES[limit]}.", timing_line(run)
