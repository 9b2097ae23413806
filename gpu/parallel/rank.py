"""The process of one rank, started by `ranks.Ranks`. What it is for is a `RankJob` that it is handed.

It has a part of the model, and the executor of one process. The parent plans; every rank launches and collects the same
steps in the same order. Its answers to a step are the parent's of rank 0, and of the others a checksum.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ...core.errors import ForedraftError
from ...core.handoff import PageSeal
from ...observe.children.child import run_child
from ...observe.children.cores import idle_cores
from ...observe.children.wire import Wire
from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureBounds
from ..models.stored.tensor_files import list_tensors
from ..types.shards import EXCHANGES, ExchangeFailed
from .link import FOR_EVER, InjectedLinkFaults, LinkNews, PageParcel, PeerLink, connect, links
from .page_tensors import PageTensors
from .ranks import OWN
from .wire import arrays_to_json, result_digest, result_to_json, step_from_json

_SAMPLED_BYTES, _SAMPLED_EVERY = 1 << 12, 1 << 22


class RankJob(ABC):
    """What a rank is for: it loads models and makes executors. Its methods are orders beside those of `Rank`."""

    @abstractmethod
    def open(self, order: dict[str, Any]) -> dict[str, Any]:
        """Load this rank's part of the models. Returns the report for the parent; `identity` must be the same on all
        ranks (`identity_of`)."""


class Rank:
    """Carries out the parent's orders: its own, and those of its job."""

    def __init__(self, control: Wire, make_job: Callable[[Rank], RankJob]) -> None:
        self.executors: dict[int, TorchExecutor] = {}
        self.pages: PageTensors | None = None
        self.number, self.device = 0, "cpu"
        self._job, self._size = make_job(self), 1
        self._control = control
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._session = 0
        self._is_over = False
        self._links: dict[str, PeerLink] = {}  # to the same rank of other workers
        self._parcels: dict[str, queue.SimpleQueue[LinkNews]] = {}
        self._taken: dict[str, tuple[int, int]] = {}  # by peer: session and number of the last parcel

    def run(self) -> None:
        threading.Thread(target=self._read_control, name="control", daemon=True).start()
        while not self._is_over:
            order = self._orders.get()
            try:
                do = order.pop("do")
                carry_out = getattr(self, f"_{do}", None) or getattr(self._job, do)
                carry_out(**order)
            except Exception as error:
                # Not one of these goes on: the others would wait for this rank in the next exchange.
                if not isinstance(error, ForedraftError):
                    traceback.print_exc()
                message = str(error) if isinstance(error, ForedraftError) else f"{type(error).__name__}: {error}"
                self.answer("failed", message=message, waited=isinstance(error, ExchangeFailed))

    def _read_control(self) -> None:
        while (messages := self._control.receive()) is not None:
            for message in messages:
                if message["do"] == "ping":
                    self._control.send_soon({"say": "pong", "exchanges": EXCHANGES.begun})
                else:
                    self._orders.put(message)
        # The parent is gone; the main thread may wait for another rank, so do not wait for it.
        os._exit(0)

    # -- for the job ------------------------------------------------------------------------------------------------

    def answer(self, word: str, **values: Any) -> None:
        self._control.send_soon({"say": word, "session": self._session, **values})

    def send_line(self, line: Mapping[str, Any]) -> None:
        """Send a line of the engine's to the parent."""
        self._control.send_soon({"say": "line", "line": line})

    # -- what the parent may say ------------------------------------------------------------------------------------

    def _connect(
        self,
        host: str,
        port: int,
        number: int,
        place: int,
        size: int,
        num_workers: int,
        backend: str,
        device: str,
        peers: list[list[Any]],
    ) -> None:
        """Join the ranks of all workers: this is rank `number` of the `size` ranks of the worker at `place`."""
        if device != "cpu":
            torch.cuda.set_device(device)
        connect(host, port, place * size + number, num_workers * size, backend, "ranks")
        if num_workers > 1:
            groups = [range(first, first + size) for first in range(0, num_workers * size, size)]
            EXCHANGES.group = [dist.new_group(list(ranks), timeout=FOR_EVER) for ranks in groups][place]
        self.number, self.device, self._size = number, device, size
        self._parcels = {name: queue.SimpleQueue() for _, name in peers}
        page_device = torch.device(device if "nccl" in backend else "cpu")
        self._links = links([(rank, name) for rank, name in peers], page_device, InjectedLinkFaults(), self._hear)
        self.answer("connected")

    def _hear(self, news: LinkNews) -> None:
        self._parcels[news.peer].put(news)

    def _open(self, session: int, order: dict[str, Any]) -> None:
        """Have the job load this rank's part of its models."""
        self._session, self.pages = session, None
        self.executors.clear()
        torch.set_num_threads(max(1, idle_cores() // self._size))  # the most; small models take one
        self.answer("opened", **self._job.open(order))

    def _capture_all(self, seconds: float, num_bytes: int) -> None:
        def tell(line: str) -> None:
            if self.number == 0:
                self.answer("progress", line=line)

        graphs = self.executors[OWN].graphs
        left_out = graphs.capture_all(tell, CaptureBounds(seconds, num_bytes))
        self.answer("captured", captured=[len(graphs.reports), left_out])

    def _relay_cell(self, row: int, epoch: int) -> None:
        self.answer("cell", cell=arrays_to_json(self.executors[OWN].relay_cell(row, epoch)))

    def _send_pages(self, session: int, peer: str, number: int, slots: list[list[int]]) -> None:
        """Send this rank's part of pages to the rank of `peer` that has the same part."""
        assert self.pages is not None, "no session was opened"
        seals, content, _ = self.pages.send(peer, np.array(slots, np.int32))
        self._links[peer].send(PageParcel(session, (), content, number))
        self._seal(seals)

    def _take_pages(self, session: int, peer: str, number: int, num_pages: int) -> None:
        """Take this rank's part of the pages of a message from `peer`."""
        assert self.pages is not None, "no session was opened"
        self._seal(self.pages.arrived(self._parcel(peer, session, number), peer, num_pages))

    def _parcel(self, peer: str, session: int, number: int) -> PageParcel:
        """Wait for the parcel with this number; it is empty if a message came twice, or if the link is broken. Parcels
        before it were of messages that did not come."""
        if (session, number) > self._taken.get(peer, (0, 0)):
            self._taken[peer] = (session, number)
            while (parcel := (news := self._parcels[peer].get()).parcel) is not None:
                if (parcel.session, parcel.number) == (session, number):
                    return parcel
            self._parcels[peer].put(news)
        return PageParcel(session, ())

    def _seal(self, seals: list[PageSeal]) -> None:
        self.answer("sealed", seals=[astuple(seal) for seal in seals])

    def _write_pages(self, slots: list[list[int]], rows: list[int]) -> None:
        assert self.pages is not None, "no session was opened"
        self.pages.write_arrived(np.array(slots, np.int32), rows)

    def _launch(self, executor: int, step: dict[str, Any]) -> None:
        self.executors[executor].launch(step_from_json(step))

    def _collect(self, executor: int) -> None:
        result = result_to_json(self.executors[executor].collect())
        content: dict[str, Any] = {"digest": result_digest(result)}
        if self.number == 0:
            content |= {"result": result, "seconds": dict(self.executors[executor].clock.seconds)}
        self.answer("result", **content)

    def _end(self) -> None:
        self._is_over = True


def identity_of(options: Mapping[str, Any], settings: list[Any]) -> dict[str, str]:
    """Return everything that must be the same on all ranks, by what messages call it; `settings` begin with the
    dtype."""
    draft = options["draft"] if options["model"] is not None else None  # beside random weights it is no directory
    return {
        "version of foredraft": own_version(),
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "dtype": settings[0],
        "model": "none" if options["model"] is None else _checkpoint_digest(options["model"]),
        "draft": "none" if draft is None else _checkpoint_digest(draft),
        "options": f"{crc32(repr([options, settings]).encode()):08x}",
    }


def own_version() -> str:
    try:
        return version("foredraft")
    except PackageNotFoundError:  # a copy of the sources
        return "none"


def _checkpoint_digest(directory: str) -> str:
    """Return the place of a checkpoint and a checksum of its configuration and of samples of its weights."""
    digest = crc32((Path(directory) / "config.json").read_bytes())
    for path in sorted({tensor.path for tensor in list_tensors(directory).values()}):
        size = path.stat().st_size
        with path.open("rb") as file:
            for place in (*range(0, size, _SAMPLED_EVERY), max(0, size - _SAMPLED_BYTES)):
                file.seek(place)
                digest = crc32(file.read(_SAMPLED_BYTES), digest)
    return f"{digest:08x} in {directory}"


def run_rank(make_job: Callable[[Rank], RankJob]) -> None:
    """Be a rank for this job until the parent ends it."""
    run_child(lambda control: Rank(control, make_job).run())
