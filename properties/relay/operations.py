"""What is done to a relay. A batch is a list of requests by number; 0 is a padding lane."""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Open(Operation):
    """A request gets the lowest free row, and a generation of its own."""

    tag = "open"
    request: int


@dataclass(frozen=True, slots=True)
class Write(Operation):
    """A step publishes and stashes for those of the batch whose cells are empty."""

    tag = "write"
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish(Operation):
    """A step writes the lengths alone, of those whose cells have none."""

    tag = "publish"
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stash(Operation):
    """A step writes the fields alone, of those whose cells have none."""

    tag = "stash"
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Read(Operation):
    """A step resolves those of the batch whose cells are whole."""

    tag = "read"
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release(Operation):
    """The request leaves, and its row is dropped; the next one may get it."""

    tag = "release"
    request: int


@dataclass(frozen=True, slots=True)
class Inherit(Operation):
    """`heir` gets the row of `request` at once, and nobody drops the cell."""

    tag = "inherit"
    request: int
    heir: int


@dataclass(frozen=True, slots=True)
class ReadAnyway(Operation):
    """Read the whole batch as it stands, whatever its cells hold, equal rows included."""

    tag = "read-anyway"
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteAnyway(Operation):
    """Write the lengths (`half` "lengths") or the fields ("fields") of the whole batch as it stands."""

    tag = "write-anyway"
    half: str
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadAs(Operation):
    """Read a request's cell with a generation that is `ahead` of its own, or behind. The batch comes along, as `Read` reads it."""

    tag = "read-as"
    request: int
    ahead: int
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HalfAs(Operation):
    """The missing half of a request's cell comes from a generation that is `ahead` of its own, or behind."""

    tag = "half-as"
    request: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Stray(Operation):
    """`call` with a row that is not there: `offset` < 0 is the row itself, else it counts from one past the last. With the batch."""

    tag = "stray"
    call: str
    offset: int
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StashOddly(Operation):
    """Stash for a request with a field missing, or one too many, or with hidden states that are not declared, or without those that are."""

    tag = "stash-oddly"
    how: str
    request: int


OPERATIONS: tuple[type[Operation], ...] = (
    *(Open, Write, Publish, Stash, Read, Release, Inherit),
    *(ReadAnyway, WriteAnyway, ReadAs, HalfAs, Stray, StashOddly),
)
