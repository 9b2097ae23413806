"""Runs checks side by side, in processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def side_by_side(run: Callable[[Item], Outcome], items: Sequence[Item]) -> Iterator[Outcome]:
    """Yield what `run` returns of each, in their order.
    There are as many processes as cores; a component is one core's work."""
    # The processes have what this one has imported: components may be known to it alone.
    with get_context("fork").Pool(
        min(os.cpu_count() or 1, len(items)), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ) as pool:
        yield from pool.imap(run, items)
