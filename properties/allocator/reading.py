"""Reads everything that an allocator shows, and recounts its model: both are in the moment then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..harness.trial import Trial
from .canary import ShadowMemory
from .groups import UnitTable
from .model import AllocatorModel, AllocatorMoment, AllocatorObservation, Holder

_NO_PAGES: dict[int, int] = {}


def observe(trial: Trial, model: AllocatorModel, pages: Iterable[int]) -> None:
    """Ask the subject for everything that it shows, and recount the model. `pages`: all of the pool."""
    subject, has, memory = trial.subject, trial.capabilities, model.memory
    m: AllocatorMoment = trial.moment
    must, integers = trial.must, trial.integers
    free = cached = deferred = references = rows = None
    num_free = trial.integer(must(subject.num_free), "num_free()")
    if has.inspection:
        free = integers(must(subject.free_pages), "free_pages()")
    if has.eviction:
        cached = integers(must(subject.cached_pages), "cached_pages()")
        _follow_the_cache(model, m, cached)
    if has.deferred_free or has.deferred_close:
        deferred = trial.integer(must(subject.num_deferred), "num_deferred()")
    if has.sharing:
        references = integers([must(subject.references, page) for page in pages], "references()")
    if has.table:
        rows = tuple([(name, _row(trial, model, name, row)) for name, row in model.rows.items()])
    m.after = AllocatorObservation(num_free, free, cached, deferred, references, rows)
    if model.groups:
        m.after = m.after._replace(**_read_units(trial, model))
    m.held = model.held()
    m.waiting = model.waiting() if model.deferred else _NO_PAGES
    for holder in model.everybody():
        cells = holder.cells
        if cells and memory.read(holder.slots[: len(cells)]) != cells:
            m.stale = _first_stale(model, memory)
            break
    for name, row in model.rows.items() if model.groups else ():
        wrong = model.units.first_wrong(row)
        if wrong is not None:
            m.stale_unit = (name, *wrong)
            break


def read_tables(trial: Trial, request: str) -> tuple[UnitTable, ...]:
    """Ask for what a row holds of each group of layers."""
    groups = trial.config.unit_groups
    tables = trial.sequence(trial.must(trial.subject.units_of, request), "units_of()", "a table for each", len(groups))
    pairs = [trial.sequence(table, "a table of units_of()", "a page and the units", 2) for table in tables]
    return tuple([(trial.integer(first, "a page"), trial.integers(units, "the units")) for first, units in pairs])


def _read_units(trial: Trial, model: AllocatorModel) -> dict[str, Any]:
    """Ask for the units of all rows and groups, and for the pages that they take."""
    subject, count = trial.subject, len(model.groups)
    for name, row in model.rows.items():
        row.units = read_tables(trial, name)
    used = trial.sequence(trial.must(subject.used_units), "used_units()", "a number for each group", count)
    pages = trial.sequence(trial.must(subject.unit_pages), "unit_pages()", "a list for each group", count)
    taken = tuple([trial.integers(each, "the pages of a group") for each in pages])
    model.unit_pages = [model.new_holder() for _ in taken] if not model.unit_pages else model.unit_pages
    for holder, each in zip(model.unit_pages, taken, strict=True):
        holder.pages = list(each)
    return {
        "units": tuple([(name, row.units) for name, row in model.rows.items()]),
        "used_units": trial.integers(used, "used_units()"),
        "unit_pages": taken,
    }


def _follow_the_cache(model: AllocatorModel, moment: AllocatorMoment, cached: tuple[int, ...]) -> None:
    """Take over the pages that the subject has evicted, which it may do. It may not cache other pages than the retired
    ones."""
    moment.not_cacheable = tuple(page for page in cached if page not in model.cached)
    if len(cached) != len(model.cached):
        kept = frozenset(cached)
        model.cached = {page: cells for page, cells in model.cached.items() if page in kept}


def _row(trial: Trial, model: AllocatorModel, name: str, row: Holder) -> tuple[int, ...]:
    slots = trial.integers(trial.must(trial.subject.slots_of, name), f"slots_of({name!r})")
    row.slots = list(slots)
    row.pages = model.pages_of(slots)
    return slots


def _first_stale(model: AllocatorModel, memory: ShadowMemory) -> tuple[Any, ...] | None:
    """Return the first holder whose cells are not what it wrote: its name, page, what is found and what it wrote."""
    places = ("holder", model.holders), ("request", model.rows), ("batch request", model.parts)
    for kind, group in places:
        for name, holder in group.items():
            count = len(holder.cells)
            if len(holder.slots) < count:
                return f"{kind} {name}", None, "no slot", holder.cells[len(holder.slots)]
            wrong = memory.first_wrong(holder.slots[:count], holder.cells)
            if wrong is not None:
                return f"{kind} {name}", *wrong
    return None
