"""The expected state of a block manager's requests, and the effects of one operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from .contract import BlockManagerConfig, CacheEvent

Cell = tuple[int, str, tuple[int, ...]]
"""What stands in a slot: the group of layers, the namespace, and the text up to the slot's token."""

Tables = tuple[tuple[int, ...], ...]
"""The slots of a request's positions, for each group of layers."""


@dataclass(slots=True, eq=False)
class ManagedRequest:
    """A request that the manager knows: positions below `computed` stand in `tables`; `start` is the first position of
    the step that runs, or of the next one."""

    namespace: str
    tokens: list[int]
    prompt_len: int
    computed: int = 0
    start: int = 0
    tables: Tables = ()

    def cell(self, group: int, position: int) -> Cell:
        return group, self.namespace, tuple(self.tokens[: position + 1])

    def seen_from(self, window: int) -> int:
        """Return the first position that the attention of this step sees, or of the next one."""
        return max(self.start - window + 1, 0) if window else 0


@dataclass(slots=True)
class CacheAccount:
    """What is cached according to the events.

    `texts`: what the name of a page stands for, by group and name, also of pages that have left; `copies`: how many
    pages hold a text, by the cell of their last slot.
    """

    texts: dict[tuple[int, Hashable], Cell] = field(default_factory=dict)
    copies: Counter[Cell] = field(default_factory=Counter)

    def take(self, event: CacheEvent, page_size: int) -> str:
        """Book an event. Returns why it is wrong, or ""."""
        group, names = event.group, list(event.names)
        if not event.is_stored:
            return next((wrong for name in names if (wrong := self._remove(group, name))), "")
        if len(event.tokens) != len(names) * page_size:
            return f"{len(names)} pages with {len(event.tokens)} tokens entered the cache"
        namespace, text = event.namespace, tuple[int, ...]()
        if event.parent is not None:
            if (group, event.parent) not in self.texts:
                return f"pages entered the cache behind {event.parent}, which never did"
            _, namespace, text = self.texts[group, event.parent]
        for number, name in enumerate(names):
            text += tuple(event.tokens[number * page_size : (number + 1) * page_size])
            cell = group, namespace, text
            known = self.texts.setdefault((group, name), cell)
            if known != cell:
                return f"the name {name} stands for {known}, then for {cell}"
            self.copies[cell] += 1
        return ""

    def _remove(self, group: int, name: Hashable) -> str:
        cell = self.texts.get((group, name))
        if cell is None or not self.copies[cell]:
            return f"the page {name} left the cache, in which it was not"
        self.copies[cell] -= 1
        return ""


@dataclass(slots=True)
class BlockManagerMoment:
    """One operation and its effects, as the checkers see them."""

    config: BlockManagerConfig
    operation: object = "make"
    running: dict[str, ManagedRequest] = field(default_factory=dict)
    memory: dict[int, Cell | None] = field(default_factory=dict)  # None: a draft
    request: str = ""
    match: tuple[int, Tables] | None = None  # the length found, and the slots
    expected: int | None = None  # the length that must be found at least
    fits: bool | None = None  # whether what was asked for fits into the free pages
    refusal: str | None = None
    written: frozenset[int] = frozenset()  # slots that the operation's request writes
    before: tuple[int, dict[str, Tables]] = (0, {})  # free pages, tables by request
    after: tuple[int, dict[str, Tables]] = (0, {})
    account: CacheAccount = field(default_factory=CacheAccount)
    wrong_event: str = ""
    announced: int = 0  # the length that can be found according to the events before this operation
    unannounced: Cell | None = None  # the end of a page that was found, and was not cached according to them
    drained: bool = False

    def pages_of(self, tables: Tables) -> set[int]:
        """Return the pages that a request has."""
        return {slot // self.config.page_size for slots in tables for slot in slots if slot >= 0}

    def num_pages_with(self, end: Cell) -> int:
        """Count the pages whose slots hold the text up to `end`, each its part of it."""
        size, (group, namespace, text) = self.config.page_size, end
        cells = [(group, namespace, text[: len(text) - back]) for back in range(size)]
        lasts = (slot for slot, cell in self.memory.items() if cell == end)
        return sum(all(self.memory.get(slot - back) == cell for back, cell in enumerate(cells)) for slot in lasts)
