"""Processes of a self-test whose steps do what steps on a broken device do."""

from __future__ import annotations

import os
import signal
import sys
import time

from foredraft.gpu.selftest.steps import Finding, Step, serve_steps

FIRST: list[int] = []


def passes() -> Finding:
    return Finding("fine", ({"process": FIRST[0]},))


def prints() -> Finding:
    print("a library's own words")
    return passes()


def fails() -> Finding:
    raise ValueError("off by one")


def dies() -> Finding:
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return passes()


def hangs() -> Finding:
    time.sleep(600)
    return passes()


def unreadable() -> Finding:
    return Finding("fine", ({"share": float("nan")},))


def serve(first, answer) -> None:
    FIRST.append(first)
    spoilt = []
    named = {"prints": prints, "fails": fails, "spoils": lambda: spoilt.append(1) or fails(), "dies": dies}
    named |= {"hangs": hangs, "unreadable": unreadable, "passes": passes}
    serve_steps([Step("part", name, run) for name, run in named.items()], first, answer, lambda: bool(spoilt))


def ends(first, answer) -> None:
    """Answer nothing."""


def sleep(first, answer) -> None:
    time.sleep(60)
