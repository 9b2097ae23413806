"""SIM-01 … SIM-03 and SIM-05 … SIM-11: what is true of every simulator of a service, run by run and pair by pair.

A checker gets a `Moment` (`simulator/moment.py`) and looks at it alone.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, floor
from statistics import fmean, median

from ..simulator.contract import SimulatorConfig
from ..simulator.exceptions import excuse
from ..simulator.moment import Answer, Moment, Outcome, Queueing
from ..simulator.operations import MorePages, NoProbability, OneMoreFault, OneMoreRequest, Replay, Twice
from .registry import Finding, checks
from .registry import Outcome as Verdict

CONTRACT = "simulator"

RELATIVE = 1e-6
"""How far two computations of one number in floating point may be apart."""

HISTOGRAM = 0.01
"""How far the percentiles of gaps may be off: there are too many gaps to keep each."""

ROUNDING_NS = 1000.0
PERCENTILES = {"median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
CONSTANT_SERVICE = 0.1
"""How far apart services of equal work may be, as a share: the scheduler may plan the next one while one runs."""


def _first_difference(a: Answer, b: Answer) -> str:
    for number, (x, y) in enumerate(zip(a.events, b.events, strict=False)):
        if x != y:
            return f"event {number} is {_shown(x)}, and was {_shown(y)}"
    return f"{len(b.events)} events, and then {len(a.events)}"


def _shown(line: str) -> str:
    return line if len(line) <= 160 else line[:157] + "…"


@checks("SIM-01", CONTRACT, on=(Twice,))
def the_same_twice(m: Moment) -> Verdict:
    if m.twice is None:
        return None
    first, second = m.twice
    if first.events != second.events:
        return Finding(
            f"the second run is another one: {_first_difference(second, first)}",
            "the same history, byte for byte",
            "a result that cannot be had again cannot be compared with anything",
        )
    if first.requests != second.requests or first.summary != second.summary:
        return Finding(
            "the histories are equal, the requests or the summary are not",
            "equal metrics of equal histories",
            "what is reported must follow from what happened",
        )
    return True


@checks("SIM-02", CONTRACT)
def the_clock_never_goes_back(m: Moment) -> Verdict:
    if not m.runs:
        return None
    for answer in m.runs:
        for number, (before, after) in enumerate(pairwise(answer.times_ns), 1):
            if after < before:
                return Finding(
                    f"event {number} is at {after} ns, the one before it at {before} ns: {_shown(answer.events[number])}",
                    "a time that does not go back",
                    "an event in the past has missed what it should have changed",
                )
        if answer.times_ns and answer.times_ns[0] < 0:
            return Finding(
                f"the first event is at {answer.times_ns[0]} ns", "0 or later", "nothing happens before the run"
            )
    return True


@checks("SIM-03", CONTRACT)
def latencies_add_up(m: Moment) -> Verdict:
    completed = [request for answer in m.runs for request in answer.of_reason("completed")]
    for request in completed:
        finding = _of_request(request)
        if finding is not None:
            return finding
    return True if completed else None


def _of_request(request: Outcome) -> Finding | None:
    name = f"request {request.number}"
    if not request.emissions or request.first_token_ns is None or request.finish_ns is None:
        return Finding(f"{name} has completed without a token or without a time", "both", "there is nothing to measure")
    times = [ns for ns, _ in request.emissions]
    ttft_ns, e2el_ns = request.first_token_ns - request.arrival_ns, request.finish_ns - request.arrival_ns
    if not 0 <= ttft_ns <= e2el_ns:
        return Finding(
            f"{name}: TTFT is {ttft_ns} ns, E2E is {e2el_ns} ns",
            "0 ≤ TTFT ≤ E2E",
            "the first token is one of the tokens",
        )
    gaps = [after - before for before, after in pairwise(times)]
    if min(gaps, default=0) < 0:
        return Finding(f"{name}: a gap of {min(gaps)} ns between two tokens", "0 or more", "tokens come in their order")
    if request.first_token_ns != times[0]:
        return Finding(
            f"{name}: the metrics have its first token at {request.first_token_ns} ns, the history at {times[0]} ns",
            "the same",
            "a TTFT that is measured at another event is a TTFT of something else",
        )
    if ttft_ns + sum(gaps) != e2el_ns:
        return Finding(
            f"{name}: TTFT {ttft_ns} ns and gaps of {sum(gaps)} ns make {ttft_ns + sum(gaps)} ns, E2E is {e2el_ns} ns",
            "TTFT + sum(ITL) == E2E",
            "time that is in no latency has been lost",
        )
    return None


@checks("SIM-05", CONTRACT, "traces", on=(Replay,))
def a_replayed_trace_is_the_run(m: Moment) -> Verdict:
    if m.replayed is None:
        return None
    run, replay = m.replayed
    start_ns = run.arrivals[0][0]
    if start_ns == 0 and run.events != replay.events:
        return Finding(
            f"the replay is another run: {_first_difference(replay, run)}",
            "the same history",
            "who replays a trace wants to see again what has happened",
        )
    # A trace may count its times from its first request.
    if _since(run, start_ns) != _since(replay, replay.arrivals[0][0]):
        return Finding(
            "the replay is another run: arrivals, tokens or their times differ, counted from the first arrival",
            "the same requests at the same times",
            "who replays a trace wants to see again what has happened",
        )
    return True


def _since(answer: Answer, start_ns: int) -> tuple:
    requests = sorted(
        (r.number, r.reason, r.arrival_ns - start_ns, tuple((ns - start_ns, tokens) for ns, tokens in r.emissions))
        for r in answer.requests
    )
    return [(ns - start_ns, prompt, output) for ns, prompt, output in answer.arrivals], requests


@checks("SIM-06", CONTRACT, on=(OneMoreRequest, OneMoreFault))
def nobody_elses_draws_move(m: Moment) -> Verdict:
    if m.grown is None:
        return None
    before, after = m.grown
    what = "fault" if after.service.num_requests == before.service.num_requests else "request"
    why = f"runs that differ in one {what} can be compared only if all the rest is drawn equally"
    for number, (x, y) in enumerate(zip(before.arrivals, after.arrivals, strict=False)):
        if x != y:
            was = f"with one {what} more, request {number} arrives at {y[0]} ns with {y[1]} and {y[2]} tokens"
            return Finding(was, f"at {x[0]} ns with {x[1]} and {x[2]} tokens", why)
    known = {
        request.number: request for request in before.requests if request.number >= 0 and request.reason != "refused"
    }
    for request in after.requests:
        was_before = known.get(request.number)
        if was_before is None or request.reason == "refused":
            continue
        if request.max_tokens != was_before.max_tokens:
            return Finding(
                f"with one {what} more, request {request.number} asks for {request.max_tokens} tokens",
                f"{was_before.max_tokens}",
                why,
            )
        undisturbed = request.reason == was_before.reason == "completed" and not (
            request.retractions or was_before.retractions
        )
        if undisturbed and request.runs != was_before.runs:
            return Finding(
                f"with one {what} more, request {request.number} gets runs of {list(request.runs)} tokens",
                f"{list(was_before.runs)}",
                why,
            )
    return True


@checks("SIM-07", CONTRACT)
def the_summary_is_of_the_run(m: Moment) -> Verdict:
    if not m.runs:
        return None
    for answer in m.runs:
        for look in (_totals, _latencies, _goodput):
            finding = look(answer)
            if finding is not None:
                return finding
    return True


def _near(value: float | None, should: float, relative: float = RELATIVE) -> bool:
    return value is not None and abs(value - should) <= relative * max(abs(should), 1e-9)


def _totals(answer: Answer) -> Finding | None:
    summary, completed = answer.summary, answer.of_reason("completed")
    tokens = sum(sum(request.runs) for request in completed)
    counts = {
        "completed": (summary["completed"], len(completed)),
        "total_output_tokens": (summary["total_output_tokens"], tokens),
        "retractions": (summary["retractions"], sum(request.retractions for request in answer.requests)),
    }
    for name, (was, should) in counts.items():
        if was != should:
            why = "everything that is computed from it is wrong by as much"
            return Finding(f"{name} is {was}", f"{should}, by recounting the requests", why)
    for request in completed:
        if request.num_output != sum(request.runs):
            was = f"request {request.number} has {request.num_output} tokens"
            return Finding(was, f"{sum(request.runs)}, by recounting the history", "a token counts once")
    duration_s = answer.duration_s
    ends = [request.finish_ns for request in completed if request.finish_ns is not None]
    lasted_ns = max(ends, default=0) - min((request.arrival_ns for request in completed), default=0)
    if duration_s * 1e9 < lasted_ns - ROUNDING_NS:
        return Finding(
            f"duration is {duration_s:g} s",
            f"at least {lasted_ns / 1e9:g} s, from the first arrival to the last end",
            "a throughput over part of a run is that of no run",
        )
    for name, amount in (("output_throughput", tokens), ("request_throughput", len(completed))):
        rate = summary[name]
        if duration_s and not _near(rate, amount / duration_s):
            return Finding(
                f"{name} is {rate}, the duration {duration_s:g} s, and {amount} were completed",
                f"{amount / duration_s:g}: throughput × duration is what was completed",
                "two numbers of one report contradict each other",
            )
    return None


def _latencies(answer: Answer) -> Finding | None:
    completed = answer.of_reason("completed")
    ttft = [request.emissions[0][0] - request.arrival_ns for request in completed]
    e2el = [request.emissions[-1][0] - request.arrival_ns for request in completed]
    several = [(e - t) / (sum(r.runs) - 1) for r, t, e in zip(completed, ttft, e2el, strict=True) if sum(r.runs) > 1]
    gaps = [after[0] - before[0] for request in completed for before, after in pairwise(request.emissions)]
    # Gaps of requests that others have ended may count, too: then only the order of the percentiles is known.
    alone = len(completed) == len(answer.requests) - len(answer.of_reason("refused"))
    measured = {"ttft": (ttft, RELATIVE), "tpot": (several, RELATIVE), "e2el": (e2el, RELATIVE)}
    measured |= {"itl": (gaps, HISTOGRAM)} if alone else {}
    for name in ("ttft", "tpot", "itl", "e2el"):
        shown = [answer.summary[f"{key}_{name}_ms"] for key in PERCENTILES]
        if None not in shown and any(b < a for a, b in pairwise(shown)):
            said = ", ".join(f"{key} {value:g}" for key, value in zip(PERCENTILES, shown, strict=True))
            return Finding(f"{name}: {said} ms", "no percentile below a smaller one", "they are of one distribution")
    for name, (values_ns, tolerance) in measured.items():
        finding = _of_distribution(answer, name, sorted(values_ns), tolerance)
        if finding is not None:
            return finding
    return None


def _of_distribution(answer: Answer, name: str, values_ns: list[float], tolerance: float) -> Finding | None:
    """Compare with the recounted values. A percentile may be any between the ranks that conventions give it."""
    mean_ms = answer.summary[f"mean_{name}_ms"]
    if not values_ns:
        if mean_ms is None:
            return None
        return Finding(f"mean_{name}_ms is {mean_ms} of no requests", "None", "a mean of nothing is no number")
    if not _near(mean_ms, fmean(values_ns) / 1e6, tolerance):
        return Finding(
            f"mean_{name}_ms is {mean_ms}",
            f"{fmean(values_ns) / 1e6:g}, over {len(values_ns)} values of the history",
            "a statistic of other values than those that there were",
        )
    last = len(values_ns) - 1
    for key, share in PERCENTILES.items():
        value = answer.summary[f"{key}_{name}_ms"]
        low, high = values_ns[floor(share * last)] / 1e6, values_ns[min(ceil(share * (last + 1)), last)] / 1e6
        if value is None or not low * (1 - tolerance) <= value <= high * (1 + tolerance):
            return Finding(
                f"{key}_{name}_ms is {value}",
                f"{low:g} … {high:g}, over {len(values_ns)} values of the history",
                "a percentile of other values than those that there were",
            )
    return None


def _goodput(answer: Answer) -> Finding | None:
    service, summary = answer.service, answer.summary
    goodput, attainment = summary.get("request_goodput"), summary.get("slo_attainment")
    if goodput is None and attainment is None:
        demanded = (service.slo_ttft_ms or service.slo_e2el_ms) and "request_goodput" in summary
        if demanded and answer.duration_s:
            return Finding("there is no goodput", "one: something was demanded", "nobody looked")
        return None
    if goodput is None or attainment is None or not 0 <= attainment <= 1:
        if attainment is None and not answer.of_reason("completed"):
            return None
        return Finding(f"goodput {goodput}, attainment {attainment}", "an attainment in [0, 1]", "it is a share")
    if goodput > summary["request_throughput"] * (1 + RELATIVE):
        return Finding(
            f"goodput {goodput}, throughput {summary['request_throughput']} requests per second",
            "goodput ≤ throughput",
            "a good request is a completed one",
        )
    limits = [(0, service.slo_ttft_ms), (-1, service.slo_e2el_ms)]
    good = sum(
        all(not limit or r.emissions[at][0] - r.arrival_ns <= limit * 1e6 for at, limit in limits)
        for r in answer.of_reason("completed")
    )
    if not _near(goodput, good / answer.duration_s):
        was = f"goodput {goodput} per second over {answer.duration_s:g} s"
        return Finding(was, f"{good} good requests, by recounting", "a demand that nobody looks at is no demand")
    return None


@checks("SIM-08", CONTRACT, "faults", on=(NoProbability,))
def a_plan_without_probability_is_no_plan(m: Moment) -> Verdict:
    if m.planned is None:
        return None
    without, planned = m.planned
    if without.events != planned.events:
        return Finding(
            f"with a plan in which nothing can happen: {_first_difference(planned, without)}",
            "the history of the run without a plan",
            "who looks for the effect of a fault would find that of having looked",
        )
    if without.requests != planned.requests or without.summary != planned.summary:
        return Finding("the histories are equal, the metrics are not", "equal metrics", "nothing has happened")
    return True


@checks("SIM-09", CONTRACT)
def what_is_in_the_system(m: Moment) -> Verdict:
    if not m.runs:
        return None
    for answer in m.runs:
        finding = _littles_law(answer)
        if finding is not None:
            return finding
    return True if m.queue is None else _single_server(m.queue)


def _littles_law(answer: Answer) -> Finding | None:
    """A run begins and ends empty, so that the area under the number in the system is the sum of their times, whatever the law."""
    stayed = [r for r in answer.requests if r.reason != "refused"]
    if any(r.finish_ns is None for r in stayed) or answer.summary["mean_concurrency"] is None:
        return Finding("a request without an end, or a run without a concurrency", "both", "L = λW has no L or no W")
    total_ns = sum(r.finish_ns - r.arrival_ns for r in stayed)
    area_ns = answer.summary["mean_concurrency"] * answer.duration_s * 1e9
    if abs(area_ns - total_ns) <= RELATIVE * total_ns + ROUNDING_NS:
        return None
    return Finding(
        f"{answer.summary['mean_concurrency']:g} requests in the system on average over {answer.duration_s:g} s",
        f"{total_ns / 1e9 / answer.duration_s if answer.duration_s else 0:g}: {len(stayed)} requests stayed "
        f"{total_ns / 1e9:g} s in all",
        "L = λW: a request that is counted when it is not there, or not when it is, makes every mean wrong",
    )


def _single_server(queue: Queueing) -> Finding | bool:
    """Pollaczek and Khinchine: W = λ E[S²] / (2 (1 − ρ)), for the arrivals and services that there were."""
    requests = sorted(queue.answer.of_reason("completed"), key=lambda r: r.arrival_ns)
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
            return Finding(
                f"{1 - share:.0%} of equal requests, served one at a time, take other than {typical * 1e3:g} ms",
                "equal services",
                "one server serves one request at a time",
            )
    rate = (len(requests) - 1) / ((requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9)
    load = rate * fmean(services)
    expected = rate * fmean([s * s for s in services]) / (2 * (1 - load)) if load < 1 else float("inf")
    waited = fmean(waits)
    if abs(waited - expected) <= queue.tolerance * expected:
        return True
    law = "M/D/1" if queue.services == "constant" else "M/M/1"
    return Finding(
        f"{law} at {load:.0%} load: requests wait {waited * 1e3:g} ms on average",
        f"{expected * 1e3:g} ms ± {queue.tolerance:.0%}",
        "arrivals or services are not distributed as they were said to be, or do not queue as they should",
    )


@checks("SIM-10", CONTRACT, on=(MorePages,))
def more_pages_are_no_worse(m: Moment) -> Verdict:
    if m.enlarged is None:
        return None
    small, large = m.enlarged
    pages = f"{large.service.pages} pages instead of {small.service.pages}"
    done = [len(answer.of_reason("completed")) for answer in (small, large)]
    if done[1] < done[0]:
        return Finding(f"with {pages}, {done[1]} requests complete", f"{done[0]} or more", "memory never hurts")
    retracted = [int(answer.summary["retractions"]) for answer in (small, large)]
    if retracted[1] and _holds_all(large, m.config):
        return Finding(
            f"{retracted[1]} retractions in {large.service.pages} pages", "none: all fit at once", "for nothing"
        )
    if retracted[1] > retracted[0] and not excuse(small, large):
        return Finding(
            f"with {pages}, {retracted[1]} retractions",
            "none, as before: no more requests are served, no more at once, and none sooner",
            "memory never hurts who does not use it to do more at a time",
        )
    return True


def _holds_all(answer: Answer, config: SimulatorConfig) -> bool:
    """Whether the pool has room for every request at its longest, with the drafts of two rounds, and a tenth to spare."""
    margin = 2 * (config.steps + 1) + config.page_size
    needed = sum(prompt + output + margin for _, prompt, output in answer.arrivals)
    return answer.service.pages * config.page_size * 9 >= needed * 10


@checks("SIM-11", CONTRACT)
def the_impossible_is_refused(m: Moment) -> Verdict:
    if m.impossible:
        if m.refusal is not None:
            return True
        return Finding(
            f"{m.impossible} was simulated", "a refusal", "the numbers of a run that cannot be look like any others"
        )
    if m.refusal is not None and m.is_possible:
        return Finding(f"refused ({m.refusal})", "a run: every request has room", "what is possible is simulated")
    return True if m.runs else None
