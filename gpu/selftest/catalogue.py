"""All steps of a self-test, in the order in which problems usually appear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .bookkeeping import bookkeeping_steps
from .forward import forward_steps
from .machine import machine_steps
from .sessions import session_steps
from .speed import speed_steps
from .steps import Context, Outcome, Step, serve_steps


def catalogue(context: Context) -> list[Step]:
    """Return the steps for the context's device; those that need a GPU are among them on a CPU, too."""
    parts = (machine_steps, forward_steps, bookkeeping_steps, session_steps, speed_steps)
    return [step for steps_of in parts for step in steps_of(context)]


def serve_catalogue(device: str, directory: Path, first: int, answer: Callable[[Outcome], None]) -> None:
    """Run the steps from number `first` on, in a process of their own:
    up to one that leaves a GPU which no longer answers."""

    def is_spoilt() -> bool:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    serve_steps(catalogue(Context(device, directory)), first, answer, is_spoilt)
