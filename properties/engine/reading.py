"""Reads the answers of an engine: a step's view becomes a `ModelFlight`, events become tokens and ends. Another form is
a misbehaviour."""

from __future__ import annotations

from typing import Any

from ..harness.text import shown
from ..harness.trial import Trial
from .contract import REASONS
from .model import WAITING, ModelChunk, ModelFlight, RequestLife, RoundRow
from .observation import EndEvent, EngineMoment, EngineObservation, Known
from .rules import extent

_STRINGS = frozenset({str})
_KEYS = ("step", "enters", "prefill", "decode", "steps", "rounds")


def names(trial: Trial, answer: object, what: str) -> tuple[str, ...]:
    """Return a sequence of requests' names as a tuple."""
    if isinstance(answer, list | tuple) and _STRINGS.issuperset(map(type, answer)):
        return tuple(answer)
    raise trial.misbehaviour("TYPE", f"{what} is {shown(answer)}", "a list of names")


def read_step(trial: Trial, view: object) -> ModelFlight:
    """Return the step as the model sees it, and admit the requests that enter with it. Raises a Violation (TYPE)."""
    view = trial.mapping(view, "plan()", f"None, or a mapping with {', '.join(_KEYS)}", _KEYS)
    number, steps, rounds = (trial.integer(view[key], key) for key in ("step", "steps", "rounds"))
    m: EngineMoment = trial.moment
    enters = names(trial, view["enters"], "enters")
    if trial.config.host_pages:
        loads = [trial.sequence(item, "a load", "(request, tokens)", 2) for item in view.get("loads", ())]
        m.loads = {name: trial.integer(tokens, "tokens of a load") for name, tokens in loads}
    chunks = [_chunk(trial, m, item, enters) for item in trial.sequence(view["prefill"], "prefill")]
    decode = trial.sequence(view["decode"], "decode")
    if decode and steps not in m.config.ahead:
        raise trial.misbehaviour("TYPE", f"steps is {steps}", f"one of {sorted(m.config.ahead)}")
    if decode and rounds < 1:
        raise trial.misbehaviour("TYPE", f"rounds is {rounds}", "at least 1")
    rows = [_row(trial, m, item, steps, rounds) for item in decode]
    if trial.capabilities.table:
        _write_tables(trial, m, view.get("writes", ()))
    if not chunks and not rows:
        raise trial.misbehaviour("TYPE", "a step without chunks and rows", "None, if there is nothing to do")
    flight = ModelFlight(number, chunks, rows, steps, rounds)
    if rows and trial.config.costs[0]:
        flight.budget = trial.integer(view.get("budget"), "budget")
        slope, biases = trial.sequence(view.get("curve"), "curve", "(slope, biases)", 2)
        flight.curve = float(slope), tuple(map(float, biases))
    return flight


def _chunk(trial: Trial, m: EngineMoment, item: object, enters: tuple[str, ...]) -> ModelChunk:
    name, start, tokens, tail, key = trial.sequence(item, "a chunk", "(request, start, tokens, tail, key)", 5)
    life = _life(trial, m, name)
    start, tail, key = trial.integer(start, "start"), trial.integer(tail, "tail"), trial.integer(key, "key")
    tokens = trial.integers(tokens, "the tokens of a chunk")
    if life.state is WAITING or name in enters:
        if life.state is not WAITING:
            m.retract(life)  # no step has shown it as waiting
        m.admitted.append((life, start))
        m.model.admit(life, start, key)
    is_last = start + len(tokens) >= len(life.context)
    loaded = m.loads.get(name, 0) if name in enters else 0
    return ModelChunk(life, life.stay, life.row, start, life.launched, tokens, tail, key, is_last, loaded)


