"""The contract between the engine and every executor: steps and their results.

Dataclasses of NumPy arrays, one row per request. No field of a step is written after its plan. (They are not frozen
classes: those take six times as long to make, and each step makes seven objects, its events included.)

```
            known to the CPU                     reserved for steps in flight
row:  [0 ─────────────── seq_lens) [seq_lens ─────── max_seq_lens) [ … + L) ──── allocated ──── width
       KV is final (or launched)    may be final by the time         this step's
                                    this step runs                   own writes
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from .arrays import BoolArray, Float32Array, Int32Array, Int64Array
from .handoff_batch import HandoffBatch
from .request import Request


class WrittenRanges(NamedTuple):
    """Slots written at `[rows[i], starts[i] : starts[i] + counts[i]]` for all i, range after range.
    The arrays are never written."""

    rows: np.ndarray | int  # int [n], or a single range
    starts: np.ndarray | int
    counts: np.ndarray | int
    slots: Int32Array  # int32 [sum of counts]


class TableWrites:
    """Entries of the request table that have changed since the last step, in order:
    `table[rows[i], columns[i]] = slots[i]`, int32 [n].

    The engine notes a few ranges per step; the list of cells, one per slot, is written out when an executor or a log
    reads it.
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Sequence[WrittenRanges] = ()) -> None:
        self._ranges = ranges

    @property
    def rows(self) -> np.ndarray:
        return self._joined(lambda written: np.repeat(written.rows, written.counts))

    @property
    def columns(self) -> np.ndarray:
        return self._joined(_columns)

    @property
    def slots(self) -> np.ndarray:
        return self._joined(lambda written: written.slots)

    def __repr__(self) -> str:
        return f"TableWrites(rows={self.rows!r}, columns={self.columns!r}, slots={self.slots!r})"

    def _joined(self, part: Callable[[WrittenRanges], np.ndarray]) -> np.ndarray:
        if not self._ranges:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([part(written) for written in self._ranges], dtype=np.int32, casting="same_kind")


def _columns(written: WrittenRanges) -> np.ndarray:
    """Return starts[i] … starts[i] + counts[i] − 1 for all i, joined."""
    # Element c of the result, which lies in range i, is starts[i] + c − (number of elements before range i).
    before = np.cumsum(written.counts) - written.counts
    return np.repeat(written.starts - before, written.counts) + np.arange(written.slots.size)


NO_WRITES = TableWrites()


PADDING_ROW = 0  # no request's
NO_TOKEN = -1  # a placeholder; never reaches an executor's input


