"""What rows hold of groups of layers with a window or with states: GROUP-01 … 04."""

from __future__ import annotations

from ...harness.invariants import Finding, Outcome, checks
from ..groups import LayerGroup, UnitTable
from ..model import RequestLife
from ..observation import EngineMoment

CONTRACT = "engine"


def _committed(m: EngineMoment, life: RequestLife) -> int:
    """Return the length at which the oldest step in flight, or the next one, begins at the earliest."""
    chunks = [chunk for flight in m.model.flights for chunk in flight.chunks if chunk.life is life and chunk.is_present]
    starts = [chunk.start for chunk in chunks]
    return min([*starts, life.kv if life.kv >= 0 else life.launched])


def _own(group: LayerGroup, table: UnitTable, begin: int, page_size: int) -> set[int]:
    """Return the units that a row may write whose steps begin at `begin`."""
    first, units = table
    return set(units[max(begin // page_size - first, 0) :] if group.window else units)


@checks("GROUP-01", CONTRACT, "groups")
def all_units_have_an_owner(m: EngineMoment) -> Outcome:
    if m.after.units is None or m.model.flights or m.model.lost:
        return None
    for i, group in enumerate(m.config.layer_groups):
        held = {unit for tables in m.after.units.values() for unit in tables[i][1]}
        free, owned = m.after.free_units[i], len(held.union(m.after.cached_units[i]))
        in_all, pages = group.units_in(m.config.num_pages), len(m.after.unit_pages[i])
        if free + owned != in_all:
            was = f"group {i}: {free} units are free, {owned} in rows and in the cache"
            return Finding(was, f"{in_all} together", "a unit that is never given back is lost")
        if pages != group.pages_of(owned):
            was = f"group {i}: {owned} units in use have {pages} pages of the pool"
            should = f"{group.pages_of(owned)}, as many as they fill together"
            return Finding(was, should, "tokens of no request can have the others")
    return True


@checks("GROUP-02", CONTRACT, "groups")
def rows_have_what_their_steps_read(m: EngineMoment) -> Outcome:
    if not m.after.units:
        return None
    size = m.config.page_size
    for name, tables in m.after.units.items():
        life = m.model.lives[name]
        if life.row is None or life.leaving:
            continue
        begin, pages = _committed(m, life), len(m.after.slots[name]) // size
        for i, (group, (first, units)) in enumerate(zip(m.config.layer_groups, tables, strict=True)):
            if not group.window:
                if len(units) < group.states:
                    return Finding(f"{name} has {len(units)} states", f"{group.states}", "its step overwrites its own")
                continue
            needed = max(begin - group.window + 1, 0) // size
            if first > needed or first + len(units) < pages:
                was = f"group {i}: {name} has units of the pages {first} … {first + len(units) - 1}"
                should = f"{needed} … {pages - 1}, as a step may begin at {begin}"
                return Finding(was, should, "a step reads or writes what another request has by now")
    return True


@checks("GROUP-03", CONTRACT, "groups")
def what_a_row_writes_is_its_own(m: EngineMoment) -> Outcome:
    if not m.after.units:
        return None
    for i, group in enumerate(m.config.layer_groups):
        cached = set(m.after.cached_units[i])
        for name, tables in m.after.units.items():
            own = _own(group, tables[i], _committed(m, m.model.lives[name]), m.config.page_size)
            others = {unit for other, rest in m.after.units.items() if other != name for unit in rest[i][1]}
            shared = sorted(own & (cached | others))
            if shared:
                was = f"group {i}: unit {shared[0]} of {name} is {'cached' if shared[0] in cached else 'of another row'}, too"
                return Finding(was, "its own, as it writes there", "a request goes on from another's state or window")
    return True


@checks("GROUP-04", CONTRACT, "groups", on=("commit",))
def what_a_step_reads_is_of_its_text(m: EngineMoment) -> Outcome:
    if m.committed is None or not m.config.groups:
        return None
    for part in m.committed.parts:
        if part.row.lacking:
            was = f"{part.life.name}: {part.row.lacking}"
            should = "the last tokens before it, and the state after them"
            return Finding(was, should, "its output is that of another text")
    return True
