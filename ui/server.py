"""The process that serves the page: uvicorn around the application, on this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from ..serve.base.connections import http_config
from ..serve.base.limits import Limits
from .app import AnswerPools, make_app

DRAIN_S = 1.0  # for the last lines of answers that a signal has ended


class PageServer(uvicorn.Server):
    """Serves the page on what `bind` has taken, until a signal ends it; `tell` takes the address once it has begun."""

    def __init__(self, choices: Mapping[str, Any], listener: socket, tell: Callable[[str], None]) -> None:
        self._listener = listener
        self._tell = tell
        self._pools = AnswerPools.usual()
        self._folder = TemporaryDirectory(prefix="foredraft-ui-")
        app = make_app(choices, Path(self._folder.name), Limits(), self._pools)
        super().__init__(http_config(app, Limits(), DRAIN_S))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/"

    def run(self, sockets: list[socket] | None = None) -> None:
        with self._listener, self._folder:
            try:
                super().run(sockets=[self._listener])
            finally:
                for pool in self._pools.all:
                    pool.close()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._tell(self.address)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Take a signal: the answers that are being made are given up."""
        for pool in self._pools.all:
            pool.close()
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
