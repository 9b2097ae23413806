"""A child process: what its parent does with it, and what every child does.

The two are connected by a wire (`wire.py`) and by nothing else. A child takes no signals of a terminal: its parent
takes them, and ends it. When the parent ends, in whatever way, the wire is closed, and that ends the child at once.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, NoReturn

from .wire import Wire

LAST_WORDS = 2000
"""Characters that are kept of what a child has written."""
IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Signals that children leave to their parent."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The environment of a child beside which others compute."""


class Child:
    """A process that runs `python -P -m module`, and this end of its wire.

    What it writes to standard output and standard error comes out at this process's standard error. With `keeps_words`
    it is kept, for `last_words`. Raises OSError if it cannot be started.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, keeps_words: bool = False
    ) -> None:
        ours, theirs = socket.socketpair()
        # -P: nothing is imported from the working directory
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments]
        self._words: IO[bytes] | None = tempfile.TemporaryFile() if keeps_words else None  # noqa: SIM115 (see `close`)
        out = self._words or (subprocess.DEVNULL if sys.stderr is None else 2)
        inherited: dict[str, Any] = {"pass_fds": [theirs.fileno()]}
        if os.name == "nt":
            theirs.set_inheritable(True)
            inherited = {"close_fds": False}
        try:
            with _signals_held_back():
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    env={**os.environ, **(environment or {})}, **inherited,
                )  # fmt: skip
        except OSError:
            ours.close()
            if self._words is not None:
                self._words.close()
            raise
        finally:
            theirs.close()
        self.wire: Wire = Wire(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What it has ended with: below 0 the number of a signal. None while it runs."""
        return self._process.poll()

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message. That the child is dead is found when its wire is read; one that does not read is killed."""
        try:
            self.wire.send(message)
        except OSError:
            self.kill()

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until it has ended, or for so long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def close(self) -> str:
        """Kill it if it runs, and close the wire. Returns how it has ended: "exit code 1", "killed by SIGKILL" …"""
        self.kill()
        code = self._process.wait()
        self.wire.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        """Return the end of what it has written, once."""
        assert self._words is not None, "its words are kept"
        self._words.seek(0)
        words = self._words.read().decode("utf-8", "replace")[-LAST_WORDS:].strip()
        self._words.close()
        return words


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Let a child begin with the signals blocked that it ignores later: a Ctrl-C while it imports would end it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the child -----------------------------------------------------------------------------------------------------


def run_child(serve: Callable[[Wire], None]) -> NoReturn:
    """Serve the parent over the wire, whose number is the first argument, and end this process.

    A terminal's Ctrl-C, and a service manager's SIGTERM, reach the whole group of processes. The parent handles them.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    code = 0
    try:
        serve(Wire(socket.socket(fileno=int(sys.argv[1]))))
    except BaseException:
        traceback.print_exc()
        code = 1
    # Threads may wait in libraries for processes that are gone; a usual end would wait for them.
    sys.stderr.flush()
    os._exit(code)


def incoming(wire: Wire) -> queue.SimpleQueue[dict[str, Any]]:
    """Return the parent's messages as they come. When the wire is closed, this process ends, whatever it does."""
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        while (received := wire.receive()) is not None:
            for message in received:
                messages.put(message)
        os._exit(0)

    threading.Thread(target=read, name="parent's messages", daemon=True).start()
    return messages
