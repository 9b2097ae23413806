"""What a simulated run says of its machine, its links and its clients, and what is left of it: parts of the capability
`books`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ....core.model_shape import DTYPE_BYTES, Attention, Mlp, ModelShape
from ....observe.metrics import RunMetrics
from ....sim.actors.client import Patience
from ....sim.assembly import Assembly
from ....sim.disaggregation.cluster import draft_input_bytes
from ....sim.load import length_notice
from ....sim.run import Simulation
from ....sim.running.report import RunReport
from ....sim.workload.workload import Arrival


def machine_of(assembly: Assembly) -> dict[str, Any]:
    """Return the mapping `machine` of an answer, for one replica."""
    gpu, draft = assembly.deployment.gpu, assembly.draft
    cost: Any = assembly.cost
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


def patience_of(simulation: Simulation, arrivals: list[Arrival]) -> dict[str, int]:
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
