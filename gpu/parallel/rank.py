"""The process of one rank: `python -m foredraft.gpu.parallel.rank FD`, started by `ranks.Ranks`.

It has a part of the model, and the executor of one process. The parent plans; every rank launches and collects the same
steps in the same order. Its answers to a step are the parent's of rank 0, and of the others a checksum.
"""

from __future__ import annotations

import gc
import os
import platform
import queue
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, astuple, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from ...core.algorithm.registry import get_algorithm
from ...core.errors import ForedraftError
from ...core.handoff import PageSeal
from ...observe.children.child import run_child
from ...observe.children.wire import Wire
from ...observe.engine_lines import forward_lines
from ..disaggregation.link import FOR_EVER, LinkFaults, LinkNews, Parcel, PeerLink, connect, links
from ..disaggregation.page_tensors import PageTensors
from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureBounds
from ..models.config import ModelConfig
from ..models.projection import blocks_are_faster, take_layout
from ..models.stored.tensor_files import list_tensors
from ..session.as_json import engine_from_json, engine_to_json, options_from_json
from ..session.plan import SessionPlan
from ..session.ready import spare_executor
from ..session.session import load_engine
from ..session.text import Tokenizer
from ..types.shards import EXCHANGES, ExchangeFailed, Shard
from .ranks import OWN, SPARE
from .wire import arrays_to_json, result_digest, result_to_json, step_from_json

if TYPE_CHECKING:
    from ..bench.run import Bench

_SAMPLED_BYTES, _SAMPLED_EVERY = 1 << 12, 1 << 22


