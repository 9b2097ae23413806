"""Rewrites the parts of the documents that are made from the source: `python docs/refresh.py`. A test finds them stale.

Such a part stands between the comments `<!-- from NAME -->` and `<!-- end -->`; `BLOCKS` has a function for every NAME.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import typer
from foredraft.cli.app import app
from foredraft.core.acceptance.fit import simulate_rounds
from foredraft.core.acceptance.presets import PRESETS
from foredraft.core.adaptive.config import SlotConfig
from foredraft.core.adaptive.controller import CONTROLLER_TRANSITIONS, ControllerState
from foredraft.core.adaptive.parking import PARKING_TRANSITIONS, ParkingState
from foredraft.core.adaptive.policy import GATE_TRANSITIONS, GateState
from foredraft.core.adaptive.slot import SLOT_TRANSITIONS, SlotState
from foredraft.core.contract.account import TRANSITIONS as ACCOUNT_TRANSITIONS
from foredraft.core.contract.account import LifeState
from foredraft.core.contract.future_map import CELL_TRANSITIONS, LENGTH_TRANSITIONS, CellState
from foredraft.core.handoff.life import DECODE_TRANSITIONS, PREFILL_TRANSITIONS, TransferState
from foredraft.core.kv.allocator import PAGE_TRANSITIONS, PageState
from foredraft.core.model_shape import known_models
from foredraft.core.scheduler.life import JOINT_RULES, TRANSITIONS, RequestState
from foredraft.gpu.executor.running import STEP_TRANSITIONS, StepState
from foredraft.planning.servers.declared import flags_of
from foredraft.serve.bodies.real import RealBody
from foredraft.serve.bodies.simulated import SimulatedBody
from foredraft.serve.metrics.series import ABSENT, OWN, SGLANG, VLLM, Series
from foredraft.serve.requests.schema import ChatRequest, CompletionRequest, Only
from foredraft.sim.calibration.points import COLUMNS
from foredraft.sim.cost import efficiency
from foredraft.sim.faults.plan import KINDS, FaultPlan
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario.table import declared_keys
from pydantic import BaseModel

FOLDER = Path(__file__).resolve().parent
ERROR_CELLS = 8
"""The cells of a row of the table of errors in docs/evidence/accuracy.md."""
UNSEEN_ALWAYS = ("user", "parallel_tool_calls")
UNSEEN = ("temperature", "top_p", "top_k", *UNSEEN_ALWAYS)  # no time of a simulation depends on them
BLOCK = re.compile(r"(<!-- from ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def diagram(transitions: Mapping[Any, Mapping[Any, Any]], *first: Any) -> list[str]:
    """Return a table of states and events as the lines of a Mermaid diagram that begins in the states `first`."""
    lines = ["```mermaid", "stateDiagram-v2", *(f"    [*] --> {_word(state)}" for state in first)]
    for state, events in transitions.items():
        by_target: dict[str, list[str]] = {}
        for event, following in events.items():
            by_target.setdefault(_word(following), []).append(_word(event))
        lines += [f"    {_word(state)} --> {following}: {', '.join(names)}" for following, names in by_target.items()]
        if not events:
            lines.append(f"    {_word(state)} --> [*]")
    return [*lines, "```"]


def _word(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()


def life_of_a_request() -> str:
    """Return the states and events of `core/scheduler/life.py` as a Mermaid diagram."""
    return "\n".join(diagram(TRANSITIONS, RequestState.NEW))


def life_in_events() -> str:
    """Return the states and steps of `core/contract/account.py` as a Mermaid diagram."""
    return "\n".join(diagram(ACCOUNT_TRANSITIONS, LifeState.NEW))


def life_of_a_slot() -> str:
    """Return the states and events of `core/adaptive/slot.py` as a Mermaid diagram."""
    return "\n".join(diagram(SLOT_TRANSITIONS, SlotState.SETTLED, SlotState.RESTING))


def life_of_a_cell() -> str:
    """Return the states and events of a cell of `core/contract/future_map.py` as a Mermaid diagram."""
    return "\n".join(diagram(CELL_TRANSITIONS, CellState.EMPTY))


def life_of_a_length() -> str:
    """Return the states and events of a cell without fields, of the same file, as a Mermaid diagram."""
    return "\n".join(diagram(LENGTH_TRANSITIONS, CellState.EMPTY))


def errors_of_simulations() -> str:
    """Return four rows of docs/evidence/accuracy.md: points that were left out, mean error and bias with measured
    kernels, in percent."""
    page = (FOLDER / "evidence" / "accuracy.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    of = {(name, left_out): cells for name, left_out, *cells in (row for row in rows if len(row) == ERROR_CELLS)}
    lines = [
        "| published runs of models that were left out | points | mean error | bias |",
        "| --- | --- | --- | --- |",
    ]
    for name, left_out, words in (
        ("per output token", "the model and its GPU", "time per output token"),
        ("to the first token", "the model and its GPU", "time to the first token"),
        ("of a whole request", "the model and its GPU", "time of a whole request"),
        ("with drafts", "the model or draft shape", "time per output token with drafts"),
    ):
        points, mean, bias, *_ = of[name, left_out]
        lines.append(f"| {words} | {points} | {mean} % | {bias} % |")
    return "\n".join(lines)


def life_of_a_controller() -> str:
    """Return the states and events of `core/adaptive/controller.py` as a Mermaid diagram."""
    return "\n".join(diagram(CONTROLLER_TRANSITIONS, ControllerState.NEW))


def life_of_a_gate() -> str:
    """Return the states and events of the gate of `core/adaptive/policy.py` as a Mermaid diagram."""
    return "\n".join(diagram(GATE_TRANSITIONS, GateState.OPEN))


def life_of_a_parked_draft() -> str:
    """Return the states and events of `core/adaptive/parking.py` as a Mermaid diagram."""
    return "\n".join(diagram(PARKING_TRANSITIONS, ParkingState.DRAFTING))


def life_of_a_page() -> str:
    """Return the states and events of `core/kv/allocator.py` as a Mermaid diagram."""
    return "\n".join(diagram(PAGE_TRANSITIONS, PageState.FREE))


def life_of_a_step() -> str:
    """Return the states and moves of a launched step in `gpu/executor/running.py` as a Mermaid diagram."""
    return "\n".join(diagram(STEP_TRANSITIONS, StepState.LAUNCHED))


def server_metrics() -> str:
    """Return the series of `serve/metrics/series.py`: what is measured, and its names with each style."""
    rows = ["| what | `foredraft:`, `vllm:` | `sglang:` |", "| --- | --- | --- |"]
    keys = dict.fromkeys((one.key, one.text) for one in (*VLLM, *SGLANG))
    for key in dict.fromkeys(key for key, _ in keys):
        ours, theirs = ([one for one in style if one.key == key] for style in (VLLM, SGLANG))
        rows.append(f"| {(ours or theirs)[0].text.removesuffix('.')} | {_names(ours)} | {_names(theirs)} |")
    rows += [
        "",
        "With each style there are also, with the prefix `foredraft:`:",
        "",
        "| what | name |",
        "| --- | --- |",
    ]
    return "\n".join([*rows, *(f"| {one.text.removesuffix('.')} | {_names([one])} |" for one in OWN)])


def _names(series: list[Series]) -> str:
    labels = [f" by `{one.label}`" if one.label else "" for one in series]
    return ", ".join(f"`{one.name}`{label}" for one, label in zip(series, labels, strict=True)) or "–"


def absent_metrics() -> str:
    """Return which series of other servers are absent, and why."""
    rows = ["| server | series | why it is absent |", "| --- | --- | --- |"]
    for style, absent in ABSENT.items():
        for why in dict.fromkeys(absent.values()):
            names = ", ".join(f"`{name}`" for name, reason in absent.items() if reason == why)
            rows.append(f"| {style} | {names} | {why} |")
    return "\n".join(rows)


def request_parameters() -> str:
    """Return what each parameter of completions and chats does, by body."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    known = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
    for name, field in known.items():
        accepted = next((one.values for one in field.metadata if isinstance(one, Only)), None)
        if accepted is not None:
            values = " or ".join(f"`{json.dumps(value)}`" for value in accepted)
            cells = (f"{values}; else left out", f"{values}; else error", f"{values}; else error")
        else:
            plain = "accepted" if name in UNSEEN else "effect"
            usual, strict = ("left out", "error") if name in SimulatedBody.without_effect else (plain, plain)
            model = "error" if name in RealBody.unsupported else "accepted" if name in UNSEEN_ALWAYS else "effect"
            cells = (usual, strict, model)
        rows.setdefault(cells, []).append(f"`{name}`")
    rows["left out", "error", "error"] = ["all others"]
    head = "| parameter | `--simulate` | `--simulate --strict` | `--model` |"
    return "\n".join(
        [
            head,
            "| --- | --- | --- | --- |",
            *(f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()),
        ]
    )


