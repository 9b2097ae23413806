"""`foredraft doctor --round`: what one decode round takes, part by part."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import typer

from ...core.errors import count_of
from ..options import print_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...planning.rounds.cost import BatchCost, Cost, RoundPrice
    from ...sim.scenario import Scenario

MOST_COLUMNS = 8
WIDTH = 80


def print_rounds(scenario: Scenario, batch: str, context: int, steps: str, as_json: bool) -> None:
    """Print the time of one decode round, part by part, and how many tokens it must give to beat plain decoding.

    `batch`, `steps`: numbers as values of --grid. Raises ConfigError.
    """
    from ...planning.grid import parse_values
    from ...planning.rounds.cost import cost_of_rounds

    batches, counts = parse_values("--batch", batch, int, 1), parse_values("--steps", steps, int, 0)
    found = cost_of_rounds(scenario, batches, context, counts)
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


def _table(one: BatchCost, context: int, rounds: Sequence[RoundPrice]) -> list[str]:
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
