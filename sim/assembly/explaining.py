"""What `--explain` and reports say of an assembly: whose timing is simulated, and every number behind a run."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.acceptance.process import GaussianAcceptance
from ...core.adaptive.graphs import graph_plan
from ...core.contract.future_map import LENGTH_FIELD
from ...core.errors import count_of
from ...core.scheduler.config import EngineRole
from ...core.scheduler.rules import settings_of
from ..cost.executor_steps import StepCost
from ..cost.hardware import GIB
from ..cost.memory import GRAPH_BYTES
from ..scenario.scenario_text import DerivedRow
from .acceptance import acceptance_source
from .assembly import Assembly


def timing_line(assembly: Assembly) -> str:
    """A line for the report: whose timing is simulated, and where the times of passes come from."""
    if assembly.prefill is None:
        pools = f", {_pricing(assembly)}"
    else:
        pools = "".join(
            f"; {role} on {part.deployment.devices}: {_pricing(part)}" for role, part in assembly.by_role.items()
        )
    server = assembly.deployment.server
    releases = (
        ""
        if server.rules_release == server.times_release
        else f"; rules of {server.rules_release}, times of {server.times_release}"
    )
    timing = f"Timing of {server.name} (hardware.server{releases}){pools}"
    calibration = assembly.deployment.calibration
    return f"{timing}." if calibration is None else f"{timing}; {calibration.origin}."


def _pricing(assembly: Assembly) -> str:
    pricing = f"batches of up to {assembly.spec.config.max_running:,}; passes priced by {assembly.cost.priced_by}"
    if assembly.not_measured is not None and "roofline" in assembly.cost.priced_by:
        pricing += f" ({assembly.not_measured})"
    if assembly.is_corrected and assembly.evidence is not None:
        pricing += f", times {assembly.evidence.factor:.2f} ({assembly.evidence.about})"
    return pricing


def derived_rows(assembly: Assembly) -> Iterator[DerivedRow]:
    """Yield every number behind a run: those of hardware, model, host, memory and scheduler, then acceptance, steps,
    relay and reservations."""
    yield from _explain(assembly)
    yield from _acceptance(assembly)
    yield from _steps(assembly)
    yield from _relay(assembly)
    yield from _reservations(assembly)


def capacity_lines(assembly: Assembly) -> list[str]:
    """Return what the servers print of their KV pools when they start."""
    lines = []
    for role, part in assembly.by_role.items():
        memory, config, server = part.memory, part.spec.config, part.deployment.server.name
        if memory is None:
            slots = config.num_pages * config.page_size
            about = (
                f"{slots:,} tokens (engine.kv_slots), {slots / config.context_len:.2f} requests of the whole context"
            )
            lines += [f"KV pool of {server}: {about}"]
            continue
        tokens, requests = memory.capacity(config)
        pool = f"{memory.kv_pool_bytes / GIB:.2f} GiB (give or take {memory.margin_bytes / GIB:.2f})"
        if server.startswith("sglang"):
            printed = [
                f"KV Cache is allocated. #tokens: {tokens}, {pool}",
                f"max_total_num_tokens={tokens}, chunked_prefill_size={config.chunk_size}, "
                f"max_running_requests={config.max_running}, context_len={config.context_len}",
            ]
        else:
            printed = [
                f"Available KV cache memory: {pool}",
                f"GPU KV cache size: {tokens:,} tokens",
                f"Maximum concurrency for {config.context_len:,} tokens per request: {requests:.2f}x",
            ]
        of_role = f"{role}, " if len(assembly.by_role) > 1 else ""
        lines += [f"{server} ({of_role}{part.deployment.devices}) would print:", *(f"  {line}" for line in printed)]
    return lines


def _explain(assembly: Assembly) -> list[DerivedRow]:
    """Return the numbers of hardware, model, host, memory and scheduler."""
    server = assembly.deployment.server
    rows: list[DerivedRow] = [("timing of the server", server.name, "", server.about)]
    mine = _explain_engines(assembly)
    common = mine if assembly.prefill is None else [row for row in _explain_engines(assembly.prefill) if row in mine]
    rows += common
    for role, part in assembly.by_role.items():
        rows += [(f"{role}: {row[0]}", *row[1:]) for row in _explain_engines(part) if row not in common]
    rows += _explain_transfers(assembly)
    config = assembly.spec.config
    rows.append(("scheduling mode", config.mode, "", config.mode_reason))
    source = acceptance_source(assembly.scenario, assembly.algorithm, assembly.preset)
    rows.append(("acceptance", type(assembly.acceptance).__name__, "", source))
    return rows


def _explain_engines(assembly: Assembly) -> list[DerivedRow]:
    rows = [*assembly.cost.explain(), *assembly.host.explain(), *assembly.deployment.front_end.explain()]
    if assembly.memory is not None:
        rows += assembly.memory.explain(assembly.spec.config)
    if assembly.host_link is not None:
        rows += assembly.host_link.explain(assembly.spec.config.host_pages * assembly.spec.config.page_size)
    return [*rows, *_explain_scheduling(assembly)]


def _explain_transfers(assembly: Assembly) -> Iterator[DerivedRow]:
    if not assembly.pools.is_disaggregated:
        return
    ports = [assembly.of_role(role).deployment.port_bytes_per_s for role in (EngineRole.PREFILL, EngineRole.DECODE)]
    source = (
        f"the slower port, of a prefill engine ({ports[0] / 1e9:g} GB/s) or a decode engine ({ports[1] / 1e9:g} GB/s)"
    )
    yield "KV transfer", min(ports) / 1e9, "GB/s", source
    source = "KV of target and draft, all layers"
    if assembly.prefill is not None:
        source += f", for each of {count_of(assembly.deployment.parallel.tensor, 'device')} what it holds"
    yield "KV transfer per token", assembly.sent_kv_bytes, "B", source


def _explain_scheduling(assembly: Assembly) -> Iterator[DerivedRow]:
    """Yield the limits and rules of the scheduler, those of the server where the scenario gives none."""
    gpu, server = assembly.deployment.gpu, assembly.deployment.server
    units = {"max_running": "requests in a batch", "chunk_size": "prompt tokens of a step"}
    usual = server.scheduling(gpu, assembly.deployment.parallel.data, assembly.algorithm.is_speculative)
    yield "engine: rules", usual.pop("rules").name, "", f"those of {server.name}"
    values = settings_of(assembly.spec.config.rules)
    for name, default in (usual | values).items():
        value = values[name] if name in values else getattr(assembly.spec.config, name)
        source = f"default of {server.name}" if getattr(assembly.scenario.engine, name) is None else "scenario"
        if name == "max_running" and assembly.states_cap is not None:
            source += f" ({assembly.states_cap:,}), capped: there are recurrent states for no more"
        elif source != "scenario" and name in units:
            source += f" on {gpu.name}"
            source += f" ({default:,}), within engine.max_step_tokens" if value < default else ""
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield f"engine: {name}", shown, units.get(name, ""), source


def _acceptance(assembly: Assembly) -> Iterator[DerivedRow]:
    process = assembly.acceptance
    if not isinstance(process, GaussianAcceptance):
        return
    table = assembly.scenario.acceptance
    preset = next(source for name, _, _, source in _explain(assembly) if name == "acceptance")
    shared = preset if table.conditional is None else "those of the default preset"
    conditional = ", ".join(f"{p:.4g}" for p in process.conditional)
    yield "acceptance: conditional by position", conditional, "", preset
    for key in ("request_share", "field_share", "correlation_len"):
        source = shared if getattr(table, key) is None else f"acceptance.{key}"
        yield f"acceptance: {key.replace('_', ' ')}", getattr(process, key), "", source


def _steps(assembly: Assembly) -> Iterator[DerivedRow]:
    adaptive, policy = assembly.spec.adaptive, assembly.scenario.speculation.policy
    source = "policy fixed" if policy == "fixed" else f"policy {policy}, {adaptive.source}"
    for bound, slot in zip(adaptive.bounds, adaptive.slots, strict=True):
        steps = ", ".join(map(str, slot.candidate_steps))
        yield f"draft steps from batch size {bound}", steps, "", source
    if isinstance(assembly.cost, StepCost):
        return  # the profile says which rounds were captured
    sizes, unit = assembly.cost.graph_sizes, assembly.cost.graph_unit
    graphs = ", ".join(map(str, sizes)) if sizes else "none"
    given = assembly.scenario.hardware.graph_sizes is not None
    source = "hardware.graph_sizes" if given else "hardware.cuda_graphs, graph_unit and engine.max_running"
    yield "captured sizes", graphs, unit, source
    if sizes and unit == "rows":
        plan = graph_plan(adaptive, sizes, GRAPH_BYTES)
        source = f"(steps, batch size) pairs that routing can reach; without pruning {plan.num_graphs_unpruned} graphs"
        yield "captured graphs", plan.num_graphs, "", source
        saved = (plan.num_bytes_unpruned - plan.num_bytes) / (1 << 20)
        yield "memory that pruning graphs saves", saved, "MiB", "assumption: 25 MiB per graph"


def _relay(assembly: Assembly) -> Iterator[DerivedRow]:
    """Yield the bytes that each row relays per round."""
    for field in (LENGTH_FIELD, *assembly.algorithm.relay_fields(assembly.relay_shape)):
        source = f"computed: {field.dtype}, fields that {assembly.algorithm.name} relays"
        yield f"relay per request and round: {field.name}", field.bytes_per_row, "B", source


def _reservations(assembly: Assembly) -> Iterator[DerivedRow]:
    sizes = assembly.spec.resolve_sizes()
    yield (
        "greatest verify tree",
        sizes.max_draft_tokens,
        "nodes",
        "computed: the largest of all candidates, the root included",
    )
    yield "slots that a round may write", sizes.alloc_len, "tokens", "computed from the greatest steps, top-k and tree"
    rounds = "two rounds, one of them unseen" if assembly.spec.config.overlap else "one round"
    yield "reserve of a request", sizes.reserve, "tokens", f"computed: {rounds}"
    yield "width of a request-table row", sizes.row_width, "tokens", "computed: context and reserve, page aligned"
    yield "prompt and output of a request", assembly.spec.config.context_len, "tokens", "computed: the context"
