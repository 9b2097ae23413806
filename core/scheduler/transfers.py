"""The engine's part in a handoff between a prefill and a decode worker: which requests and rows are held while KV is on its way.

```
prefill side   … prefill chunks ──last one committed──► TRANSFERRING ──end_transfer──► TRANSFERRED
decode side                    reserve ──► TRANSFERRING ──join──► the next decode round
```

A request and its row are held apart: a request may end at any time, and then its row stays as it is until `release_hold`, because
somebody may still read or write its slots. When that is, the state machines of `handoff` know; here are only the moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..algorithm.arrival import Arrival, arrival_failure
from ..contract.events import HandoffMove, HandoffMoved
from ..contract.request import FinishedRequest, FinishReason, Request
from ..contract.step import Join
from ..errors import InvariantViolation
from ..kv.sizing import ceil_to_page
from .config import EngineRole
from .life import RequestEvent, RequestRecord, RequestState

if TYPE_CHECKING:
    from .engine import Engine


class ReserveOutcome(NamedTuple):
    """`refusal`: the request can never run here. `row` 0: not now. Else its row and epoch, and what the prefix cache has of it already."""

    refusal: str
    row: int = 0
    epoch: int = 0
    num_cached: int = 0


class JoinOutcome(NamedTuple):
    """`finished` if the request failed instead of joining. `replan`: a new plan could differ, so stop the running block."""

    finished: FinishedRequest | None
    replan: bool


class PromptProgress(NamedTuple):
    """How far a prefill worker is with a request that has a row."""

    request: Request
    row: int
    epoch: int
    num_computed: int  # KV positions that are computed and will not move to other slots before the row is released
    is_complete: bool  # the whole prompt, and its first token
    is_to_transfer: bool  # more than one token was asked for: the rest is decoded elsewhere


class Transferring:
    """Moves of `Engine` that belong to a handoff; every one of them is in the decision log."""

    # -- roles ------------------------------------------------------------------------------------------------------

    def change_role(self: Engine, role: EngineRole, now_ns: int) -> None:
        """Another role for an engine that has nothing: no request, no step in flight, no row held. Else InvariantViolation HANDOFF-10."""
        if not self.is_idle:
            raise InvariantViolation("HANDOFF-10", f"the role changes to {role} while the engine has requests or steps")
        self._take_role(role)
        self._tell(HandoffMoved(now_ns, HandoffMove.ROLE, detail=str(role)))

    def _take_role(self: Engine, role: EngineRole) -> None:
        self.role = role
        # Where nothing is decoded, nothing is kept free for rounds.
        self.admission.reserve = 0 if role is EngineRole.PREFILL else self.sizes.reserve

    # -- prefill side -----------------------------------------------------------------------------------------------

    def prompts(self: Engine) -> list[PromptProgress]:
        """The requests that have a row, in the order in which they got it."""
        records = [*self._transferring.values(), *self._by_row.values()]
        return [self._progress_of(record) for record in records]

    def progress_of(self: Engine, request_id: str) -> PromptProgress | None:
        """How far one request is; None if it has no row."""
        record = self._live.get(request_id)
        return None if record is None or not record.row else self._progress_of(record)

    def _progress_of(self, record: RequestRecord) -> PromptProgress:
        complete = record.state is RequestState.TRANSFERRING and record.prefill_committed == record.prefill_len
        is_to_transfer = record.max_tokens > record.emitted_before + 1
        return PromptProgress(
            record.request, record.row, record.epoch, record.prefill_committed, complete, is_to_transfer
        )

    def first_token_of(self: Engine, request_id: str) -> Arrival:
        """The first token of a computed prompt, and what its request asked to see of it; without the draft's input."""
        record = self._live[request_id]
        assert record.state is RequestState.TRANSFERRING, f"{request_id!r} has no first token to hand over"
        _, tokens = self.output.delivered(record, self.rounds.kv_len)
        outputs = {name: values[0] for name, values in record.outputs.items()}
        return Arrival(None if tokens is None else int(tokens[0]), None, outputs)

    def hold(self: Engine, request_id: str, now_ns: int) -> int:
        """Keep the row of a request, whoever leaves it, until `release_hold`. Returns the row."""
        row = self._live[request_id].row
        self.store.hold_row(row)
        self._tell(HandoffMoved(now_ns, HandoffMove.HOLD, request_id, row))
        return row

    def release_hold(self: Engine, row: int, now_ns: int) -> None:
        """No transfer reads or writes the slots of `row` any more."""
        self.store.release_hold(row, self._last_committed)
        self._tell(HandoffMoved(now_ns, HandoffMove.RELEASE, "", row))

    def end_transfer(self: Engine, request_id: str, now_ns: int, failure: str = "") -> FinishedRequest | None:
        """The decode side has the request, or the request failed on the way; None if no live request has that id.

        It also fails a request whose prompt is still being computed, or that waits for it.
        """
        record = self._live.get(request_id)
        if record is None:
            return None
        assert failure or record.state is RequestState.TRANSFERRING, f"{request_id!r} is {record.state.value}"
        if record.state is RequestState.WAITING:
            self.admission.queue.remove(record)
        finished = self._end(record, FinishReason.ERROR if failure else FinishReason.TRANSFERRED, failure)
        self._tell(HandoffMoved(now_ns, HandoffMove.END, request_id, 0, detail=failure, finished=(finished,)))
        return finished

    def _hand_over(self: Engine, record: RequestRecord) -> None:
        """The last chunk is committed on the prefill side: the request waits for its transfer, its KV stays."""
        record.advance(RequestEvent.HAND_OVER)
        self.rounds.kv_len[record.row] = record.prefill_len
        del self._by_row[record.row]
        self._transferring[record.row] = record

    # -- decode side ------------------------------------------------------------------------------------------------

    def reserve(self: Engine, request: Request, now_ns: int) -> ReserveOutcome:
        """A row and the slots of its prompt and of one reserve, for a request whose KV will arrive. The row is held.

        The executor hears nothing of it before the request joins. Requests that were retracted go first.
        """
        refusal = self._refusal_of_arrival(request)
        if refusal:
            return ReserveOutcome(refusal)
        row = self._row_for(request)
        if row is None:
            return ReserveOutcome("")
        record = RequestRecord(request, self._num_arrived, self._max_tokens(request))
        self._num_arrived += 1
        record.advance(RequestEvent.RESERVE)
        record.row, record.epoch = row, int(self.store.table.epochs[row])
        record.prefill_len = record.prompt_len
        record.num_cached = self.store.num_adopted(row)
        self._live[request.request_id] = record
        self._transferring[row] = record
        self.output.open(record)
        self.store.hold_row(row)
        self._tell(HandoffMoved(now_ns, HandoffMove.RESERVE, request.request_id, row, request=request))
        return ReserveOutcome("", row, record.epoch, record.num_cached)

    def _refusal_of_arrival(self: Engine, request: Request) -> str:
        if self.role is EngineRole.PREFILL:
            return "this engine only computes prompts"
        if request.request_id in self._live:
            return "duplicate id: a live request has it"
        if self._max_tokens(request) < 2:
            return f"too long: {request.prompt.length} tokens and 2 of output do not fit"
        if request.stop_strings and not self.output.decodes_text:
            return "stop strings need a tokenizer, this engine has none"
        return ""

    def _row_for(self: Engine, request: Request) -> int | None:
        if len(self.admission.queue) or self.admission.in_progress is not None:
            return None
        if self._awaits_quiet or (self._holding and self._hold_matters()):
            return None
        needed = ceil_to_page(request.prompt.length + self.sizes.reserve, self.config.page_size)
        num_running = len(self.rounds.rows)
        if needed + self.admission.headroom(num_running) > self.store.available_slots or not self.admission.has_row:
            return None
        tokens = request.prompt.materialize() if self.store.cache is not None else None
        return self.store.reserve_row(tokens, request.namespace, needed)

    def join(self: Engine, request_id: str, arrival: Arrival, now_ns: int) -> JoinOutcome:
        """All KV of a reserved request is here and verified: it takes part in the next decode round. Only now is its prefix cached.

        A request that its algorithm cannot go on with (no hidden state) fails alone.
        """
        record = self._live[request_id]
        failure = arrival_failure(self._join_of(record), arrival, self.algorithm)
        if failure:
            finished = self._end(record, FinishReason.ERROR, failure)
            self._tell(HandoffMoved(now_ns, HandoffMove.JOIN, request_id, 0, detail=failure, finished=(finished,)))
            return JoinOutcome(finished, False)
        record.advance(RequestEvent.JOIN)
        row = record.row
        record.prefill_launched = record.prefill_committed = record.prefill_len
        del self._transferring[row]
        self._by_row[row] = record
        if self.store.cache is not None:
            if record.context is None:
                record.context = record.request.prompt.materialize()
            tokens = record.context
            if tokens is not None:
                own = self.store.table.gather(row, 0, record.prefill_len)
                self.store.share_prefix(row, tokens, record.prefill_len, record.request.namespace, self.last_step_id)
                self.store.pass_fence(self._last_committed)  # if nothing is in flight, nothing else would
                foreign = np.flatnonzero(own != self.store.table.gather(row, 0, record.prefill_len))
                record.num_cached = max(record.num_cached, int(foreign[-1]) + 1 if len(foreign) else 0)
        self.output.arrive(record, arrival)
        end_len = record.prompt_len + record.max_tokens - 1
        self.rounds.join(row, record.prefill_len, end_len, bool(record.request.stop_strings))
        self._arrived.append((record, arrival))
        self._tell(HandoffMoved(now_ns, HandoffMove.JOIN, request_id, row, first_token=arrival.first_token))
        return JoinOutcome(None, True)

    def _take_arrived(self: Engine) -> tuple[list[Join], list[Arrival]]:
        """The rows that join the executor's batch with the next step."""
        arrived, self._arrived = self._arrived, []
        for record, _ in arrived:
            self.store.announce_row(record.row)
        return [self._join_of(record) for record, _ in arrived], [arrival for _, arrival in arrived]

    def _join_of(self: Engine, record: RequestRecord) -> Join:
        tokens = record.context[: record.prefill_len] if self.config.track_tokens else None
        return Join(
            record.row,
            record.epoch,
            record.request,
            record.max_tokens,
            1,
            record.num_cached,
            tokens,
            record.prefill_len,
        )

    def _forget_transfer(self: Engine, record: RequestRecord) -> None:
        """`record` leaves its row: no arrival of it is left to be announced."""
        self._transferring.pop(record.row, None)
        if self._arrived:
            self._arrived = [entry for entry in self._arrived if entry[0] is not record]
