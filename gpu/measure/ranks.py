"""The ranks of a benchmark: each makes the executors of the arms with its part of the models.

The arms and their engines are in the parent, so the times contain what it costs to tell all ranks a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..parallel.ranks import RankedExecutor, Ranks
from ..types.shards import rank_devices
from .plan import BenchOptions


class BenchRanks(Ranks):
    """Ranks that have loaded the models of a benchmark."""

    module = "foredraft.gpu.measure.rank"

    def make_arm(self, cell: int, arm: int) -> RankedExecutor:
        """Make the executors of an arm, by its place in the plan; with the first of a cell those of others go."""
        self.tell({"do": "make_arm", "cell": cell, "arm": arm})
        self.gather("made")
        return RankedExecutor(self, arm)


def open_bench_ranks(options: BenchOptions) -> BenchRanks:
    """Start the ranks of a benchmark, and have them load its models. Raises RankFailed."""
    ranks = BenchRanks(rank_devices(options.device, options.tensor_parallel))
    order = {"options": options_to_json(options)}
    try:
        ranks.open([{**order, "size": len(ranks.devices)} for _ in ranks.devices])
    except BaseException:
        ranks.close(at_once=True)
        raise
    return ranks


def options_to_json(options: BenchOptions) -> dict[str, Any]:
    return {**asdict(options), "model": None if options.model is None else str(options.model)}


def options_from_json(value: Mapping[str, Any]) -> BenchOptions:
    return BenchOptions(**{**value, "model": None if value["model"] is None else Path(value["model"])})
