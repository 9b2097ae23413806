"""Who keeps the requests' tables and the pool: the suite, around a cache that has none, or the subject (`table`).
Each is a part of a `PrefixCacheTrial`."""

from __future__ import annotations

from typing import Any

from .model import Inserted, Path, RunningRequest
from .reading import look_into_host, read_inserted, read_match, read_nodes, read_slots
from .texts import Text


def look_up(t: Any, text: Text) -> tuple[object, Path] | None:
    """Match a text on both: the subject's handle and the model's path, None where the two differ."""
    handle, slots = read_match(t, t.must(t.subject.match, list(text.tokens), text.namespace))
    path = t.moment.note_match(text, slots)
    return (handle, path) if slots == t.moment.slots_of([cached.page for cached in path]) else None


def hand_over(t: Any, text: Text, table: list[int], num_positions: int) -> tuple[object, Path] | None:
    """Insert the first positions of a table on both, and free the copies: handle and path, None where the two differ.

    The table then begins with the pages that are cached.
    """
    m = t.moment
    slots = list(m.slots_of(table)[:num_positions])
    answer = t.must(t.subject.insert, list(text.tokens), slots, text.namespace)
    handle, canonical, duplicates = read_inserted(t, answer)
    own = list(table)
    path = t.model.cache(text, table, num_positions)
    copies = [page for page, cached in zip(own, table, strict=True) if page != cached]
    m.inserted = Inserted(canonical, duplicates, m.slots_of(table[: len(path)]), m.slots_of(copies))
    if (canonical, duplicates) != m.inserted[2:]:
        return None
    t.model.give_back(copies)
    return handle, path


class TableOfSuite:
    """The suite computes what is not cached, in pages of its own pool, and keeps the tables."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def admit(self, request: str, text: Text) -> None:
        """Start a request from what is cached; turn it away where the rest does not fit."""
        t = self.trial
        found = look_up(t, text)
        if found is None:
            return
        handle, path = found
        t.carry_out(t.subject.lock, handle)
        running = RunningRequest(text, handle, path, [cached.page for cached in path])
        t.model.running[request] = running  # its lock counts from here on
        taken = self._take(-(-len(text.cells) // t.config.page_size) - len(path))
        if taken is None:
            # It is turned away, so what was locked for it is given back.
            del t.model.running[request]
            t.carry_out(t.subject.unlock, handle)
        else:
            t.moment.locked = path
            running.table += taken
            t.model.compute(text, running.table, len(path))

    def _take(self, num_pages: int) -> list[int] | None:
        """Take free pages, evicting if needed. Returns None if that does not suffice, or the eviction has gone
        wrong."""
        t, model = self.trial, self.trial.model
        missing = num_pages - len(model.free)
        if missing > 0:
            evictable = len(model.tree) - len(model.locks())
            if missing > evictable or not t.let_evict(missing * t.config.page_size):
                return None
        if len(model.free) < num_pages:
            return None
        return [model.free.pop() for _ in range(num_pages)]

    def share(self, request: str, running: RunningRequest, num_positions: int) -> None:
        """Hand positions of a running request over, and lock the cached ones in place of what it had locked."""
        t = self.trial
        done = hand_over(t, running.text, running.table, num_positions)
        if done is not None:
            before = running.handle
            running.handle, running.path = done
            t.carry_out(t.subject.lock, running.handle)
            t.carry_out(t.subject.unlock, before)
            t.moment.locked = running.path

    def leave(self, request: str, is_cached: bool) -> None:
        """End a request, and hand over what it has computed if `is_cached` says so."""
        t, running = self.trial, self.trial.model.running[request]
        path = running.path
        if is_cached:
            done = hand_over(t, running.text, running.table, len(running.text.cells))
            if done is None:
                return
            path = done[1]
        t.carry_out(t.subject.unlock, running.handle)
        del t.model.running[request]
        t.model.give_back(running.table[len(path) :])


class TableOfSubject:
    """The subject keeps the tables and the pool; the suite watches what it shows of them."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def admit(self, request: str, text: Text) -> None:
        """Start a request, if the subject does, and follow what it has evicted to make room."""
        t, m, size = self.trial, self.trial.moment, self.trial.config.page_size
        known = len(t.model.path_of(text, len(text.tokens) - 1))
        answer = t.ask(t.subject.admit, request, list(text.tokens), text.namespace)
        t.model.host.may_use(text)
        if t.refused(answer, None, False):
            t.model.use(t.model.match_of(text, len(text.tokens) - 1), hit=True)
            return
        length = t.integer(answer, "admit()")
        slots = read_slots(t, request)
        path = m.locked = m.note_match(text, slots[:length], len(text.tokens) - 1)
        running = RunningRequest(text, None, path, [slot // size for slot in slots[::size]])
        t.model.running[request] = m.entered = running
        m.giver = request, frozenset()
        running.begun = running.committed = length
        running.branch = known if known > len(path) else 0
        self._follow_evictions()
        t.model.compute(text, running.table, len(path))

    def _follow_evictions(self) -> None:
        """Note what the subject has evicted: it is no longer in its tree."""
        m, size = self.trial.moment, self.trial.config.page_size
        shown = {slot // size for node in read_nodes(self.trial) for slot in node.slots}
        gone = [page for page in m.cached_pages() if page not in shown]
        if gone:
            m.note_eviction(None, m.slots_of(gone), gone)

    def share(self, request: str, running: RunningRequest, num_positions: int) -> None:
        """Let the subject publish positions of a running request."""
        t = self.trial
        t.carry_out(t.subject.publish, request, num_positions)
        self._hands_over(request, running, num_positions)
        running.path = t.model.cache(running.text, running.table, num_positions)
        if t.config.groups:
            self._follow_evictions()  # for a state of the request in the place of that which the cache gets
        look_into_host(t, running.text, num_positions)
        t.moment.should_share = (request, running.path)

    def leave(self, request: str, is_cached: bool) -> None:
        """End a request; it hands over what it has computed if `is_cached` says so."""
        t, running = self.trial, self.trial.model.running.pop(request)
        num_positions = len(running.text.cells) if is_cached else 0
        t.carry_out(t.subject.leave, request, num_positions)
        t.model.host.may_use(running.text)
        # A request with nothing new to hand over does not use what is there once more.
        if num_positions // t.config.page_size > len(running.path):
            self._hands_over(request, running, num_positions)
            path = t.model.cache(running.text, running.table, num_positions)
            t.moment.to_be_found = path, min(running.branch or len(path), len(path))
            look_into_host(t, running.text, num_positions)

    def _hands_over(self, request: str, running: RunningRequest, num_positions: int) -> None:
        """Note who hands over which positions, for the units of groups of layers."""
        t = self.trial
        t.use({"units of layer groups": t.config.groups})
        t.moment.giver = request, frozenset(running.text.cells[:num_positions])
        running.committed = num_positions
        if running.branch <= num_positions // t.config.page_size and request in t.model.running:
            running.branch = 0
