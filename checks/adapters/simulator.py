"""Our simulator behind the simulator contract.

A run is that of `foredraft simulate`: scenario, engines, routers, metrics, `requests.parquet` and the lines of
`events.jsonl`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...core.acceptance.process import walk_to_end
from ...core.contract.events import Committed, Event, Planned, Submitted
from ...core.draws import request_key
from ...core.model_shape import DTYPE_BYTES, Attention, Mlp, ModelShape
from ...observe.encoding import LineEncoder
from ...observe.metrics import RunMetrics, read_rows
from ...observe.summary import SLO
from ...properties.simulator.contract import TREE_NODES, Service, SimulatorCapabilities, SimulatorConfig
from ...sim.actors.client import Patience
from ...sim.assembly import Assembly
from ...sim.disaggregation.cluster import draft_input_bytes
from ...sim.faults.plan import FaultPlan, fault_plan
from ...sim.run import Simulation
from ...sim.running.report import RunReport
from ...sim.scenario import Scenario
from ...sim.scenario_file import scenario_from_dict
from ...sim.workload.workload import Arrival


def machine_of(assembly: Assembly) -> dict[str, Any]:
    """Return the mapping `machine` of an answer, for one replica."""
    gpu, cost, draft = assembly.deployment.gpu, assembly.cost, assembly.draft
    efficiency, launch, link = cost.efficiency, cost.launch, gpu.interconnect
    names = ("bandwidth", "compute", "attention_bandwidth", "attention_compute", "ramp_ns", "small_kernel_ns")
    return {
        **{name: getattr(efficiency, name) for name in (*names, "soft_exponent")},
        "tp": cost.tp,
        "bytes_per_s": gpu.memory_bandwidth_bytes_per_s,
        "flops": dict(gpu.peak_flops),
        "sm_count": gpu.sm_count,
        "link_bytes_per_s": link.bandwidth_bytes_per_s,
        "link_latency_ns": link.latency_ns,
        "graph_gap_ns": launch.graph_gap_ns,
        "eager_kernel_ns": launch.eager_kernel_ns,
        "draft_floor_ns": launch.draft_pass_floor_ns,
        "graph_sizes": cost.graph_sizes,
        "graph_unit": cost.graph_unit,
        "keep_draft_warm": cost.keep_draft_warm,
        "expert_independence": cost.expert_independence,
        "host": {name: value for name, value in asdict(assembly.host).items() if name.endswith("_ns")},
        "target": _sizes(assembly.target),
        "draft": None
        if draft is None
        else {
            "algorithm": draft.algorithm,
            "heads": draft.heads,
            "fusion_inputs": draft.fusion_inputs,
            "fusion_every_pass": draft.fusion_every_pass,
            "qkv_inputs": draft.qkv_inputs,
            "verify_share": draft.verify_share,
            "body": None if draft.body is None else _sizes(draft.body),
        },
    }


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """Return the sizes of a decoder whose layers are all alike but for windows and experts, as the model of a
    roofline takes them."""
    (attention, _), *others = shape.mixers
    dense = [(part, count) for part, count in shape.mlps if isinstance(part, Mlp)]
    experts = shape.experts
    windowed = sum(count for mixer, count in shape.mixers if mixer.window is not None)
    assert isinstance(attention, Attention) and all(isinstance(mixer, Attention) for mixer, _ in others), shape.name
    return {
        "layers": shape.layers,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "tied_embeddings": shape.tied_embeddings,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "qk_norm": attention.qk_norm,
        "intermediate": dense[0][0].width if dense else 0,
        "dense_layers": sum(count for _, count in dense) if experts else 0,
        "experts": experts.count if experts else 0,
        "experts_per_token": experts.top_k if experts else 0,
        "moe_intermediate": experts.width if experts else 0,
        "shared_intermediate": experts.shared_width if experts else 0,
        "attention_window": shape.attention_window,
        "windowed_layers": windowed,
        "weight_bytes": DTYPE_BYTES[shape.weight_dtype],
        "kv_bytes": DTYPE_BYTES[shape.kv_dtype],
        "dtype": shape.weight_dtype,
    }


def acceptance_of(simulation: Simulation, arrivals: list[Arrival]) -> dict[str, Any]:
    """Return what the acceptance process itself says of every request: the longest runs at its output positions, and
    successive rounds; and its parameters, with the depths of many runs."""
    spec = simulation.assembly.spec
    if not spec.max_steps:
        return {"runs": {}, "rounds": {}, "process": {}}
    ids, num_positions = [f"r{arrival.row}" for arrival in arrivals], max(arrival.output_len for arrival in arrivals)
    chain: Any = simulation.assembly.acceptance
    process = chain
    steps, nodes, rank_ratio = spec.max_steps, spec.max_num_draft_tokens, simulation.scenario.acceptance.rank_ratio
    if spec.topk > 1:
        process = chain.for_tree(spec.topk, steps, nodes, rank_ratio)
    keys = np.array([request_key(name) for name in ids], dtype=np.uint64)
    starts = np.zeros(len(ids), np.int64)
    runs = process.longest_run(keys[:, None], np.arange(num_positions)[None, :])
    count = 1 + (num_positions - 1) // (steps + 1)  # rounds that start before the last position, however many accept
    counted = process.accept_lens(keys, starts, steps, count)
    output_lens = np.array([arrival.output_len for arrival in arrivals])
    to_end = walk_to_end(process.run_windows(keys, starts, num_positions), steps, output_lens)
    drawn = process.longest_run(np.arange(NUM_DRAWS, dtype=np.uint64), np.zeros(1, np.int64))
    depths = min(steps, process.max_depth)
    parameters = {"conditional": chain.conditional, "depths": depths, "topk": spec.topk, "rank_ratio": rank_ratio}
    return {
        "runs": dict(zip(ids, runs.tolist(), strict=True)),
        "rounds": {
            "steps": steps,
            "count": count,
            "counted": dict(zip(ids, counted.T.tolist(), strict=True)),
            "to_end": {name: lens[lens > 0].tolist() for name, lens in zip(ids, to_end.T, strict=True)},
        },
        "process": {
            "parameters": parameters | {"num_nodes": nodes, "draft_confidence": chain.draft_confidence},
            "survival": list(process.survival[:depths]),
            "num_draws": NUM_DRAWS,
            "shares": [float((drawn >= depth).mean()) for depth in range(1, depths + 1)],
        },
    }


def patience_of(simulation: Simulation, arrivals: list[Arrival]) -> dict[str, int]:
    """Return after how many nanoseconds the client of each request leaves, of those whose client does."""
    clients = simulation.scenario.clients
    patience = Patience(simulation.scenario.seed, clients.deadline_s, clients.cancel_share, clients.cancel_mean_s)
    waits = {f"r{arrival.row}": patience.of(arrival.row) for arrival in arrivals}
    return {name: ns for name, ns in waits.items() if ns is not None}


def link_of(simulation: Simulation) -> list[float]:
    """Return latency in ns and bytes per second from the clients to an engine."""
    table = simulation.scenario.router
    return [round(table.latency_us * 1000), table.bandwidth_gbps * 1e9 / 8]


def port_of(simulation: Simulation) -> list[float]:
    """Return latency in ns, bytes per second, bytes of a page and of what goes beside the last one, between engines."""
    assembly, table = simulation.assembly, simulation.scenario.disaggregation
    page_bytes = assembly.target.kv_bytes_per_token + (assembly.draft.kv_bytes_per_token if assembly.draft else 0)
    beside = 0 if simulation.cluster is None else draft_input_bytes(assembly)
    bytes_per_s = simulation.scenario.hardware.devices * table.bandwidth_gbps * 1e9 / 8
    return [round(table.latency_us * 1000), bytes_per_s, page_bytes * assembly.spec.config.page_size, beside]


def left_of(simulation: Simulation, metrics: RunMetrics) -> dict[str, int]:
    """Return what is left of everything that a request takes, after the last one has ended."""
    balancers = simulation.router.balancers.values()
    left = {
        "prompt tokens that a router counts": sum(map(abs, (n for b in balancers for n in b.waiting_tokens))),
        "requests that a router counts": sum(map(abs, simulation.router.outstanding)),
        "requests that the metrics have open": metrics.lives.running + metrics.lives.waiting,
    }
    if simulation.cluster is not None:
        left["requests that the router of pools knows"] = len(simulation.cluster.request_ids)
    for actor in simulation.replicas:
        engine, name = actor.engine, f"engine {actor.replica}: "
        engine.store.forget()
        left[name + "requests"] = len(engine.requests.live)
        left[name + "rows"] = engine.requests.num_with_row
        left[name + "KV slots"] = engine.store.allocator.num_held_slots
        left[name + "requests on the device"] = len(actor.device.truths)
    return left


REASONS = {"stop": "completed", "length": "completed", "refused": "refused", "abort": "aborted", "error": "failed"}
CONTEXT_LEN = 2048
MACHINES: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {},
    "sparse": {"model": {"target": "qwen3-30b-a3b"}},
    "8-bit": {"model": {"weight_dtype": "fp8", "kv_dtype": "fp8"}},
    "eager": {"hardware": {"cuda_graphs": False, "launch": "piecewise"}},
    "two devices": {"hardware": {"tensor_parallel": 2}},
}
CANCEL_MEAN_S = 0.03
NUM_DRAWS = 2000
ARRIVALS = {"poisson": "poisson", "even": "constant"}


class History:
    """What the engines say: lines, times, what each request asked for, and the tokens that it got."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.times_ns: list[int] = []
        self.max_tokens: dict[str, int] = {}
        self.emissions: dict[str, list[list[int]]] = defaultdict(list)
        self._unsent: dict[tuple[int, str], int] = defaultdict(int)

    def sink(self, replica: int):
        encode = LineEncoder(replica).encode
        rows: dict[int, str] = {}

        def take(event: Event) -> None:
            self.lines.append(encode(event))
            self.times_ns.append(getattr(event, "now_ns", self.times_ns[-1] if self.times_ns else 0))
            if type(event) is Submitted and not event.refusal:
                self.max_tokens[event.request.request_id] = event.request.max_tokens
            elif type(event) is Planned and event.step is not None:
                rows.update({join.row: join.request.request_id for join in event.step.joins})
            elif type(event) is Committed:
                self._emitted(event, rows, replica)

        return take

    def _emitted(self, event: Committed, rows: dict[int, str], replica: int) -> None:
        ends_ns, sent = event.result.round_end_ns.tolist(), event.deliveries
        firsts_ns = [ends_ns[0]] * len(event.first_tokens) if sent is None else sent.first_ns.tolist()
        for request_id, at_ns in zip(event.first_tokens, firsts_ns, strict=True):
            self._send(replica, request_id, at_ns, 1)
        if event.step.decode is None:
            return
        decode_rows = event.step.decode.rows.tolist()
        all_ns = [[end_ns] * len(decode_rows) for end_ns in ends_ns] if sent is None else sent.at_ns.tolist()
        for round_ns, kept in zip(all_ns, event.kept.tolist(), strict=True):
            for row, at_ns, tokens in zip(decode_rows, round_ns, kept, strict=True):
                if tokens:
                    self._send(replica, rows[row], at_ns, tokens)

    def _send(self, replica: int, request_id: str, at_ns: int, tokens: int) -> None:
        """Note tokens that reach their client at `at_ns`; −1: with the next chunk."""
        self._unsent[replica, request_id] += tokens
        if at_ns >= 0:
            self.emissions[request_id].append([at_ns, self._unsent.pop((replica, request_id))])


