"""The training loop: steps, learning rate, clipping of gradients, progress; Muon for the matrices, AdamW for the rest.

Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks") replaces each matrix's momentum by
the nearest orthogonal matrix, found with five steps of a Newton-Schulz iteration. On a small model it needs about half
of AdamW's tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

# Seconds that each part of the size tiny would take without a budget, so that within one all parts shrink alike.
# Measured with `foredraft tiny --time-budget-s 75` on a 2-core x86-64 machine while that bounded the trainings alone;
# these are scaled to all steps.
WHOLE_S = {
    "data": 8.0, "target": 475.0, "own texts": 41.0, "draft": 61.0, "eagle3": 97.0, "multi_layer_eagle": 80.0,
    "held-out loss": 4.0, "held-out texts": 11.0, "measurement": 15.0,
}  # fmt: skip


class WorkClock:
    """Counts the seconds that this process has worked since the clock was made. Other processes slow the work down in
    wall time, but not by this clock, so a budget buys as much training on a busy machine as on a quiet one.

    On a CPU, work is the processor time of the thread that reads the clock. While other threads do more (those of the
    tokenizer, for which that thread waits), it is the time of all threads over the number of cores. A GPU works while
    the process waits, so there the clock counts wall time.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._is_wall = device.partition(":")[0] != "cpu"
        affinity = getattr(os, "sched_getaffinity", None)
        self._cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._worked_s = 0.0
        self._read_s = self._read()

    def now_s(self) -> float:
        """Return the seconds of work so far. The more often this is called, the more exact they are."""
        before, self._read_s = self._read_s, self._read()
        self._worked_s += max(now - then for now, then in zip(self._read_s, before, strict=True))
        return self._worked_s

    def _read(self) -> tuple[float, ...]:
        return (time.monotonic(),) if self._is_wall else (time.thread_time(), time.process_time() / self._cores)


class TimeBudget:
    """Shares `seconds` of a clock among `parts`, in their order; None: there is no limit.

    What a part saves or overdraws is shared by all parts behind it.
    """

    def __init__(self, seconds: float | None, clock: WorkClock, parts: Sequence[str]) -> None:
        self.clock = clock
        self._ends_s = math.inf if seconds is None else clock.now_s() + seconds
        self._left = list(parts)
        self._begun_s: dict[str, float] = {}
        self.seconds: dict[str, float] = {}  # of work, that each ended part took
        self.cuts: list[str] = []  # what was left out to keep within the budget, in words

    @property
    def is_limited(self) -> bool:
        return self._ends_s < math.inf

    def begin(self, part: str) -> float:
        """End the part before and return the seconds that `part` may take; math.inf without a budget."""
        self.end()
        now_s = self.clock.now_s()
        share = WHOLE_S[part] / sum(WHOLE_S[one] for one in self._left)
        self._left.remove(part)
        self._begun_s = {part: now_s}
        return max(self._ends_s - now_s, 0.0) * share

    def end(self) -> None:
        """Note how long the part took that began last."""
        for part, begun_s in self._begun_s.items():
            self.seconds[part] = self.clock.now_s() - begun_s
        self._begun_s = {}

    def cut(self, what: str, done: int, whole: int, unit: str) -> None:
        """Note that only a piece of `what` was made, if so."""
        if done < whole:
            self.cuts.append(f"{what}: {done:,} of {whole:,} {unit}")


def while_they_fit(items: Iterable[T], seconds: float, clock: WorkClock) -> Iterator[T]:
    """Yield the first item, and further ones as long as another one ends within `seconds` at the pace so far."""
    begun_s = clock.now_s()
    for number, item in enumerate(items):
        if number and (clock.now_s() - begun_s) * (number + 1) / number > seconds:
            return
        yield item


MAX_GRADIENT_NORM = 1.0
REPORT_EVERY_S = 0.2
LOSS_MEMORY = 0.95  # of the moving average that is shown and recorded


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Highest learning rates: of the matrices between hidden states, and of all other parameters."""

    matrices: float
    others: float


LANGUAGE_MODEL_RATES = LearningRates(0.01, 0.02)  # tokens are rare: each step of their embeddings must count
HEAD_RATES = LearningRates(0.02, 0.004)  # a head's embeddings are the target's already


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of one part."""

    part: str
    step: int
    num_steps: int
    loss: float | None  # nats per token, moving average; None before the first step and for parts that learn nothing
    tokens_per_s: float
    seconds_left: float  # of this part


