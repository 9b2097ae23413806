"""Planted defects of simulators: each is ours with one part done wrong."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns

import numpy as np

from ....core.contract.events import Committed
from ....sim.run import Simulation
from ....sim.scenario import Scenario
from ...adapters.simulator import CheckedSimulator

# -- the same twice, and the clock ------------------------------------------------------------------------------------


class CountsThroughAllRuns(CheckedSimulator):
    """Events are numbered through all runs of a process."""

    number = 0

    def simulate(self, service, workload):
        answer = super().simulate(service, workload)
        before = CountsThroughAllRuns.number
        CountsThroughAllRuns.number += len(answer["events"])
        return answer | {"events": [f'{line[:-1]},"n":{n}}}' for n, line in enumerate(answer["events"], before)]}


class NotesTheWallClock(CheckedSimulator):
    """With faults, the history says how long the simulator itself took."""

    def simulate(self, service, workload):
        answer = super().simulate(service, workload)
        if any(share for _, share in service.faults or ()):
            answer["events"][-1] = f'{answer["events"][-1][:-1]},"took":{perf_counter_ns()}}}'
        return answer


class RestampedSimulator(CheckedSimulator):
    """Ours, with other times in the history; `stamp` gives that of an event, from the time of its replica's first event."""

    def make(self, scenario, metrics, history, faults):
        sink, times_ns = history.sink, history.times_ns

        def restamping_sink(replica):
            take, begin_ns = sink(replica), []

            def stamped(event):
                take(event)
                if hasattr(event, "now_ns"):
                    begin_ns.append(event.now_ns)
                    times_ns[-1] = self.stamp(event, begin_ns[0])

            return stamped

        history.sink = restamping_sink
        return super().make(scenario, metrics, history, faults)


class StampsTheBegin(RestampedSimulator):
    """A step that is committed is noted with the time at which its first round ended, not with that of its commit."""

    def stamp(self, event, begin_ns):
        return int(event.result.round_end_ns[0]) if type(event) is Committed else event.now_ns


class HasAClockPerReplica(RestampedSimulator):
    """Every replica counts from its own first event."""

    def stamp(self, event, begin_ns):
        return event.now_ns - begin_ns


# -- latencies --------------------------------------------------------------------------------------------------------


class TakesTheFirstPlan(CheckedSimulator):
    """The first token is said to come when its request was first scheduled."""

    def outcome(self, row, history):
        return super().outcome(row | {"first_token_ns": row["first_scheduled_ns"]}, history)


class TakesTheSecondToken(CheckedSimulator):
    """The first token is that of the first verify round, not that of the prompt."""

    def outcome(self, row, history):
        outcome = super().outcome(row, history)
        if len(outcome["emissions"]) > 1:
            outcome["first_token_ns"] = outcome["emissions"][1][0]
        return outcome


class EndsAtTheClient(CheckedSimulator):
    """A request ends when its client receives the end, but its tokens are timed at the engine."""

    def outcome(self, row, history):
        outcome = super().outcome(row, history)
        if outcome["finish_ns"] is not None:
            outcome["finish_ns"] += 50_000
        return outcome


# -- traces and draws -------------------------------------------------------------------------------------------------


