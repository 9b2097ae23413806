"""The contract of a transport: two workers, requests on their way from the first to the second, and a link that promises nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ...properties.harness.contract import Capabilities

PREFILL, DECODE = "prefill", "decode"
SIDES = (PREFILL, DECODE)

# What the trial understands of a message; a transport may have others, which are carried all the same.
OFFER, ACCEPT, REJECT, PAGE, MANIFEST = "offer", "accept", "reject", "page", "manifest"
ACK, NACK, CANCEL, CANCEL_ACK, OTHER = "ack", "nack", "cancel", "cancel_ack", "other"

PageContent = tuple[bytes, bytes]
"""A page as it stands in the target pool and in the draft pool."""


class Message(NamedTuple):
    """Something on the link. `body` is the transport's own; the rest says what it is about.

    `attempt` and `generation` tell apart attempts of one request and incarnations of the prefill worker: no pair of them comes back for a
    request. `number` is the index of a page, or the first page that an accept wants.
    """

    kind: str
    request: int
    attempt: int
    generation: int
    number: int
    body: Any


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """What `make(config)` builds: two workers with pools of their own. Times are nanoseconds.

    lease_ns     the prefill side gives an attempt up after so long without news
    hold_ns      the decode side gives reserved pages up after so long without news
    fence_ns     after that, pages are kept for so long, because something may still be under way
    num_output   tokens of every answer, the first one included
    generation   the prefill worker's first incarnation; a restart adds `generation_step`
    """

    page_size: int = 1
    prefill_pages: int = 16
    decode_pages: int = 16
    chunk_size: int = 4
    num_output: int = 3
    hidden: bool = False
    generation: int = 1
    generation_step: int = 1
    lease_ns: int = 20
    hold_ns: int = 50
    fence_ns: int = 10

    def __post_init__(self) -> None:
        assert min(self.page_size, self.prefill_pages, self.decode_pages, self.chunk_size, self.fence_ns) >= 1
        assert self.num_output >= 2 and self.hold_ns > self.lease_ns >= 1 and self.generation_step >= 1

    @property
    def patience_ns(self) -> int:
        """After so long without a message a transfer is over on both sides, whatever it was at: two attempts, a cancel, a fence."""
        return 3 * self.lease_ns + 2 * self.hold_ns + 2 * self.fence_ns


@dataclass(frozen=True, slots=True)
class TransportCapabilities(Capabilities):
    """What a transport declares."""

    roles: bool = False
    """`change_role(side)`"""

    FOUNDATIONS: ClassVar = {}


class Counters(NamedTuple):
    """Transfers of one side."""

    started: int
    completed: int
    failed: int
    cancelled: int
    in_flight: int


class Transport(Protocol):
    """Both sides of a transport, and the workers around them. Requests are numbers; `now_ns` never goes back.

    A prompt's KV is a function of its tokens, so pages of equal prefixes may be shared. The trial writes the computed pages; the
    transport moves them through the two functions that it is given.
    """

    def connect(self, read: Callable[[int], PageContent], write: Callable[[int, PageContent], None]) -> None:
        """Called once: how to read a page of the prefill pool, and how to write one of the decode pool."""

    def submit(
        self, request: int, tokens: Sequence[int], first_token: int, draft: Sequence[int], now_ns: int
    ) -> object:
        """A request for the prefill worker; False if refused. Computing its prompt gives `first_token` and the draft input `draft`."""

    def compute(self, now_ns: int) -> Sequence[tuple[int, int, int]]:
        """One step of the prefill worker: (request, index, page) of the pages that are final now and were not before."""

    def decode(self, now_ns: int) -> Sequence[int]:
        """One step of the decode worker: the requests whose prompts it computed in it, all of which had been there before."""

    def collect(self, side: str) -> Sequence[Message]:
        """Read and write the pages that are to be, and hand out the messages of this side."""

    def deliver(self, side: str, message: Message, now_ns: int) -> None:
        """A message arrives."""

    def damaged(self, message: Message, how: int) -> Message | None:
        """The page message with something wrong: a changed byte in the target (0), cut short (1), a changed byte in the draft (2), another
        index (3). None where that makes no sense."""

    def cancel(self, side: str, request: int, now_ns: int) -> None:
        """The client of this side gives the request up."""

    def peer_lost(self, side: str, now_ns: int) -> None:
        """The other worker is gone for good, this side is told."""

    def restart(self, side: str) -> None:
        """This worker is a new one: it knows nothing, its pool is empty; prefill: the next generation."""

    def tick(self, side: str, now_ns: int) -> None:
        """Time has passed."""

    # what can be seen
    def free(self, side: str) -> Sequence[int]:
        """The free pages of the pool."""

    def cached(self, side: str) -> Sequence[int]:
        """The pages that a prefix cache keeps."""

    def pages(self, side: str, request: int) -> Sequence[int]:
        """The pages of the request's prompt, index after index, as far as it has any here."""

    def counters(self, side: str) -> Sequence[int]:
        """As in `Counters`."""

    def joined(self) -> Sequence[tuple[int, int, Sequence[int]]]:
        """(request, first token, draft input) of the requests that have joined the decode batch since the last call."""

    def ended(self, side: str) -> Sequence[tuple[int, str]]:
        """(request, how) of those that ended since the last call: "transferred", "length", "aborted", "error". On the decode side only
        requests that had joined."""

    # roles
    def change_role(self, side: str) -> object:
        """Let the worker of this side do something else, and then again what it did; False if it has anything to do."""


METHODS: dict[str, tuple[str, ...]] = {
    "": (
        *("connect", "submit", "compute", "decode", "collect", "deliver", "damaged", "cancel", "peer_lost", "restart"),
        *("tick", "free", "cached", "pages", "counters", "joined", "ended"),
    ),
    "roles": ("change_role",),
}
"""Capability -> the methods that it promises; "" is what every transport has."""
