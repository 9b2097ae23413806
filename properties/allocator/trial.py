"""The allocator's trial: each operation on the subject and on the model, then a full recount."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from ..canary import ShadowMemory, contents
from ..invariants.registry import Invariant
from ..trial import Refused, Trial, check_methods
from . import operations as ops
from .contract import METHODS, Allocator, AllocatorCapabilities, AllocatorConfig
from .model import AllocatorModel, Holder
from .moment import Moment, Observation

MAX_IN_FLIGHT = 3
_NOBODY: dict[int, int] = {}


class AllocatorTrial(Trial):
    """`subject` under operations. A state of the model that is impossible for the subject is a Violation at once."""

    def __init__(
        self,
        subject: Allocator,
        config: AllocatorConfig,
        capabilities: AllocatorCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(invariants)
        check_methods(subject, METHODS, capabilities)
        self.subject = subject
        self.config = config
        self.capabilities = capabilities
        self.model = AllocatorModel(config.page_size)
        self.memory = ShadowMemory()
        self.saved: dict[str, tuple[object, AllocatorModel, Observation]] = {}
        first = 1 if capabilities.padding_page else 0
        self._all_pages = range(first, first + config.num_pages)
        self.moment = Moment(config, capabilities, self.model, frozenset(self._all_pages))
        self._observe()
        self.check()

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self, operation: ops.Operation) -> Moment:
        """Forget the last operation; what was after it is now before."""
        m = self.moment
        m.operation = operation
        m.asked = m.answer = m.refusal = m.allowed = m.twice = m.row_granted = None
        m.must_succeed = m.must_refuse = False
        m.before, m.held_before, m.waiting_before = m.after, m.held, m.waiting
        return m

    def _end(self) -> bool:
        self._observe()
        m = self.moment
        self.transcript.append(m.answer if m.refusal is None else "refused")
        return True

    def _observe(self) -> None:
        """Ask the subject for all that it shows, and recount the model."""
        subject, has, model, m = self.subject, self.capabilities, self.model, self.moment
        free = cached = deferred = references = rows = None
        try:
            method = subject.num_free
            num_free = method()
            if has.inspection:
                method = subject.free_pages
                free = method()
            if has.eviction:
                method = subject.cached_pages
                cached = method()
            if has.deferred_free or has.deferred_close:
                method = subject.num_deferred
                deferred = method()
            if has.sharing:
                method = subject.references
                references = [method(page) for page in self._all_pages]
        except Exception as error:
            raise self._accident(method, error) from error
        num_free = self.integer(num_free, "num_free()")
        if has.inspection:
            free = self.integers(free, "free_pages()")
        if has.eviction:
            cached = self.integers(cached, "cached_pages()")
            self._follow_the_cache(cached)
        if has.deferred_free or has.deferred_close:
            deferred = self.integer(deferred, "num_deferred()")
        if has.sharing:
            references = self.integers(references, "references()")
        if has.table:
            rows = tuple([(name, self._row(name, row)) for name, row in model.rows.items()])
        m.after = Observation(num_free, free, cached, deferred, references, rows)
        m.held = model.held()
        m.waiting = model.waiting() if model.deferred else _NOBODY
        m.stale = None
        read = self.memory.read
        for holder in model.everybody():
            cells = holder.cells
            if cells and read(holder.slots[: len(cells)]) != cells:
                m.stale = self._first_stale()
                break

    def _follow_the_cache(self, cached: tuple[int, ...]) -> None:
        """What the subject no longer caches, it has evicted; that it may do. What it caches beyond the retired pages, it may not."""
        model, m = self.model, self.moment
        m.not_cacheable = tuple(page for page in cached if page not in model.cached)
        if len(cached) != len(model.cached):
            kept = frozenset(cached)
            model.cached = {page: cells for page, cells in model.cached.items() if page in kept}

    def _row(self, name: str, row: Holder) -> tuple[int, ...]:
        slots = self.integers(self.must(self.subject.slots_of, name), f"slots_of({name!r})")
        row.slots = list(slots)
        row.pages = self.model.pages_of(slots)
        return slots

    def _first_stale(self) -> tuple | None:
        for kind, group in (("holder", self.model.holders), ("request", self.model.rows)):
            for name, holder in group.items():
                count = len(holder.cells)
                if len(holder.slots) < count:
                    return f"{kind} {name}", None, "no slot", holder.cells[len(holder.slots)]
                wrong = self.memory.first_wrong(holder.slots[:count], holder.cells)
                if wrong is not None:
                    return f"{kind} {name}", *wrong
        return None

    def _answer(self, answer: object, what: str) -> tuple[int, ...] | None:
        """Take an answer that may be a refusal: slots, or None with the reason in the moment."""
        if answer is None or isinstance(answer, Refused):
            self.moment.refusal = "None" if answer is None else answer.reason
            return None
        self.moment.answer = self.integers(answer, what)
        return self.moment.answer

    def _may_be_refused(self, method, *arguments: object) -> bool:
        """Whether it was carried out, for methods that return nothing (or False for no)."""
        answer = self.ask(method, *arguments)
        if isinstance(answer, Refused):
            self.moment.refusal = answer.reason
            return False
        if answer is False:
            self.moment.refusal = "False"
            return False
        return True

    def _expect(self, num_slots: int, *, possible: bool) -> None:
        """What must become of a wish for so many slots."""
        m = self.moment
        available = m.before.num_free + len(self.model.cached) * self.config.page_size
        grantable = possible and num_slots <= available and num_slots % self.config.page_size == 0
        m.must_succeed, m.must_refuse = grantable, not grantable

    def _carries_out(self, method, *arguments: object) -> None:
        """Call what the contract gives no reason to refuse here."""
        if not self._may_be_refused(method, *arguments):
            raise self.misbehaviour(
                "RAISES", f"{self.operation} was refused: {self.moment.refusal}", "it is carried out"
            )

    # -- operations ---------------------------------------------------------------------------------------------------

    def _alloc(self, op: ops.Alloc) -> bool:
        m = self._begin(op)
        m.asked = op.num_slots
        m.allowed = bool(self.must(self.subject.can_allocate, op.num_slots))
        self._expect(op.num_slots, possible=op.num_slots >= 0)
        slots = self._answer(self.ask(self.subject.alloc, op.num_slots), f"alloc({op.num_slots})")
        if slots:
            holder = self.model.holder(op.holder)
            cells = contents(holder.owner, len(holder.cells), len(holder.cells) + len(slots))
            holder.slots += slots
            holder.pages += self.model.pages_of(slots)
            holder.cells += cells
            self.memory.write(slots, cells)
        return self._end()

    def _cut(self, name: str, num_pages: int) -> Holder | None:
        """The last pages of a holder, who no longer has them; None if there are none to take."""
        holder = self.model.holders.get(name)
        if holder is None or num_pages <= 0:
            return None
        gone = holder.cut(min(num_pages, len(holder.pages)), self.config.page_size)
        if not holder.pages:
            del self.model.holders[name]
        return gone

    def _free(self, op: ops.Free) -> bool:
        gone = self._cut(op.holder, op.num_pages)
        if gone is None:
            return False
        self._begin(op)
        self._carries_out(self.subject.free, gone.slots)
        return self._end()

    def _free_stray(self, op: ops.FreeStray) -> bool:
        # Who frees a page, no allocator can know. So one of them must be nobody's, and wait for no step either.
        if all(page in self.moment.held or page in self.moment.waiting for page in op.pages):
            return False
        self._begin(op)
        self._may_be_refused(self.subject.free, self.model.slots_of(op.pages))
        return self._end()

    def _free_twice(self, op: ops.FreeTwice) -> bool:
        holder = self.model.holders.get(op.holder)
        if holder is None:
            return False
        m = self._begin(op)
        m.twice = holder.pages[-1]
        slots = holder.slots[-self.config.page_size :]
        if self._may_be_refused(self.subject.free, slots + slots):
            self._cut(op.holder, 1)
        return self._end()

    def _fork(self, op: ops.Fork) -> bool:
        source = self.model.holders.get(op.holder)
        if source is None or op.new in self.model.holders or op.num_pages < 1:
            return False
        count = min(op.num_pages, len(source.pages))
        num_slots = count * self.config.page_size
        self._begin(op)
        self._carries_out(self.subject.share, source.slots[:num_slots])
        new = self.model.holder(op.new)
        new.pages, new.slots, new.cells = source.pages[:count], source.slots[:num_slots], source.cells[:num_slots]
        return self._end()

    def _retire(self, op: ops.Retire) -> bool:
        gone = self._cut(op.holder, op.num_pages)
        if gone is None:
            return False
        self._begin(op)
        self._carries_out(self.subject.retire, gone.slots)
        size, held, waiting = self.config.page_size, self.model.held(), self.model.waiting()
        for number, page in enumerate(gone.pages):
            if page not in held and page not in waiting:
                self.model.cached[page] = gone.cells[number * size : (number + 1) * size]
        return self._end()

    def _reuse(self, op: ops.Reuse) -> bool:
        pages = sorted(self.model.cached)[: max(op.num_pages, 0)]
        if not pages:
            return False
        self._begin(op)
        slots = self.model.slots_of(pages)
        self._carries_out(self.subject.reuse, slots)
        holder = self.model.holder(op.holder)
        holder.pages += pages
        holder.slots += slots
        for page in pages:
            holder.cells += self.model.cached.pop(page)
        return self._end()

    def _evict(self, op: ops.Evict) -> bool:
        if op.num_pages < 0:
            return False
        self._begin(op)
        self._carries_out(self.subject.evict, op.num_pages)
        wanted = min(op.num_pages, len(self.model.cached))
        before = len(self.model.cached)
        self._end()
        # A flush that leaves something is ALLOC-15, when all is drained.
        if op.num_pages < self.config.num_pages and before - len(self.model.cached) < wanted:
            raise self.misbehaviour(
                "CAPABILITY", f"{before - len(self.model.cached)} pages were evicted", f"at least {wanted}"
            )
        return True

    def _launch(self, op: ops.Launch) -> bool:
        if self.model.launched - self.model.completed >= MAX_IN_FLIGHT:
            return False
        self._begin(op)
        self.model.launched += 1
        return self._end()

    def _complete(self, op: ops.Complete) -> bool:
        if self.model.launched == self.model.completed:
            return False
        self._begin(op)
        self.model.complete()
        if self.capabilities.deferred_free or self.capabilities.deferred_close:
            self._carries_out(self.subject.complete, self.model.completed)
        return self._end()

    def _free_after(self, op: ops.FreeAfter) -> bool:
        if op.holder not in self.model.holders or self.model.launched == self.model.completed:
            return False
        self._begin(op)
        holder = self.model.holders.pop(op.holder)
        self._carries_out(self.subject.free_after, holder.slots, self.model.launched)
        self.model.deferred.append((self.model.launched, holder, False))
        return self._end()

    def _snapshot(self, op: ops.Snapshot) -> bool:
        m = self._begin(op)
        self.saved[op.name] = (self.must(self.subject.snapshot), self.model.copy(), m.before)
        return self._end()

    def _restore(self, op: ops.Restore) -> bool:
        if op.name not in self.saved:
            return False
        m = self._begin(op)
        snapshot, model, _ = self.saved[op.name]
        self._carries_out(self.subject.restore, snapshot)
        # Owners stay numbered onwards: the memory is not rolled back, so those who come now must not write what others wrote.
        owners = self.model._owners
        self.model = m.model = model.copy()
        self.model._owners = owners
        for holder in self.model.everybody():
            self.memory.write(holder.slots[: len(holder.cells)], holder.cells)
        for page, cells in self.model.cached.items():
            self.memory.write(self.model.slots_of([page]), cells)
        return self._end()

    # -- rows -----------------------------------------------------------------------------------------------------------

    def _open(self, op: ops.Open) -> bool:
        if op.request in self.model.rows:
            return False
        m = self._begin(op)
        room = self.model.num_rows_taken < self.config.num_rows
        opened = self._may_be_refused(self.subject.open, op.request)
        if opened:
            self.model.rows[op.request] = self.model.new_holder()
        m.row_granted, m.row_was_free = opened, room
        return self._end()

    def _grow(self, op: ops.Grow) -> bool:
        row = self.model.rows.get(op.request)
        if row is None or op.num_tokens < 0:
            return False
        m = self._begin(op)
        size = self.config.page_size
        target = row.committed + op.num_tokens
        m.asked = max(-(-target // size) * size - len(row.slots), 0)
        fits = target <= self.config.row_width
        if fits and m.asked:
            m.allowed = bool(self.must(self.subject.can_allocate, m.asked))
        self._expect(m.asked, possible=fits)
        if self._may_be_refused(self.subject.grow, op.request, target):
            row.wanted = max(row.wanted, target)
        return self._end()

    def _commit(self, op: ops.Commit) -> bool:
        row = self.model.rows.get(op.request)
        count = min(op.num_tokens, len(row.slots) - row.committed) if row is not None else 0
        if count <= 0:
            return False
        self._begin(op)
        cells = contents(row.owner, row.committed, row.committed + count)
        self.memory.write(row.slots[row.committed : row.committed + count], cells)
        row.cells += cells
        row.committed += count
        row.wanted = max(row.wanted, row.committed)
        return self._end()

    def _trim(self, op: ops.Trim) -> bool:
        row = self.model.rows.get(op.request)
        if row is None or op.num_tokens < 0:
            return False
        self._begin(op)
        target = row.committed + op.num_tokens
        self._carries_out(self.subject.trim, op.request, target)
        row.wanted = min(row.wanted, target)
        return self._end()

    def _close(self, op: ops.Close) -> bool:
        if op.request not in self.model.rows:
            return False
        self._begin(op)
        row = self.model.rows.pop(op.request)
        if self.capabilities.deferred_close and self.model.launched > self.model.completed:
            self._carries_out(self.subject.close, op.request, self.model.launched)
            self.model.deferred.append((self.model.launched, row, True))
        else:
            self._carries_out(self.subject.close, op.request)
        return self._end()

    actions: ClassVar = {
        ops.Alloc: _alloc,
        ops.Free: _free,
        ops.FreeStray: _free_stray,
        ops.FreeTwice: _free_twice,
        ops.Fork: _fork,
        ops.Retire: _retire,
        ops.Reuse: _reuse,
        ops.Evict: _evict,
        ops.Launch: _launch,
        ops.Complete: _complete,
        ops.FreeAfter: _free_after,
        ops.Snapshot: _snapshot,
        ops.Restore: _restore,
        ops.Open: _open,
        ops.Grow: _grow,
        ops.Commit: _commit,
        ops.Trim: _trim,
        ops.Close: _close,
    }

    # -- the end ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everybody gives everything back, all steps complete, the cache is flushed; then the whole pool is taken and given back."""
        total = self.config.num_pages
        for name, holder in list(self.model.holders.items()):
            self.apply(ops.Free(name, len(holder.pages)))
        for name in list(self.model.rows):
            self.apply(ops.Close(name))
        while self.model.launched > self.model.completed:
            self.apply(ops.Complete())
        if self.capabilities.eviction:
            self.apply(ops.Evict(total))
        self._drained()
        for _ in range(total + 1):
            self.apply(ops.Alloc("everything", self.config.page_size))
        if total:
            self.apply(ops.Free("everything", total))
        self._drained()

    def _drained(self) -> None:
        """Check once more, as what it is now: idle."""
        self.operation = "drained"
        m = self._begin(self.operation)
        m.drained = True
        self._observe()
        self.check()
        m.drained = False

    def state(self) -> object:
        """All that decides what can happen next: what the model knows and what the subject shows. Without `inspection`, that is too
        little for equal states to have equal futures; then only sequences with the same answers are taken for equal."""
        hidden = () if self.capabilities.inspection else tuple(map(str, self.transcript))
        saved = tuple((name, model.known(), shown) for name, (_, model, shown) in sorted(self.saved.items()))
        return self.model.known(), self.moment.after, saved, hidden

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        return f"-> {_short(m.answer)}" if m.answer is not None else "done"


def _short(slots: Sequence[int]) -> str:
    text = ", ".join(map(str, slots[:12]))
    return f"[{text}]" if len(slots) <= 12 else f"[{text}, … {len(slots)} in all]"
