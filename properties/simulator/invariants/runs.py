"""SIM-01 … SIM-03 and SIM-05 … SIM-11: what is true of every simulator of a service, run by run and pair by pair.

A checker gets a `SimulatorMoment` (`simulator/answer.py`) and looks at it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil, floor
from statistics import fmean, median
from typing import Any

from ...harness.invariants import Finding, checks
from ...harness.invariants import Outcome as Verdict
from ..answer import Queueing, RequestOutcome, SimulatorAnswer, SimulatorMoment
from ..contract import SimulatorConfig

CONTRACT = "simulator"

RELATIVE = 1e-6
"""How far two computations of one number in floating point may be apart."""

HISTOGRAM, FINE_HISTOGRAM = 0.01, 0.0011
"""How far the percentiles of gaps may be off: there are too many gaps to keep each.
The second one is of a report that has `books`."""

ROUNDING_NS = 1000.0
PERCENTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
CONSTANT_SERVICE = 0.1
"""How far apart services of equal work may be, as a share: the scheduler may plan the next one while one runs."""


def _in_each(m: SimulatorMoment, *looks: Callable[[SimulatorAnswer], Finding | None]) -> Verdict:
    """Return the first finding in the runs, None if there are no runs."""
    found = (look(answer) for answer in m.runs for look in looks)
    return next((finding for finding in found if finding is not None), True) if m.runs else None


def _first_difference(a: SimulatorAnswer, b: SimulatorAnswer) -> str:
    for number, (x, y) in enumerate(zip(a.events, b.events, strict=False)):
        if x != y:
            return f"event {number} is {_shown(x)}, and was {_shown(y)}"
    return f"{len(b.events)} events, and then {len(a.events)}"


def _shown(line: str) -> str:
    return line if len(line) <= 160 else line[:157] + "…"


@checks("SIM-01", CONTRACT, on=("twice", "elsewhere"))
def the_same_twice(m: SimulatorMoment) -> Verdict:
    if m.elsewhere is not None:
        case, here, there = m.elsewhere
        was = f"service {case} of simulator/elsewhere.py has another answer in a process with other hashes of strings"
        return True if here == there else Finding(was, "the same answer", "an order of a set or of hashes decides")
    if m.twice is None:
        return None
    first, second = m.twice
    if first.events != second.events:
        was = f"the second run is another one: {_first_difference(second, first)}"
        return Finding(was, "the same history, byte for byte", "a result must be reproducible to be compared")
    if first.requests != second.requests or first.summary != second.summary:
        was = "the histories are equal, the requests or the summary are not"
        return Finding(was, "equal metrics of equal histories", "a report must follow from what happened")
    return True


@checks("SIM-02", CONTRACT)
def the_clock_never_goes_back(m: SimulatorMoment) -> Verdict:
    return _in_each(m, _clock)


def _clock(answer: SimulatorAnswer) -> Finding | None:
    for number, (before, after) in enumerate(pairwise(answer.times_ns), 1):
        if after < before:
            was = f"event {number} is at {after} ns, the one before it at {before} ns: {_shown(answer.events[number])}"
            return Finding(was, "a time that does not go back", "later events did not see its effects")
    if answer.times_ns and answer.times_ns[0] < 0:
        return Finding(f"the first event is at {answer.times_ns[0]} ns", "0 or later", "nothing happens before the run")
    return None


@checks("SIM-03", CONTRACT)
def latencies_add_up(m: SimulatorMoment) -> Verdict:
    completed = [request for answer in m.runs for request in answer.completed]
    findings = (_of_request(request) for request in completed)
    return next((finding for finding in findings if finding is not None), True) if completed else None


def _of_request(request: RequestOutcome) -> Finding | None:
    name = f"request {request.number}"
    if not request.emissions or request.first_token_ns is None or request.finish_ns is None:
        return Finding(f"{name} has completed without a token or without a time", "both", "there is nothing to measure")
    times = [ns for ns, _ in request.emissions]
    ttft_ns, e2el_ns = request.first_token_ns - request.arrival_ns, request.finish_ns - request.arrival_ns
    if not 0 <= ttft_ns <= e2el_ns:
        was = f"{name}: TTFT is {ttft_ns} ns, E2E is {e2el_ns} ns"
        return Finding(was, "0 ≤ TTFT ≤ E2E", "the first token is one of the tokens")
    gaps = [after - before for before, after in pairwise(times)]
    if min(gaps, default=0) < 0:
        return Finding(f"{name}: a gap of {min(gaps)} ns between two tokens", "0 or more", "tokens come in their order")
    if request.first_token_ns != times[0]:
        was = f"{name}: the metrics have its first token at {request.first_token_ns} ns, the history at {times[0]} ns"
        return Finding(was, "the same", "the TTFT is measured at another event")
    summed_ns = ttft_ns + sum(gaps)
    if summed_ns != e2el_ns:
        was = f"{name}: TTFT {ttft_ns} ns and gaps of {sum(gaps)} ns make {summed_ns} ns, E2E is {e2el_ns} ns"
        return Finding(was, "TTFT + sum(ITL) == E2E", "some time is in no latency")
    return None


@checks("SIM-05", CONTRACT, "traces", on=("replay",))
def a_replayed_trace_is_the_run(m: SimulatorMoment) -> Verdict:
    if m.replayed is None:
        return None
    run, replay = m.replayed
    start_ns, why = run.arrivals[0][0], "a replay must show what has happened"
    if start_ns == 0 and run.events != replay.events:
        was = f"the replay is another run: {_first_difference(replay, run)}"
        return Finding(was, "the same history", why)
    # A trace may count its times from its first request.
    if _since(run, start_ns) != _since(replay, replay.arrivals[0][0]):
        was = "the replay is another run: arrivals, tokens or their times differ, counted from the first arrival"
        return Finding(was, "the same requests at the same times", why)
    return True


def _since(answer: SimulatorAnswer, start_ns: int) -> tuple[Any, ...]:
    requests = sorted(
        (r.number, r.reason, r.arrival_ns - start_ns, tuple((ns - start_ns, tokens) for ns, tokens in r.emissions))
        for r in answer.requests
    )
    return [(ns - start_ns, prompt, output) for ns, prompt, output in answer.arrivals], requests


@checks("SIM-17", CONTRACT, "multi_steps", on=("round-by-round",))
def steps_are_their_rounds(m: SimulatorMoment) -> Verdict:
    if m.split is None:
        return None
    (_, together), (_, apart) = (_since(answer, 0) for answer in m.split)
    for x, y in zip(together, apart, strict=False):
        if x != y:
            was = f"in steps of several rounds a request has (number, reason, arrival, tokens) {x}"
            return Finding(was, f"{y}, as round by round", "several rounds at once save time, and decide nothing")
    return (
        True if len(together) == len(apart) else Finding(f"{len(together)} requests", f"{len(apart)}", "the same ones")
    )


@checks("SIM-06", CONTRACT, on=("one-more-request", "one-more-fault", "in-parts"))
def the_draws_of_others_do_not_move(m: SimulatorMoment) -> Verdict:
    if m.apart is not None:
        return _apart(*m.apart)
    if m.grown is None:
        return None
    before, after = m.grown
    what = "fault" if after.service.num_requests == before.service.num_requests else "request"
    why = f"runs that differ in one {what} can be compared only if all the rest is drawn equally"
    for number, (x, y) in enumerate(zip(before.arrivals, after.arrivals, strict=False)):
        if x != y:
            was = f"with one {what} more, request {number} arrives at {y[0]} ns with {y[1]} and {y[2]} tokens"
            return Finding(was, f"at {x[0]} ns with {x[1]} and {x[2]} tokens", why)
    known = {request.number: request for request in before.requests if request.number >= 0}
    for request in after.requests:
        old = known.get(request.number)
        if old is None or "refused" in (request.reason, old.reason):
            continue
        name = f"with one {what} more, request {request.number}"
        if request.max_tokens != old.max_tokens:
            return Finding(f"{name} asks for {request.max_tokens} tokens", f"{old.max_tokens}", why)
        is_undisturbed = request.reason == old.reason == "completed" and not request.retractions + old.retractions
        if is_undisturbed and request.runs != old.runs:
            return Finding(f"{name} gets runs of {list(request.runs)} tokens", f"{list(old.runs)}", why)
    return True


def _apart(together: SimulatorAnswer, apart: tuple[RequestOutcome, ...]) -> Verdict:
    """Compare the requests of all engines with those of each engine by itself."""
    why = "which engines are simulated together decides nothing"
    by_number = {request.number: request for request in apart}
    for request in together.requests:
        alone = by_number.get(request.number)
        if alone != request:
            was = f"an engine by itself has for request {request.number} {alone}"
            return Finding(was, f"{request}, as among the others", why)
    if len(apart) == len(together.requests):
        return True
    return Finding(f"{len(apart)} requests of engines by themselves", f"{len(together.requests)}", why)


@checks("SIM-07", CONTRACT)
def the_summary_is_of_the_run(m: SimulatorMoment) -> Verdict:
    return _in_each(m, _totals, _latencies, _goodput)


def _near(value: float | None, should: float, relative: float = RELATIVE) -> bool:
    return value is not None and abs(value - should) <= relative * max(abs(should), 1e-9)


def _totals(answer: SimulatorAnswer) -> Finding | None:
    summary, completed = answer.summary, answer.completed
    tokens = sum(sum(request.runs) for request in completed)
    retractions = sum(request.retractions for request in answer.requests)
    counts = {"completed": len(completed), "total_output_tokens": tokens, "retractions": retractions}
    for name, should in counts.items():
        if summary[name] != should:
            why = "every number that is computed from it is wrong too"
            return Finding(f"{name} is {summary[name]}", f"{should}, by recounting the requests", why)
    for request in completed:
        if request.num_output != sum(request.runs):
            was = f"request {request.number} has {request.num_output} tokens"
            return Finding(was, f"{sum(request.runs)}, by recounting the history", "a token counts once")
    duration_s = answer.duration_s
    ends = [request.finish_ns for request in completed if request.finish_ns is not None]
    lasted_ns = max(ends, default=0) - min((request.arrival_ns for request in completed), default=0)
    if duration_s * 1e9 < lasted_ns - ROUNDING_NS:
        should = f"at least {lasted_ns / 1e9:g} s, from the first arrival to the last end"
        return Finding(f"duration is {duration_s:g} s", should, "a throughput must be over the whole run")
    for name, amount in (("output_throughput", tokens), ("request_throughput", len(completed))):
        if duration_s and not _near(summary[name], amount / duration_s):
            was = f"{name} is {summary[name]}, the duration {duration_s:g} s, and {amount} were completed"
            should = f"{amount / duration_s:g}: throughput × duration is what was completed"
            return Finding(was, should, "two numbers of one report contradict each other")
    return None


def _latencies(answer: SimulatorAnswer) -> Finding | None:
    completed = answer.completed
    ttft = [request.emissions[0][0] - request.arrival_ns for request in completed]
    e2el = [request.emissions[-1][0] - request.arrival_ns for request in completed]
    several = [(e - t) / (sum(r.runs) - 1) for r, t, e in zip(completed, ttft, e2el, strict=True) if sum(r.runs) > 1]
    gaps = [after[0] - before[0] for request in completed for before, after in pairwise(request.emissions)]
    measured = {"ttft": (ttft, RELATIVE), "tpot": (several, RELATIVE), "e2el": (e2el, RELATIVE)}
    # Gaps of requests that were aborted may count, too: then only the order of the percentiles is known.
    if len(completed) == len(answer.requests) - len(answer.of_reason("refused")):
        measured["itl"] = (gaps, HISTOGRAM if answer.books is None else FINE_HISTOGRAM)
    for name in ("ttft", "tpot", "itl", "e2el"):
        shown = [answer.summary[f"{key}_{name}_ms"] for key in PERCENTILES]
        if None not in shown and any(b < a for a, b in pairwise(shown)):
            said = ", ".join(f"{key} {value:g}" for key, value in zip(PERCENTILES, shown, strict=True))
            return Finding(f"{name}: {said} ms", "no percentile below a smaller one", "they are of one distribution")
    found = (_of_distribution(answer, name, sorted(ns), tolerance) for name, (ns, tolerance) in measured.items())
    return next((finding for finding in found if finding is not None), None)


def _of_distribution(answer: SimulatorAnswer, name: str, values_ns: list[float], tolerance: float) -> Finding | None:
    """Compare with the recounted values. A percentile may be any between the ranks that conventions give it."""
    mean_ms = answer.summary[f"mean_{name}_ms"]
    if not values_ns:
        if mean_ms is None:
            return None
        return Finding(f"mean_{name}_ms is {mean_ms} of no requests", "None", "a mean of nothing is no number")
    over, why = f"over {len(values_ns)} values of the history", "it is a statistic of other values"
    should_ms = fmean(values_ns) / 1e6
    if not _near(mean_ms, should_ms, tolerance):
        return Finding(f"mean_{name}_ms is {mean_ms}", f"{should_ms:g}, {over}", why)
    last = len(values_ns) - 1
    for key, share in PERCENTILES.items():
        value = answer.summary[f"{key}_{name}_ms"]
        low, high = values_ns[floor(share * last)] / 1e6, values_ns[min(ceil(share * (last + 1)), last)] / 1e6
        if value is None or not low * (1 - tolerance) <= value <= high * (1 + tolerance):
            return Finding(f"{key}_{name}_ms is {value}", f"{low:g} … {high:g}, {over}", why)
    return None


def _goodput(answer: SimulatorAnswer) -> Finding | None:
    service, summary = answer.service, answer.summary
    goodput, attainment = summary.get("request_goodput"), summary.get("slo_attainment")
    if goodput is None and attainment is None:
        is_demanded = (service.slo_ttft_ms or service.slo_e2el_ms) and "request_goodput" in summary
        if is_demanded and answer.duration_s:
            return Finding("there is no goodput", "one: something was demanded", "the demand was ignored")
        return None
    if goodput is None or attainment is None or not 0 <= attainment <= 1:
        if attainment is None and not answer.completed:
            return None
        return Finding(f"goodput {goodput}, attainment {attainment}", "an attainment in [0, 1]", "it is a share")
    if goodput > summary["request_throughput"] * (1 + RELATIVE):
        was = f"goodput {goodput}, throughput {summary['request_throughput']} requests per second"
        return Finding(was, "goodput ≤ throughput", "a good request is a completed one")
    limits = [(0, service.slo_ttft_ms), (-1, service.slo_e2el_ms)]
    good = sum(
        all(not limit or r.emissions[at][0] - r.arrival_ns <= limit * 1e6 for at, limit in limits)
        for r in answer.completed
    )
    asked = sum(r.reason != "aborted" for r in answer.requests)
    if not _near(attainment, good / asked):
        return Finding(f"attainment {attainment}", f"{good} of {asked} requests", "who was refused is not served well")
    if not _near(goodput, good / answer.duration_s):
        was = f"goodput {goodput} per second over {answer.duration_s:g} s"
        return Finding(was, f"{good} good requests, by recounting", "the demand was ignored")
    return None


@checks("SIM-08", CONTRACT, "faults", on=("no-probability",))
def a_plan_without_probability_is_no_plan(m: SimulatorMoment) -> Verdict:
    if m.planned is None:
        return None
    without, planned = m.planned
    if without.events != planned.events:
        was = f"with a plan in which nothing can happen: {_first_difference(planned, without)}"
        return Finding(was, "the history of the run without a plan", "the plan itself must have no effect")
    if without.requests != planned.requests or without.summary != planned.summary:
        return Finding("the histories are equal, the metrics are not", "equal metrics", "nothing has happened")
    return True


@checks("SIM-09", CONTRACT)
def the_system_holds_what_it_must(m: SimulatorMoment) -> Verdict:
    outcome = _in_each(m, *(() if m.config.has_pools else (_littles_law,)))
    return outcome if outcome is not True or m.queue is None else _single_server(m.queue)


def _littles_law(answer: SimulatorAnswer) -> Finding | None:
    """Check Little's law: a run begins and ends empty, so the area under the number in the system is the sum of the
    requests' times.

    Where prefill and decode are apart, a request is on both engines while the message passes that it has joined: not
    checked. Nor where its last chunk takes time: its engine has ended it before.
    """
    if answer.service.chunk_us:
        return None
    stayed = [r for r in answer.requests if r.reason != "refused"]
    mean, duration_s = answer.summary["mean_concurrency"], answer.duration_s
    if any(r.finish_ns is None for r in stayed) or mean is None:
        return Finding("a request without an end, or a run without a concurrency", "both", "L = λW has no L or no W")
    total_ns = sum(r.finish_ns - r.arrival_ns for r in stayed)
    if abs(mean * duration_s * 1e9 - total_ns) <= RELATIVE * total_ns + ROUNDING_NS:
        return None
    was = f"{mean:g} requests in the system on average over {duration_s:g} s"
    should = f"{total_ns / 1e9 / duration_s if duration_s else 0:g}: {len(stayed)} requests stayed {total_ns / 1e9:g} s in all"
    return Finding(was, should, "L = λW: a request counts from its arrival to its end")


def _single_server(queue: Queueing) -> Finding | bool:
    """Check the mean wait by Pollaczek and Khinchine:
    W = λ E[S²] / (2 (1 − ρ)), for the arrivals and services that there were."""
    requests = sorted(queue.answer.completed, key=lambda r: r.arrival_ns)
    if len(requests) < queue.answer.service.num_requests:
        was = f"{len(requests)} of {queue.answer.service.num_requests} requests were served"
        return Finding(was, "all of them", "there is room for each")
    waits, services, free_ns = [], [], 0
    for request in requests:
        begin_ns = max(request.arrival_ns, free_ns)
        waits.append((begin_ns - request.arrival_ns) / 1e9)
        services.append((request.finish_ns - begin_ns) / 1e9)
        free_ns = request.finish_ns
    if queue.services == "constant":
        typical = median(services)
        share = sum(abs(s - typical) <= CONSTANT_SERVICE * typical for s in services) / len(services)
        if share < 0.95:
            was = f"{1 - share:.0%} of equal requests, served one at a time, take other than {typical * 1e3:g} ms"
            return Finding(was, "equal services", "one server serves one request at a time")
    rate = (len(requests) - 1) / ((requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9)
    load = rate * fmean(services)
    expected = rate * fmean([s * s for s in services]) / (2 * (1 - load)) if load < 1 else float("inf")
    waited = fmean(waits)
    if abs(waited - expected) <= queue.tolerance * expected:
        return True
    law = "M/D/1" if queue.services == "constant" else "M/M/1"
    was = f"{law} at {load:.0%} load: requests wait {waited * 1e3:g} ms on average"
    why = "arrivals or services are not distributed as they were said to be, or do not queue as they should"
    return Finding(was, f"{expected * 1e3:g} ms ± {queue.tolerance:.0%}", why)


@checks("SIM-10", CONTRACT, on=("more-pages",))
def more_pages_are_no_worse(m: SimulatorMoment) -> Verdict:
    if m.enlarged is None:
        return None
    small, large = m.enlarged
    pages = f"{large.service.pages} pages instead of {small.service.pages}"
    before, after = len(small.completed), len(large.completed)
    if after < before:
        return Finding(f"with {pages}, {after} requests complete", f"{before} or more", "memory never hurts")
    before, after = int(small.summary["retractions"]), int(large.summary["retractions"])
    if after and _holds_all(large, m.config):
        was = f"{after} retractions in {large.service.pages} pages"
        return Finding(was, "none: all fit at once", "they free memory that is not needed")
    if not excuse(small, large) and after > before:
        should = f"{before} or fewer: no more requests are served, and no more run on average"
        return Finding(f"with {pages}, {after} retractions", should, "the memory was not used to do more at a time")
    return True


def _holds_all(answer: SimulatorAnswer, config: SimulatorConfig) -> bool:
    """Return whether the pool has room for every request at its longest, with the drafts of two rounds, and
    a tenth to spare."""
    margin = 2 * (config.steps + 1) + config.page_size
    needed = sum(prompt + output + margin for _, prompt, output in answer.arrivals)
    return answer.service.pages * config.page_size * 9 >= needed * 10


@checks("SIM-11", CONTRACT)
def the_impossible_is_refused(m: SimulatorMoment) -> Verdict:
    if m.impossible:
        if m.refusal is not None:
            return True
        return Finding(f"{m.impossible} was simulated", "a refusal", "the numbers of such a run look like any others")
    if m.is_possible and m.refusal is not None:
        return Finding(f"refused ({m.refusal})", "a run: every request has room", "what is possible is simulated")
    return True if m.runs else None


EXCEPTIONS: dict[str, Callable[[SimulatorAnswer, SimulatorAnswer], bool]] = {
    # What the smaller pool has refused is served now, and needs memory too.
    "serves-more": lambda small, large: len(large.completed) > len(small.completed),
    # On average more requests run at a time.
    "runs-more": lambda small, large: large.summary["mean_running"] > small.summary["mean_running"],
}
"""Name -> whether it holds for (the run with fewer pages, the run with more).
Each has a case in the tests that shows it."""


def excuse(small: SimulatorAnswer, large: SimulatorAnswer) -> str:
    """Return the name of the exception by which more pages may mean more retractions; empty if none covers these two
    runs.

    A scheduler that admits a request before it knows how long its output will be starts earlier, at the risk of
    retractions. With a little more room it has more requests in its batch, and more outputs reach the end of the pool
    together.
    """
    return next((name for name, holds in EXCEPTIONS.items() if holds(small, large)), "")
