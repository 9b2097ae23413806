"""The pages of both workers: what stands in them, and which must stay as they are."""

from __future__ import annotations

from collections.abc import Callable

from ..harness.trial import Trial
from .contract import DECODE, PREFILL, Message, PageContent, TransportConfig, TransportPair
from .model import GARBAGE, Hold, TransferRun, TransportModel, TransportMoment, content_of


class TransportPools:
    """Holds the contents of both pools. It asks the trial's subject which pages are free, cached or held, and notes in
    a moment what must not be."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.config: TransportConfig = trial.config
        self._subject: TransportPair = trial.subject
        self.contents: dict[str, dict[int, PageContent]] = {PREFILL: {}, DECODE: {}}
        self._being_read: dict[int, PageContent] = {}

    def read(self, page: int) -> PageContent:
        """Return what stands in a page of the prefill side, which the link has now read."""
        self._being_read.pop(page, None)
        return self.contents[PREFILL].get(page, GARBAGE)

    def write(self, page: int, content: PageContent) -> None:
        """Put a page that has arrived into the decode side's pool."""
        self.contents[DECODE][page] = content

    def compute(self, side: str, run: TransferRun, index: int, page: int) -> None:
        """Put what a worker has computed for page number `index` of a prompt into a page."""
        self.contents[side][page] = content_of(run.tokens, index, self.config)

    def lose(self, side: str) -> None:
        """Forget the contents of a side, whose device is gone."""
        self.contents[side].clear()
        if side == PREFILL:
            self._being_read.clear()

    @property
    def is_read(self) -> bool:
        """Whether the link had pages to read when the readers were last checked."""
        return bool(self._being_read)

    def of(self, side: str, request: int) -> tuple[int, ...]:
        """Return the pages that a request has on a side."""
        return self._ask(f"pages({side}, {request})", self._subject.pages, side, request)

    def _ask(self, what: str, method: Callable[..., object], *arguments: object) -> tuple[int, ...]:
        return self._trial.integers(self._trial.must(method, *arguments), what)

    def free(self, side: str) -> dict[int, None]:
        """Return the free pages of a side."""
        return dict.fromkeys(self._ask(f"free({side})", self._subject.free, side))

    def cached(self) -> dict[int, None]:
        """Return the pages of the decode side's prefix cache."""
        return dict.fromkeys(self._ask("cached(decode)", self._subject.cached, DECODE))

    def check_readers(self, moment: TransportMoment) -> dict[int, PageContent]:
        """Check that pages stay as they are from when they are to be sent until they are read.
        Returns their contents."""
        pages = self._ask("reading()", self._subject.reading)
        for page in pages:
            now = self.contents[PREFILL].get(page, GARBAGE)
            if self._being_read.setdefault(page, now) != now:
                moment.freed = f"page {page} was written again, and the link has still to read it"
        self._being_read = {page: self._being_read[page] for page in pages}
        return self._being_read

    def clear_free(
        self, moment: TransportMoment, side: str, free: dict[int, None], reading: dict[int, PageContent]
    ) -> None:
        """Put garbage into the free pages of a side, none of which may be among those that are read."""
        for page in free:
            if page in reading:
                moment.freed = f"page {page} is free, and the link has still to read it"
            self.contents[side][page] = GARBAGE

    def check_steps_in_flight(self, moment: TransportMoment, model: TransportModel, free: dict[int, None]) -> None:
        """Check that no page that a step of the decode worker may still write is free or another request's."""
        written = self._trial.must(self._subject.written)
        held = {request: self.of(DECODE, request) for request in model.runs} if written else {}
        for owner, page in written:
            others = [request for request, pages in held.items() if request != owner and page in pages]
            if page in free or others:
                whose = f"belongs to request {others[0]}" if others else "is free"
                moment.freed = f"page {page} {whose}, and a step in flight may write it for request {owner}"

    def check_reserves(self, moment: TransportMoment, model: TransportModel, accept: Message) -> None:
        """Check that a request that gets pages leaves each that is decoded its reserve, free or in the cache alone."""
        size, used, num_decoding = self.config.page_size, set[int](), 0
        for request in model.runs:
            used.update(pages := self.of(DECODE, request))
            run = model.decoding.get(request)
            num_decoding += bool(pages) and run is not None and run.goes_on
        room = len({**self.free(DECODE), **self.cached()}.keys() - used) * size
        needed = num_decoding * -(-self.config.reserve // size) * size
        if room < needed:
            moment.late = (
                f"request {accept.request} gets pages, which leaves {room} slots to {num_decoding} that need {needed}"
            )

    def check_holds(
        self, moment: TransportMoment, model: TransportModel, side: str, free: dict[int, None], now_ns: int
    ) -> None:
        """Check that no page that may still be read or written is free, has other content, or is cached
        before it is verified."""
        cached = None
        for request, hold in list(model.holds[side].items()):
            if model.may_go(side, hold, now_ns):
                is_lost = hold.lost_ns is not None and now_ns >= hold.lost_ns + self.config.fence_ns
                if is_lost or hold.is_called_back:
                    self._check_over(moment, side, request, hold)
                if self.of(side, request)[: len(hold.pages)] != tuple(hold.pages.values()) or hold.run.is_over:
                    del model.holds[side][request]
                continue
            moment.num_holds += 1
            for index, page in hold.pages.items():
                if page in free:
                    moment.freed = f"page {page} of request {request} is free on the {side} side"
                elif side == PREFILL and self.contents[side].get(page) != content_of(
                    hold.run.tokens, index, self.config
                ):
                    moment.freed = f"page {page} of request {request} holds something else on the {side} side"
            if side == DECODE:
                cached = cached if cached is not None else self.cached()
                self._check_unverified(moment, model, request, hold, cached)

    def _check_over(self, moment: TransportMoment, side: str, request: int, hold: Hold) -> None:
        """Check that a request is over: a fence after its other worker was lost, or when that one has given it up, and
        the link reads none of its pages."""
        if side == PREFILL and not self._being_read.keys().isdisjoint(hold.pages.values()):
            return
        if hold.pages and not hold.run.is_decoding and self.of(side, request) == tuple(hold.pages.values()):
            moment.leaked = f"request {request} has its pages on the {side} side, and the other side has none of it"

    def _check_unverified(
        self, moment: TransportMoment, model: TransportModel, request: int, hold: Hold, cached: dict[int, None]
    ) -> None:
        first = max((a.first_page for a in model.attempts.values() if a.run is hold.run), default=0)
        for index, page in hold.pages.items():
            if index >= first:
                moment.num_unverified += 1
                if page in cached:
                    moment.cached = f"page {page}, reserved for request {request}, is in the prefix cache"

    def wrong_page(self, run: TransferRun) -> str:
        """Say which page at the decode side is not what was computed for a run; empty if none."""
        pages = run.target_pages
        for index in range(run.num_pages):
            found = self.contents[DECODE].get(pages[index]) if index < len(pages) else None
            if found != content_of(run.tokens, index, self.config):
                return f"page {index} holds {found}"
        return ""
