"""The executor's trial: an engine that the executor serves, a second one that only gets the record, and the model of the rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.request import Request
from ...core.contract.step import Step
from ...core.draws import Purpose, hash64, request_key
from ...core.errors import InvariantViolation
from ...core.prompt import Prompt
from ...core.scheduler.engine import CommitOutcome
from ...properties.harness.contract import REFUSALS
from ...properties.harness.trial import Trial
from ...properties.invariants.registry import Invariant
from . import operations as ops
from .arrays import FoundArray, hidden_arrays
from .contract import HIDDEN_STATES, METHODS, STOP_TOKENS, Executor, ExecutorCapabilities, ExecutorConfig
from .model import DeviceModel, Wrong
from .moment import Moment
from .record import RecordedCore

MAX_STEPS_TO_DRAIN = 2000
LAST = "last"
"""The request that is served when all others are gone."""


class ExecutorTrial(Trial):
    """`subject` serves an engine of `config`. Its results are checked against the model before they are committed."""

    methods = METHODS

    def __init__(
        self,
        subject: Executor,
        config: ExecutorConfig,
        capabilities: ExecutorCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.core = RecordedCore(config.make_engine)
        self.engine = self.core.live
        self.model = DeviceModel(config, self.engine.algorithm)
        self._steps: list[Step] = []
        self._delivered: tuple[int, Any, list] | None = (
            None  # of the last result: step, accept lengths, and their values
        )
        self._said = ""
        self._stem = _tokens("stem", 16, config.vocab_size)
        self.moment = Moment(config, capabilities, self.engine.algorithm.needs_hidden_states)
        if capabilities.inspection:
            self.moment.hidden_sizes = self.integers(self.must(subject.hidden_sizes), "hidden_sizes()")
        if capabilities.accounting:
            self.moment.hidden_bytes = self.integer(self.must(subject.hidden_bytes), "hidden_bytes()")
        self._look()
        self.check()

    # -- around every operation ---------------------------------------------------------------------------------------

    def _begin(self) -> Moment:
        self.moment.forget()
        self._said = "done"
        return self.moment

    def _end(self) -> bool:
        m = self.moment
        self.core.look_at_steps()
        m.difference, m.num_events = self.core.difference, self.core.num_events
        self.transcript.append(self._said)
        return True

    def _look(self) -> None:
        """Ask for what it relays, and search what it keeps."""
        m, subject = self.moment, self.subject
        if self.capabilities.relay:
            m.relay = tuple([self._field(f) for f in self.must(subject.relay_fields)])
        if self.capabilities.inspection:
            found = enumerate(self.must(subject.roots))
            roots = {f"{type(root).__name__}{f' {number}' if number else ''}": root for number, root in found}
            found = hidden_arrays(roots, m.hidden_sizes, (*self.must(subject.weights), subject))
            if found:
                found = self._unasked(found, any(self.model.shown(flight) for flight in self.model.in_flight))
            m.kept = found

    @staticmethod
    def _unasked(found: list[FoundArray], shown: bool) -> list[FoundArray]:
        """Without the target's hidden states on their way to a user who asked to see them: under that name, among outputs."""
        end = f"[{HIDDEN_STATES!r}]"
        return [array for array in found if not (shown and array.path.endswith(end) and "outputs" in array.path)]

    def _field(self, item: Any) -> tuple[str, tuple[int, ...]]:
        try:
            name, shape = item
        except (TypeError, ValueError):
            raise self.misbehaviour("TYPE", f"relay_fields() has {item!r}", "(name, shape of one row)") from None
        if not isinstance(name, str):
            raise self.misbehaviour("TYPE", f"relay_fields() has the name {name!r}", "a text")
        return name, self.integers(shape, f"the shape of {name!r}")

    # -- operations ---------------------------------------------------------------------------------------------------

    def _submit(self, op: ops.Submit) -> bool:
        if op.prompt_len < 1 or op.max_tokens < 1:
            return False
        self._begin()
        own = _tokens(op.request, op.prompt_len, self.config.vocab_size)
        shared = min(max(op.shared, 0), op.prompt_len, len(self._stem))
        request = Request(
            op.request,
            Prompt.of_tokens(np.concatenate([self._stem[:shared], own[shared:]])),
            op.max_tokens,
            stop_tokens=STOP_TOKENS if op.stops else (),
            outputs=(HIDDEN_STATES,) if op.show else (),
        )
        outcome = self.core.submit(request)
        if outcome.refusal:
            self._said = f"refused ({outcome.refusal})"
        elif outcome.replan:
            self._request_stop()
        return self._end()

    def _abort(self, op: ops.Abort) -> bool:
        self._begin()
        outcome = self.core.abort(op.request)
        if outcome.replan:
            self._request_stop()
        return self._end()

    def _retract(self, op: ops.Retract) -> bool:
        self._begin()
        if self.core.retract(op.request):
            self._request_stop()
        return self._end()

    def _stop(self, op: ops.Stop) -> bool:
        if not self._steps:
            return False
        self._begin()
        self._request_stop()
        return self._end()

    def _request_stop(self) -> None:
        self.must(self.subject.request_stop, self.engine.last_step_id)
        self.model.stop(self.engine.last_step_id)

    def _launch(self, op: ops.Launch) -> bool:
        m = self._begin()
        before = self.core.num_events
        step = self.core.plan()
        if step is None:
            self._said = "nothing to do"
            self._end()
            return self.core.difference is not None or self.core.num_events > before
        if self.core.difference is not None:
            return self._end()
        self.model.launch(step)
        self._steps.append(step)
        if self.capabilities.inspection:
            m.in_step = hidden_arrays({"step": step}, m.hidden_sizes)
        self.must(self.subject.launch, step)
        self._said = f"step {step.step_id}: {_words(step)}"
        self._look()
        return self._end()

    def _advance(self, op: ops.Advance) -> bool:
        if not self._steps or op.rounds < 1:
            return False
        self._begin()
        is_over = self.must(self.subject.advance, op.rounds)
        if not isinstance(is_over, bool | np.bool_):
            raise self.misbehaviour("TYPE", f"advance({op.rounds}) is {is_over!r}", "whether the step is over")
        self.model.advance(op.rounds)
        self._said = "over" if is_over else "not over"
        self._look()
        return self._end()

    def _collect(self, op: ops.Collect) -> bool:
        if not self._steps:
            return False
        m = self._begin()
        flight = self.model.in_flight[0]
        shown = self.model.shown(flight)
        result = self.must(self.subject.collect)
        if self.capabilities.inspection:
            m.in_result = self._unasked(hidden_arrays({"result": result}, m.hidden_sizes), shown)
        try:
            self.model.collect(result)
        except Wrong as wrong:
            raise self.misbehaviour(wrong.id, f"step {flight.step_id}: {wrong.was}", wrong.should) from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            was = f"step {flight.step_id}: a result that cannot be read ({type(error).__name__}: {error})"
            raise self.misbehaviour("TYPE", was, "a core.step.StepResult with its parts") from error
        self._still_as_delivered()
        if result.decode is not None:
            lens = result.decode.accept_lens
            self._delivered = (flight.step_id, lens, lens.tolist())
        outcome = self.core.commit(self._steps.pop(0), result)
        if self.core.refusal:
            was = f"the engine cannot commit the result of step {flight.step_id}: {self.core.refusal}"
            raise self.misbehaviour("ANSWER", was, "a result that follows from the step")
        self._said = self._outcome(flight.step_id, result, outcome)
        self._look()
        return self._end()

    def _still_as_delivered(self) -> None:
        if self._delivered is not None:
            step_id, lens, values = self._delivered
            if lens.tolist() != values:
                was = (
                    f"the accept lengths of step {step_id} were {values} when they were delivered, now {lens.tolist()}"
                )
                raise self.misbehaviour("ANSWER", was, "a result stays what it is")

    @staticmethod
    def _outcome(step_id: int, result: Any, outcome: CommitOutcome | None) -> str:
        lens = "" if result.decode is None else f", accept lengths {result.decode.accept_lens.tolist()}"
        ended = [] if outcome is None else [end.request_id for end in outcome.finished]
        return f"step {step_id}{lens}{', ends ' if ended else ''}{' and '.join(ended)}"

    def _merge(self, op: ops.Merge) -> bool:
        m = self._begin()
        width = m.hidden_sizes[0] if m.hidden_sizes else 8
        batches = [
            None if rows < 0 else [[float(row + 1)] * width] * rows for row, rows in enumerate((op.first, op.second))
        ]
        m.merged = (max(op.first, -1), max(op.second, -1))
        try:
            answer = self.subject.merge(*batches)
        except (*REFUSALS, InvariantViolation) as error:
            m.merge = f"{type(error).__name__}: {error}"
        except Exception as error:
            raise self._accident(self.subject.merge, error) from error
        else:
            m.merge = -1 if answer is None else self._rows_of(answer)
        self._said = f"-> {m.merge if isinstance(m.merge, str) or m.merge >= 0 else None}"
        return self._end()

    def _rows_of(self, answer: Any) -> int:
        try:
            return len(answer)
        except TypeError:
            raise self.misbehaviour("TYPE", f"merge() is {answer!r:.60}", "rows of numbers, or None") from None

    def _arrive(self, op: ops.Arrive) -> bool:
        m = self._begin()
        count, width = len(op.sent), m.hidden_sizes[0] if m.hidden_sizes else 8
        batch = HandoffBatch(
            rows=np.arange(1, count + 1, dtype=np.int32),
            epochs=np.ones(count, np.int64),
            request_ids=tuple(f"arrival {number}" for number in range(count)),
            seq_lens=np.full(count, 3, np.int64),
            probabilities=np.full((count, self.config.topk), 0.5, np.float32),
            token_ids=np.zeros((count, self.config.topk), np.int64),
            hidden_states=tuple(np.ones(width, np.float32) if sent else None for sent in op.sent),
            hidden_size=width,
        )
        answer = self.must(self.subject.draft_input, batch, np.zeros(count, np.int64))
        m.sent, m.served = op.sent, count
        if answer is not None:
            if not isinstance(answer, DraftInput):
                raise self.misbehaviour(
                    "TYPE", f"draft_input() is {answer!r:.60}", "a core.algorithm.DraftInput, or None"
                )
            m.served = len(answer.rows)
            m.received = None if answer.hidden_states is None else tuple(answer.hidden_states.shape)
        self._said = f"-> {m.served} of {count} rows, hidden states {list(m.received) if m.received else m.received}"
        return self._end()

    actions: ClassVar = {
        ops.Submit: _submit,
        ops.Abort: _abort,
        ops.Retract: _retract,
        ops.Stop: _stop,
        ops.Launch: _launch,
        ops.Advance: _advance,
        ops.Collect: _collect,
        ops.Merge: _merge,
        ops.Arrive: _arrive,
    }

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everybody who is there is served to the end, and one more after that."""
        self._serve()
        self.apply(ops.Submit(LAST, 3, 4, 0, False, False))
        self._serve()
        if not self.engine.is_idle:
            raise self.misbehaviour("ANSWER", "requests are left, but nothing is planned", "all are served")

    def _serve(self) -> None:
        for _ in range(MAX_STEPS_TO_DRAIN):
            while self.apply(ops.Launch()):
                pass
            if not self.apply(ops.Collect()):
                return
        raise self.misbehaviour("ANSWER", f"no end after {MAX_STEPS_TO_DRAIN} steps", "all are served")

    def describe(self) -> str:
        return self._said


def _tokens(name: str, count: int, vocab_size: int) -> np.ndarray:
    """int64 [count]: somebody's prompt, a function of the name."""
    bits = hash64(0, Purpose.TOKEN, request_key(name), np.arange(count))
    return (bits % np.uint64(vocab_size)).astype(np.int64)


def _words(step: Step) -> str:
    parts = []
    if step.prefill is not None:
        parts.append(f"{int(step.prefill.lens.sum())} prompt tokens")
    if step.decode is not None:
        d = step.decode
        rounds = f", at most {d.max_rounds} rounds" if d.max_rounds > 1 else ""
        parts.append(f"{len(d.rows)} rows of {d.num_draft_tokens} nodes{rounds}")
    return " and ".join(parts)
