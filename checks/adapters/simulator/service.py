"""Our simulator behind the simulator contract.

A run is that of `foredraft simulate`: scenario, engines, routers, metrics, `requests.parquet` and the lines of
`events.jsonl`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ....observe.measuring.metrics import RunMetrics, read_rows
from ....observe.measuring.summary import SLO
from ....properties.simulator.contract import HOST_DELAY_NS, TREE_NODES, Service, SimulatorCapabilities, SimulatorConfig
from ....sim.faults.plan import FaultPlan, fault_plan
from ....sim.running.report import RunReport
from ....sim.running.run import Simulation
from ....sim.scenario import Scenario
from ....sim.scenario_file import scenario_from_dict
from ....sim.workload.workload import TimedRequest
from .acceptance import acceptance_of
from .books import left_of, lengths_of, link_of, machine_of, patience_of, port_of
from .history import History

REASONS = {"stop": "completed", "length": "completed", "refused": "refused", "abort": "aborted", "error": "failed"}
CONTEXT_LEN = 2048
MACHINES: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {},
    "sparse": {"model": {"target": "qwen3-30b-a3b"}},
    "8-bit": {"model": {"weight_dtype": "fp8", "kv_dtype": "fp8"}},
    "eager": {"hardware": {"cuda_graphs": False, "launch": "piecewise"}},
    "two devices": {"hardware": {"tensor_parallel": 2}},
}
WITH_MORE = {"bandwidth": {"gpu": "H200"}}  # of an H100 with another memory

ACCEPTANCES: dict[str, dict[str, Any]] = {
    "independent": {"request_share": 0.0, "field_share": 0.0},
    "smooth": {"request_share": 0.1, "field_share": 0.8, "correlation_len": 5},
    "drifting": {"drift_per_1k_tokens": -4.0},
    "stretches": {"regimes": {"stretch_len": 5, "shifts": [-1.5, 0.5], "weights": [1.0, 3.0]}},
}
CANCEL_MEAN_S = 0.03
ARRIVALS = {"poisson": "poisson", "even": "constant"}


class CheckedSimulator:
    """`foredraft simulate`, with everything that it writes as plain data."""

    capabilities: SimulatorCapabilities = SimulatorCapabilities.all()

    def __init__(
        self, config: SimulatorConfig, *, own: range | None = None, more: str | None = None, **engine: int
    ) -> None:
        """Take what the services of `config` have in common; `own`: the engines of which alone runs consist; `more`: of
        what the machine has more."""
        self.config, self.own, self.more, self.engine = config, own, more, engine

    def run(self, service: Service) -> dict[str, Any]:
        return self.simulate(service, self.load(service))

    def round_by_round(self, service: Service) -> dict[str, Any]:
        return type(self)(self.config, multi_step_rounds=1).run(service)

    def in_parts(self, service: Service) -> list[dict[str, Any]]:
        requests: list[dict[str, Any]] = []
        for replica in range(service.replicas):
            part = type(self)(self.config, own=range(replica, replica + 1))
            scenario, history = part.scenario(service, part.load(service)), History()
            requests += part.outcomes(scenario, history, None)[0]
        return requests

    def changed(self, service: Service, change: str) -> dict[str, Any]:
        return type(self)(self.config, more=change).run(service)

    def replay(self, service: Service, arrivals: Sequence[Sequence[int]]) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.csv"
            trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *self.rows(arrivals)]) + "\n")
            return self.simulate(service, {"trace": str(trace)})

    def rows(self, arrivals: Sequence[Sequence[int]]) -> list[str]:
        """Return the lines of an Azure trace."""
        stamps = [divmod(time_ns, 60 * 10**9) for time_ns, _, _ in arrivals]
        return [
            f"2026-01-01 {minute // 60:02}:{minute % 60:02}:{ns // 10**9:02}.{ns % 10**9:09},{prompt},{output}"
            for (minute, ns), (_, prompt, output) in zip(stamps, arrivals, strict=True)
        ]

    def load(self, service: Service) -> dict[str, Any]:
        when: dict[str, Any] = {"concurrency": service.clients}
        if not service.clients:
            arrivals = ARRIVALS.get(service.arrivals, service.arrivals)
            when = {"arrivals": arrivals, "rate": service.rate_per_ks / 1000}
        if service.prefix_groups:
            when["prefixes"] = {"groups": service.prefix_groups, "length": service.prefix_len}
        return {
            "num_requests": service.num_requests,
            **when,
            "prompt": {"kind": "empirical", "values": list(service.prompt_lens)},
            "output": {"kind": "empirical", "values": list(service.output_lens)},
        }

    def scenario(self, service: Service, workload: dict[str, Any]) -> Scenario:
        slo = {"ttft_ms": service.slo_ttft_ms, "e2el_ms": service.slo_e2el_ms}
        machine = MACHINES.get(self.config.machine, {})
        clients = {"cancel_share": service.cancels / 1000, "cancel_mean_s": CANCEL_MEAN_S} if service.cancels else {}
        clients |= {"deadline_s": service.deadline_ms / 1000} if service.deadline_ms else {}
        chunks = {"stream_interval": service.stream_interval, "chunk_us": service.chunk_us}
        jitter = {"device_jitter": service.jitter / 1000} if service.jitter else {}
        more = WITH_MORE.get(self.more or "", {})
        replicas = {} if self.config.has_pools and service.replicas > 0 else {"replicas": service.replicas}
        pools = dict(zip(("prefill", "decode"), self.config.pools, strict=True))
        port = {"bandwidth_gbps": self.config.port_mbps / 1000, "layerwise": self.config.layerwise}
        port |= {"rebalance_s": self.config.rebalance_ms / 1000} if self.config.rebalance_ms else {}
        table = {
            "seed": service.seed,
            "model": {"context_len": CONTEXT_LEN, **machine.get("model", {})},
            # `auto` would take measured kernels where they are installed: the suite would find other histories.
            "hardware": {"kernels": "roofline", **jitter, **replicas, **machine.get("hardware", {}), **more},
            "speculation": self.speculation(),
            "acceptance": ACCEPTANCES.get(self.config.acceptance, {}) | {"preset": self.config.text},
            "router": {"policy": service.policy, "bandwidth_gbps": service.link_mbps / 1000},
            "disaggregation": pools | port if self.config.has_pools else {},
            "clients": clients,
            "front_end": {name: float(value) if name == "chunk_us" else value for name, value in chunks.items()},
            "engine": {
                "mode": "overlap" if self.config.overlap else "synchronous",
                "page_size": self.config.page_size,
                "kv_slots": service.pages * self.config.page_size,
                "max_running": service.max_running,
                "chunk_size": 32,
                **self.engine,
            },
            "workload": workload,
            "slo": {name: float(limit) for name, limit in slo.items() if limit},
        }
        return scenario_from_dict(table, "<service>")

    def speculation(self) -> dict[str, Any]:
        steps = self.config.steps
        if not steps:
            return {"algorithm": "NONE", "policy": "fixed", "steps": 0}
        if self.config.adaptive:
            return {"algorithm": "EAGLE3", "policy": "ema", "adaptive": {"1": {"candidate_steps": [0, steps]}}}
        tree = (
            {"topk": self.config.topk, "num_draft_tokens": min(TREE_NODES, 1 + 2 * steps)}
            if self.config.topk > 1
            else {}
        )
        return {"algorithm": "EAGLE3", "policy": "fixed", "steps": steps, **tree}

    def plan(self, service: Service) -> FaultPlan | None:
        if service.faults is None:
            return None
        families: dict[str, dict[str, Any]] = defaultdict(dict)
        for kind, permille in service.faults:
            family, _, name = kind.partition(".")
            families[family][name] = {"probability": permille / 1000}
        return fault_plan(families, "<faults>")

    def simulate(self, service: Service, workload: dict[str, Any]) -> dict[str, Any]:
        scenario, history = self.scenario(service, workload), History()
        requests, simulation, report, metrics = self.outcomes(scenario, history, self.plan(service))
        arrivals = list(simulation.workload)
        slo = SLO(scenario.slo.ttft_ms, None, scenario.slo.e2el_ms)
        for replica, busy_ns in enumerate(report.device_busy_ns):
            metrics.observe_device(replica, busy_ns)
        summary = self.summary(metrics, report.duration_ns, slo)
        return {
            "events": history.lines,
            "times_ns": history.times_ns,
            "arrivals": [[arrival.time_ns or 0, arrival.prompt.length, arrival.output_len] for arrival in arrivals],
            "requests": requests,
            "summary": summary,
            "books": self.books(simulation, report, metrics, summary, arrivals),
        }

    def outcomes(
        self, scenario: Scenario, history: History, faults: FaultPlan | None
    ) -> tuple[list[dict[str, Any]], Simulation, RunReport, RunMetrics]:
        """Make a run, and return its requests, and what it and its metrics have said."""
        with TemporaryDirectory() as folder:
            metrics = RunMetrics(folder)
            simulation = self.make(scenario, metrics, history, faults)
            report = simulation.run()
            metrics.close()
            rows = read_rows(Path(folder) / "requests.parquet")
        return [self.outcome(row, history) for row in rows], simulation, report, metrics

    def books(
        self,
        simulation: Simulation,
        report: RunReport,
        metrics: RunMetrics,
        summary: dict[str, Any],
        arrivals: list[TimedRequest],
    ) -> dict[str, Any]:
        """Return what the capability `books` promises."""
        pools = {} if report.disaggregation is None else report.disaggregation.to_json(report.duration_ns)
        timeline = {f"timeline_{name}": values for name, values in metrics.timeline().items()}
        return {
            "summary": {**summary, **pools, **timeline},
            "machine": machine_of(simulation.assembly),
            **acceptance_of(simulation, arrivals),
            "lengths": lengths_of(report, summary),
            "patience": patience_of(simulation, arrivals),
            "link": link_of(simulation),
            "port": port_of(simulation),
            "left": left_of(simulation, metrics),
        }

    def make(self, scenario: Scenario, metrics: RunMetrics, history: History, faults: FaultPlan | None) -> Simulation:
        simulation = Simulation(
            scenario, sinks=lambda r: [metrics.sink(r), history.sink(r)], faults=faults, own=self.own
        )
        for actor in simulation.replicas:
            if self.config.machine == "free host":
                actor.host.cost = actor.host.cost.at_pace(0)
            if self.more == "host":
                cost = actor.host.cost
                actor.host.cost = replace(cost, plan_base_ns=cost.plan_base_ns + HOST_DELAY_NS)
        return simulation

    def outcome(self, row: dict[str, Any], history: History) -> dict[str, Any]:
        """Return one row of `requests.parquet`, with what the history has of it."""
        name, reason = row["request_id"], REASONS[row["reason"]]
        entered = reason != "refused"
        return {
            "number": int(name[1:]) if name[1:].isdecimal() else -1,
            "reason": reason,
            "arrival_ns": row["arrival_ns"],
            "first_token_ns": _known(row["first_token_ns"]),
            "finish_ns": _known(row["finish_ns"]),
            "max_tokens": history.max_tokens[name] if entered else 0,
            "num_output": row["num_output"],
            "retractions": row["retractions"],
            "emissions": history.emissions.get(name, []) if entered else [],
        }

    def summary(self, metrics: RunMetrics, duration_ns: int, slo: SLO) -> dict[str, Any]:
        return metrics.summary(duration_ns, slo)


def _known(time_ns: int | None) -> int | None:
    return None if time_ns is None or time_ns < 0 else time_ns


make = CheckedSimulator
