"""The messages to the processes of a session: options as JSON, and the orders of ranks with parts of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observe.engine_lines import active_level
from ..parallel.ranks import OWN, RankedExecutor, Ranks
from ..parallel.wire import engine_from_json, engine_to_json
from ..types.shards import rank_devices
from .plan import SessionOptions, SessionPlan

if TYPE_CHECKING:
    from ...core.scheduler.engine import Engine
    from ...core.scheduler.spec import EngineSpec

_PATHS = ("model", "draft")


def options_to_json(options: SessionOptions) -> dict[str, Any]:
    plain = asdict(options)
    return {**plain, **{name: None if plain[name] is None else str(plain[name]) for name in _PATHS}}


def options_from_json(value: Mapping[str, Any]) -> SessionOptions:
    paths = {name: None if value[name] is None else Path(value[name]) for name in _PATHS}
    return SessionOptions(**{**value, **paths})


class SessionRanks(Ranks):
    """Ranks that serve sessions."""

    module = "foredraft.gpu.session.rank"


def orders_of(plan: SessionPlan, devices: Sequence[str]) -> list[dict[str, Any]]:
    """Return what each rank needs for a session."""
    options = plan.options
    return [
        {
            "options": options_to_json(options),
            "engine": engine_to_json(plan.spec),
            "dtype": str(plan.dtype).removeprefix("torch."),
            "device": device,
            "weight_bytes": plan.weight_bytes,
            "kv_bytes": plan.kv_bytes,
            "shard": [rank, len(devices)],
            "log_level": active_level(),
        }
        for rank, device in enumerate(devices)
    ]


def open_ranks(
    plan: SessionPlan, make_engine: Callable[[EngineSpec], Engine], ranks: Ranks | None = None
) -> tuple[Engine, RankedExecutor, SessionPlan]:
    """Start the ranks of `plan`, or take `ranks` that serve no session, and make the engine whose steps they run. Also
    return the plan with the values that were measured meanwhile. Raises RankFailed, ConfigError."""
    ranks = ranks or SessionRanks(rank_devices(plan.options.device, plan.options.tensor_parallel))
    try:
        answer = ranks.open(orders_of(plan, ranks.devices))
        plan = replace(plan, spec=engine_from_json(answer["engine"]))
        engine = make_engine(plan.spec)
        if plan.spec.graph_sizes is not None:
            engine.controller.init_states(plan.spec.graph_sizes if answer["captured"] else None)
    except BaseException:
        ranks.close(at_once=True)
        raise
    return engine, RankedExecutor(ranks, OWN, answer), plan
