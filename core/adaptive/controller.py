"""The controller of an engine's draft steps. The engine asks it before each round, and passes it the verify results.

activate_step_by_batch(bs) ─► steps ─► launch ─► … ─► on_verify_complete(correct drafts, bs, executed steps)

In overlap mode the result of a round comes after the next choice. `CONTROLLER_TRANSITIONS` says whether results are of
the chosen steps yet. `GATE_TRANSITIONS` (policy.py) says when a choice may change again.

It touches no device: an executor finds the graph of a round under (steps, nodes, padded batch size), see `GraphTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ..contract.step import PARKED_ROUND, RoundShape
from ..errors import ConfigError, InvariantViolation, Problem
from .config import AdaptiveConfig, TreeNodes, load_adaptive_config
from .cost_table import CostTable
from .draft_shape import DraftTreeShape
from .goodput import GoodputPolicy
from .graphs import GraphKey
from .lengths.confidence import NO_BUDGETS, ConfidencePolicy, RowBudgets
from .lengths.pass_costs import PassCosts
from .parking import Parking
from .policy import FixedPolicy, RangeRouter, StepPolicy
from .slot import AdaptiveSpeculativeParams, InvalidObservation, checked_counts


@dataclass(frozen=True, slots=True)
class AdaptiveMetrics:
    """Counters since the start, with the controller's state.

    `accept_length` is 1 + correct drafts / verified rows and `accept_rate` accepted / proposed draft tokens; both are
    0.0 when nothing was verified or proposed. `correct_drafts_histogram[n]` counts rows with n correct drafts.
    `ema_accept_len` maps the lower bound of each range in which drafts were verified to its slot's EMA (empty for
    policies without one). `switches` counts changes of a choice. `activations` counts changes of the launched steps,
    which also change with the batch size.
    """

    steps: int | None
    num_draft_tokens: int | None
    switches: int
    activations: int
    ema_accept_len: Mapping[int, float]
    verify_calls: int
    verified_rows: int
    correct_drafts: float
    proposed_drafts: int
    accept_length: float
    accept_rate: float
    correct_drafts_histogram: tuple[int, ...]


class AdaptiveCounters:
    """Accumulates verify results of rows whose requests are still alive."""

    def __init__(self, max_num_draft_tokens: int) -> None:
        self._histogram = [0] * max_num_draft_tokens
        self._calls = 0
        self._rows = 0
        self._correct: float = 0
        self._proposed = 0

    def add(
        self,
        counts: Sequence[int],
        correct: float,
        rows: int,
        proposed_per_row: int,
        calls: int = 1,
        proposed: int = 0,
    ) -> None:
        """Add one verify call, or several: `counts[n]` rows with n correct drafts, each of `proposed_per_row` draft
        tokens, or all of `proposed`.
        """
        histogram = self._histogram
        if len(counts) > len(histogram):
            histogram += [0] * (len(counts) - len(histogram))
        for correct_drafts, count in enumerate(counts):
            if count:
                histogram[correct_drafts] += count
        self._calls += calls
        self._rows += rows
        self._correct += correct
        self._proposed += rows * proposed_per_row + proposed

    def read(self, gauges: Mapping[str, Any]) -> AdaptiveMetrics:
        rows, correct, proposed = self._rows, self._correct, self._proposed
        return AdaptiveMetrics(
            **gauges,
            verify_calls=self._calls,
            verified_rows=rows,
            correct_drafts=correct,
            proposed_drafts=proposed,
            accept_length=1 + correct / rows if rows else 0.0,
            accept_rate=correct / proposed if proposed else 0.0,
            correct_drafts_histogram=tuple(self._histogram),
        )


class ControllerState(IntEnum):
    NEW = 0  # no steps are chosen yet
    SWITCHED = 1  # other steps are chosen than before; rounds in flight may have those of before
    STEADY = 2  # a result of the chosen steps has come


class ControllerEvent(IntEnum):
    CHOOSE = 0  # the same steps again, for the next round
    SWITCH = 1  # other steps: the policy's choice, that of another batch size, or the fewest after a failure
    RESULT = 2  # of a round with the chosen steps
    LATE = 3  # of a round with other steps; it counts, but `ema` learns nothing from it


S, E = ControllerState, ControllerEvent
CONTROLLER_TRANSITIONS: dict[ControllerState, dict[ControllerEvent, ControllerState]] = {
    S.NEW: {E.SWITCH: S.SWITCHED, E.LATE: S.NEW},
    S.SWITCHED: {E.CHOOSE: S.SWITCHED, E.SWITCH: S.SWITCHED, E.RESULT: S.STEADY, E.LATE: S.SWITCHED},
    S.STEADY: {E.CHOOSE: S.STEADY, E.SWITCH: S.SWITCHED, E.RESULT: S.STEADY, E.LATE: S.STEADY},
}

_CHOOSE, _SWITCH, _RESULT, _LATE = E  # looked up once: every round takes an event

BuildGraphs = Callable[[Sequence[GraphKey]], object]


class AdaptiveController:
    """Adaptive steps for one engine, chosen by `policy`.

    `topk`, `num_draft_tokens` and `depth_limited` are the shape of the draft (see `DraftTreeShape`).
    """

    def __init__(
        self,
        policy: StepPolicy,
        *,
        topk: int = 1,
        num_draft_tokens: TreeNodes | Mapping[int, int] | None = None,
        depth_limited: bool = True,
    ) -> None:
        self.policy = policy
        self._shape_arguments = (topk, num_draft_tokens, depth_limited)
        self._shape = DraftTreeShape(policy.config, topk, num_draft_tokens, depth_limited)
        # The shapes built at start-up: a reloaded table may use only these.
        self._first_shapes = frozenset(self._shape.round_shapes())
        self._captured: frozenset[GraphKey] = frozenset()
        self._captured_sizes: tuple[int, ...] | None = None
        self.state: ControllerState = ControllerState.NEW
        self._active_steps: int | None = None
        self._active_bs = 1
        self._activations = 0
        self._counters = AdaptiveCounters(self._shape.max_num_draft_tokens)
        self._depth_limited = depth_limited
        self._fewest_only = False

    # --- what there is to choose from ---

    @property
    def topk(self) -> int:
        return self._shape.topk

    @property
    def candidates(self) -> tuple[int, ...]:
        """The sorted union over all ranges."""
        return self.policy.config.candidate_steps

    @property
    def max_steps(self) -> int:
        return self.candidates[-1]

    @property
    def max_num_draft_tokens(self) -> int:
        """The greatest number of draft tokens over all candidates; every reservation uses it."""
        return self._shape.max_num_draft_tokens

    def round_shape(self, steps: int, bs: int) -> RoundShape:
        """Return the shape of a round: 1 node for 0 steps and steps + 1 for chains; for trees the range and the steps
        decide. While the draft is parked, every round of 0 steps is that of a parked draft.
        """
        return PARKED_ROUND if self.parking.is_parked and not steps else self._shape.round_shape(steps, bs)

    @property
    def parking(self) -> Parking:
        """Whether the draft is parked, by the policy's choice."""
        return self.policy.parking

    @property
    def budgets(self) -> RowBudgets:
        """What leaves the lengths of rows to the device: the policy `confidence`, or nothing."""
        return self.policy if isinstance(self.policy, ConfidencePolicy) else NO_BUDGETS

    def fewest_steps(self, bs: int) -> int:
        """Return the smallest candidate for a round of `bs` rows."""
        return self._shape.fewest_steps(bs)

    def init_states(self, captured_sizes: Sequence[int] | None = None, build: BuildGraphs | None = None) -> None:
        """Route by these captured batch sizes (None: graphs are off), after `build` has captured the graphs of all
        keys.

        If building raises an error, the routing stays as it was, and the error is passed on. Raises
        `InvalidGraphSizes`.
        """
        router = RangeRouter(self.policy.config, captured_sizes)
        shape = DraftTreeShape(self.policy.config, *self._shape_arguments)
        shape.set_router(router)
        keys = shape.graph_keys()
        if self.parking.prefill_token_ps:
            keys += tuple(GraphKey(PARKED_ROUND, size) for size in reversed(router.sizes))
        if build is not None:
            build(keys)
        self._shape, self._captured, self._captured_sizes = shape, frozenset(keys), router.sizes or None
        self.policy.set_cuda_graph_bs(self._captured_sizes)

    # --- every round ---

    def draft_fewest(self, fewest_only: bool) -> None:
        """With True, use the smallest candidate of each batch size from the next round on; with False, the policy's
        choice again.

        The policy keeps its estimates.
        """
        self._fewest_only = fewest_only

    def activate_step_by_batch(self, bs: int, kv_tokens: int = 0) -> int:
        """Choose the steps of the round about to be launched with `bs` rows reading `kv_tokens` KV tokens in all."""
        steps = self.policy.steps_for(bs, kv_tokens)
        if self._fewest_only:
            steps = min(steps, self._shape.fewest_steps(bs))
        if steps == self._active_steps:
            event = _CHOOSE
        else:
            event = _SWITCH
            self._activations += self.state is not ControllerState.NEW
        self.state = CONTROLLER_TRANSITIONS[self.state][event]
        self._active_steps = steps
        self._active_bs = bs
        return steps

    def on_verify_complete(self, correct_drafts: Iterable[float], bs: int, executed_steps: int) -> None:
        """Count one verify result: the correct drafts of the rows still alive, of a round launched with `bs` rows.

        An empty result changes nothing. Raises `InvalidObservation`, and changes nothing, for values that
        `executed_steps` cannot produce.
        """
        if executed_steps < 0:
            raise InvalidObservation(f"executed steps {executed_steps}; expected an integer >= 0")
        nd = self._shape.round_shape(executed_steps, bs).nodes
        limit = min(executed_steps, nd - 1) if self._depth_limited else nd - 1
        total: float = 0
        rows = 0
        if type(correct_drafts) is not np.ndarray:
            correct_drafts = list(correct_drafts)
        counts = checked_counts(correct_drafts, limit)
        for correct, count in enumerate(counts):
            if count:
                rows += count
                total += correct * count
        if not rows:
            return
        if type(correct_drafts) is list:
            total = sum(correct_drafts)  # the histogram counts a fraction at its floor, the mean uses it exactly
        self._heard(executed_steps)
        self._counters.add(counts, total, rows, nd - 1)
        self.policy.observe(counts, total, rows, bs, executed_steps)

    def on_verify_rounds(self, correct_drafts: np.ndarray, bs: int, executed_steps: int) -> None:
        """Count the verify results of a multi-step, int [rounds, rows], as `on_verify_complete` does one by one.

        A fixed policy learns nothing from them, so they are counted at once.
        """
        if self.policy.name != FixedPolicy.name:
            for counts in correct_drafts:
                self.on_verify_complete(counts, bs, executed_steps)
            return
        rounds, rows = correct_drafts.shape
        if not rows:
            return
        proposed = self._shape.round_shape(executed_steps, bs).nodes - 1
        limit = min(executed_steps, proposed) if self._depth_limited else proposed
        if not proposed and not np.count_nonzero(correct_drafts):
            self._heard(executed_steps)
            self._counters.add((rounds * rows,), 0, rounds * rows, 0, calls=rounds)
            return
        counts = checked_counts(correct_drafts.ravel(), limit)
        self._heard(executed_steps)
        total = sum(correct * count for correct, count in enumerate(counts))
        self._counters.add(counts, total, rounds * rows, proposed, calls=rounds)

    def on_chosen(self, correct_drafts: np.ndarray, row_nodes: np.ndarray, executed_steps: int) -> None:
        """Count a verify result of rows that verified so many nodes each, as the device chose: int [rows] both."""
        if not len(correct_drafts):
            return
        counts = checked_counts(correct_drafts, executed_steps)
        self._heard(executed_steps)
        rows, proposed = len(correct_drafts), int(row_nodes.sum()) - len(row_nodes)
        self._counters.add(counts, int(correct_drafts.sum()), rows, 0, proposed=proposed)

    def _heard(self, executed_steps: int) -> None:
        event = _RESULT if executed_steps == self._active_steps else _LATE
        self.state = CONTROLLER_TRANSITIONS[self.state][event]

    def rounds_to_next_decision(self, bs: int) -> int:
        """Return after how many results of this batch size, at the earliest, its steps may change. At least 1."""
        return self.policy.rounds_to_next_decision(bs)

    # --- a new table, metrics, state ---

    def reload(self, config: str | Mapping[str, Any] | AdaptiveConfig, source: str | None = None) -> None:
        """Use another table from the next round on; steps in flight keep theirs. The arguments are those of
        `load_adaptive_config`.

        Raises `ConfigError` if the table is invalid, or needs candidates, graphs or draft tokens that were not built at
        start-up. Then the running policy stays as it was.
        """
        new = load_adaptive_config(config, source)
        reload = getattr(self.policy, "reload", None)
        if reload is None:
            raise ConfigError.of(new.source, "", f"the {self.policy.name} policy has no table to reload")
        shape = DraftTreeShape(new, *self._shape_arguments)
        shape.set_router(RangeRouter(new, self._captured_sizes))
        problems = [
            Problem("candidate_steps", f"{each.steps} steps with {each.nodes} draft tokens were not built at start-up")
            for each in shape.round_shapes()
            if each not in self._first_shapes
        ]
        missing: dict[int, list[int]] = {}
        for key in sorted(set(shape.graph_keys()) - self._captured):
            missing.setdefault(key.shape.steps, []).append(key.batch_size)
        for steps, sizes in missing.items():
            problems.append(Problem("candidate_steps", f"{steps} steps have no captured graph for sizes {sizes}"))
        if problems:
            raise ConfigError(new.source, problems)
        reload(new)
        self._shape = shape

    def metrics(self) -> AdaptiveMetrics:
        """Return the counters since the start."""
        return self._counters.read(self._gauges())

    def _gauges(self) -> dict[str, Any]:
        steps = self._active_steps
        slots = getattr(self.policy, "slots", ())
        return {
            "steps": steps,
            "num_draft_tokens": None if steps is None else self._shape.round_shape(steps, self._active_bs).nodes,
            "switches": self.policy.switches,
            "activations": self._activations,
            "ema_accept_len": {
                bound: slot.ema_accept_len
                for bound, slot in zip(self.policy.config.bounds, slots, strict=False)
                if slot.is_measured
            },
        }

    def snapshot(self) -> dict[str, object]:
        """Return the state on which the next choices depend, as plain data."""
        return {"active_steps": self._active_steps, **self.policy.snapshot()}

    def check(self) -> None:
        """Raise `InvariantViolation` if the active steps are no candidate."""
        if self._active_steps is not None and self._active_steps not in self.candidates:
            raise InvariantViolation("STEPS-01", f"active steps {self._active_steps} not in {self.candidates}")