def joint_rules() -> str:
    """Return the joint rules of `core/scheduler/life.py` as a table: response outside and inside a running
    multi-step."""
    states = list(next(iter(JOINT_RULES.values())))
    rows = ["| state | " + " | ".join(demand.value.replace("_", " ") for demand in JOINT_RULES) + " |"]
    rows.append("| --- " * (len(JOINT_RULES) + 1) + "|")
    for state in states:
        cells = []
        for rules in JOINT_RULES.values():
            outside, inside = (None if response is None else response.value for response in rules[state])
            cells.append(
                (outside or "–") if inside in (None, outside) else f"{outside}; in a running multi-step {inside}"
            )
        rows.append(f"| {state.value} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def life_of_a_transfer() -> str:
    """Return the tables of `core/handoff/life.py` as two Mermaid diagrams."""
    prefill = diagram(PREFILL_TRANSITIONS, TransferState.OFFERED)
    decode = diagram(DECODE_TRANSITIONS, TransferState.QUEUED)
    return "\n".join(["Prefill side:", "", *prefill, "", "Decode side:", "", *decode])


def adaptive_keys() -> str:
    """Return the keys of a range in a table of steps."""
    rows = []
    for key in fields(SlotConfig):
        default = f"`{key.default}`" if isinstance(key.default, int | float) else ""
        rows.append(f"| `{key.name}` | {default} | {key.metadata['meaning']} |")
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def scenario_keys() -> str:
    """Return every key of a scenario with its default and meaning, a table each."""
    return "\n\n".join(_tables(Scenario(), ""))


def launch_arguments() -> str:
    """Return the arguments of each server that a key of a scenario is read from."""
    servers = {"SGLang": "sglang", "vLLM": "vllm", "TensorRT-LLM": "trtllm"}
    by_key: dict[str, dict[str, list[str]]] = {}
    for server in servers.values():
        for key, flags in flags_of(server):
            names = by_key.setdefault(key, {}).setdefault(server, [])
            names += [f"`{usage}`" for usage in flags.usages]
    keys = [key for key, _ in declared_keys(Scenario) if key in by_key]
    rows = (
        f"| `{key}` | {' | '.join(', '.join(by_key[key].get(server, ())) for server in servers.values())} |"
        for key in keys
    )
    return "\n".join([f"| key | {' | '.join(servers)} |", f"| --- |{' --- |' * len(servers)}", *rows])


def _tables(table: BaseModel, prefix: str) -> Iterator[str]:
    """Yield the keys of `table`, whose values are the defaults, then those of the tables below it."""
    rows, below = [], []
    for name, field in type(table).model_fields.items():
        value = getattr(table, name, None)  # None: without a default
        kinds = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if _is_table(kind)]
        if kinds:
            below.append((f"{prefix}{name}.", kinds[0].model_construct() if value is None else value))
        if not kinds or value is None:
            default = "required" if field.is_required() else "" if value is None else f"`{_shown(value)}`"
            rows.append(f"| `{prefix}{name}` | {default} | {field.description} |")
    yield "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
    for deeper, instance in below:
        yield from _tables(instance, deeper)


