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
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ..core.errors import ForedraftError
from ..observe.input_files import read_text
from .answers.frontend import Frontend
from .base.connections import BoundedHeads, address_of, cannot_listen, http_config
from .requests.faults import Admin

SWITCH_INTERVAL_S = 0.0002
"""How long a thread may keep the interpreter while another waits for it: with Python's 5 ms, so long would each call of
the event loop into the system take while the scheduler computes."""
FAILED_S = 2.0
"""How long a server whose engine has failed goes on to say so before it ends, for a supervisor to start it again."""
COLLECT_AFTER = (50_000, 20, 50)
"""When Python looks for reference cycles: serving makes hardly any, and a look through all objects lasts longer than
a round's events."""


class HttpServer(uvicorn.Server):
    """Serves `app` on what `bind` has taken until a signal ends it; `address` is the first, once it has begun.

    `drain_s`: seconds after the first signal until the remaining replies are aborted. `table`: the file of the adaptive
    configuration, if any. `admin`: another application, on another port. `certificate`: files of an HTTPS server.
    """

    def __init__(
        self,
        app: FastAPI,
        frontend: Frontend,
        *,
        listeners: Sequence[socket.socket],
        drain_s: float,
        table: Path | None = None,
        admin: Admin | None = None,
        certificate: tuple[Path, Path | None] | None = None,
    ) -> None:
        super().__init__(http_config(app, frontend.limits, drain_s, certificate))
        self.address: str = ""
        self.should_exit: bool = False
        self._frontend = frontend
        self._table = table
        self._admin = admin
        self._admin_server: uvicorn.Server | None = None
        self._listeners = list(listeners)
        self._drain_s = drain_s
        self._drain_ends_s = math.inf
        self._failed_s = math.inf  # when the engine was found to have failed

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with self._listeners[0]:
            super().run(sockets=self._listeners)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Take a signal that ends the server. It goes on listening while it drains, so that `/ready` and `/metrics`
        tell of it."""
        if self._frontend.is_draining:
            self.should_exit = self.force_exit = True
        self._frontend.is_draining = True
        self._drain_ends_s = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server is to stop listening; called ten times a second."""
        frontend = self._frontend
        if frontend.is_draining and (frontend.is_idle or time.monotonic() >= self._drain_ends_s):
            self.should_exit = True
        if frontend.scheduler.error is not None:
            self._failed_s = min(self._failed_s, time.monotonic())
            if frontend.is_idle and time.monotonic() >= self._failed_s + FAILED_S:
                self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        address = address_of(self._listeners[0], "https" if self.config.is_ssl else "http")
        try:
            await super().startup(sockets)
        except OSError as error:  # another process has begun to listen meanwhile
            await self.lifespan.shutdown()
            raise cannot_listen(address, error) from None
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
        self.address = address
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
        gc.unfreeze()  # extension modules complain of what is not collected at the end of the process

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

    def _tell_reload(self, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._frontend.tell(f"the adaptive table was read again from {self._table}")
        else:
            self._frontend.tell(f"the adaptive table stays as it was: {error}")
