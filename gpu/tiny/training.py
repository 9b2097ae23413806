"""The training loop: steps, learning rate, clipping of gradients, progress; Muon for the matrices, AdamW for the rest.

Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks") replaces each matrix's momentum by
the nearest orthogonal matrix, found with five steps of a Newton-Schulz iteration. On a small model it needs about half
of AdamW's tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    part: str, model: nn.Module, loss_of: LossOf, num_steps: int, on_progress: OnProgress, rates: LearningRates
) -> Trained:
    """Minimise `loss_of(step, done)`, which gives the mean loss of a batch and its number of tokens; done goes from 0
    to 1. The learning rates fall to zero at `num_steps`."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = _optimizer(model, rates)
    started_s = reported_s = time.monotonic()
    average, num_tokens = None, 0
    for step in range(num_steps):
        done = step / num_steps
        loss, num_new = loss_of(step, done)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, MAX_GRADIENT_NORM)
        optimizer.step(learning_rate_scale(done))
        average = loss.detach() if average is None else average.lerp_(loss.detach(), 1 - LOSS_MEMORY)
        num_tokens += num_new
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_EVERY_S or step + 1 == num_steps:
            reported_s, elapsed_s = now_s, now_s - started_s
            left_s = elapsed_s / (step + 1) * (num_steps - step - 1)
            on_progress(
                TrainingProgress(part, step + 1, num_steps, float(average), num_tokens / max(elapsed_s, 1e-9), left_s)
            )
    assert average is not None, "a part trains at least one step"
    return Trained(num_steps, num_tokens, float(average), time.monotonic() - started_s)


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


def fast_products() -> torch.autocast:
    """Return a context in which matrix products are in bfloat16 where this CPU is faster with it;
    weights, gradients and losses stay float32."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return torch.autocast("cpu", torch.bfloat16, enabled=probe is not None and bool(probe()))


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
        self._adam = torch.optim.AdamW(self.others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

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