def _is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value < 1e6 else str(value)


def cost_accuracy() -> str:
    """Return the errors that `sim/cost/efficiency.py` states for its defaults."""
    lines = efficiency.__doc__.splitlines()
    first = next(i for i, line in enumerate(lines) if line.rstrip().endswith("error"))
    last = max(i for i, line in enumerate(lines) if "%" in line and line.startswith("    "))
    return "\n".join(["```text", *(line.removeprefix("    ") for line in lines[first : last + 1]), "```"])


def acceptance_presets() -> str:
    """Return every acceptance preset, its measurement, and the mean accept lengths of its rounds in chains of
    1, 3 and 7 steps."""
    rows = ["| preset | fitted to | 1 step | 3 steps | 7 steps |", "| --- | --- | --- | --- | --- |"]
    for preset in PRESETS.values():
        lens = (simulate_rounds(preset.process(), steps, 512, 300) for steps in (1, 3, 7))
        cells = " | ".join(f"{rounds.sum() / np.count_nonzero(rounds):.2f}" for rounds in lens)
        rows.append(f"| `{preset.name}` | {preset.source} | {cells} |")
    return "\n".join(rows)


def models() -> str:
    return ", ".join(known_models())


def fault_kinds() -> str:
    """Return every kind of fault: what it is counted by, its own keys with their defaults, and what is promised."""
    plan = FaultPlan()
    rows = ["| kind | per | what happens | its own keys | promised |", "| --- | --- | --- | --- | --- |"]
    for name, kind in KINDS.items():
        values = plan.of(name).model_dump(exclude={"probability"})
        keys = ", ".join(f"`{key}`" if value is None else f"`{key}` {value:g}" for key, value in values.items())
        rows.append(f"| `{name}` | {kind.occasion} | {kind.fault} | {keys} | {kind.promise} |")
    return "\n".join(rows)


