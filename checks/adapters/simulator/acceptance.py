"""The acceptance processes of a simulator, asked by themselves."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ....core.acceptance.presets import TraceAcceptance
from ....core.acceptance.process import AcceptanceProcess, FixedMeanAcceptance, GaussianAcceptance, walk_to_end
from ....core.draws import request_key
from ....sim.running.run import Simulation
from ....sim.workload.workload import TimedRequest

NUM_DRAWS, NUM_SELDOM = 2000, 1 << 18
POSITIONS = (0, 37, 400)
STARTS = (0, 13, 400, 32, 7)
WIDTH = 24
RECORDED = {"a": (3, 0, 1, 2), "b": (0, 5, 1), "c": (2,)}
SELDOM = 0.98 / 4096


def acceptance_of(simulation: Simulation, arrivals: list[TimedRequest]) -> dict[str, Any]:
    """Return what the acceptance process itself says of every request: the longest runs at its output positions, and
    successive rounds; its parameters, with the depths of many runs; and what it and other processes say in windows."""
    spec = simulation.assembly.spec
    if not spec.max_steps:
        return {"runs": {}, "rounds": {}, "process": {}, "asked": _others()}
    ids, num_positions = [f"r{arrival.row}" for arrival in arrivals], max(arrival.output_len for arrival in arrivals)
    chain: Any = simulation.assembly.acceptance
    process = chain
    steps, nodes, rank_ratio = spec.max_steps, spec.max_num_draft_tokens, simulation.scenario.acceptance.rank_ratio
    if spec.topk > 1:
        process = chain.for_tree(spec.largest_round, rank_ratio)
    keys = np.array([request_key(name) for name in ids], dtype=np.uint64)
    starts = np.zeros(len(ids), np.int64)
    runs = process.longest_run(keys[:, None], np.arange(num_positions)[None, :])
    count = 1 + (num_positions - 1) // (steps + 1)  # rounds that start before the last position, however many accept
    counted = process.accept_lens(keys, starts, steps, count)
    output_lens = np.array([arrival.output_len for arrival in arrivals])
    to_end = walk_to_end(process.run_windows(keys, starts, num_positions), steps, output_lens)
    drawn = process.longest_run(np.arange(NUM_DRAWS, dtype=np.uint64), np.zeros(1, np.int64))
    depths = min(steps, process.max_depth)
    parameters = {"conditional": chain.conditional, "depths": depths, "topk": spec.topk, "rank_ratio": rank_ratio}
    return {
        "runs": dict(zip(ids, runs.tolist(), strict=True)),
        "rounds": {
            "steps": steps,
            "count": count,
            "counted": dict(zip(ids, counted.T.tolist(), strict=True)),
            "to_end": {name: lens[lens > 0].tolist() for name, lens in zip(ids, to_end.T, strict=True)},
        },
        "process": {
            "parameters": parameters | {"num_nodes": nodes, "draft_confidence": chain.draft_confidence},
            "survival": list(process.survival[:depths]),
            "num_draws": NUM_DRAWS,
            "shares": [float((drawn >= depth).mean()) for depth in range(1, depths + 1)],
        },
        "asked": [_asked(process, keys, _law_of(process, steps if spec.topk > 1 else None)), *_others()],
    }


def _law_of(process: GaussianAcceptance, depths: int | None = None) -> dict[str, Any]:
    regimes = process.regimes
    return {
        "survival": process.survival[:depths],
        "levels": [(1.0, 0.0)] if regimes is None else list(zip(regimes.weights, regimes.shifts, strict=True)),
        "drift": process.drift_per_1k_tokens / 1000,
    }


def _asked(
    process: AcceptanceProcess, keys: np.ndarray, law: dict[str, Any], num_draws: int = NUM_DRAWS
) -> dict[str, Any]:
    """Ask a process for the windows of some requests and for the runs of many."""
    starts = np.resize(STARTS, len(keys)).astype(np.int64)
    windows = process.run_windows(keys, starts, WIDTH)
    alone = process.longest_run(keys[:, None], starts[:, None] + np.arange(WIDTH))
    many = np.arange(num_draws, dtype=np.uint64)
    counts = [(at, np.bincount(process.longest_run(many, np.full(1, at, np.int64))).tolist()) for at in POSITIONS]
    return {
        "law": law,
        "windows": list(zip(starts.tolist(), windows.tolist(), alone.tolist(), strict=True)),
        "num_draws": num_draws,
        "counts": counts,
    }


@cache
def _others() -> tuple[dict[str, Any], ...]:
    """Return what processes say that no service of the contract has: of a fixed mean, of recorded runs, and of drafts
    that are seldom right."""
    keys = np.arange(len(STARTS), dtype=np.uint64)
    seldom = GaussianAcceptance((SELDOM,), max_depth=1)
    return (
        _asked(FixedMeanAcceptance(2.6), keys, {"mean": 2.6}),
        _asked(TraceAcceptance.of_runs(RECORDED), keys, {"recorded": tuple(RECORDED.values())}),
        _asked(seldom, keys, _law_of(seldom), NUM_SELDOM),
    )
