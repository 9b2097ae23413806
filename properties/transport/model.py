"""The transport's model: the place of each request, the pages that may still be read or written and their expected
content, and one moment of the trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from .contract import DECODE, PREFILL, SIDES, Counters, PageContent, TransportCapabilities, TransportConfig

Attempt = tuple[int, int, int]
"""(request, generation, attempt)"""

GARBAGE: PageContent = (b"garbage!", b"garbage!")


def tokens_of(family: int, num_tokens: int) -> tuple[int, ...]:
    """Make a prompt: those of one family begin alike."""
    return tuple((family * 7 + at * 3) % 19 for at in range(num_tokens))


def first_token_of(tokens: tuple[int, ...]) -> int:
    """Return the target's answer to a prompt; no prompt contains it."""
    return 1000 + int.from_bytes(_digest(b"first", tokens)[:2], "little")


def draft_of(tokens: tuple[int, ...], serial: int, hidden: bool) -> tuple[int, ...]:
    """Return what the first draft of a run starts from: a token id of more than 31 bits, with `hidden` a hidden state
    of two numbers too.

    Unlike KV it is not a function of the tokens: runs with equal prompts differ in it.
    """
    digest = _digest(b"draft%d" % serial, tokens)
    token = (1 << 33) + digest[0]
    return (token, digest[1], digest[2]) if hidden else (token,)


def content_of(tokens: tuple[int, ...], index: int, config: TransportConfig) -> PageContent:
    """Return page `index` of a prompt. With hidden states the draft looks one token ahead, so its KV depends
    on that token too."""
    end = (index + 1) * config.page_size
    seen = tokens[:end]
    ahead = (*tokens, first_token_of(tokens))[: end + 1] if config.hidden else seen
    return _digest(b"target", seen), _digest(b"pair", ahead)


def _digest(what: bytes, tokens: tuple[int, ...]) -> bytes:
    return blake2b(what + b",".join(b"%d" % token for token in tokens), digest_size=8).digest()


@dataclass(slots=True, eq=False)
class TransferRun:
    """One request, from its start to its end."""

    request: int
    tokens: tuple[int, ...]
    num_pages: int
    serial: int
    num_output: int  # tokens, the first one included
    is_over: bool = False  # on the prefill side
    how: str = ""  # it ended there
    must_abort: bool = False  # the prefill side knows that the client of the other side has given it up
    is_decoding: bool = False
    has_joined: bool = False
    pages: dict[int, int] = field(default_factory=dict)  # index -> page on the prefill side, of what is computed
    target_pages: tuple[int, ...] = ()  # on the decode side, when it was acknowledged
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)  # side -> (generation, attempt) that counts there
    # event -> its number, counted over all events, when it was first seen
    times: dict[str, int] = field(default_factory=dict)
    acked_ns: int | None = None  # when the decode worker that lives now first said that the run has joined
    called_back: bool = False  # the prefill side's cancel has reached that worker
    withdrawn: bool = False  # by the client of the decode side, and not offered there since
    num_joined: int = 0  # by that worker
    was_served: bool = False  # decoded to its end by that worker
    is_asked_back: bool = False  # the prefill worker's next plan is to retract it

    @property
    def goes_on(self) -> bool:
        """Whether the decode worker decodes it, and no client has given it up."""
        return self.is_decoding and not (self.called_back or self.withdrawn)

    @property
    def is_computed(self) -> bool:
        """Whether all pages of its prompt are there on the prefill side."""
        return len(self.pages) == self.num_pages


@dataclass(slots=True, eq=False)
class Hold:
    """Pages that must not change: those of a prompt in transfer, at its source or at its target."""

    run: TransferRun
    pages: dict[int, int]  # index -> page
    since_ns: int  # of the last news
    generation: int
    cancelled_ns: int | None = None  # when this side gave it up
    lost_ns: int | None = None  # when this side learned that the other one is gone
    may_go: bool = False  # an ack, a cancel or its answer has come
    is_called_back: bool = False  # by the prefill side, at the decode side


@dataclass(slots=True)
class AttemptSeen:
    """What of one attempt has reached the decode side."""

    run: TransferRun
    first_page: int = 0
    intact: dict[int, None] = field(default_factory=dict)
    manifest: bool = False
    was_accepted: bool = False
    is_withdrawn: bool = False  # by the client of the decode side
    ends: dict[str, None] = field(default_factory=dict)  # workers that took part in it and are gone

    @property
    def is_whole(self) -> bool:
        return self.manifest and all(index in self.intact for index in range(self.first_page, self.run.num_pages))


