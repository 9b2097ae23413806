"""A process of a self-test whose steps do what steps on a broken device do: `python worker_that_dies.py FIRST`."""

from __future__ import annotations

import os
import signal
import sys
import time

from foretoken.gpu.selftest.steps import Finding, Step, serve_steps

FIRST = int(sys.argv[1])


def passes() -> Finding:
    return Finding("fine", ({"process": FIRST},))


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


spoilt = []
steps = [Step("part", name, run) for name, run in {"prints": prints, "fails": fails}.items()]
steps += [Step("part", "spoils", lambda: spoilt.append(1) or fails())]
steps += [Step("part", name, run) for name, run in {"dies": dies, "hangs": hangs}.items()]
steps += [Step("part", name, run) for name, run in {"unreadable": unreadable, "passes": passes}.items()]
serve_steps(steps, FIRST, lambda: bool(spoilt))
