"""The expected state of a block manager's requests, and the effects of one operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from .contract import ManagerConfig

Cell = tuple[str, tuple[int, ...]]
"""What stands in a slot: the namespace, and the text up to the slot's token."""


@dataclass(slots=True, eq=False)
class Running:
    """A request that the manager knows: positions below `computed` stand in `slots`."""

    namespace: str
    tokens: list[int]
    prompt_len: int
    computed: int = 0
    slots: tuple[int, ...] = ()

    def cell(self, position: int) -> Cell:
        return self.namespace, tuple(self.tokens[: position + 1])


@dataclass(slots=True)
class Moment:
    """One operation and its effects, as the checkers see them."""

    config: ManagerConfig
    operation: object = "make"
    running: dict[str, Running] = field(default_factory=dict)
    memory: dict[int, Cell] = field(default_factory=dict)
    request: str = ""
    match: tuple[int, tuple[int, ...]] | None = None  # the length found, and the slots
    expected: int | None = None  # the length that must be found at least
    fits: bool | None = None  # whether what was asked for fits into the free pages
    refusal: str | None = None
    written: tuple[int, ...] = ()  # slots that the operation's request writes
    before: tuple[int, dict[str, tuple[int, ...]]] = (0, {})  # free pages, slots by request
    after: tuple[int, dict[str, tuple[int, ...]]] = (0, {})
    drained: bool = False
