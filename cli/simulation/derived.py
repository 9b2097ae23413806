"""Every number that a run derives from its scenario, with its unit and source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...core.acceptance.process import GaussianAcceptance
from ...core.adaptive.slot import graph_plan
from ...core.contract.future_map import LENGTH_FIELD
from ...sim.cost.memory import GRAPH_BYTES

if TYPE_CHECKING:
    from ...sim.assembly import Assembly

DerivedRow = tuple[str, float | str, str, str]  # name, value, unit, source


def derived_rows(assembly: Assembly) -> Iterator[DerivedRow]:
    """Yield the numbers of the assembly (hardware, model, host, memory), then acceptance, steps, relay and reservations."""
    yield from assembly.explain()
    yield from _acceptance(assembly)
    yield from _steps(assembly)
    yield from _relay(assembly)
    yield from _reservations(assembly)


def _acceptance(assembly: Assembly) -> Iterator[DerivedRow]:
    process = assembly.acceptance
    if not isinstance(process, GaussianAcceptance):
        return
    table = assembly.scenario.acceptance
    preset = next(source for name, _, _, source in assembly.explain() if name == "acceptance")
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
