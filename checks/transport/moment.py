"""One moment of a transport's trial: what happened, what it may have done, and what can be seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .contract import Counters, TransportCapabilities, TransportConfig


class Joined(NamedTuple):
    """A request takes part in decoding, and what it brought."""

    request: int
    missing: str  # what had not arrived intact; empty if everything had
    wrong: str  # what is not what was computed; empty if all is
    order: tuple[tuple[str, int | None], ...]  # its life so far: what, and at which operation


@dataclass(slots=True)
class Moment:
    """One operation and what came of it; empty strings and tuples where nothing is wrong or nothing was to be seen."""

    config: TransportConfig
    capabilities: TransportCapabilities
    operation: object = "make"
    counters: dict[str, Counters] = field(default_factory=dict)
    num_holds: int = 0
    freed: str = ""  # a page that must be held is free, or another's, or another's content stands in it
    joined: tuple[Joined, ...] = ()
    acknowledged: str = ""  # an ack for what has not arrived
    repeated: str = ""  # what a message did that had arrived before, or was of an attempt that counts no more
    num_repeated: int = 0
    num_unverified: int = 0  # pages that are reserved, and not verified yet
    cached: str = ""  # one of them is in the prefix cache
    was_quiet: bool = False
    leaked: str = ""  # what is held when every patience has run out
    unheard: str = ""  # a request that did not end although the other worker is gone
    a_peer_is_gone: bool = False
    role: str = ""  # what was done that is not this worker's to do
    num_roles: int = 0
