"""STEPS-01 … STEPS-13, but STEPS-07, which is about the engine: what is true of every controller of draft steps.

A checker gets a `Moment` (`step_controller/moment.py`) and looks at it alone; those about two runs get both trials.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ..step_controller.moment import Moment, Shown
from ..step_controller.operations import (
    Deliver,
    Garbage,
    Idle,
    Observe,
    Offer,
    Phase,
    Reload,
    ReloadBroken,
    Repeat,
)
from .registry import Finding, Outcome, checks

if TYPE_CHECKING:
    from ..harness.trial import Trial

CONTRACT = "step-controller"

MAX_SWITCHES = 10
"""In a stretch of up to 10,000 stationary rounds, of a controller that bounds its switches."""

FREE_PROBES = 8
INTERVALS_PER_PROBE = 16
"""After the first few, so many intervals must lie between two probes that fail."""

LEAST_SHARE = 0.97
"""Of the throughput of the best fixed steps."""


@checks("STEPS-01", CONTRACT)
def steps_are_candidates_of_the_range(m: Moment) -> Outcome:
    chosen = list(zip(m.batch_sizes, m.after.steps, m.candidates, strict=True))
    wrong = [(size, steps, allowed) for size, steps, allowed in chosen if steps not in allowed]
    if m.stray_choice is not None:
        wrong = [m.stray_choice]
    if not wrong:
        return True
    size, steps, allowed = wrong[0]
    if m.config.captured:
        allowed = f"{allowed}, the range of the captured size that it is padded to ({list(m.config.captured)})"
    return Finding(
        f"{steps} steps for {size} rows", f"one of {allowed}", "nothing was built, captured or reserved for others"
    )


@checks("STEPS-02", CONTRACT)
def garbage_does_no_harm(m: Moment) -> Outcome:
    if m.unfinite:
        return Finding(m.unfinite, "a finite number", "what is not finite stays so: the choice never changes again")
    if m.garbage is None:
        return None
    for size, steps, allowed in zip(m.batch_sizes, m.after.steps, m.candidates, strict=True):
        if steps not in allowed:
            return Finding(
                f"after {m.garbage} correct drafts, {steps} steps for {size} rows",
                f"one of {allowed}",
                "one broken result must not end the service",
            )
    return True


@checks("STEPS-03", CONTRACT, twin="again")
def equal_histories_equal_choices(runs: tuple[Trial, Trial]) -> Outcome:
    first, second = runs
    if first.transcript == second.transcript:
        return True
    at = next((i for i, (a, b) in enumerate(zip(first.transcript, second.transcript, strict=False)) if a != b), -1)
    what, how, steps = first.transcript[at]
    _, other, others = second.transcript[at]
    return Finding(
        f"after {what} ({'refused' if how else 'done'}): steps {list(steps)}, and in an equal run "
        f"{list(others)} ({'refused' if other else 'done'})",
        "the same for the same history",
        "two ranks would run different graphs and wait for each other",
    )


@checks("STEPS-04", CONTRACT, "adaptive", on=(Offer, Phase))
def zero_is_a_way_station(m: Moment) -> Outcome:
    if m.offered is not None:
        size, rounds, drafts, limit = m.offered
        if drafts:
            return True
        return Finding(
            f"0 steps for {size} rows after {rounds} rounds in which every draft would have been accepted",
            f"a probe within {limit} rounds",
            "without a probe nothing is ever measured again, and speculation is off until the restart",
        )
    stretch = m.stretch
    if stretch is None or stretch.process not in ("useless", "always-0"):
        return None
    probes = sum(stretch.history[at] > 0 == stretch.history[at - 1] for at in stretch.switches)
    limit = FREE_PROBES + len(stretch.history) // (INTERVALS_PER_PROBE * m.update_interval)
    if probes > limit:
        return Finding(
            f"{probes} probes in {len(stretch.history)} rounds, none of which had a draft accepted",
            f"at most {limit}: fewer and fewer",
            "every probe costs, and zero was chosen for a reason",
        )
    return True


@checks("STEPS-05", CONTRACT, "adaptive", on=(Phase,))
def stationary_input_settles(m: Moment) -> Outcome:
    stretch = m.stretch
    if stretch is None:
        return None
    switches, rounds = stretch.switches, len(stretch.history)
    where = f"{stretch.process} at {stretch.batch_size} rows"
    if m.bounded and len(switches) > MAX_SWITCHES:
        return Finding(
            f"{len(switches)} switches in {rounds} rounds of {where}",
            f"at most {MAX_SWITCHES}",
            "the input is stationary: whatever is best, it is the same all the time",
        )
    for last, at in itertools.pairwise(switches):
        if not m.bounded and at - last < m.update_interval:
            return Finding(
                f"switches at rounds {last} and {at} of {where}",
                f"at most one per {m.update_interval} rounds, the update interval",
                "between two looks at the estimate there is nothing to change the choice",
            )
    is_constant = stretch.process.startswith(("always", "mixed"))
    late = [at for at in switches if at >= rounds // 2]
    if is_constant and late and not m.bounded and stretch.candidates[0] > 0:
        return Finding(
            f"a switch at round {late[0]} of {rounds}, every one of which accepted the same ({where})",
            "none once it has settled",
            "thresholds that overlap make the choice swing for ever",
        )
    return True


@checks("STEPS-06", CONTRACT, "adaptive", twin="with more acceptance, or dearer verification")
def choices_follow_acceptance_and_cost(runs: tuple[Trial, Trial]) -> Outcome:
    first, other = runs
    # The first stretch begins in equal states.
    if not first.stretches or not other.stretches or first.stretches[0][0] != other.stretches[0][0]:
        return None
    here, there = first.stretches[0][1], other.stretches[0][1]
    if first.config.varied == "cost" or first.capabilities.goodput:
        # One that knows the cost may stay where it came from as long as that is as good.
        is_worse = there.rates[there.settled] < LEAST_SHARE * there.rates[min(here.settled, max(there.rates))]
    else:
        is_worse = here.candidates[0] > 0
    if first.config.varied == "acceptance":
        if there.settled < here.settled and is_worse:
            return Finding(
                f"{here.process} at {here.batch_size} rows settles at {here.settled} steps, and with one more accepted "
                f"draft in every row at {there.settled}",
                f"at least {here.settled}",
                "more acceptance makes every draft step worth more",
            )
    elif there.settled > here.settled and is_worse:
        return Finding(
            f"{here.process} at {here.batch_size} rows settles at {here.settled} steps, and with verification four times as "
            f"dear at {there.settled}",
            f"at most {here.settled}",
            "every step costs more, and brings no more",
        )
    return True


@checks("STEPS-08", CONTRACT, "goodput", on=(Phase,))
def as_good_as_the_best_fixed(m: Moment) -> Outcome:
    stretch = m.stretch
    if stretch is None:
        return None
    best = max(stretch.rates, key=stretch.rates.get)
    if stretch.rate >= LEAST_SHARE * stretch.rates[best]:
        return True
    return Finding(
        f"{stretch.rate:,.0f} tokens per second over {len(stretch.history)} rounds of {stretch.process} at "
        f"{stretch.batch_size} rows, {stretch.rate / stretch.rates[best]:.1%} of what {best} fixed steps reach",
        f"at least {LEAST_SHARE:.0%}",
        "a policy that costs more than it brings is worse than a constant",
    )


@checks("STEPS-09", CONTRACT, "reload", on=(Reload, ReloadBroken))
def a_broken_table_changes_nothing(m: Moment) -> Outcome:
    if m.reload == "valid":
        if m.refusal is None:
            return True
        return Finding(
            f"a valid table was refused: {m.refusal}", "it is taken", "a table that cannot be changed needs a restart"
        )
    changed = _difference(m.before, m.after)
    if changed:
        return Finding(
            f"a table damaged so: {m.reload}; {changed}", "the running policy as it was", "the last good table stays"
        )
    return True


@checks("STEPS-10", CONTRACT, on=(Deliver, Idle, Observe, Garbage, Repeat, Phase))
def every_result_counts_once(m: Moment) -> Outcome:
    if m.refusal is not None and m.garbage is None:
        return Finding(f"a good result was refused: {m.refusal}", "it is counted", "the estimate goes blind")
    if m.garbage is not None and m.refusal is None:
        return None  # it made something of it; what, STEPS-02 looks at
    before, after = m.before, m.after
    if after.counted is not None:
        should = tuple(was + more for was, more in zip(before.counted, m.added, strict=True))
        if after.counted != should:
            return Finding(
                f"counted {list(after.counted)} (results, rows, correct, proposed)",
                f"{list(should)}, {list(before.counted)} and {list(m.added)} more",
                "accept length and accept rate are quotients of these",
            )
    told = m.told
    if told is None:
        return True
    if m.garbage is not None or not told.correct:
        changed = _difference(before, after)
        if changed:
            what = "a refused result" if m.garbage is not None else "a result without rows"
            return Finding(f"after {what}, {changed}", "all as it was", "there was nothing to learn from it")
        return True
    if after.averages is None or told.executed != told.current:
        return True
    mean = sum(told.correct) / len(told.correct)
    for size, shares, was, now in zip(m.batch_sizes, m.same_slot, before.averages, after.averages, strict=True):
        if told.current == 0 and was < 0:
            continue  # nothing was measured yet: a first probe begins from a neutral value
        should = (1 - m.alpha) * was + m.alpha * mean if shares and told.current else was
        if not math.isclose(now, should, rel_tol=1e-9, abs_tol=1e-9):
            return Finding(
                f"the average for {size} rows went from {was:.6g} to {now:.6g} with a mean of {mean:.6g}",
                f"{should:.6g}" + ("" if shares else ": another range was told"),
                "each result has the weight ema_alpha, once, in its own range",
            )
    return True


@checks("STEPS-11", CONTRACT, "runtime")
def graphs_are_those_that_routing_reaches(m: Moment) -> Outcome:
    if m.built_keys is None:
        return None
    built, reachable = m.built_keys
    if built == reachable:
        return True
    missing, idle = sorted(reachable - built), sorted(built - reachable)
    key = "(steps, draft tokens, batch size)"
    was = f"no graph of {key} {missing[0]}" if missing else f"a graph of {key} {idle[0]}"
    why = "a batch would run without its graph" if missing else "no batch ever runs it, and it holds memory"
    return Finding(was, f"graphs of exactly {sorted(reachable)}", why)


@checks("STEPS-12", CONTRACT, "runtime")
def a_round_finds_the_graph_of_its_key(m: Moment) -> Outcome:
    if m.built is not None and m.built.failed:
        if m.built.refusal is None:
            return Finding("a graph could not be built, and nothing was said", "the error goes on", "it is missing")
        changed = _difference(m.before, m.after)
        if changed:
            return Finding(f"after a failed build, {changed}", "all as it was", "the caller goes on with what it had")
    elif m.built is not None and m.built.refusal is not None:
        return Finding(
            f"the graphs were not built: {m.built.refusal}", "they are, nothing fails", "nothing can be launched"
        )
    if m.after.graphs != m.graphs:
        found, due = next((a, b) for a, b in zip(m.after.graphs, m.graphs, strict=True) if a != b)
        return Finding(
            f"a round finds {found}",
            f"{due or 'none'}, built before the first round under its steps, draft tokens and padded batch size",
            "another graph computes other tokens, and building one stops the service",
        )
    return True if m.built is not None or isinstance(m.operation, _LAUNCHES) else None


_LAUNCHES = (Repeat, Phase, Offer, Reload)


@checks("STEPS-13", CONTRACT, "averages", on=(Deliver, Observe))
def feedback_of_other_steps_is_left_out(m: Moment) -> Outcome:
    told = m.told
    if told is None or not told.correct or told.executed == told.current:
        return None
    same = m.after._replace(counted=m.before.counted)
    changed = _difference(m.before, same)
    if changed:
        return Finding(
            f"told of a round of {told.executed} steps while it would choose {told.current}, {changed}",
            "all as it was",
            "a round of fewer steps cannot accept more, so its mean says nothing about the current ones",
        )
    return True


def _difference(before: Shown, after: Shown) -> str:
    """What is not as it was, in words; empty if all is."""
    for name, was, now in zip(Shown._fields, before, after, strict=True):
        if was != now:
            if name == "state":
                return "the state " + _first_difference(was, now)
            return f"{name} went from {_shown(was)} to {_shown(now)}"
    return ""


def _first_difference(was: object, now: object) -> str:
    """The innermost part of a frozen state that has changed."""
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        for a, b in zip(was, now, strict=True):
            if a != b:
                named = isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], str) and a[0] == b[0]
                return f"at {a[0]!r} {_first_difference(a[1], b[1])}" if named else _first_difference(a, b)
    return f"went from {_shown(was)} to {_shown(now)}"


def _shown(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 100 else text[:99] + "…"