OnProgress = Callable[[TrainingProgress], None]
LossOf = Callable[[int, float], tuple[Tensor, int]]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of training a part."""

    num_steps: int
    num_tokens: int
    loss: float  # moving average at the end, nats per token
    seconds: float


def train(
    part: str,
    model: nn.Module,
    loss_of: LossOf,
    num_steps: int,
    on_progress: OnProgress,
    rates: LearningRates,
    clock: WorkClock,
    budget_s: float = math.inf,
) -> Trained:
    """Minimise `loss_of(step, done)`, which gives the mean loss of a batch and its number of tokens; done goes from 0
    to 1.

    The learning rates fall to zero at `num_steps`, or, if that comes first, when `budget_s` seconds of the clock have
    passed. One step is always made. Progress is told in wall time.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = _optimizer(model, rates)
    started_s = reported_s = time.monotonic()
    begun_s, worked_s = clock.now_s(), 0.0
    average, num_tokens, step = None, 0, 0
    while step < num_steps:
        done = step / num_steps
        if step > 0:
            if worked_s * (step + 1) / step > budget_s:
                break  # at the pace so far, another step would not end in time
            done = max(done, worked_s / budget_s)
        loss, num_new = loss_of(step, done)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimizer.step(learning_rate_scale(done))
        average = loss.detach() if average is None else average.lerp_(loss.detach(), 1 - LOSS_MEMORY)
        num_tokens += num_new
        step += 1
        now_s, worked_s = time.monotonic(), clock.now_s() - begun_s
        if now_s - reported_s >= REPORT_EVERY_S or step == num_steps:
            reported_s, elapsed_s = now_s, now_s - started_s
            left_s = max(min(worked_s / step * (num_steps - step), budget_s - worked_s), 0.0)
            left_s *= elapsed_s / worked_s if worked_s else 1.0
            on_progress(TrainingProgress(part, step, num_steps, float(average), num_tokens / elapsed_s, left_s))
    assert average is not None, "a part trains at least one step"
    return Trained(step, num_tokens, float(average), time.monotonic() - started_s)


def _optimizer(model: nn.Module, rates: LearningRates) -> Optimizer:
    """Give matrices between hidden states to Muon; embeddings, output layers and vectors to AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        by_token = "embed" in name or "lm_head" in name
        (matrices if weight.ndim == 2 and not by_token else others).append(weight)
    return Optimizer(matrices, others, matrix_lr=rates.matrices, lr=rates.others)


def fast_products(device: torch.device) -> torch.autocast:
    """Return a context in which matrix products are in bfloat16 where that is faster;
    weights, gradients and losses stay float32."""
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
        fast = probe is not None and bool(probe())
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


# Coefficients of the quintic iteration, chosen by its authors for the slope at zero; singular values end between 0.7
# and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
WARM_UP = 0.03  # share of the training


class Optimizer:
    """`matrices` learn with Muon, `others` (embeddings, norms, output layers) with AdamW;
    gradients are cleared by `step`."""

    def __init__(self, matrices: Iterable[Tensor], others: Iterable[Tensor], *, matrix_lr: float, lr: float) -> None:
        self.matrices = tuple(matrices)
        self.others = tuple(others)
        self._matrix_lr = matrix_lr
        self._momenta = [torch.zeros_like(weight) for weight in self.matrices]
        self._lr = lr
        fused = all(weight.is_cuda for weight in self.others)
        self._adam = torch.optim.AdamW(self.others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Take one step with `scale` times the learning rates."""
        for group in self._adam.param_groups:
            group["lr"] = self._lr * scale
        self._adam.step()
        for weight, momentum in zip(self.matrices, self._momenta, strict=True):
            assert weight.grad is not None, "every weight that is trained has a gradient"
            momentum.lerp_(weight.grad, 0.05)
            update = orthogonalised(weight.grad.lerp(momentum, 0.95))  # Nesterov
            rows, columns = weight.shape
            weight.add_(update, alpha=-self._matrix_lr * scale * math.sqrt(max(1.0, rows / columns)))
        for weight in (*self.matrices, *self.others):
            weight.grad = None


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return the matrix with all singular values near 1, [rows, columns]."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x.T if tall else x


def learning_rate_scale(progress: float) -> float:
    """Return a scale that warms up, holds, then falls linearly to zero over the second half of the training;
    progress from 0 to 1."""
    if progress < WARM_UP:
        return (progress + 1e-3) / (WARM_UP + 1e-3)
    return min(1.0, max(1.0 - progress, 0.0) / 0.5)
