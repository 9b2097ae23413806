"""The ways to serve that a twin compares: those of a tiny pair, of a model with a draft, or the one of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.algorithm.algorithm import Drafter
from ..core.algorithm.registry import get_algorithm
from ..core.errors import ConfigError, Problem
from ..gpu.session.plan import SessionOptions, algorithm_name
from ..sim.scenario import Scenario

PAIR_DRAFTS = {"STANDALONE": "draft", "EAGLE3": "eagle3", "MULTI_LAYER_EAGLE": "multi_layer_eagle"}
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
    """Return plain decoding and four ways to draft, for a pair made by `foretoken tiny`. Raises ConfigError if a part is missing."""
    missing = [part for part in ("target", "draft", "eagle3") if not (pair / part / "config.json").is_file()]
    if missing:
        message = f"has no {', '.join(missing)}; expected a directory made by `foretoken tiny`"
        raise ConfigError(str(pair), [Problem("", message)])
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


def way_of_scenario(
    scenario: Scenario, given: Mapping[str, str], base: SessionOptions, pair: Path | None
) -> tuple[SessionOptions, dict[str, Any]]:
    """Return the session of a scenario, and what its engine has beyond it. `given` keys alone count; the rest is the session's own choice.

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
        raise ConfigError("<scenario>", [Problem("speculation.adaptive", message)])
    return "default" if table is None else table
