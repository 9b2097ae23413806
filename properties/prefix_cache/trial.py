"""The prefix cache's trial: each operation on the subject and on the model, then a full recount.

The trial is what stands around a prefix cache in an engine: it has the pool, computes what is not cached, and keeps the
request tables. Where the subject has a table and a pool of its own (`table`), it only watches.

A text is written as kinds of pages and what stands behind them: `pages` (0, 1) with `extra` 2 are a page of kind 0, one
of kind 1 and two more tokens. A negative `extra` takes tokens off the end. So an operation keeps its meaning when the
page size gets smaller.
"""

from __future__ import annotations

from itertools import product
from typing import ClassVar

from ..harness.operation import Handles, Operation, operation
from ..harness.text import listed
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from . import unit_invariants as unit_invariants
from .contract import PrefixCache, PrefixCacheCapabilities, PrefixCacheConfig
from .model import (
    HUGE_KIND,
    Evicted,
    HostUses,
    Inserted,
    Matched,
    Path,
    PrefixCacheModel,
    PrefixCacheMoment,
    Remembered,
    RunningRequest,
    Text,
    text_of,
)
from .reading import look_into_host, observe, read_inserted, read_match, read_nodes, read_slots

NAMES = Handles(("m", "n", "o"))
REQUESTS = Handles(("r1", "r2", "r3"))
NAMESPACES = ("", "lora-1", "1")
# Texts of two kinds of pages that branch everywhere; the other kinds differ from the first by one token only.
TEXTS = (
    *((), (0,), (0,), (1,), (2,), (3,)),
    *(*product((0, 1), repeat=2), (0, 2), (0, 3), *product((0, 1), repeat=3), (0, 0, 0, 0), (0, 1, 0, 1)),
)
HUGE_TEXTS = ((HUGE_KIND,), (0, HUGE_KIND))


def _texts(config: PrefixCacheConfig, has: PrefixCacheCapabilities) -> tuple[tuple[int, ...], ...]:
    return TEXTS + HUGE_TEXTS if has.wide_ids else TEXTS


def _extras(config: PrefixCacheConfig, has: PrefixCacheCapabilities) -> list[int]:
    # A bigram's last page needs the token behind it.
    return sorted({-1, 0, 1, config.page_size - 1}) + [int(config.bigram)] * 3


def _amounts(config: PrefixCacheConfig, has: PrefixCacheCapabilities) -> tuple[int, ...]:
    size, whole = config.page_size, config.num_pages * config.page_size
    return (0, -1 if has.misuse else 0, 1, 1, size, size, 2 * size, size + 1, whole, whole + 1)


def _is_not_locked(t: PrefixCacheTrial, name: str) -> bool:
    return name not in t.model.matches or not t.model.matches[name].locks


def _can_lock(t: PrefixCacheTrial, name: str) -> bool:
    # A lock of what was evicted and is back is as good as a refusal: the caller's slots hold what it found in them.
    match = t.model.matches.get(name)
    if match is None:
        return False
    return not t.model.is_stale(match.path) or not (t.capabilities.unchecked_locks or t.model.is_back(match.path))


def _is_stray(t: PrefixCacheTrial, name: str) -> bool:
    # A cache cannot tell whether a path that others have locked, as it is or further down, was locked by this caller.
    match = t.model.matches.get(name)
    return match is not None and bool(match.path) and match.path[-1].page not in t.moment.locks


def _is_running(t: PrefixCacheTrial, request: str) -> bool:
    return request in t.model.running


def _can_share(t: PrefixCacheTrial, request: str, num_tokens: int) -> bool:
    running = t.model.running.get(request)
    if running is None:
        return False
    return min(num_tokens, len(running.text.cells)) // t.config.page_size > len(running.path)


