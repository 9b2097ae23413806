"""The ways to serve, each ready for both sides: the engine's specification, and the models that the real executor
runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.algorithm.algorithm import Drafter
from ..core.algorithm.registry import get_algorithm
from ..core.contract.events import EventSink
from ..core.errors import ConfigError
from ..core.scheduler.engine import Engine
from ..core.scheduler.spec import EngineSpec
from ..gpu.executor.executor import TorchExecutor
from ..gpu.executor.parts import DraftModel
from ..gpu.measure.arm import Arm
from ..gpu.models.decoder import Decoder
from ..gpu.session.devices import ops_for, set_threads
from ..gpu.session.plan import SessionOptions, SessionPlan, algorithm_name, plan_session
from ..gpu.session.round_cost import measure_costs
from ..gpu.session.session import load_models, named_memory_errors
from ..gpu.types.ops import Ops
from ..sim.scenario import Scenario

MEASURED_STEPS = "1,3,5,7"  # of the chains of a profile
PAIR_DRAFTS = {"STANDALONE": "draft", "EAGLE3": "eagle3", "MULTI_LAYER_EAGLE": "multi_layer_eagle", "DFLASH": "dflash"}
SESSION_KEYS = {  # of a scenario -> of a session
    "model.context_len": "context_len",
    "speculation.steps": "steps",
    "speculation.topk": "topk",
    "speculation.num_draft_tokens": "num_draft_tokens",
    "engine.page_size": "page_size",
    "engine.kv_slots": "kv_tokens",
    "engine.max_running": "max_running",
    "engine.chunk_size": "chunk_size",
    "engine.prefix_cache": "prefix_cache",
}
ENGINE_KEYS = ("max_queue", "max_step_tokens", "mixed", "eviction_policy", "watermark", "preempt", "ageing_bound")


def ways_of_pair(pair: Path, base: SessionOptions) -> dict[str, SessionOptions]:
    """Return plain decoding and four ways to draft, for a pair made by `foredraft tiny`.
    Raises ConfigError if a part is missing."""
    missing = [part for part in ("target", "draft", "eagle3") if not (pair / part / "config.json").is_file()]
    if missing:
        message = f"has no {', '.join(missing)}; expected a directory made by `foredraft tiny`"
        raise ConfigError.of(str(pair), "", message)
    standalone = ways_of_draft(replace(base, model=pair / "target", draft=pair / "draft", algorithm="STANDALONE"))
    return {
        **standalone,
        **ways_of_draft(replace(base, model=pair / "target", draft=pair / "eagle3", algorithm="EAGLE3")),
    }


def ways_of_draft(base: SessionOptions) -> dict[str, SessionOptions]:
    """Return plain decoding, a chain of 3, and for a head that takes them a tree of 8 nodes and adaptive steps."""
    ways = {"NONE": replace(base, draft=None, algorithm="NONE")}
    if base.draft is None:
        return ways
    name = algorithm_name(base)
    base, algorithm = replace(base, algorithm=name), get_algorithm(name)
    if algorithm.drafter is Drafter.HEADS:
        return {**ways, name: base}
    ways[f"{name} chain 3"] = replace(base, steps=3)
    if algorithm.drafter is Drafter.HEAD and algorithm.supports_trees:
        ways[f"{name} tree 8"] = replace(base, steps=4, topk=2, num_draft_tokens=8)
        ways[f"{name} adaptive"] = replace(base, adaptive="default")
    return ways


def ways_of_steps(base: SessionOptions, steps: str | None) -> dict[str, SessionOptions]:
    """Return the ways to decode whose steps are measured: plainly and, if `base` has a draft, in chains of each of
    `steps`, and in its trees if it has branches. Raises ConfigError."""
    chains = replace(base, topk=1, num_draft_tokens=None)
    ways = {"NONE": replace(chains, draft=None, algorithm="NONE")}
    if base.draft is None:
        if steps is not None or base.topk > 1 or base.num_draft_tokens is not None:
            raise ConfigError.of(
                "<arguments>",
                "draft",
                "is missing; without it nothing is drafted, so --steps, --topk and --num-draft-tokens have no effect",
            )
        return ways
    counts = (steps or MEASURED_STEPS).split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= 16 for count in counts):
        raise ConfigError.of("<arguments>", "steps", f"found {steps!r}; expected numbers from 1 to 16, such as 1,3,7")
    table = json.dumps({"1": {"candidate_steps": sorted(set(map(int, counts)))}})
    ways["chains"] = replace(chains, adaptive=table)
    if base.topk > 1:
        ways["trees"] = replace(base, adaptive=table)
    return ways


def way_of_scenario(
    scenario: Scenario, given: Mapping[str, str], base: SessionOptions, pair: Path | None
) -> tuple[SessionOptions, dict[str, Any]]:
    """Return the session of a scenario, and what its engine has beyond it. `given` keys alone count; the rest is the
    session's own choice.

    A draft that `base` does not name is the one of the `pair`. Raises ConfigError.
    """
    speculation, algorithm = scenario.speculation, get_algorithm(scenario.speculation.algorithm)
    tables = scenario.model_dump()
    changes = {
        name: tables[key.partition(".")[0]][key.partition(".")[2]]
        for key, name in SESSION_KEYS.items()
        if any(place == key or place.startswith(f"{key}.") for place in given)
    }
    if not algorithm.is_speculative:
        changes = {name: value for name, value in changes.items() if name not in ("steps", "topk", "num_draft_tokens")}
    elif speculation.policy != "fixed":
        changes |= {"policy": speculation.policy, "adaptive": _adaptive(speculation.adaptive)}
    if "engine.mode" in given:
        changes["overlap"] = scenario.engine.mode == "overlap"
    draft = base.draft
    if algorithm.drafter in (Drafter.NONE, Drafter.LOOKUP):
        draft = None
    elif draft is None and pair is not None and algorithm.name in PAIR_DRAFTS:
        draft = pair / PAIR_DRAFTS[algorithm.name]
    engine = {key: getattr(scenario.engine, key) for key in ENGINE_KEYS if f"engine.{key}" in given}
    return replace(base, draft=draft, algorithm=algorithm.name, **changes), engine


def _adaptive(table: str | dict[str, Any] | None) -> str:
    """Return the table as a session takes it: a preset or a file. Raises ConfigError for one that is written out."""
    if isinstance(table, dict):
        message = "is written out; the twin takes a preset or the path of a JSON file"
        raise ConfigError.of("<scenario>", "speculation.adaptive", message)
    return "default" if table is None else table


@dataclass(frozen=True, slots=True)
class TwinArm(Arm):
    """An arm whose `spec` is what both the simulated and the real engine are made of."""

    plan: SessionPlan = field(kw_only=True)

    @property
    def is_speculative(self) -> bool:
        return self.spec.max_steps > 0

    def open(self, events: EventSink) -> tuple[Engine, TorchExecutor]:
        with named_memory_errors(self.plan):
            return Arm.open(self, events)

    @property
    def simulated_spec(self) -> EngineSpec:
        """The same specification, for an executor without tokens."""
        return self.spec.with_config(track_tokens=False)


def open_arms(
    options: dict[str, SessionOptions],
    longest_request: int | None = None,
    engine: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[TwinArm]:
    """Resolve and load every way to serve; models that several of them use are loaded once. `engine`: further settings
    of every engine.

    A step is one round, as the simulator charges the host's time for each of them. Raises ConfigError and other
    ForedraftErrors before a weight is read.
    """
    plans = {
        name: plan_session(replace(given, multi_step_rounds=1), longest_request) for name, given in options.items()
    }
    for name, plan in plans.items():
        if plan.algorithm.drafter is Drafter.LOOKUP:
            message = f"{name}: {plan.algorithm.name} drafts on the host, by what the text repeats; its times depend on the text"
            raise ConfigError.of("<arguments>", "algorithm", message)
    loaded: dict[tuple[object, ...], tuple[Ops, Decoder, DraftModel | None]] = {}
    arms = []
    for name, plan in plans.items():
        key = (plan.options.model, plan.options.draft, plan.dtype, plan.device, plan.options.ops, plan.algorithm.name)
        if key not in loaded:
            on_progress(f"{name}: loading the weights")
            ops = ops_for(plan.device, plan.options.ops)
            set_threads(plan.device, plan.options.threads, plan.target, plan.weight_bytes)
            with named_memory_errors(plan):
                loaded[key] = (ops, *load_models(plan, ops))
        ops, target, draft = loaded[key]
        spec = replace(plan.spec, decodes_text=False).with_config(**engine or {})
        spec.resolve_sizes()
        if spec.lacks_costs:
            on_progress(f"{name}: measuring what its rounds cost")
            spec = replace(spec, cost_table=measure_costs(spec, target, draft, ops))
        arms.append(TwinArm(name, spec, target, draft, ops, plan=plan))
    return arms
