"""Planted defects of simulators: times of events, and what is drawn from a seed."""

from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from ....core.acceptance.process import GaussianAcceptance
from ....core.contract.events import Committed
from ....core.draws import request_key
from ....sim.workload.workload import TimedRequest
from ...adapters.simulator import CheckedSimulator
from ..planting import Defects

DRAWS = Defects("simulator", CheckedSimulator)


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


class EarlyWindows(GaussianAcceptance):
    """Windows that begin at a multiple of eight positions."""

    __slots__ = ()

    def run_windows(self, request_keys, starts, width, shifts=0.0):
        return super().run_windows(request_keys, starts // 8 * 8, width, shifts)


@DRAWS.breaks("SIM-01", "SIM-05", "SIM-08")
class CountsThroughAllRuns(CheckedSimulator):
    """Events are numbered through all runs of a process."""

    num_events = 0

    def simulate(self, service, workload):
        answer, before = super().simulate(service, workload), self.num_events
        type(self).num_events += len(answer["events"])
        return answer | {"events": [f'{line[:-1]},"n":{n}}}' for n, line in enumerate(answer["events"], before)]}


@DRAWS.breaks("SIM-01")
class NotesTheWallClock(CheckedSimulator):
    """With faults, the history says how long the simulator itself took."""

    def simulate(self, service, workload):
        answer = super().simulate(service, workload)
        if any(share for _, share in service.faults or ()):
            answer["events"][-1] = f'{answer["events"][-1][:-1]},"took":{perf_counter_ns()}}}'
        return answer


@DRAWS.breaks("SIM-02")
class StampsTheBegin(CheckedSimulator):
    """A step that is committed is noted with the time at which its first round ended, not with that of its commit."""

    def make(self, scenario, metrics, history, faults):
        restamp(
            history, lambda event, _: int(event.result.round_end_ns[0]) if type(event) is Committed else event.now_ns
        )
        return super().make(scenario, metrics, history, faults)


@DRAWS.breaks("SIM-02")
class HasAClockPerReplica(CheckedSimulator):
    """Every replica counts from its own first event."""

    def make(self, scenario, metrics, history, faults):
        restamp(history, lambda event, begin_ns: event.now_ns - begin_ns)
        return super().make(scenario, metrics, history, faults)


@DRAWS.breaks("SIM-03")
class TakesTheFirstPlan(CheckedSimulator):
    """The first token is said to come when its request was first scheduled."""

    def outcome(self, row, history):
        return super().outcome(row | {"first_token_ns": row["first_scheduled_ns"]}, history)


@DRAWS.breaks("SIM-03")
class EndsAtTheClient(CheckedSimulator):
    """A request ends when its client receives the end, but its tokens are timed at the engine."""

    def outcome(self, row, history):
        outcome = super().outcome(row, history)
        end_ns = outcome["finish_ns"]
        return outcome | {"finish_ns": end_ns if end_ns is None else end_ns + 50_000}


@DRAWS.breaks("SIM-05")
class TracesMilliseconds(CheckedSimulator):
    """A trace has no more than milliseconds."""

    def rows(self, arrivals):
        return super().rows([(ns // 10**6 * 10**6, prompt, output) for ns, prompt, output in arrivals])


@DRAWS.breaks("SIM-05")
class LosesTheSeed(CheckedSimulator):
    """A replayed trace is drawn with the default seed."""

    def replay(self, service, arrivals):
        return super().replay(replace(service, seed=0), arrivals)


@DRAWS.breaks("SIM-06")
class SharesAStream(CheckedSimulator):
    """Arrivals, prompts and outputs come from one generator, one after the other."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if scenario.workload.trace is None:
            redraw_outputs(simulation, scenario, scenario.seed)
        return simulation


@DRAWS.breaks("SIM-06")
class SeedsWithTheSize(CheckedSimulator):
    """The number of requests is part of every seed."""

    def simulate(self, service, workload):
        return super().simulate(replace(service, seed=service.seed + 1000 * service.num_requests), workload)


@DRAWS.breaks("SIM-06")
class SharesAStreamOfFaults(CheckedSimulator):
    """All kinds of faults, and the lengths that clients ask for, come from one generator."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if faults is not None and faults.enabled:
            redraw_outputs(simulation, scenario, scenario.seed + len(faults.enabled))
        return simulation


@DRAWS.breaks("SIM-08", "SIM-15")
class TakesAnotherWay(CheckedSimulator):
    """With a fault plan, whatever is in it, a message takes a moment longer."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        for link in simulation.router.links.values() if faults is not None else ():
            link.link.latency_ns += 1000
        return simulation


@DRAWS.breaks("SIM-08")
class TakesZeroForTheDefault(CheckedSimulator):
    """A probability of 0 is taken for one that was not given."""

    def plan(self, service):
        faults = service.faults and tuple((kind, share or 500) for kind, share in service.faults)
        return super().plan(replace(service, faults=faults))


@DRAWS.breaks("SIM-09")
class ArrivesLikeAClock(CheckedSimulator):
    """Poisson arrivals are evenly spaced."""

    def load(self, service):
        return super().load(replace(service, arrivals="even") if service.arrivals == "poisson" else service)


@DRAWS.breaks("SIM-15")
class SendsToTheOtherCache(CheckedSimulator):
    """A prefix-aware router takes what was sent to any engine for what was sent to each."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if simulation.cluster is None:
            balancer = simulation.router._balancer
            balancer._sent = balancer._sent[:1] * len(balancer._sent)
        return simulation


@DRAWS.breaks("SIM-15")
class ServesOneMore(CheckedSimulator):
    """The batch has one place more than it was given."""

    def scenario(self, service, workload):
        return super().scenario(replace(service, max_running=service.max_running + (service.max_running > 0)), workload)


@DRAWS.breaks("SIM-15")
class BeginsWindowsEarly(CheckedSimulator):
    """Longest runs that are asked for together begin at a multiple of eight positions."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        object.__setattr__(simulation.assembly.acceptance, "__class__", EarlyWindows)
        return simulation


@DRAWS.breaks("SIM-15")
class CopiesDrawAsOne(CheckedSimulator):
    """The requests of a burst accept what the first of them accepts."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        submit = simulation.router.submit
        simulation.router.submit = lambda request, truth: submit(
            request, replace(truth, key=request_key(request.request_id.partition(".")[0]))
        )
        return simulation


@DRAWS.breaks("SIM-15")
class WaitsForItsBurst(CheckedSimulator):
    """A client waits for the last request of a burst."""

    def make(self, scenario, metrics, history, faults):
        simulation, sent = super().make(scenario, metrics, history, faults), []
        clients = simulation.clients
        clients.send_one = lambda *request, good=clients.send_one: sent.append(good(*request)) or sent[-1]
        clients.send = lambda arrival, good=clients.send: good(arrival) and sent[-1]
        return simulation


@DRAWS.breaks("SIM-06")
class DrawsPartsAnew(CheckedSimulator):
    """An engine that is simulated by itself has draws of its own."""

    def in_parts(self, service):
        return super().in_parts(replace(service, seed=service.seed + 1))


@DRAWS.breaks("SIM-01")
class BreaksTiesByHash(CheckedSimulator):
    """Of equally busy engines the router takes the one with the smallest `hash()`."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        balancer = None if simulation.cluster is not None else simulation.router._balancer
        if balancer is not None and balancer.policy == "least_loaded":
            balancer._choose = lambda among: min(
                among, key=lambda engine: (balancer.outstanding[engine], hash(f"{balancer._num_routed}/{engine}"))
            )
        return simulation


@DRAWS.breaks("SIM-15")
class ReplaysOneRecording(CheckedSimulator):
    """Every request accepts what the first one accepts."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        submit, first = simulation.router.submit, request_key("r0")
        simulation.router.submit = lambda request, truth: submit(request, replace(truth, key=first))
        return simulation
