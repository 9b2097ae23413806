"""The process of a rank of a benchmark: `python -m foredraft.gpu.measure.rank FD`, started by `ranks.BenchRanks`."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

from ..parallel.rank import Rank, RankJob, identity_of, run_rank
from ..types.shards import Shard
from .plan import plan_bench
from .ranks import options_from_json
from .run import Bench


class BenchJob(RankJob):
    """Runs the steps of a benchmark's arms, whose engines the parent has."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._bench: Bench | None = None

    def open(self, order: dict[str, Any]) -> dict[str, Any]:
        rank = self._rank
        plan = plan_bench(options_from_json(order["options"]))
        plan = replace(plan, device=rank.device)
        self._bench = Bench(plan, shard=Shard(rank.number, order["size"]))
        settings = [str(plan.dtype), [cell.arms[-1].spec.to_json() for cell in plan.cells]]
        return {"identity": identity_of(order["options"], settings)}

    def make_arm(self, cell: int, arm: int) -> None:
        assert self._bench is not None, "no benchmark was opened"
        if not arm:
            self._rank.executors.clear()
            gc.collect()  # executors are in reference cycles, and their pools are large
        self._rank.executors[arm] = self._bench.make_executor(cell, arm)
        self._rank.answer("made")


if __name__ == "__main__":
    run_rank(BenchJob)
