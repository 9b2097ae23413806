"""Planted defects of simulators: each is a subclass of ours, with something in what it answers or is
made of done wrong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from ...core.acceptance.process import GaussianAcceptance
from ...core.contract.events import Committed
from ...core.draws import request_key
from ...sim.actors.router import Link
from ...sim.cost.passes.forward import ForwardCost
from ...sim.workload.workload import TimedRequest
from ..adapters.simulator import CheckedSimulator
from .planting import lookup, subclasses

TIMES = """
CountsThroughAllRuns (SIM-01, SIM-05, SIM-08): Events are numbered through all runs of a process.
    CheckedSimulator.simulate:
        answer, before = good(self, service, workload), memory.get("events", 0)
        memory["events"] = before + len(answer["events"])
        return answer | {"events": [f'{line[:-1]},"n":{n}}}' for n, line in enumerate(answer["events"], before)]}

NotesTheWallClock (SIM-01): With faults, the history says how long the simulator itself took.
    CheckedSimulator.simulate:
        answer = good(self, service, workload)
        if any(share for _, share in service.faults or ()):
            answer["events"][-1] = f'{answer["events"][-1][:-1]},"took":{perf_counter_ns()}}}'
        return answer

StampsTheBegin (SIM-02): A step that is committed is noted with the time at which its first round ended, not with that of its commit.
    CheckedSimulator.make:
        restamp(history, lambda event, _: int(event.result.round_end_ns[0]) if type(event) is Committed else event.now_ns)
        return good(self, scenario, metrics, history, faults)

HasAClockPerReplica (SIM-02): Every replica counts from its own first event.
    CheckedSimulator.make:
        restamp(history, lambda event, begin_ns: event.now_ns - begin_ns)
        return good(self, scenario, metrics, history, faults)

TakesTheFirstPlan (SIM-03): The first token is said to come when its request was first scheduled.
    CheckedSimulator.outcome = good(self, row | {"first_token_ns": row["first_scheduled_ns"]}, history)

EndsAtTheClient (SIM-03): A request ends when its client receives the end, but its tokens are timed at the engine.
    CheckedSimulator.outcome:
        outcome = good(self, row, history)
        end_ns = outcome["finish_ns"]
        return outcome | {"finish_ns": end_ns if end_ns is None else end_ns + 50_000}
