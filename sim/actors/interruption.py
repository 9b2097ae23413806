"""Signals that end a run wait until the event in progress is over, so that engines, metrics and logs agree
with each other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Hold back the first SIGINT or SIGTERM. Yields a function that calls the handler of the signal, if one came.

    The second signal is handled at once. Signals without a Python handler are not held back. Outside the main thread no
    signal is.
    """
    held: list[int] = []
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    if threading.current_thread() is threading.main_thread():
        found = ((number, signal.getsignal(number)) for number in SIGNALS)
        handlers = {number: handler for number, handler in found if callable(handler)}

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            handlers[number](number, frame)
        held.append(number)

    def handle_held() -> None:
        if held:
            handlers[held[0]](held[0], None)

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield handle_held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
