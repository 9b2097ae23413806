"""Messages between the parent and a worker: JSON objects over a stream socket, each behind its length; and what every
worker's process does around them."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...core.errors import ForedraftError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 16


class ControlError(ForedraftError):
    """Bytes on a control socket that are no frame."""


class ControlSocket:
    """One end of the socket. `send` and `send_soon` may be called by several threads, `receive` by one;
    an end uses one way to send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._backlog = bytearray()
        self._has_backlog = threading.Event()
        self._sender: threading.Thread | None = None
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, and wait until the socket's buffer has it.
        Raises OSError if the other end is closed or does not read."""
        with self._sending:
            self._socket.sendall(_frame(message))

    def send_soon(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting: if the other end does not read for a while, a thread sends the rest."""
        frame = _frame(message)
        with self._sending:
            if not self._backlog:
                try:
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the other end is closed; the next `receive` reports it
            if frame:
                self._backlog += frame
                self._has_backlog.set()
                if self._sender is None:
                    self._sender = threading.Thread(target=self._send_backlog, name="control backlog", daemon=True)
                    self._sender.start()

    def _send_backlog(self) -> None:
        while self._has_backlog.wait():
            with self._sending:
                part = bytes(self._backlog[:_READ_BYTES])
            try:
                sent = self._socket.send(part)
            except OSError:
                return
            with self._sending:
                del self._backlog[:sent]
                if not self._backlog:
                    self._has_backlog.clear()

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for bytes and return the messages that they complete, perhaps none. None: the other end is closed."""
        try:
            read = self._socket.recv(_READ_BYTES)
        except ConnectionError:
            return None
        if not read:
            return None
        self._buffer += read
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ControlError(f"a control message of {size} bytes, at most {MAX_FRAME_BYTES} are taken")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            except ValueError as error:
                raise ControlError(f"a control message that is no JSON: {error}") from None
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()


def _frame(message: Mapping[str, Any]) -> bytes:
    content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return _LENGTH.pack(len(content)) + content


def run_child(serve: Callable[[ControlSocket], None]) -> NoReturn:
    """Serve the parent over the socket whose number is the first argument, and end this process.

    A terminal's Ctrl-C, and a service manager's SIGTERM, reach the whole group of processes. The parent handles them
    and ends the requests in order.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = 0
    try:
        serve(ControlSocket(socket.socket(fileno=int(sys.argv[1]))))
    except BaseException:
        traceback.print_exc()
        code = 1
    # Threads wait in the library for peers that may be gone; a usual end would wait for them.
    sys.stderr.flush()
    os._exit(code)
