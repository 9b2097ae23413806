"""Decides which requests enter the batch, and which prompt chunks the next step computes.

At most one prompt is in progress between steps. It gets the whole chunk budget until it is done; then the next request
in the queue gets the budget. A request enters when there are a row and the slots that the rules of the server ask for
(`rules/room.py`). A refused request is not tried again before an event that may have made room
(`ServerRules.retries_after_departure`). That a guaranteed share falls is no such event, so multi-steps may run
while a request waits.
"""

from __future__ import annotations

import numpy as np

from ..contract.request import Request
from ..contract.step import Join
from ..kv.request_table import ceil_to_page
from ..kv.store import KVStore
from .config import EngineConfig, EngineRole, EngineSizes
from .flights import Chunk, StepInFlight, join_of
from .life import RequestRecord
from .recovery import StepLimits
from .requests import Requests
from .rounds import CountedRounds
from .rules.admission_state import BatchWait, PauseEnd, Refusals
from .rules.room import Entrance, Room


class Admission:
    """Admits waiting requests and cuts their prompts into chunks."""

    def __init__(self, config: EngineConfig, sizes: EngineSizes, store: KVStore, requests: Requests) -> None:
        self.config = config
        self.sizes = sizes
        self.store = store
        self.requests = requests
        self.limits: StepLimits = StepLimits(config.chunk_size, config.max_running)
        self.role: EngineRole = config.role
        self.room: Room = Room(config, sizes, store, requests)
        self.batch_wait: BatchWait = config.rules.batch_wait(config.chunk_size)
        self.refusals: Refusals = Refusals(store)

    def take_role(self, role: EngineRole) -> None:
        """Take this role from now on."""
        self.role = role
        self.room.take_role(role)

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

        The method does not look at memory, because a running multi-step holds more of it than its single rounds would.
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
        can_enter = not self.head_cannot_enter and self.has_row
        num_tokens = self.room.tokens_that_fit(budget, num_decoding, enough) if can_enter else 0
        return num_tokens > 0 and self.batch_wait.goes_on(num_tokens < enough)

    def head_could_enter_soon(self) -> bool:
        """Return whether the head of the queue could enter at the next plan, or after a commit that frees slots.

        Returns True in doubt.
        """
        head = self.requests.waiting.head
        if head is None:
            return False
        if self.config.preempt and self.requests.lower_than(head):
            return True
        has_chunks_in_flight = any(flight.chunks for flight in self.requests.in_flight)
        return self.store.has_fenced or has_chunks_in_flight or not self.head_cannot_enter

    def pass_rounds(self, flight: StepInFlight, counted: CountedRounds, rounds: int) -> None:
        """Take note of the committed rounds of a step: they end a pause, and the guaranteed share falls.

        The share falls by single rounds also where these ran in a multi-step. It does not fall in a step with a prompt.
        """
        if counted.present.is_complete or np.count_nonzero(counted.present.last):
            self.requests.pause.pass_event(PauseEnd.COMMIT)
        if flight.is_decode_only:
            self.room.share.count(rounds)

    @property
    def head_cannot_enter(self) -> bool:
        """Whether no request waits, or the head did not fit and no later event could have made room for it."""
        head = self.requests.waiting.head
        return head is None or self.refusals.hold_for(head)

    def _refuse(self, head: RequestRecord) -> None:
        # With `preempt` a head of greater priority may make room for itself.
        may_wait = bool(self.requests.running) and not self.config.preempt
        self.refusals.refuse(self.config.rules.refused(head, may_wait))

    def next_chunks(self, budget: int, num_decoding: int, may_admit: bool) -> tuple[list[Chunk], list[Join]]:
        """Allocate the slots of up to `budget` tokens of prefill, and admit the requests that enter with them.

        Leaves R slots for each of `num_decoding` rows. Without `may_admit` only the prompt in progress is continued.
        """
        chunks: list[Chunk] = []
        joins: list[Join] = []
        requests = self.requests
        if requests.in_progress is not None:
            continued = requests.in_progress
            chunk = self._chunk_of(continued, budget, 0)
            if chunk is None:
                if self.config.rules.retracts_short_prompts and budget > 0:
                    requests.retract(continued)
                return chunks, joins
            chunks.append(chunk)
            budget -= chunk.length
        may_pad = not chunks
        while budget > 0 and requests.in_progress is None and not self.head_cannot_enter:
            if not (may_admit or requests.pause.spares(requests.waiting.head)):
                break
            chunk = self._admit(budget, num_decoding, chunks, may_pad)
            if chunk is None:
                break
            joins.append(join_of(chunk.record, self.config.track_tokens))
            chunks.append(chunk)
            budget -= chunk.length + chunk.padding
        return chunks, joins

    def _admit(self, budget: int, num_decoding: int, chunks: list[Chunk], may_pad: bool) -> Chunk | None:
        """Admit the head of the queue with its first chunk, or note that it is refused. `chunks`: those of this step so
        far. Each of them ends its prompt, so its request decodes, too, from the next step on.
        """
        requests, head = self.requests, self.requests.waiting.head
        assert head is not None, "there is a request to admit"
        if requests.late.is_expected(head):
            return None  # not refused: its context is not known yet
        if not self.has_row:
            self._refuse(head)
            return None
        entrance = self.room.measure(head, budget, num_decoding, may_pad)
        if entrance.padding >= budget:
            return None  # not refused: the next step may have room for a round
        to_leave = self.room.to_leave(num_decoding + len(chunks), [chunk.record for chunk in chunks])
        with self.store.locked(entrance.prefix):
            free = self.store.available_slots + requests.rounds.num_ahead
            if entrance.num_slots + to_leave > free or not self.room.has_own_room(entrance, num_decoding + len(chunks)):
                self._refuse(head)
                return None
            if self.store.take_denial():
                return None  # not refused: the next attempt may succeed although nothing has changed
            self._enter(entrance)
        chunk = self._chunk_of(head, budget, entrance.padding)
        assert chunk is not None, "what was found to fit does not"
        return chunk

    @property
    def has_row(self) -> bool:
        table, requests = self.store.table, self.requests
        if not table.num_free_rows:
            return False
        if requests.num_with_row + len(requests.transferring) >= self.config.max_running:
            return False  # rows that are left and fenced are free of requests
        row_limit = self.limits.row_limit
        return row_limit is None or table.num_rows - table.num_free_rows < row_limit

    def _enter(self, entrance: Entrance) -> None:
        self.refusals.end()
        record = self.requests.admit(entrance.prefix, entrance.num_loaded)
        if entrance.prefix is not None:
            self.store.count_hit(record.prefill_len, record.num_cached)

    def _chunk_of(self, record: RequestRecord, budget: int, padding: int) -> Chunk | None:
        """Return the next chunk of the prompt in progress; None if there are no slots for it now."""
        start = record.prefill_launched
        length = min(budget, record.prefill_len - start)
        target = ceil_to_page(start + length + padding + self.sizes.lookahead, self.config.page_size)
        if length < 1:
            return None
        if self.store.groups:
            self._pass_tokens(record)
        if not self.store.grow_row(record.row, target):
            return None
        chunk = self.requests.cut_chunk(record, length, padding)
        if num_shared := self.config.rules.shared_at_launch(record):
            self.requests.share_prefix(record, num_shared)
        return chunk

    def _pass_tokens(self, record: RequestRecord) -> None:
        """Give back what windows keep of tokens before those that the next chunks read."""
        self.store.groups.move(np.array([record.row]), np.array([self.config.rules.tokens_passed(record)]))
