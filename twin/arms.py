"""One way to serve, ready for both sides: the engine's specification, and the models that the real executor runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.algorithm.algorithm import Drafter
from ..core.contract.events import EventSink
from ..core.errors import ConfigError, Problem
from ..core.scheduler.engine import Engine
from ..core.scheduler.spec import EngineSpec
from ..gpu.executor.build import DraftModel, build_executor
from ..gpu.executor.executor import TorchExecutor
from ..gpu.models.decoder import Decoder
from ..gpu.ops.port import Ops
from ..gpu.session.devices import ops_for, set_threads
from ..gpu.session.plan import SessionOptions, SessionPlan, plan_session
from ..gpu.session.round_cost import measure_cost_table
from ..gpu.session.session import load_models, named_memory_errors


@dataclass(frozen=True, slots=True)
class Arm:
    """A named way to serve. `spec` is what both the simulated and the real engine are made of."""

    name: str
    plan: SessionPlan
    spec: EngineSpec
    target: Decoder
    draft: DraftModel | None
    ops: Ops

    @property
    def algorithm(self) -> str:
        return self.spec.algorithm

    @property
    def is_speculative(self) -> bool:
        return self.spec.max_steps > 0

    def real_engine(self, events: EventSink, seed: int = 0) -> tuple[Engine, TorchExecutor]:
        """Make an engine and its executor."""
        with named_memory_errors(self.plan):
            engine = self.spec.make_engine(events)
            executor = build_executor(
                engine, self.target, self.draft, self.ops, graph_sizes=self.spec.graph_sizes, seed=seed
            )
        return engine, executor

    @property
    def simulated_spec(self) -> EngineSpec:
        """The same specification, for an executor without tokens."""
        return self.spec.with_config(track_tokens=False)


def open_arms(
    options: dict[str, SessionOptions],
    longest_request: int | None = None,
    engine: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Arm]:
    """Resolve and load every way to serve; models that several of them use are loaded once. `engine`: further settings of every engine.

    A step is one round, as the simulator charges the host's time for each of them. Raises ConfigError and other ForetokenErrors before a
    weight is read.
    """
    plans = {name: plan_session(replace(given, block_rounds=1), longest_request) for name, given in options.items()}
    for name, plan in plans.items():
        if plan.algorithm.drafter is Drafter.LOOKUP:
            message = f"{name}: {plan.algorithm.name} drafts on the host, by what the text repeats; its times depend on the text"
            raise ConfigError("<arguments>", [Problem("algorithm", message)])
    loaded: dict[tuple, tuple[Ops, Decoder, DraftModel | None]] = {}
    arms = []
    for name, plan in plans.items():
        key = (plan.options.model, plan.options.draft, plan.dtype, plan.device, plan.algorithm.name)
        if key not in loaded:
            on_progress(f"{name}: loading the weights")
            ops = ops_for(plan.device)
            set_threads(plan.device, plan.options.threads, plan.target, plan.weight_bytes)
            with named_memory_errors(plan):
                loaded[key] = (ops, *load_models(plan, ops))
        ops, target, draft = loaded[key]
        spec = replace(plan.spec, decodes_text=False).with_config(**engine or {})
        spec.resolve_sizes()
        if spec.policy == "goodput":
            on_progress(f"{name}: measuring what its rounds cost")
            spec = replace(spec, cost_table=measure_cost_table(spec, target, draft, ops))
        arms.append(Arm(name, plan, spec, target, draft, ops))
    return arms
