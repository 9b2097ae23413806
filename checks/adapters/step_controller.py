"""Our adaptive controller with each of its policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from ...core.adaptive import AdaptiveController, CostTable, build_controller, load_adaptive_config
from ...core.adaptive.graphs import GraphKey, GraphTable
from ...core.adaptive.policy import FixedPolicy
from ...properties.step_controller.contract import BuildGraph, StepControllerCapabilities, StepControllerConfig

SHOWN = ("steps", "ema_accept_len", "count", "switches", "until_recompute", "probing", "failed_probes", "wait")
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class GivenStepsPolicy(FixedPolicy):
    """Drafts the number of steps that it is given, one of several candidates."""

    name = "given"

    def __init__(self, candidates: Sequence[int]) -> None:
        super().__init__(candidates[-1])
        self.config = load_adaptive_config({"1": {"candidate_steps": list(candidates)}})

    def set_steps(self, steps: int) -> None:
        """Draft so many steps from now on."""
        self._steps = steps


class NotedController(AdaptiveController):
    """Notes the results that it gets: (rows, draft steps) of each round."""

    def __init__(self, policy: GivenStepsPolicy, topk: int, nodes: int | None) -> None:
        super().__init__(policy, topk=topk, num_draft_tokens=nodes)
        self.lessons: list[tuple[int, int]] = []

    def on_verify_complete(self, correct_drafts: Iterable[float], bs: int, executed_steps: int) -> None:
        self.lessons.append((bs, executed_steps))
        super().on_verify_complete(correct_drafts, bs, executed_steps)


class ControllerAdapter:
    """A controller with the table of graphs that an executor has."""

    def __init__(self, controller: AdaptiveController) -> None:
        self.controller = controller
        self.policy: Any = controller.policy
        self.graphs: GraphTable[object] = GraphTable()

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        return self.controller.activate_step_by_batch(batch_size, kv_tokens)

    def observe(self, correct_drafts: Sequence[float], batch_size: int, executed_steps: int) -> None:
        self.controller.on_verify_complete(correct_drafts, batch_size, executed_steps)

    def observe_multi_step(self, correct_drafts: Sequence[Sequence[int]], batch_size: int, executed_steps: int) -> None:
        self.controller.on_verify_rounds(np.array(correct_drafts), batch_size, executed_steps)

    def state(self) -> dict[str, object]:
        return dict(self.policy.snapshot())

    def counted(self) -> tuple[int, int, float, int]:
        found = self.controller.metrics()
        return found.verify_calls, found.verified_rows, found.correct_drafts, found.proposed_drafts

    def gauges(self) -> dict[str, object]:
        found, snapshot = self.controller.metrics(), self.policy.snapshot()
        shapes = snapshot.get("estimate", {}).get("shapes", {})
        return {
            "steps": found.steps,
            "draft_tokens": found.num_draft_tokens,
            "changes": found.activations,
            "accept_length": found.accept_length,
            "accept_rate": found.accept_rate,
            "histogram": found.correct_drafts_histogram,
            "switches": found.switches,
            "averages": sorted(found.ema_accept_len.items()),
            "ranges": [[slot[name] for name in SHOWN] for slot in snapshot.get("slots", {}).values()],
            "results": snapshot.get("round"),
            "waiting": [
                (int(shape.partition(":")[0]), counts)
                for shape, own in shapes.items()
                for counts in own["pending"].values()
            ],
        }

    def average(self, batch_size: int) -> float:
        return self.policy.slot_for_batch(batch_size).ema_accept_len

    def reserved(self) -> int:
        return self.controller.max_num_draft_tokens

    def expected(self, steps: int, batch_size: int) -> float:
        return self.policy.estimate.expected(self.controller.round_shape(steps, batch_size))

    def copied(self) -> ControllerAdapter:
        return deepcopy(self, {id(self.policy.cost_table): self.policy.cost_table})

    def attach(self, build: BuildGraph, captured: Sequence[int] | None) -> None:
        def capture(key: GraphKey) -> object:
            return build(key.shape.steps, key.shape.nodes, key.batch_size)

        self.controller.init_states(captured, lambda keys: self.graphs.build(keys, capture))

    def graph(self, steps: int, batch_size: int) -> object:
        return self.graphs.find(self.controller.round_shape(steps, batch_size), batch_size)

    def reload(self, text: str) -> None:
        self.controller.reload(text)


def initial_of(config: StepControllerConfig) -> int | None:
    """Return the steps to begin with, None for those that follow from the table."""
    return None if config.initial < 0 else config.initial


def make_fixed(config: StepControllerConfig) -> ControllerAdapter:
    """Make one that always chooses the same steps."""
    only = load_adaptive_config(config.table).candidate_steps[0]
    return ControllerAdapter(build_controller("fixed", initial_steps=only))


def make_ema(config: StepControllerConfig) -> ControllerAdapter:
    """Make one that follows the moving average of each range."""
    return ControllerAdapter(build_controller("ema", config.table, initial_steps=initial_of(config)))


def make_goodput(config: StepControllerConfig) -> ControllerAdapter:
    """Make one that chooses the most expected tokens per second, by the modelled cost."""
    table = load_adaptive_config(config.table)
    costs = CostTable.from_function(  # on a grid; the cost is linear, so nothing is lost
        lambda batch_size, steps, kv_tokens: config.round_time_ns(steps, batch_size, kv_tokens),
        table.candidate_steps,
        _BATCH_SIZES,
    )
    return ControllerAdapter(build_controller("goodput", table, cost_table=costs))


EACH = ("inspection", "counters", "gauges", "multi_steps", "sizing", "runtime", "misuse")
make_fixed.capabilities = StepControllerCapabilities.of(EACH)
make_ema.capabilities = StepControllerCapabilities.of(
    (*EACH, "adaptive", "averages", "average_rule", "probes", "settles", "reload")
)
make_goodput.capabilities = StepControllerCapabilities.of(
    (*EACH, "adaptive", "probes", "settles", "estimates", "unordered", "goodput")
)
