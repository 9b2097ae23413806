"""What the contract says of a request at the door, of the slots of a round, and of sizes at the limit of what is legal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.kv.sizing import ceil_to_page, get_alloc_len_per_decode
from .contract import ServingConfig, Wish
from .model import EngineModel, Flight, Life
from .moment import Moment


def ahead_of(config: ServingConfig, steps: int) -> int:
    """Slots past its length that a round of so many steps writes."""
    nodes = config.nodes(steps)
    return get_alloc_len_per_decode(steps, config.topk, nodes if nodes > 1 else None, config.page_size)


def verdict(config: ServingConfig, wish: Wish, num_waiting: int) -> tuple[str, str]:
    """(why it can never run, why it must be accepted), each empty if it is not so."""
    prompt_len = len(wish.prompt)
    if prompt_len + 1 > config.context_len or prompt_len + 1 > config.num_slots:
        return f"a prompt of {prompt_len} tokens and 1 of output", ""
    fits_context = prompt_len + 1 + config.round_slots <= config.context_len
    fits_pool = ceil_to_page(prompt_len + 1, config.page_size) + _reserve(config) <= config.num_slots
    if fits_context and fits_pool and (not config.max_queue or num_waiting < config.max_queue):
        return "", f"{prompt_len} tokens, 1 of output and {_reserve(config)} in reserve fit"
    return "", ""


def _reserve(config: ServingConfig) -> int:
    return ceil_to_page(config.reserve + config.page_size, config.page_size)


def room_for_all(config: ServingConfig, num_running: int) -> int:
    """Slots with which so many running requests can go on for a step, whatever their lengths are."""
    return num_running * (_reserve(config) + config.page_size)


def extent(
    earlier: Sequence[Flight], ahead: Mapping[int, int], life: Life, stay: int, flight: Flight
) -> tuple[bool, int, int]:
    """Of a row of `flight`: whether its length is known, the greatest at which it may begin, and the end of what it may write.

    `earlier` are the steps in flight before it.
    """
    latest, steps_before, is_known = life.kv, 0, True
    if latest < 0:
        latest = len(life.context)
    for other in earlier:
        for part in other.rows:
            if part.life is life and part.stay == stay:
                latest += other.rounds * (other.steps + 1)
                steps_before = max(steps_before, other.steps)
                is_known = False
        for chunk in other.chunks:
            if chunk.life is life and chunk.stay == stay:
                is_known = False
    # A row that has met its end runs on in steps that were planned before; but no further than one round.
    latest = min(latest, max(life.end_kv, life.kv) + steps_before)
    last_start = latest
    if flight.rounds > 1:
        last_start = max(latest, min(latest + (flight.rounds - 1) * (flight.steps + 1), life.end_kv - 1))
    return is_known, latest, last_start + ahead[flight.steps]


def written_pages(flight: Flight, page_size: int) -> dict[int, tuple[Life, int]]:
    """Page -> whose stay writes it, of all that a step in flight may write."""
    ranges = [(c.life, c.stay, c.start, c.start + len(c.tokens)) for c in flight.chunks]
    ranges += [(r.life, r.stay, r.row.length, r.reach) for r in flight.rows]
    pages = {}
    for life, stay, start, stop in ranges:
        for slot in flight.slots[life.name][start - start % page_size : stop : page_size]:
            pages[slot // page_size] = (life, stay)
    return pages


def limits(model: EngineModel, committed: Flight | None) -> tuple[str, ...]:
    """Which limits of what is legal a plan (`committed` None) or a commit touches."""
    config = model.config
    found = []
    if committed is None:
        if not model.lives:
            found.append("nothing to do")
        if len(model.lives) == 1:
            found.append("one request")
    else:
        if len(committed.rows) + len(committed.chunks) == 1:
            found.append("one row")
        if committed.rows and all(row.row.over or row.stay != row.life.stay for row in committed.rows):
            found.append("all requests of the step end in it")
        if committed.rows and committed.steps < 2:
            found.append(f"S = {committed.steps}")
        if any(life.kv >= 0 and life.kv % config.page_size == 0 for life in model.running()):
            found.append("a full last page")
        if any(row.reach >= config.context_len for row in committed.rows):
            found.append("the context limit")
    return tuple(found)


def decision(m: Moment) -> tuple:
    """What a plan decided, without the tokens, and what everybody then held."""
    held = () if m.after.slots is None else [(name, len(slots)) for name, slots in m.after.slots.items()]
    flight = m.flight
    if flight is None:
        return ("plan", None, m.after.waiting, held)
    chunks = [(c.life.name, c.start, len(c.tokens)) for c in flight.chunks]
    rows = [(r.life.name, r.length) for r in flight.rows]
    return ("plan", chunks, rows, flight.steps if rows else 0, flight.rounds, m.after.waiting, held)


def shown(flight: Flight | None) -> str:
    """A step in words."""
    if flight is None:
        return "no step"
    parts = [f"{c.life.name} computes {c.start}…{c.start + len(c.tokens) - 1}" for c in flight.chunks]
    if flight.rows:
        rows = ", ".join(f"{row.life.name} at {row.length}" for row in flight.rows)
        rounds = f", up to {flight.rounds} rounds" if flight.rounds > 1 else ""
        parts.append(f"S = {flight.steps}{rounds}: {rows}")
    return f"-> step {flight.number}: {'; '.join(parts)}"