@dataclass(slots=True)
class Join:
    """A request that takes a row with this step. Executors open their per-row state from it."""

    row: int
    epoch: int  # of the row; a result or relay value with another epoch belongs to another request
    request: Request
    max_tokens: int  # the finish rule's cap, ≤ request.max_tokens (context and pool limits applied)
    num_emitted: int  # output tokens delivered before (> 0 after a retraction); they are part of the prefill
    num_cached: int  # KV tokens taken over from the prefix cache
    # int64 [num_cached]: these tokens (of an arrival: all num_received tokens); None if the executor needs no tokens
    cached_tokens: np.ndarray | None
    num_received: int = 0  # KV length that a prefill worker has computed and sent: the row decodes without a prefill
    num_loaded: int = 0  # the last of the `num_cached` tokens: their KV is copied from host memory before it is read


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The rows of a step's joins that need no prefill, because their KV was received; for executors with tokens. Their
    first relay cell comes from `algorithm.build_disagg_draft_input(batch, first_tokens, future_map)`, before the step
    resolves anything."""

    batch: HandoffBatch
    first_tokens: Int64Array  # int64 [n]: what the prefill worker sampled; delivered already


@dataclass(slots=True)
class PrefillStep:
    """Chunks of prompts: row i computes KV positions starts[i] … starts[i] + lens[i] − 1."""

    rows: Int32Array  # int32 [n]
    epochs: Int64Array  # int64 [n]
    starts: Int64Array  # int64 [n]
    lens: Int64Array  # int64 [n], ≥ 1
    is_last: BoolArray  # bool [n]: the chunk ends the prompt: it emits the row's first token and first relay cell
    tokens: Int64Array | None  # int64 [sum(lens)], row after row; None where the executor does not ask for them
    tail_tokens: Int64Array  # int64 [n]: the context's token after a chunk; −1: none, the first token is drawn
    is_parked: bool = False  # no pass of the draft runs: its KV of these positions stays as it is


class RoundShape(NamedTuple):
    """What a draft-and-verify round computes for each of its rows. 0 steps are plain decoding through the same path."""

    steps: int  # draft depth S
    topk: int  # branching k; 0: the draft is parked, so no pass of it runs after the round either
    nodes: int  # of a verify tree, root included; a chain has steps + 1

    @classmethod
    def chain(cls, steps: int) -> RoundShape:
        """Return the shape of a round that drafts one token per step."""
        return cls(steps, 1, steps + 1)

    @property
    def is_parked(self) -> bool:
        """Whether the draft is parked (`adaptive/parking.py`): it does not read the tokens of the round."""
        return self.topk == 0

    @property
    def computed(self) -> RoundShape:
        """This shape, without the branches that a round of 0 steps does not draft."""
        return self if self.steps or self.is_parked else PLAIN_ROUND


PLAIN_ROUND = RoundShape.chain(0)
PARKED_ROUND = RoundShape(0, 0, 1)


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Lets the device choose how many nodes each row of a round verifies, from the confidences of its drafts.

    A confidence is the probability that the draft itself gives its first choice. By `slope` and `biases` the device
    reads a probability of acceptance from it, and verifies the `drafts` drafts of the batch that most probably are
    reached and accepted: `choose_nodes` in `core/adaptive/lengths/survival.py`. `temperatures`, of draft position 1,
    2, …, divide the slope; none: it is the same at each position.
    """

    drafts: int  # drafts that the target verifies in a round, over all rows; roots come on top
    slope: float
    biases: tuple[float, ...]  # of draft position 1, 2, …; at least as many as the steps of the round
    temperatures: tuple[float, ...] = ()

    @property
    def slopes(self) -> tuple[float, ...]:
        """The slope at each draft position, as many as there are biases."""
        return tuple(self.slope / one for one in self.temperatures or (1.0,) * len(self.biases))


@dataclass(slots=True)
class DecodeStep:
    """Up to `max_rounds` draft-and-verify rounds of one batch."""

    rows: Int32Array  # int32 [bs]
    epochs: Int64Array  # int64 [bs]
    seq_lens: Int64Array  # int64 [bs]: KV length that the CPU knows; exact if no step of the row is uncommitted
    max_seq_lens: Int64Array  # int64 [bs]: the greatest KV length at which this step may begin
    shape: RoundShape
    max_rounds: int  # that many rounds may run before the engine must decide again
    # int32 [bs]: nodes that each row verifies in each round, root included, 1 … shape.nodes: the first ones of its
    # chain; None: all rows verify all nodes
    row_nodes: Int32Array | None = None
    # With a budget, `row_nodes` are the most nodes of each row. The device chooses how many, and the result says so.
    budget: DraftBudget | None = None

    @property
    def num_verify_tokens(self) -> int:
        """The nodes that the target verifies in a round, over all rows."""
        bs = len(self.rows)
        most = bs * self.shape.nodes if self.row_nodes is None else int(self.row_nodes.sum())
        return most if self.budget is None else min(most, bs + self.budget.drafts)


@dataclass(slots=True)
class Step:
    """One unit of device work. It has a prefill part, a decode part, or both (then max_rounds is 1)."""

    step_id: int  # 1, 2, 3, … per engine
    joins: tuple[Join, ...]
    released: tuple[tuple[int, int], ...]  # (row, epoch) given up since the last step; executors drop their state
    table_writes: TableWrites
    prefill: PrefillStep | None
    decode: DecodeStep | None
    arrivals: Arrivals | None = None

    @property
    def max_rounds(self) -> int:
        return self.decode.max_rounds if self.decode is not None else 1


class MultiStepEnd(Enum):
    """Why a decode step returned."""

    MAX_ROUNDS = "max_rounds"
    REQUEST_ENDED = "request_ended"
    ASKED = "asked"  # the driver wanted a new plan


@dataclass(slots=True)
class PrefillResult:
    """Per chunk of the prefill part; entries of middle chunks mean nothing."""

    tokens: Int64Array | None  # int64 [n]: first tokens of the finished prompts; None where the executor has none
    stopped: BoolArray | None  # bool [n]: that token is a stop; None if none is
    outputs: dict[str, np.ndarray] | None = None  # user outputs, leading axis n


