"""The engine's part in a handoff between a prefill and a decode worker: it holds requests and rows while KV is on its
way.

```
prefill side   … prefill chunks ──last one committed──► TRANSFERRING ──end_transfer──► TRANSFERRED
decode side                    reserve ──► TRANSFERRING ──join──► the next decode round
```

A hold belongs to the row, not to the request. When the request ends, which may be at any time, the row stays as it is
until `release_hold`, because the transfer may still read or write its slots. The state machines of `handoff` decide
when the transfer is over. This file has only the moves. The decision log records every move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..algorithm.algorithm import SpecAlgorithm
from ..algorithm.arrival import Arrival, arrival_failure, arrivals_of
from ..contract.events import EventSink, HandoffMove, HandoffMoved
from ..contract.outcomes import JoinOutcome, ReserveOutcome
from ..contract.request import FinishedRequest, FinishReason, Request
from ..contract.step import Arrivals, Join
from ..errors import InvariantViolation
from ..kv.store import KVStore
from .admission import Admission
from .config import EngineConfig, EngineRole
from .life import RequestRecord, RequestState
from .output import OutputLog
from .requests import Requests


class PromptProgress(NamedTuple):
    """How far a prefill worker is with a request that has a row."""

    request: Request
    row: int
    epoch: int
    num_computed: int  # KV positions that are computed and will not move to other slots before the row is released
    is_complete: bool  # the whole prompt, and its first token
    is_to_transfer: bool  # more than one token was asked for: the rest is decoded elsewhere


class Transfers:
    """Holds rows for transfers, takes requests in from a prefill engine, and lets computed prompts go to a decode
    engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        algorithm: SpecAlgorithm,
        requests: Requests,
        admission: Admission,
        output: OutputLog,
        emit: EventSink,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.requests = requests
        self.store: KVStore = requests.store
        self.admission = admission
        self.output = output
        self._emit = emit
        self._joined: list[tuple[RequestRecord, int, Arrival]] = []  # with the row's epoch; unknown to the executor

    def change_role(self, role: EngineRole, now_ns: int) -> None:
        """Take another role. Raises HANDOFF-10 unless the engine has no request, no step in flight and no held row."""
        if not self.requests.is_idle:
            raise InvariantViolation("HANDOFF-10", f"the role changes to {role} while the engine has requests or steps")
        self.admission.take_role(role)
        self._emit(HandoffMoved(now_ns, HandoffMove.ROLE, detail=str(role)))

    # -- prefill side -----------------------------------------------------------------------------------------------

    def prompts(self) -> list[PromptProgress]:
        """Return the requests that have a row, in the order in which they got it."""
        records = [*self.requests.transferring.values(), *self.requests.running.values()]
        return [self._progress_of(record) for record in records]

    def progress_of(self, request_id: str) -> PromptProgress | None:
        """Return how far one request is; None if it has no row."""
        record = self.requests.live.get(request_id)
        return None if record is None or not record.row else self._progress_of(record)

    def _progress_of(self, record: RequestRecord) -> PromptProgress:
        return PromptProgress(
            record.request,
            record.row,
            record.epoch,
            record.prefill_committed,
            is_complete=record.state is RequestState.TRANSFERRING and record.has_whole_prompt,
            is_to_transfer=record.max_tokens > record.emitted_before + 1,
        )

    def first_token_of(self, request_id: str) -> Arrival:
        """Return the first token of a computed prompt with the outputs that its request asked for, without the draft's
        input.
        """
        record = self.requests.live[request_id]
        assert record.state is RequestState.TRANSFERRING, f"{request_id!r} has no first token to hand over"
        _, tokens = self.output.delivered(record)
        outputs = {name: values[0] for name, values in record.outputs.items()}
        return Arrival(None if tokens is None else int(tokens[-1]), None, outputs)

    def hold(self, request_id: str, now_ns: int) -> int:
        """Keep the row of a request until `release_hold`, even if the request leaves it. Returns the row."""
        row = self.requests.live[request_id].row
        self.store.hold_row(row)
        self._emit(HandoffMoved(now_ns, HandoffMove.HOLD, request_id, row))
        return row

    def release_hold(self, row: int, now_ns: int) -> None:
        """Give up the hold of `row`: no transfer reads or writes its slots any more."""
        self.store.release_hold(row, self.requests.last_committed)
        self._emit(HandoffMoved(now_ns, HandoffMove.RELEASE, "", row))

    def end_transfer(
        self, request_id: str, now_ns: int, failure: str = "", reason: FinishReason = FinishReason.ERROR
    ) -> FinishedRequest | None:
        """End a request that has arrived at the decode side, or that failed during its transfer. Returns None if no
        live request has that id.

        A failure may also come while the prompt is waiting or being computed. `reason`: the reason of a failure, ERROR
        or MOVED.
        """
        record = self.requests.live.get(request_id)
        if record is None:
            return None
        if failure:
            finished = self.requests.give_up(record, reason, failure)
            assert finished is not None, f"a multi-step runs with {request_id!r}"
        else:
            finished = self.requests.finish(record, FinishReason.TRANSFERRED)
        move = HandoffMove.MOVE if finished.reason is FinishReason.MOVED else HandoffMove.END
        self._emit(HandoffMoved(now_ns, move, request_id, 0, detail=failure, finished=(finished,)))
        return finished

    # -- decode side ------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, now_ns: int) -> ReserveOutcome:
        """Reserve a row for a request whose KV will arrive, with slots for its prompt and one R, and hold the row.

        The executor learns of the request when it joins. Waiting requests, which were retracted, go first.
        """
        refusal = self._refusal(request)
        if refusal:
            return ReserveOutcome(refusal)
        row = self._row_for(request)
        if row is None:
            return ReserveOutcome("", replan=self.requests.in_flight.has_multi_step)
        record = self.requests.reserve(request, self.admission.max_tokens(request), row)
        self.store.hold_row(row)
        self._emit(HandoffMoved(now_ns, HandoffMove.RESERVE, request.request_id, row, request=request))
        return ReserveOutcome("", row, record.epoch, record.num_cached)

    def _refusal(self, request: Request) -> str:
        if self.admission.role is EngineRole.PREFILL:
            return "this engine only computes prompts"
        refusal = self.requests.refusal(request)
        if not refusal and self.admission.max_tokens(request) < max(request.shown.length, 1) + 1:
            refusal = f"too long: {request.prefill_len} tokens and 2 of output do not fit"
        return refusal or self.output.refusal(request)

    def _row_for(self, request: Request) -> int | None:
        if not self._fits(request):
            return None
        tokens = request.context() if self.store.cache.keeps_prefixes else None
        tokens = tokens if tokens is None else tokens[: request.prefill_len]
        num_slots = self.admission.room.slots_for_length(request.prefill_len)
        return self.store.reserve_row(tokens, request.namespace, num_slots, request.prefill_len)

    def _fits(self, request: Request) -> bool:
        requests, room = self.requests, self.admission.room
        has_precedence = not len(requests.waiting) and requests.in_progress is None
        if not has_precedence or requests.steps_are_lost or requests.is_admission_paused or not self.admission.has_row:
            return False
        slots = room.to_find_for_transfer(request, self.admission.max_tokens(request))
        return slots + room.to_leave(len(requests.rounds.rows)) <= self.store.available_slots

    def join(self, request_id: str, arrival: Arrival, now_ns: int) -> JoinOutcome:
        """Let a reserved request take part in the next decode round, once all of its KV is here and verified. Caches
        its prefix.

        If the algorithm cannot continue a request (no hidden state), this request fails alone.
        """
        record = self.requests.live[request_id]
        failure = arrival_failure(self._join_of(record), arrival, self.algorithm)
        if failure:
            finished = self.requests.give_up(record, FinishReason.ERROR, failure)
            assert finished is not None, f"no round of {request_id!r} has run"
            self._emit(HandoffMoved(now_ns, HandoffMove.JOIN, request_id, 0, detail=failure, finished=(finished,)))
            return JoinOutcome(finished, False)
        self.requests.join(record)
        self.output.arrive(record, arrival)
        if self.store.cache.keeps_prefixes:
            self._cache_prompt(record)
        self._joined.append((record, record.epoch, arrival))
        self._emit(HandoffMoved(now_ns, HandoffMove.JOIN, request_id, record.row, first_token=arrival.first_token))
        return JoinOutcome(None, True)

    def _cache_prompt(self, record: RequestRecord) -> None:
        """Hand the received prompt to the prefix cache, and note how much of it the cache had already."""
        row, length = record.row, record.prefill_len
        if record.context is None:
            record.context = record.request.context()
        if record.context is None:
            return
        own = self.store.table.gather(row, 0, length)
        self.requests.share_prefix(record, record.prefill_committed)
        self.store.pass_fence(self.requests.last_committed)  # if no step is in flight, no commit frees the duplicates
        # Where a slot changed, the cache already had the position, and its slot replaced the received one.
        foreign = np.flatnonzero(own != self.store.table.gather(row, 0, length))
        record.num_cached = max(record.num_cached, int(foreign[-1]) + 1 if len(foreign) else 0)

    def take_joined(self) -> tuple[list[Join], Arrivals | None]:
        """Return the joins of the next step: they tell the executor about requests that have joined and still have
        their row.
        """
        if not self._joined:
            return [], None
        joins, arrivals = [], []
        for record, epoch, arrival in self._joined:
            if record.state is RequestState.DECODE and record.epoch == epoch:
                self.store.announce_row(record.row)
                joins.append(self._join_of(record))
                arrivals.append(arrival)
        self._joined.clear()
        return joins, arrivals_of(joins, arrivals) if joins else None

    def _join_of(self, record: RequestRecord) -> Join:
        return Join(
            record.row,
            record.epoch,
            record.request,
            record.max_tokens,
            num_emitted=record.emitted_before + 1,
            num_cached=record.num_cached,
            cached_tokens=record.known_context()[: record.prefill_len] if self.config.track_tokens else None,
            num_received=record.prefill_len,
        )
