"""The process: uvicorn around the application, and what signals do.

SIGTERM and SIGINT   drain: no new requests, those that are served end; a second one gives them up
SIGHUP               the adaptive table is read again; one that is invalid changes nothing
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ..core.errors import ForetokenError
from ..observe.input_files import read_text
from .frontend import Frontend

SWITCH_INTERVAL_S = 0.0002
"""How long a thread may keep the interpreter while another waits for it: with Python's 5 ms, so long would each call of the event loop into
the system take while the scheduler computes."""


class Server(uvicorn.Server):
    """Serves `app` on `host` and `port` (0: any free one) until a signal ends it; `address` is where, once it has begun.

    `drain_s`: after that long, what is left after a first signal is given up. `table`: the file of the adaptive configuration, if any.
    """

    def __init__(
        self,
        app: FastAPI,
        frontend: Frontend,
        *,
        host: str,
        port: int,
        drain_s: float,
        table: Path | None = None,
    ) -> None:
        limits = frontend.limits
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            limit_concurrency=limits.max_connections,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            timeout_keep_alive=max(1, round(limits.stall_s)),
        )
        super().__init__(config)
        self.address = ""
        self._frontend = frontend
        self._table = table

    def handle_exit(self, sig: int, frame: object) -> None:
        """Take a signal that ends the server."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = self._frontend.is_draining = True

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._frontend.tell(f"{self._frontend.body.name} is served on {self.address}")

    async def shutdown(self, sockets: list | None = None) -> None:
        await super().shutdown(sockets)
        await self._frontend.stop()  # also where uvicorn was forced and left the lifespan out

    def reload(self) -> None:
        """Read the adaptive table again and hand it to the scheduler."""
        frontend, table = self._frontend, self._table
        if table is None:
            frontend.tell("there is no file of adaptive steps to read again")
            return
        try:
            text = read_text(table)
        except ForetokenError as error:
            frontend.tell(f"the adaptive table stays as it was: {error}")
            return
        done = frontend.scheduler.call(lambda: frontend.body.reload(text, str(table)))
        done.add_done_callback(self._tell_reload)

    def _tell_reload(self, done: Future) -> None:
        error = done.exception()
        if error is None:
            self._frontend.tell(f"the adaptive table was read again from {self._table}")
        else:
            self._frontend.tell(f"the adaptive table stays as it was: {error}")