class PrefixCacheTrial(Trial):
    """`subject` and its model under operations."""

    contract = "prefix-cache"
    looks = ("num_evictable", "num_protected", "free_slots", "nodes", "slots_of")
    quick = 40_000
    refuses_by_violation = True
    parts: ClassVar = {"units of layer groups": "groups"}
    values: ClassVar = {
        "name": NAMES,
        "request": REQUESTS,
        "pages": _texts,
        "extra": _extras,
        "namespace": lambda c, has: ("", "", *NAMESPACES) if has.namespaces else ("",),
        "first": NAMESPACES,
        "second": NAMESPACES,
        "num_slots": _amounts,
        "num_tokens": lambda c, has: sorted({n * c.page_size + d for n in (1, 2, 3) for d in (-1, 0, 1)}),
    }

    subject: PrefixCache
    config: PrefixCacheConfig
    capabilities: PrefixCacheCapabilities
    moment: PrefixCacheMoment

    def prepare(self) -> None:
        policy = self.config.policy if self.capabilities.policies else "lru"
        self.model = PrefixCacheModel(self.config.num_pages, self.config.page_size, policy, self.config.unit_groups)
        self.model.host = HostUses(self.config.host_pages, self.config.page_size)
        self.moment = PrefixCacheMoment(self.config, self.capabilities, self.model)
        self.end()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        self.moment = PrefixCacheMoment(
            self.config, self.capabilities, self.model, operation, m.after, m.after, m.locks
        )

    def end(self) -> None:
        m = self.moment
        observe(self, self.model)
        answers = [match.slots or match.length for match in m.matches]
        self.transcript.append(answers if m.refusal is None else "refused")

    def text(self, pages: tuple[int, ...], extra: int, namespace: str) -> Text:
        return text_of(pages, extra, namespace, self.config.page_size, self.config.bigram)

    # -- looking up ---------------------------------------------------------------------------------------------------

    @operation(weight=8, when=_is_not_locked)
    def match(self, name: str, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Look a text up and remember the match as `name`, unlocked."""
        found = self._look_up(self.text(pages, extra, namespace))
        if found is not None:
            self.model.matches[name] = Remembered(*found)

    @operation(weight=3, needs="namespaces")
    def compare(self, pages: tuple[int, ...], extra: int, first: str, second: str) -> None:
        """Look one text up in two namespaces."""
        if self._look_up(self.text(pages, extra, first)) is not None:
            self._look_up(self.text(pages, extra, second))

    @operation(weight=2, needs="peek")
    def peek(self, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Ask how much of a text is cached, and change nothing."""
        text = self.text(pages, extra, namespace)
        length = self.integer(self.must(self.subject.peek, list(text.tokens), namespace), "peek()")
        self.moment.matches.append(Matched(text, length, None, self.model.match_of(text), ()))

    def _look_up(self, text: Text) -> tuple[object, Path] | None:
        """Match a text on both: the subject's handle and the model's path, None where the two differ."""
        answer = self.must(self.subject.match, list(text.tokens), text.namespace)
        handle, slots = read_match(self, answer)
        path = self._matched(text, slots)
        if self.moment.matches[-1].slots != self.moment.slots_of([cached.page for cached in path]):
            return None
        return handle, path

    def _matched(self, text: Text, slots: tuple[int, ...], num_positions: int | None = None) -> Path:
        """Note what the subject has found, and return what is cached."""
        path = self.model.match_of(text, num_positions)
        self.model.use(path, hit=True)
        self.moment.matches.append(Matched(text, len(slots), slots, path, tuple(map(self.model.memory.get, slots))))
        return path

    # -- locks --------------------------------------------------------------------------------------------------------

    @operation(weight=5, when=_can_lock)
    def lock(self, name: str) -> None:
        """Lock what the match `name` found, or be refused if a page of it has been evicted since."""
        m, match = self.moment, self.model.matches[name]
        m.locked = match.path
        m.stale = self.model.is_stale(match.path)
        if m.stale:
            self.refused(self.ask(self.subject.lock, match.handle))
        else:
            self.carry_out(self.subject.lock, match.handle)
            match.locks += 1

    @operation(weight=4, when=lambda t, name: not _is_not_locked(t, name))
    def unlock(self, name: str) -> None:
        """Take a lock of the match `name` back."""
        match = self.model.matches[name]
        self.carry_out(self.subject.unlock, match.handle)
        match.locks -= 1

    @operation(weight=2, needs="misuse", when=_is_stray, probes="RADIX-02")
    def unlock_stray(self, name: str) -> None:
        """Unlock the match `name`, which is not locked. Must be refused."""
        self.refused(self.ask(self.subject.unlock, self.model.matches[name].handle))

    # -- insertion and eviction ---------------------------------------------------------------------------------------

    # A subject with a pool takes no pages but its own.
    @operation(weight=5, pages=lambda c, has: () if has.table else _texts(c, has))
    def insert(self, pages: tuple[int, ...], extra: int, namespace: str) -> bool | None:
        """Insert a text that was computed elsewhere, all of it, whether it is cached or not;
        free the copies at once."""
        text = self.text(pages, extra, namespace)
        num_pages = -(-len(text.cells) // self.config.page_size)
        if num_pages > len(self.model.free):
            return False
        table = self.take(num_pages)
        self.model.compute(text, table, 0)
        done = self._hand_over(text, table, len(text.cells))
        if done is not None:
            self.model.give_back(table[len(done[1]) :])
        return None

    @operation(weight=4)
    def evict(self, num_slots: int) -> None:
        """Free `num_slots` slots, or all that can be."""
        self._evict(num_slots)

    def _hand_over(self, text: Text, table: list[int], num_positions: int) -> tuple[object, Path] | None:
        """Insert the first positions of a table on both, and free the copies: handle and path, None where the two
        differ.

        The table then begins with the pages that are cached.
        """
        m = self.moment
        slots = list(m.slots_of(table)[:num_positions])
        answer = self.must(self.subject.insert, list(text.tokens), slots, text.namespace)
        handle, canonical, duplicates = read_inserted(self, answer)
        own = list(table)
        path = self._cache(text, table, num_positions)
        copies = [page for page, cached in zip(own, table, strict=True) if page != cached]
        m.inserted = Inserted(canonical, duplicates, m.slots_of(table[: len(path)]), m.slots_of(copies))
        if (canonical, duplicates) != m.inserted[2:]:
            return None
        self.model.give_back(copies)
        return handle, path

    def _cache(self, text: Text, table: list[int], num_positions: int) -> Path:
        """Cache the first positions of a table in the model, and let it begin with the pages of that path."""
        path = self.model.path_of(text, num_positions)
        self.model.use(path, hit=False)
        path = self.model.add(text, path, table[len(path) : num_positions // self.config.page_size])
        table[: len(path)] = [cached.page for cached in path]
        return path

    # -- the pool -----------------------------------------------------------------------------------------------------

    def take(self, num_pages: int) -> list[int] | None:
        """Take free pages, evicting if needed. Returns None if that does not suffice, or the
        eviction has gone wrong."""
        missing = num_pages - len(self.model.free)
        if missing > 0:
            evictable = len(self.model.tree) - len(self.model.locks())
            if missing > evictable or not self._evict(missing * self.config.page_size):
                return None
        if len(self.model.free) < num_pages:
            return None
        return [self.model.free.pop() for _ in range(num_pages)]

    def _evict(self, num_slots: int) -> bool:
        """Let the subject evict. Returns whether the model can follow what it did."""
        answer = self.integers(self.must(self.subject.evict, num_slots), f"evict({num_slots})")
        size = self.config.page_size
        pages = list(dict.fromkeys(slot // size for slot in answer))
        evicted = self.note_eviction(num_slots, answer, pages)
        if not self.capabilities.table:
            self.model.give_back(page for page in pages if page in evicted.cached)
        whole = len(pages) * size == len(answer) and set(pages) <= evicted.cached
        return whole and not evicted.locked.intersection(pages)

    def note_eviction(self, asked: int | None, slots: tuple[int, ...], pages: list[int]) -> Evicted:
        """Note in the moment what was evicted, and what should have been; the model loses these pages."""
        model = self.model
        locked = frozenset(model.locks())
        cached = frozenset(self.moment.cached_pages())
        evictable = (len(cached) - len(locked & cached)) * self.config.page_size
        order = tuple(model.evicted_next(len(pages))) if self.capabilities.lru else ()
        self.moment.evicted = Evicted(asked, evictable, slots, cached, locked, order)
        model.remove(pages)
        return self.moment.evicted

    # -- requests -----------------------------------------------------------------------------------------------------

    @operation(weight=8, when=lambda t, request: not _is_running(t, request))
    def admit(self, request: str, pages: tuple[int, ...], extra: int, namespace: str) -> bool | None:
        """Start a request from what is cached of its text, lock that and compute the rest;
        turn it away if that does not fit."""
        text = self.text(pages, extra, namespace)
        if not text.tokens:
            return False
        if self.capabilities.table:
            return self._admit_by_subject(request, text)
        found = self._look_up(text)
        if found is None:
            return None
        handle, path = found
        self.carry_out(self.subject.lock, handle)
        running = RunningRequest(text, handle, path, [cached.page for cached in path])
        self.model.running[request] = running  # its lock counts from here on
        taken = self.take(-(-len(text.cells) // self.config.page_size) - len(path))
        if taken is None:
            # It is turned away, so what was locked for it is given back.
            del self.model.running[request]
            self.carry_out(self.subject.unlock, handle)
        else:
            self.moment.locked = path
            running.table += taken
            self.model.compute(text, running.table, len(path))
        return None

    @operation(weight=4, when=_can_share)
    def share(self, request: str, num_tokens: int) -> None:
        """Hand the first `num_tokens` positions of a running request over;
        it goes on with the cached ones and locks them."""
        running = self.model.running[request]
        num_positions = min(num_tokens, len(running.text.cells))
        if self.capabilities.table:
            self.carry_out(self.subject.publish, request, num_positions)
            self._hands_over(request, running, num_positions)
            running.path = self._cache(running.text, running.table, num_positions)
            if self.config.groups:
                self._follow_evictions()  # for a state of the request in the place of that which the cache gets
            look_into_host(self, running.text, num_positions)
            self.moment.should_share = (request, running.path)
            return
        done = self._hand_over(running.text, running.table, num_positions)
        if done is not None:
            before = running.handle
            running.handle, running.path = done
            self.carry_out(self.subject.lock, running.handle)
            self.carry_out(self.subject.unlock, before)
            self.moment.locked = running.path

    @operation(weight=5, when=_is_running)
    def finish(self, request: str) -> None:
        """End a request and hand over all that it has computed."""
        self._leave(request, is_cached=True)

    @operation(weight=2, when=_is_running)
    def abort(self, request: str) -> None:
        """End a request and hand nothing over."""
        self._leave(request, is_cached=False)

    def _leave(self, request: str, is_cached: bool) -> None:
        running = self.model.running[request]
        text, table, path = running.text, running.table, running.path
        num_positions = len(text.cells) if is_cached else 0
        if self.capabilities.table:
            self.carry_out(self.subject.leave, request, num_positions)
            self.model.host.may_use(text)
            del self.model.running[request]
            # A request with nothing new to hand over does not use what is there once more.
            if num_positions // self.config.page_size > len(path):
                self._hands_over(request, running, num_positions)
                path = self._cache(text, table, num_positions)
                self.moment.to_be_found = path, min(running.branch or len(path), len(path))
                look_into_host(self, text, num_positions)
            return
        if is_cached:
            done = self._hand_over(text, table, num_positions)
            if done is None:
                return
            path = done[1]
        self.carry_out(self.subject.unlock, running.handle)
        del self.model.running[request]
        self.model.give_back(table[len(path) :])

    # -- where the subject keeps the tables ---------------------------------------------------------------------------

    @operation(weight=2, needs="table")
    def complete(self) -> None:
        """Process the step in flight."""
        self.carry_out(self.subject.complete)

    def _hands_over(self, request: str, running: RunningRequest, num_positions: int) -> None:
        """Note who hands over which positions, for the units of groups of layers."""
        self.use({"units of layer groups": self.config.groups})
        self.moment.giver = request, frozenset(running.text.cells[:num_positions])
        running.committed = num_positions
        if running.branch <= num_positions // self.config.page_size and request in self.model.running:
            running.branch = 0

    def _admit_by_subject(self, request: str, text: Text) -> None:
        m, size = self.moment, self.config.page_size
        known = len(self.model.path_of(text, len(text.tokens) - 1))
        answer = self.ask(self.subject.admit, request, list(text.tokens), text.namespace)
        self.model.host.may_use(text)
        if self.refused(answer, None, False):
            self.model.use(self.model.match_of(text, len(text.tokens) - 1), hit=True)
            return
        length = self.integer(answer, "admit()")
        slots = read_slots(self, request)
        path = m.locked = self._matched(text, slots[:length], len(text.tokens) - 1)
        running = RunningRequest(text, None, path, [slot // size for slot in slots[::size]])
        self.model.running[request] = m.entered = running
        m.giver = request, frozenset()
        running.begun = running.committed = length
        running.branch = known if known > len(path) else 0
        self._follow_evictions()
        self.model.compute(text, running.table, len(path))

    def _follow_evictions(self) -> None:
        """Note what the subject has evicted to make room: it is no longer in its tree."""
        m, size = self.moment, self.config.page_size
        shown = {slot // size for node in read_nodes(self) for slot in node.slots}
        gone = [page for page in m.cached_pages() if page not in shown]
        if gone:
            self.note_eviction(None, m.slots_of(gone), gone)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take every lock back, let every request leave, evict everything."""
        for name, match in list(self.model.matches.items()):
            while match.locks:
                self.unlock(name)
        for number, name in enumerate(list(self.model.running)):
            (self.finish if number % 2 else self.abort)(name)
        if self.capabilities.table:
            self.complete()
        self.evict(self.config.num_pages * self.config.page_size)
        self.operation = "drained"
        self.begin(self.operation)
        self.end()
        self.check()

    def describe(self) -> str:
        m = self.moment
        said = [f"-> {listed(match.slots) if match.slots is not None else match.length}" for match in m.matches]
        if m.evicted is not None:
            said.append(f"evicts {listed(m.evicted.slots)}")
        if m.inserted is not None:
            said.append(f"cached in {listed(m.inserted.canonical)}")
        return ", ".join(said) or "done"