class TracesMilliseconds(CheckedSimulator):
    """A trace has no more than milliseconds."""

    def rows(self, arrivals):
        return super().rows([(time_ns // 10**6 * 10**6, prompt, output) for time_ns, prompt, output in arrivals])


class LosesTheSeed(CheckedSimulator):
    """A replayed trace is drawn with the default seed."""

    def replay(self, service, arrivals):
        return super().replay(replace(service, seed=0), arrivals)


class _Redrawn(list):
    """Requests with the distributions that they were asked for with."""


def _redraw_outputs(simulation: Simulation, scenario: Scenario, seed: int) -> None:
    """Draw all output lengths from one generator."""
    drawn = list(simulation.workload)
    generator = np.random.default_rng(seed)
    generator.random(len(drawn))
    lens = generator.choice(scenario.workload.output.values or [1], len(drawn)).tolist()
    redrawn = _Redrawn(replace(a, output_len=n) for a, n in zip(drawn, lens, strict=True))
    redrawn.prompt_len, redrawn.output_len = simulation.workload.prompt_len, simulation.workload.output_len
    simulation.workload = redrawn


class SharesAStream(CheckedSimulator):
    """Arrivals, prompts and outputs come from one generator, one after the other."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if scenario.workload.trace is None:
            _redraw_outputs(simulation, scenario, scenario.seed)
        return simulation


class SeedsWithTheSize(CheckedSimulator):
    """The number of requests is part of every seed."""

    def simulate(self, service, workload):
        return super().simulate(replace(service, seed=service.seed + 1000 * service.num_requests), workload)


class SharesAStreamOfFaults(CheckedSimulator):
    """All kinds of faults, and the lengths that clients ask for, come from one generator."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if faults is not None and faults.enabled:
            _redraw_outputs(simulation, scenario, scenario.seed + len(faults.enabled))
        return simulation


# -- the summary ------------------------------------------------------------------------------------------------------


class OtherSummary(CheckedSimulator):
    """Ours, with other numbers in the summary: `changed` returns them."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | self.changed(summary, metrics)


class CountsTheFirstTokenTwice(OtherSummary):
    """The token of the prompt counts with the prompt and with the output."""

    def changed(self, summary, metrics):
        return {"total_output_tokens": summary["total_output_tokens"] + summary["completed"]}


class DividesByTheArrivals(OtherSummary):
    """Throughput is over the time in which requests arrived."""

    def changed(self, summary, metrics):
        rates = {name: summary[name] for name in ("output_throughput", "request_throughput")}
        return {name: rate if rate is None else 1.25 * rate for name, rate in rates.items()}


class StopsTheClockEarly(OtherSummary):
    """The duration ends before the last request does."""

    def changed(self, summary, metrics):
        return {"duration": summary["duration"] / 2}


class KeepsTheFirstValues(OtherSummary):
    """Latencies are kept in a list of bounded length: later ones are not in the percentiles."""

    def changed(self, summary, metrics):
        kept_ms = metrics.measured.e2el_ns.values[:2] * 1e-6
        return {f"p{p}_e2el_ms": float(np.percentile(kept_ms, p)) for p in (90, 95, 99) if len(kept_ms)}


class OrdersPercentilesByName(OtherSummary):
    """The greatest percentile is shown under the first name."""

    def changed(self, summary, metrics):
        return {"p90_itl_ms": summary["p99_itl_ms"], "p99_itl_ms": summary["p90_itl_ms"]}


class CallsEverythingGood(OtherSummary):
    """Every completed request counts as good."""

    def changed(self, summary, metrics):
        return {} if summary["request_goodput"] is None else {"request_goodput": summary["request_throughput"]}


# -- faults that cannot happen, queues --------------------------------------------------------------------------------


class TakesAnotherWay(CheckedSimulator):
    """With a fault plan, whatever is in it, a message takes a moment longer."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        if faults is not None:
            for link in simulation.router.links:
                link.link.latency_ns += 1000
        return simulation


class TakesZeroForTheDefault(CheckedSimulator):
    """A probability of 0 is taken for one that was not given."""

    def plan(self, service):
        if service.faults is None:
            return None
        return super().plan(replace(service, faults=tuple((kind, share or 500) for kind, share in service.faults)))


class LeavesOutTheQueue(OtherSummary):
    """A waiting request is not in the system."""

    def changed(self, summary, metrics):
        return {"mean_concurrency": summary["mean_running"]}


class ArrivesLikeAClock(CheckedSimulator):
    """Poisson arrivals are evenly spaced."""

    def load(self, service):
        return super().load(replace(service, arrivals="even") if service.arrivals == "poisson" else service)


class ServesOneMore(CheckedSimulator):
    """The batch has one place more than it was given."""

    def scenario(self, service, workload):
        more = service.max_running + 1 if service.max_running > 0 else service.max_running
        return super().scenario(replace(service, max_running=more), workload)


# -- memory, and what cannot be ---------------------------------------------------------------------------------------


class KeepsALargePool(CheckedSimulator):
    """Of a pool above a limit all but a small part is set aside."""

    def scenario(self, service, workload):
        if service.pages * self.config.page_size > 200:
            service = replace(service, pages=64 // self.config.page_size)
        return super().scenario(service, workload)


class RetractsInALargePool(CheckedSimulator):
    """In a large pool a request is retracted at every other step, needed or not."""

    def plan(self, service):
        tokens = service.pages * self.config.page_size
        is_calm = not any(share for _, share in service.faults or ())
        if is_calm and tokens > max(128, *service.prompt_lens):
            return super().plan(replace(service, faults=(("pool.retraction", 500),)))
        return super().plan(service)


class ForgetsThePool(CheckedSimulator):
    """Memory is unbounded."""

    def scenario(self, service, workload):
        return super().scenario(replace(service, pages=max(service.pages, 10**6)), workload)


class ClampsWhatCannotBe(CheckedSimulator):
    """Impossible numbers are replaced by the nearest possible ones."""

    def simulate(self, service, workload):
        counts = ("num_requests", "pages", "max_running", "replicas", "rate_per_ks")
        possible = replace(service, **{name: max(1, getattr(service, name)) for name in counts})
        return super().simulate(possible, workload if "trace" in workload else self.load(possible))

    def load(self, service):
        return super().load(
            replace(service, rate_per_ks=max(1, service.rate_per_ks), num_requests=max(1, service.num_requests))
        )


class DropsUnknownFaults(CheckedSimulator):
    """Of a fault plan only the names that are known and the probabilities that can be are read."""

    def plan(self, service):
        if service.faults is None:
            return None
        return super().plan(
            replace(service, faults=tuple(f for f in service.faults if f[0] != "device.sulks" and 0 <= f[1] <= 1000))
        )


class RefusesTheSmall(CheckedSimulator):
    """A service of a single request is refused: there would be nothing to average."""

    def scenario(self, service, workload):
        if service.num_requests == 1:
            raise ValueError("one request is no service")
        return super().scenario(service, workload)


# -- what is reported -------------------------------------------------------------------------------------------------


class ProposesTheRoot(OtherSummary):
    """The root of a verify tree counts as a draft."""

    def changed(self, summary, metrics):
        return {"proposed_drafts": summary["proposed_drafts"] + summary["verified_rows"]}


class HoldsItsPeak(OtherSummary):
    """The mean use of the KV pools is their greatest."""

    def changed(self, summary, metrics):
        return {"kv_occupancy_mean": summary["kv_occupancy_max"]}


DEFECTS = (
    (CountsThroughAllRuns, ("SIM-01", "SIM-05", "SIM-08")),
    (NotesTheWallClock, ("SIM-01",)),
    (StampsTheBegin, ("SIM-02",)),
    (HasAClockPerReplica, ("SIM-02",)),
    (TakesTheFirstPlan, ("SIM-03",)),
    (TakesTheSecondToken, ("SIM-03",)),
    (EndsAtTheClient, ("SIM-03",)),
    (TracesMilliseconds, ("SIM-05",)),
    (LosesTheSeed, ("SIM-05",)),
    (SharesAStream, ("SIM-06",)),
    (SeedsWithTheSize, ("SIM-06",)),
    (SharesAStreamOfFaults, ("SIM-06",)),
    (CountsTheFirstTokenTwice, ("SIM-07",)),
    (DividesByTheArrivals, ("SIM-07",)),
    (StopsTheClockEarly, ("SIM-07",)),
    (KeepsTheFirstValues, ("SIM-07",)),
    (OrdersPercentilesByName, ("SIM-07",)),
    (CallsEverythingGood, ("SIM-07",)),
    (TakesAnotherWay, ("SIM-08", "SIM-15")),
    (TakesZeroForTheDefault, ("SIM-08",)),
    (LeavesOutTheQueue, ("SIM-09",)),
    (ArrivesLikeAClock, ("SIM-09",)),
    (ServesOneMore, ("SIM-09",)),
    (KeepsALargePool, ("SIM-10", "SIM-11")),
    (RetractsInALargePool, ("SIM-10",)),
    (ForgetsThePool, ("SIM-11",)),
    (ClampsWhatCannotBe, ("SIM-11",)),
    (DropsUnknownFaults, ("SIM-11",)),
    (RefusesTheSmall, ("SIM-11",)),
    (ProposesTheRoot, ("SIM-13",)),
    (HoldsItsPeak, ("SIM-13",)),
)
"""(class, the invariants of which one must catch it)."""
