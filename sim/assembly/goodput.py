"""The tables of times by which the policies goodput and confidence choose what to draft and verify."""

from __future__ import annotations

import numpy as np

from ...core.adaptive import CostTable
from ...core.adaptive.lengths.pass_costs import PassCosts
from ...core.contract.step import PARKED_ROUND, RoundShape
from ...core.errors import ConfigError
from ...core.scheduler.spec import EngineSpec
from ..cost.executor_steps import StepCost
from ..cost.host import HostCost, whole_round_ns
from ..cost.round import RoundCost


def cost_table(spec: EngineSpec, cost: RoundCost | StepCost, host: HostCost) -> CostTable:
    """Return round times for the goodput policy: the device's time, with the host beside it (overlap) or after it. A
    draft with KV may be parked: then 0 steps have the times of a parked draft, and a return its price."""
    most, shapes, has_look_ups = spec.config.max_running, spec.draft_shape, spec.make_algorithm().has_look_ups
    parks = isinstance(cost, RoundCost) and cost.keep_draft_warm and cost.draft is not None and not cost.draft.on_host
    sizes = sorted({1, 2, 3, 4, 6, 8, 12, 16, *range(24, most, 8), most} - {n for n in range(17) if n > most})
    round_ns, kv_token_ps = [], []
    for steps in spec.adaptive.candidate_steps:
        rounds = [shapes.round_shape(steps, size) if steps or not parks else PARKED_ROUND for size in sizes]
        device = [cost.decode_ns(size, shape, 0) for size, shape in zip(sizes, rounds, strict=True)]
        overlap = spec.config.overlap
        hosts = [host.round_ns(size, size, size if steps and not overlap else 0) for size in sizes]
        lates = [host.late_ns(size, has_look_ups) for size in sizes]
        each = zip(device, hosts, lates, strict=True)
        round_ns.append(tuple(whole_round_ns(one, beside, overlap, late) for one, beside, late in each))
        read = 1_000_000
        kv_token_ps.append((cost.decode_ns(sizes[-1], rounds[-1], read) - device[-1]) * 1000 // read)
    chunk = spec.config.chunk_size
    prefill_token_ps = cost.step_ns([(chunk, 0)]) * 1000 // chunk if parks else 0
    return CostTable(spec.adaptive.candidate_steps, tuple(sizes), tuple(round_ns), tuple(kv_token_ps), prefill_token_ps)


def pass_costs(spec: EngineSpec, cost: RoundCost | StepCost, host: HostCost) -> PassCosts:
    """Return the times of passes for the policy confidence: those that were given, else of drafting by steps and rows,
    and of everything else by the tokens that are verified. Raises ConfigError where no times of rounds of unequal rows
    are known."""
    if not isinstance(cost, RoundCost):
        message = "confidence needs times of rounds whose rows differ; the profile has those of equal rows"
        raise ConfigError.of("speculation", "policy", message)
    if isinstance(spec.cost_table, PassCosts):
        return spec.cost_table
    most, candidates = spec.config.max_running, spec.adaptive.candidate_steps
    has_look_ups = spec.make_algorithm().has_look_ups
    deepest = RoundShape.chain(candidates[-1])
    rows = sorted(
        {1, 2, 4, 8, 16, 32, 64, 128, 256, most} - {n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n > most}
    )

    widest, unit_is_rows = most * deepest.nodes, cost.graph_unit == "rows"
    captured_rows = tuple(cost.graph_sizes or ()) if unit_is_rows else ()
    # By size of a pass: the rounds that have it. Where captured sizes count rows, all those that graphs compute.
    shapes = {n: (min(n, most), deepest) for n in _token_sizes(widest)}
    if captured_rows:
        shapes = {n: shape for n, shape in shapes.items() if n > captured_rows[-1] * deepest.nodes or n == widest}
        for steps in (0, *candidates):
            shapes |= {size * (steps + 1): (size, RoundShape.chain(steps)) for size in captured_rows}

    def target_ns(tokens: int, size: int, shape: RoundShape) -> int:
        """Return the time of the target's pass over so many tokens, and of what follows it."""
        parts = cost.decode_parts(size, shape, 0, tokens if shape.steps else None)
        return sum(ns for name, ns in parts.items() if not name.startswith("draft"))

    def draft_ns(steps: int, size: int) -> int:
        shape = RoundShape.chain(steps)
        verified = size * shape.nodes
        round_ns = cost.decode_ns(size, shape, 0, verified if steps else None)
        return max(0, round_ns - target_ns(verified, size, shape))

    def verify_ns(tokens: int, size: int, shape: RoundShape) -> int:
        rows = min(tokens, most)
        late_ns = host.late_ns(rows, has_look_ups)
        waits_ns = late_ns if spec.config.overlap else host.round_ns(rows, rows, rows)
        return max(1, target_ns(tokens, size, shape) + waits_ns)

    sizes = sorted(shapes)
    if captured_rows:
        captured = captured_rows[-1] * deepest.nodes
    else:
        captured = max((n for n in sizes if cost.is_captured(-(-n // deepest.nodes), deepest.nodes)), default=0)
    verify = np.maximum.accumulate([verify_ns(n, *shapes[n]) for n in sizes]).tolist()
    read = 1_000_000

    def kv_token_ps(steps: int) -> int:
        shape = RoundShape.chain(steps)
        return int(cost.decode_ns(most, shape, read) - cost.decode_ns(most, shape, 0)) * 1000 // read

    draft = tuple(tuple(draft_ns(steps, size) for size in rows) for steps in candidates)
    reading = tuple(kv_token_ps(steps) for steps in candidates)
    return PassCosts(
        candidates, tuple(rows), draft, tuple(sizes), tuple(verify), reading, captured, captured_rows=captured_rows
    )


def _token_sizes(widest: int) -> list[int]:
    """Return how many tokens a pass of up to `widest` has for which times are taken."""
    return sorted({*range(1, min(17, widest)), *(n for n in range(16, widest, 8) if n <= 512 or n % 64 == 0), widest})
