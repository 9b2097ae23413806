"""ACCEPT-24 … 26: simulated acceptance is a function of its keys, has the law that was configured, and follows its seed."""

from __future__ import annotations

from ...properties.harness.trial import Trial
from ...properties.invariants.registry import Finding, Outcome, checks
from .model import Moment

CONTRACT = "acceptance-process"


@checks("ACCEPT-24", CONTRACT, on=("ask", "measure", "measure-mean", "measure-recordings", "tree", "day"))
def answers_are_functions(m: Moment) -> Outcome:
    for what, was, should in m.differences:
        return Finding(f"{what}: {was}", f"{should}", "another batch, block or step count would be another simulation")
    return True if m.asked or m.shares else None


@checks("ACCEPT-25", CONTRACT, on=("measure", "measure-mean", "measure-recordings"))
def shares_are_as_configured(m: Moment) -> Outcome:
    for share in m.shares:
        if abs(share.measured - share.due) > share.tolerance:
            was, should = (
                f"{share.measured:.3f} of the {share.what}",
                f"{share.due:.3f}, give or take {share.tolerance:.3f}",
            )
            return Finding(was, should, "a simulation of it says nothing about what was configured")
    return True if m.shares else None


@checks("ACCEPT-26", CONTRACT, twin="with another seed")
def another_seed_is_another_set_of_requests(runs: tuple[Trial, Trial]) -> Outcome:
    first, second = (trial.transcript for trial in runs)
    if len({value for answer in first for row in answer for value in row}) < 2:
        return None  # these requests are all alike
    if first == second:
        was = f"{len(first)} answers are those of another seed"
        return Finding(was, "other ones", "repetitions of a simulation would be one simulation")
    return True