def _row(trial: Trial, m: EngineMoment, item: object, steps: int, rounds: int) -> RoundRow:
    has_own = trial.capabilities.ragged_drafts and isinstance(item, list | tuple) and len(item) == 5
    form = "(request, length, root, key, drafts)" if has_own else "(request, length, root, key)"
    name, length, root, key, *own = trial.sequence(item, "a row", form, 5 if has_own else 4)
    drafts = trial.integer(own[0], "drafts") if has_own else steps
    if not 0 <= drafts <= steps:
        raise trial.misbehaviour("TYPE", f"a row drafts {drafts} tokens", f"0 … {steps}")
    life = _life(trial, m, name)
    length, key = trial.integer(length, "length"), trial.integer(key, "key")
    root = None if root is None else trial.integer(root, "root")
    if life.row is None:
        raise trial.misbehaviour("TYPE", f"request {name} decodes", "a prefill first")
    is_known, latest, reach = extent(m.config, m.model.flights, life, drafts, rounds)
    return RoundRow(life, life.stay, life.row, length, is_known, root, key, drafts, latest, reach)


def _write_tables(trial: Trial, m: EngineMoment, writes: object) -> None:
    for item in trial.sequence(writes, "writes"):
        name, start, slots = trial.sequence(item, "a write", "(request, position, slots)", 3)
        start, slots, life = trial.integer(start, "position"), trial.integers(slots, "slots"), _life(trial, m, name)
        if life.row is None or start < 0:
            raise trial.misbehaviour("TYPE", f"slots of {name} from position {start} on", "a request that has entered")
        life.row.write_table(start, slots)


def _life(trial: Trial, m: EngineMoment, name: object) -> RequestLife:
    life = m.model.lives.get(name) if type(name) is str else None
    if life is None:
        has_ended = type(name) is str and name in m.model.ended
        was = f"the step has {name!r}, which {'has ended' if has_ended else 'was never submitted'}"
        raise trial.misbehaviour("TYPE", was, "requests that live")
    return life


def read_events(trial: Trial, events: object) -> int:
    """Note events in the moment and the model. Returns how many there were."""
    items = trial.sequence(events, "the events")
    m: EngineMoment = trial.moment
    for item in items:
        kind = item[0] if isinstance(item, tuple | list) and item else None
        if kind == "tokens" and len(item) == 3:
            tokens = trial.integers(item[2], "delivered tokens")
            life = m.model.lives.get(item[1])
            if life is None:
                m.stray += (f"{len(tokens)} tokens for {item[1]!r}",)
                continue
            life.delivered += tokens
            m.delivered.setdefault(life.name, []).extend(tokens)
        elif kind == "end" and len(item) == 5 and item[2] in REASONS:
            marks = None if item[4] is None else trial.integers(item[4], "the marks")
            end = EndEvent(item[1], item[2], trial.integers(item[3], "the output"), marks)
            life = m.model.lives.get(end.request)
            if life is None:
                m.stray += (f"an end ({end.reason}) of {end.request!r}",)
                continue
            m.end(life, end)
        else:
            should = '("tokens", request, tokens) or ("end", request, reason, tokens, marks)'
            raise trial.misbehaviour("TYPE", f"an event is {shown(item)}", should)
    return len(items)


def read_account(t: Any, flight: ModelFlight) -> None:
    """Note what an engine has counted, once the trial `t` has committed this step."""
    m, has, subject = t.moment, t.capabilities, t.subject
    if has.counters and (m.ends or m.gone or (flight.rows and flight.steps == 0)):
        m.counters = t.integers(t.must(subject.counters), "counters()")
    if has.lessons and flight.rows:
        lessons = t.sequence(t.must(subject.lessons), "lessons()")
        if any(row.life.name not in m.gone for row in flight.rows):  # else there is nothing to tell
            m.lessons = tuple(t.integers(lesson, "a lesson", 2) for lesson in lessons)
    if has.invalid_confidences and flight.budget is not None:
        m.invalid = t.integer(t.must(subject.num_invalid), "num_invalid()")