class TransportModel:
    """Hold runs, holds and attempts. The trial reports what happened."""

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.runs: dict[int, TransferRun] = {}  # request -> its newest run
        self.decoding: dict[int, TransferRun] = {}  # request -> the run that was acknowledged last
        self.holds: dict[str, dict[int, Hold]] = {side: {} for side in SIDES}
        self.attempts: dict[Attempt, AttemptSeen] = {}
        self.bereaved: list[TransferRun] = []  # on the prefill side when a decode worker died: each must end
        self.dead: dict[str, bool] = dict.fromkeys(SIDES, False)

    def live(self, side: str) -> list[TransferRun]:
        """Return the runs that a side has not ended."""
        if side == PREFILL:
            return [run for run in self.runs.values() if not run.is_over]
        return [run for run in self.decoding.values() if run.is_decoding]

    def may_go(self, side: str, hold: Hold, now_ns: int) -> bool:
        """Return whether the pages of a hold may be given back, by a message of the other side or by time."""
        config = self.config
        if hold.may_go:
            return True
        if hold.lost_ns is not None and now_ns >= hold.lost_ns + config.fence_ns:
            return True
        if hold.cancelled_ns is not None:
            return now_ns >= hold.cancelled_ns + config.lease_ns + config.fence_ns
        patience = config.lease_ns if side == PREFILL else config.hold_ns
        return now_ns >= hold.since_ns + patience + config.fence_ns

    def lose_peer(self, side: str, now_ns: int, generation: int | None = None) -> None:
        """Note that a side has learned of the other worker's end, or of a worker with a newer `generation`."""
        for hold in self.holds[side].values():
            if hold.lost_ns is None and (generation is None or hold.generation < generation):
                hold.lost_ns = now_ns

    def forget(self, side: str) -> None:
        """Note that a worker began anew: it holds nothing, and its requests are over."""
        self.holds[side].clear()
        for seen in self.attempts.values():
            if side == PREFILL or seen.was_accepted:
                seen.ends[side] = None
        for run in self.live(side):
            run.is_over = run.is_over or side == PREFILL
            run.is_decoding = run.is_decoding and side == PREFILL
        if side == DECODE:
            for run in [*self.runs.values(), *self.decoding.values()]:
                run.acked_ns, run.num_joined = None, 0
                run.called_back = run.withdrawn = run.was_served = False

    def lose_kv(self, side: str) -> None:
        """Note that a worker's device was replaced: it holds nothing, and computes what it still has again."""
        self.holds[side].clear()
        if side == PREFILL:
            for seen in self.attempts.values():
                seen.ends[PREFILL] = None
            for run in self.live(PREFILL):
                run.pages.clear()

    def is_empty(self, side: str) -> bool:
        return not self.live(side) and not self.holds[side]


class Joined(NamedTuple):
    """A request that takes part in decoding, and what it brought."""

    request: int
    missing: str  # what had not arrived intact; empty if everything had
    wrong: str  # what is not what was computed; empty if all is
    # what happened to it so far, and at which event; one or more orders
    order: tuple[tuple[tuple[str, int | None], ...], ...]


@dataclass(slots=True)
class TransportMoment:
    """One operation and its effects; strings and tuples are empty if nothing is wrong or nothing was seen."""

    config: TransportConfig
    capabilities: TransportCapabilities
    operation: object = "make"
    counters: dict[str, Counters] = field(default_factory=dict)
    miscounted: str = ""  # what the counters cannot be, by the messages
    num_holds: int = 0
    freed: str = ""  # a page that must be held is free, or has other content
    joined: tuple[Joined, ...] = ()
    acknowledged: str = ""  # an ack for what has not arrived
    repeated: str = ""  # the effect of a repeated message, or of one whose attempt is over
    num_repeated: int = 0
    late: str = ""  # what was done too early, or not in time
    num_timed: int = 0  # transfers that waited while time passed
    unserved: str = ""  # a request that ended on one side and goes on, or ended without a reason, on the other
    num_ended: int = 0
    num_unverified: int = 0  # pages that are reserved, and not verified yet
    cached: str = ""  # one of them is in the prefix cache
    was_quiet: bool = False
    leaked: str = ""  # what is held when every timeout is over
    unheard: str = ""  # a request that did not end although the other worker is gone
    a_peer_is_gone: bool = False
    role: str = ""  # what a worker did outside of its role
    num_roles: int = 0
