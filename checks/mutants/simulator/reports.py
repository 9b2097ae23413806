"""Planted defects of simulators: what a report says of a run."""

import numpy as np

from ...adapters.simulator import CheckedSimulator
from ..planting import Defects

REPORTS = Defects("simulator", CheckedSimulator)


@REPORTS.breaks("SIM-07")
class CountsTheFirstTokenTwice(CheckedSimulator):
    """The token of the prompt counts with the prompt and with the output."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"total_output_tokens": summary["total_output_tokens"] + summary["completed"]}


@REPORTS.breaks("SIM-07")
class DividesByTheArrivals(CheckedSimulator):
    """Throughput is over the time in which requests arrived."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        rates = {name: summary[name] for name in ("output_throughput", "request_throughput")}
        return summary | {name: rate if rate is None else 1.25 * rate for name, rate in rates.items()}


@REPORTS.breaks("SIM-07")
class StopsTheClockEarly(CheckedSimulator):
    """The duration ends before the last request does."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"duration": summary["duration"] / 2}


@REPORTS.breaks("SIM-07")
class KeepsTheFirstValues(CheckedSimulator):
    """Latencies are kept in a list of bounded length: later ones are not in the percentiles."""

    def summary(self, metrics, duration_ns, slo):
        summary, kept_ms = super().summary(metrics, duration_ns, slo), metrics.measured.e2el_ns.values[:2] * 1e-6
        return summary | {f"p{p}_e2el_ms": float(np.percentile(kept_ms, p)) for p in (90, 95, 99) if len(kept_ms)}


@REPORTS.breaks("SIM-07")
class OrdersPercentilesByName(CheckedSimulator):
    """The greatest percentile is shown under the first name."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"p90_itl_ms": summary["p99_itl_ms"], "p99_itl_ms": summary["p90_itl_ms"]}


@REPORTS.breaks("SIM-07")
class CallsEverythingGood(CheckedSimulator):
    """Every completed request counts as good."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"request_goodput": summary["request_goodput"] and summary["request_throughput"]}


@REPORTS.breaks("SIM-15")
class CountsNoChange(CheckedSimulator):
    """Engines that change their pool are not counted."""

    def books(self, simulation, report, metrics, summary, arrivals):
        books = super().books(simulation, report, metrics, summary, arrivals)
        return books | {"summary": books["summary"] | {"role_changes": 0}}


@REPORTS.breaks("SIM-13")
class NoticesEveryMean(CheckedSimulator):
    """A report says of every mean length but the exact one that it is not as asked for."""

    def books(self, simulation, report, metrics, summary, arrivals):
        books = super().books(simulation, report, metrics, summary, arrivals)
        lengths = {
            kind: (mean, deviation, summary[f"mean_{kind}_tokens"] not in (None, mean))
            for kind, (mean, deviation, _) in books["lengths"].items()
        }
        return books | {"lengths": lengths}


@REPORTS.breaks("SIM-09")
class LeavesOutTheQueue(CheckedSimulator):
    """A waiting request is not in the system."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"mean_concurrency": summary["mean_running"]}


@REPORTS.breaks("SIM-13")
class ProposesTheRoot(CheckedSimulator):
    """The root of a verify tree counts as a draft."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"proposed_drafts": summary["proposed_drafts"] + summary["verified_rows"]}


@REPORTS.breaks("SIM-13")
class HoldsItsPeak(CheckedSimulator):
    """The mean use of the KV pools is their greatest."""

    def summary(self, metrics, duration_ns, slo):
        summary = super().summary(metrics, duration_ns, slo)
        return summary | {"kv_occupancy_mean": summary["kv_occupancy_max"]}


@REPORTS.breaks("SIM-07")
class ForgetsTheGapOfARetraction(CheckedSimulator):
    """The time that a request waits after a retraction is in no inter-token latency."""

    def make(self, scenario, metrics, history, faults):
        simulation = super().make(scenario, metrics, history, faults)
        lives, retracted = metrics.lives, metrics.lives._retracted

        def forget(request):
            retracted(request)
            metrics.flush()
            lives.open.columns.last_token_ns[request.column] = -1

        lives._retracted = forget
        return simulation
