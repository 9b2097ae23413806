"""`foredraft cost`: what one decode round takes, part by part."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import AsJson, ScenarioFile, Settings, option, print_document
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...planning.rounds.cost import BatchCost, Cost, RoundCost

MOST_COLUMNS = 8
WIDTH = 80


Batch = Annotated[
    str, option("--batch", "Numbers of requests that decode together, as values of --grid: 8, 1,8,64, 1..64:log.")
]
Context = Annotated[int, option("--context", "KV tokens of each request.", min=0)]
Steps = Annotated[str, option("--steps", "Numbers of draft steps, as values of --grid; 0 is plain decoding.")]


def cost(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    settings: Settings = None, batch: Batch = "1,8,64", context: Context = 1024, steps: Steps = "0..7",
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Print the time of one decode round, part by part, and how many tokens it must give to beat plain decoding.

    The table has a column for each number of draft steps: microseconds on the
    device by part, the scheduler's time on the host (at the same time as the
    device, or after it), and their sum. Break-even is the accept length at which
    a round is as fast as plain decoding. The row "accept length" has the value
    that the scenario's acceptance gives. Rounds decode alone: tokens/s leave out
    the time of prompts, which `foredraft doctor` includes. Published points of
    the server give the 80 % interval of a round.

        foredraft cost --batch 1,64 --context 4096
        foredraft cost chat.toml --set hardware.gpu=L40S --steps 0,2,4
    """
    from ...planning.grid import parse_values
    from ...planning.rounds.cost import cost_of_rounds
    from ...sim.scenario_file import load_scenario

    resolved, _ = load_scenario(
        scenario, settings or (), launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    )
    batches, counts = parse_values("--batch", batch, int, 1), parse_values("--steps", steps, int, 0)
    found = cost_of_rounds(resolved, batches, context, counts)
    if as_json:
        print_document(found)
    else:
        typer.echo("\n".join(_report(found)))


def _report(found: Cost) -> list[str]:
    from ...observe.tables import intervals_rest_on

    are_known = any(one.interval for one in found.batches)
    texts = [
        found.timing,
        intervals_rest_on(found.intervals_rest_on, are_known=are_known),
        found.about_speed_ups,
    ]
    lines = [line for text in texts for line in textwrap.wrap(text, WIDTH)]
    for one in found.batches:
        if one.no_room:
            steps = one.no_room if one.rounds else ()
            lines += ["", *textwrap.wrap(_without_room(one.batch, found.context, steps), WIDTH)]
        for first in range(0, len(one.rounds), MOST_COLUMNS):
            lines += ["", *_table(one, found.context, one.rounds[first : first + MOST_COLUMNS])]
    return lines


def _without_room(size: int, context: int, counts: Sequence[int]) -> str:
    """Say that so many requests do not decode together. `counts`: with which draft steps; empty: with any number."""
    steps = f" and {', '.join(map(str, counts))} draft steps" if counts else ""
    text = f"{count_of(size, 'request')} with {context:,} tokens of context{steps}"
    return f"{text}: no room (KV slots, engine.max_running)"


def _table(one: BatchCost, context: int, rounds: Sequence[RoundCost]) -> list[str]:
    parts = list(dict.fromkeys(part for found in rounds for part in found.parts_us))
    title = f"{count_of(one.batch, 'request')} with {context:,} tokens of context, decode alone; microseconds"
    lines = [title, _line("draft steps", [str(found.steps) for found in rounds])]
    lines.append(_line("nodes per request", [str(found.num_draft_tokens) for found in rounds]))
    for part in parts:
        values = (found.parts_us.get(part) for found in rounds)
        lines.append(_line(f"  {part.replace('_', ' ')}", ["–" if us is None else f"{us:,.0f}" for us in values]))
    host = "host, beside it" if rounds[0].is_overlapped else "host, after it"
    lines.append(_line("device", [f"{found.device_us:,.0f}" for found in rounds]))
    lines.append(_line(host, [f"{found.host_us:,.0f}" for found in rounds]))
    lines.append(_line("round", [f"{found.round_us:,.0f}" for found in rounds]))
    for name, end in (("from", 0), ("to", 1)):
        if one.interval is not None:
            ends = (found.interval_us for found in rounds)
            lines.append(_line(f"round, 80 % {name}", [f"{us[end]:,.0f}" for us in ends if us is not None]))
    lines.append(_line("accept length", [f"{found.accept_length:.2f}" for found in rounds]))
    lines.append(_line("break-even", [f"{found.break_even:.2f}" for found in rounds]))
    lines.append(_line("tokens/s", [f"{found.tokens_per_s:,.0f}" for found in rounds]))
    return lines


def _line(name: str, cells: list[str]) -> str:
    return f"{name:18}" + "".join(f"{cell:>8}" for cell in cells)
