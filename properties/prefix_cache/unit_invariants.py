"""RADIX-17 … 20: what a prefix cache has of groups of layers with a window or with states."""

from __future__ import annotations

from ..harness.invariants import Finding, Outcome, checks
from .model import PrefixCacheMoment

CONTRACT = "prefix-cache"


@checks("RADIX-17", CONTRACT, "groups")
def a_request_has_what_its_next_token_reads(m: PrefixCacheMoment) -> Outcome:
    if not m.config.groups or not m.model.running:
        return None
    units, size = m.model.units, m.config.page_size
    for name, request in m.model.running.items():
        ends = request.text.cells[size - 1 :: size]
        for i, (group, (first, held)) in enumerate(zip(units.groups, units.seen.tables[name], strict=True)):
            content = units.content[i]
            if not group.window:
                source, *own = held
                if len(own) != group.states:
                    return Finding(f"{name} has {len(own)} states of group {i}", f"{group.states}", _ANOTHERS)
                found = [content.get(unit) for unit in ([source] if source >= 0 else own)]
                if (
                    request.begun
                    and request.committed == request.begun
                    and ends[request.begun // size - 1] not in found
                ):
                    was = f"group {i}: {name} starts at {request.begun} tokens without the state there"
                    return Finding(was, "the state behind the last token that it found", _ANOTHERS)
                continue
            begin, end = group.first_page(request.committed, size), len(request.table)
            if (first, first + len(held)) != (begin, end):
                was = f"group {i}: {name} has units of the pages {first} … {first + len(held) - 1}"
                should = f"{begin} … {end - 1}, at {request.committed} tokens"
                return Finding(was, should, "a step reads or writes what it has not, or room is held that is not read")
            for page, unit in enumerate(held[: len(ends) - first], first):
                if content.get(unit) != ends[page]:
                    was = f"group {i}: unit {unit} of page {page} of {name} holds another text"
                    return Finding(was, "the KV of exactly these tokens after exactly this prefix", _ANOTHERS)
    return True


_ANOTHERS = "a request goes on from another's window or state"


@checks("RADIX-18", CONTRACT, "groups")
def units_in_use_have_an_owner(m: PrefixCacheMoment) -> Outcome:
    if not m.config.groups:
        return None
    units, seen = m.model.units, m.model.units.seen
    for i, group in enumerate(units.groups):
        owned = set(seen.cached[i].values()).union(*[tables[i][1] for tables in seen.tables.values()]) - {-1}
        if seen.used[i] != len(owned):
            was = f"{seen.used[i]} units of group {i} are in use; requests and the cache have {len(owned)}"
            return Finding(was, f"{len(owned)} in use", "a unit without an owner is lost, one that is free has two")
        if len(seen.pages[i]) != group.pages_of(len(owned)):
            was = f"{len(owned)} units of group {i}, {group.quarters}/4 of a page each, take {len(seen.pages[i])} pages"
            return Finding(was, f"{group.pages_of(len(owned))}", "one too many is lost room, one too few is not there")
    return True


@checks("RADIX-19", CONTRACT, "groups")
def a_cached_unit_is_of_its_page(m: PrefixCacheMoment) -> Outcome:
    if not m.config.groups:
        return None
    units, cells = m.model.units, {cached.page: cell for cell, cached in m.model.tree.items()}
    for i, cached in enumerate(units.seen.cached):
        for page, unit in cached.items():
            if page not in cells or units.content[i].get(unit) != cells[page]:
                was = f"group {i}: unit {unit} is cached for page {page}, and holds something else"
                return Finding(was, "what the page holds, in these layers", "the next hit goes on from another text")
        taken = list(cached.values())
        for name, request in m.model.running.items():
            taken += units.written_by(i, request, units.seen.tables[name][i])
        if len(set(taken)) != len(taken):
            twice = next(unit for unit in taken if taken.count(unit) > 1)
            was = f"group {i}: unit {twice} is written by a request, and cached or written by another, too"
            return Finding(was, "one owner", "a request goes on from another's window or state")
    return True


@checks("RADIX-20", CONTRACT, "groups", on=("finish",))
def what_is_handed_over_can_be_found(m: PrefixCacheMoment) -> Outcome:
    if m.to_be_found is None:
        return None
    path, num_pages = m.to_be_found
    found = len(m.model.units.usable(path))
    if found < num_pages:
        was = f"behind {found} of the {len(path)} pages that were just handed over a request may start"
        return Finding(was, f"behind {num_pages} at least", "what was computed has to be computed again")
    return True
