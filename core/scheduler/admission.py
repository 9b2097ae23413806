"""Decides which requests enter the batch, and which prompt chunks the next step computes.

At most one prompt is in progress between steps. It gets the whole chunk budget until it is done; then the next request
in the queue gets the budget. A request enters when its whole context and one reserve R fit, together with the next
reservations of the running requests. With `EngineConfig.guarantee_output` its own whole output must fit as well, and
that share of the remaining output of the running requests. With a share of 1 that does not fall, memory pressure
retracts no request. A share that falls is an estimate of what requests will emit; then requests that enter in the same
step count in full.

A refused request is not tried again before an event that may have made room (`Policies.retry_after`). That the share
falls is no such event, so blocks of rounds may run while a request waits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..contract.request import Request
from ..contract.step import Join
from ..kv.beside import BesideSlots
from ..kv.radix import PrefixMatch
from ..kv.request_table import ceil_to_page
from ..kv.store import KVStore
from .config import EngineConfig, EngineRole, EngineSizes
from .flights import Chunk, StepInFlight, join_of
from .life import RequestRecord
from .policies import BatchWait, GuaranteedShare
from .recovery import StepLimits
from .requests import Requests
from .rounds import CountedRounds
from .waiting import giving_way


class Refusal(NamedTuple):
    """Who does not fit, and how often room was made before: until the number grows, the answer stays the same."""

    head: RequestRecord | None  # None: every request
    revision: int


class Entrance(NamedTuple):
    """What a waiting request takes if it enters now, beside its row."""

    prefix: PrefixMatch | None  # what the cache has of its context
    num_loaded: int  # tokens behind it that come from host memory
    padding: int  # tokens of a round beside its own (`Policies.lone_token`)
    num_slots: int  # what it must find free, with the cached prefix locked


class Admission:
    """Admits waiting requests and cuts their prompts into chunks."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes, store: KVStore, requests: Requests) -> None:
        self.config = config
        self.sizes = sizes
        self.store = store
        self.requests = requests
        self.limits: StepLimits = StepLimits(config.chunk_size, config.max_running)
        self.take_role(config.role)
        self.share: GuaranteedShare = GuaranteedShare(config.guarantee_output, config)
        self.batch_wait: BatchWait = BatchWait(config, config.chunk_size)
        self.beside: BesideSlots = config.beside
        self._watermark = int(config.watermark * store.allocator.num_total_slots)
        self.may_pad: bool = config.lone_token == "round"
        self._refused: Refusal | None = None

    def take_role(self, role: EngineRole) -> None:
        """Take this role from now on."""
        self.role = role
        # Free slots that a request needs in addition to its context; 0 for an engine that does not decode.
        self.reserve: int = 0 if role is EngineRole.PREFILL else self.sizes.reserve
        self.guarantees: bool = role is not EngineRole.PREFILL and self.config.guarantee_output > 0

    # -- at submission ------------------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> str:
        """Say why a request can never run here, or not now; empty if it may wait."""
        max_tokens = self.max_tokens(request)
        if self.role is EngineRole.DECODE:
            return "this engine only decodes: requests come to it by handoff"
        if max_tokens <= request.shown.length:
            limit = request.prompt.length + max_tokens
            return f"too long: a prompt of {request.prefill_len} tokens and 1 of output, at most {limit} fit"
        if self.config.max_queue is not None and len(self.requests.waiting) >= self.config.max_queue:
            return f"queue full: {self.config.max_queue} requests wait"
        return ""

    def max_tokens(self, request: Request) -> int:
        """Return the output length that context and pool allow this request, including the tokens that its client has
        already seen. If no further token is allowed, the request can never run.
        """
        asked = request.max_tokens
        return self.sizes.max_tokens(self.config, request.prompt.length, asked, self.role, request.prefill_len)

    def could_enter_before_commit(self, record: RequestRecord) -> bool:
        """Return whether a plan could admit this newcomer before any commit. The answer may be True by mistake.

        The method does not look at memory, because a running block holds more of it than its single rounds would.
        """
        if self.requests.waiting.head is not record or self.head_cannot_enter:
            return False
        return bool(self.store.table.num_free_rows) or self.store.has_fenced or self.config.preempt

    # -- at a plan ----------------------------------------------------------------------------------------------------

    def plan_prefill(self, num_verify_tokens: int) -> tuple[list[Chunk], list[Join]]:
        """Choose the chunks of a step that also verifies `num_verify_tokens`, and the requests that enter with them."""
        requests = self.requests
        if requests.in_progress is None and not len(requests.waiting):
            return [], []
        budget = self.limits.prefill_budget
        if self.config.max_step_tokens is not None:
            budget = min(budget, self.config.max_step_tokens - num_verify_tokens)
        is_paused = requests.is_admission_paused or requests.pause.spares(requests.waiting.head)
        if not is_paused:
            requests.pause.end()  # if no decode round is to come, no commit would end the pause
        may_admit = not is_paused and not self._waits_for_more(budget, num_verify_tokens)
        return self.next_chunks(budget, len(requests.rounds.rows), may_admit)

    def _waits_for_more(self, budget: int, num_verify_tokens: int) -> bool:
        """Return whether newcomers that fit wait for more of them, and count the plan if so."""
        num_decoding = len(self.requests.rounds.rows)
        if not self.batch_wait.is_used or not num_decoding or self.requests.in_progress is not None:
            self.batch_wait.end()
            return False
        enough = self.batch_wait.enough_tokens - num_verify_tokens
        num_tokens = self._tokens_that_fit(budget, num_decoding, enough)
        return num_tokens > 0 and self.batch_wait.goes_on(num_tokens < enough)

    def _tokens_that_fit(self, budget: int, num_decoding: int, enough: float) -> int:
        """Return the tokens of the waiting requests that could enter together, counted up to `enough`."""
        if self.head_cannot_enter or not self.has_row:
            return 0
        free = self.store.available_slots - self.headroom(num_decoding) + self.requests.rounds.num_ahead
        num_tokens = 0
        for num_rows, record in enumerate(self.requests.waiting):
            length = record.prompt_len + record.emitted_before
            free -= self.needs(record, 0, budget)
            has_room = free >= 0 and num_rows < self.store.table.num_free_rows
            if not has_room or num_tokens >= enough or (num_rows and num_tokens + length > budget):
                break
            num_tokens += length
        return num_tokens

    def head_could_enter_soon(self) -> bool:
        """Return whether the head of the queue could enter at the next plan, or after a commit that frees slots.

        Returns True in doubt.
        """
        head = self.requests.waiting.head
        if head is None:
            return False
        if self.config.preempt and self._lower_than(head):
            return True
        has_chunks_in_flight = any(flight.chunks for flight in self.requests.in_flight)
        return self.store.has_fenced or has_chunks_in_flight or not self.head_cannot_enter

    def pass_rounds(self, flight: StepInFlight, counted: CountedRounds, rounds: int) -> None:
        """Take note of the committed rounds of a step: they end a pause, and the guaranteed share falls.

        The share falls by single rounds also where these ran in a block. It does not fall in a step with a prompt.
        """
        has_live = counted.live is None or bool(counted.live.any())  # None: all rows are live
        if has_live:
            self.requests.pause.pass_commit()
        if flight.is_decode_only:
            self.share.count(rounds)

    def preempt(self) -> None:
        """Retract requests of lower priority, the least entitled first, if that lets the head of the queue in.

        It enters in this plan or, where a step in flight may touch the slots of a victim, in the one after its commit.
        """
        requests, head = self.requests, self.requests.waiting.head
        if head is None or self.limits.are_reduced:
            return
        if requests.in_progress is not None or requests.is_admission_paused:
            return
        if self.store.has_fenced or requests.leaving:
            return  # the slots of an earlier victim will be released soon
        lower = self._lower_than(head)
        if not lower:
            return
        entrance = self._entrance(head, self.limits.prefill_budget, len(requests.rounds.rows), self.may_pad)
        with self.store.locked(entrance.prefix):
            fits = partial(self._fits_without, lower, entrance.num_slots)
            if fits(0) or not fits(len(lower)):
                return
            num_victims = bisect_left(range(len(lower)), True, lo=1, key=fits)
        for victim in lower[:num_victims]:
            requests.retract(victim, for_priority=True)

    def _fits_without(self, lower: Sequence[RequestRecord], num_slots: int, num_victims: int) -> bool:
        """Return whether a request that takes `num_slots` could enter if so many of `lower` gave way.

        The others grow until it is tried: by the rounds that are reserved in this plan and, where the slots of a victim
        are fenced, by those of the next one.
        """
        if not num_victims and not self.has_row:
            return False
        out, rows = {victim.row for victim in lower[:num_victims]}, self.requests.rounds.rows.tolist()
        is_fenced = bool(num_victims and self.requests.in_flight) and not self.store.at_once
        targets = self.requests.rounds.targets_after(self.config.mixed + is_fenced).tolist()
        least: dict[int, int] = dict(zip(rows, targets, strict=True))
        held = {row: max(slots, least.get(row, 0)) for row, slots in self._held_rows().items() if row not in out}
        total, allocated = self.beside.total, self.store.allocated
        grown = sum(total(slots) - total(int(allocated[row])) for row, slots in held.items())
        free = self.store.available_slots + self.store.slots_gained_without(out) - grown
        return num_slots + self.headroom(sum(row in held for row in rows), held=held) <= free

    def _lower_than(self, head: RequestRecord) -> list[RequestRecord]:
        # A retraction would not release the slots that a transfer holds.
        running = [record for record in self.requests.running.values() if not self.store.is_held_row(record.row)]
        return giving_way(head, running, self.config.ageing_bound)

    @property
    def head_cannot_enter(self) -> bool:
        """Whether no request waits, or the head did not fit and no later event could have made room for it."""
        head = self.requests.waiting.head
        return head is None or (
            self._refused is not None
            and self._refused.head in (None, head)
            and self._refused == self._refusal_of(self._refused.head)
        )

    def _refusal_of(self, head: RequestRecord | None) -> Refusal:
        """Return the refusal of `head` now; None: of every request, until a running one has left."""
        store = self.store
        return Refusal(head, store.revision if head is None else store.revision + store.cache_revision)

    def _refuse(self, head: RequestRecord) -> None:
        # With `preempt` a head of greater priority may make room for itself.
        waits_for_departure = self.config.retry_after == "departure" and not self.config.preempt
        self._refused = self._refusal_of(None if waits_for_departure and self.requests.running else head)

    def next_chunks(self, budget: int, num_decoding: int, may_admit: bool) -> tuple[list[Chunk], list[Join]]:
        """Allocate the slots of up to `budget` tokens of prefill, and admit the requests that enter with them.

        Leaves R slots for each of `num_decoding` rows. Without `may_admit` only the prompt in progress is continued.
        """
        chunks: list[Chunk] = []
        joins: list[Join] = []
        if self.requests.in_progress is not None:
            continued = self.requests.in_progress
            chunk = self._chunk_of(continued, budget, 0)
            if chunk is None:
                if self.config.short_chunk == "retracted" and budget > 0:
                    self.requests.retract(continued)
                return chunks, joins
            chunks.append(chunk)
            budget -= chunk.length
        may_pad = self.may_pad and not chunks
        while budget > 0 and self.requests.in_progress is None and not self.head_cannot_enter:
            if not (may_admit or self.requests.pause.spares(self.requests.waiting.head)):
                break
            # Each chunk so far ends its prompt, so its request decodes, too, from the next step on.
            record = self._admit(budget, num_decoding, chunks, may_pad)
            if record is None:
                break
            padding = self._padding(record, record.num_cached, num_decoding) if may_pad else 0
            chunk = self._chunk_of(record, budget, padding)
            assert chunk is not None, "what was found to fit does not"
            joins.append(join_of(record, self.config.track_tokens))
            chunks.append(chunk)
            budget -= chunk.length + padding
        return chunks, joins

    def needs(self, record: RequestRecord, num_cached: int, budget: int, padding: int = 0, num_loaded: int = 0) -> int:
        """Return the slots that a request takes: its context beyond the cached prefix, its output if that is
        guaranteed, and one reserve; or only those of its context or first chunk, of at most `budget` tokens behind the
        `num_loaded` from host memory (`Policies.admit_with`).
        """
        length = record.prompt_len + record.emitted_before
        # The chunks of its prompt write behind a whole window.
        at_once = self.beside.of(length, self.config.chunk_size)
        if self.guarantees:
            length += self._counted(record.max_tokens - record.emitted_before)
        if self.guarantees or self.config.admit_with == "reserve":
            slots = self.slots_for_length(length)
        else:
            first = min(num_cached + num_loaded + budget, length) + padding + self.sizes.lookahead
            least = first if self.config.admit_with == "chunk" else max(first, length)
            slots = ceil_to_page(least, self.config.page_size)
        return max(self.beside.total(slots), slots + at_once) - num_cached

    def headroom(
        self, num_running: int, entering: Collection[RequestRecord] = (), held: Mapping[int, int] | None = None
    ) -> int:
        """Return the slots that a newcomer must leave free so that `num_running` requests can grow.

        `entering`: those of them that enter in the same step. `held`: the slots of each row; None: as it is now.
        """
        if self.guarantees:
            in_full = in_part = 0
            held = self._held_rows() if held is None else held
            records = self.requests.running | self.requests.transferring
            for row, slots in held.items():
                record = records[row]
                whole = self.slots_for_length(record.prompt_len + record.max_tokens)
                missing = self.beside.total(whole) - self.beside.total(slots)
                is_fixed = self.config.guarantee_fixed and record.request.fixed_length
                if is_fixed or (self.share.falls and record in entering):
                    in_full += self._counted(missing)
                else:
                    in_part += self._counted(missing)
            return in_full + math.ceil(self.share.now(self._rounds_in_flight) * in_part)
        if not num_running:
            return 0
        if self.config.admit_with != "reserve":
            return self._watermark
        return self._watermark + self.slots_for_length(0) * num_running

    def _counted(self, remaining: int) -> int:
        """Return how much of a request's remaining output, in slots, the guarantee counts."""
        limit = self.config.guarantee_limit
        return remaining if limit is None else min(remaining, limit)

    @property
    def _rounds_in_flight(self) -> int:
        # A running block counts as one round: a plan that admits a request comes after its first.
        return sum(flight.is_decode_only for flight in self.requests.in_flight)

    def _held_rows(self) -> dict[int, int]:
        """Return the slots of each row of a request, without those that a running block holds ahead."""
        ahead, allocated = self.requests.rounds.held_ahead(), self.store.allocated
        rows = (*self.requests.running, *self.requests.transferring)
        return {row: int(allocated[row]) - ahead.get(row, 0) for row in rows}

    def retract_for_memory(self) -> None:
        """Retract a running request, because no round of all fits."""
        requests, num_outputs = self.requests, self.requests.output.num_delivered
        running = requests.running
        if len(running) == 1 and self.store.num_denied:
            requests.retract(next(iter(running.values())))  # a single request fits, but for an injected denial
            return
        requests.retract(self.config.victim(running.values(), num_outputs))
        self.share.estimate(running.values(), num_outputs, self._rounds_in_flight)

    def slots_for_length(self, length: int) -> int:
        """Return the slots of `length` tokens and one reserve, page aligned."""
        return ceil_to_page(length + self.reserve, self.config.page_size)

    def fits_transfer(self, request: Request) -> bool:
        """Return whether a request may take a row now while another engine computes its prompt.

        Waiting (retracted) requests go first.
        """
        requests = self.requests
        has_precedence = not len(requests.waiting) and requests.in_progress is None
        if not has_precedence or requests.steps_are_lost or requests.is_admission_paused or not self.has_row:
            return False
        length = request.prefill_len
        if self.guarantees:
            length += self._counted(request.prompt.length + self.max_tokens(request) - length)
        slots = self.beside.total(self.slots_for_length(length))
        return slots + self.headroom(len(requests.rounds.rows)) <= self.store.available_slots

    def _padding(self, record: RequestRecord, num_cached: int, num_decoding: int) -> int:
        """Return the tokens of a round besides the one that this newcomer computes (`Policies.lone_token`)."""
        is_lone = record.prompt_len + record.emitted_before - num_cached == 1
        return self.sizes.max_draft_tokens - 1 if is_lone and (num_decoding or num_cached) else 0

    def _entrance(self, record: RequestRecord, budget: int, num_decoding: int, may_pad: bool) -> Entrance:
        """Return what a waiting request takes, in a step with `budget` tokens of prefill."""
        prefix = self._prefix_of(record)
        num_cached = prefix.length if prefix else 0
        num_loaded = self._num_in_host(record, num_cached)
        padding = self._padding(record, num_cached + num_loaded, num_decoding) if may_pad else 0
        return Entrance(prefix, num_loaded, padding, self.needs(record, num_cached, budget, padding, num_loaded))

    def _admit(self, budget: int, num_decoding: int, chunks: list[Chunk], may_pad: bool) -> RequestRecord | None:
        """Admit the head of the queue, or note that it is refused. `chunks`: those of this step so far."""
        record = self.requests.waiting.head
        assert record is not None, "there is a request to admit"
        if self.requests.late.is_expected(record):
            return None  # not refused: its context is not known yet
        if not self.has_row:
            self._refuse(record)
            return None
        entrance = self._entrance(record, budget, num_decoding, may_pad)
        if entrance.padding >= budget:
            return None  # not refused: the next step may have room for a round
        headroom = self.headroom(num_decoding + len(chunks), [chunk.record for chunk in chunks])
        headroom -= self.requests.rounds.num_ahead
        with self.store.locked(entrance.prefix):
            fits = entrance.num_slots + headroom <= self.store.available_slots
            denied = fits and self.store.take_denial()
            if fits and not denied:
                self._enter(entrance.prefix, entrance.num_loaded)
        if not fits:
            self._refuse(record)  # a denial is no refusal: the next attempt may succeed although nothing has changed
        return record if fits and not denied else None

    @property
    def has_row(self) -> bool:
        table, requests = self.store.table, self.requests
        if not table.num_free_rows:
            return False
        if self.store.at_once and requests.num_with_row + len(requests.transferring) >= self.config.max_running:
            return False
        row_limit = self.limits.row_limit
        return row_limit is None or table.num_rows - table.num_free_rows < row_limit

    def _prefix_of(self, record: RequestRecord) -> PrefixMatch | None:
        if self.store.cache is None:
            return None
        if record.context is None:
            record.context = record.request.context()
            if record.context is None:
                return None
        # Without the token after the prefill, because the token before it must be computed in any case.
        known = record.context[: record.prompt_len + record.emitted_before]
        return self.store.match(known, record.request.namespace)

    def _num_in_host(self, record: RequestRecord, num_cached: int) -> int:
        if self.store.host is None or record.context is None:
            return 0
        known = record.context[: record.prompt_len + record.emitted_before]
        return self.store.num_in_host(known, record.request.namespace, num_cached)

    def _enter(self, prefix: PrefixMatch | None, num_loaded: int) -> RequestRecord:
        self._refused = None
        record = self.requests.admit(prefix, num_loaded)
        if prefix is not None:
            self.store.count_hit(record.prefill_len, record.num_cached)
        return record

    def _chunk_of(self, record: RequestRecord, budget: int, padding: int) -> Chunk | None:
        """Return the next chunk of the prompt in progress; None if there are no slots for it now."""
        start = record.prefill_launched
        length = min(budget, record.prefill_len - start)
        target = ceil_to_page(start + length + padding + self.sizes.lookahead, self.config.page_size)
        if length < 1 or not self.store.grow_row(record.row, target):
            return None
        chunk = self.requests.cut_chunk(record, length, padding)
        if self.config.cached_at == "launch":
            self.requests.share_prefix(record, record.prefill_launched)
        return chunk
