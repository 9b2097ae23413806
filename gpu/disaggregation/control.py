"""What the parent and a worker say to each other: JSON objects over a stream socket, each behind its length."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from ...core.errors import ForetokenError

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 16


class ControlError(ForetokenError):
    """Bytes on a control socket that are no frame."""


class ControlSocket:
    """One end. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError if nobody is there to read it."""
        content = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> list[dict[str, Any]] | None:
        """Waits for bytes; the messages that they complete, perhaps none. None: the other end is closed."""
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
            messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()
