"""How far the cost model may be wrong about the candidates of a plan, and about the difference of two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...sim.assembly import Assembly, assemble
from ...sim.assembly.confidence import TIMES, difference, factors, rests_on
from ...sim.cost.deployments.evidence import DRAFTED_BATCHES, NOTHING, Interval, published_errors
from ...sim.scenario import Scenario
from ...sim.scenario_file import scenario_with
from ..candidates.candidate import REPLICAS, Candidate, base_tables
from ..search.judge import SearchFinding
from ..slo import Objective
from .model_error import LimitCurve, SimulationErrors, count_range, load_range
from .ranked import Ranked

SOURCE = "published deployments that share as much as these; at least that of speed-ups, docs/evidence/accuracy.md"
"""Where the error of comparisons comes from."""


class ModelErrors:
    """The errors of the cost model for the candidates of a plan."""

    def __init__(self, scenario: Scenario, objectives: Sequence[Objective]) -> None:
        self._tables = base_tables(scenario)
        self._objectives = objectives
        self._assemblies: dict[tuple[str, int], Assembly] = {}

    def assembly(self, candidate: Candidate, engines: int) -> Assembly:
        """Return the parts of a candidate with so many engines. Raises a ForedraftError if it cannot run."""
        key = candidate.name, engines
        if key not in self._assemblies:
            self._assemblies[key] = assemble(scenario_with(self._tables, {**candidate.settings, REPLICAS: engines}))
        return self._assemblies[key]

    def run_of(self, item: Ranked) -> Assembly:
        """Return the parts of a candidate that holds its load, with the engines that it has there."""
        return self.assembly(item.candidate, item.candidate.engines_on(item.gpus))

    def rests_on(self, item: Ranked) -> str:
        """Say what the intervals of a candidate rest on."""
        return rests_on(self.run_of(item))

    def errors_of(self, item: Ranked) -> SimulationErrors | None:
        """Return the errors of a candidate's times at its load; None where nothing is known of them."""
        found = factors(self.run_of(item), item.finding.summary)
        return SimulationErrors.of(found, self._objectives) if found else None

    def load_range(self, item: Ranked, curve: LimitCurve) -> tuple[float, float] | None:
        """Return the 80 % interval of the greatest load of a candidate; None where nothing is known."""
        errors = self.errors_of(item)
        return None if errors is None or item.finding.is_bound else load_range(curve, item.load, errors)

    def gpu_range(self, item: Ranked, curve: LimitCurve) -> tuple[int | None, int | None] | None:
        """Return the 80 % interval of the GPUs that a candidate needs for its load, None in the place of an end that is
        not known; None where nothing is known."""
        errors, candidate = self.errors_of(item), item.candidate
        if errors is None:
            return None
        counts = count_range(curve, item.load, candidate.unit, errors)
        least, most = (None if count is None else candidate.gpus_of(count) for count in counts)
        return least, most

    def taken_range(self, item: Ranked) -> tuple[float, float] | None:
        """Return the 80 % interval of the share that a candidate takes of its tightest limit at its load."""
        errors, tightest = self.errors_of(item), item.finding.tightest
        if errors is None or tightest is None:
            return None
        factor: Interval = errors.latencies[list(self._objectives).index(tightest)]
        return item.finding.excess * factor.low, item.finding.excess * factor.high

    def compare(self, best: Ranked, item: Ranked, curves: tuple[LimitCurve, LimitCurve]) -> float:
        """Return the error of log(load of the best / load of this candidate): half of its 80 % interval.

        The error of a ratio of times is that of published deployments which share as much as these two. It is at least
        the error of published speed-ups, which is all that is known of one deployment that decodes in two ways. The
        loads follow the times as much as both curves say on average.
        """
        follows = sum(curve.sensitivity(len(self._objectives)) for curve in curves) / 2
        return follows * self._of_times(best, item)

    def _of_times(self, best: Ranked, item: Ranked) -> float:
        """Return the error of log(time of the best / time of this candidate)."""
        mine, other = self.run_of(best), self.run_of(item)
        least = max(speed_up_error(mine), speed_up_error(other))
        tightest = [of.finding.tightest for of in (best, item) if of.finding.tightest is not None]
        times = [TIMES[name] for one in tightest for name in one.latencies]
        summaries = best.finding.summary, item.finding.summary
        differences = [difference(time, mine, summaries[0], other, summaries[1]) for time in dict.fromkeys(times)]
        return max([least, *(one for one in differences if one is not None)])


def speed_up_error(run: Assembly) -> float:
    """Return half of the 80 % interval of the logarithm of a speed-up over plain decoding on the same deployment."""
    if run.evidence is None:
        return published_errors()["roofline"].speed_ups[NOTHING]
    return run.evidence.speed_up_error


def about_speed_ups(run: Assembly) -> str:
    """Say how sure speed-ups and break-even lengths are, and for which batches that is known."""
    batches = " and ".join(map(str, DRAFTED_BATCHES))
    differences = f"80 % intervals of speed-ups and break-even lengths are ±{math.expm1(speed_up_error(run)):.0%}"
    if run.evidence is not None and run.evidence.is_of_unknown_gpu:
        return f"{differences}: no benchmark of this GPU, order of magnitude (docs/evidence/accuracy.md)."
    return (
        f"{differences}: published ones at batch {batches} whose model or draft shape was left out (docs/evidence/accuracy.md). Nothing is "
        "published for larger batches."
    )


def curve_of(fine: SearchFinding, rough: SearchFinding | None, fine_engines: float, rough_engines: float) -> LimitCurve:
    """Return the curve of a candidate by the load of one engine, from its two searches.

    `fine_engines`, `rough_engines`: the engines on which a load of the search was spread.
    """
    curve = LimitCurve.of({load / fine_engines: shares for load, shares in fine.curve.items()})
    if rough is None or rough is fine or not curve.loads:
        return curve
    other = LimitCurve.of({load / rough_engines: shares for load, shares in rough.curve.items()})
    at = min(curve.loads, key=lambda load: abs(max(curve.shares[curve.loads.index(load)])))
    return curve.extended(other, at)


def curve_of_counts(fine: SearchFinding, rough: SearchFinding | None, load: float, rough_engines: int) -> LimitCurve:
    """Return the same for a search over the number of engines that serve `load`."""
    by_load = {load / count: shares for count, shares in fine.curve.items()}
    return curve_of(SearchFinding(0.0, curve=by_load), rough, 1.0, rough_engines)