class CheckedSimulator:
    """`foredraft simulate`, with everything that it writes as plain data."""

    capabilities = SimulatorCapabilities.all()

    def __init__(self, config: SimulatorConfig, **engine: int) -> None:
        self.config, self.engine = config, engine

    def run(self, service: Service) -> dict[str, Any]:
        return self.simulate(service, self.load(service))

    def round_by_round(self, service: Service) -> dict[str, Any]:
        return type(self)(self.config, block_rounds=1).run(service)

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
        return {
            "num_requests": service.num_requests,
            **when,
            "prompt": {"kind": "empirical", "values": list(service.prompt_lens)},
            "output": {"kind": "empirical", "values": list(service.output_lens)},
        }

    def scenario(self, service: Service, workload: dict[str, Any]) -> Scenario:
        slo = {"ttft_ms": service.slo_ttft_ms, "e2el_ms": service.slo_e2el_ms}
        machine = MACHINES[self.config.machine]
        clients = {"cancel_share": service.cancels / 1000, "cancel_mean_s": CANCEL_MEAN_S} if service.cancels else {}
        clients |= {"deadline_s": service.deadline_ms / 1000} if service.deadline_ms else {}
        chunks = {"stream_interval": service.stream_interval, "chunk_us": service.chunk_us}
        jitter = {"device_jitter": service.jitter / 1000} if service.jitter else {}
        replicas = {} if self.config.has_pools and service.replicas > 0 else {"replicas": service.replicas}
        pools = dict(zip(("prefill", "decode"), self.config.pools, strict=True))
        port = {"bandwidth_gbps": self.config.port_mbps / 1000, "layerwise": self.config.layerwise}
        table = {
            "seed": service.seed,
            "model": {"context_len": CONTEXT_LEN, **machine.get("model", {})},
            # The suite knows the roofline: with measured kernels installed, `auto` would take them.
            "hardware": {"kernels": "roofline", **jitter, **replicas, **machine.get("hardware", {})},
            "speculation": self.speculation(),
            "acceptance": {"preset": self.config.text},
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
        with TemporaryDirectory() as folder:
            metrics = RunMetrics(folder)
            simulation = self.make(scenario, metrics, history, self.plan(service))
            arrivals = list(simulation.workload)
            report = simulation.run()
            metrics.close()
            rows = read_rows(Path(folder) / "requests.parquet")
        slo = SLO(scenario.slo.ttft_ms, None, scenario.slo.e2el_ms)
        for replica, busy_ns in enumerate(report.device_busy_ns):
            metrics.observe_device(replica, busy_ns)
        summary = self.summary(metrics, report.duration_ns, slo)
        return {
            "events": history.lines,
            "times_ns": history.times_ns,
            "arrivals": [[arrival.time_ns or 0, arrival.prompt.length, arrival.output_len] for arrival in arrivals],
            "requests": [self.outcome(row, history) for row in rows],
            "summary": summary,
            "books": self.books(simulation, report, metrics, summary, arrivals),
        }

    def books(
        self,
        simulation: Simulation,
        report: RunReport,
        metrics: RunMetrics,
        summary: dict[str, Any],
        arrivals: list[Arrival],
    ) -> dict[str, Any]:
        """Return what the capability `books` promises."""
        pools = {} if report.disaggregation is None else report.disaggregation.to_json(report.duration_ns)
        timeline = {f"timeline_{name}": values for name, values in metrics.timeline().items()}
        return {
            "summary": {**summary, **pools, **timeline},
            "machine": machine_of(simulation.assembly),
            **acceptance_of(simulation, arrivals),
            "patience": patience_of(simulation, arrivals),
            "link": link_of(simulation),
            "port": port_of(simulation),
            "left": left_of(simulation, metrics),
        }

    def make(self, scenario: Scenario, metrics: RunMetrics, history: History, faults: FaultPlan | None) -> Simulation:
        return Simulation(scenario, sinks=lambda r: [metrics.sink(r), history.sink(r)], faults=faults)

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