def calibration_columns() -> str:
    """Return the columns of a CSV file of measured runs."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items()]
    return "\n".join(["| column | meaning |", "| --- | --- |", *rows])


def command_options(*commands: str) -> str:
    """Return the arguments and options of commands, an option that several share in one row."""
    used_by: dict[tuple[str, str], list[str]] = {}
    for command in commands:
        for parameter in typer.main.get_command(app).commands[command].params:
            value = "" if getattr(parameter, "is_flag", False) else parameter.metavar or "N"
            names = parameter.opts if parameter.param_type_name == "option" else []
            cell = f"`{' '.join(filter(None, [', '.join(names), value]))}`".replace("|", "\\|")
            default = parameter.default
            text = parameter.help.removesuffix(".").replace("\\[", "[")
            if default not in (None, False) and default != [] and "default" not in text:
                text += f"; default: `{default}`"
            used_by.setdefault((cell, text), []).append(command)
    if len(commands) == 1:
        rows = [f"| {cell} | {text} |" for cell, text in used_by]
        return "\n".join(["| option | meaning |", "| --- | --- |", *rows])
    rows = [
        f"| {cell} | {'all' if len(users) == len(commands) else ', '.join(users)} | {text} |"
        for (cell, text), users in used_by.items()
    ]
    return "\n".join(["| option | of | meaning |", "| --- | --- | --- |", *rows])


BLOCKS = {
    "life-of-a-request": life_of_a_request,
    "life-in-events": life_in_events,
    "life-of-a-slot": life_of_a_slot,
    "life-of-a-cell": life_of_a_cell,
    "life-of-a-length": life_of_a_length,
    "life-of-a-controller": life_of_a_controller,
    "life-of-a-gate": life_of_a_gate,
    "life-of-a-parked-draft": life_of_a_parked_draft,
    "life-of-a-page": life_of_a_page,
    "life-of-a-step": life_of_a_step,
    "joint-rules": joint_rules,
    "server-metrics": server_metrics,
    "absent-metrics": absent_metrics,
    "request-parameters": request_parameters,
    "life-of-a-transfer": life_of_a_transfer,
    "scenario-keys": scenario_keys,
    "launch-arguments": launch_arguments,
    "cost-accuracy": cost_accuracy,
    "fault-kinds": fault_kinds,
    "errors-of-simulations": errors_of_simulations,
    "acceptance-presets": acceptance_presets,
    "models": models,
    "adaptive-keys": adaptive_keys,
    "calibration-columns": calibration_columns,
    "options-simulate": lambda: command_options("simulate"),
    "options-planning": lambda: command_options("doctor", "plan", "tune", "sweep"),
}


def refreshed(text: str) -> str:
    """Return `text` with every block made anew. Raises KeyError for an unknown name."""
    return BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]]()}\n{block[3]}", text)


def main() -> None:
    for path in (FOLDER.parent / "README.md", *sorted(FOLDER.rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if refreshed(text) != text:
            path.write_text(refreshed(text), encoding="utf-8")
            print(f"refreshed {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