class Rank:
    """Carries out the parent's orders."""

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._executors: dict[int, TorchExecutor] = {}
        self._bench: Bench | None = None
        self._session = 0
        self._number, self._device = 0, "cpu"
        self._is_over = False
        self._links: dict[str, PeerLink] = {}  # to the same rank of other workers
        self._parcels: dict[str, queue.SimpleQueue[LinkNews]] = {}
        self._taken: dict[str, tuple[int, int]] = {}  # by peer: session and number of the last parcel
        self._pages: PageTensors | None = None

    def run(self) -> None:
        threading.Thread(target=self._read_control, name="control", daemon=True).start()
        while not self._is_over:
            order = self._orders.get()
            try:
                getattr(self, "_" + order.pop("do"))(**order)
            except Exception as error:
                # Not one of these goes on: the others would wait for this rank in the next exchange.
                if not isinstance(error, ForedraftError):
                    traceback.print_exc()
                message = str(error) if isinstance(error, ForedraftError) else f"{type(error).__name__}: {error}"
                self._answer("failed", message=message, waited=isinstance(error, ExchangeFailed))

    def _read_control(self) -> None:
        while (messages := self._control.receive()) is not None:
            for message in messages:
                if message["do"] == "ping":
                    self._control.send_soon({"say": "pong", "exchanges": EXCHANGES.begun})
                else:
                    self._orders.put(message)
        # The parent is gone; the main thread may wait for another rank, so do not wait for it.
        os._exit(0)

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
        self._number, self._device = number, device
        self._parcels = {name: queue.SimpleQueue() for _, name in peers}
        page_device = torch.device(device if "nccl" in backend else "cpu")
        self._links = links([(rank, name) for rank, name in peers], page_device, LinkFaults(), self._hear)
        self._answer("connected")

    def _hear(self, news: LinkNews) -> None:
        self._parcels[news.peer].put(news)

    def _open(self, session: int, order: dict[str, Any]) -> None:
        """Load this rank's part of the model, and make its executor."""
        self._begin(session, order["shard"][1])
        log_level = order["log_level"] if self._number == 0 else None
        forward_lines(log_level, lambda line: self._control.send_soon({"say": "line", "line": line}))
        plan = _plan_of(order)
        self._agree(plan.device, plan.dtype)
        _, executor, plan = load_engine(plan, Tokenizer.load(plan.options.model), lambda spec: [])
        self._executors[OWN] = executor
        self._pages = PageTensors(executor, plan.spec.config.page_size)
        self._answer(
            "opened",
            engine=engine_to_json(plan.spec),
            captured=executor.draft.is_captured,
            page_format=asdict(self._pages.format),
            relayed=asdict(executor.relayed),
            identity=identity_of(order["options"], [order["dtype"], order["engine"]]),
        )

    def _open_bench(self, session: int, order: dict[str, Any]) -> None:
        """Load this rank's part of the models of a benchmark."""
        from ..bench.plan import plan_bench
        from ..bench.ranks import options_from_json as bench_options
        from ..bench.run import Bench

        self._begin(session, order["size"])
        plan = plan_bench(bench_options(order["options"]))
        self._agree(plan.device, plan.dtype)
        plan = replace(plan, device=self._device)
        self._bench = Bench(plan, shard=Shard(self._number, order["size"]))
        settings = [str(plan.dtype), [cell.arms[-1].spec.to_json() for cell in plan.cells]]
        self._answer("opened", identity=identity_of(order["options"], settings))

    def _make_arm(self, cell: int, arm: int) -> None:
        assert self._bench is not None, "no benchmark was opened"
        if not arm:
            self._executors.clear()
            gc.collect()  # executors are in reference cycles, and their pools are large
        self._executors[arm] = self._bench.make_executor(cell, arm)
        self._answer("made")

    def _make_spare(self, engine: dict[str, Any]) -> None:
        spare = engine_from_json(engine).make_engine(lambda event: None)
        self._executors[SPARE] = spare_executor(self._executors[OWN], spare)
        self._answer("made")

    def _free_spare(self) -> None:
        del self._executors[SPARE]
        gc.collect()  # executors are in reference cycles

    def _capture_all(self, seconds: float, num_bytes: int) -> None:
        def tell(line: str) -> None:
            if self._number == 0:
                self._answer("progress", line=line)

        graphs = self._executors[OWN].graphs
        left_out = graphs.capture_all(tell, CaptureBounds(seconds, num_bytes))
        self._answer("captured", captured=[len(graphs.reports), left_out])

    def _relay_cell(self, row: int, epoch: int) -> None:
        self._answer("cell", cell=arrays_to_json(self._executors[OWN].relay_cell(row, epoch)))

    def _send_pages(self, session: int, peer: str, number: int, slots: list[list[int]]) -> None:
        """Send this rank's part of pages to the rank of `peer` that has the same part."""
        assert self._pages is not None, "no session was opened"
        seals, content, _ = self._pages.send(peer, np.array(slots, np.int32))
        self._links[peer].send(Parcel(session, (), content, number))
        self._seal(seals)

    def _take_pages(self, session: int, peer: str, number: int, num_pages: int) -> None:
        """Take this rank's part of the pages of a message from `peer`."""
        assert self._pages is not None, "no session was opened"
        self._seal(self._pages.arrived(self._parcel(peer, session, number), peer, num_pages))

    def _parcel(self, peer: str, session: int, number: int) -> Parcel:
        """Wait for the parcel with this number; it is empty if a message came twice, or if the link is broken. Parcels
        before it were of messages that did not come."""
        if (session, number) > self._taken.get(peer, (0, 0)):
            self._taken[peer] = (session, number)
            while (parcel := (news := self._parcels[peer].get()).parcel) is not None:
                if (parcel.session, parcel.number) == (session, number):
                    return parcel
            self._parcels[peer].put(news)
        return Parcel(session, ())

    def _seal(self, seals: list[PageSeal]) -> None:
        self._answer("sealed", seals=[astuple(seal) for seal in seals])

    def _write_pages(self, slots: list[list[int]], rows: list[int]) -> None:
        assert self._pages is not None, "no session was opened"
        self._pages.write_arrived(np.array(slots, np.int32), rows)

    def _launch(self, executor: int, step: dict[str, Any]) -> None:
        self._executors[executor].launch(step_from_json(step))

    def _collect(self, executor: int) -> None:
        result = result_to_json(self._executors[executor].collect())
        content: dict[str, Any] = {"digest": result_digest(result)}
        if self._number == 0:
            content |= {"result": result, "seconds": dict(self._executors[executor].clock.seconds)}
        self._answer("result", **content)

    def _begin(self, session: int, size: int) -> None:
        self._session, self._bench, self._pages = session, None, None
        self._executors.clear()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))  # the most; small models take one

    def _agree(self, device: str, dtype: torch.dtype) -> None:
        """Lay weights out as rank 0 does: whole drafts must round alike on all ranks."""
        if device == "cpu":
            faster = torch.tensor([self._number == 0 and dtype is torch.float32 and blocks_are_faster()])
            dist.broadcast(faster, group=EXCHANGES.group, group_src=0)
            take_layout(bool(faster))

    def _end(self) -> None:
        self._is_over = True

    def _answer(self, word: str, **values: Any) -> None:
        self._control.send_soon({"say": word, "session": self._session, **values})


def _plan_of(order: Mapping[str, Any]) -> SessionPlan:
    options, spec = options_from_json(order["options"]), engine_from_json(order["engine"])
    return SessionPlan(
        options=options,
        target=ModelConfig.from_directory(options.model),
        draft=None,  # only planning looks at it
        algorithm=get_algorithm(spec.algorithm),
        dtype=getattr(torch, order["dtype"]),
        device=order["device"],
        spec=spec,
        weight_bytes=order["weight_bytes"],
        kv_bytes=order["kv_bytes"],
        shard=Shard(*order["shard"]),
    )


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


def main() -> None:
    run_child(lambda control: Rank(control).run())


if __name__ == "__main__":
    main()
