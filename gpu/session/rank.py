"""The process of a rank that serves sessions: `python -m foredraft.gpu.session.rank FD`, started by
`orders.SessionRanks`."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ...core.algorithm.registry import get_algorithm
from ...observe.engine_lines import forward_lines
from ..models.config import ModelConfig
from ..parallel.page_tensors import PageTensors
from ..parallel.rank import Rank, RankJob, identity_of, run_rank
from ..parallel.ranks import OWN, SPARE
from ..parallel.wire import engine_from_json, engine_to_json
from ..tiny.scoring import score_prompt
from ..types.shards import Shard
from .orders import options_from_json
from .plan import SessionPlan
from .ready import spare_executor
from .session import load_engine
from .text import Tokenizer


class SessionJob(RankJob):
    """Serves the steps of a session's engine, which the parent has."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def open(self, order: dict[str, Any]) -> dict[str, Any]:
        rank = self._rank
        forward_lines(order["log_level"] if rank.number == 0 else None, rank.send_line)
        plan = _plan_of(order)
        _, executor, plan = load_engine(plan, Tokenizer.load(plan.options.model), lambda spec: [])
        rank.executors[OWN] = executor
        rank.pages = PageTensors(executor, plan.spec.config.page_size)
        return {
            "engine": engine_to_json(plan.spec),
            "captured": executor.draft.is_captured,
            "page_format": asdict(rank.pages.format),
            "relayed": asdict(executor.relayed),
            "identity": identity_of(order["options"], [order["dtype"], order["engine"]]),
        }

    def score(self, prompt: list[int], num_top: int) -> None:
        scores = score_prompt(self._rank.executors[OWN].target, np.array(prompt), num_top)
        self._rank.answer("scored", scores=scores if self._rank.number == 0 else None)

    def make_spare(self, engine: dict[str, Any]) -> None:
        spare = engine_from_json(engine).make_engine(lambda event: None)
        self._rank.executors[SPARE] = spare_executor(self._rank.executors[OWN], spare)
        self._rank.answer("made")

    def free_spare(self) -> None:
        del self._rank.executors[SPARE]
        gc.collect()  # executors are in reference cycles


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


if __name__ == "__main__":
    run_rank(SessionJob)
