"""Open a worker's engine from the parent's order: the parent has made the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ...core.algorithm.registry import get_algorithm
from ...core.contract.events import EventSink
from ...core.handoff import HandoffTiming
from ...core.scheduler.config import EngineRole
from ...core.scheduler.spec import EngineSpec
from ...observe.log import EventLog
from ..models.config import ModelConfig
from ..session.loop import Deliveries
from ..session.plan import SessionOptions, SessionPlan
from ..session.session import load_engine
from ..session.text import Tokenizer
from .link import PeerLink
from .serving import News, Serving

_PATHS = ("model", "draft")


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
    run: Mapping[str, Any] | None = None  # what its header says of the run
    faults: Mapping[str, Any] | None = None  # on the worker's links
    log_level: str | None = None  # from which lines of the engine go to the parent; None: none do

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        options = asdict(self.options)
        for name in _PATHS:
            options[name] = None if options[name] is None else str(options[name])
        engine = self.engine
        if engine.policy == "goodput" and engine.cost_table is None:
            engine = replace(engine, policy="ema")  # an engine that is complete in itself, until the costs are measured
        described = {"policy": self.engine.policy, "spec": engine.to_json()}
        return {**plain, "options": options, "engine": described, "timing": asdict(self.timing)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SessionOrder:
        options = dict(value["options"])
        for name in _PATHS:
            options[name] = None if options[name] is None else Path(options[name])
        engine = EngineSpec.from_json(value["engine"]["spec"], "the order of a session")
        return cls(
            **{
                **value,
                "options": SessionOptions(**options),
                "engine": replace(engine, policy=value["engine"]["policy"]),
                "timing": HandoffTiming(**value["timing"]),
            }
        )

    @property
    def role(self) -> EngineRole:
        return self.engine.config.role


def open_serving(
    order: SessionOrder, links: Mapping[str, PeerLink], news: News
) -> tuple[Serving, EventLog | None, EngineSpec]:
    """Load what is ordered; return the specification with what was measured meanwhile. Raises ForetokenErrors."""
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
    deliveries = Deliveries()
    watched: list[Any] = []  # the sink of what is served, which is made after the engine
    log: EventLog | None = None

    def make_sinks(spec: EngineSpec) -> list[EventSink]:
        nonlocal log
        sinks: list[EventSink] = [deliveries, lambda event: [sink(event) for sink in watched]]
        if order.log is not None:
            log = EventLog(Path(order.log), {"engine": spec.to_json(), "run": order.run})
            sinks.append(log.sink(0))
        return sinks

    engine, executor, plan = load_engine(plan, Tokenizer.load(options.model), make_sinks)
    serving = Serving(order.session, engine, executor, deliveries, links, news, timing=order.timing)
    watched.append(serving.watch)
    return serving, log, plan.spec


def spec_for(role: EngineRole, spec: EngineSpec) -> EngineSpec:
    """Return the engine of a worker in `role`. Prefill drafts nothing, so it needs neither measured costs nor captured rounds."""
    spec = spec.with_role(role)
    if role is EngineRole.DECODE:
        return spec
    policy = "ema" if spec.policy == "goodput" else spec.policy
    return replace(spec, policy=policy, cost_table=None, graph_sizes=None)
