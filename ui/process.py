"""A process that answers questions of pages, a line of JSON for each: first lines with what is known so far, at the end
one with the result or the error.

It leads a group of processes of its own, which it ends when its input ends: no process outlives the server.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any

from ..core.parsing import parse_json

READY = {"ready": True}


def serve_questions(lines: queue.SimpleQueue[str], answers: IO[str]) -> None:
    """Answer one question after another."""
    from .questions import ask

    def write(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, allow_nan=False) + "\n")
        answers.flush()

    write(READY)
    while True:
        write(ask(parse_json(lines.get()), write))


def _read(source: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Pass on the lines of the server; end the group of processes when the server has gone, in the middle of a run,
    too."""
    for line in source:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve on standard input and output until the input ends. The first argument is the niceness of the process."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    os.nice(int(sys.argv[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, lines), daemon=True).start()
    serve_questions(lines, answers)


if __name__ == "__main__":
    main()
