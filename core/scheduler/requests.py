"""The store of requests. It alone knows and changes the place of each request.

```
 waiting ──admit──► running (in_progress while its prompt has chunks left) ──end──► gone
    ▲                  │   │ ▲
    └─────retract──────┘   │ └─join── transferring ◄─hand_over── running of a prefill engine; rows whose KV travels
                           └─leave──► leaving                    rows that end when the running multi-step is committed
```

A request's place follows from its state (`life.py`), and `_advance` changes both together. Steps in flight are kept
here, too, because they decide whether an end or a retraction must wait (`JOINT_RULES`) and which step's commit releases
a row (the row's fence).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from ..contract.request import FinishedRequest, FinishReason, Request, finish_reason
from ..contract.step import StepResult
from ..errors import InvariantViolation
from ..kv.fence import Departure
from ..kv.radix import PrefixMatch
from ..kv.store import KVStore
from .config import EngineConfig
from .flights import Chunk, StepInFlight, StepsInFlight
from .life import ENDINGS, JOINT_RULES, Demand, RequestEvent, RequestRecord, RequestState, Response
from .output import OutputLog
from .rounds import DecodeRounds
from .rules.admission_state import AdmissionPause, PauseEnd
from .rules.late import LateTokens
from .waiting import WaitingQueue, giving_way


class End(NamedTuple):
    """A request that has its last token, by a stop if `stopped`, else by its length."""

    record: RequestRecord
    stopped: bool


class Requests:
    """All live requests of an engine by their places, and the steps in flight."""

    def __init__(self, config: EngineConfig, store: KVStore, rounds: DecodeRounds, output: OutputLog) -> None:
        self.store = store
        self.rounds = rounds
        self.output = output
        self.live: dict[str, RequestRecord] = {}
        self.waiting: WaitingQueue = WaitingQueue(config.ageing_bound)
        self.in_progress: RequestRecord | None = None  # the one request whose prompt still has chunks to launch
        self.running: dict[int, RequestRecord] = {}  # by row, in the order in which they took it
        self.leaving: dict[int, RequestRecord] = {}
        self.transferring: dict[int, RequestRecord] = {}
        self._rows_in = {
            RequestState.PREFILL: self.running,
            RequestState.DECODE: self.running,
            RequestState.LEAVING: self.leaving,
            RequestState.TRANSFERRING: self.transferring,
        }
        self.retraction_demands: dict[str, RequestRecord] = {}
        self.retracted: list[str] = []  # ids since the last event that reported them
        self.in_flight: StepsInFlight = rounds.in_flight
        self.last_step_id: int = 0
        self.last_committed: int = 0
        self.steps_are_lost: bool = False  # until `pass_lost_steps`; meanwhile the device may still run them
        self._num_arrived = 0
        self.rules = config.rules
        self._ageing_bound = config.ageing_bound
        self.late: LateTokens = config.rules.late_tokens()
        self.pause: AdmissionPause = config.rules.pause()

    @property
    def num_with_row(self) -> int:
        """Requests that hold a row, without those in a transfer."""
        return len(self.running) + len(self.leaving)

    @property
    def running_ids(self) -> list[str]:
        """Requests that hold a row and take part in later plans, in the order in which they took their rows."""
        return [record.request.request_id for record in self.running.values()]

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, no step in flight and no row held for a transfer."""
        return not self.live and not self.in_flight and not self.steps_are_lost and not self.store.num_held_rows

    def refusal(self, request: Request) -> str:
        """Return the reason why a request cannot join the live ones; an empty text if it can."""
        return "duplicate id: a live request has it" if request.request_id in self.live else ""

    # -- a request comes and runs -----------------------------------------------------------------------------------

    def queue(self, request: Request, max_tokens: int) -> RequestRecord:
        """Accept a request and queue it."""
        record = self._new(request, max_tokens)
        self._advance(record, RequestEvent.QUEUE)
        self.waiting.push(record)
        return record

    def admit(self, prefix: PrefixMatch | None, num_loaded: int) -> RequestRecord:
        """Give the head of the queue a row, with the slots of its cached prefix. The next `num_loaded` tokens come from
        host memory, and then its chunks."""
        record = self.waiting.pop()
        self._take_row(record, self.store.open_row(prefix), record.prompt_len + record.emitted_before)
        self._advance(record, RequestEvent.ADMIT)
        record.num_loaded = num_loaded
        record.num_cached = num_loaded + (prefix.length if prefix else 0)
        record.prefill_launched = record.prefill_committed = record.num_cached
        self.in_progress = record
        return record

    def cut_chunk(self, record: RequestRecord, length: int, padding: int) -> Chunk:
        """Put the next `length` tokens of the prompt in progress into the next step."""
        chunk = Chunk(record, record.prefill_launched, length, padding)
        if padding:
            self.rounds.padded.add(record.row)
        record.prefill_launched += length
        if chunk.is_last:
            self.in_progress = None
        return chunk

    def begin_decoding(self, record: RequestRecord) -> None:
        """Let a row take part in decode rounds from the next step on, because its last chunk is launched."""
        self._advance(record, RequestEvent.PREFILLED)
        self._join_rounds(record)

    def hand_over(self, record: RequestRecord) -> None:
        """Keep the KV of a computed prompt for its transfer (prefill side)."""
        self._advance(record, RequestEvent.HAND_OVER)
        self.rounds.kv_len[record.row] = record.prefill_len

    def reserve(self, request: Request, max_tokens: int, row: int) -> RequestRecord:
        """Decode side: give a row to a request whose KV is still to arrive."""
        record = self._new(request, max_tokens)
        self._take_row(record, row, request.prefill_len)
        self._advance(record, RequestEvent.RESERVE)
        record.num_cached = self.store.num_shared(row)
        return record

    def join(self, record: RequestRecord) -> None:
        """Decode side: let a request whose KV has arrived take part in the next decode round."""
        self._advance(record, RequestEvent.JOIN)
        record.prefill_launched = record.prefill_committed = record.prefill_len
        self._join_rounds(record)

    def share_prefix(self, record: RequestRecord, length: int) -> None:
        """Put the first `length` tokens of a prompt into the prefix cache."""
        if record.context is not None:
            self.store.share_prefix(record.row, record.context, length, record.namespace, self.last_step_id)

    def lower_than(self, head: RequestRecord) -> list[RequestRecord]:
        """Return the running requests that may give way to `head` for its priority, least entitled first.

        The retraction of a request would not release the slots that a transfer holds.
        """
        running = [record for record in self.running.values() if not self.store.is_held_row(record.row)]
        return giving_way(head, running, self._ageing_bound)

    def in_row(self, row: int) -> RequestRecord:
        """Return the request that runs in a row or is leaving it."""
        return self.running.get(row) or self.leaving[row]

    def _new(self, request: Request, max_tokens: int) -> RequestRecord:
        record = RequestRecord(request, self._next_number(), max_tokens)
        record.emitted_before = request.prefill_len - request.prompt.length
        record.has_first_token = request.shown.length > 0
        self.live[request.request_id] = record
        return record

    def _next_number(self) -> int:
        self._num_arrived += 1
        return self._num_arrived - 1

    def _take_row(self, record: RequestRecord, row: int, prefill_len: int) -> None:
        record.row, record.epoch, record.prefill_len = row, int(self.store.table.epochs[row]), prefill_len
        record.namespace = self.store.cache.named(record.request.namespace)
        self.output.open(record)

    def _join_rounds(self, record: RequestRecord) -> None:
        self.rounds.add(record.row, record.prefill_len, record.end_len, bool(record.request.stop_strings))

    def _advance(self, record: RequestRecord, event: RequestEvent) -> None:
        """Take `event` and change the request's place among the rows with its state.

        Raises ENGINE-02 if the table refuses it.
        """
        before = self._rows_in.get(record.state)
        record.advance(event)
        after = self._rows_in.get(record.state)
        if before is not after:
            if before is not None:
                del before[record.row]
            if after is not None:
                after[record.row] = record

    # -- a request is retracted or ends -----------------------------------------------------------------------------

    def retract(self, record: RequestRecord, keeps_place: bool = False, for_priority: bool = False) -> None:
        """Release all that a request holds and queue it again. Admission pauses.

        `keeps_place`: it waits at its place by arrival, whatever the rules say. `for_priority`: it makes room for
        requests of greater priority, for which admission does not pause.
        """
        self.late.expect(record, self.in_flight)
        self._close_row(record, self.rules.kept_of_retracted(partial(self.output.context_of, record)))
        self._advance(record, RequestEvent.RETRACT)
        record.row = record.epoch = 0
        if not keeps_place:
            record.arrival_number = self.rules.place_of_retracted(record.arrival_number, self._next_number)
        self.waiting.push(record)
        self.pause.begin(record.request.priority if for_priority else math.inf)
        self.retracted.append(record.request.request_id)

    def demand_retraction(self, request_id: str) -> bool:
        """Mark a running request for retraction by the next plan that can retract it.

        Returns whether such a request is running.
        """
        record = self.live.get(request_id)
        if record is None or self.running.get(record.row) is not record:
            return False
        self.retraction_demands[request_id] = record
        return True

    def apply_retractions(self) -> None:
        """Apply the joint rules to the demanded retractions."""
        if self.retraction_demands:
            for record in list(self.retraction_demands.values()):
                self._apply_rules(record, Demand.RETRACT)

    def finish(self, record: RequestRecord, reason: FinishReason) -> FinishedRequest:
        """End a request that has its last token, or whose transfer is complete."""
        cause = self._cause_of_limit(record) if reason is FinishReason.LENGTH else ""
        record.ending = (reason, cause)
        finished = self._apply_rules(record, Demand.FINISH)
        assert finished is not None, "no rule lets a request wait that has its last token"
        return finished

    def finish_all(self, ends: list[End]) -> list[FinishedRequest]:
        """End the requests that have their last tokens, in this order."""
        return [self.finish(record, finish_reason(stopped)) for record, stopped in ends] if ends else []

    def _cause_of_limit(self, record: RequestRecord) -> str:
        asked = record.request.max_tokens
        return self.rounds.sizes.cause_of_limit(self.rounds.config, record.prompt_len, asked, record.max_tokens)

    def give_up(self, record: RequestRecord, reason: FinishReason, message: str = "") -> FinishedRequest | None:
        """End a request that was aborted or has failed.

        Returns None if its multi-step is running: then it is leaving, and ends with the multi-step.
        """
        record.ending = (reason, message)
        return self._apply_rules(record, Demand.GIVE_UP)

    def end_leaving(self) -> list[FinishedRequest]:
        """End the leaving requests whose multi-step is no longer running."""
        if not self.leaving:
            return []
        ends = [self._apply_rules(record, Demand.GIVE_UP) for record in list(self.leaving.values())]
        return [finished for finished in ends if finished is not None]

    def _apply_rules(self, record: RequestRecord, demand: Demand) -> FinishedRequest | None:
        """Apply joint rules until a rule does not change the state. Returns the finished request if it ended."""
        while True:
            rule = JOINT_RULES[demand][record.state]
            is_inside = not self.steps_are_lost and self.in_flight.runs_multi_step_of(record.row)
            response = rule.inside if is_inside else rule.outside
            assert response is not None, (
                f"{record.request.request_id!r} is {record.state.value} and cannot {demand.value}"
            )
            if response is Response.END:
                return self._end(record)
            if response is Response.LEAVE:
                self.rounds.remove(record.row)
                self._advance(record, RequestEvent.LEAVE)
            elif response is Response.RETRACT:
                self.retract(record)
            else:
                if response is Response.DROP:
                    del self.retraction_demands[record.request.request_id]
                return None

    def _end(self, record: RequestRecord) -> FinishedRequest:
        assert record.ending is not None, "each demand of an end says why"
        reason, message = record.ending
        num_output, tokens = self.output.delivered(record)
        if record.state is RequestState.WAITING:
            self.waiting.remove(record)
        else:
            # After an error the row's KV may be wrong: none of it is cached.
            self._close_row(record, self.output.context_of(record) if reason is not FinishReason.ERROR else None)
        self._advance(record, ENDINGS[reason])
        request_id = record.request.request_id
        del self.live[request_id]
        self.retraction_demands.pop(request_id, None)
        return FinishedRequest(request_id, reason, num_output, tokens, record.outputs or None, message)

    def _close_row(self, record: RequestRecord, context: np.ndarray | None) -> None:
        """Release a row as soon as no step in flight can touch it. `context` are the tokens whose KV may be cached."""
        row = record.row
        num_valid = record.prefill_committed
        if record.has_committed_nothing:
            num_valid -= record.num_loaded  # the step that copies them may have failed
        if record.state in (RequestState.DECODE, RequestState.LEAVING):
            if record.has_whole_prompt:
                num_valid = int(self.rounds.kv_len[row])
            if self.rounds.live[row]:
                self.rounds.remove(row)
        if self.in_progress is record:
            self.in_progress = None
        self.output.close(record)
        fence = self.in_flight.fence_of(row)
        departure = Departure(fence, row, context, num_valid, record.namespace, has_states=not self.steps_are_lost)
        self.store.close_row(departure, self.last_committed)

    # -- plan -------------------------------------------------------------------------------------------------------

    @property
    def is_admission_paused(self) -> bool:
        """Whether no request may enter, because of a retraction."""
        return self.pause.goes_on(
            len(self.rounds.rows) > 0 or any(flight.planned is not None for flight in self.in_flight)
        )

    def begin_plan(self) -> None:
        """End a pause that lasts no longer than a plan, let rows rest that surely end, retract where it was asked."""
        self.pause.pass_event(PauseEnd.PLAN)
        self.rounds.rest()
        self.apply_retractions()

    def take_retracted(self) -> tuple[str, ...]:
        if not self.retracted:
            return ()
        retracted, self.retracted = self.retracted, []
        return tuple(retracted)

    # -- steps in flight --------------------------------------------------------------------------------------------

    def launch(self, flight: StepInFlight) -> None:
        self.in_flight.append(flight)
        self.last_step_id = flight.step.step_id
        if flight.planned is not None:
            self.pause.pass_event(PauseEnd.LAUNCH)

    def begin_commit(self, result: StepResult) -> tuple[StepInFlight, list[FinishedRequest]]:
        """Take the oldest step out of flight.

        Requests that the executor reports as failed end, or leave if the step is a multi-step.
        """
        flight = self.in_flight.oldest(result.step_id, "result")
        assert (result.prefill is None) == (flight.step.prefill is None), "a result has the parts of its step"
        assert (result.decode is None) == (flight.planned is None), "a result has the parts of its step"
        self.last_committed = result.step_id
        finished: list[FinishedRequest] = []
        for row, message in result.failures:
            if row in self.running:
                end = self.give_up(self.running[row], FinishReason.ERROR, message)
                finished += [end] if end is not None else []
        self.in_flight.popleft()
        if self.rounds.padded and flight.step.prefill is not None:
            self.rounds.padded.difference_update(flight.step.prefill.rows.tolist())
        return flight, finished

    def lose_in_flight(self, blamed: RequestRecord | None, message: str) -> list[FinishedRequest]:
        """Give up the steps in flight.

        The blamed request fails, leaving requests end, and all other requests of these steps are retracted.
        """
        self.steps_are_lost = True
        finished = self.end_leaving()
        for flight in self.in_flight:
            for record in self.records_of(flight):
                if record is blamed:
                    failed = self.give_up(record, FinishReason.ERROR, message)
                    assert failed is not None, "no multi-step runs: the steps are lost"
                    finished.append(failed)
                else:
                    self.retract(record, keeps_place=True)
        self.in_flight.clear()
        self.late.clear()
        return finished

    def pass_lost_steps(self) -> None:
        """Release the slots that the lost steps have fenced, now that the device is quiet.

        Raises RELAY-01 with steps in flight.
        """
        if self.in_flight:
            raise InvariantViolation("RELAY-01", f"resumed with {self.describe_in_flight()} in flight")
        self.steps_are_lost = False
        self.last_committed = self.last_step_id
        self.store.pass_fence(self.last_step_id)

    def records_of(self, flight: StepInFlight) -> list[RequestRecord]:
        """Return the running requests that still have the rows with which the step was planned, in the order of its
        rows.
        """
        epochs = self.store.table.epochs
        records = (self.running.get(row) for row, epoch in flight.row_epochs() if epochs[row] == epoch)
        return [record for record in records if record is not None]

    def describe_in_flight(self) -> str:
        """Describe the steps in flight, for a report about a step without a result."""
        described = []
        for flight in self.in_flight:
            described.append(flight.describe([record.request.request_id for record in self.records_of(flight)]))
        return "; ".join(described) or "nothing"

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything from scratch; raises InvariantViolation with the id of what is broken."""
        self.store.check()
        states = [record.state for record in self.live.values()]
        waiting = sum(state is RequestState.WAITING for state in states)
        transferring = sum(state is RequestState.TRANSFERRING for state in states)
        if waiting != len(self.waiting) or transferring != len(self.transferring):
            message = f"{waiting} waiting and {transferring} transferring are not counted so"
            raise InvariantViolation("ENGINE-01", message)
        if waiting + self.num_with_row + transferring != len(states):
            running = f"{self.num_with_row} running + {transferring} transferring"
            raise InvariantViolation("ENGINE-01", f"{waiting} waiting + {running} != {len(states)}")
        for row, record in [*self.running.items(), *self.leaving.items(), *self.transferring.items()]:
            if record.row != row or self.store.table.epochs[row] != record.epoch:
                raise InvariantViolation("RELAY-03", f"row {row} belongs to {record.request.request_id!r} no longer")
        self.rounds.check([flight.planned.decode for flight in self.in_flight if flight.planned is not None])
        if self.is_idle and self.store.num_request_slots:
            raise InvariantViolation("ALLOC-15", f"idle, but {self.store.num_request_slots} slots are held by requests")