def read_confidences(t: Any) -> None:
    """Note by which confidences the plan that comes next takes each running request, and by which it should."""
    if t.config.costs[0]:
        known: dict[str, Known] = {}
        for life in t.model.running():
            if not life.leaving:
                values = t.must(t.subject.confidences_of, life.name)
                taken = None if values is None else tuple([float(value) for value in values])
                known[life.name] = taken, life.confidences
        t.moment.known = known


def follow_pages(t: Any, seen: EngineObservation) -> None:
    """Note which request of the trial `t` has which page.
    Pages without an owner wait for a step; note one that waits for none."""
    size, model, m = t.config.page_size, t.model, t.moment
    before = m.before
    if t.config.groups:
        follow_units(t)
    if seen.slots == before.slots and seen.free == before.free and seen.cached == before.cached:
        # Plans and commits change what is in flight; else the steps see the same pages as before.
        m.is_still = seen.running == before.running and not m.asked and m.committed is None
        if not model.lingering:
            m.owners = t.owners
            return
    owners: dict[int, str] = {}
    for name, slots in seen.slots.items():
        owners.update(dict.fromkeys(slots if size == 1 else [slot // size for slot in slots[::size]], name))
    owners.update(dict.fromkeys(seen.cached or (), "*"))
    owners.update(dict.fromkeys(seen.free, ""))
    for pages in m.after.unit_pages:
        owners.update(dict.fromkeys(pages, "another group"))
    m.owners = t.owners = owners
    if seen.free != before.free:
        gone = set(seen.free).difference(before.free or ())
        if t.capabilities.ordered_reuse and model.flights:
            t.device.forget_after(model.flights[-1].number, gone)
        else:
            t.device.forget(gone)
    if not owners.keys() <= t.all_pages:
        foreign = sorted(owners.keys() - t.all_pages)
        raise t.misbehaviour("TYPE", f"page {foreign[0]} is in use", f"pages 1 … {t.config.num_pages}")
    lingering = {}
    for page in sorted(t.all_pages - owners.keys()):
        step, whose, why = model.lingering.get(page, (0, "no request", ""))
        lingering[page] = (step or model.launched, whose, why)
        if lingering[page][0] <= model.committed and m.leaked is None:
            m.leaked = (page, whose, why)
    model.lingering = lingering


def follow_units(t: Any) -> None:
    """Note what the running requests hold of groups of layers, also for the step that is launched now. The cache has
    the states of the requests from which it took them, perhaps after these had left."""
    subject, m = t.subject, t.moment
    groups = t.config.layer_groups
    units = {name: _tables(t, name) for name in m.after.running}
    cached = tuple(
        t.integers(each, "units of a group")
        for each in t.sequence(t.must(subject.cached_units), "cached_units()", "a list for each group", len(groups))
    )
    free = t.integers(t.must(subject.free_units), "free_units()")
    unit_pages = tuple(
        t.integers(each, "pages of a group's units")
        for each in t.sequence(t.must(subject.unit_pages), "unit_pages()", "a list for each group", len(groups))
    )
    for i, group in enumerate(groups):
        for unit in () if group.window else set(cached[i]).difference((m.before.cached_units or cached)[i]):
            t.device.units.keep(i, unit)
        t.device.units.note(i, [(t.model.lives[name].row, units[name][i][1]) for name in units])
    m.after = m.after._replace(units=units, cached_units=cached, free_units=free, unit_pages=unit_pages)
    if m.flight is not None:
        m.flight.units = {life.name: units.get(life.name, ()) for life in m.flight.lives()}


def _tables(t: Any, name: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    tables = t.sequence(
        t.must(t.subject.units_of, name), "units_of()", "a table for each group", len(t.config.layer_groups)
    )
    pairs = [t.sequence(table, "a table of units_of()", "a number and the units", 2) for table in tables]
    return tuple((t.integer(first, "a number"), t.integers(held, "the units")) for first, held in pairs)
