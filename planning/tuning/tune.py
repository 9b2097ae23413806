"""Searches the table of draft steps that serves a workload fastest, and compares it with the alternatives.

The search sees some seeds, the comparison others. All alternatives run the same requests with the same acceptance, seed
by seed. The search proposes tables in groups and learns their scores in order, with any number of processes. So the
same question makes the same runs, and a stopped search can continue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.adaptive.config import PRESETS
from ...core.errors import ConfigError, ForedraftError, Problem, count_of
from ...sim.scenario import Scenario
from ..candidates.rounds import RoundModel
from ..grid import NO_SPECULATION
from ..search.intervals import Estimate, estimate
from ..trial import RunOutcome
from ..workers import Job, JobWorkers
from .phases import Phase, mean_context, phases_of
from .tables import LocalSearch, Table, TableChoice, TableSpace, chosen_steps, fixed_settings, is_schedule, settings_of

MOST_BEHIND = 0.01
"""A tuned table is at most this share slower than the best fixed number of steps, in every phase."""
PENALTY = 10.0
"""The penalty in the score for each share beyond half of MOST_BEHIND: ten times the gain from an equal share."""
GROUP = 4
"""The number of tables that are proposed before the search learns a score."""
FINALISTS = 6
MOST_STEPS = 7
PLAIN, DEFAULT, GOODPUT = "no speculation", "default table", "goodput"

Settings = Mapping[str, Any]


SEARCH_SEEDS_FROM = 1_000_000
"""The seeds of the search begin so far above those of the comparison: no run is made with both."""


@dataclass(frozen=True)
class TuneQuestion:
    """The question: seeds of the search, other seeds for the comparison, trials, requests of a run, the greatest number
    of steps."""

    search_seeds: Sequence[int]
    seeds: Sequence[int]
    trials: int
    requests: int
    most_steps: int = MOST_STEPS

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, range) else value for key, value in asdict(self).items()}


def question_of_tune(
    scenario: Scenario, trials: int = 32, search_seeds: int = 3, seeds: int = 5, requests: int = 100
) -> TuneQuestion:
    """Return the question about a scenario, whose comparison begins at its own seed. Raises ConfigError with every
    number that is out of range."""
    least = {"trials": (trials, 1), "search_seeds": (search_seeds, 1), "seeds": (seeds, 2), "requests": (requests, 10)}
    if wrong := [
        Problem(key, f"is {value}; expected {low} or more") for key, (value, low) in least.items() if value < low
    ]:
        raise ConfigError("<arguments>", wrong)
    first = scenario.seed + SEARCH_SEEDS_FROM
    compared = range(scenario.seed, scenario.seed + seeds)
    return TuneQuestion(range(first, first + search_seeds), compared, trials, requests)


@dataclass(frozen=True)
class Judged:
    """A table with its speeds on the seeds of the comparison.

    `shortfall`: per phase, how much slower it is than the best fixed number of steps there (a share; below 0 it is
    faster).
    """

    table: Table
    shortfall: Mapping[str, float]

    @property
    def holds(self) -> bool:
        return max(self.shortfall.values()) <= MOST_BEHIND


@dataclass
class Tune:
    """A search and its results. `speeds` are output tokens per second that a request sees, from its arrival to its
    end."""

    scenario: Scenario
    question: TuneQuestion
    tables: dict[str, Any] = field(init=False)  # of the scenario, which leaves the steps open
    model: RoundModel = field(init=False)
    context: int = field(init=False)  # KV tokens of an average request
    phases: list[Phase] = field(init=False)
    space: TableSpace = field(init=False)
    speeds: dict[tuple[str, str, int], float] = field(default_factory=dict)  # (settings, phase, seed)
    # of the same runs: mean batch size of an engine
    rows: dict[tuple[str, str, int], float] = field(default_factory=dict)
    found: list[tuple[float, Table]] = field(default_factory=list)  # by score, the best first
    judged: list[Judged] = field(default_factory=list)  # in the order in which they were compared
    refused: dict[str, str] = field(default_factory=dict)  # what cannot run, with the reason
    _fixed: list[Settings] = field(init=False)

    def __post_init__(self) -> None:
        """Raise a ForedraftError for a scenario without speculation, or that cannot be assembled."""
        if self.scenario.speculation.algorithm == NO_SPECULATION:
            raise ForedraftError("speculation.algorithm is NONE: name the algorithm whose steps are to be tuned")
        self.tables = chosen_steps(self.scenario)
        self.model = RoundModel(self.scenario)
        most = min(self.question.most_steps, self.scenario.speculation.heads or self.question.most_steps)
        self.phases = phases_of(self.scenario, self.model, self.question.requests, most)
        self.context = mean_context(self.scenario, self.model)
        self.space = TableSpace.of(self.model.plain.spec.config.max_running, most)
        self._fixed = [fixed_settings(steps) for steps in range(most + 1)]

    # -- what it is compared with --------------------------------------------------------------------------------------

    def others(self) -> dict[str, Settings]:
        """Return the alternatives to a tuned table, by name."""
        adaptive = {DEFAULT: settings_of(PRESETS["default"]), GOODPUT: {"speculation.policy": "goodput"}}
        fixed = {count_of(steps, "step"): settings for steps, settings in enumerate(self._fixed)}
        return {PLAIN: {"speculation": {"algorithm": NO_SPECULATION}}, **fixed, **adaptive}

    # -- the search ----------------------------------------------------------------------------------------------------

    def search(self, workers: JobWorkers) -> Iterator[str]:
        """Search, and yield a sentence about every group of trials. The tables found are in `found`."""
        seeds = self.question.search_seeds
        yield from self._measure([*self._fixed, settings_of(PRESETS["default"])], seeds, workers)
        best = {phase.name: self._best_fixed(phase, seeds) for phase in self.phases}
        search = LocalSearch(self.space, self.space.starts(self.model, self.context, self._best_by_batch(seeds)))
        scored: dict[str, tuple[float, Table]] = {}
        self._score(PRESETS["default"], best, scored)
        for steps in range(len(self._fixed)):
            fixed = TableChoice((steps,) * len(self.space.bounds))
            search.learn(fixed, self._score(self.space.table(fixed), best, scored))
        for first in range(0, self.question.trials, GROUP):
            choices = search.propose(min(GROUP, self.question.trials - first))
            if not choices:
                break
            tables = [self.space.table(choice) for choice in choices]
            yield from self._measure([settings_of(table) for table in tables], seeds, workers)
            for choice, table in zip(choices, tables, strict=True):
                search.learn(choice, self._score(table, best, scored))
            top = max(score for score, _ in scored.values())
            yield f"{first + len(choices)} of {count_of(self.question.trials, 'table')}, best {math.expm1(top):+.1%} to fixed steps"
        self.found = sorted(scored.values(), key=lambda entry: -entry[0])

    def _best_by_batch(self, seeds: Sequence[int]) -> list[tuple[float, int]]:
        """Return (mean batch size, fastest fixed number of steps) of every phase, by batch size, as measured."""
        found = []
        for phase in self.phases:
            steps = max(range(len(self._fixed)), key=lambda count: self._mean_log(self._fixed[count], phase, seeds))
            rows = [self.rows[repr(self._fixed[steps]), phase.name, seed] for seed in seeds]
            found.append((sum(rows) / len(rows), steps))
        return sorted(found)

    def _score(self, table: Table, best: Mapping[str, float], scored: dict[str, tuple[float, Table]]) -> float:
        """Return the mean gain over the best fixed steps of each phase (in logarithms), less the penalty for phases in
        which the table is behind."""
        settings = settings_of(table)
        gains = [
            self._mean_log(settings, phase, self.question.search_seeds) - best[phase.name] for phase in self.phases
        ]
        score = sum(gains) / len(gains) - PENALTY * sum(max(0.0, -gain - MOST_BEHIND / 2) for gain in gains)
        scored[repr(settings)] = (score, table)
        return score

    # -- the comparison ------------------------------------------------------------------------------------------------

    def compare(self, workers: JobWorkers) -> Iterator[str]:
        """Compare on seeds that the search has not seen. The first table, by score, that holds in every phase is taken,
        and the first with one number of steps for each range; all that were tried are in `judged`."""
        yield from self._measure(list(self.others().values()), self.question.seeds, workers)
        able = [table for score, table in self.found if math.isfinite(score)]
        for kind in (able, [table for table in able if is_schedule(table)]):
            for table in kind[:FINALISTS]:
                judged = next((one for one in self.judged if one.table == table), None)
                if judged is None:
                    yield from self._measure([settings_of(table)], self.question.seeds, workers)
                    judged = self._judge(table)
                    self.judged.append(judged)
                    yield f"table {len(self.judged)} {'holds in every phase' if judged.holds else 'is behind in a phase'}"
                if judged.holds:
                    break

    def _judge(self, table: Table) -> Judged:
        seeds, settings = self.question.seeds, settings_of(table)
        shortfall = {}
        for phase in self.phases:
            behind = self._best_fixed(phase, seeds) - self._mean_log(settings, phase, seeds)
            shortfall[phase.name] = -math.expm1(-behind)
        return Judged(table, shortfall)

    @property
    def best(self) -> Judged | None:
        """The table to use; None if every compared table is behind in some phase."""
        return next((one for one in self.judged if one.holds), None)

    @property
    def best_schedule(self) -> Judged | None:
        """The table to use for servers that take one number of steps per range."""
        return next((one for one in self.judged if one.holds and is_schedule(one.table)), None)

    @property
    def nearest(self) -> Judged | None:
        """The table that is the least behind, if none keeps the promise."""
        return min(self.judged, key=lambda one: max(one.shortfall.values()), default=None)

    def gain(self, table: Table, over: Settings, phases: Sequence[Phase]) -> Estimate | None:
        """Return how much faster a table is than an alternative, seed by seed, as a share; None if one of the two
        cannot run.

        With several phases: the mean of all, each counted alike.
        """
        mine = repr(settings_of(table))
        logs = []
        for seed in self.question.seeds:
            total = 0.0
            for phase in phases:
                speed = self.speeds.get((mine, phase.name, seed))
                other = self.speeds.get((repr(over), phase.name, seed))
                if not speed or not other:
                    return None
                total += math.log(speed / other)
            logs.append(total / len(phases))
        found = estimate(logs)
        return Estimate(math.expm1(found.mean), math.exp(found.mean) * found.half_width)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _measure(self, candidates: Sequence[Settings], seeds: Sequence[int], workers: JobWorkers) -> Iterator[str]:
        """Make the runs of candidates in all phases that are missing. A candidate that cannot run has speed 0, and the
        reason is stored."""
        wanted: list[tuple[str, str, int]] = []
        for settings in candidates:
            for phase in self.phases:
                for seed in seeds:
                    key = (repr(settings), phase.name, seed)
                    if key not in self.speeds and key not in wanted:
                        workers.submit(Job(len(wanted), {**settings, **phase.settings, "seed": seed}))
                        wanted.append(key)
        for number in range(len(wanted)):
            job, trial = workers.next_ended()
            self._note(wanted[job.ticket], trial)
            yield f"{number + 1} of {count_of(len(wanted), 'run')}"

    def _note(self, key: tuple[str, str, int], trial: RunOutcome) -> None:
        summary = trial.summary
        self.speeds[key] = self.rows[key] = 0.0
        if trial.status != "done":
            self.refused[key[0]] = trial.message
        elif summary["mean_e2el_ms"]:
            self.speeds[key] = summary["mean_output_tokens"] / summary["mean_e2el_ms"] * 1e3
            self.rows[key] = (summary["mean_running"] or 0.0) / summary["replicas"]

    def _best_fixed(self, phase: Phase, seeds: Sequence[int]) -> float:
        """Return the mean logarithm of the speed of the best fixed number of steps.
        Raises ForedraftError if none can run."""
        best = max(self._mean_log(one, phase, seeds) for one in self._fixed)
        if not math.isfinite(best):
            raise ForedraftError(f"{phase.name}: no number of steps can run: {self.refused[repr(self._fixed[1])]}")
        return best

    def _mean_log(self, settings: Settings, phase: Phase, seeds: Sequence[int]) -> float:
        speeds = [self.speeds[repr(settings), phase.name, seed] for seed in seeds]
        return sum(map(math.log, speeds)) / len(speeds) if all(speeds) else -math.inf
