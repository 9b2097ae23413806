"""STEPS-01 … STEPS-17, but STEPS-07, which is about the engine: what is true of every controller of draft steps.

A checker gets a `StepControllerMoment` (`step_controller/model.py`) and looks at it alone; those about two runs get
both trials.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ..harness.invariants import Finding, Outcome, checks
from .model import Shown, StepControllerMoment

if TYPE_CHECKING:
    from ..harness.trial import Trial

CONTRACT = "step-controller"
MAX_SWITCHES = 10  # in a stretch of up to 10,000 stationary rounds, of a controller that bounds its switches
FREE_PROBES = 8
INTERVALS_PER_PROBE = 16  # between two probes that fail, after the free ones
ESTIMATE_ERROR = 0.08
LEAST_SHARE = 0.97  # of the throughput of the best fixed steps
ORDER_ERROR = 1e-6  # of two sums in floating point, relative

_AS_IT_WAS = "all as it was"


@checks("STEPS-01", CONTRACT)
def steps_are_candidates_of_the_range(m: StepControllerMoment) -> Outcome:
    wrong = m.stray_choice or _wrong_choice(m)
    if wrong is None:
        return True
    size, steps, allowed = wrong
    if m.config.captured:
        allowed = f"{allowed}, the range of the captured size that it is padded to ({list(m.config.captured)})"
    was = f"{steps} steps for {size} rows"
    return Finding(was, f"one of {allowed}", "nothing was built, captured or reserved for others")


def _wrong_choice(m: StepControllerMoment) -> tuple[int, int, tuple[int, ...]] | None:
    """Return (batch size, steps, candidates) of the first choice that is no candidate."""
    chosen = zip(m.batch_sizes, m.after.steps, m.candidates, strict=True)
    return next((choice for choice in chosen if choice[1] not in choice[2]), None)


@checks("STEPS-02", CONTRACT, "misuse")
def garbage_does_no_harm(m: StepControllerMoment) -> Outcome:
    if m.unfinite:
        return Finding(m.unfinite, "a finite number", "what is not finite stays so: the choice never changes again")
    if m.garbage is None:
        return None
    wrong = _wrong_choice(m)
    if wrong is None:
        return True
    size, steps, allowed = wrong
    was = f"after {m.garbage} correct drafts, {steps} steps for {size} rows"
    return Finding(was, f"one of {allowed}", "one broken result must not end the service")


@checks("STEPS-03", CONTRACT, twin="again")
def equal_histories_equal_choices(runs: tuple[Trial, Trial]) -> Outcome:
    first, second = runs
    for one, two in zip(first.transcript, second.transcript, strict=False):
        if one != two:
            (what, refusal, steps), (_, other_refusal, others) = one, two
            return Finding(
                f"after {what} ({'refused' if refusal else 'done'}): steps {list(steps)}, and in an equal run "
                f"{list(others)} ({'refused' if other_refusal else 'done'})",
                "the same for the same history",
                "two ranks would run different graphs and wait for each other",
            )
    return True


@checks("STEPS-04", CONTRACT, "probes", on=("offer", "phase"))
def zero_is_a_way_station(m: StepControllerMoment) -> Outcome:
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
    limit = FREE_PROBES + len(stretch.history) // (INTERVALS_PER_PROBE * m.table.update_interval)
    if probes > limit:
        was = f"{probes} probes in {len(stretch.history)} rounds, none of which had a draft accepted"
        return Finding(was, f"at most {limit}: fewer and fewer", "every probe costs, and zero was chosen for a reason")
    return True


@checks("STEPS-05", CONTRACT, "settles", on=("phase",))
def stationary_input_settles(m: StepControllerMoment) -> Outcome:
    stretch = m.stretch
    if stretch is None:
        return None
    switches, rounds = stretch.switches, len(stretch.history)
    where = f"{stretch.process} at {stretch.batch_size} rows"
    if m.is_bounded:
        if len(switches) <= MAX_SWITCHES:
            return True
        was = f"{len(switches)} switches in {rounds} rounds of {where}"
        return Finding(was, f"at most {MAX_SWITCHES}", "the input is stationary: the same steps are best all the time")
    for last, at in itertools.pairwise(switches):
        if at - last < m.table.update_interval:
            was = f"switches at rounds {last} and {at} of {where}"
            should = f"at most one per {m.table.update_interval} rounds, the update interval"
            return Finding(was, should, "between two looks at the estimate there is nothing to change the choice")
    is_constant = stretch.process.startswith(("always", "mixed"))
    late = [at for at in switches if at >= rounds // 2]
    # A ceiling may undo a rise that the thresholds ask for, again and again.
    if is_constant and stretch.candidates[0] > 0 and not m.table.ceiling_coeff and late:
        was = f"a switch at round {late[0]} of {rounds}, every one of which accepted the same ({where})"
        return Finding(was, "none once it has settled", "thresholds that overlap make the choice swing for ever")
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
        is_wrong, change, bound = there.settled < here.settled, "one more accepted draft in every row", "least"
        why = "more acceptance makes every draft step worth more"
    else:
        is_wrong, change, bound = there.settled > here.settled, "verification four times as dear", "most"
        why = "every step costs more, and brings no more"
    if not (is_wrong and is_worse):
        return True
    return Finding(
        f"{here.process} at {here.batch_size} rows settles at {here.settled} steps, and with {change} at {there.settled}",
        f"at {bound} {here.settled}",
        why,
    )


@checks("STEPS-08", CONTRACT, "goodput", on=("phase",))
def as_good_as_the_best_fixed(m: StepControllerMoment) -> Outcome:
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


@checks("STEPS-09", CONTRACT, "reload", on=("reload", "reload-broken"))
def a_broken_table_changes_nothing(m: StepControllerMoment) -> Outcome:
    if m.operation.tag == "reload":
        if m.refusal is None:
            return True
        was = f"a valid table was refused: {m.refusal}"
        return Finding(was, "it is taken", "a table that cannot be changed needs a restart")
    changed = _difference(m.before, m.after)
    if changed:
        was = f"a table damaged so: {m.operation.how}; {changed}"
        return Finding(was, "the running policy as it was", "the last good table stays")
    return True


@checks("STEPS-10", CONTRACT, on=("deliver", "idle", "observe", "garbage", "repeat", "multi-step", "interval", "phase"))
def every_result_counts_once(m: StepControllerMoment) -> Outcome:
    if m.garbage is None and m.refusal is not None:
        was = f"a good result was refused: {m.refusal}"
        return Finding(was, "it is counted", "the estimate does not follow the results")
    if m.garbage is not None and m.refusal is None:
        return None  # STEPS-02 looks at what was made of it
    before, after, observed = m.before, m.after, m.observed
    if after.counted is not None:
        should = tuple(was + more for was, more in zip(before.counted, m.added, strict=True))
        if after.counted != should:
            was = f"counted {list(after.counted)} (results, rows, correct, proposed)"
            should = f"{list(should)}, {list(before.counted)} and {list(m.added)} more"
            return Finding(was, should, "accept length and accept rate are quotients of these")
    if m.miscounted is not None:
        name, says, wanted = m.miscounted
        return Finding(f"the gauge {name} is {says}", f"{wanted}", "it is what an operator sees of the results so far")
    if observed is None:
        return True
    if m.garbage is None and observed.correct:
        return _has_its_weight(m)
    changed = _difference(before, after)
    if changed:
        what = "a refused result" if m.garbage is not None else "a result without rows"
        return Finding(f"after {what}, {changed}", _AS_IT_WAS, "there was nothing to learn from it")
    return True


def _has_its_weight(m: StepControllerMoment) -> Outcome:
    """Return whether a result of the current steps has moved the average of its own range, and no other."""
    observed = m.observed
    if m.after.averages is None or observed.executed != observed.current:
        return True
    mean = sum(observed.correct) / len(observed.correct)
    averages = zip(m.batch_sizes, observed.in_range, m.before.averages, m.after.averages, strict=True)
    for size, shares, was, now in averages:
        if observed.current == 0 and was < 0:
            continue  # nothing was measured yet: a first probe begins from a neutral value
        should = (1 - m.table.ema_alpha) * was + m.table.ema_alpha * mean if shares and observed.current else was
        if not math.isclose(now, should, rel_tol=1e-9, abs_tol=1e-9):
            was = f"the average for {size} rows went from {was:.6g} to {now:.6g} with a mean of {mean:.6g}"
            should = f"{should:.6g}" + ("" if shares else ": another range got it")
            return Finding(was, should, "each result has the weight ema_alpha, once, in its own range")
    return True


@checks("STEPS-11", CONTRACT, "runtime")
def graphs_are_those_that_routing_reaches(m: StepControllerMoment) -> Outcome:
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
def a_round_finds_the_graph_of_its_key(m: StepControllerMoment) -> Outcome:
    if m.attached == "failing" and m.refusal is None:
        return Finding("a graph could not be built, and no error was raised", "the error goes on", "it is missing")
    if m.attached == "failing":
        changed = _difference(m.before, m.after)
        if changed:
            return Finding(f"after a failed build, {changed}", _AS_IT_WAS, "the caller goes on with what it had")
    elif m.attached and m.refusal is not None:
        return Finding(f"the graphs were not built: {m.refusal}", "they are, nothing fails", "nothing can be launched")
    if m.after.graphs != m.graphs:
        found, due = next((a, b) for a, b in zip(m.after.graphs, m.graphs, strict=True) if a != b)
        was = f"a round finds {found}"
        should = f"{due or 'none'}, built before the first round under its steps, draft tokens and padded batch size"
        return Finding(was, should, "another graph computes other tokens, and building one stops the service")
    is_launch = getattr(m.operation, "tag", "") in ("repeat", "phase", "offer", "reload")
    return True if m.attached or is_launch else None


@checks("STEPS-13", CONTRACT, "averages", on=("deliver", "observe"))
def feedback_of_other_steps_is_left_out(m: StepControllerMoment) -> Outcome:
    observed = m.observed
    if observed is None or not observed.correct or observed.executed == observed.current or m.capabilities.untold_steps:
        return None
    changed = _difference(m.before, m.after._replace(counted=m.before.counted))
    if changed:
        return Finding(
            f"after a round of {observed.executed} steps while it would choose {observed.current}, {changed}",
            _AS_IT_WAS,
            "a round of fewer steps cannot accept more, so its mean says nothing about the current ones",
        )
    return True


@checks("STEPS-14", CONTRACT, "average_rule")
def choices_are_those_of_the_rule(m: StepControllerMoment) -> Outcome:
    if m.departed is None:
        return True
    size, steps, due = m.departed
    return Finding(
        f"{steps} steps for {size} rows",
        f"{due}, by the rule of the moving average with the results so far",
        "the table was tuned for this rule, and another engine that reads it would choose otherwise",
    )


@checks("STEPS-15", CONTRACT, "sizing")
def reservations_hold_the_largest_round(m: StepControllerMoment) -> Outcome:
    if m.reserved is None:
        return None
    reserved, least, most = m.reserved
    if least <= reserved <= most:
        return True
    why = "a round of the largest candidate writes beyond it" if reserved < least else "no round ever needs so much"
    return Finding(f"room for {reserved} draft tokens", f"{least} to {most}, those of the largest candidate", why)


@checks("STEPS-16", CONTRACT, "estimates", on=("repeat", "multi-step", "phase"))
def estimates_are_what_was_accepted(m: StepControllerMoment) -> Outcome:
    if not m.expected:
        return None
    for steps, tokens in m.expected:
        if not 1 <= tokens <= (steps + 1) * (1 + ESTIMATE_ERROR):
            was = f"{tokens:.6g} tokens per row expected of {steps} steps"
            return Finding(was, f"1 to {steps + 1}", "no round can yield that")
    for (fewer, less), (more, tokens) in itertools.pairwise(m.expected):
        if tokens < less * (1 - ESTIMATE_ERROR):
            was = f"{less:.6g} tokens per row expected of {fewer} steps and {tokens:.6g} of {more}"
            return Finding(was, "not fewer of more steps", "a longer chain accepts all that a shorter one does")
    stretch = m.stretch
    if stretch is None:
        return True
    expected, exact = dict(m.expected)[stretch.settled], stretch.tokens_per_row[stretch.settled]
    if abs(expected - exact) > ESTIMATE_ERROR * exact:
        was = f"{expected:.4g} tokens per row expected of {stretch.settled} steps after {stretch.process}"
        return Finding(was, f"{exact:.4g}, what they yielded", "the choice rests on it")
    return True


@checks("STEPS-17", CONTRACT, "unordered", on=("interval",))
def results_of_an_interval_have_no_order(m: StepControllerMoment) -> Outcome:
    for (steps, one), (_, two) in zip(m.expected, m.reordered, strict=True):
        if not math.isclose(one, two, rel_tol=ORDER_ERROR):
            was = f"{one:.6g} tokens per row expected of {steps} steps, and {two:.6g} with the last result first"
            return Finding(was, "the same", "results of one interval come in whatever order its rounds have")
    return True if m.reordered else None


def _difference(before: Shown, after: Shown) -> str:
    """Say what is not as it was; empty if all is."""
    for name, was, now in zip(Shown._fields, before, after, strict=True):
        if was != now:
            if name == "state":
                return "the state " + _first_difference(was, now)
            return f"{name} went from {_shown(was)} to {_shown(now)}"
    return ""


def _first_difference(was: object, now: object) -> str:
    """Say which innermost part of a frozen state has changed."""
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        for a, b in zip(was, now, strict=True):
            if a != b:
                named = isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], str) and a[0] == b[0]
                return f"at {a[0]!r} {_first_difference(a[1], b[1])}" if named else _first_difference(a, b)
    return f"went from {_shown(was)} to {_shown(now)}"


def _shown(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 100 else text[:99] + "…"
