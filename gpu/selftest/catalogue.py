"""All steps of a self-test, in the order of what would fail first."""

from __future__ import annotations

from .bookkeeping import bookkeeping_steps
from .context import Context
from .forward import forward_steps
from .machine import machine_steps
from .sessions import session_steps
from .speed import speed_steps
from .steps import Step


def catalogue(context: Context) -> list[Step]:
    """Return the steps for the context's device; those that need a GPU are among them on a CPU, too."""
    parts = (machine_steps, forward_steps, bookkeeping_steps, session_steps, speed_steps)
    return [step for steps_of in parts for step in steps_of(context)]
