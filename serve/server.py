"""The process: uvicorn around the application, and what signals do.

SIGTERM and SIGINT   drain: no new requests, those that are served end; a second one gives them up
SIGHUP               the adaptive table is read again; one that is invalid changes nothing
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ..core.errors import ForetokenError
from ..observe.input_files import read_text
from .frontend import Frontend

_log = logging.getLogger("foretoken.serve")


class Server(uvicorn.Server):
    """Serves `app` on `host` and `port` (0: any free one) until a signal ends it. `on_start` is told the address.

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
        on_start: Callable[[str], None] = lambda address: None,
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
        self._frontend = frontend
        self._table = table
        self._on_start = on_start

    def handle_exit(self, sig: int, frame: object) -> None:
        """Take a signal that ends the server."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = self._frontend.is_draining = True

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self._on_start(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list | None = None) -> None:
        await super().shutdown(sockets)
        await self._frontend.stop()  # also where uvicorn was forced and left the lifespan out

    def reload(self) -> None:
        """Read the adaptive table again and hand it to the scheduler."""
        if self._table is None:
            _log.warning("there is no adaptive table to reload: give one as a file")
            return
        try:
            text = read_text(self._table)
        except ForetokenError as error:
            _log.error("the adaptive table stays as it was: %s", error)
            return
        done = self._frontend.scheduler.call(lambda: self._frontend.body.reload(text, str(self._table)))
        done.add_done_callback(lambda call: _tell_reload(call.exception(), self._table))


def _tell_reload(error: BaseException | None, table: Path | None) -> None:
    if error is None:
        _log.warning("the adaptive table was reloaded from %s", table)
    else:
        _log.error("the adaptive table stays as it was: %s", error)
