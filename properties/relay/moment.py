"""One moment of a relay's trial: the operation, how it had to end, how it ended, and what was read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .contract import RelayCapabilities, RelayConfig


class Wrong(NamedTuple):
    """A value that is not what its row's last write left. `of` is the generation that wrote it, None if nobody did."""

    where: str
    found: object
    expected: object
    generation: int
    of: int | None


@dataclass(slots=True)
class Moment:
    """One operation and what came of it.

    `trace` says why the cells, or the fields given, do not allow it, `foreign` why the generations or the rows do not; with one of them
    it must be refused, with neither it must not, unless `optional`.
    """

    config: RelayConfig
    capabilities: RelayCapabilities
    operation: object = "make"
    call: str = ""  # the method that it ended with
    trace: str = ""
    foreign: str = ""
    optional: bool = False
    refusal: str | None = None
    answer: tuple[int, ...] | None = None  # the lengths read
    wrong: Wrong | None = None
    padding: str = ""  # what a padding lane read, if not zeros
    undeclared: str = ""  # a field that came back and is not declared
    num_unread: int | None = None
    should_be_unread: int = 0
