"""What is true of a transport: which request is where, which pages somebody may still read or write, and what they must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from .contract import DECODE, PREFILL, SIDES, PageContent, TransportConfig

Attempt = tuple[int, int, int]
"""(request, generation, attempt)"""

GARBAGE: PageContent = (b"garbage!", b"garbage!")


def tokens_of(family: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt: those of one family begin alike."""
    return tuple((family * 7 + at * 3) % 19 for at in range(num_tokens))


def first_token_of(tokens: tuple[int, ...]) -> int:
    """The target's answer to a prompt; no prompt contains it."""
    return 1000 + int.from_bytes(_digest(b"first", tokens)[:2], "little")


def draft_of(tokens: tuple[int, ...], hidden: bool) -> tuple[int, ...]:
    """What the first draft starts from: a token id of more than 31 bits, and a hidden state of two numbers if one is needed."""
    digest = _digest(b"draft", tokens)
    token = (1 << 33) + digest[0]
    return (token, digest[1], digest[2]) if hidden else (token,)


def content_of(tokens: tuple[int, ...], index: int, config: TransportConfig) -> PageContent:
    """Page `index` of a prompt. With hidden states the draft looks one token ahead, so its KV depends on that as well."""
    end = (index + 1) * config.page_size
    seen = tokens[:end]
    ahead = (*tokens, first_token_of(tokens))[: end + 1] if config.hidden else seen
    return _digest(b"target", seen), _digest(b"pair", ahead)


def _digest(what: bytes, tokens: tuple[int, ...]) -> bytes:
    return blake2b(what + b",".join(b"%d" % token for token in tokens), digest_size=8).digest()


@dataclass(slots=True, eq=False)
class Run:
    """One request, from its start to its end."""

    request: int
    tokens: tuple[int, ...]
    num_pages: int
    started_ns: int
    is_over: bool = False  # on the prefill side
    is_decoding: bool = False
    has_joined: bool = False
    pages: dict[int, int] = field(default_factory=dict)  # index -> page on the prefill side, of what is computed
    target_pages: tuple[int, ...] = ()  # on the decode side, when it was acknowledged
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)  # side -> (generation, attempt) that counts there
    times: dict[str, int] = field(default_factory=dict)  # event -> number of the operation at which it was first seen


@dataclass(slots=True, eq=False)
class Hold:
    """Pages that must stay as they are: those of a prompt on its way, at its source or at its target."""

    run: Run
    pages: dict[int, int]  # index -> page
    since_ns: int
    generation: int
    cancelled_ns: int | None = None  # when this side gave it up
    lost_ns: int | None = None  # when this side heard that the other one is gone
    may_go: bool = False  # an ack, a cancel or its answer has come


@dataclass(slots=True)
class AttemptSeen:
    """What has reached the decode side of one attempt."""

    run: Run
    first_page: int = 0
    intact: dict[int, None] = field(default_factory=dict)
    manifest: bool = False
    was_accepted: bool = False
    ends: dict[str, None] = field(default_factory=dict)  # workers that knew of it, and are not there any more

    @property
    def is_whole(self) -> bool:
        return self.manifest and all(index in self.intact for index in range(self.first_page, self.run.num_pages))


class TransportModel:
    """Runs, holds and attempts; the trial tells it what happened."""

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.runs: dict[int, Run] = {}  # request -> its newest run
        self.decoding: dict[int, Run] = {}  # request -> the run that was acknowledged last
        self.holds: dict[str, dict[int, Hold]] = {side: {} for side in SIDES}
        self.attempts: dict[Attempt, AttemptSeen] = {}
        self.bereaved: list[Run] = []  # on the prefill side, when a decode worker was gone: each must end
        self.dead: dict[str, bool] = dict.fromkeys(SIDES, False)

    def live(self, side: str) -> list[Run]:
        """The runs that a side answers for."""
        if side == PREFILL:
            return [run for run in self.runs.values() if not run.is_over]
        return [run for run in self.decoding.values() if run.is_decoding]

    def may_go(self, side: str, hold: Hold, now_ns: int) -> bool:
        """Whether the pages of a hold may be given back: by a word of the other side, or by time."""
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
        """A side hears that the other worker is gone, or that there is one of a newer `generation`."""
        for hold in self.holds[side].values():
            if hold.lost_ns is None and (generation is None or hold.generation < generation):
                hold.lost_ns = now_ns

    def forget(self, side: str) -> None:
        """A worker began anew: it holds nothing, and what it answered for is over."""
        self.holds[side].clear()
        for seen in self.attempts.values():
            if side == PREFILL or seen.was_accepted:
                seen.ends[side] = None
        for run in self.live(side):
            run.is_over = run.is_over or side == PREFILL
            run.is_decoding = run.is_decoding and side == PREFILL

    def is_empty(self, side: str) -> bool:
        """No request and no page is anybody's on this side, as far as is known."""
        return not self.live(side) and not self.holds[side]


__all__ = ["DECODE", "GARBAGE", "PREFILL", "Attempt", "AttemptSeen", "Hold", "Run", "TransportModel"]