"""

DRAWS = """
TracesMilliseconds (SIM-05): A trace has no more than milliseconds.
    CheckedSimulator.rows = good(self, [(ns // 10**6 * 10**6, prompt, output) for ns, prompt, output in arrivals])

LosesTheSeed (SIM-05): A replayed trace is drawn with the default seed.
    CheckedSimulator.replay = good(self, replace(service, seed=0), arrivals)

SharesAStream (SIM-06): Arrivals, prompts and outputs come from one generator, one after the other.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        if scenario.workload.trace is None:
            redraw_outputs(simulation, scenario, scenario.seed)
        return simulation

SeedsWithTheSize (SIM-06): The number of requests is part of every seed.
    CheckedSimulator.simulate = good(self, replace(service, seed=service.seed + 1000 * service.num_requests), workload)

SharesAStreamOfFaults (SIM-06): All kinds of faults, and the lengths that clients ask for, come from one generator.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        if faults is not None and faults.enabled:
            redraw_outputs(simulation, scenario, scenario.seed + len(faults.enabled))
        return simulation

TakesAnotherWay (SIM-08, SIM-15): With a fault plan, whatever is in it, a message takes a moment longer.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for link in simulation.router.links.values() if faults is not None else ():
            link.link.latency_ns += 1000
        return simulation

TakesZeroForTheDefault (SIM-08): A probability of 0 is taken for one that was not given.
    CheckedSimulator.plan:
        faults = service.faults and tuple((kind, share or 500) for kind, share in service.faults)
        return good(self, replace(service, faults=faults))

ArrivesLikeAClock (SIM-09): Poisson arrivals are evenly spaced.
    CheckedSimulator.load = good(self, replace(service, arrivals="even") if service.arrivals == "poisson" else service)

SendsToTheOtherCache (SIM-15): A prefix-aware router takes what was sent to any engine for what was sent to each.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        if simulation.cluster is None:
            balancer = simulation.router._balancer
            balancer._sent = balancer._sent[:1] * len(balancer._sent)
        return simulation

ServesOneMore (SIM-15): The batch has one place more than it was given.
    CheckedSimulator.scenario = good(self, replace(service, max_running=service.max_running + (service.max_running > 0)), workload)

BeginsWindowsEarly (SIM-15): Longest runs that are asked for together begin at a multiple of eight positions.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        object.__setattr__(simulation.assembly.acceptance, "__class__", EarlyWindows)
        return simulation

CopiesDrawAsOne (SIM-15): The requests of a burst accept what the first of them accepts.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        submit = simulation.router.submit
        simulation.router.submit = lambda request, truth: submit(
            request, replace(truth, key=request_key(request.request_id.partition(".")[0]))
        )
        return simulation

WaitsForItsBurst (SIM-15): A client waits for the last request of a burst.
    CheckedSimulator.make:
        simulation, sent = good(self, scenario, metrics, history, faults), []
        simulation._send_one = lambda *request, good=simulation._send_one: sent.append(good(*request)) or sent[-1]
        simulation._send = lambda arrival, good=simulation._send: good(arrival) and sent[-1]
        return simulation

DrawsPartsAnew (SIM-06): An engine that is simulated by itself has draws of its own.
    CheckedSimulator.in_parts = good(self, replace(service, seed=service.seed + 1))

BreaksTiesByHash (SIM-01): Of equally busy engines the router takes the one with the smallest `hash()`.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        balancer = None if simulation.cluster is not None else simulation.router._balancer
        if balancer is not None and balancer.policy == "least_loaded":
            balancer._choose = lambda among: min(
                among, key=lambda engine: (balancer.outstanding[engine], hash(f"{balancer._num_routed}/{engine}"))
            )
        return simulation

ReplaysOneRecording (SIM-15): Every request accepts what the first one accepts.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        submit, first = simulation.router.submit, request_key("r0")
        simulation.router.submit = lambda request, truth: submit(request, replace(truth, key=first))
        return simulation
"""

REPORTS = """
CountsTheFirstTokenTwice (SIM-07): The token of the prompt counts with the prompt and with the output.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"total_output_tokens": summary["total_output_tokens"] + summary["completed"]}

DividesByTheArrivals (SIM-07): Throughput is over the time in which requests arrived.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        rates = {name: summary[name] for name in ("output_throughput", "request_throughput")}
        return summary | {name: rate if rate is None else 1.25 * rate for name, rate in rates.items()}

StopsTheClockEarly (SIM-07): The duration ends before the last request does.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"duration": summary["duration"] / 2}

KeepsTheFirstValues (SIM-07): Latencies are kept in a list of bounded length: later ones are not in the percentiles.
    CheckedSimulator.summary:
        summary, kept_ms = good(self, metrics, duration_ns, slo), metrics.measured.e2el_ns.values[:2] * 1e-6
        return summary | {f"p{p}_e2el_ms": float(np.percentile(kept_ms, p)) for p in (90, 95, 99) if len(kept_ms)}

OrdersPercentilesByName (SIM-07): The greatest percentile is shown under the first name.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"p90_itl_ms": summary["p99_itl_ms"], "p99_itl_ms": summary["p90_itl_ms"]}

CallsEverythingGood (SIM-07): Every completed request counts as good.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"request_goodput": summary["request_goodput"] and summary["request_throughput"]}

CountsNoChange (SIM-15): Engines that change their pool are not counted.
    CheckedSimulator.books:
        books = good(self, simulation, report, metrics, summary, arrivals)
        return books | {"summary": books["summary"] | {"role_changes": 0}}

NoticesEveryMean (SIM-13): A report says of every mean length but the exact one that it is not as asked for.
    CheckedSimulator.books:
        books = good(self, simulation, report, metrics, summary, arrivals)
        lengths = {
            kind: (mean, deviation, summary[f"mean_{kind}_tokens"] not in (None, mean))
            for kind, (mean, deviation, _) in books["lengths"].items()
        }
        return books | {"lengths": lengths}

LeavesOutTheQueue (SIM-09): A waiting request is not in the system.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"mean_concurrency": summary["mean_running"]}

ProposesTheRoot (SIM-13): The root of a verify tree counts as a draft.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"proposed_drafts": summary["proposed_drafts"] + summary["verified_rows"]}

