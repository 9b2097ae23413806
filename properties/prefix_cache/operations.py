"""What is done to a prefix cache.

A text is written as kinds of pages and what stands behind them: `pages` (0, 1) with `extra` 2 are a page of kind 0, one of kind 1 and
two more tokens; a negative `extra` takes tokens off the end. So an operation keeps its meaning when the page size gets smaller.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..harness.operation import Operation


@dataclass(frozen=True, slots=True)
class Match(Operation):
    """Look a text up and remember the match as `name`, unlocked."""

    tag = "match"
    name: str
    pages: tuple[int, ...]
    extra: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Lock(Operation):
    """Lock what the match `name` found, or be refused if a page of it has been evicted since."""

    tag = "lock"
    name: str


@dataclass(frozen=True, slots=True)
class Unlock(Operation):
    """Take a lock of the match `name` back."""

    tag = "unlock"
    name: str


@dataclass(frozen=True, slots=True)
class UnlockStray(Operation):
    """Unlock the match `name`, which nobody has locked. Must be refused."""

    tag = "unlock-stray"
    name: str


@dataclass(frozen=True, slots=True)
class Insert(Operation):
    """A text has been computed elsewhere, all of it, whether it is cached or not; the copies are freed at once."""

    tag = "insert"
    pages: tuple[int, ...]
    extra: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Evict(Operation):
    """Free `num_slots` slots, or all that can be."""

    tag = "evict"
    num_slots: int


@dataclass(frozen=True, slots=True)
class Peek(Operation):
    """Ask how much of a text is cached, and change nothing."""

    tag = "peek"
    pages: tuple[int, ...]
    extra: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Compare(Operation):
    """Look one text up in two namespaces."""

    tag = "compare"
    pages: tuple[int, ...]
    extra: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Admit(Operation):
    """A request starts from what is cached of its text, locks that and computes the rest; it is turned away if that does not fit."""

    tag = "admit"
    request: str
    pages: tuple[int, ...]
    extra: int
    namespace: str


@dataclass(frozen=True, slots=True)
class Share(Operation):
    """A running request hands its first `num_tokens` positions over, goes on with the cached ones and locks them."""

    tag = "share"
    request: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Finish(Operation):
    """A request ends and hands over all that it has computed."""

    tag = "finish"
    request: str


@dataclass(frozen=True, slots=True)
class Abort(Operation):
    """A request ends and hands nothing over."""

    tag = "abort"
    request: str


@dataclass(frozen=True, slots=True)
class Complete(Operation):
    """The step in flight has been processed."""

    tag = "complete"


OPERATIONS: tuple[type[Operation], ...] = (
    *(Match, Lock, Unlock, UnlockStray, Insert, Evict, Peek, Compare),
    *(Admit, Share, Finish, Abort, Complete),
)
