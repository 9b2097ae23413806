"""A launched step, and the copies of its results to the host:
begun when they are computed, awaited when they are read.

`STEP_TRANSITIONS` says which move a step can make in which state, and `RunningStep.due` which one is its next. The
executor makes these moves in one loop, of the oldest step in the order `IN_TURN`, of those behind it in `AHEAD`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from ...core.contract.step import ChosenNodes, PrefillResult, RoundRecord, Step, StepResult


class StepState(StrEnum):
    LAUNCHED = "launched"  # nothing of it has reached the device
    OPEN = "open"  # its rows are open
    PROMPTS = "prompts"  # its prompt chunks are in the stream
    PROMPTS_AND_ROUND = "prompts_and_round"  # its first round, too, behind them
    ROUND = "round"  # one of its rounds is in the stream
    READ = "read"  # the host has read all that was in the stream
    OVER = "over"  # its result is complete


class StepMove(StrEnum):
    BEGIN = "begin"  # close and open rows, write their slots
    ENQUEUE_PROMPTS = "enqueue_prompts"
    ENQUEUE_ROUND = "enqueue_round"  # its first one
    READ_PROMPTS = "read_prompts"  # wait for the first tokens behind prompts
    READ_ROUND = "read_round"
    GO_ON = "go_on"  # enqueue a round behind results that are read
    END = "end"


S, M = StepState, StepMove
STEP_TRANSITIONS: dict[StepState, dict[StepMove, StepState]] = {
    S.LAUNCHED: {M.BEGIN: S.OPEN},
    S.OPEN: {M.ENQUEUE_PROMPTS: S.PROMPTS, M.ENQUEUE_ROUND: S.ROUND, M.END: S.OVER},
    S.PROMPTS: {M.ENQUEUE_ROUND: S.PROMPTS_AND_ROUND, M.READ_PROMPTS: S.READ},
    S.PROMPTS_AND_ROUND: {M.READ_PROMPTS: S.ROUND},
    S.ROUND: {M.READ_ROUND: S.READ},
    S.READ: {M.GO_ON: S.ROUND, M.END: S.OVER},
    S.OVER: {},
}
AHEAD = (M.BEGIN, M.ENQUEUE_PROMPTS, M.ENQUEUE_ROUND, M.END)
"""The moves of a step that waits for no result, the first possible one first."""
IN_TURN = (M.BEGIN, M.READ_PROMPTS, M.READ_ROUND, M.ENQUEUE_PROMPTS, M.END, M.ENQUEUE_ROUND, M.GO_ON)
"""The moves of the oldest step: what is in the stream is read first."""
_OF_ROUNDS = (M.ENQUEUE_ROUND, M.READ_ROUND, M.GO_ON)


@dataclass(slots=True)
class PendingRound:
    """A round in the stream: the values that the host will read when the round has passed."""

    accept_lens: Tensor
    failed: Tensor
    emitted: Tensor
    outputs: dict[str, Tensor]
    passed: torch.cuda.Event | None
    chosen: tuple[Tensor, ...] = ()  # by a budget: nodes, confidences


@dataclass(slots=True)
class RunningStep:
    """A launched step."""

    step: Step
    limit: int  # rounds after which it returns
    state: StepState = StepState.LAUNCHED
    pending: PendingRound | None = None
    prefill_tokens: PendingRound | None = None
    prefill: PrefillResult | None = None
    decoded: RoundRecord = field(default_factory=RoundRecord)
    round_ends_ns: list[int] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)

    @property
    def has_begun(self) -> bool:
        return self.state is not StepState.LAUNCHED

    @property
    def is_over(self) -> bool:
        return self.state is StepState.OVER

    def due(self, order: Sequence[StepMove], rounds: int) -> StepMove | None:
        """Return the first move of `order` that the step can make; None if there is none. `rounds`: how many rounds it
        may still run, for the caller."""
        possible = STEP_TRANSITIONS[self.state]
        return next((move for move in order if move in possible and self._may(move, rounds)), None)

    def _may(self, move: StepMove, rounds: int) -> bool:
        step = self.step
        if move is StepMove.ENQUEUE_PROMPTS:
            return step.prefill is not None
        if move is StepMove.END:
            is_read = step.prefill is None or self.prefill is not None
            return is_read and (step.decode is None or self.decoded.is_over(self.limit))
        return move not in _OF_ROUNDS or (step.decode is not None and rounds > 0)

    def moved(self, move: StepMove) -> None:
        """Note that the step has made this move."""
        self.state = STEP_TRANSITIONS[self.state][move]


def to_host(
    copied: Sequence[Tensor],
    outputs: dict[str, Tensor],
    packed: Tensor | None = None,
    num_rows: int | None = None,
) -> PendingRound:
    """Begin the copies to pinned memory, one of all that is `copied` (accept lengths, failures, emitted tokens, and
    what a budget has chosen) and one of each output; they are complete when the event has passed.

    `packed` is what `pack` makes of `copied`, if a graph has made it. Rows from `num_rows` on are padding.
    """
    passed = None
    outputs = {name: values[:num_rows] for name, values in outputs.items()}
    if copied[0].is_cuda:
        copied = unpacked(_pinned_copy(pack(copied) if packed is None else packed), copied)
        outputs = {name: _pinned_copy(values) for name, values in outputs.items()}
        passed = torch.cuda.Event()
        passed.record()
    accept_lens, failed, emitted, *chosen = (values[:num_rows] for values in copied)
    return PendingRound(accept_lens, failed, emitted, outputs, passed, tuple(chosen))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors as one, uint8 [n]:
    those of the widest elements first, so that all are aligned."""
    return torch.cat([tensors[i].reshape(-1).view(torch.uint8) for i in _widest_first(tensors)])


def unpacked(place: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of `place`, which `pack` has made of tensors of these shapes and dtypes, as such tensors."""
    order = _widest_first(tensors)
    parts = dict(zip(order, place.split([tensors[i].nbytes for i in order]), strict=True))
    return [parts[i].view(x.dtype).view(x.shape) for i, x in enumerate(tensors)]


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)


def _pinned_copy(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def arrived(pending: PendingRound) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Accept lengths, failures, emitted tokens and outputs; waits for the device if they are still on their way."""
    if pending.passed is not None:
        pending.passed.synchronize()
    outputs = {name: _as_numpy(values) for name, values in pending.outputs.items()}
    return pending.accept_lens.numpy(), pending.failed.numpy(), pending.emitted.numpy(), outputs


def chosen_of(pending: PendingRound) -> ChosenNodes | None:
    """Return what the device has chosen by a budget, of a round that has arrived."""
    if not pending.chosen:
        return None
    nodes, confidence = (values.numpy().copy() for values in pending.chosen)
    return ChosenNodes(nodes, confidence)


def _as_numpy(values: Tensor) -> np.ndarray:
    return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()


def result_of(running: RunningStep) -> StepResult:
    """Return the answer to a step that is over."""
    step = running.step
    decode = None if step.decode is None else running.decoded.result(step.max_rounds)
    ends = np.array(running.round_ends_ns, np.int64)
    return StepResult(step.step_id, running.prefill, decode, ends, tuple(running.failures))
