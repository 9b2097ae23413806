"""A limit on how long a component may take: a call that does not return is interrupted and reported, not waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Hanging(BaseException):
    """Raised inside a component that has taken too long. No Exception, so that a component's own handlers let it pass."""


def can_interrupt() -> bool:
    """Alarms need the main thread of a system that has them. Elsewhere a component that hangs is waited for."""
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


@contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise Hanging in the body once it has taken `limit_s` seconds, and again from time to time if it goes on."""
    if not can_interrupt():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hanging

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
