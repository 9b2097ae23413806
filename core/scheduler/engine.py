"""The engine: plan, execute, commit. The only place that changes who runs.

A driver asks `plan` what to do next until it says None, lets an executor do it, and tells `commit` what happened, oldest step first.
Decisions are a pure function of the order of calls and results; `now_ns` only stamps events.

```
submit / abort ──► waiting ──admit──► prefill chunks ──► decode rounds ──► finished
                      ▲                     │                 │
                      └───── retract ◄──────┴─────────────────┘
```

A step that fails instead of returning is `lose_steps`, and `resume` once the device is quiet; see `recovery.py` for what follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..adaptive import AdaptiveController, fixed_controller
from ..algorithm.algorithm import NO_SPECULATION, SpecAlgorithm
from ..algorithm.arrival import Arrival, arrivals_of
from ..contract.events import (
    Aborted,
    AllocationsDenied,
    Committed,
    EngineStarted,
    Event,
    EventSink,
    Planned,
    Resumed,
    RetractionAsked,
    StepsLost,
    Submitted,
)
from ..contract.failure import StepFailure
from ..contract.request import FinishedRequest, FinishReason, Request, TextDecoder, finish_reason
from ..contract.step import DecodeResult, DecodeStep, Join, Step, StepResult
from ..errors import InvariantViolation
from ..kv.radix import RadixCache
from ..kv.store import Departure, KVStore
from .admission import Admission, Chunk, prefill_step
from .config import EngineConfig, EngineRole, EngineSizes
from .life import RequestEvent, RequestRecord, RequestState
from .output import OutputLog
from .precedence import entitlement, giving_way, least_entitled
from .recovery import Recovery
from .rounds import DecodeRounds, LaunchedRounds, SettledRounds
from .transfers import Transferring


class SubmitOutcome(NamedTuple):
    """`refusal` is empty if the request was queued. `replan`: a new plan could differ, so stop the running block."""

    refusal: str
    replan: bool


class AbortOutcome(NamedTuple):
    """`finished` is None if no live request has that id (it may have ended just before), or if a block of rounds is running: what its
    earlier rounds delivered is known when it is committed, and the request ends there."""

    finished: FinishedRequest | None
    replan: bool


class LossOutcome(NamedTuple):
    """What a failed step brought to an end (the victim, if there is one, and who was leaving in it), and which steps are lost."""

    finished: tuple[FinishedRequest, ...]
    step_ids: tuple[int, ...]


class CommitOutcome(NamedTuple):
    """What a committed step brought to an end, which requests got their first token since they entered, and, on a prefill worker,
    which prompts are computed and wait for their transfer. `kept`: tokens delivered by each round of each row of its decode part."""

    finished: tuple[FinishedRequest, ...]
    first_tokens: tuple[str, ...]
    computed: tuple[str, ...] = ()
    kept: np.ndarray | None = None  # int64 [rounds, bs], 0 for rows that had left; None without a decode part


@dataclass(slots=True)
class Launched:
    """A step that is planned and not committed yet."""

    step: Step
    chunks: list[Chunk]
    rounds: LaunchedRounds | None
    departures: int  # DecodeRounds.departures when it was planned


@dataclass(frozen=True, slots=True)
class Leaving:
    """A request whose end came in the last round of a running block: the rounds before it still count, as single ones would."""

    record: RequestRecord
    reason: FinishReason
    message: str = ""


_ENDINGS = {
    FinishReason.STOP: RequestEvent.FINISH,
    FinishReason.LENGTH: RequestEvent.FINISH,
    FinishReason.ABORT: RequestEvent.ABORT,
    FinishReason.ERROR: RequestEvent.FAIL,
    FinishReason.TRANSFERRED: RequestEvent.TRANSFER,
}


class Engine(Transferring):
    """One replica's scheduler. See the module's description, and `driver.py` for the loop around it."""

    def __init__(
        self,
        config: EngineConfig,
        algorithm: SpecAlgorithm = NO_SPECULATION,
        controller: AdaptiveController | None = None,
        *,
        events: EventSink | None = None,
        text_decoder: TextDecoder | None = None,
    ) -> None:
        """Raises ConfigError with every contradiction. Without a controller nothing is drafted."""
        self.config = config
        self.algorithm = algorithm
        self.controller = controller if controller is not None else fixed_controller(0)
        self.sizes = EngineSizes.resolve(config, algorithm, self.controller)
        cache = None
        if config.prefix_cache:
            cache = RadixCache(config.page_size, algorithm.prefix_key_kind(), config.eviction_policy)
        self.store = KVStore(config.max_running, self.sizes.row_width, config.num_pages, config.page_size, cache)
        self.admission = Admission(config, self.sizes, self.store)
        self.rounds = DecodeRounds(config, self.sizes, self.controller, self.store)
        self.output = OutputLog(config, self.sizes, text_decoder)
        self.pipeline_depth = 2 if config.overlap else 1
        self.last_step_id = 0
        self._last_committed = 0
        self._num_arrived = 0
        self._live: dict[str, RequestRecord] = {}
        self._by_row: dict[int, RequestRecord] = {}
        self._transferring: dict[int, RequestRecord] = {}  # by row: KV is on its way to or from another worker
        self._arrived: list[tuple[RequestRecord, Arrival]] = []  # have joined, and the executor is yet to hear of it
        self._take_role(config.role)
        self._launched: deque[Launched] = deque()
        self._holding = False  # since a retraction; until a decode round of a live row is committed
        self._retracted: list[str] = []
        self._asked_back: list[str] = []  # requests that somebody outside wants retracted
        self._recovery = Recovery(config.chunk_size, config.max_running)
        self._awaits_quiet = False  # steps are lost, and the device may still be at them
        self.restarts = 0  # how often the worker was started anew
        self._leaving: dict[int, Leaving] = {}  # by row: who left in the last round of the block that is being run
        self._block_slack = self._slots_of_a_plan()
        self._events = events
        if events is not None:
            events(EngineStarted({"algorithm": algorithm.name, **config.to_json()}))

    # -- what a driver may ask ------------------------------------------------------------------------------------

    @property
    def num_uncommitted(self) -> int:
        return len(self._launched)

    @property
    def num_waiting(self) -> int:
        return len(self.admission.queue)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._by_row) + len(self._leaving)

    @property
    def num_transferring(self) -> int:
        """Requests whose KV is on its way between workers; they hold a row, but do not run."""
        return len(self._transferring)

    @property
    def is_idle(self) -> bool:
        return not self._live and not self._launched and not self._awaits_quiet and not self.store.num_held_rows

    @property
    def running_ids(self) -> list[str]:
        """Requests that hold a row and go on, in the order in which they took it."""
        return [record.request.request_id for record in self._by_row.values()]

    def state_of(self, request_id: str) -> RequestState | None:
        """The state of a live request; None if there is none of that id."""
        record = self._live.get(request_id)
        return None if record is None else record.state

    @property
    def is_degraded(self) -> bool:
        """Whether steps are kept small because one has failed lately."""
        return not self._recovery.is_normal

    def describe_in_flight(self) -> str:
        """The uncommitted steps in words, for whoever reports that one does not come back."""
        described = []
        for launched in self._launched:
            step = launched.step
            parts = []
            if step.prefill is not None:
                parts.append(f"{int(step.prefill.lens.sum())} prefill tokens")
            if step.decode is not None:
                d = step.decode
                parts.append(f"{len(d.rows)} rows × {d.num_draft_tokens} tokens × {d.max_rounds} rounds")
            requests = [record.request.request_id for record in self._records_of(launched)]
            shown = ", ".join(requests[:4]) + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")
            described.append(f"step {step.step_id} ({', '.join(parts)}; requests {shown or 'gone'})")
        return "; ".join(described) or "nothing"

    # -- submit, abort --------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int) -> SubmitOutcome:
        """Queue a request, or refuse it with the reason. Nothing else changes before the next plan."""
        refusal = self._refusal(request)
        replan = False
        if not refusal:
            record = RequestRecord(request, self._num_arrived, self._max_tokens(request))
            record.advance(RequestEvent.QUEUE)
            self._num_arrived += 1
            self._live[request.request_id] = record
            self.admission.queue.push(record)
            replan = self._could_enter(record)
        if self._events is not None:
            self._events(Submitted(now_ns, request, refusal))
        return SubmitOutcome(refusal, replan)

    def abort(self, request_id: str, now_ns: int) -> AbortOutcome:
        """Give a request up, in whatever state it is. Idempotent; nothing of it is delivered afterwards."""
        record = self._live.get(request_id)
        if self._events is not None:
            self._events(Aborted(now_ns, request_id))
        if record is None or record.row in self._leaving:
            return AbortOutcome(None, False)
        if self._in_running_block(record):
            self._leave_block(record, FinishReason.ABORT)
            return AbortOutcome(None, True)
        if record.state is RequestState.WAITING:
            replan = self.admission.queue.head is record
            self.admission.queue.remove(record)
        else:
            replan = True
        return AbortOutcome(self._end(record, FinishReason.ABORT), replan)

    def _refusal(self, request: Request) -> str:
        """Why a request can never run here, or not now; empty if it may wait."""
        if request.request_id in self._live:
            return "duplicate id: a live request has it"
        if self.role is EngineRole.DECODE:
            return "this engine only decodes: requests come to it by handoff"
        if self._max_tokens(request) < 1:
            limit = request.prompt.length + self._max_tokens(request)
            return f"too long: a prompt of {request.prompt.length} tokens and 1 of output, at most {limit} fit"
        if self.config.max_queue is not None and len(self.admission.queue) >= self.config.max_queue:
            return f"queue full: {self.config.max_queue} requests wait"
        if request.stop_strings and not self.output.decodes_text:
            return "stop strings need a tokenizer, this engine has none"
        return ""

    def _max_tokens(self, request: Request) -> int:
        return self.sizes.max_tokens(self.config, request.prompt.length, request.max_tokens, self.role)

    def _could_enter(self, record: RequestRecord) -> bool:
        """Whether a plan could let this newcomer in before any commit; in doubt yes. Memory is not asked: a block distorts it."""
        if self.admission.queue.head is not record:
            return False
        return bool(self.store.table.num_free_rows) or self.store.has_fenced or self.config.preempt

    # -- plan -----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> Step | None:
        """The next step, or None: enough steps are uncommitted, there is nothing to do, or slots or a quiet device are awaited."""
        if self._awaits_quiet or len(self._launched) >= self.pipeline_depth:
            return None
        self.store.num_denied = 0
        while True:
            before = self.store.num_denied
            chunks, joins, rounds = self._decide()
            if chunks or rounds is not None or self._launched or self.store.num_denied == before:
                break
            # Denied, and nothing in flight would make the driver ask again. Every attempt uses a denial up, so this ends.
        if rounds is None and not chunks:
            if self._retracted or self.store.num_denied:
                self._emit_planned(now_ns, None)
            return None
        return self._launch(chunks, joins, rounds, now_ns)

    def _decide(self) -> tuple[list[Chunk], list[Join], LaunchedRounds | None]:
        """What the next step computes: prefill chunks, the requests that enter with them, decode rounds."""
        if self._asked_back:
            self._retract_asked()
        if self.config.preempt and len(self.admission.queue) and self._recovery.is_normal:
            self._preempt()  # before anything is reserved for a row that gives way
        chunks: list[Chunk] = []
        joins: list[Join] = []
        rounds: LaunchedRounds | None = None
        if not self.config.mixed:
            chunks, joins = self._plan_prefill(0)
        if not chunks:
            rounds = self._plan_rounds()
            if self.config.mixed and not self._awaits_slots(rounds):
                chunks, joins = self._plan_prefill(self._verify_tokens(rounds))
        return chunks, joins, rounds

    def _launch(self, chunks: list[Chunk], joins: list[Join], rounds: LaunchedRounds | None, now_ns: int) -> Step:
        for join in joins:
            record = self._live[join.request.request_id]
            self._by_row[record.row] = record
            self.output.open(record)  # makes the context, of which the chunks are cut
        received = None
        if self._arrived:
            arriving, arrivals = self._take_arrived()
            received = arrivals_of(arriving, arrivals)
            joins = arriving + joins
        self.last_step_id += 1
        step = Step(
            self.last_step_id,
            tuple(joins),
            self.store.take_released(),
            self.store.take_writes(),
            prefill_step(chunks, self.config.track_tokens) if chunks else None,
            rounds.step if rounds is not None else None,
            received,
        )
        self._launched.append(Launched(step, chunks, rounds, self.rounds.departures))
        for chunk in chunks:
            if chunk.is_last and self.role is not EngineRole.PREFILL:
                self._begin_decoding(chunk.record)
        self._emit_planned(now_ns, step)
        return step

    def _begin_decoding(self, record: RequestRecord) -> None:
        """The last chunk is launched: from the next step on the row takes part in decode rounds."""
        record.advance(RequestEvent.PREFILLED)
        end_len = record.prompt_len + record.max_tokens - 1
        self.rounds.join(record.row, record.prefill_len, end_len, bool(record.request.stop_strings))

    def _plan_prefill(self, verify_tokens: int) -> tuple[list[Chunk], list[Join]]:
        if self.admission.in_progress is None and not len(self.admission.queue):
            return [], []
        budget = self._recovery.prefill_budget
        if self.config.max_step_tokens is not None:
            budget = min(budget, self.config.max_step_tokens - verify_tokens)
        if self._holding and not self._hold_matters():
            self._holding = False
        return self.admission.next_chunks(budget, len(self.rounds.rows), not self._holding)

    def _plan_rounds(self) -> LaunchedRounds | None:
        """Reserve the next decode round or block; retract the least entitled request while not even one round fits."""
        while len(self.rounds.rows):
            unseen = 0
            for launched in self._launched:
                if launched.rounds is not None:
                    unseen += launched.rounds.step.max_rounds
            slack = self._block_slack if self.config.overlap else 0
            rounds = self.rounds.reserve(unseen, self._max_rounds(), slack)
            if rounds is not None:
                return rounds
            if self.store.has_fenced or self._leaving:
                return None
            running = self._by_row.values()
            if len(running) == 1 and self.store.num_held_rows:
                return None  # what is missing is reserved for arrivals: they join and may be retracted then, or it comes back
            # A request alone fits the pool, but an attempt that was denied does not ask what fits.
            alone = len(running) == 1 and self.store.num_denied > 0
            self._retract(next(iter(running)) if alone else least_entitled(running))
        return None

    def _awaits_slots(self, rounds: LaunchedRounds | None) -> bool:
        return rounds is None and bool(len(self.rounds.rows))

    @staticmethod
    def _verify_tokens(rounds: LaunchedRounds | None) -> int:
        return 0 if rounds is None else len(rounds.step.rows) * rounds.step.num_draft_tokens

    def _max_rounds(self) -> int:
        """How many rounds need no decision: the certificate, but for slots and for the controller's next choice."""
        if self.config.block_rounds == 1 or self.rounds.single_round_rows or self._holding:
            return 1
        if self._asked_back or not self._recovery.is_normal:
            return 1
        if self.admission.in_progress is not None:
            return 1
        for launched in self._launched:
            if launched.step.max_rounds > 1:
                return 1
        if len(self.admission.queue):
            if self.config.preempt and self._lower_than_head():
                return 1
            # Whoever waits must be known not to fit, and nothing in flight may change that when it is committed.
            pending = self.store.has_fenced or any(launched.chunks for launched in self._launched)
            if pending or not self.admission.head_is_blocked:
                return 1
        return self.config.block_rounds

    def _slots_of_a_plan(self) -> int:
        """What the plan after a block could admit or reserve at most: a block leaves that much free in overlap mode."""
        config, sizes = self.config, self.sizes
        newcomers = min(config.max_running, config.chunk_size)
        reserve = sizes.reserve + config.page_size
        return (
            config.chunk_size
            + sizes.row_width
            + (newcomers + 2 * config.max_running) * reserve
            + int(config.watermark * self.store.allocator.num_total_slots)
        )

    def _tell(self, event: Event) -> None:
        if self._events is not None:
            self._events(event)

    def _emit_planned(self, now_ns: int, step: Step | None) -> None:
        if self._events is not None:
            held = self.store.allocator.num_held_slots
            self._events(Planned(now_ns, step, tuple(self._retracted), len(self.admission.queue), held))
        self._retracted.clear()

    # -- retraction -----------------------------------------------------------------------------------------------

    def _retract(self, record: RequestRecord) -> None:
        """Take everything from a request and queue it again; nobody enters until a decode round of a live row is committed."""
        self._leave_row(record, self.output.context_of(record, self.rounds.kv_len))
        record.advance(RequestEvent.RETRACT)
        record.retractions += 1
        record.row = record.epoch = 0
        self.admission.queue.push(record)
        self._holding = True
        self._retracted.append(record.request.request_id)

    def request_retraction(self, request_id: str, now_ns: int) -> bool:
        """Have a running request give its memory back and begin again from what it has delivered; the next plan that can does it.

        Returns whether that plan should come soon (stop the running block). Nothing happens to a request that has no row.
        """
        if self._events is not None:
            self._events(RetractionAsked(now_ns, request_id))
        record = self._live.get(request_id)
        if record is None or self._by_row.get(record.row) is not record:
            return False
        self._asked_back.append(request_id)
        return True

    def _retract_asked(self) -> None:
        asked, self._asked_back = self._asked_back, []
        for request_id in asked:
            record = self._live.get(request_id)
            if record is None or self._by_row.get(record.row) is not record:
                continue
            if self._in_running_block(record):
                self._asked_back.append(request_id)  # what its rounds deliver is known when the block is committed
            else:
                self._retract(record)

    def deny_allocations(self, count: int, now_ns: int) -> None:
        """The next `count` attempts to allocate find nothing, as if somebody else had taken the memory for a moment."""
        self.store.deny(count)
        if self._events is not None:
            self._events(AllocationsDenied(now_ns, count))

    def _preempt(self) -> None:
        """Retract strictly lower priorities, the least entitled first, if that lets the head of the queue in."""
        if self.admission.in_progress is not None or (self._holding and self._hold_matters()):
            return
        if self.store.has_fenced or self._leaving:
            return  # what an earlier victim held is on its way back
        head = self.admission.queue.head
        missing = self.admission.needs(head, 0) - self.store.available_slots
        if missing <= 0 and self.store.table.num_free_rows:
            return
        gained = 0
        victims = []
        for record in self._lower_than_head():
            victims.append(record)
            gained += len(self.store.own_slots(record.row))
            if gained >= missing:
                for victim in victims:
                    self._retract(victim)
                return

    def _lower_than_head(self) -> list[RequestRecord]:
        # What a transfer holds would not come back.
        running = [record for record in self._by_row.values() if not self.store.is_held_row(record.row)]
        return giving_way(self.admission.queue.head, running, self.config.ageing_bound)

    def _hold_matters(self) -> bool:
        """The hold ends by itself when no decode round can come: then nothing else would ever end it."""
        decoding = len(self.rounds.rows) or any(launched.rounds is not None for launched in self._launched)
        return bool(decoding)

    # -- commit ---------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now_ns: int) -> CommitOutcome:
        """Accept the result of the oldest uncommitted step. Raises InvariantViolation RELAY-07 for any other."""
        if not self._launched or self._launched[0].step.step_id != result.step_id:
            oldest = self._launched[0].step.step_id if self._launched else None
            raise InvariantViolation("RELAY-07", f"result of step {result.step_id}, the oldest uncommitted is {oldest}")
        launched = self._launched.popleft()
        self._last_committed = result.step_id
        finished: list[FinishedRequest] = []
        first_tokens: list[str] = []
        computed: list[str] = []
        kept = None
        for row, message in result.failures:
            record = self._by_row.get(row)
            if record is None:
                continue
            if launched.step.max_rounds > 1:
                self._leave_block(record, FinishReason.ERROR, message)
            else:
                finished.append(self._end(record, FinishReason.ERROR, message))
        if launched.chunks:
            self._commit_prefill(launched, result, finished, first_tokens, computed)
        if launched.rounds is not None:
            kept = self._commit_rounds(launched, result, finished)
        self.store.pass_fence(result.step_id)
        if not self._recovery.is_normal and self._recovery.succeeded():
            self._apply_limits()
        if self._events is not None:
            # An abort has an event of its own, at its own time.
            ended = tuple(end for end in finished if end.reason is not FinishReason.ABORT)
            self._events(Committed(now_ns, launched.step, result, tuple(first_tokens), kept, ended))
        return CommitOutcome(tuple(finished), tuple(first_tokens), tuple(computed), kept)

    def _commit_prefill(
        self,
        launched: Launched,
        result: StepResult,
        finished: list[FinishedRequest],
        first_tokens: list[str],
        computed: list[str],
    ) -> None:
        prefill = launched.step.prefill
        places = zip(prefill.rows.tolist(), prefill.epochs.tolist(), strict=True)
        for i, (chunk, place) in enumerate(zip(launched.chunks, places, strict=True)):
            record = chunk.record
            if (record.row, record.epoch) != place or record.is_terminal:
                continue  # retracted or gone since: its slots are behind a fence, its result is dropped
            record.prefill_committed = chunk.start + chunk.length
            if self.store.cache is not None and record.context is not None:
                fence = self.last_step_id
                self.store.share_prefix(
                    record.row, record.context, record.prefill_committed, record.request.namespace, fence
                )
            if not chunk.is_last:
                continue
            first_tokens.append(record.request.request_id)
            stopped = result.prefill.stopped is not None and bool(result.prefill.stopped[i])
            stopped = self.output.first_token(record, result.prefill, i) or stopped
            if self.role is EngineRole.PREFILL:
                self._hand_over(record)
            if stopped or record.emitted_before + 1 == record.max_tokens:
                finished.append(self._end(record, finish_reason(stopped)))
            elif self.role is EngineRole.PREFILL:
                computed.append(record.request.request_id)

    def _commit_rounds(self, launched: Launched, result: StepResult, finished: list[FinishedRequest]) -> np.ndarray:
        rounds, decode = launched.rounds, result.decode
        step = rounds.step
        if not 1 <= decode.rounds <= step.max_rounds or decode.accept_lens.shape != (decode.rounds, len(step.rows)):
            raise InvariantViolation(
                "SIM-12",
                f"{decode.rounds} rounds of shape {decode.accept_lens.shape}, at most {step.max_rounds} planned",
            )
        settled = self.rounds.settle(rounds, decode, launched.departures)
        counted = self._settle_leaving(step, decode, settled) if self._leaving else settled.live
        self.rounds.feed_back(step, decode, settled.live, counted)
        if step.max_rounds > 1:
            self.rounds.give_back(rounds, decode, settled.kv_before_last, self._in_later_step(step.rows))
        if self._holding and (settled.live is None or settled.live.any()):
            self._holding = False
        ended = settled.ended
        if self.output.tracks_tokens or decode.outputs is not None:
            ended = self._log_output(rounds, settled, decode, ended, counted)
        for i in ended.tolist():
            record = self._by_row[int(step.rows[i])]
            finished.append(self._end(record, finish_reason(bool(settled.stopped[i]))))
        while self._leaving:
            leaving = self._leaving.pop(next(iter(self._leaving)))
            finished.append(self._end(leaving.record, leaving.reason, leaving.message))
        return settled.kept

    def _settle_leaving(self, step: DecodeStep, decode: DecodeResult, settled: SettledRounds) -> np.ndarray:
        """Count what leaving requests got before the last round. Returns bool [bs]: whose rounds but the last count."""
        counted = settled.live.copy()
        for i in np.flatnonzero(np.isin(step.rows, list(self._leaving))).tolist():
            counted[i] = True
            settled.kept[:-1, i] = decode.accept_lens[:-1, i]
            self.rounds.kv_len[step.rows[i]] = settled.kv_before[i] + int(settled.kept[:, i].sum())
        return counted

    def _log_output(
        self,
        rounds: LaunchedRounds,
        settled: SettledRounds,
        decode: DecodeResult,
        ended: np.ndarray,
        counted: np.ndarray | None,
    ) -> np.ndarray:
        """Keep the delivered tokens; rows whose text completes a stop string end there. Returns all ended columns."""
        rows = rounds.step.rows
        columns = np.arange(len(rows)) if counted is None else np.flatnonzero(counted)
        by_row = self._by_row
        if self._leaving:
            by_row = by_row | {row: leaving.record for row, leaving in self._leaving.items()}
        if self.rounds.single_round_rows:
            for i in columns.tolist():
                record = by_row[int(rows[i])]
                cut = self.output.stop_string_cut(record, decode, i, int(settled.kept[0, i]), int(settled.kv_before[i]))
                if cut is not None:
                    settled.kept[0, i] = cut
                    settled.stopped[i] = True
                    self.rounds.kv_len[rows[i]] = settled.kv_before[i] + cut
                    ended = np.union1d(ended, [i])
        self.output.log(rows, columns, settled, decode, by_row)
        return ended

    def _in_later_step(self, rows: np.ndarray) -> np.ndarray | bool:
        """Which of `rows` a launched decode step covers as well; one bool if the answer is the same for all."""
        for launched in self._launched:
            if launched.rounds is not None:
                later = launched.rounds.step.rows
                return True if later is rows else np.isin(rows, later)
        return False

    def _in_running_block(self, record: RequestRecord) -> bool:
        """Whether the device now runs rounds of this request of which the engine has seen none."""
        if not self._launched or self._launched[0].step.max_rounds == 1:
            return False
        return record.row in self._launched[0].step.decode.rows

    def _leave_block(self, record: RequestRecord, reason: FinishReason, message: str = "") -> None:
        """The request takes part in no later plan; it ends when the block is committed."""
        self.rounds.leave(record.row, bool(record.request.stop_strings))
        del self._by_row[record.row]
        self._leaving[record.row] = Leaving(record, reason, message)

    # -- lost steps ---------------------------------------------------------------------------------------------------

    def lose_steps(self, failure: StepFailure, now_ns: int) -> LossOutcome:
        """The oldest uncommitted step has failed: it and those launched behind it deliver nothing. Raises InvariantViolation RELAY-07
        for any other step.

        Their requests wait again, with what was delivered before; their slots stay behind a fence, and nothing is planned, until
        `resume`. See `recovery.py` for what is tried next and for the one request that may fail.
        """
        if not self._launched or self._launched[0].step.step_id != failure.step_id:
            oldest = self._launched[0].step.step_id if self._launched else None
            raise InvariantViolation("RELAY-07", f"{failure}, but the oldest uncommitted step is {oldest}")
        failed = self._launched[0]
        in_failed = self._records_of(failed)
        suspects = [record for record in in_failed if record.prefill_committed == record.num_cached] or in_failed
        victim = in_failed[0] if in_failed and self._blames(failed, len(in_failed), len(suspects)) else None
        finished = [self._end(left.record, left.reason, left.message) for left in self._leaving.values()]
        self._leaving.clear()
        for launched in self._launched:
            for record in self._records_of(launched):
                if record is victim:
                    finished.append(self._end(record, FinishReason.ERROR, f"{failure}; it ran alone"))
                else:
                    self._retract(record)
        step_ids = tuple(launched.step.step_id for launched in self._launched)
        self._launched.clear()
        self._awaits_quiet = True
        self._apply_limits()
        if self.admission.row_limit is not None:
            while len(self._by_row) > self.admission.row_limit:
                self._retract(least_entitled(self._by_row.values()))
            again = [record for record in suspects if record is not victim]
            self.admission.queue.try_first(sorted(again, key=entitlement, reverse=True))
        if self._events is not None:
            ended = tuple(end for end in finished if end.reason is not FinishReason.ABORT)
            self._events(StepsLost(now_ns, failure, step_ids, tuple(self._retracted), ended))
        self._retracted.clear()
        return LossOutcome(tuple(finished), step_ids)

    def resume(self, now_ns: int, *, restarted: bool = False) -> None:
        """No lost step can touch anything any more: what is behind the fence comes back, and plans are made again.

        `restarted`: the worker is a new one. All KV is gone, the prefix cache is empty, whoever runs begins again from what was delivered.
        Rows that are held for a transfer have to be given back before. It may also happen between steps; with steps in flight they
        have to be lost first (InvariantViolation RELAY-01).
        """
        if self._launched:
            raise InvariantViolation("RELAY-01", f"resumed with {self.describe_in_flight()} in flight")
        self._awaits_quiet = False
        self._last_committed = self.last_step_id
        self.store.pass_fence(self.last_step_id)
        if restarted:
            for record in list(self._by_row.values()):
                self._retract(record)
            self.store.forget()
            self.restarts += 1
        if self._events is not None:
            self._events(Resumed(now_ns, restarted, tuple(self._retracted)))
        self._retracted.clear()

    def _records_of(self, launched: Launched) -> list[RequestRecord]:
        """The requests that still have the rows with which `launched` was planned, in the order of its rows."""
        step = launched.step
        parts = [part for part in (step.prefill, step.decode) if part is not None]
        rows = [pair for part in parts for pair in zip(part.rows.tolist(), part.epochs.tolist(), strict=True)]
        records = (self._by_row.get(row) for row, epoch in dict.fromkeys(rows) if self.store.table.epochs[row] == epoch)
        return [record for record in records if record is not None]

    def _blames(self, failed: Launched, num_rows: int, num_suspects: int) -> bool:
        """Note the failure; whether the only request of the step is to blame."""
        step = failed.step
        can_draft_less = step.decode is not None and step.decode.steps > self.controller.fewest_steps(
            len(step.decode.rows)
        )
        return self._recovery.failed(num_rows, num_suspects, step.prefill is not None, can_draft_less)

    def _apply_limits(self) -> None:
        self.controller.draft_fewest(self._recovery.fewer_steps)
        self.admission.row_limit = self._recovery.row_limit
        self.store.revision += 1

    # -- endings --------------------------------------------------------------------------------------------------

    def _end(self, record: RequestRecord, reason: FinishReason, message: str = "") -> FinishedRequest:
        """A request is over: what it holds is released as soon as no uncommitted step can touch it."""
        num_output, tokens = self.output.delivered(record, self.rounds.kv_len)
        if record.row:
            known = reason is not FinishReason.ERROR
            self._leave_row(record, self.output.context_of(record, self.rounds.kv_len) if known else None)
        record.advance(_ENDINGS[reason])
        del self._live[record.request.request_id]
        return FinishedRequest(record.request.request_id, reason, num_output, tokens, record.outputs or None, message)

    def _leave_row(self, record: RequestRecord, context: np.ndarray | None) -> None:
        """Close the row behind the newest launched step that touches it. `context` are the tokens whose KV may be cached."""
        row = record.row
        num_valid = record.prefill_committed
        if record.state is RequestState.DECODE:
            if record.prefill_committed == record.prefill_len:
                num_valid = int(self.rounds.kv_len[row])
            if self.rounds.live[row]:
                self.rounds.leave(row, bool(record.request.stop_strings))
        self.admission.forget(record)
        self.output.close(record, self.rounds.kv_len)
        self._by_row.pop(row, None)
        self._forget_transfer(record)
        departure = Departure(self._fence_of(row), row, context, num_valid, record.request.namespace)
        self.store.close_row(departure, self._last_committed)

    def _fence_of(self, row: int) -> int:
        """The newest uncommitted step that touches `row`; 0 if none does."""
        for launched in reversed(self._launched):
            step = launched.step
            if step.prefill is not None and row in step.prefill.rows:
                return step.step_id
            if step.decode is not None and row in step.decode.rows:
                return step.step_id
        return 0

    # -- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recount everything from scratch; raises InvariantViolation with the id of what is broken."""
        self.store.check()
        states = [record.state for record in self._live.values()]
        waiting = sum(state is RequestState.WAITING for state in states)
        transferring = sum(state is RequestState.TRANSFERRING for state in states)
        if waiting != len(self.admission.queue) or transferring != len(self._transferring):
            raise InvariantViolation(
                "ENGINE-01", f"{waiting} waiting and {transferring} transferring are not counted so"
            )
        if waiting + self.num_running + transferring != len(states):
            running = f"{self.num_running} running + {transferring} transferring"
            raise InvariantViolation("ENGINE-01", f"{waiting} waiting + {running} != {len(states)}")
        for row, record in [*self._by_row.items(), *self._transferring.items()]:
            if record.row != row or self.store.table.epochs[row] != record.epoch:
                raise InvariantViolation("RELAY-03", f"row {row} belongs to {record.request.request_id!r} no longer")
        launched_rows = [launched.rounds.step for launched in self._launched if launched.rounds is not None]
        unseen = sum(step.max_rounds for step in launched_rows)
        rows = self.rounds.rows
        covered = np.isin(rows, np.concatenate([step.rows for step in launched_rows])) if launched_rows else False
        needed = self.rounds.kv_len[rows] + np.where(covered, unseen * self.sizes.alloc_len, 0)
        short = self.store.allocated[rows] < np.minimum(needed, self.sizes.row_width)
        if short.any():
            raise InvariantViolation(
                "RELAY-06", f"row {rows[short.argmax()]} has fewer slots than launched rounds may write"
            )
        if self.is_idle and self.store.num_request_slots:
            raise InvariantViolation("ALLOC-15", f"idle, but {self.store.num_request_slots} slots are held by requests")
