"""What stands around each operation of the allocator's trial: asking the subject for all that it shows, and recounting the model."""

from __future__ import annotations

from ..harness.operation import Operation
from ..harness.trial import Trial
from ..reference.canary import ShadowMemory
from .contract import Allocator, AllocatorCapabilities, AllocatorConfig
from .model import AllocatorModel, Holder, Moment, Observation

_NO_PAGES: dict[int, int] = {}


class ObservedAllocator(Trial):
    """An allocator and its model, and what both show. A state that is impossible for the subject is a Violation at once."""

    contract = "allocator"
    looks = ("num_free", "free_pages", "cached_pages", "num_deferred", "references", "slots_of")
    quick = 60_000

    subject: Allocator
    config: AllocatorConfig
    capabilities: AllocatorCapabilities
    moment: Moment

    def prepare(self) -> None:
        self.model = AllocatorModel(self.config.page_size)
        self.memory = ShadowMemory()
        first = 1 if self.capabilities.padding_page else 0
        self._all_pages = range(first, first + self.config.num_pages)
        self.moment = Moment(self.config, self.capabilities, self.model, frozenset(self._all_pages))
        self._observe()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        """Forget the last operation; what was after it is now before."""
        m = self.moment
        m.operation = operation
        m.asked = m.answer = m.refusal = m.allowed = m.twice = m.row_granted = None
        m.must_succeed = m.must_refuse = False
        m.parts = ()
        m.before, m.held_before, m.waiting_before = m.after, m.held, m.waiting

    def end(self) -> None:
        self._observe()
        m = self.moment
        self.transcript.append(m.answer if m.refusal is None else "refused")

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
        m.waiting = model.waiting() if model.deferred else _NO_PAGES
        m.stale = None
        read = self.memory.read
        for holder in model.everybody():
            cells = holder.cells
            if cells and read(holder.slots[: len(cells)]) != cells:
                m.stale = self._first_stale()
                break

    def _follow_the_cache(self, cached: tuple[int, ...]) -> None:
        """Take over what the subject has evicted, as it may. It may not cache other pages than the retired ones."""
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

    def _expect(self, num_slots: int, *, possible: bool) -> None:
        """Note whether a request for so many slots must be granted or refused."""
        m = self.moment
        available = m.before.num_free + len(self.model.cached) * self.config.page_size
        grantable = possible and num_slots <= available and num_slots % self.config.page_size == 0
        m.must_succeed, m.must_refuse = grantable, not grantable
