"""Reads what a prefix cache answers and shows. Another form is a misbehaviour."""

from __future__ import annotations

from typing import Any

from ..allocator.groups import UnitTable
from ..harness.trial import Trial
from .events import CacheEvent
from .model import Hosted, Node, PrefixCacheModel, PrefixCacheMoment, PrefixCacheObservation
from .texts import Text
from .units import SeenUnits


def observe(trial: Trial, model: PrefixCacheModel) -> None:
    """Ask the subject for everything that it shows, recount the model, and note the first slot of a table that does not
    hold what its request computed."""
    subject, has = trial.subject, trial.capabilities
    m: PrefixCacheMoment = trial.moment
    num_evictable = trial.integer(trial.must(subject.num_evictable), "num_evictable()")
    num_protected = trial.integer(trial.must(subject.num_protected), "num_protected()")
    nodes = read_nodes(trial) if has.inspection else None
    free = trial.integers(trial.must(subject.free_slots), "free_slots()") if has.table else None
    m.after = PrefixCacheObservation(num_evictable, num_protected, nodes, free)
    if has.events:
        m.told_wrong = next(filter(None, map(model.account.take, read_events(trial))), "")
    m.locks = model.locks()
    if trial.config.groups:
        cells = {cached.page: cell for cell, cached in model.tree.items()}
        model.units.follow(_read_units(trial, model), cells, m.entered, *m.giver)
    for name, request in model.running.items():
        m.tables[name] = slots = read_slots(trial, name) if has.table else m.slots_of(request.table)
        cells = request.text.cells
        found = tuple(map(model.memory.get, slots[: len(cells)]))
        if found != cells and m.wrong is None:
            at = next((i for i, cell in enumerate(found) if cell != cells[i]), len(found))
            m.wrong = (name, at, slots[at] if at < len(slots) else None)


def _read_units(trial: Trial, model: PrefixCacheModel) -> SeenUnits:
    """Ask for what the requests and the cache have of groups of layers."""
    subject, count, size = trial.subject, len(trial.config.unit_groups), trial.config.page_size
    cached = []
    for rows in trial.sequence(trial.must(subject.cached_units), "cached_units()", "a list for each group", count):
        pairs = [trial.integers(row, "a slot and a unit") for row in trial.sequence(rows, "units of a group")]
        cached.append({slot // size: unit for slot, unit in pairs})
        if len(cached[-1]) != len(pairs):
            raise trial.misbehaviour("ANSWER", f"{len(pairs)} units of {len(cached[-1])} pages", "one of each page")
    pages = trial.sequence(trial.must(subject.unit_pages), "unit_pages()", "a list for each group", count)
    return SeenUnits(
        tables={name: _tables(trial, name, count) for name in model.running},
        cached=tuple(cached),
        used=trial.integers(trial.must(subject.used_units), "used_units()"),
        pages=tuple([trial.integers(each, "the pages of a group") for each in pages]),
    )


def _tables(trial: Trial, request: str, count: int) -> tuple[UnitTable, ...]:
    tables = trial.sequence(trial.must(trial.subject.units_of, request), "units_of()", "a table for each group", count)
    pairs = [trial.sequence(table, "a table of units_of()", "a page and the units", 2) for table in tables]
    return tuple([(trial.integer(first, "a page"), trial.integers(units, "the units")) for first, units in pairs])


def read_nodes(trial: Trial) -> tuple[Node, ...]:
    """Ask for the nodes of the subject's tree."""
    found = []
    for row in trial.must(trial.subject.nodes):
        *numbers, slots, children = trial.sequence(row, "a node", "(id, parent, locks, slots, children)", 5)
        numbers = trial.integers(numbers, "id, parent and locks of a node")
        found.append(Node(*numbers, trial.integers(slots, "its slots"), trial.integers(children, "its children")))
    return tuple(found)


def read_events(trial: Trial) -> list[CacheEvent]:
    """Ask for what the cache says that has entered and left."""
    found = [CacheEvent(*event) for event in trial.sequence(trial.must(trial.subject.events), "events()")]
    keys = ([tuple(key) if isinstance(key, list) else key for key in event.tokens] for event in found)
    return [event._replace(tokens=each) for event, each in zip(found, keys, strict=True)]


def read_slots(trial: Trial, request: str) -> tuple[int, ...]:
    """Ask for the slots of a request's table, where the subject keeps it."""
    return trial.integers(trial.must(trial.subject.slots_of, request), f"slots_of({request!r})")


def read_match(trial: Trial, answer: object) -> tuple[object, tuple[int, ...]]:
    """Return a match: its handle, and the slots that were found."""
    handle, slots = trial.sequence(answer, "match()", "a handle and the slots", 2)
    return handle, trial.integers(slots, "the slots of match()")


def read_inserted(trial: Trial, answer: object) -> tuple[object, tuple[int, ...], tuple[int, ...]]:
    """Return an insertion: its handle, the slots of the path, and those of the caller's copies."""
    parts = trial.sequence(answer, "insert()", "a handle, the slots of the path, the caller's copies", 3)
    canonical = trial.integers(parts[1], "the slots of insert()")
    return parts[0], canonical, trial.integers(parts[2], "the copies of insert()")


def look_into_host(t: Any, text: Text, num_positions: int) -> None:
    """Note that the first positions of a text were handed over just now. Ask how much host memory has of it, and of the
    oldest text of which it must have something."""
    if not t.capabilities.host or not t.config.host_pages:
        return
    uses = t.model.host
    uses.hand_over(text, num_positions)
    older = next((each for each in uses.texts if each != text and uses.least(each)), None)
    for each in (text,) if older is None else (text, older):
        least = uses.least(each) * t.config.page_size
        length = t.integer(t.must(t.subject.in_host, list(each.tokens), each.namespace), "in_host()")
        t.moment.hosted += (Hosted(each, length, least),)
        uses.may_use(each)
