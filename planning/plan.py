"""The plan: which configuration serves a load within its objectives on the least GPUs, or the greatest load on given
ones.

Three rounds. In the first every candidate is searched roughly, with one seed and a quarter of the requests; those far
behind are dropped. With a whole trace, the first round takes a thousand requests, and then a quarter of the trace for
the candidates that are left. In the second round the other candidates (with a whole trace the best three) are searched
finely, with a few seeds. The search begins where the first round ended. The third round says how sure a greatest load
is, by the greatest load of each run: the best candidate runs with many seeds, the others with a few of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ..core.errors import ConfigError, ForedraftError, count_of
from ..sim.assembly import assemble
from ..sim.effects.notices import about_guessed_acceptance
from ..sim.scenario import Scenario
from ..sim.scenario_file import scenario_with
from .candidates.candidate import REPLICAS, Candidate, base_tables, make_candidates
from .confidence.comparison import ModelErrors
from .demand.question import PlanQuestion
from .demand.trace_part import TracePart
from .search.counts import least_count
from .search.held import BestCandidate, held_load
from .search.judge import Search, SearchFinding
from .search.loads import greatest_load
from .search.pace import ROUNDS, SearchPace
from .search.running import run_searches
from .trial import reason_of
from .workers import JobWorkers

DROPPED_BELOW = 0.75
"""A candidate whose first result per GPU is below this share of the best one's is not searched again.

