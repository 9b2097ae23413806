"""The prefix cache's trial: each operation on the subject and on the model, then a full recount.

The trial is what stands around a prefix cache in an engine: it has the pool, computes what is not cached, and keeps the request tables.
Where the subject has a table and a pool of its own (`table`), it only watches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from ..harness.trial import Refused
from . import operations as ops
from .model import Path, Remembered, Running
from .moment import Evicted, Inserted, Matched
from .observed import ObservedCache
from .texts import Text


class PrefixCacheTrial(ObservedCache):
    """`subject` under operations."""

    # -- the pool -------------------------------------------------------------------------------------------------------

    def _take(self, num_pages: int) -> list[int] | None:
        """Free pages, for which the cache may have to evict; None if that does not suffice, or the eviction has gone wrong."""
        missing = num_pages - len(self.free)
        if missing > 0:
            evictable = len(self.model.tree) - len(self.model.locks())
            if missing > evictable or not self._evict_slots(missing * self.config.page_size):
                return None
        if len(self.free) < num_pages:
            return None
        return [self.free.pop() for _ in range(num_pages)]

    def _give_back(self, pages: Iterable[int]) -> None:
        """Pages are free; what stood there is gone, so that nobody reads it unnoticed."""
        for page in pages:
            self.free.append(page)
            for slot in self.moment.slots_of([page]):
                self.memory[slot] = 0

    def _write(self, text: Text, table: Sequence[int], first: int) -> None:
        """The positions of a text from page number `first` on are computed."""
        size = self.config.page_size
        slots = self.moment.slots_of(table[first:])
        self.memory.update(zip(slots, text.cells[first * size :], strict=False))

    def _evict_slots(self, num_slots: int) -> bool:
        """Let the subject evict; whether it did what the model can follow."""
        answer = self.integers(self.must(self.subject.evict, num_slots), f"evict({num_slots})")
        size = self.config.page_size
        pages = list(dict.fromkeys(slot // size for slot in answer))
        self._note_eviction(num_slots, answer, pages)
        self.model.remove(pages)
        if not self.capabilities.table:
            self._give_back(page for page in pages if page in self.moment.evicted.cached)
        whole = len(pages) * size == len(answer) and set(pages) <= self.moment.evicted.cached
        return whole and not self.moment.evicted.locked.intersection(pages)

    def _note_eviction(self, asked: int | None, slots: tuple[int, ...], pages: list[int]) -> None:
        model = self.model
        locked = frozenset(model.locks())
        cached = frozenset(self.moment.cached_pages())
        evictable = (len(cached) - len(locked & cached)) * self.config.page_size
        order = tuple(model.evicted_next(len(pages))) if self.capabilities.lru else ()
        self.moment.evicted = Evicted(asked, evictable, slots, cached, locked, order)

    # -- looking up -----------------------------------------------------------------------------------------------------

    def _look_up(self, text: Text) -> tuple[object, Path] | None:
        """Match a text on both: the subject's handle and the model's path, None where the two differ."""
        answer = self.must(self.subject.match, list(text.tokens), text.namespace)
        handle, slots = self._parts(answer, 2, "match()", "a handle and the slots")
        slots = self.integers(slots, "the slots of match()")
        path = self.model.path_of(text)
        self.model.use(path, hit=True)
        found = tuple(map(self.memory.get, slots))
        self.moment.matches.append(Matched(text, len(slots), slots, path, found))
        if slots != self.moment.slots_of([cached.page for cached in path]):
            return None
        return handle, path

    def _match(self, op: ops.Match) -> bool:
        known = self.model.matches.get(op.name)
        if known is not None and known.locks:
            return False
        self._begin(op)
        found = self._look_up(self._text(op))
        if found is not None:
            self.model.matches[op.name] = Remembered(*found)
        return self._end()

    def _compare(self, op: ops.Compare) -> bool:
        self._begin(op)
        if self._look_up(self._text(op, op.first)) is not None:
            self._look_up(self._text(op, op.second))
        return self._end()

    def _peek(self, op: ops.Peek) -> bool:
        m = self._begin(op)
        text = self._text(op)
        length = self.integer(self.must(self.subject.peek, list(text.tokens), text.namespace), "peek()")
        m.matches.append(Matched(text, length, None, self.model.path_of(text), ()))
        return self._end()

    # -- locks ----------------------------------------------------------------------------------------------------------

    def _lock(self, op: ops.Lock) -> bool:
        match = self.model.matches.get(op.name)
        if match is None:
            return False
        stale = self.model.is_stale(match.path)
        if stale and self.model.is_back(match.path):
            return False  # a lock would be as good as a refusal: the caller's slots hold what it found in them
        m = self._begin(op)
        m.stale = m.must_refuse = stale
        m.locked = match.path
        if m.stale:
            self._refused(self.subject.lock, match.handle)
        else:
            self._carries_out(self.subject.lock, match.handle)
            match.locks += 1
        return self._end()

    def _unlock(self, op: ops.Unlock) -> bool:
        match = self.model.matches.get(op.name)
        if match is None or not match.locks:
            return False
        self._begin(op)
        self._carries_out(self.subject.unlock, match.handle)
        match.locks -= 1
        return self._end()

    def _unlock_stray(self, op: ops.UnlockStray) -> bool:
        # A path that others have locked as well, or further down, no cache can tell from one that this caller has locked.
        match = self.model.matches.get(op.name)
        if match is None or not match.path or match.path[-1].page in self.moment.locks:
            return False
        m = self._begin(op)
        m.must_refuse = True
        self._refused(self.subject.unlock, match.handle)
        return self._end()

    # -- insertion and eviction -----------------------------------------------------------------------------------------

    def _hand_over(self, text: Text, table: list[int], num_positions: int) -> tuple[object, Path] | None:
        """Insert the first positions of a table on both, and free the copies: handle and path, None where the two differ.

        The table says afterwards what the model says that it should.
        """
        m, model = self.moment, self.model
        slots = list(m.slots_of(table)[:num_positions])
        answer = self.must(self.subject.insert, list(text.tokens), slots, text.namespace)
        parts = self._parts(answer, 3, "insert()", "a handle, the slots of the path, the caller's copies")
        canonical = self.integers(parts[1], "the slots of insert()")
        duplicates = self.integers(parts[2], "the copies of insert()")
        num_pages = num_positions // self.config.page_size
        path = model.path_of(text, num_positions)
        known = [cached.page for cached in path]
        copies = [own for own, cached in zip(table, known, strict=False) if own != cached]
        model.use(path, hit=False)
        path = model.add(text, path, table[len(path) : num_pages])
        table[: len(known)] = known
        should = m.slots_of(table[:num_pages]), m.slots_of(copies)
        m.inserted = Inserted(canonical, duplicates, *should)
        if (canonical, duplicates) != should:
            return None
        self._give_back(copies)
        return parts[0], path

    def _insert(self, op: ops.Insert) -> bool:
        text = self._text(op)
        num_pages = -(-len(text.cells) // self.config.page_size)
        if num_pages > len(self.free):
            return False
        self._begin(op)
        table = self._take(num_pages)
        self._write(text, table, 0)
        done = self._hand_over(text, table, len(text.cells))
        if done is not None:
            self._give_back(table[len(done[1]) :])
        return self._end()

    def _evict(self, op: ops.Evict) -> bool:
        self._begin(op)
        self._evict_slots(op.num_slots)
        return self._end()

    # -- requests -------------------------------------------------------------------------------------------------------

    def _admit(self, op: ops.Admit) -> bool:
        text = self._text(op)
        if op.request in self.model.running or not text.tokens:
            return False
        self._begin(op)
        if self.capabilities.table:
            return self._admit_by_subject(op, text)
        found = self._look_up(text)
        if found is None:
            return self._end()
        handle, path = found
        self._carries_out(self.subject.lock, handle)
        request = Running(text, handle, path, [cached.page for cached in path])
        self.model.running[op.request] = request  # its lock counts from here on
        self.moment.locked = path
        pages = self._take(-(-len(text.cells) // self.config.page_size) - len(path))
        if pages is None:
            # Turned away: what was locked for it is given back, as if it had never come.
            del self.model.running[op.request]
            self._carries_out(self.subject.unlock, handle)
            self.moment.locked = None
        else:
            request.table += pages
            self._write(text, request.table, len(path))
        return self._end()

    def _share(self, op: ops.Share) -> bool:
        request = self.model.running.get(op.request)
        if request is None:
            return False
        num_positions = min(op.num_tokens, len(request.text.cells))
        if num_positions // self.config.page_size <= len(request.path):
            return False
        self._begin(op)
        if self.capabilities.table:
            self._carries_out(self.subject.publish, op.request, num_positions)
            request.path = self._handed_over(request, num_positions)
            self.moment.should_share = (op.request, request.path)
            return self._end()
        done = self._hand_over(request.text, request.table, num_positions)
        if done is not None:
            before = request.handle
            request.handle, request.path = done
            self._carries_out(self.subject.lock, request.handle)
            self._carries_out(self.subject.unlock, before)
            self.moment.locked = request.path
        return self._end()

    def _finish(self, op: ops.Finish) -> bool:
        return self._leave(op, cached=True)

    def _abort(self, op: ops.Abort) -> bool:
        return self._leave(op, cached=False)

    def _leave(self, op: ops.Finish | ops.Abort, cached: bool) -> bool:
        request = self.model.running.get(op.request)
        if request is None:
            return False
        self._begin(op)
        num_positions = len(request.text.cells) if cached else 0
        if self.capabilities.table:
            self._carries_out(self.subject.leave, op.request, num_positions)
            del self.model.running[op.request]
            # Who has nothing new to hand over does not use what is there once more.
            if num_positions // self.config.page_size > len(request.path):
                self._handed_over(request, num_positions)
            return self._end()
        path = request.path
        if cached:
            done = self._hand_over(request.text, request.table, num_positions)
            if done is None:
                return self._end()
            path = done[1]
        self._carries_out(self.subject.unlock, request.handle)
        del self.model.running[op.request]
        self._give_back(request.table[len(path) :])
        return self._end()

    # -- where the subject keeps the tables -----------------------------------------------------------------------------

    def _admit_by_subject(self, op: ops.Admit, text: Text) -> bool:
        answer = self.ask(self.subject.admit, op.request, list(text.tokens), text.namespace)
        path = self.model.path_of(text, len(text.tokens) - 1)
        self.model.use(path, hit=True)
        m = self.moment
        if answer is None or answer is False or isinstance(answer, Refused):
            m.refusal = answer.reason if isinstance(answer, Refused) else str(answer)
            return self._end()
        length = self.integer(answer, "admit()")
        slots = self.integers(self.must(self.subject.slots_of, op.request), f"slots_of({op.request!r})")
        found = tuple(map(self.memory.get, slots[:length]))
        m.matches.append(Matched(text, length, slots[:length], path, found))
        m.locked = path
        table = [slot // self.config.page_size for slot in slots[:: self.config.page_size]]
        self.model.running[op.request] = Running(text, None, path, table)
        self._follow_evictions()
        self._write(text, table, len(path))
        return self._end()

    def _follow_evictions(self) -> None:
        """The subject has made room as it saw fit: what is no longer in its tree, it has evicted."""
        shown = {slot // self.config.page_size for node in self._nodes() for slot in node.slots}
        gone = [page for page in self.moment.cached_pages() if page not in shown]
        if gone:
            self._note_eviction(None, self.moment.slots_of(gone), gone)
            self.model.remove(gone)

    def _handed_over(self, request: Running, num_positions: int) -> Path:
        """The first positions of a request are cached now: the path, which its table begins with."""
        path = self.model.path_of(request.text, num_positions)
        self.model.use(path, hit=False)
        path = self.model.add(request.text, path, request.table[len(path) : num_positions // self.config.page_size])
        request.table[: len(path)] = [cached.page for cached in path]
        return path

    def _complete(self, op: ops.Complete) -> bool:
        self._begin(op)
        self._carries_out(self.subject.complete)
        return self._end()

    actions: ClassVar = {
        ops.Match: _match,
        ops.Compare: _compare,
        ops.Peek: _peek,
        ops.Lock: _lock,
        ops.Unlock: _unlock,
        ops.UnlockStray: _unlock_stray,
        ops.Insert: _insert,
        ops.Evict: _evict,
        ops.Admit: _admit,
        ops.Share: _share,
        ops.Finish: _finish,
        ops.Abort: _abort,
        ops.Complete: _complete,
    }

    # -- the end ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Every lock is taken back, every request leaves, everything is evicted."""
        for name, match in list(self.model.matches.items()):
            while match.locks:
                self.apply(ops.Unlock(name))
        for number, name in enumerate(list(self.model.running)):
            self.apply(ops.Finish(name) if number % 2 else ops.Abort(name))
        if self.capabilities.table:
            self.apply(ops.Complete())
        self.apply(ops.Evict(self.config.num_pages * self.config.page_size))
        self.operation = "drained"
        m = self._begin(self.operation)
        m.drained = True
        self._observe()
        self.check()
        m.drained = False

    def state(self) -> object:
        """All that decides what can happen next: what the model knows, and what the subject shows. Without `inspection` that is too
        little for equal states to have equal futures; then only sequences with the same answers are taken for equal."""
        hidden = () if self.capabilities.inspection else tuple(map(str, self.transcript))
        return self.model.known(), self.moment.after, tuple(self.free), hidden

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        said = [f"-> {_short(match.slots) if match.slots is not None else match.length}" for match in m.matches]
        if m.evicted is not None:
            said.append(f"evicts {_short(m.evicted.slots)}")
        if m.inserted is not None:
            said.append(f"cached in {_short(m.inserted.canonical)}")
        return ", ".join(said) or "done"


def _short(slots: Sequence[int]) -> str:
    text = ", ".join(map(str, slots[:12]))
    return f"[{text}]" if len(slots) <= 12 else f"[{text}, … {len(slots)} in all]"