POLICIES = ("fixed", "ema", "goodput", "confidence")


def fixed_controller(steps: int, **shape: Any) -> AdaptiveController:
    """Return a controller with one candidate; `shape` as for `AdaptiveController`."""
    return AdaptiveController(FixedPolicy(steps), **shape)


def build_controller(
    policy: str,
    config: str | Mapping[str, Any] | AdaptiveConfig = "default",
    *,
    initial_steps: int | None = None,
    cost_table: CostTable | PassCosts | None = None,
    temperatures: tuple[float, ...] = (),
    **shape: Any,
) -> AdaptiveController:
    """Return a controller from a policy's name. Raises `ConfigError` for an unknown name, or `goodput` and `confidence`
    without a cost table.

    `fixed` takes `initial_steps` (default: the middle of the table's candidates) and needs no more of the table.
    `temperatures`: of confidences, for each draft position; `confidence` alone makes use of them.
    """
    if policy == "fixed":
        steps = initial_steps if initial_steps is not None else AdaptiveSpeculativeParams(None, config).initial_steps
        return fixed_controller(steps, **shape)
    if policy == "ema":
        return AdaptiveController(AdaptiveSpeculativeParams(initial_steps, config), **shape)
    if policy == "goodput":
        if not isinstance(cost_table, CostTable):
            raise ConfigError.of("<arguments>", "cost_table", "is missing; the goodput policy decides with one")
        table = load_adaptive_config(config)
        return AdaptiveController(
            GoodputPolicy(table, cost_table, initial_steps, DraftTreeShape(table, **shape)), **shape
        )
    if policy == ConfidencePolicy.name:
        if not isinstance(cost_table, PassCosts):
            raise ConfigError.of("<arguments>", "cost_table", "has no times of passes; confidence decides with them")
        if shape.get("topk", 1) > 1 or not shape.get("depth_limited", True):
            raise ConfigError.of("<arguments>", "policy", "confidence is for chains that a model drafts: topk 1")
        chooser = ConfidencePolicy(load_adaptive_config(config), cost_table, initial_steps, temperatures)
        return AdaptiveController(chooser, **shape)
    message = f"is {policy!r}; expected one of {', '.join(POLICIES)}"
    raise ConfigError.of("<arguments>", "policy", message)
