"""`foredraft doctor`: does speculation pay in this deployment, how far, and what it does to the tail."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import ScenarioFile, Settings, TraceFile, option
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options

if TYPE_CHECKING:
    from ...planning.rounds import Round, RoundModel

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
    scenario's own load, with and without speculation. `foredraft cost` shows the
    parts of a round.

        foredraft doctor
        foredraft doctor chat.toml --set hardware.gpu=L40S
        foredraft doctor --trace requests.csv --set hardware.gpu=H200
    """
    from ...core.errors import ForedraftError
    from ...planning.rounds import RoundModel, without_speculation
    from ...planning.trial import run_trial
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
    model = RoundModel(resolved)
    context = round(with_it.summary["mean_input_tokens"] + with_it.summary["mean_output_tokens"] / 2)
    lines = [*_verdict(model, context, with_it.summary["mean_output_tokens"]), "", *_gains(model), ""]
    lines += [*_break_even(model, context), "", *_latencies(with_it.summary, without.summary)]
    typer.echo("\n".join([*_wrapped(model.with_steps(1).timing), "", *lines]))


def _verdict(model: RoundModel, context: int, output: float) -> list[str]:
    """Return sentences: whether it pays, up to which batch, and the load that keeps such a batch busy."""
    scenario = model.scenario
    name = f"{scenario.speculation.algorithm} on {scenario.model.target}, {scenario.hardware.gpu}"
    at = f"with {context:,} tokens of context"
    pays, most = model.largest_that_pays(context, MOST_STEPS), model.most_rows(context, 0)
    if not pays:
        return _wrapped(
            f"Speculation does not pay: {at}, {name} is slower than plain decoding at every batch up to {most}."
        )
    sizes = sorted({1, min(8, pays), min(64, pays), pays})
    gains = ", ".join(f"{_gain(model, model.best(size, context, MOST_STEPS)):.2f} × at batch {size}" for size in sizes)
    first = f"Speculation pays: {at}, {name} gives this many times the tokens of plain decoding: {gains}."
    if pays == most:
        return _wrapped(f"{first} It pays at every batch that fits, up to {count_of(most, 'request')}.")
    rate = model.round(pays, context, 0).tokens_per_s / output
    last = f"It stops paying beyond batch {pays}, which about {rate:.1f} requests/s keep busy ({output:.0f} output tokens each)."
    return _wrapped(f"{first} {last}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80)


def _gain(model: RoundModel, found: Round) -> float:
    return found.tokens_per_s / model.round(found.batch_size, found.context_len, 0).tokens_per_s


def _batches(model: RoundModel) -> list[int]:
    most = model.plain.spec.config.max_running
    return [size for size in (1, 4, 16, 64, 256, 1024) if size <= most]


def _gains(model: RoundModel) -> list[str]:
    longest = model.plain.spec.config.context_len
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    lines = ["Best draft steps and gain over plain decoding, by batch and context"]
    lines.append(f"{'batch':>8}" + "".join(f"{f'{context:,} tokens':>16}" for context in contexts))
    for size in _batches(model):
        cells = []
        for context in contexts:
            if size > model.most_rows(context, 0):
                cells.append("no room")
                continue
            found = model.best(size, context, MOST_STEPS)
            cells.append(f"{count_of(found.steps, 'step')} {_gain(model, found):.2f} ×" if found.steps else "plain")
        lines.append(f"{size:>8}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def _break_even(model: RoundModel, context: int) -> list[str]:
    counts = range(1, MOST_STEPS + 1)
    lines = [f"Accept length at which speculation breaks even, with {context:,} tokens of context"]
    lines.append(f"{'draft steps':>12}" + "".join(f"{steps:>8}" for steps in counts))
    for size in _batches(model):
        if size > model.most_rows(context, 0):
            continue
        plain = model.round(size, context, 0)
        cells = (model.round(size, context, steps).break_even(plain) for steps in counts)
        lines.append(f"{f'batch {size}':>12}" + "".join(f"{cell:>8.2f}" for cell in cells))
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


def _latencies(with_it: Mapping[str, Any], without: Mapping[str, Any]) -> list[str]:
    lines = [f"The scenario's own load, {count_of(with_it['completed'], 'request')} simulated"]
    lines.append(f"{'':26}{'as it is':>12}{'without':>12}{'ratio':>9}")
    keys: Sequence[tuple[str, str, str]] = [
        (f"{statistic}_{key}_ms", f"{name}, {statistic}", "ms")
        for key, name in LATENCIES.items()
        for statistic in ("mean", "p99")
    ]
    for key, name, unit in [("output_throughput", "output tokens", "/s"), *keys]:
        mine, other = with_it[key], without[key]
        if mine is None or not other:
            continue
        lines.append(f"{f'{name} {unit}':26}{mine:>12,.1f}{other:>12,.1f}{mine / other:>9.2f}")
    return lines
