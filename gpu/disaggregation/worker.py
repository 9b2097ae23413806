"""The process of one worker: `python -m foretoken.gpu.disaggregation.worker FD`, started by `processes.Workers`.

    control socket ─► reader thread ─┐
    links          ─► their threads ─┴─► inbox ─► the main thread: one message, or one step, at a time

The parent decides when it ends: a closed control socket ends it at once, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from ...core.errors import ForetokenError
from ...core.handoff.wire import request_from_json
from ...core.scheduler.config import EngineRole
from ...observe.engine_lines import forward_lines
from .control import ControlSocket
from .link import LinkFaults, LinkNews, ParcelFaults, PeerLink, connect, links
from .serving import News, Serving
from .worker_session import SessionOrder, open_serving


class Worker:
    """Does what the parent says, one session after the other."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._inbox: queue.SimpleQueue[dict[str, Any] | LinkNews] = queue.SimpleQueue()
        self._links: dict[str, PeerLink] = {}
        self._faults = LinkFaults()
        self._serving: Serving | None = None
        self._log: Any = None
        self._session = 0
        self._is_over = False

    def run(self) -> None:
        threading.Thread(target=self._read_control, name="control", daemon=True).start()
        try:
            self._serve()
        finally:
            self._leave_session(complete=False)

    def _serve(self) -> None:
        worked = False
        while not self._is_over:
            serving = self._serving
            self._take_in(0.0 if worked else None if serving is None else serving.wait_s())
            worked = False
            if self._serving is not None:
                self._serving.tick()
                worked = self._serving.turn(self._between_rounds)

    def _between_rounds(self) -> None:
        self._take_in(0.0)
        if self._serving is not None:
            self._serving.tick()

    def _read_control(self) -> None:
        while (messages := self._control.receive()) is not None:
            for message in messages:
                if message["do"] == "ping":
                    self._control.send_soon({"say": "pong"})
                else:
                    self._inbox.put(message)
        # The parent is gone; the main thread may be deep in a step, so do not wait for it.
        os._exit(0)

    def _take_in(self, wait_s: float | None) -> None:
        """Take all that has come; wait for the first of it."""
        try:
            self._take(self._inbox.get(timeout=wait_s) if wait_s != 0.0 else self._inbox.get_nowait())
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            pass

    def _take(self, news: dict[str, Any] | LinkNews) -> None:
        if isinstance(news, LinkNews):
            if news.parcel is None:
                self._answer("link broken", peer=news.peer, why=news.why)
            elif self._serving is not None:
                self._serving.take(news.peer, news.parcel, news.num_malformed)
            return
        getattr(self, "_" + news.pop("do"))(**news)

    # -- what the parent may say ------------------------------------------------------------------------------------

    def _connect(
        self, host: str, port: int, rank: int, world_size: int, backend: str, peers: list[list[Any]], device: str
    ) -> None:
        import torch

        connect(host, port, rank, world_size, backend)
        page_device = torch.device(device if "nccl" in backend else "cpu")
        self._links = links([(rank, name) for rank, name in peers], page_device, self._faults, self._inbox.put)
        self._answer("connected")

    def _open(self, order: dict[str, Any]) -> None:
        """Load the models and make the engine of a session, in place of an earlier one."""
        self._leave_session(complete=False)
        try:
            self._session = order["session"]
            wanted = SessionOrder.from_json(order)
            forward_lines(wanted.log_level, lambda line: self._control.send_soon({"say": "line", "line": line}))
            self._faults.begin(ParcelFaults.from_json(wanted.faults, "the plan of link faults"))
            news = News(self._control.send_soon, wanted.session)
            self._serving, self._log, measured = open_serving(wanted, self._links, news)
        except ForetokenError as error:
            self._answer("failed", message=str(error))
            return
        self._answer("opened", engine=measured.to_json())

    def _submit(self, request: dict[str, Any], peer: str) -> None:
        assert self._serving is not None, "a request came before the session was opened"
        assert self._serving.engine.role is EngineRole.PREFILL, "requests begin on prefill workers"
        self._serving.submit(request_from_json(request), peer)

    def _abort(self, request_id: str) -> None:
        if self._serving is not None:
            self._serving.abort(request_id)

    def _lose(self, peer: str) -> None:
        if self._serving is not None:
            self._serving.lose(peer)
        # Everything that was said before is on the socket already.
        self._answer("lost", peer=peer)

    def _report(self) -> None:
        found = {} if self._serving is None else self._serving.describe()
        self._answer("report", report=found)

    def _close(self, complete: bool) -> None:
        """End the session; the process stays for the next one."""
        self._leave_session(complete)
        self._answer("closed")

    def _end(self) -> None:
        self._is_over = True

    def _answer(self, word: str, **values: Any) -> None:
        """Send a message about the present session; the parent drops those about earlier ones."""
        self._control.send_soon({"say": word, "session": self._session, **values})

    def _leave_session(self, complete: bool) -> None:
        if self._log is not None:
            self._log.close(complete)
        self._serving = self._log = None


def main() -> None:
    # Ctrl-C on a terminal reaches the whole group of processes; the parent handles it and ends the requests in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        Worker(ControlSocket(socket.socket(fileno=int(sys.argv[1])))).run()
    except BaseException:
        traceback.print_exc()
        code = 1
    # Threads wait in the library for peers that may be gone; a usual end would wait for them.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
