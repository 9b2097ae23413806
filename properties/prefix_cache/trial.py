"""The prefix cache's trial: each operation on the subject and on the model, then a full recount.

The trial is what stands around a prefix cache in an engine: it has the pool, computes what is not cached, and keeps the
request tables. Where the subject has a table and a pool of its own (`table`), it only watches.
"""

from __future__ import annotations

from typing import ClassVar

from ..harness.operation import Handles, Operation, operation
from ..harness.text import listed
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from . import unit_invariants as unit_invariants
from .contract import PrefixCache, PrefixCacheCapabilities, PrefixCacheConfig
from .model import HostUses, Matched, PrefixCacheModel, PrefixCacheMoment, Remembered
from .reading import observe
from .tables import TableOfSubject, TableOfSuite, hand_over, look_up
from .texts import Text, extras_of, text_of, texts_of

NAMES = Handles(("m", "n", "o"))
REQUESTS = Handles(("r1", "r2", "r3"))
NAMESPACES = ("", "lora-1", "1")


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
        "pages": texts_of,
        "extra": extras_of,
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
        self.requests = (TableOfSubject if self.capabilities.table else TableOfSuite)(self)
        self.moment = PrefixCacheMoment(self.config, self.capabilities, self.model)
        self.end()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        self.moment = PrefixCacheMoment(
            self.config, self.capabilities, self.model, operation, m.after, m.after, m.locks
        )

    def end(self) -> None:
        observe(self, self.model)
        answers = [match.slots or match.length for match in self.moment.matches]
        self.transcript.append(answers if self.moment.refusal is None else "refused")

    def text(self, pages: tuple[int, ...], extra: int, namespace: str) -> Text:
        return text_of(pages, extra, namespace, self.config.page_size, self.config.bigram)

    # -- looking up ---------------------------------------------------------------------------------------------------

    @operation(weight=8, when=_is_not_locked)
    def match(self, name: str, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Look a text up and remember the match as `name`, unlocked."""
        found = look_up(self, self.text(pages, extra, namespace))
        if found is not None:
            self.model.matches[name] = Remembered(*found)

    @operation(weight=3, needs="namespaces")
    def compare(self, pages: tuple[int, ...], extra: int, first: str, second: str) -> None:
        """Look one text up in two namespaces."""
        if look_up(self, self.text(pages, extra, first)) is not None:
            look_up(self, self.text(pages, extra, second))

    @operation(weight=2, needs="peek")
    def peek(self, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Ask how much of a text is cached, and change nothing."""
        text = self.text(pages, extra, namespace)
        length = self.integer(self.must(self.subject.peek, list(text.tokens), namespace), "peek()")
        self.moment.matches.append(Matched(text, length, None, self.model.match_of(text), ()))

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
    @operation(weight=5, pages=lambda c, has: () if has.table else texts_of(c, has))
    def insert(self, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Insert a text that was computed elsewhere, all of it, whether it is cached or not;
        free the copies at once."""
        text = self.text(pages, extra, namespace)
        num_pages = -(-len(text.cells) // self.config.page_size)
        self.only_if(num_pages <= len(self.model.free))
        table = [self.model.free.pop() for _ in range(num_pages)]
        self.model.compute(text, table, 0)
        done = hand_over(self, text, table, len(text.cells))
        if done is not None:
            self.model.give_back(table[len(done[1]) :])

    @operation(weight=4)
    def evict(self, num_slots: int) -> None:
        """Free `num_slots` slots, or all that can be."""
        self.let_evict(num_slots)

    def let_evict(self, num_slots: int) -> bool:
        """Let the subject evict. Returns whether the model can follow what it did."""
        answer = self.integers(self.must(self.subject.evict, num_slots), f"evict({num_slots})")
        size = self.config.page_size
        pages = list(dict.fromkeys(slot // size for slot in answer))
        evicted = self.moment.note_eviction(num_slots, answer, pages)
        if not self.capabilities.table:
            self.model.give_back(page for page in pages if page in evicted.cached)
        whole = len(pages) * size == len(answer) and set(pages) <= evicted.cached
        return whole and not evicted.locked.intersection(pages)

    # -- requests -----------------------------------------------------------------------------------------------------

    @operation(weight=8, when=lambda t, request: not _is_running(t, request))
    def admit(self, request: str, pages: tuple[int, ...], extra: int, namespace: str) -> None:
        """Start a request from what is cached of its text, lock that and compute the rest;
        turn it away if that does not fit."""
        text = self.text(pages, extra, namespace)
        self.only_if(text.tokens)
        self.requests.admit(request, text)

    @operation(weight=4, when=_can_share)
    def share(self, request: str, num_tokens: int) -> None:
        """Hand the first `num_tokens` positions of a running request over;
        it goes on with the cached ones and locks them."""
        running = self.model.running[request]
        self.requests.share(request, running, min(num_tokens, len(running.text.cells)))

    @operation(weight=5, when=_is_running)
    def finish(self, request: str) -> None:
        """End a request and hand over all that it has computed."""
        self.requests.leave(request, is_cached=True)

    @operation(weight=2, when=_is_running)
    def abort(self, request: str) -> None:
        """End a request and hand nothing over."""
        self.requests.leave(request, is_cached=False)

    @operation(weight=2, needs="table")
    def complete(self) -> None:
        """Process the step in flight."""
        self.carry_out(self.subject.complete)

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
        with self.stage("drained"):
            pass

    def describe(self) -> str:
        m = self.moment
        said = [f"-> {listed(match.slots) if match.slots is not None else match.length}" for match in m.matches]
        if m.evicted is not None:
            said.append(f"evicts {listed(m.evicted.slots)}")
        if m.inserted is not None:
            said.append(f"cached in {listed(m.inserted.canonical)}")
        return ", ".join(said) or "done"
