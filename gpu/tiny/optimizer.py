"""Muon for the matrices, AdamW for the rest: training has few steps.

Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks") replaces each matrix's momentum by the nearest
orthogonal matrix, found with five steps of a Newton-Schulz iteration. On a small model it needs about half of AdamW's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic iteration, chosen by its authors for the slope at zero; singular values end between 0.7 and 1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Optimizer:
    """`matrices` learn with Muon, `others` (embeddings, norms, output layers) with AdamW; gradients are cleared by `step`."""

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
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x.T if tall else x


def learning_rate_scale(progress: float, warm_up: float = 0.03, decay: float = 0.5) -> float:
    """Return a scale that warms up, holds, then falls linearly to zero over the last `decay` of the training; progress from 0 to 1."""
    if progress < warm_up:
        return (progress + 1e-3) / (warm_up + 1e-3)
    return min(1.0, max(1.0 - progress, 0.0) / decay)
