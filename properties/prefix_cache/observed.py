"""What every operation on a prefix cache has around it: the subject is asked, observed and recounted, and there is a pool of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..harness.operation import Operation
from ..harness.trial import Trial
from .contract import PrefixCache, PrefixCacheCapabilities, PrefixCacheConfig
from .model import Evicted, Moment, Node, Observation, PrefixCacheModel, Running, Text, text_of


class ObservedCache(Trial):
    """`subject`, its model, the pool and the memory. The operations are the subclass's."""

    contract = "prefix-cache"
    looks = ("num_evictable", "num_protected", "free_slots", "nodes", "slots_of")
    quick = 40_000
    refuses_by_violation = True

    subject: PrefixCache
    config: PrefixCacheConfig
    capabilities: PrefixCacheCapabilities
    moment: Moment

    def prepare(self) -> None:
        policy = self.config.policy if self.capabilities.policies else "lru"
        self.model = PrefixCacheModel(self.config.page_size, policy)
        self.memory: dict[int, int] = {}  # slot -> cell
        self.free = list(range(self.config.num_pages, 0, -1))
        self.moment = Moment(self.config, self.capabilities, self.model)
        self.end()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        m = self.moment
        self.moment = Moment(self.config, self.capabilities, self.model, operation, m.after, m.after, m.locks)

    def end(self) -> None:
        """Ask the subject for all that it shows, and recount the model."""
        subject, has, m = self.subject, self.capabilities, self.moment
        num_evictable = self.integer(self.must(subject.num_evictable), "num_evictable()")
        num_protected = self.integer(self.must(subject.num_protected), "num_protected()")
        nodes = self.nodes() if has.inspection else None
        free = self.integers(self.must(subject.free_slots), "free_slots()") if has.table else None
        m.after = Observation(num_evictable, num_protected, nodes, free)
        m.locks = self.model.locks()
        for name, request in self.model.running.items():
            m.tables[name] = slots = self._table(name, request)
            cells = request.text.cells
            found = tuple(map(self.memory.get, slots[: len(cells)]))
            if found != cells and m.wrong is None:
                at = next((i for i, cell in enumerate(found) if cell != cells[i]), len(found))
                m.wrong = (name, at, slots[at] if at < len(slots) else None)
        answers = [match.slots or match.length for match in m.matches]
        self.transcript.append(answers if m.refusal is None else "refused")

    def nodes(self) -> tuple[Node, ...]:
        found = []
        for row in self.must(self.subject.nodes):
            if not isinstance(row, Sequence) or len(row) != 5:
                raise self.misbehaviour("TYPE", f"nodes() has {row!r}", "(id, parent, locks, slots, children) of each")
            names = ("id", "parent", "locks")
            numbers = [self.integer(n, f"the {name} of a node") for n, name in zip(row, names, strict=False)]
            slots, children = self.integers(row[3], "a node's slots"), self.integers(row[4], "a node's children")
            found.append(Node(*numbers, slots, children))
        return tuple(found)

    def _table(self, name: str, request: Running) -> tuple[int, ...]:
        if not self.capabilities.table:
            return self.moment.slots_of(request.table)
        return self.integers(self.must(self.subject.slots_of, name), f"slots_of({name!r})")

    def text(self, pages: tuple[int, ...], extra: int, namespace: str) -> Text:
        return text_of(pages, extra, namespace, self.config.page_size, self.config.bigram)

    def parts(self, answer: object, count: int, what: str, should: str) -> Sequence[Any]:
        if not isinstance(answer, tuple | list) or len(answer) != count:
            raise self.misbehaviour("TYPE", f"{what} is {answer!r}", should)
        return answer

    # -- the pool -----------------------------------------------------------------------------------------------------

    def take(self, num_pages: int) -> list[int] | None:
        """Take free pages, evicting if needed. Returns None if that does not suffice, or the eviction has gone wrong."""
        missing = num_pages - len(self.free)
        if missing > 0:
            evictable = len(self.model.tree) - len(self.model.locks())
            if missing > evictable or not self.evict_slots(missing * self.config.page_size):
                return None
        if len(self.free) < num_pages:
            return None
        return [self.free.pop() for _ in range(num_pages)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages and clear their slots, so that reading one is noticed."""
        for page in pages:
            self.free.append(page)
            for slot in self.moment.slots_of([page]):
                self.memory[slot] = 0

    def compute(self, text: Text, table: Sequence[int], first: int) -> None:
        """Write the positions of a text from page number `first` on."""
        slots = self.moment.slots_of(table[first:])
        self.memory.update(zip(slots, text.cells[first * self.config.page_size :], strict=False))

    def evict_slots(self, num_slots: int) -> bool:
        """Let the subject evict. Returns whether the model can follow what it did."""
        answer = self.integers(self.must(self.subject.evict, num_slots), f"evict({num_slots})")
        size = self.config.page_size
        pages = list(dict.fromkeys(slot // size for slot in answer))
        evicted = self.note_eviction(num_slots, answer, pages)
        if not self.capabilities.table:
            self.give_back(page for page in pages if page in evicted.cached)
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
