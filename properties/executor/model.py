"""The expected results of an executor: the requests in its rows, as the steps describe them, and the values that a
checker looks at.

Plain Python, one row and one round after the other. A result that does not follow from its step raises `WrongResult`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from ...core.algorithm.algorithm import SpecAlgorithm
from ...core.contract.step import NO_TOKEN, MultiStepEnd, Step, StepResult
from .contract import HIDDEN_STATES, ExecutorCapabilities, ExecutorConfig
from .judge import RunJudge, WrongResult
from .oracle import RecurrentState
from .search import FoundArray

PARTS = {
    "a second step in flight": "",
    "several rounds of a step": "",
    "prompts beside rounds": "",
    "a prefix from the cache": "",
    "a verify tree": "trees",
    "a hidden state for a draft": "hidden_states",
    "a recurrent state": "states",
    "a parked draft": "parking",
}
"""What a step may do without: a check in which a declared part was never used has not checked it."""


def used_parts(config: ExecutorConfig, algorithm: SpecAlgorithm, step: Step, num_in_flight: int) -> dict[str, bool]:
    """Return which of `PARTS` a step uses that is launched as one of so many."""
    rounds = step.decode
    return {
        "a second step in flight": num_in_flight > 1,
        "several rounds of a step": step.max_rounds > 1,
        "prompts beside rounds": step.prefill is not None and rounds is not None,
        "a prefix from the cache": any(join.num_cached for join in step.joins),
        "a verify tree": rounds is not None and rounds.shape.topk > 1,
        "a hidden state for a draft": rounds is not None and rounds.shape.steps > 0 and algorithm.needs_hidden_states,
        "a recurrent state": rounds is not None and config.is_recurrent,
        "a parked draft": rounds is not None and rounds.shape.is_parked,
    }


@dataclass(slots=True)
class ExecutorMoment:
    """One operation: what the executor keeps, what it answered, and where the two engines differ.

    None where an operation has nothing of the kind, or the executor does not show it.
    """

    config: ExecutorConfig
    capabilities: ExecutorCapabilities
    needs_hidden_states: bool
    hidden_sizes: tuple[int, ...] = ()
    relay: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    hidden_bytes: int | None = None
    kept: list[FoundArray] | None = None  # arrays of a hidden state's width that it keeps
    in_step: list[FoundArray] | None = None  # … that a launched step carries
    in_result: list[FoundArray] | None = None  # … that a result carries, though no request asked to see them
    merged: tuple[int, int] | None = None  # rows of the two batches, −1 for None
    merge: int | str | None = None  # rows of both together, −1 for None, or how it was refused
    sent: tuple[int, ...] | None = None  # of requests that were handed over: 1 with a hidden state, 0 with None
    served: int = 0  # how many of them the draft input is for
    received: tuple[int, ...] | None = None  # the shape of its hidden states
    state_room: int = 0  # requests that can have a recurrent state at once
    states: tuple[SeenState, ...] = ()  # of rows whose request goes on, after a step
    # Of rows whose draft had no part in their last round: what they drafted next and should have, None: as they should
    after_roots_alone: tuple[tuple[str, str] | None, ...] = ()
    chosen: tuple[ChosenRound, ...] = ()  # the rounds of a result whose lengths the device has chosen
    # The confidences of rows: what they were and should have been, None: as they should be
    foreign_confidences: tuple[tuple[str, str] | None, ...] = ()
    waiting: tuple[int, int] | None = None  # the most tokens of a row that wait for the draft, and the bound of it
    difference: tuple[str, str] | None = None  # between the served engine and the fed one, as in `RecordedCore`
    num_events: int = 0

    def forget(self) -> None:
        """Clear what belongs to one operation alone."""
        self.in_step = self.in_result = self.merged = self.merge = self.sent = self.received = self.waiting = None
        self.states = self.chosen = self.after_roots_alone = self.foreign_confidences = ()


class ChosenRound(NamedTuple):
    """A round whose lengths the device has chosen by a budget."""

    budget: Any  # `DraftBudget`
    most: tuple[int, ...]  # nodes of each row at most
    nodes: list[int]  # of each row, as the result says
    confidence: list[list[float]]  # of each row's drafts


class Ran(Enum):
    """What a step ran of a row."""

    ROUNDS = "rounds"
    CHUNK = "a prompt chunk"
    NOTHING = "nothing"


class SeenState(NamedTuple):
    """The recurrent state of a row after a step, and what it should be."""

    row: int
    ran: Ran
    found: RecurrentState
    wanted: RecurrentState


@dataclass(slots=True)
class ExecutorRow:
    """A request in a row."""

    request_id: str
    epoch: int
    remaining: int  # tokens that it may still emit
    stop_tokens: tuple[int, ...]
    outputs: tuple[str, ...]
    sampling: Any  # `SamplingParams`: how the judge knows what may be emitted
    num_prompt: int
    text: list[int]  # of which it has KV, and the root behind it
    length: int = 0  # positions with KV
    ran: Ran = Ran.NOTHING  # of it, in the step that was collected last
    over: bool = False
    was_alone: bool = False  # its last round could draft, and the draft model took no part in it


class PromptChunk(NamedTuple):
    """A part of a prompt."""

    row: int
    is_last: bool
    end: int  # its end in the prompt
    tokens: list[int]  # empty if the executor has no tokens


@dataclass(slots=True)
class LaunchedStep:
    """A launched step, copied, because the executor may write into the arrays of the step itself."""

    step_id: int
    joins: list[tuple[int, ExecutorRow]]
    released: list[tuple[int, int]]
    chunks: list[PromptChunk] | None
    rows: list[int] | None
    width: int = 0  # the most tokens of a round
    tree: tuple[int, int, int] = (0, 1, 1)  # steps, top-k and nodes of its rounds
    row_nodes: tuple[int, ...] = ()  # nodes that each row verifies
    budget: Any = None  # `DraftBudget`: with it the device chooses the nodes, at most `row_nodes`
    chosen: list[ChosenRound] = field(default_factory=list)  # in the result's rounds
    lengths: tuple[tuple[int, int], ...] = ()  # per row: the least and the most positions with KV at which it may begin
    max_rounds: int = 1
    limit: int = 1  # rounds that it may still be answered with
    advanced: int = 0
    stopped: bool = False


class DeviceModel:
    """Hold rows by number. `launch` and `collect` take steps and results in their order.
    `judge` looks at tokens and outputs."""

    def __init__(self, config: ExecutorConfig, algorithm: SpecAlgorithm, judge: RunJudge | None) -> None:
        self.judge = judge
        self.config = config
        self.algorithm = algorithm
        self.rows: dict[int, ExecutorRow] = {}
        self.in_flight: list[LaunchedStep] = []
        self.last_time = 0

    def launch(self, step: Step) -> None:
        joins = []
        for join in step.joins:
            request, left = join.request, join.max_tokens - join.num_emitted
            text = [] if join.cached_tokens is None else join.cached_tokens.tolist()
            known = request.stop_tokens, request.outputs, request.sampling, request.prompt.length
            joins.append((join.row, ExecutorRow(request.request_id, join.epoch, left, *known, text)))
        chunks = rows = None
        width = 0
        if step.prefill is not None:
            part = step.prefill
            ends = np.cumsum(part.lens)
            pieces = [
                [] if part.tokens is None else part.tokens[end - n : end].tolist()
                for end, n in zip(ends, part.lens, strict=True)
            ]
            prompt_ends = (part.starts + part.lens).tolist()
            columns = (part.rows.tolist(), part.is_last.tolist(), prompt_ends, pieces)
            chunks = [PromptChunk(*values) for values in zip(*columns, strict=True)]
        if step.decode is not None:
            part = step.decode
            rows = part.rows.tolist()
            width = self.algorithm.accept_width(part.shape.steps, part.shape.nodes)
        flight = LaunchedStep(step.step_id, joins, list(step.released), chunks, rows, width)
        if step.decode is not None:
            flight.tree = part.shape.computed
            is_equal = part.row_nodes is None
            flight.row_nodes = tuple([part.shape.nodes] * len(rows) if is_equal else part.row_nodes.tolist())
            flight.budget = part.budget
            flight.lengths = tuple(zip(part.seq_lens.tolist(), part.max_seq_lens.tolist(), strict=True))
        flight.max_rounds = flight.limit = step.max_rounds
        self.in_flight.append(flight)

    def stop(self, last_step_id: int) -> None:
        for flight in self.in_flight:
            if flight.step_id <= last_step_id:
                flight.limit = min(flight.limit, flight.advanced + 1)
                flight.stopped = True

    def advance(self, rounds: int) -> None:
        self.in_flight[0].advanced += rounds

    def restart(self) -> None:
        """Forget all rows and steps: the engine has given up those in flight, and all KV."""
        self.rows.clear()
        self.in_flight.clear()

    def shown(self, flight: LaunchedStep) -> bool:
        """Return whether a request of the step asks to see hidden states."""
        joined = dict(flight.joins)
        rows = [chunk.row for chunk in flight.chunks or ()] + (flight.rows or [])
        states = [joined.get(row) or self.rows.get(row) for row in rows]
        return any(state is not None and HIDDEN_STATES in state.outputs for state in states)

    def collect(self, result: StepResult) -> None:
        """Check the result of the oldest step. Raises Wrong."""
        flight = self.in_flight.pop(0)
        for row, epoch in flight.released:
            if row in self.rows and self.rows[row].epoch == epoch:
                del self.rows[row]
        self.rows.update(flight.joins)
        for state in self.rows.values():
            state.ran = Ran.NOTHING
        for name in ("step_id", "prefill", "decode", "round_end_ns", "failures"):
            if not hasattr(result, name):
                raise WrongResult(f"a {type(result).__name__} without {name}", "a core.step.StepResult", "TYPE")
        if result.step_id != flight.step_id:
            raise WrongResult(
                f"the result of step {result.step_id}", f"that of step {flight.step_id}, the oldest in flight"
            )
        for part, wanted in (("prefill", flight.chunks), ("decode", flight.rows)):
            if (getattr(result, part) is None) != (wanted is None):
                there = "a" if wanted is not None else "no"
                raise WrongResult(
                    f"result.{part} is {getattr(result, part)!r:.60}", f"the step has {there} {part} part"
                )
        failed = self._failures(flight, result)
        if flight.chunks is not None:
            self._prefill(flight.chunks, result.prefill, failed)
        if flight.rows is not None:
            self._decode(flight, result.decode, failed)
        self._times(flight, result)

    def _failures(self, flight: LaunchedStep, result: StepResult) -> set[int]:
        known = {chunk.row for chunk in flight.chunks or ()} | set(flight.rows or ())
        for row, message in result.failures:
            if row not in known:
                raise WrongResult(f"a failure of row {row} ({message})", f"one of the step's rows, {sorted(known)}")
            self.rows[row].over = True
        return {row for row, _ in result.failures}

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self, chunks: list[PromptChunk], part: Any, failed: set[int]) -> None:
        count = len(chunks)
        tokens: Sequence[Any] = [None] * count
        if self.config.tokens:
            tokens = column(part.tokens, (count,), "iu", "prefill.tokens")
        elif part.tokens is not None:
            raise WrongResult("prefill.tokens is there", "None: no tokens are promised", "TYPE")
        stopped = [False] * count
        if part.stopped is not None:
            stopped = column(part.stopped, (count,), "b", "prefill.stopped")
        for i, (chunk, token, stop) in enumerate(zip(chunks, tokens, stopped, strict=True)):
            row, is_last, end, piece = chunk
            state = self.rows[row]
            state.text += piece
            state.length, state.ran = end, Ran.CHUNK
            if not is_last or state.over:
                continue
            if token is not None and not 0 <= token < self.config.vocab_size:
                raise WrongResult(
                    f"the first token of row {row} is {token}", f"one of 0 … {self.config.vocab_size - 1}"
                )
            if token is not None and stop != (token in state.stop_tokens):
                raise WrongResult(
                    f"prefill.stopped of row {row} is {stop} at token {token}", f"stops: {state.stop_tokens}"
                )
            state.remaining -= 1
            state.over = stop or state.remaining == 0
            self._outputs(part.outputs, state, row, (count,), "prefill.outputs")
            if self.judge is not None and row not in failed:
                shown = {name: part.outputs[name][i : i + 1] for name in state.outputs}
                self.judge.first_token(state, token, shown, f"the first token of row {row}")
            if token is not None:
                state.text.append(token)

    # -- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, flight: LaunchedStep, part: Any, failed: set[int]) -> None:
        rounds, bs = part.rounds, len(flight.rows)
        was_over = any(self.rows[row].over for row in flight.rows if row not in failed)
        limit = 1 if was_over else flight.limit
        if not isinstance(rounds, int | np.integer) or not 1 <= rounds <= limit:
            raise WrongResult(f"{rounds} rounds", f"1 … {limit}: {self._why(flight, was_over)}")
        lens = column(part.accept_lens, (rounds, bs), "iu", "decode.accept_lens")
        ended = column(part.ended, (bs,), "b", "decode.ended")
        stops = [[NO_TOKEN] * bs] * rounds
        if part.stop_index is not None:
            stops = column(part.stop_index, (rounds, bs), "i", "decode.stop_index")
        tokens = self._tokens(part, rounds, bs)
        nodes_of = self._nodes(flight, part, rounds, bs)
        for row, (least, most) in zip(flight.rows, flight.lengths, strict=True) if self.config.tokens else ():
            length = len(self.rows[row].text) - 1
            if not (self.rows[row].over or row in failed or least <= length <= most):
                raise WrongResult(
                    f"the step begins row {row} at {least} … {most}", f"at {length}: so many positions have KV"
                )
        expected = [False] * bs
        for row in dict.fromkeys(flight.rows):
            for number in range(rounds):
                found = None if part.outputs is None else part.outputs[number]
                self._outputs(found, self.rows[row], row, (bs,), "decode.outputs")
        for number in range(rounds):
            if any(expected):
                over = flight.rows[expected.index(True)]
                raise WrongResult(f"{rounds} rounds", f"{number}: row {over} ended there")
            for i, row in enumerate(flight.rows):
                state = self.rows[row]
                if state.over:
                    continue
                run = None if tokens is None else tokens[number][i]
                what = f"row {row} in round {number + 1}"
                steps, topk, nodes = flight.tree
                own = nodes_of[number][i]
                tree, is_look_up = (steps, topk, own), False
                width = flight.width if own == nodes else own
                expected[i] = self._run(state, lens[number][i], width, run, stops[number][i], what)
                if self.judge is not None and row not in failed:
                    length = lens[number][i]
                    shown = {name: part.outputs[number][name][i, :length] for name in state.outputs}
                    if flight.chosen:
                        self.judge.confidences(state, steps, flight.chosen[number].confidence[i], what)
                    is_look_up = self.judge.round(state, run[:length], tree, shown, what, (number, i))
                state.was_alone = own == 1 < nodes or is_look_up
                state.text += [] if run is None else run[: lens[number][i]]
                state.length += lens[number][i]
                state.ran = Ran.ROUNDS
            for i, row in enumerate(flight.rows):
                self.rows[row].over |= expected[i]
        expected = [over or row in failed for over, row in zip(expected, flight.rows, strict=True)]
        wrong = [i for i in range(bs) if ended[i] != expected[i] and flight.rows[i] not in failed]
        if wrong:
            row = flight.rows[wrong[0]]
            raise WrongResult(f"decode.ended of row {row} is {ended[wrong[0]]}", f"{expected[wrong[0]]}, by its tokens")
        self._multi_step_end(flight, part, any(ended), was_over)

    def _nodes(self, flight: LaunchedStep, part: Any, rounds: int, bs: int) -> list[Any]:
        """Return the nodes that each row verified, by rounds, and note what the device has chosen."""
        if flight.budget is None:
            if getattr(part, "row_nodes", None) is not None:
                raise WrongResult("decode.row_nodes is there", "None: the step has no budget", "TYPE")
            return [flight.row_nodes] * rounds
        nodes = column(part.row_nodes, (rounds, bs), "iu", "decode.row_nodes")
        confidence = column(part.confidence, (rounds, bs, flight.tree[0]), "f", "decode.confidence")
        flight.chosen = [
            ChosenRound(flight.budget, flight.row_nodes, *chosen) for chosen in zip(nodes, confidence, strict=True)
        ]
        return nodes

    def _tokens(self, part: Any, rounds: int, bs: int) -> list[Any] | None:
        if not self.config.tokens:
            if part.tokens is not None:
                raise WrongResult("decode.tokens is there", "None: no tokens are promised", "TYPE")
            return None
        shape = getattr(part.tokens, "shape", ())
        if len(shape) != 3:
            raise WrongResult(f"decode.tokens has shape {tuple(shape)}", f"[{rounds}, {bs}, width]", "TYPE")
        return column(part.tokens, (rounds, bs, shape[2]), "iu", "decode.tokens")

    def _run(self, state: ExecutorRow, length: int, width: int, run: list[int] | None, stop: int, what: str) -> bool:
        """Check one row's run of tokens in one round. Returns whether its request ends with it."""
        if not 1 <= length <= width:
            raise WrongResult(f"{what} emits {length} tokens", f"1 … {width}: the accepted drafts and the bonus token")
        if run is not None:
            if len(run) < length or any(not 0 <= token < self.config.vocab_size for token in run[:length]):
                raise WrongResult(
                    f"{what} emits {run} with accept length {length}", f"{length} tokens of the vocabulary"
                )
            if any(token != NO_TOKEN for token in run[length:]):
                raise WrongResult(f"{what} emits {run} with accept length {length}", f"{NO_TOKEN} past the end")
            first = next((at for at, token in enumerate(run[:length]) if token in state.stop_tokens), NO_TOKEN)
            if stop != first:
                raise WrongResult(f"{what} has stop_index {stop} in {run}", f"{first}: stops are {state.stop_tokens}")
        elif not NO_TOKEN <= stop < length:
            raise WrongResult(f"{what} has stop_index {stop}", f"{NO_TOKEN} … {length - 1}")
        kept = min(length, state.remaining)
        stopped = 0 <= stop < kept
        state.remaining -= stop + 1 if stopped else kept
        return stopped or state.remaining == 0

    def _multi_step_end(self, flight: LaunchedStep, part: Any, ended: bool, was_over: bool) -> None:
        if ended:
            expected = [MultiStepEnd.REQUEST_ENDED]
        elif part.rounds == flight.max_rounds:
            expected = [MultiStepEnd.MAX_ROUNDS]
        else:
            # A block that ends anyway at its limit need not say that it was asked to.
            expected = [MultiStepEnd.ASKED] if flight.stopped or was_over else []
        if part.multi_step_end not in expected:
            said = " or ".join(end.name for end in expected) or f"{flight.max_rounds} rounds: no stop was requested"
            raise WrongResult(f"{part.rounds} of {flight.max_rounds} rounds, {part.multi_step_end!s}", said)

    @staticmethod
    def _why(flight: LaunchedStep, was_over: bool) -> str:
        if was_over:
            return "one of its requests had ended before"
        return "it was asked to stop" if flight.stopped else f"max_rounds is {flight.max_rounds}"

    # -- both ---------------------------------------------------------------------------------------------------------

    def _outputs(self, found: Any, state: ExecutorRow, row: int, shape: tuple[int, ...], what: str) -> None:
        if not self.config.tokens:
            return
        for name in state.outputs:
            array = (found or {}).get(name)
            if array is None or tuple(array.shape[: len(shape)]) != shape:
                was = f"{what}[{name!r}] is {getattr(array, 'shape', None)}"
                raise WrongResult(was, f"there for row {row}, [{shape[0]}, …]")

    def _times(self, flight: LaunchedStep, result: StepResult) -> None:
        rounds = result.decode.rounds if result.decode is not None else 1
        times = column(result.round_end_ns, (rounds,), "i", "round_end_ns")
        if sorted(times) != times or times[0] < self.last_time:
            raise WrongResult(f"rounds end at {times} ns, after {self.last_time} ns", "later and later")
        self.last_time = times[-1]


def column(values: Any, shape: Sequence[int], kinds: str, what: str) -> list[Any]:
    """Return an array of this shape and kind of dtype as nested lists. Raises Wrong for anything else."""
    dtype = getattr(values, "dtype", None)
    if dtype is None or getattr(dtype, "kind", None) not in tuple(kinds) or tuple(values.shape) != tuple(shape):
        found = f"{dtype} {list(values.shape)}" if dtype is not None else type(values).__name__
        words = {"iu": "integers", "i": "integers", "b": "booleans", "f": "floats"}[kinds]
        raise WrongResult(f"{what} is {found}", f"a NumPy array of {words}, {list(shape)}", "TYPE")
    return values.tolist()
