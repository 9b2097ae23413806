"""Compares the decisions of two schedulers step by step, and infers by which rules another one decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from foredraft.core.scheduler.rules.admission_state import PauseEnd

from .our_scheduler import RULES, OurRun
from .workloads import Decision, DrawnWorkload

FEATURES = ("preempts", "chunks", "hits the cache", "speculates", "synchronous")
PARTS = ("preempted", "prefill", "decode", "cached", "blocks")  # in the order in which a difference is named


class SchedulerRun(Protocol):
    """One workload on a scheduler. `notes`: what of the run so far no scheduler of ours can repeat."""

    notes: set[str]

    def decisions(self) -> Iterator[Decision]:
        """Yield what the scheduler decides in each plan, until all requests have ended."""


@dataclass
class Difference:
    """The first difference of a workload."""

    seed: int
    step: int
    part: str  # one of PARTS, or how our engine failed
    theirs: object
    ours: object
    notes: set[str]


@dataclass
class RunComparison:
    """One workload: its features by what the other server did, and how many of its steps were equal."""

    seed: int
    features: set[str]
    steps: int = 0
    equal: int = 0
    difference: Difference | None = None


class FeatureFinder:
    """Finds which of FEATURES a workload has, by the decisions of a scheduler."""

    def __init__(self, workload: DrawnWorkload) -> None:
        self.found: set[str] = set()
        self._in_progress: set[str] = set()
        if workload.steps:
            self.found.add("speculates")
        if not workload.is_async:
            self.found.add("synchronous")

    def see(self, decision: Decision) -> None:
        """Take note of one decision."""
        names = {name for name, _ in decision.prefill}
        if names & self._in_progress:
            self.found.add("chunks")
        self._in_progress |= names
        self._in_progress -= {name for name, _ in decision.decode} | set(decision.preempted)
        if decision.preempted:
            self.found.add("preempts")
        if any(count for _, count in decision.cached):
            self.found.add("hits the cache")


def compare(workload: DrawnWorkload, theirs: SchedulerRun, ours: OurRun) -> RunComparison:
    """Compare two runs of a workload. Behind the first difference no step counts as equal."""
    finder, our_decisions = FeatureFinder(workload), ours.decisions()
    outcome = RunComparison(workload.seed, finder.found)
    for step, their in enumerate(theirs.decisions()):
        finder.see(their)
        outcome.steps += 1
        if outcome.difference is None:
            our = next(our_decisions, None)
            outcome.difference = _difference(workload.seed, step, their, our, theirs.notes if their != our else set())
            outcome.equal += outcome.difference is None
    return outcome


def _difference(seed: int, step: int, theirs: Decision, ours: Decision | None, notes: set[str]) -> Difference | None:
    if ours is None:
        return Difference(seed, step, "length", theirs, None, notes)
    part = next((part for part in PARTS if getattr(theirs, part) != getattr(ours, part)), None)
    return part and Difference(seed, step, part, getattr(theirs, part), getattr(ours, part), notes)


@dataclass
class Totals:
    """Sums over workloads."""

    workloads: Counter[str] = field(default_factory=Counter)
    equal_workloads: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(self, outcome: RunComparison) -> None:
        """Count a workload with all its features."""
        for feature in ("all", *outcome.features):
            self.workloads[feature] += 1
            self.equal_workloads[feature] += outcome.difference is None
            self.steps[feature] += outcome.steps
            self.equal[feature] += outcome.equal
        if outcome.difference is not None:
            self.differences.append(outcome.difference)

    @property
    def share(self) -> float:
        """The share of equal steps."""
        return self.equal["all"] / max(self.steps["all"], 1)

    def table(self) -> list[str]:
        """Return the shares by feature, in Markdown."""
        lines = ["| workloads | number | equal throughout | steps | equal steps |", "| --- | --- | --- | --- | --- |"]
        for feature in ("all", *FEATURES):
            share = self.equal[feature] / max(self.steps[feature], 1)
            number, same = self.workloads[feature], self.equal_workloads[feature]
            lines.append(f"| {feature} | {number:,} | {same:,} | {self.steps[feature]:,} | {share:.2%} |")
        return lines

    def causes(self) -> Iterator[str]:
        """Yield the first differences in groups, with one example each."""
        groups: dict[tuple[str, ...], list[Difference]] = {}
        for difference in self.differences:
            groups.setdefault((difference.part, *sorted(difference.notes)), []).append(difference)
        for (part, *notes), found in sorted(groups.items(), key=lambda group: -len(group[1])):
            first = found[0]
            why = f" ({'; '.join(notes)})" if notes else ""
            yield f"{len(found)} in what is {part}{why}; for example workload {first.seed}, step {first.step}:"
            yield f"    they {first.theirs}"
            yield f"    we   {first.ours}"


def compare_all(
    start: Callable[[DrawnWorkload], SchedulerRun], workloads: Iterable[DrawnWorkload], server: str, **changes: Any
) -> Totals:
    """Compare a scheduler with ours over workloads. `changes`: as for `make_engine`."""
    totals = Totals()
    for workload in workloads:
        totals.add(compare(workload, start(workload), OurRun(server, workload, **changes)))
    return totals


OTHER_RULES: dict[str, tuple[Any, ...]] = {
    **{name: (False, True) for name in RULES if name not in ("pause_ends", "retries_after_departure")},
    "pause_ends": tuple(PauseEnd),
    "reserve_full_isl": (True, False),
    "eviction_policy": ("release", "lru", "fifo"),
    "watermark": (0.0, 0.01),
}
"""The values of each rule that are tried to explain a release."""


def infer_rules(
    start: Callable[[DrawnWorkload], SchedulerRun], workloads: list[DrawnWorkload], server: str
) -> tuple[dict[str, Any], float]:
    """Return the rules that explain a scheduler better than those of `server`, and the share of steps they explain.

    Takes the change of one rule that explains most, and tries again, until no change explains one step in a thousand
    more.
    """
    changed: dict[str, Any] = {}
    best = compare_all(start, workloads, server).share
    while best < 1.0:
        trials: dict[tuple[str, Any], float] = {}
        for name, values in OTHER_RULES.items():
            for value in values:
                if name not in changed:
                    rules: Mapping[str, Any] = {**changed, name: value}
                    trials[name, value] = compare_all(start, workloads, server, **rules).share
        (name, value), share = max(trials.items(), key=lambda trial: trial[1])
        if share < best + 0.001:
            break
        changed[name], best = value, share
    return changed, best
