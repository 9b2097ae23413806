"""A process that answers questions of pages: each with messages of what is known so far, at the end one with the result
or the error."""

from __future__ import annotations

import os
import sys

from ..observe.children.child import incoming, run_child
from ..observe.children.wire import Wire

READY = {"ready": True}


def serve_questions(wire: Wire) -> None:
    """Answer one question after another. The second argument of the process is its niceness."""
    questions = incoming(wire)
    os.nice(int(sys.argv[2]))
    from .questions import ask

    wire.send(READY)
    while True:
        wire.send(ask(questions.get(), wire.send))


if __name__ == "__main__":
    run_child(serve_questions)
