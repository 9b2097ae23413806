"""The life of a page: what every call of a store does to each page stands in `PAGE_TRANSITIONS`."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from foredraft.core.kv.allocator import PAGE_TRANSITIONS, PageEvent, PageState
from foredraft.core.kv.fence import Departure
from foredraft.core.kv.groups import GroupSizes, KVGroup, StoreSizes
from foredraft.core.kv.radix import RadixCache
from foredraft.core.kv.radix_node import nodes_below
from foredraft.core.kv.store import KVStore

PAGE_SIZE, NUM_ROWS, WIDTH = 2, 4, 16


class Follower:
    """Takes the event of every page at each call of the store's parts, and keeps the states by the table alone."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.states = [PageState.FREE] * (store.allocator.num_pages + 1)
        self.walked: set[tuple[PageState, PageEvent]] = set()
        self._around(store.allocator, "allocate", after=lambda slots, _: self._all(slots, PageEvent.ALLOCATE))
        self._around(store.allocator, "free", before=self._freed)
        self._around(store.cache, "insert", after=self._inserted)
        self._around(store.cache, "lock", after=lambda *_: self._locks_changed())
        self._around(store.cache, "unlock", after=lambda *_: self._locks_changed())

    def _around(self, owner, name: str, before: Callable | None = None, after: Callable | None = None) -> None:
        real = getattr(owner, name)

        def call(*arguments, **options):
            if before is not None:
                before(*arguments)
            result = real(*arguments, **options)
            if after is not None:
                after(result, arguments)
            return result

        setattr(owner, name, call)

    def event(self, page: int, event: PageEvent) -> None:
        state = self.states[page]
        assert event in PAGE_TRANSITIONS[state], f"page {page}: {event.name} while {state.name}"
        self.walked.add((state, event))
        self.states[page] = PAGE_TRANSITIONS[state][event]

    def _all(self, slots, event: PageEvent) -> None:
        for page in (slots[::PAGE_SIZE] // PAGE_SIZE).tolist():
            self.event(page, event)

    def _freed(self, slots) -> None:
        for page in (slots[::PAGE_SIZE] // PAGE_SIZE).tolist():
            was_cached = self.states[page] is PageState.CACHED
            self.event(page, PageEvent.EVICT if was_cached else PageEvent.RELEASE)

    def _inserted(self, insertion, _) -> None:
        for page in (insertion.canonical[::PAGE_SIZE] // PAGE_SIZE).tolist():
            if self.states[page] not in (PageState.CACHED, PageState.SHARED):
                self.event(page, PageEvent.INSERT)

    def _locks_changed(self) -> None:
        for node in nodes_below(self.store.cache.root):
            for page in (node.slots[::PAGE_SIZE] // PAGE_SIZE).tolist():
                if bool(node.locks) != (self.states[page] is PageState.SHARED):
                    self.event(page, PageEvent.LOCK if node.locks else PageEvent.UNLOCK)

    def check(self) -> None:
        """The fence changes no owner, so its event shows in the recount alone."""
        recounted = self.store.page_states()
        for page, (kept, found) in enumerate(zip(self.states, recounted.tolist(), strict=True)):
            if kept != found == PageState.FENCED:
                self.event(page, PageEvent.FENCE)
        assert [state.name for state in self.states] == [PageState(state).name for state in recounted]
        self.store.check()


class Service:
    """Random requests of few prefixes on a small store, with steps in flight and rows that a transfer holds."""

    def __init__(self, seed: int, at_once: bool) -> None:
        groups = GroupSizes((KVGroup(window=4, pages=0.5), KVGroup(pages=1.0)), PAGE_SIZE)
        cache = RadixCache(PAGE_SIZE)
        self.store = KVStore(StoreSizes(NUM_ROWS, WIDTH, 24, PAGE_SIZE, groups), cache, at_once=at_once)
        self.follower = Follower(self.store)
        self.random = random.Random(seed)
        self.committed = self.launched = 0
        self.tokens: dict[int, np.ndarray] = {}  # of each row that has a request
        self.held: set[int] = set()

    def run(self, calls: int) -> None:
        names = ("enter", "enter", "grow", "grow", "trim", "share", "leave", "launch", "commit", "hold", "release")
        for _ in range(calls):
            name = self.random.choice((*names, "forget") if not self.tokens and not self.held else names)
            getattr(self, name)()
            self.follower.check()

    def row(self) -> int | None:
        return self.random.choice(sorted(self.tokens)) if self.tokens else None

    def enter(self) -> None:
        tokens = np.array([self.random.randrange(2) for _ in range(WIDTH)])
        row = self.store.reserve_row(tokens, "", 4)
        if row is not None:
            self.tokens[row] = tokens

    def grow(self) -> None:
        if (row := self.row()) is not None:
            self.store.grow_row(row, self.random.randrange(0, WIDTH + 1, PAGE_SIZE))

    def trim(self) -> None:
        if (row := self.row()) is not None:
            target = self.store.num_shared(row) + self.random.randrange(0, 5, PAGE_SIZE)
            self.store.trim(np.array([row]), np.array([target]))

    def share(self) -> None:
        if (row := self.row()) is not None:
            valid = self.random.randrange(int(self.store.allocated[row]) + 1)
            self.store.share_prefix(row, self.tokens[row], valid, "", self.launched)

    def leave(self) -> None:
        if (row := self.row()) is not None:
            tokens, valid = self.tokens.pop(row), int(self.store.allocated[row])
            self.store.close_row(Departure(self.launched, row, tokens, valid, ""), self.committed)

    def launch(self) -> None:
        self.launched += self.launched < self.committed + 2

    def commit(self) -> None:
        if self.committed < self.launched:
            self.committed += 1
            self.store.pass_fence(self.committed)

    def hold(self) -> None:
        if (row := self.row()) is not None and row not in self.held:
            self.store.hold_row(row)
            self.held.add(row)

    def release(self) -> None:
        if self.held:
            row = self.random.choice(sorted(self.held))
            self.held.remove(row)
            self.store.release_hold(row, self.committed)

    def forget(self) -> None:
        while self.committed < self.launched:
            self.commit()
        self.store.forget()


@pytest.mark.fast("behind a fence", ci="*")
@pytest.mark.parametrize("at_once", [False, True], ids=["behind a fence", "at once"])
def test_every_transition_of_a_page_is_walked_and_no_other(at_once):
    walked = set()
    for seed in range(4):
        service = Service(seed, at_once)
        service.run(300)
        walked |= service.follower.walked
    assert walked == {(state, event) for state, events in PAGE_TRANSITIONS.items() for event in events}
