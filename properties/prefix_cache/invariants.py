"""RADIX-01 … 08, 10, 11, 14, 15: what is true of every prefix cache, after every operation."""

from __future__ import annotations

from ..harness.invariants import Finding, Outcome, checks, unchanged
from .model import Matched, Node, PrefixCacheMoment

CONTRACT = "prefix-cache"


@checks("RADIX-01", CONTRACT, on=("match", "peek", "compare", "admit"))
def a_match_is_a_prefix(m: PrefixCacheMoment) -> Outcome:
    findings = (_not_the_prefix(m, match) for match in m.matches)
    return next(filter(None, findings), True if m.matches else None)


def _not_the_prefix(m: PrefixCacheMoment, match: Matched) -> Finding | None:
    size, text = m.config.page_size, match.text
    if match.length % size or match.length > len(text.cells):
        was = f"{match.length} positions of a text with {len(text.cells)} keys"
        should = f"whole pages of {size}, at most what was asked about"
        return Finding(was, should, "a page of which a part matches holds KV of other tokens")
    if match.slots is not None:
        for position, (slot, found) in enumerate(zip(match.slots, match.found, strict=True)):
            if found != text.cells[position]:
                was = f"slot {slot}, given for position {position}, does not hold the KV of the query"
                should = "the KV of exactly these tokens after exactly this prefix in this namespace"
                return Finding(was, should, "the request would go on from another request's text")
    should = len(match.path) * size
    if match.length != should:
        was = f"a match of {match.length} positions"
        should = f"{should}, the longest prefix that is cached"
        return Finding(was, should, "what is cached and not found is computed again, and cached twice")
    return None


@checks("RADIX-02", CONTRACT)
def locks_are_counts(m: PrefixCacheMoment) -> Outcome:
    if m.after.num_protected < 0 or m.after.num_evictable < 0:
        was = f"{m.after.num_protected} slots are protected, {m.after.num_evictable} can be evicted"
        return Finding(was, "0 or more", "a lock was taken back that was never taken")
    is_stray = getattr(m.operation, "tag", "") == "unlock-stray"
    if is_stray and m.refusal is None:
        was = "an unlock of a path that is not locked was accepted"
        return Finding(was, "a typed error", "the count falls below zero, or a later lock is lost")
    if m.after.nodes is None:
        return True
    roots = [node for node in m.after.nodes if node.parent == -1]
    if len(roots) != 1 or roots[0].slots:
        was = f"{len(roots)} roots, with slots {[list(node.slots) for node in roots]}"
        return Finding(was, "one, without slots", "every walk begins and ends there")
    return True


@checks("RADIX-03", CONTRACT, on=("lock", "admit", "share"))
def a_lock_covers_the_path(m: PrefixCacheMoment) -> Outcome:
    if m.locked is None:
        return None
    if m.stale:
        if m.refusal is None:
            was = "a lock was granted on a handle of which a page has been evicted"
            return Finding(was, "a refusal: match again", "the caller goes on with slots that belong to another")
        return unchanged(m, "the caller goes on as before")
    least = len(m.locked) * m.config.page_size
    if m.after.num_protected < least:
        was = f"{m.after.num_protected} slots are protected"
        return Finding(was, f"the {least} of the path at least", "an ancestor that is evicted takes all below it away")
    return True


@checks("RADIX-04", CONTRACT, on=("evict", "admit", "share"))
def locked_stays(m: PrefixCacheMoment) -> Outcome:
    if m.evicted is None:
        return None
    size = m.config.page_size
    for slot in m.evicted.slots:
        if slot // size in m.evicted.locked:
            was = f"slot {slot} was evicted, and its page {slot // size} is locked"
            return Finding(was, f"none of {sorted(m.evicted.locked)}", "a running request reads it")
    return True


@checks("RADIX-05", CONTRACT, general=True)
def the_tree_is_counted(m: PrefixCacheMoment) -> Outcome:
    tokens = len(m.model.tree) * m.config.page_size
    counted = m.after.num_evictable + m.after.num_protected
    if counted != tokens:
        was = f"{m.after.num_evictable} evictable + {m.after.num_protected} protected = {counted}"
        should = f"{tokens}: pages {sorted(m.cached_pages())} are cached"
        return Finding(was, should, "the scheduler admits by these numbers")
    if m.after.nodes is not None:
        shown = sum(len(node.slots) for node in m.after.nodes)
        if shown != tokens:
            return Finding(f"{shown} slots in the tree", f"{tokens}", "what is not counted is lost, or evicted twice")
    return _told_otherwise(m) or _not_in_host(m) or True


