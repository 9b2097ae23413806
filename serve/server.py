"""The process: uvicorn around the application, and the handling of signals.

SIGTERM and SIGINT   drain: new requests get 503, those that are served end; a second one gives them up
SIGHUP               the adaptive table is read again; one that is invalid changes nothing
"""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from fastapi import FastAPI

from ..core.errors import ConfigError, ForedraftError
from ..observe.input_files import read_text
from .answers.answer import TRANSPORT
from .errors import ApiError
from .frontend import Frontend
from .requests.faults import Admin

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

SWITCH_INTERVAL_S = 0.0002
"""How long a thread may keep the interpreter while another waits for it: with Python's 5 ms, so long would each call of
the event loop into the system take while the scheduler computes."""
COLLECT_AFTER = (50_000, 20, 50)
"""When Python looks for reference cycles: serving makes hardly any, and a look through all objects lasts longer than
a round's events."""
MOST_HEAD_BYTES = 1 << 16
"""Of a request's line and headers together."""
FLUSH_S = 2.0
"""How long the last bytes of aborted replies have to reach the clients."""


def bind(host: str, port: int) -> socket.socket:
    """Take an address before anything dear is loaded or written; port 0: any free one.
    Raises ConfigError if it cannot be had."""
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
        raise _cannot_listen(host, port, error) from None
    return taken


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return ConfigError.of("<arguments>", "--host, --port", f"cannot listen on {host} port {port}: {reason}")


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


class Server(uvicorn.Server):
    """Serves `app` on what `bind` has taken until a signal ends it; `address` is where, once it has begun.

    `drain_s`: seconds after the first signal until the remaining replies are aborted. `table`: the file of the adaptive
    configuration, if any. `admin`: another application, on another port.
    """

    def __init__(
        self,
        app: FastAPI,
        frontend: Frontend,
        *,
        listener: socket.socket,
        drain_s: float,
        table: Path | None = None,
        admin: Admin | None = None,
    ) -> None:
        limits = frontend.limits

        class Heads(BoundedHeads):
            stall_s = limits.stall_s

        config = uvicorn.Config(
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
        )
        super().__init__(config)
        self.address: str = ""
        self.should_exit: bool = False
        self._frontend = frontend
        self._table = table
        self._admin = admin
        self._admin_server: uvicorn.Server | None = None
        self._listener = listener
        self._drain_s = drain_s
        self._drain_ends_s = math.inf

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self._listener:
            super().run(sockets=[self._listener])

    def handle_exit(self, sig: int, frame: object) -> None:
        """Take a signal that ends the server. It goes on listening while it drains, so that `/ready` and `/metrics`
        tell of it."""
        if self._frontend.is_draining:
            self.should_exit = self.force_exit = True
        self._frontend.is_draining = True
        self._drain_ends_s = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server is to stop listening; called ten times a second."""
        if self._frontend.is_draining and (self._frontend.is_idle or time.monotonic() >= self._drain_ends_s):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        host, port = self._listener.getsockname()[:2]
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has begun to listen meanwhile
            await self.lifespan.shutdown()
            raise _cannot_listen(host, port, error) from None
        if self.should_exit:
            return
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()  # what stands at the start is not looked through again and again
        gc.set_threshold(*COLLECT_AFTER)
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        if self._admin is not None:
            await self._start_admin(self._admin.app, self._admin.listener)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._frontend.tell(f"{self._frontend.body.name} is served on {self.address}")

    async def _start_admin(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False, ws="none")
        config.load()
        self._admin_server = server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup([listener])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left_s = min(self._drain_s, max(self._drain_ends_s - time.monotonic(), 0.0))
        drained = asyncio.get_running_loop().call_later(left_s, self._give_up)
        await super().shutdown(sockets)
        drained.cancel()
        if self._admin_server is not None and self._admin is not None:
            await self._admin_server.shutdown([self._admin.listener])
        self._give_up()
        await self._frontend.stop()  # also where uvicorn was forced and left the lifespan out

    def _give_up(self) -> None:
        """End replies with the tokens that they have, and close connections that have sent half of a request."""
        self._frontend.give_up()
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHeads) and connection.cycle is not None and connection.cycle.more_body:
                connection.transport.abort()

    def reload(self) -> None:
        """Read the adaptive table again and hand it to the scheduler."""
        frontend, table = self._frontend, self._table
        if table is None:
            frontend.tell("there is no file of adaptive steps to read again")
            return
        try:
            text = read_text(table)
        except ForedraftError as error:
            frontend.tell(f"the adaptive table stays as it was: {error}")
            return
        done = frontend.scheduler.call(lambda: frontend.body.reload(text, str(table)))
        done.add_done_callback(self._tell_reload)

    def _tell_reload(self, done: Future[object]) -> None:
        error = done.exception()
        if error is None:
            self._frontend.tell(f"the adaptive table was read again from {self._table}")
        else:
            self._frontend.tell(f"the adaptive table stays as it was: {error}")
