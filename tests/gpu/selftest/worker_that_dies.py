"""Processes of a self-test whose steps do what steps on a broken device do."""

from __future__ import annotations

import os
import signal
import sys
import time

from foredraft.gpu.selftest.steps import SelftestStep, StepFinding, serve_steps

FIRST: list[int] = []


def passes() -> StepFinding:
    return StepFinding("fine", ({"process": FIRST[0]},))


def prints() -> StepFinding:
    print("a library's own words")
    return passes()


def fails() -> StepFinding:
    raise ValueError("off by one")


def dies() -> StepFinding:
    print("about to die", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return passes()


def hangs() -> StepFinding:
    time.sleep(600)
    return passes()


def unreadable() -> StepFinding:
    return StepFinding("fine", ({"share": float("nan")},))


def serve(first, answer) -> None:
    FIRST.append(first)
    spoilt = []
    named = {"prints": prints, "fails": fails, "spoils": lambda: spoilt.append(1) or fails(), "dies": dies}
    named |= {"hangs": hangs, "unreadable": unreadable, "passes": passes}
    serve_steps([SelftestStep("part", name, run) for name, run in named.items()], first, answer, lambda: bool(spoilt))


def ends(first, answer) -> None:
    """Answer nothing."""


def sleep(first, answer) -> None:
    time.sleep(60)
