"""`foredraft doctor`: does speculation pay in this deployment, how far, and what it does to the tail."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import ScenarioFile, Settings, TraceFile, option
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options

if TYPE_CHECKING:
    from ...planning.rounds import RoundModel
    from ...sim.assembly import Assembly

CONTEXTS = (256, 1024, 4096, 16_384)
MOST_STEPS = 7
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


Requests = Annotated[int, option("--requests", "Requests to simulate, with and without speculation.", min=20)]


def doctor(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    settings: Settings = None, trace: TraceFile = None, requests: Requests = 200,
) -> None:  # fmt: skip
    """Print whether speculation pays in a deployment: up to which batch and load, and how it changes latencies.

    The command prints the answer and three tables. The first has the best number
    of draft steps and its gain over plain decoding, by batch and context. The
    second compares the accept length at which speculation breaks even with the
    expected one. The third has latencies from a short simulation of the
    scenario's own load, with and without speculation, and 80 % intervals of
    means. `foredraft cost` shows the parts of a round.

        foredraft doctor
        foredraft doctor chat.toml --set hardware.gpu=L40S
        foredraft doctor --trace requests.csv --set hardware.gpu=H200
    """
    from ...core.errors import ForedraftError
    from ...planning.rounds import RoundModel, without_speculation
    from ...planning.trial import run_trial
    from ...sim.assembly import assemble
    from ...sim.scenario_file import load_scenario

    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, None)], launch)
    if resolved.speculation.algorithm == "NONE":
        message = (
            "the scenario does not speculate: name the algorithm to judge, such as --set speculation.algorithm=EAGLE3"
        )
        raise ForedraftError(message)
    tables = resolved.model_dump(mode="json")
    changes = {"workload.num_requests": min(requests, resolved.workload.num_requests or requests)}
    with_it, without = (run_trial(one, changes) for one in (tables, without_speculation(tables)))
    for trial in (with_it, without):
        if trial.status != "done":
            raise ForedraftError(trial.message)
    model = RoundModel(resolved, with_it.summary["mean_output_tokens"])
    context = round(with_it.summary["mean_input_tokens"] + with_it.summary["mean_output_tokens"] / 2)
    lines = [*_verdict(model, context, with_it.summary["mean_output_tokens"]), "", *_gains(model), ""]
    own = assemble(resolved)
    rows = max(1, round(with_it.summary["mean_running"] / with_it.summary["replicas"]))
    lines += [*_unknowns(model, min(rows, model.most_drafted_rows(context) or 1), context), ""]
    lines += [*_break_even(model, context), "", *_latencies(own, with_it.summary, model.plain, without.summary)]
    typer.echo("\n".join([*_wrapped(model.with_steps(1).timing), "", *lines]))


def _verdict(model: RoundModel, context: int, output: float) -> list[str]:
    """Return sentences: whether it pays, up to which batch, and the load that keeps such a batch busy."""
    from ...planning.confidence.comparison import speed_up_error

    scenario, error = model.scenario, math.exp(speed_up_error(model.with_steps(1)))
    name = f"{scenario.speculation.algorithm} on {scenario.model.target}, {scenario.hardware.gpu}"
    at = f"with {context:,} tokens of context"
    most, plain = model.most_drafted_rows(context), model.most_rows(context, 0)
    surely, perhaps = (model.largest_that_pays(context, MOST_STEPS, least) for least in (error, 1 / error))
    if not perhaps:
        return _wrapped(
            f"Speculation does not pay: {at}, {name} is slower than plain decoding at every batch up to {most}."
        )
    last_shown = surely or perhaps
    sizes = sorted({1, min(8, last_shown), min(64, last_shown), last_shown})
    gains = (f"{model.gain(model.best_drafted(size, context, MOST_STEPS)):.2f} × at batch {size}" for size in sizes)
    gives = f"{at}, {name} gives this many times the tokens of plain decoding: {', '.join(gains)}."
    last = "" if perhaps == most else f" Beyond batch {perhaps} it does not pay."
    if perhaps == most < plain:
        last = f" Without drafts up to {count_of(plain, 'request')} decode together (engine.max_running, KV slots)."
    if not surely:
        return _wrapped(
            f"Whether speculation pays cannot be told: {gives} These are within the error of speed-ups.{last}"
        )
    if surely == most:
        return _wrapped(
            f"Speculation pays: {gives} It pays at every batch that fits, up to {count_of(most, 'request')}.{last}"
        )
    rate = model.round(surely, context, 0).tokens_per_s / output
    busy = f"which about {rate:.1f} requests/s keep busy ({output:.0f} output tokens each)"
    between = f" From there to batch {perhaps} it cannot be told." if perhaps > surely else ""
    return _wrapped(f"Speculation pays: {gives} It surely pays up to batch {surely}, {busy}.{between}{last}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80)


def _batches(model: RoundModel) -> list[int]:
    most = min(model.with_steps(steps).spec.config.max_running for steps in (0, 1))
    usual = (1, 4, 16, 64, 256, 1024)
    return sorted({*(size for size in usual if size <= most), min(most, usual[-1])})


def _gains(model: RoundModel) -> list[str]:
    from ...planning.confidence.comparison import about_speed_ups, speed_up_error

    error, longest = speed_up_error(model.with_steps(1)), model.plain.spec.config.context_len
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    lines = ["Best draft steps and gain over plain decoding, by batch and context"]
    lines.append(f"{'batch':>8}" + "".join(f"{f'{context:,} tokens':>16}" for context in contexts))
    for size in _batches(model):
        cells = []
        for context in contexts:
            if size > model.most_drafted_rows(context):
                cells.append("no room")
                continue
            found = model.best_drafted(size, context, MOST_STEPS)
            gain = model.gain(found)
            mark = "=" if abs(math.log(gain)) <= error else ""
            is_slower = gain < 1 and not mark
            cells.append("plain" if is_slower else f"{count_of(found.steps, 'step')} {mark}{gain:.2f} ×")
        lines.append(f"{size:>8}" + "".join(f"{cell:>16}" for cell in cells))
    marked = " = cannot be told from plain decoding." if any("=" in line for line in lines) else ""
    prompts = f"The gains include the time of prompts, for outputs of {model.output_len:,.0f} tokens. "
    return [*lines, *_wrapped(f"{prompts}{about_speed_ups(model.with_steps(1))}{marked}")]


def _break_even(model: RoundModel, context: int) -> list[str]:
    counts = range(1, MOST_STEPS + 1)
    lines = [f"Accept length at which speculation breaks even, with {context:,} tokens of context"]
    lines.append(f"{'draft steps':>12}" + "".join(f"{steps:>8}" for steps in counts))
    for size in _batches(model):
        if size > model.most_drafted_rows(context):
            continue
        plain = model.round(size, context, 0)
        cells = (model.round(size, context, steps).break_even(plain) for steps in counts)
        lines.append(
            f"{f'batch {size}':>12}" + "".join(f"{'–' if cell == math.inf else f'{cell:.2f}':>8}" for cell in cells)
        )
    expected = (model.round(1, context, steps).accept_length for steps in counts)
    lines.append(f"{'expected':>12}" + "".join(f"{length:>8.2f}" for length in expected))
    return [*lines, *_expectation(model)]


def _expectation(model: RoundModel) -> list[str]:
    """Return a sentence that says where the expected accept lengths come from, and how to give others."""
    table = model.scenario.acceptance
    own = [key for key in ("conditional", "mean_length", "recorded") if getattr(table, key) is not None]
    if own:
        return _wrapped(f"Expected by acceptance.{own[0]} of the scenario.")
    preset = model.with_steps(1).preset.preset
    return _wrapped(
        f"Expected by the preset {preset.name} ({preset.source}). acceptance.preset takes another kind of text (chat, "
        "code, math, edit), acceptance.mean_length or acceptance.recorded your own numbers."
    )


def _unknowns(model: RoundModel, rows: int, context: int) -> list[str]:
    """Return a sentence that says which input that is not known moves the gain most."""
    from ...planning.confidence.unknowns import gains_by_unknown

    moved = gains_by_unknown(model, rows, context, MOST_STEPS)
    told = ", ".join(f"{one.what} {one.low:.2f} to {one.high:.2f} ×" for one in moved)
    own = model.gain(model.best_drafted(rows, context, MOST_STEPS))
    return _wrapped(
        f"What moves the gain most is {moved[0].name}. At the load's own batch of {rows} it is {own:.2f} ×; {told}."
    )


def _latencies(run: Assembly, with_it: Mapping[str, Any], plain: Assembly, without: Mapping[str, Any]) -> list[str]:
    """Return the table of the simulated load, with the 80 % intervals of the means that have one."""
    from ...observe.tables import format_number, intervals_rest_on, outside_of_intervals
    from ...sim.confidence import intervals, rests_on

    mine_in, other_in = intervals(run, with_it), intervals(plain, without)
    is_known = bool(mine_in or other_in)

    def cells(value: str, found: Mapping[str, Sequence[float]], key: str) -> str:
        ends = " to ".join(map(format_number, found.get(f"{key}_interval", ())))
        return f"{value:>10}{ends:>18}" if is_known else f"{value:>12}"

    lines = [f"The scenario's own load, {count_of(with_it['completed'], 'request')} simulated"]
    width, heads = (17, ("as it is", "80 %", "without", "80 %")) if is_known else (26, ("as it is", "without"))
    head = "".join(f"{name:>{18 if name == '80 %' else 10 if is_known else 12}}" for name in heads)
    lines.append(f"{'':{width}}{head}{'ratio':>7}")
    keys: Sequence[tuple[str, str, str]] = [
        (f"{statistic}_{key}_ms", f"{name}, {statistic}", "ms")
        for key, name in LATENCIES.items()
        for statistic in ("mean", "p99")
    ]
    numbers: dict[str, tuple[float, Sequence[float]]] = {}
    for key, name, unit in [("output_throughput", "output tokens", "/s"), *keys]:
        mine, other = with_it[key], without[key]
        if mine is None or not other:
            continue
        told = cells(f"{mine:,.1f}", mine_in, key) + cells(f"{other:,.1f}", other_in, key)
        lines.append(f"{f'{name} {unit}':{width}}{told}{mine / other:>7.2f}")
        short = "output tokens/s" if key == "output_throughput" else f"mean {name.removesuffix(', mean')}"
        for value, found, where in ((mine, mine_in, ""), (other, other_in, " without speculation")):
            if (ends := found.get(f"{key}_interval")) is not None:
                numbers[f"{short}{where}"] = (value, ends)
    return [
        *lines,
        *_wrapped(intervals_rest_on(rests_on(run), are_known=is_known)),
        *_wrapped(outside_of_intervals(numbers)),
    ]
