"""The executor's trial: an engine that the executor serves, a second one that gets only the record, and the
model of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...core.algorithm.algorithm import Drafter
from ...core.contract.handoff_batch import DraftInput, HandoffBatch
from ...core.contract.outcomes import CommitOutcome
from ...core.contract.request import Request
from ...core.contract.step import Step
from ...core.errors import InvariantViolation
from ...core.prompt import Prompt
from ..harness.contract import REFUSALS
from ..harness.operation import Handles, Operation, operation
from ..harness.trial import Trial
from . import invariants as invariants  # registers the checkers
from .contract import HIDDEN_STATES, MANY, STOP_TOKENS, ExecutorCapabilities, ExecutorConfig, InspectedExecutor
from .isolation import IsolatedRuns
from .judge import RunJudge, WrongResult
from .model import PARTS, DeviceModel, ExecutorMoment, SeenState, used_parts
from .oracle import RecurrentState
from .planned import budget_of, nodes_in_turn, words_of
from .record import RecordedCore
from .sampling import RULES, sampling_of, tokens_of
from .search import hidden_arrays, unasked

MAX_STEPS_TO_DRAIN = 2000
LAST = "last"
"""The request that is served when all others have ended."""

REQUESTS = Handles("abcd")
NUM_SAMPLED, SAMPLED_LEN = 55, 6
FOLLOWED_LEN, FOLLOWER_LEN = 36, 12

PROMPT_LENS = (1, 2, 3, 7, 8, 9, 16, 17, 25)


def _asks(config: ExecutorConfig, has: ExecutorCapabilities) -> tuple[bool, ...]:
    return (False, False, True) if has.tokens else (False,)


def _may_park(t: ExecutorTrial) -> bool:
    return bool(t.core.parking) and not t.config.is_recurrent  # the model's states are of all passes


def _is_in_flight(t: ExecutorTrial) -> bool:
    return bool(t.steps)


class ExecutorTrial(Trial):
    """`subject` serves an engine of `config`. Its results are checked against the model before they are committed."""

    contract = "executor"
    looks = ("hidden_sizes", "hidden_bytes", "relay_fields", "roots", "weights")
    quick = 6_000
    run_length = 30
    limit_s = 60.0
    parts = PARTS
    values: ClassVar = {
        "request": REQUESTS,
        "prompt_len": PROMPT_LENS,
        "max_tokens": (1, 2, 5, 12, 20),
        "shared": lambda config, has: (0, 9, 9, 16) if config.prefix_cache else (0, 0, 1, 9),
        "stops": _asks,
        "show": _asks,
    }

    subject: InspectedExecutor
    config: ExecutorConfig
    capabilities: ExecutorCapabilities
    moment: ExecutorMoment

    def prepare(self) -> None:
        config, subject = self.config, self.subject
        self.core = RecordedCore(config.make_engine)
        self.engine = self.core.live
        algorithm, self.judge, self._shown = self.engine.algorithm, None, (HIDDEN_STATES,)
        if self.capabilities.plain:
            self.judge = RunJudge(subject, config, self.capabilities)
            self._shown = tuple(self.must(subject.shown))
        self.model = DeviceModel(config, algorithm, self.judge)
        self._has_sampled = False
        self._isolated = IsolatedRuns(config)
        self.steps: list[Step] = []  # in flight
        # The last result: step, accept lengths and their values.
        self._delivered: tuple[int, Any, list[Any]] | None = None
        self._said = ""
        self._stem = tokens_of("stem", 16, config.vocab_size)
        self.moment = ExecutorMoment(config, self.capabilities, algorithm.needs_hidden_states)
        if self.capabilities.inspection:
            self.moment.hidden_sizes = self.integers(self.must(subject.hidden_sizes), "hidden_sizes()")
        if self.capabilities.accounting:
            self.moment.hidden_bytes = self.integer(self.must(subject.hidden_bytes), "hidden_bytes()")
        if self.capabilities.states:
            self.moment.state_room = self.integer(self.must(subject.state_room), "state_room()")
        self._look()

    # -- around every operation ---------------------------------------------------------------------------------------

    def begin(self, operation: Operation | str) -> None:
        self.moment.forget()
        self._said = "done"

    def end(self) -> None:
        m = self.moment
        self.core.look_at_steps()
        m.difference, m.num_events = self.core.difference, self.core.num_events
        self.transcript.append(self._said)

    def _look(self) -> None:
        """Ask for what the subject relays, and search what it keeps."""
        m, subject = self.moment, self.subject
        if self.capabilities.relay:
            m.relay = tuple([self._field(f) for f in self.must(subject.relay_fields)])
        if self.capabilities.inspection:
            found = enumerate(self.must(subject.roots))
            roots = {f"{type(root).__name__}{f' {number}' if number else ''}": root for number, root in found}
            found = hidden_arrays(roots, m.hidden_sizes, (*self.must(subject.weights), subject))
            if found:
                found = unasked(found, any(self.model.shown(flight) for flight in self.model.in_flight))
            m.kept = found

    def _field(self, item: Any) -> tuple[str, tuple[int, ...]]:
        name, shape = self.sequence(item, "a field of relay_fields()", "(name, shape of one row)", 2)
        if not isinstance(name, str):
            raise self.misbehaviour("TYPE", f"relay_fields() has the name {name!r}", "a text")
        return name, self.integers(shape, f"the shape of {name!r}")

    # -- operations ---------------------------------------------------------------------------------------------------

    @operation(weight=6)
    def submit(self, request: str, prompt_len: int, max_tokens: int, shared: int, stops: bool, show: bool) -> None:
        """Submit a request, with the first `shared` tokens of its prompt as in all others.
        `show`: it asks for hidden states."""
        self.only_if(prompt_len > 0 and max_tokens > 0)
        own = tokens_of(request, prompt_len, self.config.vocab_size)
        if request == REQUESTS[-1]:
            own %= 3  # so few tokens that all that is looked up has occurred before, and goes on in several ways
        shared = min(max(shared, 0), prompt_len, len(self._stem))
        wish = Request(
            request,
            Prompt.of_tokens(np.concatenate([self._stem[:shared], own[shared:]])),
            max_tokens,
            stop_tokens=STOP_TOKENS if stops else (),
            outputs=self._shown if show else (),
            sampling=sampling_of(request, max_tokens, self.capabilities),
        )
        outcome = self.core.submit(wish)
        if outcome.refusal:
            self._said = f"refused ({outcome.refusal})"
            return
        self._isolated.submit(wish)
        if outcome.replan:
            self._request_stop()

    @operation(weight=1, hostile=True)
    def abort(self, request: str) -> None:
        """Abort a request."""
        if self.core.abort(request).replan:
            self._request_stop()

    @operation(weight=1, hostile=True)
    def retract(self, request: str) -> None:
        """Retract a running request: it gives its KV back, and begins again from the tokens that were delivered."""
        if self.core.retract(request):
            self._request_stop()

    @operation(weight=12)
    def launch(self) -> None:
        """Plan and launch the next step, if there is one."""
        self.only_if(self._launch(self.core.plan))

    @operation(weight=12, needs="lengths", drafts=((0, 9), (9, 0), (0, 9, 9), (9, 0, 2)))
    def launch_unequal(self, drafts: tuple[int, ...]) -> None:
        """Plan and launch the next step. The rows of chains verify so many drafts each, in turn, or all they have."""
        self.only_if(self._launch(lambda: self.core.plan(partial(nodes_in_turn, drafts))))

    @operation(weight=5, needs="budgets", budget=(1, 2, 3, 5), slope=(0, 50, 50, 100), drafts=((9,), (9,), (9, 0, 2)))
    def choose(self, budget: int, slope: int, drafts: tuple[int, ...]) -> None:
        """Submit requests, and serve all by a few steps in which the device chooses `budget` drafts of chains by their
        confidences, at most `drafts` of each row, in turn. `slope` is in percent."""
        is_look_up = self.engine.algorithm.drafter is Drafter.LOOKUP
        self.only_if(self.config.topk == 1 and self.config.steps and not is_look_up)
        for number in range(self.config.max_running):
            self.submit(f"chosen {number}", 3, 12, 0, False, False)
        rules = partial(nodes_in_turn, drafts), partial(budget_of, max(budget, 0), slope / 100)
        for _ in range(8):
            for _ in range(1 + self.config.overlap):
                self._launch(lambda: self.core.plan(*rules))
            if self.core.difference is not None or not self.collect() or self.core.refusal:
                break

    def _launch(self, plan: Callable[[], Step | None]) -> bool:
        """Launch what is planned. Returns False if nothing has happened."""
        m, before = self.moment, self.core.num_events
        step = plan()
        if step is None:
            self._said = "nothing to do"
            return self.core.difference is not None or self.core.num_events > before
        if self.core.difference is not None:
            return True
        self.model.launch(step)
        self._isolated.launch(step)
        self.steps.append(step)
        if self.capabilities.inspection:
            m.in_step = hidden_arrays({"step": step}, m.hidden_sizes)
        self.must(self.subject.launch, step)
        self.use(used_parts(self.config, self.engine.algorithm, step, len(self.steps)))
        self._said = f"step {step.step_id}: {words_of(step)}"
        self._look()
        return True

    @operation(weight=12, needs="parking", when=_may_park)
    def park(self) -> None:
        """Park the draft, or let a parked one return."""
        self.core.turn_parking()

    @operation(weight=12, when=_is_in_flight)
    def collect(self) -> None:
        """Commit the result of the oldest step."""
        m, flight = self.moment, self.model.in_flight[0]
        shown = self.model.shown(flight)
        result = self.must(self.subject.collect)
        if self.capabilities.inspection:
            m.in_result = unasked(hidden_arrays({"result": result}, m.hidden_sizes), shown)
        try:
            self.model.collect(result)
        except WrongResult as wrong:
            raise self.misbehaviour(wrong.id, f"step {flight.step_id}: {wrong.was}", wrong.should) from None
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            was = f"step {flight.step_id}: a result that cannot be read ({type(error).__name__}: {error})"
            raise self.misbehaviour("TYPE", was, "a core.step.StepResult with its parts") from error
        self._still_as_delivered()
        if result.decode is not None:
            lens = result.decode.accept_lens
            self._delivered = (flight.step_id, lens, lens.tolist())
        m.chosen += tuple(flight.chosen)
        outcome = self.core.commit(self.steps.pop(0), result)
        if self.core.refusal:
            if "DRAFT-0" in self.core.refusal:
                return  # which `chosen` shows
            was = f"the engine cannot commit the result of step {flight.step_id}: {self.core.refusal}"
            raise self.misbehaviour("ANSWER", was, "a result that follows from the step")
        self._isolated.commit(outcome)
        self._said = self._outcome(flight.step_id, result, outcome)
        if self.judge is not None:
            m.after_roots_alone += self.judge.take_after_roots_alone()
            m.foreign_confidences += self.judge.take_confidences()
        if self.capabilities.look_ups:
            m.waiting = self._waiting()
        if self.capabilities.states and self.config.is_recurrent:
            m.states = self._states()
        self._look()

    def _waiting(self) -> tuple[int, int]:
        """Return how many tokens of a row wait for the draft at most, and the bound of it."""
        bound, counts = self.sequence(self.must(self.subject.waiting), "waiting()", "(bound, tokens of each row)", 2)
        most = max(self.integers(counts, "the tokens of waiting()"), default=0)
        return most, self.integer(bound, "the bound of waiting()")

    def _states(self) -> tuple[SeenState, ...]:
        """Return the states of the rows whose request goes on, and what they should be."""
        rows = [(row, state) for row, state in self.model.rows.items() if state.length and not state.over]
        found = self.sequence(
            self.must(self.subject.states, [row for row, _ in rows]),
            "states()",
            "a RecurrentState of each row",
            len(rows),
        )
        seen = []
        for (row, state), own in zip(rows, found, strict=True):
            length, values = self.sequence(own, f"the state of row {row}", "(tokens, values)", 2)
            wanted = None
            if values is not None and self.capabilities.plain:
                wanted = self.subject.after(state.text[: state.length], state.length - 1).state
            own = RecurrentState(self.integer(length, f"the tokens in the state of row {row}"), values)
            seen.append(SeenState(row, state.ran, own, RecurrentState(state.length, wanted)))
        return tuple(seen)

    def _still_as_delivered(self) -> None:
        if self._delivered is not None:
            step_id, lens, values = self._delivered
            now = lens.tolist()
            if now != values:
                was = f"the accept lengths of step {step_id} were {values} when they were delivered, now {now}"
                raise self.misbehaviour("ANSWER", was, "a result stays what it is")

    @staticmethod
    def _outcome(step_id: int, result: Any, outcome: CommitOutcome | None) -> str:
        lens = "" if result.decode is None else f", accept lengths {result.decode.accept_lens.tolist()}"
        ended = [] if outcome is None else [end.request_id for end in outcome.finished]
        return f"step {step_id}{lens}{', ends ' if ended else ''}{' and '.join(ended)}"

    @operation(weight=3, hostile=True, when=_is_in_flight)
    def stop(self) -> None:
        """Ask everything in flight to end at its next round boundary."""
        self._request_stop()

    def _request_stop(self) -> None:
        self.must(self.subject.request_stop, self.engine.last_step_id)
        self.model.stop(self.engine.last_step_id)

    @operation(weight=2, needs="restarts", hostile=True, when=_is_in_flight, rounds=(0, 0, 1, 2))
    def lose(self, rounds: int) -> None:
        """Let the oldest step fail as a whole, where it can after `rounds` of its rounds. All steps in flight are given
        up, and the executor begins anew."""
        self.only_if(rounds >= 0)
        if self.capabilities.rounds and rounds:
            self.must(self.subject.advance, rounds)
        self.core.lose(self.model.in_flight[0].step_id, lambda: self.must(self.subject.restart))
        self.model.restart()
        self.steps.clear()
        self._look()

    @operation(weight=3, needs="rounds", when=_is_in_flight, rounds=(1, 1, 2, 3))
    def advance(self, rounds: int) -> None:
        """Run `rounds` rounds of the oldest step, without an answer yet."""
        self.only_if(rounds > 0)
        is_over = self.must(self.subject.advance, rounds)
        if not isinstance(is_over, bool | np.bool_):
            raise self.misbehaviour("TYPE", f"advance({rounds}) is {is_over!r}", "whether the step is over")
        self.model.advance(rounds)
        self._said = "over" if is_over else "not over"
        self._look()

    @operation(weight=2, needs="samples")
    def sample(self) -> None:
        """Sample requests with one prompt to their end, by seeds of their own:
        as independent draws of the exact distribution."""
        # Once in a run, and in few runs: it takes as long as many operations.
        self.only_if(not self._has_sampled and self.config.max_running >= MANY)
        self._has_sampled = True
        self.judge.forget()
        prompt = Prompt.of_tokens(self._stem[:3])
        for number in range(NUM_SAMPLED):
            self.core.submit(Request(f"sampled {number}", prompt, SAMPLED_LEN, sampling=RULES[number % len(RULES)]))
        self._serve()
        unfair = self.judge.unfairness()
        if unfair is not None:
            raise self.misbehaviour("ANSWER", unfair, "every token is an independent draw of the exact distribution")
        self._said = f"{NUM_SAMPLED} requests are served"

    @operation(weight=4, needs="look_ups")
    def follow(self) -> None:
        """Serve all requests to their end, and then one behind the text of each: what is cached of it has the draft's
        KV, too."""
        self._serve()
        for number, row in enumerate([*self.model.rows.values()]):
            prompt = Prompt.of_tokens(np.array(row.text[:FOLLOWED_LEN]))
            self.core.submit(Request(f"follower {number}", prompt, FOLLOWER_LEN))
        self.judge.compare_again()
        self._serve()
        self._said = "all are served"

    @operation(weight=1, needs="merging", probes="ACCEPT-17", first=(-1, 0, 1, 3), second=(-1, 0, 2))
    def merge(self, first: int, second: int) -> None:
        """Join the hidden states of two batches: of so many rows each, −1 for a batch that has None."""
        m = self.moment
        width = m.hidden_sizes[0] if m.hidden_sizes else 8
        batches = [None if rows < 0 else [[at + 1.0] * width] * rows for at, rows in enumerate((first, second))]
        m.merged = (max(first, -1), max(second, -1))
        try:
            answer = self.subject.merge(*batches)
        except (*REFUSALS, InvariantViolation) as error:
            m.merge = f"{type(error).__name__}: {error}"
        except Exception as error:
            raise self._accident(self.subject.merge, error) from error
        else:
            m.merge = -1 if answer is None else self._rows_of(answer)
        self._said = f"-> {m.merge if isinstance(m.merge, str) or m.merge >= 0 else None}"

    def _rows_of(self, answer: Any) -> int:
        try:
            return len(answer)
        except TypeError:
            raise self.misbehaviour("TYPE", f"merge() is {answer!r:.60}", "rows of numbers, or None") from None

    @operation(weight=1, needs="handoff", probes="ACCEPT-17", sent=((0,), (1,), (), (0, 0), (1, 1), (0, 1), (1, 0, 1)))
    def arrive(self, sent: tuple[int, ...]) -> None:
        """Hand over a request from a prefill worker for each entry of `sent`: 1 with a hidden state, 0 with None."""
        m = self.moment
        count, width, topk = len(sent), m.hidden_sizes[0] if m.hidden_sizes else 8, self.config.topk
        batch = HandoffBatch(
            rows=np.arange(1, count + 1, dtype=np.int32),
            epochs=np.ones(count, np.int64),
            request_ids=tuple(f"arrival {number}" for number in range(count)),
            seq_lens=np.full(count, 3, np.int64),
            probabilities=np.arange(1, count * topk + 1, dtype=np.float32).reshape(count, topk) / np.float32(64),
            token_ids=np.arange(count * topk).reshape(count, topk),
            hidden_states=tuple(np.full(width, at + 1.0, np.float32) if has else None for at, has in enumerate(sent)),
            hidden_size=width,
        )
        last_tokens = np.arange(100, 100 + count)
        answer = self.must(self.subject.draft_input, batch, last_tokens)
        m.sent, m.served = sent, count
        if answer is not None:
            if not isinstance(answer, DraftInput):
                was = f"draft_input() is {answer!r:.60}"
                raise self.misbehaviour("TYPE", was, "a core.algorithm.DraftInput, or None")
            m.served = len(answer.rows)
            m.received = None if answer.hidden_states is None else tuple(answer.hidden_states.shape)
            self._belongs_to_its_rows(answer, batch, last_tokens)
        self._said = f"-> {m.served} of {count} rows, hidden states {list(m.received) if m.received else m.received}"

    def _belongs_to_its_rows(self, answer: DraftInput, batch: HandoffBatch, last_tokens: np.ndarray) -> None:
        """Compare what the first round of each arrival drafts from with what was sent of it."""
        columns = {
            "bonus token": (answer.bonus_tokens, last_tokens),
            "probabilities": (answer.probabilities, batch.probabilities),
            "token ids": (answer.token_ids, batch.token_ids),
            "hidden state": (answer.hidden_states, batch.hidden_states),
        }
        for place, row in enumerate(answer.rows.tolist()):
            at = batch.rows.tolist().index(row)
            for what, (given, was_sent) in columns.items():
                if given is None or was_sent[at] is None:
                    continue
                if len(given) != len(answer.rows) or not np.array_equal(given[place], was_sent[at]):
                    was = f"the {what} of row {row} is {np.asarray(given[place : place + 1]).tolist()}"
                    raise self.misbehaviour("ANSWER", was, f"{np.asarray(was_sent[at]).tolist()}, as it was sent")

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Serve all requests to their end, and one more after that."""
        self._serve()
        self.submit(LAST, 3, 4, 0, False, False)
        self._serve()
        if not self.engine.is_idle:
            raise self.misbehaviour("ANSWER", "requests are left, but nothing is planned", "all are served")
        found = self._isolated.difference(self.make) if self.capabilities.keyed else None
        if found is not None:
            raise self.misbehaviour("ANSWER", *found)

    def _serve(self) -> None:
        for _ in range(MAX_STEPS_TO_DRAIN):
            while self.launch():
                pass
            if not self.collect():
                return
        raise self.misbehaviour("ANSWER", f"no end after {MAX_STEPS_TO_DRAIN} steps", "all are served")

    def describe(self) -> str:
        return self._said
