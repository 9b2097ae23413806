"""`foredraft doctor`: does speculation pay in this deployment, how far, and what it does to the tail."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import (
    AsJson,
    Columns,
    Correct,
    Quiet,
    ScenarioFile,
    Settings,
    TraceFile,
    mode_of,
    only_with,
    option,
    print_document,
    refuse_without_effect,
)
from ..progress import text_progress
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, ServerLog, capacity_of_launch, launched
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
Details = Annotated[bool, option("--details",
    "Print also the gain by context, break-even lengths, 80 % intervals, and what they rest on.")]
# fmt: on

NO_DRAFTS = "The scenario does not speculate: name the algorithm to judge, such as --set speculation.algorithm=EAGLE3."
TREES_AND_CHAINS = (
    "Trees: where both are published, the best tree of EAGLE-3 with 6 or 8 nodes gave 0.66 to 1.10 × the tokens/s of the best chain of "
    "up to 7 drafts, 0.85 × in the median, and more in 1 of 25 cases (SpecBundle, SGLang on H200, 1 or 8 requests). Larger trees are "
    "not published beside chains; --set speculation.topk=4 --set speculation.num_draft_tokens=32 simulates one."
)
MODES = {
    "--round": {
        "scenario",
        "from_sglang",
        "from_vllm",
        "from_trtllm",
        "server_log",
        "settings",
        "correct",
        "as_json",
        "quiet",
    }
}


def doctor(
    ctx: typer.Context,
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    server_log: ServerLog = None,
    settings: Settings = None, correct: Correct = False, trace: TraceFile = None, columns: Columns = None, requests: Requests = 200,
    one_round: Round = False, batch: Batch = "1,8,64", context: Context = 1024, steps: Steps = "0..7", details: Details = False,
    as_json: AsJson = False, quiet: Quiet = False,
) -> None:  # fmt: skip
    """Print whether speculation pays in a deployment: up to which batch and load, and how it changes latencies.

    The command prints the answer in one sentence, then the best number of draft
    steps and its gain over plain decoding by batch, and the results of a short
    simulation of the scenario's own load, with and without speculation.

        foredraft doctor
        foredraft doctor chat.toml --set hardware.gpu=L40S
        foredraft doctor --trace requests.csv --set hardware.gpu=H200
        foredraft doctor --details
        foredraft doctor --round chat.toml --batch 1,64 --context 4096

    --details prints what the answer rests on, the gain by batch and context, the
    accept length at which speculation breaks even beside the expected one, and
    all latencies with 80 % intervals of their means.

    With --round the command prints a table with a column for each number of draft
    steps: microseconds on the device by part, the scheduler's time on the host
    (at the same time as the device, or after it), and their sum. Break-even is
    the accept length at which a round is as fast as plain decoding. The row
    "accept length" has the value that the scenario's acceptance gives. Rounds
    decode alone: tokens/s leave out the time of prompts. Published points of the
    server give the 80 % interval of a round.

    With a launch command the table is followed by what the server would print of
    its KV pool when it starts. Without speculation that is all.
    """
    from ...planning.rounds.doctor import diagnose
    from ...sim.scenario_file import load_scenario

    mode_of(ctx, MODES)
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm, server_log)
    resolved, _ = load_scenario(scenario, [*(settings or ()), *given_by_options(trace, None, columns, correct)], launch)
    if one_round:
        print_rounds(resolved, batch, context, steps, as_json)
        return
    refuse_without_effect(("--details", as_json and details, "the document of --json has them"))
    capacity = capacity_of_launch(resolved, with_notices=True, must_fit=True) if launch else []
    if capacity and not as_json and resolved.speculation.algorithm == "NONE":
        typer.echo("\n".join([*capacity, "", *_wrapped(NO_DRAFTS)]))
        return
    with text_progress(quiet) as show:
        found = diagnose(resolved, requests, show=show)
    if as_json:
        print_document(found)
        return
    parts = [_wrapped(_answer(found)), _short_table(found), capacity]
    if details:
        parts += [_wrapped(found.timing), _wrapped(_reach(found)), _gains(found), _unknowns(found)]
        parts += [_wrapped(" ".join(_guessed(found))), _break_even(found)]
        parts += [_wrapped(TREES_AND_CHAINS) if found.algorithm.startswith("EAGLE") else [], _latencies(found)]
    else:
        parts.append(_short_notes(found))
    typer.echo("\n\n".join("\n".join(lines) for lines in parts if lines))


def _answer(found: Diagnosis) -> str:
    """Return the answer in one sentence."""
    name = f"{found.algorithm} on {found.model}, {found.gpu}"
    surely, most = found.pays_up_to_batch, found.most_drafted
    if found.verdict == "pays not":
        return f"Speculation does not pay: {name} is slower than plain decoding at every batch up to {most}."
    gains = [one.gain for one in found.gains_by_batch if one.gain is not None]
    gives = f"{min(gains):.2f} to {max(gains):.2f} times the tokens of plain decoding"
    if found.verdict == "uncertain":
        return f"Whether speculation pays is uncertain: {name} gives {gives}, which is within the error of speed-ups."
    until = f"up to batch {surely}" if surely < most else f"at every batch that fits, up to {count_of(most, 'request')}"
    return f"Speculation pays {until}: {name} gives {gives}."


def _short_table(found: Diagnosis) -> list[str]:
    """Return the gain by batch, and the means of the simulated load."""
    from ...observe.tables import LATENCIES

    lines = (
        [f"{f'{found.context:,} tokens of context':26}{'draft steps':>12}{'gain':>12}"] if found.gains_by_batch else []
    )
    for one in found.gains_by_batch:
        gain = f"{'=' if one.verdict == 'equal' else ''}{one.gain:.2f} ×"
        lines.append(f"{f'batch {one.batch}':26}{one.steps:>12}{gain:>12}")
    title = f"{count_of(found.requests, 'request')} of the load"
    lines += [*([""] if lines else []), f"{title:26}{'as it is':>12}{'without':>12}{'ratio':>7}"]
    for key, name in {
        "output_throughput": "output tokens /s",
        **{f"mean_{one}_ms": f"{LATENCIES[one][0]}, mean ms" for one in ("ttft", "tpot", "e2el")},
        "p99_e2el_ms": f"{LATENCIES['e2el'][0]}, p99 ms",
    }.items():
        if both := found.load.get(key):
            ratio = both.speculative / both.plain
            lines.append(f"{name:26}{both.speculative:>12,.1f}{both.plain:>12,.1f}{ratio:>7.2f}")
    return lines


def _short_notes(found: Diagnosis) -> list[str]:
    """Return what a reader of the table must know, and where the rest stands."""
    is_marked = any(one.verdict == "equal" for one in found.gains_by_batch)
    texts = ["= no clear difference from plain decoding."] if is_marked else []
    texts += [f"Overloaded, {name}: {cause}." for name, cause in found.overloaded.items()]
    texts += _guessed(found)
    texts += [found.about_speed_ups, _intervals(found)]
    texts.append("--details: gains by context, break-even lengths, all 80 % intervals.")
    return [line for text in texts for line in _wrapped(text)]


def _guessed(found: Diagnosis) -> list[str]:
    """Return a sentence about an acceptance that was not published, with the gains at both ends of published ones."""
    from ...planning.confidence.unknowns import ACCEPTANCE

    if not found.guessed_acceptance:
        return []
    ends = next((one for one in found.moved_by if one.name == ACCEPTANCE), None)
    gains = "" if ends is None else f"; the gain at batch {found.batch} would be {ends.low:.2f} to {ends.high:.2f} ×"
    return [f"{found.guessed_acceptance[0].upper()}{found.guessed_acceptance[1:]}{gains}."]


def _intervals(found: Diagnosis) -> str:
    """Say which 80 % intervals the means of the simulated load have, and what they rest on."""
    from ...observe.tables import LATENCIES, format_number, intervals_rest_on

    parts = []
    for name in ("ttft", "tpot", "e2el"):
        both = found.load.get(f"mean_{name}_ms")
        if both is not None and both.interval is not None:
            parts.append(f"mean {LATENCIES[name][0]} {' to '.join(map(format_number, both.interval))} ms")
    if parts:
        return f"80 % intervals, as it is: {', '.join(parts)}; they rest on {found.intervals_rest_on}."
    return "" if found.overloaded else intervals_rest_on(found.intervals_rest_on, are_known=False)


def _reach(found: Diagnosis) -> str:
    """Say how much load keeps the largest batch busy at which speculation surely pays, and what comes beyond it."""
    surely, perhaps, most = found.pays_up_to_batch, found.may_pay_up_to_batch, found.most_drafted
    texts = []
    if surely:
        busy = f"About {found.busy_rate:.1f} requests/s keep a batch of {surely} busy"
        texts.append(f"{busy} ({found.output_tokens:.0f} output tokens each).")
    if perhaps > surely > 0:
        texts.append(f"From there to batch {perhaps} it is uncertain whether it pays.")
    if 0 < perhaps < most:
        texts.append(f"Beyond batch {perhaps} it does not pay.")
    if perhaps == most < found.most_plain:
        more = count_of(found.most_plain, "request")
        texts.append(f"Without drafts up to {more} decode together (engine.max_running, KV slots).")
    return " ".join(texts)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80)


def _gains(found: Diagnosis) -> list[str]:
    contexts = dict.fromkeys(one.context for one in found.gains)
    lines = ["Best draft steps and gain over plain decoding, by batch and context"]
    lines.append(f"{'batch':>8}" + "".join(f"{f'{context:,} tokens':>16}" for context in contexts))
    for size in dict.fromkeys(one.batch for one in found.gains):
        cells = (_gain(one) for one in found.gains if one.batch == size)
        lines.append(f"{size:>8}" + "".join(f"{cell:>16}" for cell in cells))
    marked = " = no clear difference from plain decoding." if any("=" in line for line in lines) else ""
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
    moved_by = ", ".join(f"{one.what} {one.low:.2f} to {one.high:.2f} ×" for one in found.moved_by)
    return _wrapped(
        f"What moves the gain most is {found.moved_by[0].name}. At the load's own batch of {found.batch} it is "
        f"{found.gain:.2f} ×; {moved_by}."
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
    texts = [f"Overloaded, {name}: {cause}." for name, cause in found.overloaded.items()]
    if is_known or not texts:
        texts.append(intervals_rest_on(found.intervals_rest_on, are_known=is_known))
    return [*lines, *(line for text in texts for line in _wrapped(text))]