On a trace all candidates meet the same requests, and the tolerance of that result decides.
"""
KEPT_AT_LEAST = 3
ROUGH, CLOSER, FINE = 0.1, 0.05, 0.03
"""Tolerances of the first round, of its part on a quarter of a trace, and of the second round."""
PAIRS = 4
"""Seeds of a candidate in the second round, and in the third of those that are not the best."""
FEWEST = 16
"""Seeds of the best candidate in the third round, at least. Runs of a long trace that is replayed as it is differ by
draws of acceptance alone; there PAIRS are the least."""
AT_ONCE = 2  # runs of a search that is alone, whatever number of processes there is: the answer does not depend on it
FIRST_SHARE = 0.25  # of the requests, in the first round
ROUGH_ROWS = 1000  # of a trace, in the first round
LEAST_ARRIVALS_S = 60.0  # a run at a given rate covers at least so much of it
MOST_ENGINES = 512
MOST_SHARED = 64  # GPUs, if none are given
HOPELESS = 2.0
"""A candidate is not searched again if, by the first round, it needs more than this many times the allowed engines."""


def make_plan(
    scenario: Scenario, tried: Mapping[str, Sequence[Any]], asked: PlanQuestion, measured: Collection[str] = ()
) -> Plan:
    """Return the plan that compares these values of keys (`make_candidates`). Candidates of several sizes get as many
    GPUs as all of them divide, if none are given. `measured`: keys that a server's log gives.

    Raises ConfigError for a closed loop, and for values that no scenario can have.
    """
    if scenario.workload.concurrency is not None:
        message = "a closed loop has no request rate to plan for; give workload.rate or a trace"
        raise ConfigError.of("workload", "concurrency", message)
    candidates = make_candidates(scenario, tried, asked.gpus, measured)
    return Plan(scenario, candidates, replace(asked, gpus=asked.gpus or _shared_gpus(candidates, asked)))


def _shared_gpus(candidates: Sequence[Candidate], asked: PlanQuestion) -> int | None:
    """Return the least number of GPUs that every candidate divides into whole deployments, if these differ in size: so
    that loads can be compared. None where they are alike, or the number is beyond MOST_SHARED."""
    sizes = {one.gpus_per_unit for one in candidates}
    shared = math.lcm(*sizes)
    return shared if asked.load is None and len(sizes) > 1 and shared <= MOST_SHARED else None


@dataclass
class Plan:
    """Candidates being compared: `rough` and `fine` are the findings of the two rounds by index of the candidate."""

    scenario: Scenario
    candidates: Sequence[Candidate]
    question: PlanQuestion
    rough: dict[int, SearchFinding] = field(default_factory=dict)
    fine: dict[int, SearchFinding] = field(default_factory=dict)
    first_share: dict[int, float] = field(default_factory=dict)  # the rough loads per cost as shares of the most
    on_a_quarter: Sequence[int] = ()  # candidates whose rough finding is that of a quarter of a trace

    @cached_property
    def errors(self) -> ModelErrors:
        """The errors of the cost model for the candidates."""
        return ModelErrors(self.scenario, self.question.objectives)

    @property
    def asked(self) -> dict[str, Any]:
        """What makes two plans of a scenario the same; prices and the hours of a day change no run."""
        described = asdict(replace(self.question, prices={}, day=None)) | {"seeds": list(self.question.seeds)}
        return {"asked": described, "candidates": [one.settings for one in self.candidates]}

    def notices(self) -> list[str]:
        """Return what a user should know of the trace before the search, which reads it.

        Raises TraceError, or ConfigError if no request has room in the context of any candidate that can be assembled.
        """
        if self.trace_part is None:
            return []
        contexts = dict[tuple[str, int], None]()
        for candidate in self.candidates:
            with suppress(ForedraftError):
                run = self.errors.assembly(candidate, candidate.unit)
                contexts[run.target.name, run.spec.config.context_len] = None
        return [*self.trace_part.notices(contexts), *self.trace_part.warnings(self.question.load)]

    def about_guesses(self, candidates: Iterable[Candidate]) -> list[str]:
        """Return sentences about the acceptance of candidates for whose drafts none was published."""
        texts: dict[str, str] = {}  # the first candidate of each
        for candidate in candidates:
            texts.setdefault(about_guessed_acceptance(self.errors.assembly(candidate, candidate.unit)), candidate.name)
        return [f"{name}: {text}, and its load changes about as much." for text, name in texts.items() if text]

    @property
    def load_key(self) -> str:
        return "workload.rate" if self.scenario.workload.trace is None else "workload.rate_scale"

    @property
    def own_load(self) -> float:
        """The load that the scenario has."""
        table = self.scenario.workload
        return table.rate if table.trace is None else table.rate_scale

    @property
    def load_unit(self) -> str:
        """What a load is counted in."""
        return "requests/s" if self.scenario.workload.trace is None else "× the trace"

    @property
    def usual_load(self) -> float:
        """The load that a search begins at: the scenario's own, or less if less is asked for."""
        return min(self.own_load, self.question.load or self.own_load)

    def requests_per_s(self, load: float) -> float:
        """Return a load in requests per second; of a trace it is a multiple of the trace's mean rate."""
        part = self.trace_part
        return load if part is None else load * len(part.rows.lines) / part.span_s

    def run(self, workers: JobWorkers) -> Iterator[tuple[str, int, SearchFinding]]:
        """Search all candidates, and yield the round, the index of the candidate and the finding as each ends."""
        yield from self._first_round(range(len(self.candidates)), workers)
        able = [index for index, found in self.rough.items() if not found.reason]
        if self.question.load is not None and able and all(map(self._is_hopeless, able)):
            nearest = min(able, key=self._distance)  # alone it is searched on: how many devices it would take
            yield from self._first_round([nearest], workers, ends_early=False)
        kept = self._kept(self.rough, 1 - ROUGH if self._has_slices else DROPPED_BELOW)
        first_seed = self.question.seeds[:1]
        if not self._has_slices:
            again = {index: self._fine_search(index) for index in kept}
            yield from self._searched("second", self.fine, again, workers)
        elif kept:
            closer = partial(self._search_again, tolerance=CLOSER, seeds=first_seed, sized=lambda load: self._quarter)
            yield from self._best_first("first", self.rough, kept, workers, closer, 1 + ROUGH)
            self.on_a_quarter = kept
            # What a quarter cannot tell apart a whole trace hardly can: so few are enough to find the load of the best.
            kept = self._kept(kept, 1.0)
            if not kept:
                return
            fine = partial(self._search_again, tolerance=FINE, seeds=first_seed, sized=self._requests)
            yield from self._best_first("second", self.fine, kept, workers, fine, 1 + 2 * CLOSER)
        if self.question.load is None:
            yield from self._third_round(workers)

    def _best_first(
        self,
        name: str,
        findings: dict[int, SearchFinding],
        kept: Sequence[int],
        workers: JobWorkers,
        search: Callable[..., Search],
        factor: float,
    ) -> Iterator[tuple[str, int, SearchFinding]]:
        """Search candidates on a greater part of a trace: first the best one alone, with two runs at once, then the
        others, each from the load that the best one suggests.

        This works because the ratio of the loads found on a greater and on a smaller part of a trace is about the same
        for all candidates.
        """
        best, *others = kept
        before = self.rough[best].value
        yield from self._searched(name, findings, {best: search(best, before, factor, at_once=AT_ONCE)}, workers)
        ratio = findings[best].value / before or 1.0
        again = {index: search(index, ratio * self.rough[index].value) for index in others}
        yield from self._searched(name, findings, again, workers)

    def _third_round(self, workers: JobWorkers) -> Iterator[tuple[str, int, SearchFinding]]:
        """Search the load that nearly all runs hold: of the best candidate, then of the others compared with it."""
        found = {index: one for index, one in self.fine.items() if one.value and one.crossings and not one.is_bound}
        if not found:
            return
        best = max(found, key=lambda index: found[index].value)
        yield from self._searched("third", self.fine, {best: self._held_search(best, self.question.seeds)}, workers)
        held = self.fine[best]
        if held.level is None:  # a run of it failed
            return
        reference = BestCandidate(found[best], held, held.level)
        seeds = self.question.seeds[: max(PAIRS, self._fewest)]
        others = {index: self._held_search(index, seeds, reference) for index in found if index != best}
        yield from self._searched("third", self.fine, others, workers)

    def settings_at(self, candidate: Candidate, load: float, seed: int) -> dict[str, Any]:
        """Return the settings of a run of the last round."""
        settings = {**candidate.settings, REPLICAS: self.engines(candidate), **self._requests(load)}
        return {**settings, self.load_key: load, "seed": seed}

    def _held_search(self, index: int, seeds: Sequence[int], reference: BestCandidate | None = None) -> Search:
        settings = {**self.candidates[index].settings, REPLICAS: self.engines(self.candidates[index])}
        found, limits = self.fine[index], self.question.objectives
        fewest = self._fewest
        return held_load(
            settings,
            self.load_key,
            found,
            limits,
            seeds,
            FINE,
            self._requests,
            fewest,
            reference,
            min(PAIRS, len(seeds)),
        )

    @property
    def _fewest(self) -> int:
        """The seeds that run at least at a stated load."""
        return FEWEST if self._runs_differ_much else PAIRS

    def _first_round(
        self, indices: Iterable[int], workers: JobWorkers, ends_early: bool = True
    ) -> Iterator[tuple[str, int, SearchFinding]]:
        searches = {index: self._rough_search(self.candidates[index], ends_early) for index in indices}
        yield from self._searched("first", self.rough, searches, workers)

    def _searched(
        self, name: str, findings: dict[int, SearchFinding], searches: Mapping[int, Search], workers: JobWorkers
    ) -> Iterator[tuple[str, int, SearchFinding]]:
        self.pace.begin(name, len(searches))
        for index, finding in run_searches(searches, workers):
            self.pace.ended[name] += 1
            findings[index] = finding
            yield name, index, finding

    @cached_property
    def pace(self) -> SearchPace:
        """How far the search is."""
        return SearchPace(rounds=ROUNDS if self.question.load is None else ROUNDS[:-1])

    @cached_property
    def trace_part(self) -> TracePart | None:
        """What the runs take of a trace; None without a trace. Raises TraceError, or ConfigError if it has no
        requests."""
        return TracePart.of(self.scenario, self.question.requests)

    @property
    def _has_slices(self) -> bool:
        """Whether the first round takes slices of a trace, and a quarter is more than its least."""
        if self.question.load is not None or self.question.requests is not None:
            return False
        return self.trace_part is not None and FIRST_SHARE * self.trace_part.count > ROUGH_ROWS

    @property
    def _runs_differ_much(self) -> bool:
        """Whether runs of different seeds have other arrivals or few requests."""
        return not self._has_slices or self.trace_part is None or self.trace_part.window_s is not None

    @cached_property
    def _least_slice(self) -> dict[str, Any]:
        """The settings of a run of the least slice of a trace."""
        assert self.trace_part is not None, "runs without a trace have a number of requests"
        return self.trace_part.busiest(ROUGH_ROWS)

    @cached_property
    def _quarter(self) -> dict[str, Any]:
        """The settings of a run of a quarter of a trace's requests."""
        assert self.trace_part is not None, "runs without a trace have a number of requests"
        return self.trace_part.busiest(math.ceil(FIRST_SHARE * self.trace_part.count))

    def _is_hopeless(self, index: int) -> bool:
        """Return whether a candidate was far from the given load in the first round."""
        assert self.question.load is not None, "no candidate is far from the greatest load"
        most = self._most_engines(self.candidates[index])
        return self.question.load * self.candidates[index].unit >= HOPELESS * most * self.rough[index].value

    def _distance(self, index: int) -> tuple[float, float]:
        """Return a key that orders hopeless candidates: by the load per device, then by the share of the limits that
        they use."""
        found = self.rough[index]
        return -found.value / self.candidates[index].gpus_per_unit, found.excess

    def refused(self) -> list[tuple[Candidate, str]]:
        """Return the candidates that cannot run, each with the reason."""
        return [(self.candidates[i], found.reason) for i, found in sorted(self.rough.items()) if found.reason]

    def needed(self, index: int) -> int:
        """Return the devices that a candidate needs for the given load, by the first round; 0 if it holds no load."""
        assert self.question.load is not None, "a plan for given devices asks for no load"
        candidate, rough = self.candidates[index], self.rough[index]
        return candidate.gpus_per_unit * math.ceil(self.question.load / rough.value) if rough.value else 0

    def gpu_cost(self, candidate: Candidate) -> float:
        """Return the mean price of a candidate's GPUs; 1 for all if not every candidate has one."""
        price = candidate.per_gpu(self.question.prices)
        all_priced = all(one.per_gpu(self.question.prices) is not None for one in self.candidates)
        return 1.0 if price is None or not all_priced else price

    def engines(self, candidate: Candidate) -> int:
        """Return the engines on the given devices: as many whole deployments as fit."""
        return candidate.engines_on(self.question.gpus or candidate.gpus_per_unit)

    def _most_engines(self, candidate: Candidate) -> int:
        """Return the most engines that may serve the load asked for."""
        gpus = self.question.gpus
        return MOST_ENGINES if gpus is None else max(gpus * candidate.unit // candidate.gpus_per_unit, candidate.unit)

    def _rough_search(self, candidate: Candidate, ends_early: bool) -> Search:
        """Search a candidate roughly. With `ends_early`, skip loads at which it would need too many engines."""
        asked, within = self.question, (0.0, math.inf)
        engines = candidate.unit if asked.load is not None else self.engines(candidate)
        if asked.load is not None:  # of a smallest deployment: so little is hopeless, and more is not needed
            hopeless = asked.load * candidate.unit / (HOPELESS * self._most_engines(candidate))
            within = (hopeless if ends_early else 0.0, asked.load)
        if not engines:
            needs = f"needs {count_of(candidate.gpus_per_unit, 'GPU')}, --gpus is {asked.gpus}"
            return _nothing(SearchFinding(0.0, reason=needs))
        try:
            assemble(scenario_with(base_tables(self.scenario), {**candidate.settings, REPLICAS: engines}))
        except ForedraftError as error:
            return _nothing(SearchFinding(0.0, reason=reason_of(error)))
        settings = {**candidate.settings, REPLICAS: engines}
        sized, start = self._few_requests, self.usual_load
        return greatest_load(
            settings, self.load_key, start, asked.objectives, asked.seeds[:1], ROUGH, sized=sized, within=within
        )

    def _search_again(
        self,
        index: int,
        start: float,
        factor: float | None = None,
        *,
        tolerance: float,
        seeds: Sequence[int],
        sized: Callable[[float], Mapping[str, Any]],
        at_once: int = 1,
    ) -> Search:
        """Search the greatest load of a candidate from `start`.
        `factor`: to the next load; None: what `tolerance` allows."""
        return greatest_load(
            {**self.candidates[index].settings, REPLICAS: self.engines(self.candidates[index])},
            self.load_key,
            start,
            self.question.objectives,
            seeds,
            tolerance,
            factor or 1 + tolerance,
            sized,
            bracket_seeds=1 if self._has_slices else 2,  # a whole trace is long, and its runs differ less
            at_once=at_once,
        )

    def _fine_search(self, index: int) -> Search:
        asked, candidate, rough = self.question, self.candidates[index], self.rough[index]
        if asked.load is None:
            return self._search_again(
                index, rough.value, 1 + ROUGH, tolerance=FINE, seeds=asked.seeds[:PAIRS], sized=self._requests
            )
        if self._is_hopeless(index):
            return _nothing(replace(rough, value=0.0, interval=None, excess=math.inf))
        settings = {**candidate.settings, **self._requests(asked.load), self.load_key: asked.load}
        most, start = self._most_engines(candidate), candidate.unit * math.ceil(asked.load / rough.value)
        return least_count(settings, REPLICAS, start, candidate.unit, asked.objectives, asked.seeds, most)

    def _requests(self, load: float, share: float = 1.0) -> dict[str, Any]:
        """Return how many requests a run at this load has: enough to see whether the queue grows. Of a part of a trace
        also the windows that its seed draws."""
        window_s = None if self.trace_part is None else self.trace_part.window_s
        windows = {} if window_s is None else {"workload.resample_s": window_s}
        if self.question.requests is None:
            return windows
        arrivals = math.ceil(load * LEAST_ARRIVALS_S) if self.scenario.workload.trace is None else 0
        return {**windows, "workload.num_requests": math.ceil(share * max(self.question.requests, arrivals))}

    def _few_requests(self, load: float) -> dict[str, Any]:
        """Return how many requests a run of the first round has."""
        return self._least_slice if self.question.requests is None else self._requests(load, FIRST_SHARE)

    def _kept(self, among: Iterable[int], share: float) -> list[int]:
        """Choose the candidates to search on: those with `share` of the best load per cost, at least KEPT_AT_LEAST, and
        plain decoding.

        Stores every candidate's share in `first_share`.
        """

        def per_cost(index: int) -> float:
            candidate = self.candidates[index]
            engines = candidate.unit if self.question.load is not None else self.engines(candidate)
            return self.rough[index].value / (candidate.gpus_of(engines) * self.gpu_cost(candidate))

        able = sorted((index for index in among if self.rough[index].value > 0), key=per_cost, reverse=True)
        if not able:
            return []
        self.first_share |= {index: per_cost(index) / per_cost(able[0]) for index in able}
        return [
            index
            for place, index in enumerate(able)
            if place < KEPT_AT_LEAST
            or self.first_share[index] >= share
            or self.candidates[index].name.startswith("plain decoding")
        ]


def _nothing(finding: SearchFinding) -> Search:
    """Return a search that asks for no run."""
    return finding
    yield  # a generator