@dataclass(slots=True)
class DecodeResult:
    """The results of `rounds` rounds, as columns [rounds, bs]; values of rows that had ended or left before are not
    read."""

    rounds: int
    accept_lens: Int32Array  # int32 [rounds, bs]: accepted nodes with the bonus token, 1 … width
    stop_index: Int32Array | None  # int32 [rounds, bs]: first stop inside the run, −1 none; None if no row met one
    ended: BoolArray  # bool [bs]: the row met its end (stop or length) in the last round
    multi_step_end: MultiStepEnd
    tokens: Int64Array | None = None  # int64 [rounds, bs, width]: emitted tokens, −1 past the end
    outputs: tuple[dict[str, np.ndarray], ...] | None = None  # per round: user outputs [bs, width, …]
    # Where the step has a budget: the nodes that each row verified, int32 [rounds, bs], and the confidences of all
    # drafts, of those that were not verified, too, float32 [rounds, bs, steps].
    row_nodes: Int32Array | None = None
    confidence: Float32Array | None = None

    def nodes_of(self, step: DecodeStep) -> Int32Array | None:
        """Return the nodes that the rows of `step` verified, int32 [bs] or [rounds, bs]; None if all had all."""
        return step.row_nodes if self.row_nodes is None else self.row_nodes


class ChosenNodes(NamedTuple):
    """What the device chose in one round by a budget."""

    row_nodes: Int32Array  # int32 [bs]
    confidence: Float32Array  # float32 [bs, steps]


@dataclass(slots=True)
class RoundRecord:
    """Collects the rounds of a decode step, for executors with tokens; `result` makes their answer."""

    accept_lens: list[np.ndarray] = field(default_factory=list)
    stop_index: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)
    chosen: list[ChosenNodes] = field(default_factory=list)  # none without a budget
    ended: np.ndarray | None = None  # of the last round

    @property
    def rounds(self) -> int:
        return len(self.accept_lens)

    def add(
        self,
        accept_lens: np.ndarray,
        stop_index: np.ndarray,
        tokens: np.ndarray,
        outputs: dict[str, np.ndarray],
        ended: np.ndarray,
        chosen: ChosenNodes | None = None,
    ) -> None:
        """Add one round, as in `DecodeResult` without the axis of rounds."""
        if chosen is not None:
            self.chosen.append(chosen)
        self.accept_lens.append(accept_lens)
        self.stop_index.append(stop_index)
        self.tokens.append(tokens)
        self.outputs.append(outputs)
        self.ended = ended

    def is_over(self, limit: int) -> bool:
        """Return whether the step returns now: after `limit` rounds, or because a request ended."""
        return self.ended is not None and (self.rounds >= limit or bool(self.ended.any()))

    def result(self, max_rounds: int) -> DecodeResult:
        assert self.ended is not None, "a step has at least one round"
        multi_step_end = MultiStepEnd.ASKED
        if self.ended.any():
            multi_step_end = MultiStepEnd.REQUEST_ENDED
        elif self.rounds == max_rounds:
            multi_step_end = MultiStepEnd.MAX_ROUNDS
        stops = np.stack(self.stop_index)
        return DecodeResult(
            rounds=self.rounds,
            accept_lens=np.stack(self.accept_lens),
            stop_index=stops if (stops >= 0).any() else None,
            ended=self.ended,
            multi_step_end=multi_step_end,
            tokens=np.stack(self.tokens),
            outputs=tuple(self.outputs),
            row_nodes=np.stack([chosen.row_nodes for chosen in self.chosen]) if self.chosen else None,
            confidence=np.stack([chosen.confidence for chosen in self.chosen]) if self.chosen else None,
        )


@dataclass(slots=True)
class StepResult:
    """The answer to one step. Results come back in the order of the steps."""

    step_id: int
    prefill: PrefillResult | None
    decode: DecodeResult | None
    round_end_ns: Int64Array  # int64 [rounds of the step]: when each round ended on the executor's clock
    failures: tuple[tuple[int, str], ...] = ()  # (row, what happened): an error of that request alone


class FailureCause(Enum):
    """What happened to a step, as far as the driver knows."""

    RAISED = "raised"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"  # the watchdog gave up waiting for it
    WORKER_LOST = "worker_lost"  # the process or the device is gone, and its KV with it


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The oldest step in flight will have no result."""

    step_id: int
    cause: FailureCause
    message: str = ""

    def __str__(self) -> str:
        detail = f": {self.message}" if self.message else ""
        return f"step {self.step_id} {self.cause.value.replace('_', ' ')}{detail}"
