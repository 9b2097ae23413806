"""The allocator's trial: each operation on the subject and on the model, then a full recount."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from ..harness.operation import Handles, Operation, operation
from ..harness.text import listed
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import Allocator, AllocatorCapabilities, AllocatorConfig
from .model import AllocatorModel, AllocatorMoment
from .reading import observe, read_tables

HOLDERS = Handles("abcd")
REQUESTS = Handles(("r1", "r2", "r3"))
BATCHES = ((1,), (2,), (1, 2), (3, 1), (2, 3, 1))
MAX_IN_FLIGHT = 3


def _amounts(config: AllocatorConfig, has: AllocatorCapabilities) -> list[int]:
    """Return numbers of slots to ask for: mostly whole pages, few or all of them;
    with `misuse` sometimes parts of pages, or below 0."""
    size, pages = config.page_size, config.num_pages
    whole = [n * size for n in (1, 1, 1, 1, 1, 0, 2, 2, 2, 3, max(pages - 1, 0), pages, pages + 1)]
    if not has.misuse:
        return whole
    return whole * 7 + [1, size + 1, -1, -size, size * pages + 1, size * (pages + 1)]


def _tokens(config: AllocatorConfig, has: AllocatorCapabilities) -> list[int]:
    """Return lengths of a row: at a page's edge, one before and one behind it; over several pages;
    at the row's width and past it."""
    edges = [n * config.page_size + d for n in range(4) for d in (-1, 0, 1)]
    return sorted({n for n in (*edges, config.row_width, config.row_width + 1) if n >= 0})


def _strays(config: AllocatorConfig, has: AllocatorCapabilities) -> list[tuple[int, ...]]:
    """Return one page or two, in the pool and around it."""
    pages = range(-1, config.num_pages + 2)
    return [(page,) for page in pages] + [(a, b) for a in pages for b in pages]


def _can_give(t: AllocatorTrial, holder: str, num_pages: int) -> bool:
    return holder in t.model.holders and num_pages > 0


def _one_is_stray(t: AllocatorTrial, pages: tuple[int, ...]) -> bool:
    # An allocator cannot know who frees a page. So one of them must have no holder, and wait for no step either.
    return not all(page in t.moment.held or page in t.moment.waiting for page in pages)


def _has_row(t: AllocatorTrial, request: str) -> bool:
    return request in t.model.rows


def _may_need(t: AllocatorTrial, request: str, num_tokens: int) -> bool:
    return request in t.model.rows and num_tokens >= 0


