"""What the command does about its surroundings: an output that cannot encode every character, a reader that stops,
an early Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports `head` closing a pipe early

_ASCII = {
    "–": "-", "—": "-", "−": "-", "…": ".", "×": "x", "·": "*", "≥": ">", "≤": "<", "→": ">", "µ": "u", "“": '"', "”": '"', "’": "'",
    **dict(zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True)),
}  # fmt: skip
"""One ASCII character for one other, so that tables stay aligned."""


def write_what_can_be_encoded() -> None:
    """Let standard output and standard error replace characters that their encoding lacks, by similar ones in ASCII."""
    import codecs

    codecs.register_error("foredraft", _replace)
    for stream in (sys.stdout, sys.stderr):
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        if encoding != "utf8" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="foredraft")


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement of the characters that cannot be encoded, and where to go on:
    an error handler of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end


@contextmanager
def interruption_ends_at_once() -> Iterator[None]:
    """Exit without a traceback on Ctrl-C while modules are imported:
    nothing has begun, and an import may hide the exception."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # such as a process in the background, which ignores it
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def is_unwritable(error: OSError) -> bool:
    """Return whether an error of standard output says that there is no room;
    files that commands write have errors of their own."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def is_broken_pipe(error: BaseException) -> bool:
    """Return whether the reader of the output has stopped reading;
    the command line's library turns that into an exit with code 1."""
    return isinstance(error, BrokenPipeError) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    )


def discard_output() -> None:
    """Write what standard output still holds to nowhere:
    the interpreter flushes it at exit, and would report the failure again."""
    if sys.__stdout__ is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
