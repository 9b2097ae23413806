"""What the contract says of a submission, of the slots of a round, and of sizes at the limit of what is legal."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ServingConfig, Wish
from .model import EngineModel, Flight, RequestLife


def verdict(config: ServingConfig, wish: Wish, num_waiting: int) -> tuple[str, str]:
    """Return (why the request can never run, why it must be accepted), each empty if it is not so."""
    prompt_len = len(wish.prompt)
    if config.max_queue and num_waiting >= config.max_queue:
        return f"{num_waiting} requests wait, {config.max_queue} may", ""
    if prompt_len < 1 or wish.max_tokens < 1:
        return f"a prompt of {prompt_len} tokens and {wish.max_tokens} of output", ""
    if prompt_len + 1 > config.context_len or prompt_len + 1 > config.num_slots:
        return f"a prompt of {prompt_len} tokens and 1 of output", ""
    if config.whole_pages(prompt_len + 1) + _reserve(config) <= config.num_slots:
        return "", f"{prompt_len} tokens, 1 of output and {_reserve(config)} in reserve fit"
    return "", ""


def promises(config: ServingConfig, wish: Wish) -> tuple[int, int]:
    """Return how many tokens an accepted request must get at least, and may get at most.

    It must get all that it asks for if that fits the context, and the pool beside a reserve: the same with speculation
    and without."""
    prompt_len = len(wish.prompt)
    least = min(wish.max_tokens, _fitting(config) - prompt_len)
    return max(least, 1), min(wish.max_tokens, min(config.context_len, config.num_slots) - prompt_len)


def limits_of(config: ServingConfig, wish: Wish, num_waiting: int) -> set[int]:
    """Return the numbers of which a refusal must name one:
    the most waiting requests, and the most tokens of a request."""
    named = {config.max_queue} if config.max_queue and num_waiting >= config.max_queue else set()
    fitting = _fitting(config)
    return named if fitting > len(wish.prompt) else named.union(range(fitting, len(wish.prompt) + 1))


def _fitting(config: ServingConfig) -> int:
    """Return the tokens of a request, prompt and output, that fit the context, and the pool with room to spare."""
    in_pool = (config.num_slots - _reserve(config)) // config.page_size * config.page_size
    return min(config.context_len, in_pool)


def _reserve(config: ServingConfig) -> int:
    return config.whole_pages(config.reserve + config.page_size)


def room_for_all(config: ServingConfig, num_running: int) -> int:
    """Return the slots with which so many running requests can go on for a step, whatever their lengths are."""
    return num_running * (_reserve(config) + config.page_size)


def extent(
    config: ServingConfig, earlier: Sequence[Flight], life: RequestLife, drafts: int, rounds: int
) -> tuple[bool, int, int]:
    """Return of a row: whether its length is known, the greatest at which it may begin, and the end of what it may
    write.

    `earlier` are the steps in flight before its own, which has `rounds` rounds with so many drafts of this row.
    """
    latest, drafts_before, is_known = life.kv, 0, True
    if latest < 0:
        latest = len(life.context)
    for other in earlier:
        for part in other.rows:
            if part.life is life and part.is_present:
                latest += other.rounds * (part.drafts + 1)
                drafts_before = max(drafts_before, part.drafts)
                is_known = False
        for chunk in other.chunks:
            if chunk.life is life and chunk.is_present:
                is_known = False
    # A row that has met its end runs on in steps that were planned before; but no further than one round.
    latest = min(latest, max(life.end_kv, life.kv) + drafts_before)
    last_start = latest
    if rounds > 1:
        last_start = max(latest, min(latest + (rounds - 1) * (drafts + 1), life.end_kv - 1))
    return is_known, latest, config.reach(last_start, drafts)


def limits(model: EngineModel, committed: Flight | None) -> tuple[str, ...]:
    """Return which limits of what is legal a plan (`committed` None) or a commit touches."""
    if committed is None:
        found = {"nothing to do": not model.lives, "one request": len(model.lives) == 1}
    else:
        config, rows = model.config, committed.rows
        found = {
            "one row": len(committed.parts) == 1,
            "all requests of the step end in it": rows and all(row.row.over or not row.is_present for row in rows),
            f"S = {committed.steps}": rows and committed.steps < 2,
            "a full last page": any(life.kv >= 0 and life.kv % config.page_size == 0 for life in model.running()),
            "the context limit": any(row.reach >= config.context_len for row in rows),
        }
    return tuple(name for name, is_touched in found.items() if is_touched)


def shown(flight: Flight | None) -> str:
    if flight is None:
        return "no step"
    parts = [f"{c.life.name} computes {c.start}…{c.stop - 1}" for c in flight.chunks]
    if flight.rows:
        rows = ", ".join(f"{row.life.name} at {row.length}" for row in flight.rows)
        rounds = f", up to {flight.rounds} rounds" if flight.rounds > 1 else ""
        parts.append(f"S = {flight.steps}{rounds}: {rows}")
    return f"-> step {flight.number}: {'; '.join(parts)}"
