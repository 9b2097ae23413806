"""What is done to an allocator."""

from __future__ import annotations

from dataclasses import dataclass

from ..operations import Operation


@dataclass(frozen=True, slots=True)
class Alloc(Operation):
    """`holder` takes `num_slots` more slots."""

    tag = "alloc"
    holder: str
    num_slots: int


@dataclass(frozen=True, slots=True)
class Free(Operation):
    """`holder` gives back its last `num_pages` pages, or all that it has."""

    tag = "free"
    holder: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class FreeStray(Operation):
    """Somebody frees pages of which at least one is not held. Must be refused."""

    tag = "free-stray"
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeTwice(Operation):
    """`holder` gives back its last page, and names it twice in one call: one reference less, or a refusal."""

    tag = "free-twice"
    holder: str


@dataclass(frozen=True, slots=True)
class Fork(Operation):
    """`new` becomes one more holder of the first `num_pages` pages of `holder`."""

    tag = "fork"
    holder: str
    new: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class Retire(Operation):
    """`holder` gives back its last `num_pages` pages, whose content may be kept."""

    tag = "retire"
    holder: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class Reuse(Operation):
    """`holder` takes the `num_pages` cached pages with the lowest ids."""

    tag = "reuse"
    holder: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class Evict(Operation):
    """Free `num_pages` cached pages, or all that are cached."""

    tag = "evict"
    num_pages: int


@dataclass(frozen=True, slots=True)
class Launch(Operation):
    """A step begins, which may touch all that is held."""

    tag = "launch"


@dataclass(frozen=True, slots=True)
class Complete(Operation):
    """The oldest step has been processed."""

    tag = "complete"


@dataclass(frozen=True, slots=True)
class FreeAfter(Operation):
    """`holder` gives back all that it has while the newest step may still touch it."""

    tag = "free-after"
    holder: str


@dataclass(frozen=True, slots=True)
class Snapshot(Operation):
    tag = "snapshot"
    name: str


@dataclass(frozen=True, slots=True)
class Restore(Operation):
    tag = "restore"
    name: str


@dataclass(frozen=True, slots=True)
class Open(Operation):
    """A request gets a row."""

    tag = "open"
    request: str


@dataclass(frozen=True, slots=True)
class Grow(Operation):
    """Room for `num_tokens` tokens past what is committed."""

    tag = "grow"
    request: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Commit(Operation):
    """`num_tokens` more tokens of a request are final, or as many as fit."""

    tag = "commit"
    request: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trim(Operation):
    """Only `num_tokens` past what is committed are still needed."""

    tag = "trim"
    request: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Close(Operation):
    """The request leaves; its row may be in use by the newest step, if there is one."""

    tag = "close"
    request: str


OPERATIONS: tuple[type[Operation], ...] = (
    *(Alloc, Free, FreeStray, FreeTwice, Fork, Retire, Reuse, Evict, Launch, Complete, FreeAfter),
    *(Snapshot, Restore, Open, Grow, Commit, Trim, Close),
)
