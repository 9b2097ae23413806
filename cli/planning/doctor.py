"""`foredraft doctor`: does speculation pay in this deployment, how far, and what it does to the tail."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import AsJson, ScenarioFile, Settings, TraceFile, mode_of, only_with, option, print_document
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched
from ..simulation.simulate import given_by_options
from .cost import print_rounds

if TYPE_CHECKING:
    from ...planning.rounds.doctor import Diagnosis, Gain


of_round = only_with("--round")
# fmt: off
Requests = Annotated[int, option("--requests", "Requests to simulate, with and without speculation.", min=20)]
Round = Annotated[bool, option("--round", "Print the time of one decode round part by part instead, and simulate nothing.")]
Batch = Annotated[str, of_round("--batch",
    "Numbers of requests that decode together, as values of --grid: 8, 1,8,64, 1..64:log.")]
Context = Annotated[int, of_round("--context", "KV tokens of each request.", min=0)]
Steps = Annotated[str, of_round("--steps", "Numbers of draft steps, as values of --grid; 0 is plain decoding.")]
# fmt: on

MODES = {"--round": {"scenario", "from_sglang", "from_vllm", "from_trtllm", "settings", "as_json"}}


def doctor(
    ctx: typer.Context,
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    settings: Settings = None, trace: TraceFile = None, requests: Requests = 200,
    one_round: Round = False, batch: Batch = "1,8,64", context: Context = 1024, steps: Steps = "0..7", as_json: AsJson = False,
) -> None:  # fmt: skip
    """Print whether speculation pays in a deployment: up to which batch and load, and how it changes latencies.

    The command prints the answer and three tables. The first has the best number
    of draft steps and its gain over plain decoding, by batch and context. The
    second compares the accept length at which speculation breaks even with the
    expected one. The third has latencies from a short simulation of the
    scenario's own load, with and without speculation, and 80 % intervals of
    means.

        foredraft doctor
        foredraft doctor chat.toml --set hardware.gpu=L40S
        foredraft doctor --trace requests.csv --set hardware.gpu=H200
        foredraft doctor --round chat.toml --batch 1,64 --context 4096

    With --round the command prints a table with a column for each number of draft
    steps: microseconds on the device by part, the scheduler's time on the host
    (at the same time as the device, or after it), and their sum. Break-even is
    the accept length at which a round is as fast as plain decoding. The row
    "accept length" has the value that the scenario's acceptance gives. Rounds
    decode alone: tokens/s leave out the time of prompts. Published points of the
    server give the 80 % interval of a round.
    """
    from ...planning.rounds.doctor import diagnose
    from ...sim.scenario_file import load_scenario

    mode_of(ctx, MODES)
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, None)], launch)
    if one_round:
        print_rounds(resolved, batch, context, steps, as_json)
        return
    found = diagnose(resolved, requests)
    if as_json:
        print_document(found)
    else:
        parts = (
            _wrapped(found.timing),
            _wrapped(_verdict(found)),
            _gains(found),
            _unknowns(found),
            _break_even(found),
            _latencies(found),
        )
        typer.echo("\n\n".join("\n".join(lines) for lines in parts))


def _verdict(found: Diagnosis) -> str:
    """Say whether it pays, up to which batch, and the load that keeps such a batch busy."""
    name = f"{found.algorithm} on {found.model}, {found.gpu}"
    at, most, perhaps = f"with {found.context:,} tokens of context", found.most_drafted, found.may_pay_up_to_batch
    surely = found.pays_up_to_batch
    if found.verdict == "pays not":
        return f"Speculation does not pay: {at}, {name} is slower than plain decoding at every batch up to {most}."
    gains = ", ".join(f"{one.gain:.2f} × at batch {one.batch}" for one in found.gains_by_batch)
    gives = f"{at}, {name} gives this many times the tokens of plain decoding: {gains}."
    last = "" if perhaps == most else f" Beyond batch {perhaps} it does not pay."
    if perhaps == most < found.most_plain:
        last = f" Without drafts up to {count_of(found.most_plain, 'request')} decode together (engine.max_running, KV slots)."
    if found.verdict == "cannot be told":
        return f"Whether speculation pays cannot be told: {gives} These are within the error of speed-ups.{last}"
    if surely == most:
        return f"Speculation pays: {gives} It pays at every batch that fits, up to {count_of(most, 'request')}.{last}"
    busy = f"which about {found.busy_rate:.1f} requests/s keep busy ({found.output_tokens:.0f} output tokens each)"
    between = f" From there to batch {perhaps} it cannot be told." if perhaps > surely else ""
    return f"Speculation pays: {gives} It surely pays up to batch {surely}, {busy}.{between}{last}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80)


def _gains(found: Diagnosis) -> list[str]:
    contexts = dict.fromkeys(one.context for one in found.gains)
    lines = ["Best draft steps and gain over plain decoding, by batch and context"]
    lines.append(f"{'batch':>8}" + "".join(f"{f'{context:,} tokens':>16}" for context in contexts))
    for size in dict.fromkeys(one.batch for one in found.gains):
        cells = (_gain(one) for one in found.gains if one.batch == size)
        lines.append(f"{size:>8}" + "".join(f"{cell:>16}" for cell in cells))
    marked = " = cannot be told from plain decoding." if any("=" in line for line in lines) else ""
    return [*lines, *_wrapped(f"{found.about_speed_ups}{marked}")]


def _gain(one: Gain) -> str:
    if one.steps is None:
        return "no room"
    mark = "=" if one.verdict == "equal" else ""
    return "plain" if one.verdict == "slower" else f"{count_of(one.steps, 'step')} {mark}{one.gain:.2f} ×"


def _break_even(found: Diagnosis) -> list[str]:
    lines = [f"Accept length at which speculation breaks even, with {found.context:,} tokens of context"]
    lines.append(f"{'draft steps':>12}" + "".join(f"{steps:>8}" for steps in range(1, len(found.expected) + 1)))
    rows = {**{f"batch {size}": lengths for size, lengths in found.break_even.items()}, "expected": found.expected}
    lines += [
        f"{name:>12}" + "".join(f"{'–' if length is None else f'{length:.2f}':>8}" for length in row)
        for name, row in rows.items()
    ]
    return [*lines, *_wrapped(found.expected_by)]


def _unknowns(found: Diagnosis) -> list[str]:
    """Return a sentence that says which input that is not known moves the gain most."""
    told = ", ".join(f"{one.what} {one.low:.2f} to {one.high:.2f} ×" for one in found.moved_by)
    return _wrapped(
        f"What moves the gain most is {found.moved_by[0].name}. At the load's own batch of {found.batch} it is "
        f"{found.gain:.2f} ×; {told}."
    )


def _latencies(found: Diagnosis) -> list[str]:
    """Return the table of the simulated load, with the 80 % intervals of the means that have one."""
    from ...observe.tables import LATENCIES, format_number, intervals_rest_on

    is_known = any(one.interval or one.plain_interval for one in found.load.values())

    def cells(value: float, interval: Sequence[float] | None) -> str:
        ends = " to ".join(map(format_number, interval or ()))
        return f"{value:>10,.1f}{ends:>18}" if is_known else f"{value:>12,.1f}"

    lines = [f"The scenario's own load, {count_of(found.requests, 'request')} simulated"]
    width, heads = (17, ("as it is", "80 %", "without", "80 %")) if is_known else (26, ("as it is", "without"))
    head = "".join(f"{name:>{18 if name == '80 %' else 10 if is_known else 12}}" for name in heads)
    lines.append(f"{'':{width}}{head}{'ratio':>7}")
    for key, one in found.load.items():
        statistic, _, rest = key.partition("_")
        is_rate = key == "output_throughput"
        name = "output tokens /s" if is_rate else f"{LATENCIES[rest.removesuffix('_ms')][0]}, {statistic} ms"
        both = cells(one.speculative, one.interval) + cells(one.plain, one.plain_interval)
        lines.append(f"{name:{width}}{both}{one.speculative / one.plain:>7.2f}")
    texts = [f"Overloaded, {name}: {told}." for name, told in found.overloaded.items()]
    if is_known or not texts:
        texts.append(intervals_rest_on(found.intervals_rest_on, are_known=is_known))
    return [*lines, *(line for text in texts for line in _wrapped(text))]
