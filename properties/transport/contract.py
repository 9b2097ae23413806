"""The contract of a transport: two workers, requests on their way from the first to the second, and a link that
loses and repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices

PREFILL, DECODE = "prefill", "decode"
SIDES = (PREFILL, DECODE)

# The messages that the trial knows; it carries all others too.
OFFER, ACCEPT, REJECT, PAGE, MANIFEST = "offer", "accept", "reject", "page", "manifest"
ACK, NACK, CANCEL, CANCEL_ACK, RENEW = "ack", "nack", "cancel", "cancel_ack", "renew"

GENERATIONS = ((1, 1), (1, 1), ((1 << 31) - 1, 1), (1, 1 << 32), ((1 << 63) + 5, 1 << 40))
"""(first generation, step) of prefill workers: also where 32 and 63 bits end."""

PageContent = tuple[bytes, bytes]
"""A page's content in the target pool and in the draft pool."""


class Message(NamedTuple):
    """A message on the link. `body` is the transport's own; the other fields say what it is about.

    `attempt` and `generation` number the attempts of a request and the incarnations of the prefill worker: no request
    has a pair twice. `number` is the index of a page, the first page that an accept wants, or the first attempt that an
    offer or a cancel is about: a cancel ends the attempts from that one to its own, and no earlier one, even where its
    sender no longer knows that both were of one transfer.
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

    lease_ns      the prefill side gives an attempt up after this time without news
    hold_ns       the decode side gives reserved pages up after this time without news
    fence_ns      pages are kept this much longer, because something may still be under way
    max_attempts  how often a transfer is offered before it fails
    num_output    tokens of an answer, the first one included, but for requests of one token
    generation    the prefill worker's first incarnation; a restart adds `generation_step`
    slow_link     pages are read out of the prefill pool when the trial says so, else at once
    ahead         the decode worker has a step in flight when it plans the next one
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
    max_attempts: int = 2
    slow_link: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        assert min(self.page_size, self.prefill_pages, self.decode_pages, self.chunk_size, self.fence_ns) >= 1
        assert self.num_output >= 2 and self.hold_ns > self.lease_ns >= 1 and self.generation_step >= 1
        assert self.max_attempts >= 1

    @classmethod
    def draw(cls, choose: Choices, has: TransportCapabilities) -> TransportConfig:
        """Choose small pages, and pools that one prompt or several fill."""
        page_size = choose((1, 2, 4))
        generation, step = choose(GENERATIONS)
        return cls(
            page_size=page_size,
            prefill_pages=choose((24, 12, 40)) // page_size + 2,
            decode_pages=choose((40, 28, 12)) // page_size + 6,
            chunk_size=choose((4, 2, 16)),
            num_output=choose((3, 2, 6)),
            hidden=choose((False, True)),
            generation=generation,
            generation_step=step,
            max_attempts=choose((2, 2, 1, 3)),
            slow_link=choose((False, True)),
            ahead=has.ahead and choose((True, False)),
        )

    @property
    def reserve(self) -> int:
        """Slots past its length that a decoded request needs: of a draft and its root, for each step in flight."""
        return 2 * (1 + self.ahead)

    @property
    def patience_ns(self) -> int:
        """How long a transfer without messages may last, in any state: all attempts, a cancel and a fence."""
        return (self.max_attempts + 1) * self.lease_ns + 2 * self.hold_ns + 2 * self.fence_ns

    @property
    def memory_ns(self) -> int:
        """How long the decode side must remember a transfer that has ended there:
        as long as offers and cancels of it may come."""
        return self.max_attempts * (self.lease_ns + self.hold_ns) + self.fence_ns


@dataclass(frozen=True, slots=True)
class TransportCapabilities(Capabilities):
    """What a transport declares."""

    roles: bool = False  # `change_role(side)`
    device_loss: bool = False  # `lose_kv(side, now_ns)`
    going_on: bool = False  # `go_on(wish, num_shown, now_ns)`
    retraction: bool = False  # `retract(side, request, now_ns)`
    reserves: bool = False  # a request gets pages where each that is decoded finds its reserve beside it
    ahead: bool = False  # `written()`: the decode worker can plan a step while another one is in flight
    late: bool = False  # a message may come again, and behind the cancel or the end of its attempt, and changes nothing


class Counters(NamedTuple):
    """How many transfers of one side there were."""

    started: int
    completed: int
    failed: int
    cancelled: int
    in_flight: int


class Ended(NamedTuple):
    """A request that has ended on one side."""

    request: int
    how: str  # "transferred", "length", "aborted" or "error"
    num_output: int  # tokens, the first one included
    reason: str  # of an error


class TransferWish(NamedTuple):
    """What a client asks the prefill worker for. Computing the tokens yields `first_token`, and `draft`,
    the draft input."""

    request: int
    tokens: Sequence[int]
    first_token: int
    draft: Sequence[int]
    num_output: int  # tokens, the first one included


class TransportPair(Protocol):
    """Both sides of a transport, and the workers around them. Requests are numbers; `now_ns` never goes back.

    A prompt's KV is a function of its tokens, so pages of equal prefixes may be shared. The trial writes the computed
    pages; the transport moves them through the two functions that it is given.

    A side gives pages back as soon as an ack, a refusal, a cancel or the answer to one lets it, unless the link still
    reads them. Every cancel is answered, also one for a transfer that is not known.
    """

    def connect(self, read: Callable[[int], PageContent], write: Callable[[int, PageContent], None]) -> None:
        """Take the functions that read a page of the prefill pool and write one of the decode pool. Called once."""

    def submit(self, wish: TransferWish, now_ns: int) -> object:
        """Give the prefill worker a request; False if refused.
        A request for one token ends with its prompt, and is never offered."""

    def compute(self, now_ns: int) -> Sequence[tuple[int, int, int]]:
        """Run one step of the prefill worker. Returns (request, index, page) of the pages that became final."""

    def decode(self, now_ns: int) -> Sequence[tuple[int, int, int]]:
        """Run one step of the decode worker. Returns (request, index, page) of the prompts' pages that it computed:
        those of requests whose KV it had lost. With `config.ahead` it launches a step, and then ends the one before, or
        the last if there is no next."""

    def collect(self, side: str) -> Sequence[Message]:
        """Write the pages that are due, and return the messages of this side:
        first those of the pages that have been read out."""

    def read_out(self, count: int) -> None:
        """Read the next `count` of the pages that are to be sent, or as many as there are.
        `read` is called for nothing else."""

    def deliver(self, side: str, message: Message, now_ns: int) -> None:
        """Receive a message."""

    def damaged(self, message: Message, how: int) -> Message | None:
        """Return the page message with a changed byte in the target (0), cut short (1), with a changed byte in the
        draft (2) or another index (3). None for what is no page."""

    def cancel(self, side: str, request: int, now_ns: int) -> None:
        """Give a request up, as the client of this side."""

    def peer_lost(self, side: str, now_ns: int) -> None:
        """Tell this side that the other worker is gone for good. Its requests that are not decoded yet end now."""

    def restart(self, side: str) -> None:
        """Replace this worker by a new one with an empty pool; for prefill, of the next generation."""

    def tick(self, side: str, now_ns: int) -> None:
        """Note that time has passed."""

    # what can be seen
    def free(self, side: str) -> Sequence[int]:
        """Return the free pages of the pool."""

    def reading(self) -> Sequence[int]:
        """Return the pages of the prefill pool that the link is to read and has not read yet."""

    def cached(self, side: str) -> Sequence[int]:
        """Return the pages that a prefix cache keeps."""

    def pages(self, side: str, request: int) -> Sequence[int]:
        """Return the pages of the request's prompt on this side in the order of their indices."""

    def counters(self, side: str) -> Sequence[int]:
        """Return the numbers of `Counters`."""

    def joined(self) -> Sequence[tuple[int, int, Sequence[int]]]:
        """Return (request, first token, draft input) of those that have joined the decode batch since the last call."""

    def ended(self, side: str) -> Sequence[Ended]:
        """Return the requests that ended since the last call. On the decode side only those that had joined."""

    @needs("ahead")
    def written(self) -> Sequence[tuple[int, int]]:
        """Return (request, page) of what the decode worker's steps in flight may write."""

    @needs("retraction")
    def retract(self, side: str, request: int, now_ns: int) -> None:
        """Let the next step of a worker take what a request has there, whose prompt it computes or which it decodes: it
        waits, and is computed again. Its transfer is cancelled, and another one begins. Nothing happens to other
        requests."""

    @needs("roles")
    def change_role(self, side: str) -> object:
        """Change the role of this side's worker, and back. Returns False if it has requests or pages."""

    @needs("device_loss")
    def lose_kv(self, side: str, now_ns: int) -> None:
        """Replace this worker's device: its KV is gone, its host goes on as another incarnation, its transfers fail.
        Requests without a transfer stay, those that had joined are computed again."""

    @needs("going_on")
    def go_on(self, wish: TransferWish, num_shown: int, now_ns: int) -> object:
        """Give the prefill worker a request that a decode worker was lost with; False if refused. The tokens end with
        the output that its client has been shown, but for the last of these `num_shown` tokens: that is `first_token`,
        which no model is asked for again."""
