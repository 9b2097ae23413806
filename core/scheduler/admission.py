"""Who enters the batch, and which chunks of prompts the next step computes.

At most one prompt is in progress between steps: the chunk budget goes to it until it is done, then to the next in line. A request
enters when its whole context and one reserve R fit, together with what the running requests are about to reserve.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..contract.step import NO_TOKEN, Join, PrefillStep
from ..kv.radix import PrefixMatch
from ..kv.sizing import ceil_to_page
from ..kv.store import KVStore
from .config import EngineConfig, EngineSizes
from .life import RequestEvent, RequestRecord
from .waiting import WaitingQueue


class Chunk(NamedTuple):
    """Positions [start, start + length) of one request's context."""

    record: RequestRecord
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.record.prefill_len


class Admission:
    """Turns the waiting queue into chunks of prefill."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes, store: KVStore) -> None:
        self.config = config
        self.sizes = sizes
        self.store = store
        self.queue = WaitingQueue(config.ageing_bound)
        self.in_progress: RequestRecord | None = None
        self.row_limit: int | None = None  # rows that may be held at once, beside the table's own number of them
        self.reserve = sizes.reserve  # slots beside its context that a request must find; none where nothing is decoded
        self._watermark = int(config.watermark * store.allocator.num_total_slots)
        self._blocked: tuple[RequestRecord, int] | None = None  # (head, store.revision) of the last refusal

    @property
    def head_is_blocked(self) -> bool:
        """Nobody waits, or the head did not fit and nothing has happened since that could let it in."""
        head = self.queue.head
        return head is None or (
            self._blocked is not None and self._blocked[0] is head and self._blocked[1] == self.store.revision
        )

    def next_chunks(self, budget: int, num_decoding: int, may_admit: bool) -> tuple[list[Chunk], list[Join]]:
        """Up to `budget` tokens of prefill, with their slots allocated, and the requests that enter for them.

        `num_decoding` rows are about to reserve R slots each; `may_admit` is False while nobody new may enter.
        """
        chunks: list[Chunk] = []
        joins: list[Join] = []
        if self.in_progress is not None:
            chunk = self._chunk_of(self.in_progress, budget)
            if chunk is None:
                return chunks, joins
            chunks.append(chunk)
            budget -= chunk.length
        while may_admit and budget > 0 and self.in_progress is None and not self.head_is_blocked:
            record = self._admit(num_decoding + len(joins))
            if record is None:
                break
            chunk = self._chunk_of(record, budget)
            assert chunk is not None, "what was found to fit does not"
            joins.append(self._join(record))
            chunks.append(chunk)
            budget -= chunk.length
        return chunks, joins

    def forget(self, record: RequestRecord) -> None:
        """`record` leaves its row."""
        if self.in_progress is record:
            self.in_progress = None

    def needs(self, record: RequestRecord, num_cached: int) -> int:
        """Slots that a request takes on entering: its context beyond the cached prefix, and one reserve."""
        context = record.prompt_len + record.emitted_before
        return ceil_to_page(context + self.reserve, self.config.page_size) - num_cached

    def headroom(self, num_running: int) -> int:
        """Slots that a newcomer leaves free for so many running requests to grow into."""
        if not num_running:
            return 0
        return self._watermark + ceil_to_page(self.reserve, self.config.page_size) * num_running

    def _admit(self, num_running: int) -> RequestRecord | None:
        """Let the head of the queue in, or note that it is blocked."""
        record = self.queue.head
        if not self.has_row:
            self._blocked = (record, self.store.revision)
            return None
        prefix = self._prefix_of(record)
        headroom = self.headroom(num_running)
        available = self.store.available_slots
        if prefix is not None and prefix.length:
            # Locking the prefix takes it out of what the cache could give up.
            self.store.cache.lock(prefix.node)
            available = self.store.available_slots
        fits = self.needs(record, prefix.length if prefix else 0) + headroom <= available
        denied = fits and self.store.denies()
        if fits and not denied:
            self._enter(record, prefix)
        if prefix is not None and prefix.length:
            self.store.cache.unlock(prefix.node)
        if denied:
            return None  # the next attempt may succeed, with nothing changed
        if not fits:
            self._blocked = (record, self.store.revision)
            return None
        return record

    @property
    def has_row(self) -> bool:
        """Whether a row may be taken."""
        table = self.store.table
        if not table.num_free_rows:
            return False
        return self.row_limit is None or table.num_rows - table.num_free_rows < self.row_limit

    def _prefix_of(self, record: RequestRecord) -> PrefixMatch | None:
        if self.store.cache is None:
            return None
        if record.context is None:
            record.context = record.request.prompt.materialize()
            if record.context is None:
                return None
        return self.store.match(record.context, record.request.namespace)

    def _enter(self, record: RequestRecord, prefix: PrefixMatch | None) -> None:
        self.queue.pop()
        self._blocked = None
        record.advance(RequestEvent.ADMIT)
        record.row = self.store.open_row(prefix)
        record.epoch = int(self.store.table.epochs[record.row])
        record.prefill_len = record.prompt_len + record.emitted_before
        record.num_cached = record.prefill_launched = record.prefill_committed = prefix.length if prefix else 0
        self.in_progress = record
        if prefix is not None:
            self.store.count_hit(record.prefill_len, prefix.length)

    def _chunk_of(self, record: RequestRecord, budget: int) -> Chunk | None:
        """The next chunk of the prompt in progress, or None if its slots are not to be had now."""
        start = record.prefill_launched
        length = min(budget, record.prefill_len - start)
        target = ceil_to_page(start + length, self.config.page_size)
        if length < 1 or not self.store.grow_row(record.row, target):
            return None
        record.prefill_launched = start + length
        if record.prefill_launched == record.prefill_len:
            self.in_progress = None
        return Chunk(record, start, length)

    def _join(self, record: RequestRecord) -> Join:
        cached = None
        if self.config.track_tokens:
            # Without a match nobody may have asked for the prompt's tokens yet.
            cached = record.context[: record.num_cached] if record.num_cached else np.empty(0, np.int64)
        return Join(
            record.row,
            record.epoch,
            record.request,
            record.max_tokens,
            record.emitted_before,
            record.num_cached,
            cached,
        )


def prefill_step(chunks: list[Chunk], with_tokens: bool) -> PrefillStep:
    """The prefill part of a step, one row per chunk; with the tokens for an executor that computes on them."""
    lens = [chunk.length for chunk in chunks]
    tokens = None
    tails = [NO_TOKEN] * len(chunks)
    if with_tokens:
        parts = [c.record.context[c.start : c.start + c.length] for c in chunks]
        tokens = np.concatenate(parts, dtype=np.int64)
        tails = [NO_TOKEN if c.is_last else int(c.record.context[c.start + c.length]) for c in chunks]
    return PrefillStep(
        rows=np.array([chunk.record.row for chunk in chunks], dtype=np.int32),
        epochs=np.array([chunk.record.epoch for chunk in chunks], dtype=np.int64),
        starts=np.array([chunk.start for chunk in chunks], dtype=np.int64),
        lens=np.array(lens, dtype=np.int64),
        is_last=np.array([chunk.is_last for chunk in chunks], dtype=bool),
        tokens=tokens,
        tail_tokens=np.array(tails, dtype=np.int64),
    )
