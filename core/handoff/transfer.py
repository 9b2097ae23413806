"""One transfer, as either side knows it over all its attempts: its state, its pages, and how it will end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..contract.request import Request
from .life import DECODE_TRANSITIONS, ENDED, ENDING_EVENTS, PREFILL_TRANSITIONS, TransferEvent, TransferState
from .messages import Accept, Manifest, Offer, Page, PageFormat, PageSeal, TransferKey


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer on the prefill side, over all its attempts."""

    request: Request
    peer: str
    row: int
    key: TransferKey  # of the current attempt
    first_attempt: int
    state: TransferState = TransferState.OFFERED
    attempts: int = 1
    peer_epoch: int | None = None  # of the decode worker that accepted
    first_page: int = 0
    next_page: int = 0  # pages before it are sent, or being sent, in this attempt
    seals: dict[int, PageSeal] = field(default_factory=dict)
    num_reading: int = 0  # pages that the driver is reading out, in this attempt and in earlier ones
    awaits_readers: bool = False  # only these keep the fence up
    renewal_ns: int = 0  # once accepted: how often to tell the decode side that the prompt is still being computed
    end: TransferState = TransferState.FAILED  # the end that giving up leads to
    message: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def try_move(self, event: TransferEvent) -> bool:
        """Change the state as the table says. Returns whether the table has the event for the present state."""
        following = PREFILL_TRANSITIONS[self.state].get(event)
        if following is None:
            return False
        self.state = following
        return True

    def finish(self, end: TransferState) -> None:
        """Take the last state; `end`: COMPLETED, FAILED or CANCELLED."""
        self.state = PREFILL_TRANSITIONS[self.state][ENDING_EVENTS[end]]
        assert self.state in ENDED

    def accept(self, message: Accept, num_pages: int) -> None:
        """Note what the decode side has reserved for this prompt of `num_pages` pages, and what it has cached."""
        self.peer_epoch = message.epoch
        self.first_page = self.next_page = min(max(message.first_page, 0), num_pages)
        self.renewal_ns = max(1, message.hold_ns // 3)

    def begin_reading(self, num_final: int) -> tuple[int, ...]:
        """Return the indices of the pages before `num_final` that this attempt has not sent, and count them as being
        read."""
        indices = tuple(range(self.next_page, num_final))
        self.next_page = max(self.next_page, num_final)
        self.num_reading += len(indices)
        return indices

    def seals_to_send(self, num_pages: int) -> tuple[PageSeal, ...] | None:
        """Return the seals of all pages that this attempt sends of a prompt of `num_pages`; None if one is not read."""
        wanted = range(self.first_page, num_pages)
        if len(self.seals) < len(wanted) or any(index not in self.seals for index in wanted):
            return None
        return tuple(self.seals[index] for index in wanted)

    def is_earlier_attempt(self, key: TransferKey) -> bool:
        """Return whether `key` names an attempt of this transfer before the current one."""
        return self.key.generation == key.generation and self.first_attempt <= key.attempt < self.key.attempt

    def begin_attempt(self, key: TransferKey) -> None:
        """Begin the next attempt, under a new key. Pages of the attempts before it may still be read."""
        self.try_move(TransferEvent.RETRY)
        self.key = key
        self.attempts += 1
        self.peer_epoch = None
        self.first_page = self.next_page = 0
        self.seals = {}


@dataclass(slots=True, eq=False)
class Incoming:
    """A transfer on the decode side, over all its attempts."""

    offer: Offer  # of the newest attempt
    peer: str
    state: TransferState = TransferState.QUEUED
    row: int = 0
    row_epoch: int = 0
    first_page: int = 0
    num_pages: int = 0  # of the whole prompt
    slots: np.ndarray | None = None  # int32 [num_pages · page_size], once they are reserved
    received: dict[int, PageSeal] = field(default_factory=dict)  # verified pages of the newest attempt
    manifest: Manifest | None = None
    is_refused: bool = False  # the newest attempt was answered with a Nack; the rest of it is ignored
    end: TransferState = TransferState.FAILED
    message: str = ""

    @property
    def key(self) -> TransferKey:
        return self.offer.key

    @property
    def request_id(self) -> str:
        return self.offer.request.request_id

    def move(self, event: TransferEvent) -> None:
        """Change the state as the table says. Raises KeyError for an event that is not in it."""
        self.state = DECODE_TRANSITIONS[self.state][event]

    def finish(self, end: TransferState) -> None:
        """Take the last state; `end`: COMPLETED, FAILED or CANCELLED."""
        self.move(ENDING_EVENTS[end])
        assert self.state in ENDED

    def begin_attempt(self, offer: Offer) -> None:
        """Begin the next attempt. The reserved slots stay; pages of the attempt before it do not count."""
        self.move(TransferEvent.RETRY)
        self.offer = offer
        self.received, self.manifest, self.is_refused = {}, None, False

    def reserve(self, row: int, row_epoch: int, first_page: int, num_pages: int, slots: np.ndarray) -> None:
        """Note where the KV of all `num_pages` will stand: row and slots int32 [num_pages · page_size]; `first_page`:
        the first page that is not cached."""
        self.move(TransferEvent.RESERVE)
        self.row, self.row_epoch = row, row_epoch
        self.first_page, self.num_pages = first_page, num_pages
        self.slots = slots

    def problem_of_page(self, page: Page, found: PageSeal, page_format: PageFormat) -> str:
        """Say what is wrong with a page that has arrived with the seal `found`; empty if nothing."""
        if not self.first_page <= page.index < self.num_pages:
            return f"page {page.index} is none of this prompt"
        if not found.fits(page_format) or found != page.seal:
            return f"page {page.index}: arrived as {found}, sent as {page.seal}"
        return ""

    def slots_of(self, index: int, page_size: int) -> np.ndarray:
        """Return the slots int32 [page_size] of a page."""
        assert self.slots is not None, "a receiving transfer has its slots"
        return self.slots[index * page_size : (index + 1) * page_size]

    def problem_of_manifest(self, manifest: Manifest) -> str:
        """Say whether a manifest is of other pages than this transfer waits for; empty if not."""
        if (manifest.first_page, len(manifest.seals)) != (self.first_page, self.num_pages - self.first_page):
            return f"a manifest of {len(manifest.seals)} pages"
        return ""

    def has_all(self, manifest: Manifest) -> bool:
        """Return whether all pages of the manifest have arrived, whatever they contain."""
        return len(self.received) >= len(manifest.seals)

    def problem_of_pages(self, manifest: Manifest) -> str:
        """Say which page, once all have arrived, is not the one of the manifest; empty if none."""
        for index, seal in enumerate(manifest.seals, manifest.first_page):
            if self.received[index] != seal:
                return f"page {index} is not the one of the manifest"
        return ""