class AllocatorTrial(Trial):
    """An allocator and its model, and what both show.
    A state that is impossible for the subject is a Violation at once."""

    contract = "allocator"
    looks = (
        *("num_free", "free_pages", "cached_pages", "num_deferred"),
        *("references", "slots_of", "units_of", "used_units"),
    )
    quick = 60_000
    parts: ClassVar = {"units of layer groups": "groups"}
    values: ClassVar = {
        "holder": HOLDERS,
        "new": HOLDERS,
        "request": REQUESTS,
        "batch": BATCHES,
        "num_slots": _amounts,
        "num_pages": (1, 2, 3),
        "num_tokens": lambda c, has: (1, 2, c.page_size, c.page_size + 1),
    }

    subject: Allocator
    config: AllocatorConfig
    capabilities: AllocatorCapabilities
    moment: AllocatorMoment

    def prepare(self) -> None:
        self.model = AllocatorModel(self.config.page_size, self.config.unit_groups)
        first = 1 if self.capabilities.padding_page else 0
        self._pages = range(first, first + self.config.num_pages)
        self._known = self.config, self.capabilities, self.model, frozenset(self._pages)
        super().prepare()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        """Forget the last operation; what was after it is now before."""
        m, last = AllocatorMoment(*self._known, operation), self.moment
        if last is not None:  # of an operation that is left out nothing is observed
            m.before, m.held_before, m.waiting_before = m.after, m.held, m.waiting = last.after, last.held, last.waiting
        self.moment = m

    def end(self) -> None:
        observe(self, self.model, self._pages)
        m = self.moment
        self.transcript.append(m.answer if m.refusal is None else "refused")

    def _available(self) -> int:
        """Return how many slots are free or can be evicted."""
        return self.moment.before.num_free + len(self.model.cached) * self.config.page_size

    def _request(self, num_slots: int, fits: bool, method: Callable[..., object], *arguments: object) -> object | None:
        """Ask for `num_slots` more slots, and note whether they must be granted. Returns the answer, None if they were
        refused. `fits`: whether what is not in the pool of pages has room for them."""
        m = self.moment
        m.asked = num_slots
        if fits:
            m.allowed = bool(self.must(self.subject.can_allocate, num_slots))
        m.must_succeed = fits and 0 <= num_slots <= self._available() and num_slots % self.config.page_size == 0
        m.must_refuse = not m.must_succeed
        answer = self.ask(method, *arguments)
        return None if self.refused(answer, None, False) else answer

    # -- pages --------------------------------------------------------------------------------------------------------

    @operation(weight=10)
    def alloc(self, holder: str, num_slots: int) -> None:
        """Let `holder` take `num_slots` more slots."""
        answer = self._request(num_slots, True, self.subject.alloc, num_slots)
        if answer is not None:
            self.moment.answer = self.integers(answer, f"alloc({num_slots})")
            self.model.give(holder, self.moment.answer)

    @operation(weight=7, when=_can_give, num_pages=lambda c, has: (1, 1, 2, c.num_pages))
    def free(self, holder: str, num_pages: int) -> None:
        """Let `holder` give back its last `num_pages` pages, or all that it has."""
        self.carry_out(self.subject.free, self.model.cut(holder, num_pages).slots)

    @operation(weight=2, needs="misuse", probes="ALLOC-10", when=_one_is_stray, pages=_strays)
    def free_stray(self, pages: tuple[int, ...]) -> None:
        """Free pages of which at least one is not held. Must be refused."""
        self.refused(self.ask(self.subject.free, self.model.slots_of(pages)))

    @operation(weight=1, needs="misuse", probes="ALLOC-10", when=lambda t, holder: holder in t.model.holders)
    def free_twice(self, holder: str) -> None:
        """Let `holder` give back its last page, named twice in one call: one reference less, or a refusal."""
        giver = self.model.holders[holder]
        self.moment.twice = giver.pages[-1]
        slots = giver.slots[-self.config.page_size :]
        if not self.refused(self.ask(self.subject.free, slots + slots)):
            self.model.cut(holder, 1)

    @operation(
        needs="sharing", weight=3, when=lambda t, holder, new: holder in t.model.holders and new not in t.model.holders
    )
    def fork(self, holder: str, new: str, num_pages: int) -> None:
        """Make `new` one more holder of the first `num_pages` pages of `holder`."""
        self.only_if(num_pages > 0)
        source, stop = self.model.holders[holder], num_pages * self.config.page_size
        self.carry_out(self.subject.share, source.slots[:stop])
        self.model.give(new, source.slots[:stop], source.cells[:stop])

    @operation(needs="eviction", weight=4, when=_can_give)
    def retire(self, holder: str, num_pages: int) -> None:
        """Let `holder` give back its last `num_pages` pages, whose content may be kept."""
        gone = self.model.cut(holder, num_pages)
        self.carry_out(self.subject.retire, gone.slots)
        self.model.retire(gone)

    @operation(
        needs="eviction",
        weight=2,
        when=lambda t, holder, num_pages: bool(t.model.cached) and num_pages > 0,
        num_pages=(1, 2),
    )
    def reuse(self, holder: str, num_pages: int) -> None:
        """Let `holder` take the `num_pages` cached pages with the lowest ids."""
        pages = sorted(self.model.cached)[:num_pages]
        slots = self.model.slots_of(pages)
        self.carry_out(self.subject.reuse, slots)
        self.model.give(holder, slots, [cell for page in pages for cell in self.model.cached.pop(page)])

    @operation(needs="eviction", weight=1, num_pages=lambda c, has: (0, 1, 2, c.num_pages))
    def evict(self, num_pages: int) -> None:
        """Free `num_pages` cached pages, or all that are cached."""
        num_cached = len(self.model.cached)
        self.carry_out(self.subject.evict, num_pages)
        # A flush that leaves something is ALLOC-15, when all is drained.
        if num_pages < self.config.num_pages:
            num_left = len(self.integers(self.must(self.subject.cached_pages), "cached_pages()"))
            evicted, wanted = num_cached - num_left, min(num_pages, num_cached)
            if evicted < wanted:
                raise self.misbehaviour("CAPABILITY", f"{evicted} pages were evicted", f"at least {wanted}")

    # -- batches of requests whose last pages need not be full ---------------------------------------------------------

    @operation(needs="batches", weight=5)
    def extend(self, batch: tuple[int, ...], num_tokens: int) -> None:
        """Give the first request of the batch `num_tokens` slots more, each other one more than the one before."""
        self.only_if(batch and len(set(batch)) == len(batch) and num_tokens > 0)
        self._extend(batch, range(num_tokens, num_tokens + len(batch)), is_decode=False)

    @operation(needs="batches", weight=6)
    def decode(self, batch: tuple[int, ...]) -> None:
        """Give each request of the batch that has slots one more."""
        batch = tuple(number for number in dict.fromkeys(batch) if f"b{number}" in self.model.parts)
        self.only_if(batch)
        self._extend(batch, [1] * len(batch), is_decode=True)

    def _extend(self, batch: Sequence[int], num_tokens: Sequence[int], *, is_decode: bool) -> None:
        size, parts = self.config.page_size, self.model.parts
        names = [f"b{number}" for number in batch]
        before = [len(parts[name].slots) if name in parts else 0 for name in names]
        lengths = [length + more for length, more in zip(before, num_tokens, strict=True)]
        last = [parts[name].slots[-1] if name in parts else -1 for name in names]
        asked = sum(-(-n // size) + -b // size for n, b in zip(lengths, before, strict=True)) * size
        call = (self.subject.alloc_decode,) if is_decode else (self.subject.alloc_extend, before)
        answer = self._request(asked, True, *call, lengths, last)
        if answer is None:
            return
        slots = self.integers(answer, "the slots of a batch")
        if len(slots) != sum(num_tokens):
            message = f"{len(slots)} slots for {sum(num_tokens)} tokens"
            raise self.misbehaviour("ANSWER", message, "a slot for each token")
        self.moment.parts = tuple(zip(names, before, strict=True))
        given = iter(slots)
        for name, more in zip(names, num_tokens, strict=True):
            part = parts.get(name) or parts.setdefault(name, self.model.new_holder())
            part.slots += islice(given, more)
            part.pages = self.model.pages_of(part.slots)
            self.model.write(part)

    @operation(needs="batches", weight=3, when=lambda t, number: f"b{number}" in t.model.parts, number=(1, 2, 3))
    def give_back(self, number: int) -> None:
        """Let a request of the batches leave, with all its slots; its last page need not be full."""
        self.carry_out(self.subject.free, self.model.parts.pop(f"b{number}").slots)

    # -- steps in flight ----------------------------------------------------------------------------------------------

    @operation(needs="deferred_close", weight=2)
    @operation(needs="deferred_free", weight=2, when=lambda t: t.model.num_in_flight < MAX_IN_FLIGHT)
    def launch(self) -> None:
        """Begin a step, which may touch every held page."""
        self.model.launched += 1

    @operation(needs="deferred_close", weight=2)
    @operation(needs="deferred_free", weight=2, when=lambda t: t.model.num_in_flight > 0)
    def complete(self) -> None:
        """Process the oldest step."""
        self.model.complete()
        self.carry_out(self.subject.complete, self.model.completed)

    @operation(
        needs="deferred_free", weight=3, when=lambda t, holder: holder in t.model.holders and t.model.num_in_flight
    )
    def free_after(self, holder: str) -> None:
        """Let `holder` give back all that it has while the newest step may still touch it."""
        giver = self.model.holders.pop(holder)
        self.carry_out(self.subject.free_after, giver.slots, self.model.launched)
        self.model.deferred.append((self.model.launched, giver, False))

    # -- rows ----------------------------------------------------------------------------------------------------------

    @operation(needs="table", weight=3, when=lambda t, request: not _has_row(t, request))
    def open(self, request: str) -> None:
        """Give a request a row."""
        m = self.moment
        pages = self.model.pages_for([0 if group.window else group.states for group in self.model.groups])
        m.row_was_free = self.model.num_rows_taken < self.config.num_rows and pages is not None
        m.row_was_free = m.row_was_free and pages * self.config.page_size <= self._available()
        m.row_granted = not self.refused(self.ask(self.subject.open, request))
        if m.row_granted:
            row = self.model.rows[request] = self.model.new_holder()
            if self.config.groups:
                self.use({"units of layer groups": True})
                row.units = read_tables(self, request)
                self.model.units.write(row, 0, 0)

    @operation(needs="table", weight=7, when=_may_need, num_tokens=_tokens)
    def grow(self, request: str, num_tokens: int) -> None:
        """Extend a row to `num_tokens` tokens past what is committed."""
        row, size = self.model.rows[request], self.config.page_size
        target = row.committed + num_tokens
        pages = max(-(-target // size) - len(row.slots) // size, 0)
        for_units = self.model.pages_for([pages if group.window else 0 for group in self.model.groups])
        fits = target <= self.config.row_width and for_units is not None
        asked = (pages + (for_units or 0)) * size
        if self._request(asked, fits, self.subject.grow, request, target) is not None:
            row.wanted = max(row.wanted, target)

    @operation(needs="table", weight=4, when=_may_need)
    def commit(self, request: str, num_tokens: int) -> None:
        """Make `num_tokens` more tokens of a request final, or as many as fit."""
        row = self.model.rows[request]
        start, stop = row.committed, min(row.committed + num_tokens, len(row.slots))
        self.only_if(stop > start)
        self.model.write(row, stop)
        row.committed = stop
        row.wanted = max(row.wanted, stop)
        if self.config.groups:
            self.model.units.write(row, start, stop)
            self.carry_out(self.subject.advance, request, stop)

    @operation(needs="table", weight=2, when=_may_need, num_tokens=lambda c, has: (0, 0, 1, c.page_size))
    def trim(self, request: str, num_tokens: int) -> None:
        """Trim a row to `num_tokens` tokens past what is committed."""
        row = self.model.rows[request]
        target = row.committed + num_tokens
        self.carry_out(self.subject.trim, request, target)
        row.wanted = min(row.wanted, target)

    @operation(needs="table", weight=2, when=_has_row)
    def close(self, request: str) -> None:
        """Let the request leave; its row may be in use by the newest step, if there is one."""
        row = self.model.rows.pop(request)
        if self.capabilities.deferred_close and self.model.num_in_flight:
            self.carry_out(self.subject.close, request, self.model.launched)
            self.model.deferred.append((self.model.launched, row, True))
        else:
            self.carry_out(self.subject.close, request)

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give everything back, complete all steps, flush the cache; then take the whole pool and give it back."""
        total = self.config.num_pages
        for name, holder in list(self.model.holders.items()):
            self.free(name, len(holder.pages))
        for name in list(self.model.rows):
            self.close(name)
        for name in list(self.model.parts):
            self.give_back(int(name[1:]))
        while self.model.num_in_flight:
            self.complete()
        if self.capabilities.eviction:
            self.evict(total)
        with self.stage("drained") as m:
            m.drained = True
        for _ in range(total + 1):
            self.alloc("everything", self.config.page_size)
        if total:
            self.free("everything", total)
        with self.stage("drained") as m:
            m.drained = True

    def describe(self) -> str:
        answer = self.moment.answer
        return super().describe() if answer is None else f"-> {listed(answer)}"