def _told_otherwise(m: PrefixCacheMoment) -> Finding | None:
    """Return a finding if an account that knows the cache's events alone has other pages, or other texts in them."""
    why = "a router sends requests to where it believes their prefix is"
    if m.told_wrong:
        return Finding(f"by its events, {m.told_wrong}", "each page behind its prefix, once", why)
    cached = {page.page * m.config.page_size: cell for cell, page in m.model.tree.items()}
    told = m.model.account.texts
    if m.capabilities.events and told != cached:
        differ = sorted(slot for slot in {*cached, *told} if cached.get(slot) != told.get(slot))
        was = f"by its events pages from slots {sorted(told)} are cached, and {differ} are not, or hold another text"
        return Finding(was, f"those from {sorted(cached)}", why)
    return None


def _not_in_host(m: PrefixCacheMoment) -> Finding | None:
    size = m.config.page_size
    for text, length, least in m.hosted:
        if not least <= length <= m.config.host_pages * size:
            was = f"host memory has {length} positions of a text of which {least} are among its latest pages"
            should = f"{least} at least, and no more than its {m.config.host_pages} pages"
            return Finding(was, should, "what fits is copied, and what was used last goes last")
        if length % size or not m.model.host.were_copied(m.model.host.cells(text, length)):
            was = f"host memory has {length} positions of a text"
            return Finding(was, "whole pages that a request has handed over", "the KV of another text is copied back")
    return None


