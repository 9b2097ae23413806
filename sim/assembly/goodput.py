"""The table of round times by which the goodput policy chooses the number of draft steps."""

from __future__ import annotations

import operator

from ...core.adaptive import CostTable
from ...core.contract.step import PARKED_ROUND
from ...core.scheduler.spec import EngineSpec
from ..cost.executor_steps import StepCost
from ..cost.host import HostCost
from ..cost.round import RoundCost


def cost_table(spec: EngineSpec, cost: RoundCost | StepCost, host: HostCost) -> CostTable:
    """Return round times for the goodput policy: the device's time, with the host beside it (overlap) or after it. A
    draft with KV may be parked: then 0 steps have the times of a parked draft, and a return its price."""
    most, shapes = spec.config.max_running, spec.draft_shape
    parks = isinstance(cost, RoundCost) and cost.keep_draft_warm and cost.draft is not None and not cost.draft.on_host
    sizes = sorted({1, 2, 3, 4, 6, 8, 12, 16, *range(24, most, 8), most} - {n for n in range(17) if n > most})
    round_ns, kv_token_ps = [], []
    for steps in spec.adaptive.candidate_steps:
        rounds = [shapes.round_shape(steps, size) if steps or not parks else PARKED_ROUND for size in sizes]
        device = [cost.decode_ns(size, shape, 0) for size, shape in zip(sizes, rounds, strict=True)]
        overlap = spec.config.overlap
        hosts = [host.round_ns(size, size, size if steps and not overlap else 0) for size in sizes]
        combine = max if overlap else operator.add
        round_ns.append(tuple(map(combine, device, hosts)))
        read = 1_000_000
        kv_token_ps.append((cost.decode_ns(sizes[-1], rounds[-1], read) - device[-1]) * 1000 // read)
    chunk = spec.config.chunk_size
    prefill_token_ps = cost.step_ns([(chunk, 0)]) * 1000 // chunk if parks else 0
    return CostTable(spec.adaptive.candidate_steps, tuple(sizes), tuple(round_ns), tuple(kv_token_ps), prefill_token_ps)
