"""The engine decides what runs next. This file has the two halves of the main loop, `plan` and `commit`.

A driver (`driver.py`) calls `plan` until it returns None, launches the steps on an executor, and passes the results to
`commit` in order. Decisions depend only on the order of calls and results; `now_ns` only stamps events.

```
submit ──► requests ──► plan: demanded retractions ─► preempt ─► reserve rounds ─► admit, cut chunks ─► Step ─► executor
              ▲                                                                                                 │
              └──── commit: failures ─► first tokens ─► count rounds ─► deliver ─► ends ─► free slots ◄───── StepResult
```

`submit` queues a request. A plan admits it to a row of the request table. Steps compute its prompt in chunks, and each
chunk takes its KV slots when it is cut. Decode rounds follow until the request ends. If no round fits, the engine
retracts a request: it releases the request's row and slots and queues it again at its old place, with its emitted
tokens as part of the prompt. `life.py` has this as a table. `requests.py` keeps requests and steps in flight,
`admission.py` admits, `rounds.py` reserves and counts, `output.py` keeps tokens, `recovery.py` acts after a failed
step. The sides of a handoff (`core/handoff/`) call `Engine.transfers`. docs/glossary.md explains the words.
"""

from __future__ import annotations

import numpy as np

from ..adaptive import AdaptiveController, fixed_controller
from ..algorithm.algorithm import NO_SPECULATION, SpecAlgorithm
from ..contract.events import (
    Aborted,
    AllocationsDenied,
    Committed,
    EngineStarted,
    Event,
    EventSink,
    Planned,
    RetractionAsked,
    Submitted,
    ignore,
)
from ..contract.outcomes import AbortOutcome, CommitOutcome, LossOutcome, SubmitOutcome
from ..contract.request import FinishReason, Request
from ..contract.step import DecodeResult, Join, PrefillResult, Step, StepFailure, StepResult
from ..contract.text import TextDecoder
from ..kv.store import KVStore
from .admission import Admission
from .config import EngineConfig, EngineRole, EngineSizes, make_store
from .flights import Chunk, PlannedRounds, StepInFlight, prefill_step
from .life import RequestState
from .output import OutputLog
from .preemption import Preemption
from .recovery import Recovery
from .requests import End, Requests
from .rounds import DecodeRounds
from .transfers import Transfers


