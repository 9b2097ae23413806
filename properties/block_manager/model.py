"""The expected state of a block manager's requests, and the effects of one operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from .contract import BlockManagerConfig

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
    drained: bool = False

    def pages_of(self, tables: Tables) -> set[int]:
        """Return the pages that a request has."""
        return {slot // self.config.page_size for slots in tables for slot in slots if slot >= 0}
