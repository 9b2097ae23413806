"""What the contract says of a submission, of the slots of a round, and of sizes at the limit of what is legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .contract import ServingConfig, Wish
from .model import EngineModel, GivenWay, ModelFlight, RequestLife
from .observation import EngineMoment

PARTS = {
    "a second step in flight": "overlap",
    "several rounds of a step": "multi_steps",
    "a prompt in chunks": "chunked_prefill",
    "chunks beside rounds": "mixed",
    "a prefix from the cache": "prefix_cache",
    "KV from host memory": "host",
    "units of layer groups": "groups",
    "newcomers that wait": "waits",
    "a verify tree": "",
    "a budget of drafts": "budgets",
}
"""What an engine may do without: a check in which a declared part was never used has not checked it."""


def used_parts(m: EngineMoment) -> dict[str, bool]:
    """Return which of `PARTS` a plan, or the step that was committed, has used."""
    flight, config = m.flight, m.config
    if flight is None:
        return {"several rounds of a step": m.answer is not None and len(m.answer.runs) > 1}
    return {
        "a second step in flight": bool(m.before_plan),
        "a prompt in chunks": any(not chunk.is_last for chunk in flight.chunks),
        "chunks beside rounds": bool(flight.chunks and flight.rows),
        "a prefix from the cache": config.prefix_cache and any(start for _, start in m.admitted),
        "KV from host memory": any(m.loads.values()),
        "units of layer groups": bool(config.groups and flight.rows),
        "newcomers that wait": m.model.waited > 0,
        "a verify tree": config.topk > 1 and bool(flight.rows),
        "a budget of drafts": flight.budget is not None,
    }


def twin_of(config: ServingConfig, kind: str) -> ServingConfig | list[ServingConfig] | None:
    """Return the other configuration of an invariant over two runs, or several, the plainest first;
    None if this one has none."""
    # A twin has none of the optional features, so that their effects show against a plain run.
    bare: dict[str, Any] = {"multi_step_rounds": 1, "prefix_cache": False, "host_pages": 0, "groups": ()}
    match kind:
        case "again":
            return config
        case "with the other pipeline depth":
            # Two steps in flight reserve twice as much, and one request must fit.
            more = -(-config.round_slots // config.page_size)
            return replace(config, **bare, overlap=not config.overlap, num_pages=config.num_pages + more)
        case "without the prefix cache":
            return replace(config, **bare) if config.prefix_cache else None
        case "round by round":
            return replace(config, **bare) if config.multi_step_rounds > 1 else None
        case "one at a time, in a large pool":
            slots = max(4 * config.num_slots, config.page_size + 1)
            alone: dict[str, Any] = {
                "max_running": 1,
                "page_size": 1,
                "num_pages": slots,
                "chunk_size": config.context_len,
            }
            plainest = replace(config, **bare, **alone, step_tokens=0, preempt=False, mixed=False)
            in_pages: dict[str, Any] = {"page_size": config.page_size, "num_pages": slots // config.page_size}
            optional: dict[str, Any] = {
                "prefix_cache": config.prefix_cache,
                "multi_step_rounds": config.multi_step_rounds,
            }
            budget = max(config.context_len, config.step_tokens)
            in_one_budget: dict[str, Any] = {"mixed": True, "chunk_size": budget}
            in_one_budget["step_tokens"] = config.step_tokens and budget
            return [
                plainest,
                replace(plainest, **in_pages),
                replace(plainest, **in_pages, **optional),
                # Engines that cannot do without these.
                *([replace(plainest, **in_pages, **optional, **in_one_budget)] if config.mixed else []),
            ]
        case "with another model":
            # With a cache, which texts are equal decides what is shared: there the tokens do matter.
            return None if config.prefix_cache else replace(config, model=config.model + 1)
        case "without speculation":
            # A cache whose keys look one token ahead caches one position less.
            head_with_cache = config.algorithm == "head" and config.prefix_cache
            if config.candidates != (0,) or config.algorithm == "none" or head_with_cache:
                return None
            return replace(config, algorithm="none")
    raise AssertionError(f"there is no twin {kind!r}")


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


def room_to_enter_beside(config: ServingConfig, num_running: int) -> int:
    """Return the most slots that a request which enters may be asked to find beside those of its context: its own
    reserve, those of all that run, now and once more, and a share of the pool."""
    return room_for_all(config, 2 * num_running + 1) + config.num_slots // 64


def why_given_way(m: EngineMoment) -> GivenWay | None:
    """Return the last request that a plan has retracted, and those for which it was; None if a round may have needed
    its slots, or it is not known which was the last. The victims before it are taken as gone.

    Without anything to gain from it the retraction was needless.
    """
    config = m.config
    victims = [life for life in m.retracted if life.name not in m.asked_back]
    if not victims or m.is_disturbed or m.refusal is not None or (len(victims) > 1 and m.own_victims):
        return None
    last = max(victims, key=lambda life: (life.wish.priority, -life.place))
    others = [life for life in victims if life is not last]
    size, slots = config.page_size, m.before.slots
    all_present = all(part.is_present or part.life in victims for flight in m.before_plan for part in flight.parts)
    pages = {name: {slot // size for slot in slots[name][::size]} for name in m.before.running}
    kept = set().union(*[pages[name] for name in pages if name not in {life.name for life in others}])
    given_up = set().union(*[pages[life.name] for life in others]) - kept
    # A cached page that no row uses can be evicted, unless a row that has left holds it until its step is committed.
    spare = set(m.before.cached or ()) - kept - given_up if all_present else ()
    room = m.before.room(config) + (len(spare) + len(given_up)) * size
    rounds = [flight.rounds for flight in m.before_plan if flight.rows]
    reserve = max(config.reserve, (1 + sum(rounds)) * config.round_slots)
    lives = [m.model.lives[name] for name in m.before.running if name in m.model.lives]
    leaving = [life for life in lives if life.leaving]
    staying = [life for life in lives if life not in others and life not in leaving]
    needed = 0
    for life in staying:
        end = max(len(life.context_of_now), len(life.context)) + reserve
        if m.keeps_reserves:
            ends = [row.reach for flight in m.before_plan for row in flight.rows if row.life is life]
            end = max(end - reserve + config.reserve, max(ends, default=0) + config.round_slots)
        needed += max(config.whole_pages(end) - len(slots[life.name]), 0)
    if needed > room:
        return None
    room += len(m.lingering_before) * size + sum(len(slots[life.name]) for life in leaving)
    has_row = len(m.before.running) - len(others) - len(leaving) < config.max_running
    gainers: list[RequestLife] = []
    for head in m.was_waiting if config.preempt else ():
        most = config.whole_pages(len(head.context_of_now) + config.reserve) + size
        most += room_to_enter_beside(config, len(staying)) if m.keeps_reserves else 0
        # What is aged gives way to no priority.
        is_aged = last.overtaken - m.overtaken.count(last) >= m.ageing and not m.model.order_is_unknown
        if head.wish.priority > last.wish.priority and not is_aged and (m.estimates or most > room or not has_row):
            gainers.append(head)
    return GivenWay(last, gainers, [flight.number for flight in m.before_plan], needed, room)


def note_waits(m: EngineMoment, running: Sequence[RequestLife]) -> None:
    """Note whether newcomers must wait at this plan for more of them, or must not, beside `running`.

    An engine counts the plans for which they wait. It has counted at most the plans with newcomers in the queue since
    the last one entered, and at least the latest plans in a row at which all of them surely had room.
    """
    config, model = m.config, m.model
    if not config.waits[0] or m.before.slots is None:
        return
    most, before = config.waits[0], model.plans_since_entry
    model.plans_since_entry = 0 if m.admitted else before + bool(m.was_waiting)
    lengths = [len(life.context_of_now) for life in m.was_waiting if not life.aborted]
    computed = {chunk.life for chunk in m.flight.chunks} if m.flight is not None else set()
    in_progress = [life for life in running if life in computed or not life.decoding]
    decoding = [life for life in running if life not in in_progress and not life.leaving and life not in m.retracted]
    is_shared = config.mixed and m.flight is not None  # a step has prompts and rounds
    verified = m.flight.num_verified(config) if is_shared else 0
    room = m.before.room(config) - room_to_enter_beside(config, len(running))
    may_wait = bool(lengths and decoding) and not in_progress
    if may_wait and m.admitted and before < most and verified + sum(lengths) < config.enough_tokens:
        m.should_wait = (
            f"{verified} tokens are verified and {sum(lengths)} wait; newcomers have waited for {before} plans"
        )
    is_plain = bool(lengths and decoding) and not (m.is_disturbed or m.was_holding or m.retracted or m.admitted)
    is_plain &= not any(life.leaving for life in running) and not in_progress and bool(m.flight and m.flight.rows)
    is_plain &= all(part.is_present for flight in m.before_plan for part in flight.parts) and not model.order_is_unknown
    is_plain &= m.recovery is None or not m.recovery.is_reduced
    num_rows = config.max_running - len(running)
    budget = min(config.chunk_size, config.step_tokens - verified if config.step_tokens else config.chunk_size)
    if not is_plain or num_rows < 1 or budget < 1 or room < max(lengths):
        model.waited = 0
        return
    all_enter = num_rows >= len(lengths) and sum(lengths) <= budget
    all_enter &= room >= sum(map(config.whole_pages, lengths)) + room_for_all(config, len(lengths))
    together = verified + (sum(lengths) if all_enter else min(lengths))
    if together >= config.enough_tokens:
        m.should_enter = f"a step with newcomers has {together} tokens, and {config.enough_tokens:g} are enough"
    model.waited += 1
    if model.waited > most:
        m.should_enter = f"newcomers have waited for {most} plans"


def extent(
    config: ServingConfig, earlier: Sequence[ModelFlight], life: RequestLife, drafts: int, rounds: int
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


def limits(model: EngineModel, committed: ModelFlight | None) -> tuple[str, ...]:
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


def shown(flight: ModelFlight | None) -> str:
    if flight is None:
        return "no step"
    parts = [f"{c.life.name} computes {c.start}…{c.stop - 1}" for c in flight.chunks]
    if flight.rows:
        rows = ", ".join(f"{row.life.name} at {row.length}" for row in flight.rows)
        rounds = f", up to {flight.rounds} rounds" if flight.rounds > 1 else ""
        parts.append(f"S = {flight.steps}{rounds}: {rows}")
    return f"-> step {flight.number}: {'; '.join(parts)}"
