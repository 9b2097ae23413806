"""The process of one worker: `python -m foredraft.gpu.disaggregation.worker FD`, started by `workers.Workers`.

    control socket ─► reader thread ─┐
    links          ─► their threads ─┴─► inbox ─► the main thread: one message, or one step, at a time

The parent decides when the worker ends: a closed control socket ends it at once, at any point of its work.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.algorithm.registry import get_algorithm
from ...core.contract.events import Event, EventSink
from ...core.errors import ForedraftError
from ...core.handoff import HandoffTiming
from ...core.handoff.messages import request_from_json
from ...core.scheduler.config import EngineRole
from ...core.scheduler.driver import reload_table
from ...core.scheduler.spec import EngineSpec
from ...observe.children.child import run_child
from ...observe.children.wire import Wire
from ...observe.engine_lines import forward_lines
from ...observe.log import EventLog
from ..executor.graphs import CaptureBounds
from ..models.config import ModelConfig
from ..parallel.link import InjectedLinkFaults, LinkNews, ParcelFaults, PeerLink, connect, links
from ..parallel.processes import backend_for
from ..parallel.ranks import RankedExecutor, RankWorld
from ..parallel.wire import engine_from_json, engine_to_json
from ..session.loop import DeliverySink
from ..session.orders import SessionRanks, options_from_json, options_to_json
from ..session.plan import SessionOptions, SessionPlan
from ..session.ready import make_executor_ready
from ..session.session import load_engine, load_ranks
from ..session.text import Tokenizer
from ..tiny.scoring import score_prompt
from .serving import News, Serving, now_ns

_PATHS = ("model", "draft")
FLUSH_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SessionOrder:
    """All that a worker needs for one session, as JSON."""

    # Counts the sessions of a set of workers: the generation of prefill workers, the epoch of decode workers.
    session: int
    options: SessionOptions
    engine: EngineSpec  # with the worker's role
    dtype: str
    device: str
    weight_bytes: int
    kv_bytes: int
    timing: HandoffTiming
    log: str | None = None  # events.jsonl, if one is kept
    log_part_bytes: int | None = None  # of one file of it; None: it stays one file
    run: Mapping[str, Any] | None = None  # what its header says of the run
    faults: Mapping[str, Any] | None = None  # on the worker's links
    log_level: str | None = None  # from which lines of the engine go to the parent; None: none do

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **plain,
            "options": options_to_json(self.options),
            "engine": engine_to_json(self.engine),
            "timing": asdict(self.timing),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SessionOrder:
        return cls(
            **{
                **value,
                "options": options_from_json(value["options"]),
                "engine": engine_from_json(value["engine"]),
                "timing": HandoffTiming(**value["timing"]),
            }
        )

    @property
    def role(self) -> EngineRole:
        return self.engine.config.role


def open_serving(
    order: SessionOrder, links: Mapping[str, PeerLink], news: News, ranks: SessionRanks | None = None
) -> tuple[Serving, EventLog | None, SessionPlan]:
    """Load the ordered models, here or in `ranks`; return the plan with the values that were measured meanwhile. Raises
    ForedraftErrors."""
    options = order.options
    plan = SessionPlan(
        options=options,
        target=ModelConfig.from_directory(options.model),
        draft=None,  # only planning looks at it
        algorithm=get_algorithm(order.engine.algorithm),
        dtype=getattr(torch, order.dtype),
        device=order.device,
        spec=order.engine,
        weight_bytes=order.weight_bytes,
        kv_bytes=order.kv_bytes,
    )
    deliveries = DeliverySink()
    watched: list[EventSink] = []  # the sink of what is served, which is made after the engine
    log: EventLog | None = None

    def pass_on(event: Event) -> None:
        for sink in watched:
            sink(event)

    def make_sinks(spec: EngineSpec) -> list[EventSink]:
        nonlocal log
        sinks: list[EventSink] = [deliveries, pass_on]
        if order.log is not None:
            log = EventLog(
                Path(order.log), {"engine": spec.to_json(), "run": order.run}, part_bytes=order.log_part_bytes
            )
            sinks.append(log.sink(0))
        return sinks

    try:
        load = load_engine if ranks is None else partial(load_ranks, ranks=ranks)
        engine, executor, plan = load(plan, Tokenizer.load(options.model), make_sinks)
    except BaseException:
        if log is not None:
            log.close(complete=False)
        raise
    serving = Serving(order.session, engine, executor, deliveries, links, news, timing=order.timing)
    watched.append(serving.watch)
    return serving, log, plan


def spec_for(role: EngineRole, spec: EngineSpec) -> EngineSpec:
    """Return the engine of a worker in `role`. Prefill drafts nothing, so it needs neither measured costs nor
    captured rounds."""
    spec = spec.with_role(role)
    if role is EngineRole.DECODE:
        return spec
    return replace(spec.without_costs, graph_sizes=None)


class Worker:
    """Carries out the parent's orders, one session after the other."""

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._inbox: queue.SimpleQueue[dict[str, Any] | LinkNews] = queue.SimpleQueue()
        self._links: dict[str, PeerLink] = {}
        self._faults = InjectedLinkFaults()
        self._serving: Serving | None = None
        self._log: EventLog | None = None
        self._plan: SessionPlan | None = None
        self._ranks: SessionRanks | None = None
        self._flushed_ns = 0
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
            if not worked:
                self._flush_log()  # a worker that is killed loses a second of its log at most
            self._take_in(0.0 if worked else None if serving is None else serving.wait_s())
            worked = False
            if self._serving is not None:
                self._serving.tick()
                worked = self._serving.turn(self._between_rounds)
                if now_ns() >= self._flushed_ns + FLUSH_NS:
                    self._flush_log()

    def _flush_log(self) -> None:
        if self._log is not None:
            self._log.flush()
        self._flushed_ns = now_ns()

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
        """Take all messages that have come; wait for the first one."""
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
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str,
        peers: list[list[Any]],
        device: str,
        ranks: list[str],
    ) -> None:
        """Join the other workers; `ranks`: the devices of this one's ranks, if it has any."""
        import torch

        connect(host, port, rank, world_size, backend)
        page_device = torch.device(device if "nccl" in backend else "cpu")
        self._links = links([(rank, name) for rank, name in peers], page_device, self._faults, self._inbox.put)
        if ranks:
            places = [(place, name) for place, name in peers]
            self._ranks = SessionRanks(
                ranks, RankWorld(host, port, rank, world_size, backend_for(tuple(ranks)), places)
            )
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
            self._serving, self._log, self._plan = open_serving(wanted, self._links, news, self._ranks)
        except ForedraftError as error:
            self._answer("failed", message=str(error))
            return
        self._answer("opened", engine=self._plan.spec.to_json())

    def _make_ready(self, seconds: float, num_bytes: int) -> None:
        """Compile and capture what this worker's requests would wait for."""
        assert self._serving is not None and self._plan is not None, "no session was opened"
        plan, bounds = self._plan, CaptureBounds(seconds, num_bytes)
        try:
            ready = make_executor_ready(
                plan,
                self._serving.executor,
                Tokenizer.load(plan.options.model),
                lambda line: self._answer("progress", line=line),
                bounds,
            )
        except ForedraftError as error:
            self._answer("failed", message=str(error))
            return
        self._answer("ready", **asdict(ready))

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

    def _gauges(self) -> None:
        if self._serving is not None:
            self._answer("gauges", **self._serving.gauges())

    def _score(self, number: int, prompt: list[int], num_top: int) -> None:
        """Compute how likely the tokens of a prompt are, with the whole model here or in ranks."""
        assert self._serving is not None, "a prompt came before the session was opened"
        executor, tokens = self._serving.executor, np.array(prompt)
        try:
            if isinstance(executor, RankedExecutor):
                found = executor.score(tokens, num_top)
            else:
                found = score_prompt(executor.target, tokens, num_top)
        except (RuntimeError, MemoryError) as error:  # as devices raise: another prompt may have room
            self._answer("scored", number=number, scores=None, message=str(error))
            return
        self._answer("scored", number=number, scores=found, message="")

    def _reload(self, table: str, source: str) -> None:
        """Use another adaptive table, which the parent has checked."""
        assert self._serving is not None, "a table came before the session was opened"
        reload_table(self._serving.engine, table, source, now_ns())

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
        self._serving = self._log = self._plan = None


def main() -> None:
    run_child(lambda control: Worker(control).run())


if __name__ == "__main__":
    main()