@checks("RADIX-06", CONTRACT)
def locks_are_the_holders(m: PrefixCacheMoment) -> Outcome:
    size = m.config.page_size
    why = "a lock that is never taken back keeps its pages for ever, one that is missing loses them under a request"
    if m.after.num_protected != len(m.locks) * size:
        when = "drained: " if m.operation == "drained" else ""
        was = f"{when}{m.after.num_protected} slots are protected"
        return Finding(was, f"{len(m.locks) * size}, by recounting the holders of pages {sorted(m.locks)}", why)
    if m.after.nodes is None:
        return True
    for node in m.after.nodes:
        if node.parent == -1:
            continue
        holders = m.locks.get(node.slots[0] // size, 0) if node.slots else 0
        if node.locks != holders:
            was = f"node {node.id} (slots {list(node.slots)}) has {node.locks} locks"
            return Finding(was, f"{holders}, by recounting its live holders", why)
    return True


@checks("RADIX-07", CONTRACT, "inspection")
def the_tree_is_one(m: PrefixCacheMoment) -> Outcome:
    nodes = {node.id: node for node in m.after.nodes}
    if len(nodes) != len(m.after.nodes):
        return Finding(f"{len(m.after.nodes)} nodes with {len(nodes)} ids", "ids of their own", "two nodes are one")
    finding = next(filter(None, (_badly_linked(m, node, nodes) for node in m.after.nodes)), None)
    if finding is not None:
        return finding
    slots = [slot for node in m.after.nodes for slot in node.slots]
    if len(set(slots)) != len(slots):
        twice = next(slot for slot in slots if slots.count(slot) > 1)
        return Finding(f"slot {twice} stands in the tree twice", "once", "it is freed twice")
    should = set(m.slots_of(m.cached_pages()))
    for slot in slots:
        if slot not in should:
            was = f"slot {slot} is in the tree"
            should = f"pages {sorted(m.cached_pages())}"
            return Finding(was, should, "a node without data leads matches to what others write")
    return True


def _badly_linked(m: PrefixCacheMoment, node: Node, nodes: dict[int, Node]) -> Finding | None:
    size = m.config.page_size
    for child in node.children:
        if child not in nodes or nodes[child].parent != node.id:
            return Finding(f"node {node.id} names the child {child}, which does not name it", "links both ways", _LINKS)
    if node.parent == -1:
        return None
    parent = nodes.get(node.parent)
    if parent is None or node.id not in parent.children:
        return Finding(
            f"node {node.id} (slots {list(node.slots)}) has the parent {node.parent}, which "
            f"{'is gone' if parent is None else 'does not name it'}",
            "links both ways",
            _LINKS,
        )
    if not node.slots or len(node.slots) % size or node.slots[0] % size:
        return Finding(f"node {node.id} has the slots {list(node.slots)}", f"one or more whole pages of {size}", _LINKS)
    return None


_LINKS = "a node that is not linked can neither be found nor evicted"


@checks("RADIX-08", CONTRACT, on=("evict", "admit"))
def evictable_is_what_can_go(m: PrefixCacheMoment) -> Outcome:
    if m.evicted is None:
        return None
    pages = {slot // m.config.page_size for slot in m.evicted.slots}
    if m.capabilities.lru and pages != set(m.evicted.order):
        policy = m.model.policy
        was = f"pages {sorted(pages)} were evicted"
        should = f"{list(m.evicted.order)}: the leaves in the order of {policy}"
        return Finding(was, should, "what will be wanted soonest has to be computed again")
    for cached in m.model.tree.values():
        if cached.parent is not None and m.model.tree.get(cached.parent.cell) is not cached.parent:
            was = f"page {cached.parent.page} was evicted before page {cached.page} below it"
            return Finding(was, "leaves go first", "what hangs below can never be matched again")
    return True


@checks("RADIX-10", CONTRACT, on=("insert", "share", "finish", "abort", "admit"))
def copies_are_freed_after_the_table_is_right(m: PrefixCacheMoment) -> Outcome:
    if m.wrong is not None:
        whose, position, slot = m.wrong
        was = f"position {position} of {whose} is in slot {slot}, which does not hold its KV"
        should = "the slot that its request wrote, or the cached one with the same content"
        return Finding(was, should, "its table points to a page that was freed, or to one that is not its prefix")
    if m.inserted is not None:
        for what, found, should in (
            ("the path is in slots", m.inserted.canonical, m.inserted.should_canonical),
            ("the caller's copies are", m.inserted.duplicates, m.inserted.should_duplicates),
        ):
            if found != should:
                was = f"{what} {list(found)}"
                return Finding(was, f"{list(should)}", "the caller points its table at the first and frees the second")
    if m.should_share is not None:
        request, path = m.should_share
        should = m.slots_of([cached.page for cached in path])
        if m.tables[request][: len(should)] != should:
            was = f"the table of {request} begins with {list(m.tables[request][: len(should)])}"
            return Finding(was, f"{list(should)}, the cached pages", "its own copies are about to be freed")
    if m.after.free_slots is not None:
        free = set(m.after.free_slots)
        for request, slots in m.tables.items():
            for slot in slots:
                if slot in free:
                    was = f"slot {slot} is free, and in the table of {request}"
                    return Finding(was, "a table has no free slots", "the next request writes there")
    return True if m.inserted is not None or m.should_share is not None else None


@checks("RADIX-11", CONTRACT, "namespaces", on=("match", "compare", "admit"))
def namespaces_are_apart(m: PrefixCacheMoment) -> Outcome:
    size = m.config.page_size
    evaluated = False
    for match in m.matches:
        given = {slot // size for slot in match.slots}
        for cached in m.model.tree.values():
            if cached.namespace != match.text.namespace:
                evaluated = True
                if cached.page in given:
                    return Finding(
                        f"page {cached.page}, cached for the namespace {cached.namespace!r}, is given to {match.text.namespace!r}",
                        "pages of its own namespace alone",
                        "the KV of another model, adapter or tenant is not the KV of this one",
                    )
    if m.operation.tag == "compare" and len(m.matches) == 2 and m.operation.first == m.operation.second:
        first, second = m.matches
        if first.slots != second.slots:
            was = f"one text in one namespace gave {list(first.slots)}, then {list(second.slots)}"
            return Finding(was, "the same slots", "equal texts share their pages")
        return True
    return True if evaluated else None


@checks("RADIX-14", CONTRACT, on=("evict", "admit"))
def eviction_frees_what_it_says(m: PrefixCacheMoment) -> Outcome:
    if m.evicted is None:
        return None
    size, slots = m.config.page_size, m.evicted.slots
    pages = {slot // size for slot in slots}
    if len(set(slots)) != len(slots) or len(pages) * size != len(slots) or not pages <= m.evicted.cached:
        was = f"evicted {list(slots)}"
        should = f"whole pages, each once, out of {sorted(m.evicted.cached)}"
        return Finding(was, should, "the caller puts exactly these into its free list")
    asked = m.evicted.asked
    if asked is not None:
        if len(slots) < min(asked, m.evicted.num_evictable):
            was = f"asked for {asked} slots, {len(slots)} were evicted"
            should = f"at least {min(asked, m.evicted.num_evictable)}, as {m.evicted.num_evictable} were evictable"
            return Finding(was, should, "a request that could have run is turned away")
        if asked <= 0 and slots:
            return Finding(f"asked for {asked} slots, {len(slots)} were evicted", "none", "the room was not needed")
    return True


@checks("RADIX-15", CONTRACT, on=("match", "peek", "compare", "admit"))
def evicted_is_a_miss(m: PrefixCacheMoment) -> Outcome:
    evaluated = False
    size = m.config.page_size
    for match in m.matches:
        cells = match.text.cells
        for end in range(size - 1, len(cells), size):
            if cells[end] not in m.model.ever_evicted or cells[end] in m.model.tree:
                continue
            evaluated = True
            if match.length > end:
                was = f"position {end} was found, whose page has been evicted"
                should = f"a match of {len(match.path) * size} positions"
                return Finding(was, should, "the page holds something else by now, or will")
    return True if evaluated else None
