"""`foredraft cost`: what one decode round takes, part by part."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..options import ScenarioFile, Settings, option
from ..simulation.launch import FromSglang, FromTrtllm, FromVllm, launched

if TYPE_CHECKING:
    from ...sim.assembly.rounds import Round
    from ...sim.cost.published.evidence import Interval

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
) -> None:  # fmt: skip
    """Print the time of one decode round, part by part, and how many tokens it must give to beat plain decoding.

    The table has a column for each number of draft steps: microseconds on the
    device by part, the scheduler's time on the host (at the same time as the
    device, or after it), and their sum. Break-even is the accept length at which
    a round is as fast as plain decoding. The row "accept length" has the value
    that the scenario's acceptance gives. Published points of the server give the
    80 % interval of a round.

        foredraft cost --batch 1,64 --context 4096
        foredraft cost chat.toml --set hardware.gpu=L40S --steps 0,2,4
    """
    from ...core.errors import ConfigError
    from ...observe.tables import intervals_rest_on, outside_of_intervals
    from ...planning.confidence.comparison import about_speed_ups
    from ...planning.grid import parse_values
    from ...planning.rounds import RoundModel
    from ...sim.confidence import factors_of_rounds, rests_on
    from ...sim.scenario_file import load_scenario

    resolved, _ = load_scenario(
        scenario, settings or (), launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm)
    )
    model = RoundModel(resolved)
    batches, counts = parse_values("--batch", batch, int, 1), parse_values("--steps", steps, int, 0)
    if resolved.speculation.algorithm == "NONE":
        counts = [0]
    longest = model.plain.spec.config.context_len
    if context > longest:
        raise ConfigError.of("--context", "", f"{context:,} tokens do not fit into the model's context of {longest:,}")
    run = model.with_steps(max(counts))
    texts = [run.timing, intervals_rest_on(rests_on(run), are_known=factors_of_rounds(run, 1) is not None)]
    found = {
        f"rounds of {count_of(size, 'request')}": (1.0, interval)
        for size in batches
        if (interval := factors_of_rounds(run, size)) is not None
    }
    lines = [
        line
        for text in [*texts, outside_of_intervals(found), about_speed_ups(run)]
        for line in textwrap.wrap(text, WIDTH)
    ]
    for size in batches:
        fitting = [
            count for count in counts if size <= min(model.most_rows(context, count), model.most_rows(context, 0))
        ]
        missing = [count for count in counts if count not in fitting]
        if missing:
            lines += ["", *textwrap.wrap(_without_room(size, context, missing if fitting else []), WIDTH)]
        if not fitting:
            continue
        plain = model.round(size, context, 0)
        rounds = [model.round(size, context, count) for count in fitting]
        for first in range(0, len(rounds), MOST_COLUMNS):
            lines += ["", *_table(rounds[first : first + MOST_COLUMNS], plain, factors_of_rounds(run, size))]
    typer.echo("\n".join(lines))


def _without_room(size: int, context: int, counts: list[int]) -> str:
    """Say that so many requests do not decode together. `counts`: with which draft steps; empty: with any number."""
    steps = f" and {', '.join(map(str, counts))} draft steps" if counts else ""
    text = f"{count_of(size, 'request')} with {context:,} tokens of context{steps}"
    return f"{text}: no room (KV slots, engine.max_running)"


def _table(rounds: list[Round], plain: Round, interval: Interval | None) -> list[str]:
    parts = list(dict.fromkeys(part for found in rounds for part in found.parts_ns))
    title = f"{count_of(plain.batch_size, 'request')} with {plain.context_len:,} tokens of context; microseconds"
    lines = [title, _line("draft steps", [str(found.steps) for found in rounds])]
    lines.append(_line("nodes per request", [str(found.num_draft_tokens) for found in rounds]))
    for part in parts:
        values = (found.parts_ns.get(part) for found in rounds)
        lines.append(_line(f"  {part.replace('_', ' ')}", ["–" if ns is None else _us(ns) for ns in values]))
    host = "host, beside it" if plain.is_overlapped else "host, after it"
    lines.append(_line("device", [_us(found.device_ns) for found in rounds]))
    lines.append(_line(host, [_us(found.host_ns) for found in rounds]))
    lines.append(_line("round", [_us(found.total_ns) for found in rounds]))
    if interval is not None:
        for end, factor in (("from", interval.low), ("to", interval.high)):
            lines.append(_line(f"round, 80 % {end}", [_us(round(factor * found.total_ns)) for found in rounds]))
    lines.append(_line("accept length", [f"{found.accept_length:.2f}" for found in rounds]))
    lines.append(_line("break-even", [f"{found.break_even(plain):.2f}" for found in rounds]))
    lines.append(_line("tokens/s", [f"{found.tokens_per_s:,.0f}" for found in rounds]))
    return lines


def _line(name: str, cells: list[str]) -> str:
    return f"{name:18}" + "".join(f"{cell:>8}" for cell in cells)


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:,.0f}"
