"""A limit on how long a component may take: a call that does not return is interrupted and reported, not waited for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MOSTLY, PATIENCE = 0.9, 5
"""A component that computes is interrupted at its limit; one that waits, or that a busy machine lets wait, at so many times that."""


class Hanging(BaseException):
    """Raised inside a component that has taken too long. No Exception, so that a component's own handlers let it pass."""


def can_interrupt() -> bool:
    """Return whether alarms work: they need the main thread of a system that has them. Elsewhere a component that hangs is waited for."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise Hanging in the body once it has taken `limit_s` seconds, and again from time to time if it goes on.

    Of these seconds it must have computed for nine in ten (`MOSTLY`), else it gets `PATIENCE` times as many: where many processes share a
    core, time passes in which nothing of it runs. What other threads of the process compute is not counted.
    """
    if not can_interrupt():
        yield
        return

    computed_s, begin_s = time.thread_time(), time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        has_computed = time.thread_time() - computed_s >= MOSTLY * limit_s
        if has_computed or time.monotonic() - begin_s >= PATIENCE * limit_s:
            raise Hanging

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