class Engine:
    """One replica's scheduler. `driver.py` has the loop around it."""

    def __init__(
        self,
        config: EngineConfig,
        algorithm: SpecAlgorithm = NO_SPECULATION,
        controller: AdaptiveController | None = None,
        *,
        events: EventSink = ignore,
        text_decoder: TextDecoder | None = None,
        named_slots: bool = True,
    ) -> None:
        """Raise ConfigError with all contradictions. Without `named_slots` the store only counts slots."""
        self.config = config
        self._events = events
        self.algorithm = algorithm
        self.controller: AdaptiveController = controller if controller is not None else fixed_controller(0)
        self.sizes: EngineSizes = EngineSizes.resolve(config, algorithm, self.controller)
        self.store: KVStore = make_store(config, self.sizes, algorithm, named_slots)
        self.rounds: DecodeRounds = DecodeRounds(config, self.sizes, self.controller, self.store)
        self.output: OutputLog = OutputLog(config, self.sizes, self.rounds.kv_len, text_decoder)
        self.requests: Requests = Requests(config, self.store, self.rounds, self.output)
        self.admission: Admission = Admission(config, self.sizes, self.store, self.requests)
        self.preemption: Preemption = Preemption(self.admission, self.requests)
        self.recovery: Recovery = Recovery(self.admission.limits, self.requests, self.controller, self.emit)
        self.transfers: Transfers = Transfers(config, algorithm, self.requests, self.admission, self.output, self.emit)
        self.pipeline_depth = 2 if config.overlap else 1
        self.emit(EngineStarted({"algorithm": algorithm.name, **config.to_json()}))

    # -- requests come and go -------------------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int) -> SubmitOutcome:
        """Queue a request, or refuse it. `replan` in the outcome: a plan could admit it, so a multi-step should
        stop."""
        refusal = self.requests.refusal(request) or self.admission.refusal(request) or self.output.refusal(request)
        if self.is_idle:
            self.admission.room.share.reset()
        record = None if refusal else self.requests.queue(request, self.admission.max_tokens(request))
        self.emit(Submitted(now_ns, request, refusal))
        return SubmitOutcome(refusal, replan=record is not None and self.admission.could_enter_before_commit(record))

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        """Give a live request up in any state. In a running multi-step it ends with the multi-step, else now.
        Idempotent."""
        self.emit(Aborted(now_ns, request_id))
        record = self.requests.live.get(request_id)
        if record is None or record.state is RequestState.LEAVING:
            return AbortOutcome(None, False)
        could_change_the_plan = record.state is not RequestState.WAITING or self.requests.waiting.head is record
        return AbortOutcome(self.requests.give_up(record, FinishReason.ABORT), could_change_the_plan)

    def request_retraction(self, request_id: str, now_ns: int) -> bool:
        """Retract a running request in the first plan after its multi-step. Returns whether it runs: then stop the
        multi-step."""
        self.emit(RetractionAsked(now_ns, request_id))
        return self.requests.demand_retraction(request_id)

    def deny_allocations(self, count: int, now_ns: int) -> None:
        """Inject a fault: the next `count` attempts to allocate find no free slots."""
        self.store.deny(count)
        self.emit(AllocationsDenied(now_ns, count))

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> Step | None:
        """Decide the next step and put it in flight. Returns None if no step is possible or enough are in flight."""
        in_flight = self.requests.in_flight
        if self.requests.steps_are_lost or len(in_flight) >= self.pipeline_depth:
            return None
        self.store.num_denied = 0
        while True:  # more than one turn only after injected denials (`deny_allocations`)
            denied_before = self.store.num_denied
            chunks, joins, planned = self._decide()
            if chunks or planned is not None or in_flight or self.store.num_denied == denied_before:
                break
            # A denial left no step to launch, and no commit will lead to another plan: try again. Each try uses one up.
        step = self._launch(chunks, joins, planned) if chunks or planned is not None else None
        retracted = self.requests.take_retracted()
        if step is not None or retracted or self.store.num_denied:
            self._events(Planned(now_ns, step, retracted, self.num_waiting, self.store.allocator.num_held_slots))
        return step

    def _decide(self) -> tuple[list[Chunk], list[Join], PlannedRounds | None]:
        """Choose chunks and rounds of the next step, and joins of newcomers. Without `mixed` chunks go first, alone."""
        self.requests.begin_plan()
        if self.controller.parking.is_parked:
            self.preemption.return_draft(self.controller.parking)
        if self.config.preempt:
            self.preemption.preempt()  # before anything is reserved for a row that gives way
        if not self.config.mixed:
            chunks, joins = self.admission.plan_prefill(num_verify_tokens=0)
            return chunks, joins, None if chunks else self._plan_rounds()  # a step has one part, prefill first
        planned = self._plan_rounds()
        if planned is None and len(self.rounds.rows):
            return [], [], None  # decoding rows wait for slots: a prompt must not take them
        num_verify_tokens = 0 if planned is None else planned.decode.num_verify_tokens
        chunks, joins = self.admission.plan_prefill(num_verify_tokens)
        return chunks, joins, planned

    def _plan_rounds(self) -> PlannedRounds | None:
        """Reserve the next decode round or multi-step. While not even one round fits, retract a request."""
        running = self.requests.running
        while len(self.rounds.rows):
            planned = self.rounds.reserve(self.requests.in_flight.num_rounds, self._max_rounds())
            if planned is not None:
                return planned
            if self.store.has_fenced or self.requests.leaving:
                return None  # the next commit releases slots
            if len(running) == 1 and self.store.num_held_rows:
                return None  # transfers hold the other slots; these come back, or their requests join
            self.preemption.retract_for_memory()
        return None

    def _max_rounds(self) -> int:
        """Return the most rounds before the next decision. `DecodeRounds.reserve` may allow fewer."""
        must_decide_each_round = (
            self.config.multi_step_rounds == 1
            or self.rounds.num_with_stop_strings > 0  # only the host sees where a stop string ends a request
            or self.requests.is_admission_paused
            or self.requests.retraction_demands
            or self.recovery.limits.are_reduced
            or self.requests.in_progress is not None  # a prompt chunk comes next
            or self.requests.in_flight.has_multi_step  # at most one in flight
            or self.admission.head_could_enter_soon()
        )
        return 1 if must_decide_each_round else self.config.multi_step_rounds

    def _launch(self, chunks: list[Chunk], joins: list[Join], planned: PlannedRounds | None) -> Step:
        received, arrivals = self.transfers.take_joined()  # requests whose prompts a prefill engine has computed
        step = Step(
            self.requests.last_step_id + 1,
            tuple(received + joins),
            self.store.take_released(),
            self.store.take_writes(),
            prefill_step(chunks, self.config.track_tokens, self.controller.parking.is_parked) if chunks else None,
            planned.decode if planned is not None else None,
            arrivals,
        )
        self.requests.launch(StepInFlight(step, chunks, planned, self.rounds.num_departed))
        if planned is not None:
            self.rounds.budgets.see_prompts(sum(chunk.length for chunk in chunks))
        for chunk in chunks:
            if chunk.is_last and self.role is not EngineRole.PREFILL:
                self.requests.begin_decoding(chunk.record)  # already now, for the plan that overlaps this step
        return step

    # -- commit ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now_ns: int) -> CommitOutcome:
        """Apply the result of the oldest step in flight. Raises InvariantViolation RELAY-07 for another step's."""
        flight, finished = self.requests.begin_commit(result)  # finished: those that the executor reports as failed
        prefill, decode = result.prefill, result.decode
        first_tokens, computed, ends = self._commit_prefill(flight, prefill) if prefill is not None else ([], [], [])
        kept, ends_in_rounds = self._commit_rounds(flight, decode) if decode is not None else (None, [])
        in_rounds = self.requests.finish_all(ends_in_rounds)  # first, because they were admitted first
        finished += self.requests.finish_all(ends) + in_rounds + self.requests.end_leaving()
        self.store.pass_fence(result.step_id)
        self.recovery.count_commit()
        outcome = CommitOutcome(tuple(finished), tuple(first_tokens), tuple(computed), kept)
        rest = tuple(end for end in finished if end.reason is not FinishReason.ABORT)  # `abort` has emitted those
        self._events(Committed(now_ns, flight.step, result, outcome.first_tokens, kept, rest))
        return outcome

    def _commit_prefill(self, flight: StepInFlight, result: PrefillResult) -> tuple[list[str], list[str], list[End]]:
        """Cache prompts, deliver first tokens. Returns ids with a first token, ids to hand over, ends."""
        first_tokens, computed, ends = [], [], []
        for i, chunk in flight.live_chunks():
            record = chunk.record
            record.prefill_committed = chunk.start + chunk.length
            self.requests.share_prefix(record, record.prefill_committed)
            if not chunk.is_last:
                continue
            if not record.has_first_token:  # True: another worker delivered it before it was lost
                first_tokens.append(record.request.request_id)
            has_stop_string = self.output.first_token(record, result, i)
            stopped = has_stop_string or (result.stopped is not None and bool(result.stopped[i]))
            if self.role is EngineRole.PREFILL:
                self.requests.hand_over(record)  # first, because `output` counts its first token only from then on
            if stopped or record.emitted_before + 1 == record.max_tokens:  # it has all its tokens
                ends.append(End(record, stopped))
            elif self.role is EngineRole.PREFILL:
                computed.append(record.request.request_id)
        late = self.requests.late.first_tokens(flight, result)
        first_tokens += [run.record.request.request_id for run in late]
        return first_tokens, computed, ends + [End(run.record, run.stopped) for run in late if run.has_ended]

    def _commit_rounds(self, flight: StepInFlight, result: DecodeResult) -> tuple[np.ndarray, list[End]]:
        """Count rounds, inform the controller, deliver tokens. Returns tokens by round and row, ends."""
        requests, planned = self.requests, flight.planned
        assert planned is not None
        rows = planned.decode.rows
        counted = self.rounds.count(planned, result, flight.num_departed, requests.leaving)
        self.rounds.teach_controller(planned.decode, result, counted.present)
        if planned.decode.max_rounds > 1:  # a single round keeps its slots: they are R of the next one
            self.rounds.release_unused(planned, result, counted.kv_before_last, requests.in_flight.decode_again(rows))
        self.admission.pass_rounds(flight, counted, result.rounds)
        if self.rounds.num_with_stop_strings:
            cuts = self.output.stop_string_cuts(rows, counted, result, requests.in_row)
            counted = self.rounds.cut(planned, counted, cuts)
        self.output.log(rows, counted, result, requests.in_row)
        ends = [End(requests.running[int(rows[i])], bool(counted.stopped[i])) for i in counted.ended.tolist()]
        late = requests.late.runs(flight, result, counted.kept)
        return counted.kept, ends + [End(run.record, run.stopped) for run in late if run.has_ended]

    def lose_steps(self, failure: StepFailure, now_ns: int) -> LossOutcome:
        """Queue the requests of all lost steps again; a request that fails alone ends. No plan comes until `resume`."""
        return self.recovery.lose_steps(failure, now_ns)

    def resume(self, now_ns: int, *, restarted: bool = False) -> None:
        """Allow plans again, because no lost step can touch a slot now. `restarted`: a new worker without KV."""
        self.recovery.resume(now_ns, restarted)

    # -- what a driver may ask ------------------------------------------------------------------------------------

    @property
    def role(self) -> EngineRole:
        return self.admission.role

    @property
    def last_step_id(self) -> int:
        return self.requests.last_step_id

    @property
    def num_uncommitted(self) -> int:
        return len(self.requests.in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self.requests.waiting)

    @property
    def is_idle(self) -> bool:
        return self.requests.is_idle

    def state_of(self, request_id: str) -> RequestState | None:
        """Return the state of a live request; None if no live request has that id."""
        record = self.requests.live.get(request_id)
        return None if record is None else record.state

    def check(self) -> None:
        """Recount everything from scratch; raises InvariantViolation with the id of what is broken."""
        self.requests.check()

    def emit(self, event: Event) -> None:
        self._events(event)
