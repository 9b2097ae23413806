"""The reference executor: the oracle of what a device must do with a step, in NumPy, with every read and write checked.
This file has the order of steps and rounds, the rows, and the ends of requests; `passes.py` computes.

Launching records a step, collecting runs it: results come in order, and a stop that arrives in between counts.

```
launch(k)  launch(k+1)   …   advance / collect(k): released → joins → table writes → prefill → rounds     (stream order)
   └── checked at once: nothing that an uncollected step writes is handed out
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ....core.acceptance.process import AcceptanceProcess
from ....core.algorithm.algorithm import AlgorithmShape
from ....core.algorithm.arrival import fill_cells
from ....core.contract.future_map import FutureMap
from ....core.contract.request import first_stop_token
from ....core.contract.step import (
    Arrivals,
    ChosenNodes,
    Join,
    PrefillResult,
    PrefillStep,
    RoundRecord,
    Step,
    StepResult,
)
from ....core.draws import request_key
from ....core.errors import InvariantViolation
from ....core.scheduler.engine import Engine
from ....core.tree.outputs import Finalized
from .drafting import ReferenceDrafter
from .language_model import HIDDEN_SIZE, HashDraft, namespace_salt
from .outputs import as_columns, by_name
from .passes import ReferencePasses, RowState
from .shadow import ShadowKV, ShadowStates, check_launch

ROUND_NS = 1000
"""What a round is said to take: the reference has no clock, but its results are stamped."""


@dataclass(slots=True)
class OldestStep:
    """The oldest launched step while it runs."""

    step: Step
    limit: int  # rounds after which it returns
    prefill: PrefillResult | None = None
    decoded: RoundRecord = field(default_factory=RoundRecord)
    failures: list[tuple[int, str]] = field(default_factory=list)


class ReferenceExecutor:
    """Executes the steps of one engine, whose configuration must track tokens.

    `acceptance` decides how many drafts are right, if not the draft's own agreement; `fail_at` maps request ids to the
    output index whose logits are NaN. `recurrent`: the target has recurrent layers too, whose state is `states`.
    """

    def __init__(
        self,
        engine: Engine,
        draft: HashDraft,
        *,
        acceptance: AcceptanceProcess | None = None,
        fail_at: Mapping[str, int] | None = None,
        recurrent: bool = False,
    ) -> None:
        config, sizes, algorithm = engine.config, engine.sizes, engine.algorithm
        assert config.track_tokens, "the reference executor needs EngineConfig.track_tokens"
        self.algorithm = algorithm
        self.page_size = config.page_size
        self.alloc_len = sizes.alloc_len
        num_rows, num_slots = config.max_running, (config.num_pages + 1) * config.page_size
        self.kv = ShadowKV(num_rows, sizes.row_width, num_slots, algorithm.draft_kv.value)
        shape = AlgorithmShape(
            sizes.max_steps, engine.controller.topk, HIDDEN_SIZE, target_vocab_size=draft.target.vocab_size
        )
        self.future_map = FutureMap(num_rows, algorithm.relay_fields(shape), debug_poison=True)
        drafter = ReferenceDrafter(algorithm, draft, self.kv, config.page_size, shape, config.context_len - 1)
        self.states: ShadowStates | None = ShadowStates(num_rows) if recurrent else None
        self.passes = ReferencePasses(drafter, self.future_map, sizes.alloc_len, acceptance, fail_at or {}, self.states)
        self.num_rounds = 0
        self.num_drafted = 0  # draft nodes verified
        self.num_correct_drafts: int = 0
        self._rows: list[RowState | None] = [None] * (num_rows + 1)
        self._queue: deque[Step] = deque()
        self._running: OldestStep | None = None
        self._last_step_id = 0
        self._stop_through = 0
        self.launched_table = np.zeros((num_rows + 1, sizes.row_width), dtype=np.int32)

    # -- the port -------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Put `step` behind those in flight. Raises InvariantViolation if it disturbs one of them."""
        if step.step_id != self._last_step_id + 1:
            raise InvariantViolation("RELAY-07", f"step {step.step_id} is launched after step {self._last_step_id}")
        self._last_step_id = step.step_id
        earlier = [(other, self._rounds_left(other)) for other in self._queue]
        check_launch(step, earlier, self.kv, self.launched_table, self.alloc_len)
        writes = step.table_writes
        self.launched_table[writes.rows, writes.columns] = writes.slots
        self._queue.append(step)

    def collect(self) -> StepResult:
        """Run the oldest step to its end and answer it."""
        while not self.advance(1):
            pass
        running = self._running
        self._running = None
        self._queue.popleft()
        return self._result(running)

    def advance(self, rounds: int) -> bool:
        """Run up to `rounds` decode rounds of the oldest launched step, at least its start; says whether it is over."""
        if self._running is None:
            self._running = self._start(self._queue[0])
        running = self._running
        for _ in range(rounds):
            if self._is_over(running):
                break
            self._round(running)
        return self._is_over(running)

    def request_stop(self, last_step_id: int) -> None:
        """End steps up to `last_step_id` at their next round boundary; the round that runs now is finished."""
        self._stop_through = max(self._stop_through, last_step_id)
        running = self._running
        if running is not None and running.step.step_id <= last_step_id:
            running.limit = min(running.limit, running.decoded.rounds + 1)

    def restart(self) -> None:
        """Forget all rows, relay cells and steps in flight, since a step has failed: the engine has given up all KV."""
        self._queue.clear()
        self._running = None
        self._rows = [None] * len(self._rows)
        self.future_map.drop(np.arange(1, len(self._rows)))

    def request_in(self, row: int) -> str:
        """Return the id of the request whose state the device has in `row`, empty if it has none."""
        state = self._rows[row]
        return state.request.request_id if state is not None else ""

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    # -- running --------------------------------------------------------------------------------------------------

    def _rounds_left(self, step: Step) -> int:
        """Decode rounds that a launched step may still run."""
        if step.decode is None:
            return 0
        if self._running is not None and self._running.step is step:
            return self._running.limit - self._running.decoded.rounds
        return 1 if step.step_id <= self._stop_through or self._has_ended_row(step) else step.max_rounds

    def _start(self, step: Step) -> OldestStep:
        for row, epoch in step.released:
            self.kv.close_row(row, epoch)
            self.future_map.drop(np.array([row]))
            self._rows[row] = None
        for join in step.joins:
            self._join(join)
        writes = step.table_writes
        self.kv.write_table(writes.rows, writes.columns, writes.slots)
        running = OldestStep(step, step.max_rounds)
        for join in step.joins:
            if join.request.sampling.is_shaped or join.request.holds_ends:
                message = "the reference executor has no biases, penalties, min_p, min_tokens or grammars"
                self._fail(self._rows[join.row], join.row, running, message)
        if step.arrivals is not None:
            self._arrive(step.arrivals, running)
        if step.step_id <= self._stop_through or self._has_ended_row(step):
            running.limit = 1
        if step.prefill is not None:
            running.prefill = self._prefill(step.prefill, running)
        return running

    def _has_ended_row(self, step: Step) -> bool:
        """Return whether a request of the step is known to have ended in an earlier one."""
        if step.decode is None:
            return False
        states = [self._rows[row] for row in step.decode.rows.tolist()]
        epochs = step.decode.epochs.tolist()
        return any(s is not None and s.epoch == e and s.ended for s, e in zip(states, epochs, strict=True))

    def _join(self, join: Join) -> None:
        if self._rows[join.row] is not None:
            raise InvariantViolation("RELAY-03", f"row {join.row} is given away before it was released")
        request = join.request
        key = request.sampling.seed or request_key(request.request_id)
        self._rows[join.row] = RowState(join.epoch, request, key, join.max_tokens - join.num_emitted)
        self.kv.open_row(join.row, join.epoch, namespace_salt(request.namespace), join.num_cached)

    def _arrive(self, arrivals: Arrivals, running: OldestStep) -> None:
        """Take rows whose KV another worker has computed:
        read every cell once, then fill their first relay cells without a pass."""
        batch, last_tokens = arrivals.batch, arrivals.first_tokens
        for row, length, token in zip(batch.rows.tolist(), batch.seq_lens.tolist(), last_tokens.tolist(), strict=True):
            self.kv.kv_lens[row] = length
            prefix = self.kv.read_target(row, length)
            if self.kv.draft is not None:
                self.kv.read_draft(row, prefix, token)
        for row, message in fill_cells(self.algorithm, arrivals, self.future_map):
            self._fail(self._rows[row], row, running, message)

    def _is_over(self, running: OldestStep) -> bool:
        if running.step.decode is None:
            return True
        return running.decoded.is_over(running.limit)

    def _state(self, row: int, epoch: int) -> RowState:
        state = self._rows[row]
        if state is None or state.epoch != epoch:
            raise InvariantViolation("RELAY-03", f"a step runs row {row} of epoch {epoch}, which has another owner")
        return state

    # -- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, part: PrefillStep, running: OldestStep) -> PrefillResult:
        n = len(part.rows)
        tokens = np.full(n, -1, dtype=np.int64)
        stopped = np.zeros(n, dtype=bool)
        outputs: list[dict[str, np.ndarray] | None] = [None] * n
        offset = 0
        for i in range(n):
            row, start, length = int(part.rows[i]), int(part.starts[i]), int(part.lens[i])
            state = self._state(row, int(part.epochs[i]))
            chunk = part.tokens[offset : offset + length]
            offset += length
            prefix = self.passes.prompt(row, start, chunk)
            if not part.is_last[i]:
                self.passes.draft_prompt(row, start, prefix, int(part.tail_tokens[i]), part.is_parked)
                continue
            token, outputs[i] = self.passes.first_token(state, prefix)
            if token < 0:
                self._fail(state, row, running)
                token = 0
            if part.tail_tokens[i] >= 0:
                token = int(part.tail_tokens[i])
            self.passes.draft_prompt(row, start, prefix, token, part.is_parked)
            tokens[i] = token
            stopped[i] = first_stop_token(np.array([token]), state.request.stop_tokens) >= 0
            state.remaining -= 1
            state.ended = state.ended or bool(stopped[i]) or state.remaining == 0
            self.passes.relay_first(state, row, prefix, token, part.is_parked)
        return PrefillResult(tokens, stopped if stopped.any() else None, by_name(outputs))

    @staticmethod
    def _fail(state: RowState, row: int, running: OldestStep, message: str = "the target gave no distribution") -> None:
        if not state.message:
            state.message = message
            running.failures.append((row, state.message))
        state.ended = True

    # -- one decode round -----------------------------------------------------------------------------------------

    def _round(self, running: OldestStep) -> None:
        part = running.step.decode
        states = [self._state(row, epoch) for row, epoch in zip(part.rows.tolist(), part.epochs.tolist(), strict=True)]
        was_over = np.array([state.ended for state in states])
        final, verified, chosen = self.passes.decode_round(part, states, running.decoded.rounds)
        for i in np.flatnonzero(verified.target_failed & ~was_over).tolist():
            self._fail(states[i], int(part.rows[i]), running)
        self._settle(running, states, was_over, final, verified.accept_lens, chosen)
        self.num_rounds += 1
        self.num_drafted += part.num_verify_tokens - len(states)
        self.num_correct_drafts += int(verified.num_correct_drafts.sum())

    def _settle(
        self,
        running: OldestStep,
        states: list[RowState],
        was_over: np.ndarray,
        final: Finalized,
        accept_lens: np.ndarray,
        chosen: ChosenNodes | None,
    ) -> None:
        """Find out who ended in this round, and keep what the result will say of it."""
        emitted = final.emitted_tokens
        stops = np.full(len(states), -1, dtype=np.int32)
        ended = np.zeros(len(states), dtype=bool)
        for i, state in enumerate(states):
            if was_over[i]:
                continue
            run = emitted[i, : accept_lens[i]]
            stops[i] = first_stop_token(run, state.request.stop_tokens)
            cut = stops[i] + 1 if stops[i] >= 0 else len(run)
            kept = min(cut, state.remaining)
            state.remaining -= kept
            ended[i] = state.ended or state.remaining == 0 or (stops[i] >= 0 and kept == cut)
            state.ended = bool(ended[i])
        outputs = as_columns(final.outputs, emitted.shape)
        running.decoded.add(accept_lens.astype(np.int32), stops, emitted.astype(np.int64), outputs, ended, chosen)

    # -- answering ------------------------------------------------------------------------------------------------

    def _result(self, running: OldestStep) -> StepResult:
        step, rounds = running.step, max(running.decoded.rounds, 1)
        decode = None if step.decode is None else running.decoded.result(step.max_rounds)
        ends = (self.num_rounds - rounds + 1 + np.arange(rounds)) * ROUND_NS
        return StepResult(step.step_id, running.prefill, decode, ends.astype(np.int64), tuple(running.failures))