HoldsItsPeak (SIM-13): The mean use of the KV pools is their greatest.
    CheckedSimulator.summary:
        summary = good(self, metrics, duration_ns, slo)
        return summary | {"kv_occupancy_mean": summary["kv_occupancy_max"]}

ForgetsTheGapOfARetraction (SIM-07): The time that a request waits after a retraction is in no inter-token latency.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        lives, retracted = metrics.lives, metrics.lives._retracted

        def forget(request):
            retracted(request)
            metrics.flush()
            lives.open.columns.last_token_ns[request.column] = -1

        lives._retracted = forget
        return simulation
"""

RESOURCES = """
KeepsALargePool (SIM-10, SIM-11): Of a pool above a limit all but a small part is set aside.
    CheckedSimulator.scenario:
        if service.pages * self.config.page_size > 200:
            service = replace(service, pages=64 // self.config.page_size)
        return good(self, service, workload)

RetractsAfterGrowth (SIM-10): A pool that has room for everything, and ran with fewer pages before, retracts a request at every other step.
    CheckedSimulator.plan:
        longest = max(service.prompt_lens) + max(service.output_lens) + 4 * self.config.page_size
        least = memory.setdefault(replace(service, pages=0), service.pages)
        if least < service.pages and service.num_requests * longest < service.pages * self.config.page_size:
            service = replace(service, faults=(("pool.retraction", 500),))
        return good(self, service)

ForgetsThePool (SIM-11): Memory is unbounded.
    CheckedSimulator.scenario = good(self, replace(service, pages=max(service.pages, 10**6)), workload)

ClampsWhatCannotBe (SIM-11): Impossible numbers are replaced by the nearest possible ones.
    CheckedSimulator.simulate:
        counts = ("num_requests", "pages", "max_running", "replicas", "rate_per_ks")
        possible = replace(service, **{name: max(1, getattr(service, name)) for name in counts})
        return good(self, possible, workload if "trace" in workload else self.load(possible))
    CheckedSimulator.load:
        counts = {name: max(1, getattr(service, name)) for name in ("num_requests", "rate_per_ks")}
        return good(self, replace(service, **counts))

DropsUnknownFaults (SIM-11): Of a fault plan only the names that are known and the probabilities that can be are read.
    CheckedSimulator.plan:
        known = [fault for fault in service.faults or () if fault[0] != "device.sulks" and 0 <= fault[1] <= 1000]
        return good(self, replace(service, faults=service.faults and tuple(known)))

RefusesTheSmall (SIM-11): A service of a single request is refused: there would be nothing to average.
    CheckedSimulator.scenario:
        if service.num_requests == 1:
            raise ValueError("one request is no service")
        return good(self, service, workload)

ReadsTheExpertsOfOneToken (SIM-14): A pass over many tokens of a sparse model reads the experts that one token reaches.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        simulation.assembly.cost._target.__class__ = ExpertsOfOneToken
        return simulation

StopsNoBlock (SIM-17): A request that comes while a step of several rounds runs waits for its end, though a row is free.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas:
            actor.wake = lambda replan, wake=actor.wake: wake(False)
        return simulation

PlansForNothing (SIM-14): The time of planning is not charged.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas:
            actor.host.cost = replace(actor.host.cost, plan_base_ns=0)
        return simulation

HasAnOlderMemory (SIM-14): A device with a faster memory is priced with that of an older one.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        cost = simulation.assembly.cost._target
        if cost.gpu.name != "H100":
            cost.gpu = replace(cost.gpu, memory_bandwidth_bytes_per_s=2e12)
        return simulation

HalvesLargeBatches (SIM-14): A decode round of more than two rows is priced at half of its time.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        cost = simulation.assembly.cost
        cost.decode_ns = lambda batch, *shape, good=cost.decode_ns: good(batch, *shape) // (1 + (batch > 2))
        return simulation

ReceivesManyAtOnce (SIM-14, RAISES): A port takes in transfers from several engines at the same time.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        if simulation.cluster is not None:
            simulation.cluster.network._in_free_ns = Forgetful(int)
        return simulation

SendsInParallel (SIM-15): A link carries any number of requests at once.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for wire in getattr(simulation.router, "links", {}).values():
            link = getattr(wire, "link", wire)
            link.send = lambda *message, link=link: Link(link.env, link.latency_ns, 1e15).send(*message)
        return simulation

NeverCountsDown (SIM-15, SIM-16): A router's load never goes down.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        if simulation.cluster is None:
            simulation.router._balancer.ended = lambda *_: None
        return simulation

IgnoresDeadlines (SIM-15): Clients wait for their answers for ever.
    CheckedSimulator.scenario = good(self, replace(service, deadline_ms=0), workload)

FluctuatesUpwards (SIM-14): Device times fluctuate around their medians, so that their mean is greater than without.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas:
            if actor.device.jitter is not None:
                actor.device.jitter._shift = 0.0
        return simulation

FluctuatesTogether (SIM-14): The device times of all engines are drawn from one sequence.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas[1:]:
            actor.device.jitter = simulation.replicas[0].device.jitter
        return simulation

WaitsForOneMore (SIM-16): A chunk of output is sent when its interval is exceeded, not when it is reached.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for streamer in simulation._streamers.values():
            given = streamer.front_end
            streamer.front_end = replace(given, stream_interval=given.stream_interval + (given.stream_interval > 1))
        return simulation

SendsChunksTogether (SIM-16): The process that sends chunks does not remember when it is done with those of the step before.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for streamer in simulation._streamers.values():
            streamer._send = lambda *chunks, good=streamer._send, streamer=streamer: setattr(streamer, "_free_ns", 0) or good(*chunks)
        return simulation

FailsForFree (SIM-13): A step that fails has cost its device nothing.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas:

            def lose(flight, fault, actor=actor, good=actor._lose_steps):
                busy_ns = actor.device.busy_ns
                yield from good(flight, fault)
                actor.device.busy_ns = busy_ns

            actor._lose_steps = lose
        return simulation

HearsNoLeaving (SIM-15): A client that leaves is not heard.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        simulation.router.cancel = lambda request_id: None
        return simulation

TakesACopyForAnother (SIM-08, SIM-15, SIM-16, RAISES): A message that is delivered twice is two requests.
    CheckedSimulator.make:
        simulation = good(self, scenario, metrics, history, faults)
        for actor in simulation.replicas if simulation.faults.is_faulty else ():
            actor.hooks._seen = Forgetful()
        return simulation
"""


class EarlyWindows(GaussianAcceptance):
    """Windows that begin at a multiple of eight positions."""

    __slots__ = ()

    def run_windows(self, request_keys, starts, width, shifts=0.0):
        return super().run_windows(request_keys, starts // 8 * 8, width, shifts)


class ExpertsOfOneToken(ForwardCost):
    """As many experts as a single token reaches."""

    def active_experts(self, tokens, *rest):
        return super().active_experts(1, *rest)


class Forgetful(defaultdict[str, int]):
    """Keeps nothing."""

    def __setitem__(self, key, value):
        pass


class Redrawn(list[TimedRequest]):
    """Requests with the distributions that they were asked for with."""


def redraw_outputs(simulation, scenario, seed):
    """Draw all output lengths from one generator."""
    drawn = list(simulation.workload)
    generator = np.random.default_rng(seed)
    generator.random(len(drawn))
    lens = generator.choice(scenario.workload.output.values or [1], len(drawn)).tolist()
    redrawn = Redrawn(replace(a, output_len=n) for a, n in zip(drawn, lens, strict=True))
    redrawn.prompt_len, redrawn.output_len = simulation.workload.prompt_len, simulation.workload.output_len
    simulation.workload = redrawn


def restamp(history, stamp):
    """Give the events of a history other times: `stamp(event, time of its replica's first event)`."""
    sink, times_ns = history.sink, history.times_ns

    def restamping_sink(replica):
        take, begin_ns = sink(replica), []

        def stamped(event):
            take(event)
            if hasattr(event, "now_ns"):
                begin_ns.append(event.now_ns)
                times_ns[-1] = stamp(event, begin_ns[0])

        return stamped

    history.sink = restamping_sink


_PLACES = [
    *(CheckedSimulator, Committed, EarlyWindows, ExpertsOfOneToken, Forgetful, Link),
    *(perf_counter_ns, redraw_outputs, replace, request_key, restamp),
]
MUTANTS = subclasses("simulator", CheckedSimulator, _PLACES, TIMES + DRAWS + REPORTS + RESOURCES, __name__, np=np)
__getattr__ = lookup(MUTANTS)
