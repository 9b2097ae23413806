"""How a server takes its address and its connections: uvicorn's protocol within the limits of clients."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
import sys
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from starlette.types import ASGIApp

from ...core.errors import ConfigError
from .errors import ApiError
from .limits import Limits

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

TRANSPORT = "foredraft.transport"
"""Where in a scope the server puts the connection's transport, if it encodes a streamed body in HTTP's chunks."""
MOST_HEAD_BYTES = 1 << 16
"""Of a request's line and headers together."""
FLUSH_S = 2.0
"""How long the last bytes of aborted replies have to reach the clients."""


def bind(host: str, port: int, option: str = "--host, --port") -> socket.socket:
    """Take an address before anything dear is loaded or written; port 0: any free one.
    Raises ConfigError, which names `option`, if it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        taken = socket.socket(family, kind, protocol)
        try:
            if sys.platform != "win32":
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
        except OSError:
            taken.close()
            raise
    except (OSError, UnicodeError) as error:
        raise cannot_listen(f"{host} port {port}", error, option) from None
    return taken


def bind_path(path: Path) -> socket.socket:
    """Take a Unix socket; one that a server has left behind is replaced. Raises ConfigError if it cannot be had."""
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and taken.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        taken.bind(str(path))
    except OSError as error:
        taken.close()
        raise cannot_listen(str(path), error, "--uds") from None
    return taken


def address_of(listener: socket.socket, scheme: str) -> str:
    """Return the address of a listener as clients write it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def cannot_listen(address: str, error: Exception, option: str = "--host, --port") -> ConfigError:
    """Return the error of an address that cannot be had."""
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return ConfigError.of("<arguments>", option, f"cannot listen on {address}: {reason}")


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Raise ConfigError if no HTTPS server can be made of these files."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        files = certificate if key is None else f"{certificate} with {key}"
        message = f"{files} cannot be used: {(error.strerror or str(error)).lower()}"
        raise ConfigError.of("<arguments>", "--ssl-certfile, --ssl-keyfile", message) from None


class BoundedHeads(HttpProtocol):
    """Closes a connection when the head of a request does not come within `stall_s`; answers 431 and closes it when a
    head is longer than MOST_HEAD_BYTES."""

    stall_s: float

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_bytes = 0  # of the head that is parsed
        self._unparsed_bytes = 0  # that came since the last head was whole
        self._late: asyncio.TimerHandle | None = None

    def on_message_begin(self) -> None:
        """Begin a request (of httptools' parser): its answer may be written to the transport."""
        super().on_message_begin()
        self._head_bytes = 0
        cast(dict[str, Any], self.scope)[TRANSPORT] = self.transport  # a key of ours, which the protocol's type lacks

    def on_url(self, url: bytes) -> None:
        """Take a part of a request's line (of httptools' parser)."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header (of httptools' parser)."""
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEAD_BYTES:
            raise ValueError("the head is too long")  # the parser makes `send_400_response` of it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # of a stream
        super().connection_made(transport)
        self._watch_head(0)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head(len(data))

    def connection_lost(self, error: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(error)

    def _watch_head(self, size: int) -> None:
        """Note that bytes came. They belong to a head unless a request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_has_come()
            return
        self._unparsed_bytes += size
        if self._unparsed_bytes > MOST_HEAD_BYTES:  # a header without an end, which the parser keeps to itself
            self._refuse(_head_is_too_large())
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self.stall_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer something that is no HTTP, or has too long a head."""
        is_long = self._head_bytes > MOST_HEAD_BYTES
        self._refuse(_head_is_too_large() if is_long else ApiError(400, "the request is no HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        self._head_has_come()
        if not self.transport.is_closing():
            body, reason = error.to_bytes(), HTTPStatus(error.status).phrase
            head = (
                f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            )
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.close()

    def _head_has_come(self) -> None:
        self._unparsed_bytes = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _head_is_too_large() -> ApiError:
    return ApiError(431, f"the head of the request is larger than {MOST_HEAD_BYTES} bytes", code="head_too_large")


def http_config(
    app: ASGIApp, limits: Limits, drain_s: float, certificate: tuple[Path, Path | None] | None = None
) -> uvicorn.Config:
    """Return how uvicorn serves `app` within `limits`. drain_s: seconds that replies have to end after a signal.
    certificate: the files of certificate and key, if HTTPS is to be served."""

    class Heads(BoundedHeads):
        stall_s = limits.stall_s

    return uvicorn.Config(
        app,
        http=Heads,
        # sends what is written at once; uvloop only at the end of its turn, behind all else that is ready
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=limits.max_connections,
        timeout_graceful_shutdown=math.ceil(drain_s + FLUSH_S) if math.isfinite(drain_s) else None,
        timeout_keep_alive=max(1, round(limits.stall_s)),
        ssl_certfile=None if certificate is None else certificate[0],
        ssl_keyfile=None if certificate is None else certificate[1],
    )


def port_of(scope: Mapping[str, Any]) -> int:
    """Return the port to which a request came; 0 for a Unix socket."""
    _, port = scope.get("server") or ("", 0)
    return port or 0
