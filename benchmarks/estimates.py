"""Times per token as a formula of what a server waits for: near a simulation, and quick, so that fits need few simulations.

`estimate` takes the times of kernels from the cost model once. A fit multiplies by what a simulation at its start says beside the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from foretoken.sim.assembly import assemble
from foretoken.sim.cost.efficiency import default_efficiency
from foretoken.sim.cost.forward import ForwardCost
from foretoken.sim.cost.server import PROFILES
from foretoken.sim.scenario_file import scenario_from_dict
from points import Point, profile_with

DEVICE = "device_scale"
FREE = dict.fromkeys(
    (
        "graph_gap_ns",
        "row_gap_ns",
        "collective_gap_ns",
        "eager_kernel_ns",
        "draft_step_ns",
        "tree_ns",
        "eagle3_step_ns",
    ),
    0.0,
)


class Estimate(NamedTuple):
    """What a point's time per token is made of, in ns: kernels of a round, of a round with one prompt, of that prompt alone."""

    point: Point
    decode_ns: float
    mixed_ns: float
    prompt_ns: float
    kernels: int
    collectives: int
    devices: int

    def token_ns(self, waits: Mapping[str, float]) -> float:
        """Return the time per token in a steady state, in which so many prompts come in each step. `waits`: those of the launch, and
        DEVICE, a factor on kernels; what is absent is the profile's."""
        point, scale = self.point, waits.get(DEVICE, 1.0)
        launch = replace(PROFILES[point.server].launch, **{name: ns for name, ns in waits.items() if name != DEVICE})
        wait = launch.target_gap_ns(point.concurrency) + launch.collectives_gap_ns(self.collectives, self.devices)
        drafting = 0.0
        if point.steps:
            drafting = (
                launch.graph_gap_ns + point.steps * launch.step_ns(point.algorithm) + launch.tree_ns * (point.topk > 1)
            )
        floor = self.kernels * launch.eager_kernel_ns
        # Where clients keep step, half of the prompts come before a request's first token.
        prompts = point.concurrency * point.accept_length / point.output * (1.0 if point.spread else 0.5)
        step = scale * self.decode_ns + wait + drafting
        if PROFILES[point.server].mixed:
            mixed = scale * self.mixed_ns + wait + drafting
            step += prompts * (mixed - step) + (1 - math.exp(-prompts)) * max(0.0, floor - mixed)
        else:
            step += prompts * max(scale * self.prompt_ns + wait, floor)
        return step / point.accept_length


def estimate(point: Point, kernels: str = "measured", tensor_parallel: int | None = None) -> Estimate:
    """Return the times of a point's kernels."""
    with profile_with(point.server, **FREE):
        run = assemble(scenario_from_dict(point.scenario(kernels, tensor_parallel), point.dataset))
    cost, passes = run.cost, ForwardCost(run.target, run.gpu, default_efficiency(run.gpu), run.cost.parallel)
    context, rows = point.prompt + point.output // 2, point.concurrency
    shape, prompt = (point.steps, point.topk, point.num_draft_tokens), [(point.prompt, 0)]
    mixed = cost.step_ns(prompt, (rows - 1, *shape, (rows - 1) * context) if rows > 1 else None)
    decode = cost.decode_ns(rows, *shape, rows * context)
    return Estimate(
        point, decode, mixed, cost.step_ns(prompt), passes.kernels, passes.collectives, cost.parallel.devices
    )
