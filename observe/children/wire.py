"""Messages between a process and its child: JSON objects over a stream socket, each behind its length."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from ...core.errors import ForedraftError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 16


class WireError(ForedraftError):
    """Bytes on a wire that are no message."""


class Wire:
    """One end of the wire. `send` and `send_soon` may be called by several threads, `receive` by one;
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

    def set_send_limit(self, limit_s: float) -> None:
        """Let `send` raise TimeoutError once the other end has not read for so long."""
        self._socket.settimeout(limit_s)

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
                    self._sender = threading.Thread(target=self._send_backlog, name="messages to send", daemon=True)
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
                raise WireError(f"a message of {size} bytes, at most {MAX_FRAME_BYTES} are taken")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            except ValueError as error:
                raise WireError(f"a message that is no JSON: {error}") from None
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()


def _frame(message: Mapping[str, Any]) -> bytes:
    content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    return _LENGTH.pack(len(content)) + content
