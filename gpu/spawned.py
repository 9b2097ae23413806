"""Starts processes for functions of this package that do not import from the working directory."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext


@contextmanager
def spawning() -> Iterator[SpawnContext]:
    """Yield what starts fresh processes; they must be started within.

    Python begins such a process with the working directory on its path, before it hands it the path of this one. A
    file there with the name of a standard module would be imported. The variable is `python -P` for processes that
    are not started with arguments of ours.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
