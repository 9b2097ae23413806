"""What a simulated run says of its machine, its links and its clients, and what is left of it: parts of the capability
`books`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....core.model_shape import Mlp
from ....observe.measuring.metrics import RunMetrics
from ....sim.actors.client import Patience
from ....sim.assembly import Assembly
from ....sim.disaggregation.cluster import draft_input_bytes
from ....sim.load import length_notice
from ....sim.running.report import RunReport
from ....sim.running.run import Simulation
from ....sim.workload.workload import TimedRequest


def machine_of(assembly: Assembly) -> dict[str, Any]:
    """Return the mapping `machine` of an answer, for one device of an engine: sums over the model's parameters."""
    shape, devices = assembly.target, assembly.deployment.parallel.devices
    width, experts = shape.format_bytes(), shape.experts
    expert_bytes = 0.0
    if experts is not None:
        layers = sum(count for part, count in shape.mlps if not isinstance(part, Mlp))
        expert_bytes = 3 * shape.hidden * experts.width * layers * width / devices
    wide = shape.embedding_parameters * (1 if shape.tied_embeddings else 2)  # input embedding and LM head
    weights = (shape.active_parameters - wide) * width / devices
    per_token = experts.top_k if experts else 0
    return {
        "bytes_per_s": assembly.deployment.gpu.memory_bandwidth_bytes_per_s,
        "weights_bytes": weights - per_token * expert_bytes,
        "experts": experts.count if experts else 0,
        "experts_per_token": per_token,
        "expert_bytes": expert_bytes,
    }


def patience_of(simulation: Simulation, arrivals: list[TimedRequest]) -> dict[str, int]:
    """Return after how many nanoseconds the client of each request leaves, of those whose client does."""
    clients = simulation.scenario.clients
    patience = Patience(simulation.scenario.seed, clients.deadline_s, clients.cancel_share, clients.cancel_mean_s)
    waits = {f"r{arrival.row}": patience.of(arrival.row) for arrival in arrivals}
    return {name: ns for name, ns in waits.items() if ns is not None}


def lengths_of(report: RunReport, summary: Mapping[str, Any]) -> dict[str, tuple[float, float, bool]]:
    """Return mean and deviation of the lengths that were asked for, and whether the report says that it has others."""
    found = {}
    for kind, asked in report.asked_lengths.items():
        got = summary[f"mean_{kind}_tokens"]
        notice = None if got is None else length_notice(kind, asked, got, summary["completed"])
        found[kind] = (*asked, notice is not None)
    return found


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
