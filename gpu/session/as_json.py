"""Options and specifications of sessions as JSON, for the processes that carry them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...core.scheduler.spec import EngineSpec
from .plan import SessionOptions

_PATHS = ("model", "draft")


def options_to_json(options: SessionOptions) -> dict[str, Any]:
    plain = asdict(options)
    return {**plain, **{name: None if plain[name] is None else str(plain[name]) for name in _PATHS}}


def options_from_json(value: Mapping[str, Any]) -> SessionOptions:
    paths = {name: None if value[name] is None else Path(value[name]) for name in _PATHS}
    return SessionOptions(**{**value, **paths})


def engine_to_json(engine: EngineSpec) -> dict[str, Any]:
    """Return an engine's specification for another process, also one whose costs that process will measure."""
    whole = engine
    if engine.policy == "goodput" and engine.cost_table is None:
        engine = replace(engine, policy="ema")  # an engine that is complete in itself, until the costs are measured
    return {"policy": whole.policy, "spec": engine.to_json()}


def engine_from_json(value: Mapping[str, Any]) -> EngineSpec:
    return replace(EngineSpec.from_json(value["spec"], "the order of a session"), policy=value["policy"])
