"""A launched step, and the copies of its results to the host:
begun when they are computed, awaited when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...core.contract.step import PrefillResult, RoundRecord, Step, StepResult


@dataclass(slots=True)
class PendingRound:
    """A round in the stream: the values that the host will read when the round has passed."""

    accept_lens: Tensor
    failed: Tensor
    emitted: Tensor
    outputs: dict[str, Tensor]
    passed: torch.cuda.Event | None


@dataclass(slots=True)
class RunningStep:
    """A launched step."""

    step: Step
    limit: int  # rounds after which it returns
    started: bool = False
    pending: PendingRound | None = None
    prefill_tokens: PendingRound | None = None
    prefill: PrefillResult | None = None
    decoded: RoundRecord = field(default_factory=RoundRecord)
    round_ends_ns: list[int] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        if not self.started:
            return False
        if self.step.decode is None:
            return self.step.prefill is None or self.prefill is not None
        return self.decoded.is_over(self.limit)


def to_host(
    accept_lens: Tensor,
    failed: Tensor,
    emitted: Tensor,
    outputs: dict[str, Tensor],
    packed: Tensor | None = None,
    num_rows: int | None = None,
) -> PendingRound:
    """Begin the copies to pinned memory, one of all three and one of each output; they are complete when the event has
    passed.

    `packed` is what `pack` makes of the three, if a graph has made it. Rows from `num_rows` on are padding.
    """
    passed = None
    outputs = {name: values[:num_rows] for name, values in outputs.items()}
    if accept_lens.is_cuda:
        three = (accept_lens, failed, emitted)
        copy = _pinned_copy(pack(three) if packed is None else packed)
        accept_lens, failed, emitted = unpacked(copy, three)
        outputs = {name: _pinned_copy(values) for name, values in outputs.items()}
        passed = torch.cuda.Event()
        passed.record()
    return PendingRound(accept_lens[:num_rows], failed[:num_rows], emitted[:num_rows], outputs, passed)


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


def _as_numpy(values: Tensor) -> np.ndarray:
    return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()


def result_of(running: RunningStep) -> StepResult:
    """Return the answer to a step that is over."""
    step = running.step
    decode = None if step.decode is None else running.decoded.result(step.max_rounds)
    ends = np.array(running.round_ends_ns, np.int64)
    return StepResult(step.step_id, running.prefill, decode, ends, tuple(running.failures))
