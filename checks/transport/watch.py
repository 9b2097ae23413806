"""What the transport's trial observes: the owners of pages, the messages, the requests that joined, and what is wrong with them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ...properties.harness.operation import Operation
from ...properties.harness.trial import Trial
from . import contract
from .contract import (
    DECODE,
    PREFILL,
    SIDES,
    Counters,
    Message,
    PageContent,
    Transport,
    TransportCapabilities,
    TransportConfig,
)
from .model import GARBAGE, AttemptSeen, Hold, Joined, Moment, Run, TransportModel, content_of, draft_of, first_token_of

MAX_UNDER_WAY = 60
MAX_PAST = 8
OTHER_SIDE = {PREFILL: DECODE, DECODE: PREFILL}
ENDING = {  # side -> the messages after which its pages may go
    PREFILL: (contract.ACK, contract.REJECT, contract.CANCEL, contract.CANCEL_ACK),
    DECODE: (contract.CANCEL, contract.CANCEL_ACK),
}


class Parcel(NamedTuple):
    """A message under way. Copies of one message have one number."""

    number: int
    message: Message
    is_damaged: bool = False


class TransportWatch(Trial):
    """Hold the subject, its model, both pools and the link. `TransportTrial` adds the operations."""

    subject: Transport
    config: TransportConfig
    capabilities: TransportCapabilities
    moment: Moment

    def prepare(self) -> None:
        self.model = TransportModel(self.config)
        self.now_ns = 1
        self.pools: dict[str, dict[int, PageContent]] = {PREFILL: {}, DECODE: {}}
        self.under_way: dict[str, list[Parcel]] = {PREFILL: [], DECODE: []}  # side where they will arrive -> parcels
        self.past: dict[str, deque[Parcel]] = {side: deque(maxlen=MAX_PAST) for side in SIDES}
        self._num_parcels = 0
        self._num_events = 0
        self._arrived: dict[tuple[str, int], int] = {}  # (side, parcel) that has arrived and had an effect -> when
        self.must(self.subject.connect, self._read, self._write)
        self.moment = Moment(self.config, self.capabilities)
        self._observe()

    def _read(self, page: int) -> PageContent:
        return self.pools[PREFILL].get(page, GARBAGE)

    def _write(self, page: int, content: PageContent) -> None:
        self.pools[DECODE][page] = content

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        self._num_events += 1
        self.moment = Moment(self.config, self.capabilities, operation)

    def end(self) -> None:
        self._collect()
        self._observe()

    def _living(self) -> list[str]:
        return [side for side in SIDES if not self.model.dead[side]]

    def _collect(self) -> None:
        """Take the messages of both sides. Pages are read and written meanwhile."""
        for side in self._living():
            for message in self.must(self.subject.collect, side):
                self._sent(side, message)

    def _sent(self, side: str, message: Message) -> None:
        self._note_sent(side, message)
        parcels = self.under_way[OTHER_SIDE[side]]
        if len(parcels) < MAX_UNDER_WAY:
            self._num_parcels += 1
            parcels.append(Parcel(self._num_parcels, message))

    def _note_sent(self, side: str, message: Message) -> None:
        model, request = self.model, message.request
        attempt = (request, message.generation, message.attempt)
        run = model.runs.get(request)
        if side == PREFILL and message.kind == contract.OFFER and run is not None:
            model.attempts.setdefault(attempt, AttemptSeen(run))
            run.newest[PREFILL] = attempt[1:]
            hold = model.holds[PREFILL].get(request)
            if hold is None or hold.run is not run:
                model.holds[PREFILL][request] = Hold(run, run.pages, self.now_ns, message.generation)
            run.times.setdefault("its transfer's start", self._num_events)
        seen = model.attempts.get(attempt)
        if seen is None:
            return
        if message.kind == contract.MANIFEST:
            seen.run.times.setdefault("its manifest", self._num_events)
        elif message.kind == contract.CANCEL:
            hold = model.holds[side].get(request)
            if hold is not None and hold.run is seen.run and hold.cancelled_ns is None:
                hold.cancelled_ns = self.now_ns
        elif side == DECODE and message.kind == contract.ACCEPT:
            seen.first_page = message.number
            seen.was_accepted = True
            seen.ends.pop(DECODE, None)
            seen.run.newest[DECODE] = attempt[1:]
            hold = model.holds[DECODE].get(request)
            if hold is None or hold.run is not seen.run:
                pages = dict(enumerate(self._pages(DECODE, request)))
                model.holds[DECODE][request] = Hold(seen.run, pages, self.now_ns, message.generation)
        elif side == DECODE and message.kind == contract.ACK:
            if not any(a.is_whole for a in model.attempts.values() if a.run is seen.run):
                self.moment.acknowledged = f"request {request} is acknowledged, and {self._missing(seen.run)}"
            model.holds[DECODE].pop(request, None)
            if not seen.run.has_joined:
                seen.run.has_joined = seen.run.is_decoding = True
                model.decoding[request] = seen.run
            seen.run.target_pages = self._pages(DECODE, request) or seen.run.target_pages

    def _missing(self, run: Run) -> str:
        attempts = [attempt for attempt in self.model.attempts.values() if attempt.run is run]
        if not any(attempt.manifest for attempt in attempts):
            return "no manifest of it has arrived"
        best = max(attempts, key=lambda attempt: (attempt.manifest, len(attempt.intact)))
        gone = [index for index in range(best.first_page, run.num_pages) if index not in best.intact]
        return f"pages {gone} have not arrived intact"

    def _pages(self, side: str, request: int) -> tuple[int, ...]:
        return self.integers(self.must(self.subject.pages, side, request), f"pages({side}, {request})")

    def _observe(self) -> None:
        m = self.moment
        self._note_joined()
        for side in self._living():
            counters = Counters(*self.integers(self.must(self.subject.counters, side), f"counters({side})"))
            m.counters[side] = counters
            free = self._free(side)
            self._check_holds(side, free)
            for page in free:
                self.pools[side][page] = GARBAGE
            for request, _ in self.must(self.subject.ended, side):
                self._note_ended(side, request)

    def _free(self, side: str) -> dict[int, None]:
        return dict.fromkeys(self.integers(self.must(self.subject.free, side), f"free({side})"))

    def _check_holds(self, side: str, free: dict[int, None]) -> None:
        """Check that no page that may still be read or written is free, has other content, or is cached before it is verified."""
        m, model = self.moment, self.model
        cached = None
        for request, hold in list(model.holds[side].items()):
            if model.may_go(side, hold, self.now_ns):
                if self._pages(side, request)[: len(hold.pages)] != tuple(hold.pages.values()) or hold.run.is_over:
                    del model.holds[side][request]
                continue
            m.num_holds += 1
            for index, page in hold.pages.items():
                if page in free:
                    m.freed = f"page {page} of request {request} is free on the {side} side"
                elif side == PREFILL and self.pools[side].get(page) != content_of(hold.run.tokens, index, self.config):
                    m.freed = f"page {page} of request {request} holds something else on the {side} side"
            if side == DECODE:
                cached = cached if cached is not None else self._cached()
                self._check_unverified(request, hold, cached)

    def _cached(self) -> dict[int, None]:
        return dict.fromkeys(self.integers(self.must(self.subject.cached, DECODE), "cached(decode)"))

    def _check_unverified(self, request: int, hold: Hold, cached: dict[int, None]) -> None:
        first = min((a.first_page for a in self.model.attempts.values() if a.run is hold.run), default=0)
        first = max([a.first_page for a in self.model.attempts.values() if a.run is hold.run], default=first)
        for index, page in hold.pages.items():
            if index >= first:
                self.moment.num_unverified += 1
                if page in cached:
                    self.moment.cached = f"page {page}, reserved for request {request}, is in the prefix cache"

    def _note_joined(self) -> None:
        m, model = self.moment, self.model
        joined = []
        if model.dead[DECODE]:
            return
        for request, first_token, draft in self.must(self.subject.joined):
            run = model.decoding.get(request) or model.runs[request]
            whole = [a for a in model.attempts.values() if a.run is run and a.is_whole]
            run.times.setdefault("its decoding", self._num_events)
            wrong = self._wrong(run, self.integer(first_token, "a first token"), self.integers(draft, "a draft input"))
            names = ("its start", "its prompt's end", "its manifest", "the manifest's arrival", "its decoding")
            order = tuple((name, run.times.get(name)) for name in names)
            joined.append(Joined(request, "" if whole else self._missing(run), wrong, order))
        m.joined = tuple(joined)

    def _wrong(self, run: Run, first_token: int, draft: tuple[int, ...]) -> str:
        pages = run.target_pages
        for index in range(run.num_pages):
            found = self.pools[DECODE].get(pages[index]) if index < len(pages) else None
            if found != content_of(run.tokens, index, self.config):
                return f"page {index} holds {found}"
        if first_token != first_token_of(run.tokens):
            return f"its first token is {first_token}, and was {first_token_of(run.tokens)}"
        if draft != draft_of(run.tokens, self.config.hidden):
            return f"its draft input is {draft}, and was {draft_of(run.tokens, self.config.hidden)}"
        return ""

    def _note_ended(self, side: str, request: int) -> None:
        runs = self.model.runs if side == PREFILL else self.model.decoding
        run = runs.get(request)
        if run is not None and side == PREFILL:
            run.is_over = True
        elif run is not None:
            run.is_decoding = False
