"""A resolved scenario as TOML, with the source of each value as a comment; `load_scenario` reads it back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ...core.acceptance.process import GaussianAcceptance
from ...core.adaptive.graphs import graph_plan
from ...core.contract.future_map import LENGTH_FIELD
from ..cost.executor_steps import StepCost
from ..cost.memory import GRAPH_BYTES
from .scenario import Scenario

if TYPE_CHECKING:
    from ..assembly import Assembly


DerivedRow = tuple[str, float | str, str, str]  # name, value, unit, source


def derived_rows(assembly: Assembly) -> Iterator[DerivedRow]:
    """Yield the numbers of the assembly (hardware, model, host, memory), then acceptance, steps, relay
    and reservations."""
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


DEFAULT = "default"
_COMMENT_COLUMN = 44


def scenario_text(
    scenario: Scenario,
    origins: Mapping[str, str],
    derived: Iterable[DerivedRow] = (),
    notices: Sequence[str] = (),
) -> str:
    """Return the whole text, with a newline at its end.

    origins: dotted key -> source, as `load_scenario` returns them; other keys are defaults. derived: numbers to add as
    comments.
    notices: sentences to add as comments.
    """
    lines = [*_table_lines(scenario, "", origins)]
    rows = list(derived)
    if rows:
        lines += ["", "# What follows from it: value, unit, and the source of each."]
        above = ["", *(source for *_, source in rows)]
        lines += [
            _derived_line(*row[:3], "as above" if row[3] == last else row[3])
            for row, last in zip(rows, above, strict=False)
        ]
    if notices:
        lines += ["", *(f"# Note: {notice}." for notice in notices)]
    return "\n".join(lines) + "\n"


def _table_lines(table: BaseModel, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of a table, then the tables below it, as TOML demands."""
    below: list[tuple[str, BaseModel]] = []
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            below.append((name, value))
            continue
        source = _source(f"{prefix}{name}", origins)
        text = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
        # The field's description says what a run does without the value.
        meaning = f" ({field.description})" if value is None and field.description else ""
        yield f"{text:<{_COMMENT_COLUMN}} # {source}{meaning}"
    for name, value in below:
        yield ""
        yield f"[{prefix}{name}]"
        yield from _table_lines(value, f"{prefix}{name}.", origins)


def _source(key: str, origins: Mapping[str, str]) -> str:
    """Return the source of `key`, or of the table around it."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return DEFAULT


def _derived_line(name: str, value: float | str, unit: str, source: str) -> str:
    shown = f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    text = f"# {name} = {shown} {unit}".rstrip()
    return f"{text:<{_COMMENT_COLUMN}} # {source}"


def workload_text(workload: Mapping[str, Any], source: str, without: Sequence[str]) -> str:
    """Return the table `workload` as TOML, for `foredraft simulate`. without: what it leaves out of its source."""
    lines = [f"# A workload that `foredraft trace` made from {source}.", *(f"# Without {what}." for what in without)]
    below = {name: value for name, value in workload.items() if isinstance(value, Mapping)}
    tables = [("workload", {name: value for name, value in workload.items() if name not in below})]
    for name, table in [*tables, *((f"workload.{name}", table) for name, table in below.items())]:
        lines += ["", f"[{name}]"]
        for key, value in table.items():
            lines += textwrap.wrap(f"{key} = {toml_value(value)}", 100, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return plain data as a TOML value; mappings become inline tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no TOML form")
