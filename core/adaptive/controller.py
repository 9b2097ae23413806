"""The controller that an engine talks to: steps for this round, feedback of past rounds, one runtime state per choice.

activate_step_by_batch(bs) ─► steps ─► launch ─► … ─► on_verify_complete(correct drafts, bs, executed steps)
         │                                                        │
         └── the only place that swaps the runtime state          └── only moves the policy's estimate
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, ForetokenError, InvariantViolation, Problem
from .config import AdaptiveConfig, load_adaptive_config
from .cost_table import CostTable
from .draft_shape import DraftShape
from .goodput import GoodputPolicy
from .metrics import AdaptiveCounters, AdaptiveMetrics
from .params import AdaptiveSpeculativeParams
from .policy import FixedPolicy, StepPolicy
from .routing import RangeRouter
from .slot import InvalidObservation, checked_counts


class MissingRuntimeState(ForetokenError):
    """A round wants steps for which no runtime state was built or registered; the message lists those that were."""


class RuntimeHost(Protocol):
    """Owner of what changes with the steps: graphs, attention metadata, buffers.

    A runtime state is the mapping of all those fields. Building may change the live fields; the controller puts them
    back.
    """

    def build_runtime_state(
        self, steps: int, num_draft_tokens: int, cuda_graph_bs: tuple[int, ...] | None
    ) -> Mapping[str, object]:
        """All fields for one step count, with graphs for these batch sizes only (None: graphs are off)."""
        ...

    def runtime_fields(self) -> Mapping[str, object]:
        """The live value of every field that a state may set."""
        ...

    def install_runtime_fields(self, fields: Mapping[str, object]) -> None:
        """Make these the live values."""
        ...


class AdaptiveController:
    """Adaptive steps for one engine. `policy` chooses; `host`, if there is one, has runtime states to swap.

    `topk`, `num_draft_tokens` and `depth_limited` are the shape of the draft (see `DraftShape`).
    """

    def __init__(
        self,
        policy: StepPolicy,
        *,
        topk: int = 1,
        num_draft_tokens: int | Mapping[int, int] | None = None,
        depth_limited: bool = True,
        host: RuntimeHost | None = None,
    ) -> None:
        self.policy = policy
        self._shape_arguments = (topk, num_draft_tokens, depth_limited)
        self._shape = DraftShape(policy.config, topk, num_draft_tokens, depth_limited)
        self._first_config = policy.config  # what is built and captured: a later table chooses among that
        self._first_keys = self._shape.state_keys()
        self._host = host
        self._states: dict[tuple[int, int], dict[str, object]] = {}
        self._active_key: tuple[int, int] | None = None
        self._active_steps: int | None = None
        self._active_bs = 1
        self._captured_sizes: tuple[int, ...] | None = None
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

    candidate_steps = candidates

    @property
    def max_steps(self) -> int:
        return self.candidates[-1]

    @property
    def min_steps(self) -> int:
        return self.candidates[0]

    @property
    def max_num_draft_tokens(self) -> int:
        """The greatest number of draft tokens over all candidates: what every reservation uses."""
        return self._shape.max_num_draft_tokens

    def num_draft_tokens_for(self, steps: int, bs: int) -> int:
        """Nodes of the verify tree of a round: steps + 1 for chains, the range's own for trees, 1 for 0 steps."""
        return self._shape.num_draft_tokens(steps, bs)

    def fewest_steps(self, bs: int) -> int:
        """The smallest candidate that a round of `bs` rows may draft."""
        return self._shape.fewest_steps(bs)

    def cuda_graph_bs_for_step(self, step: int) -> tuple[int, ...] | None:
        """The captured sizes that can reach `step`; None when graphs are off."""
        return RangeRouter(self.policy.config, self._captured_sizes).graph_sizes_of_step(step)

    def _built_graph_sizes(self, steps: int) -> tuple[int, ...]:
        """The sizes with a graph of these steps, whatever table is in force; empty when graphs are off."""
        return RangeRouter(self._first_config, self._captured_sizes).graph_sizes_of_step(steps) or ()

    # --- runtime states ---

    def register(self, steps: int, fields: Mapping[str, object], num_draft_tokens: int | None = None) -> None:
        """Hand in a runtime state that is already built, such as the one the host started with."""
        nd = num_draft_tokens if num_draft_tokens is not None else self._shape.num_draft_tokens(steps, 1)
        self._states[steps, nd] = dict(fields)

    def init_states(self, captured_sizes: Sequence[int] | None = None) -> None:
        """Take the captured batch sizes (None: graphs are off) and build the missing runtime states.

        One state per candidate, with graphs for those sizes only that can reach it. If building raises, the host's live
        fields, the states and the routing are as before, and the error goes on. Raises `InvalidGraphSizes`.
        """
        router = RangeRouter(self.policy.config, captured_sizes)
        before_router = RangeRouter(self.policy.config, self._captured_sizes)
        self._shape.set_router(router)
        built: dict[tuple[int, int], dict[str, object]] = {}
        if self._host is not None:
            live = dict(self._host.runtime_fields())
            try:
                for steps, nd in self._shape.state_keys():
                    if (steps, nd) not in self._states:
                        sizes = self._shape.graph_sizes(steps, nd)
                        built[steps, nd] = dict(self._host.build_runtime_state(steps, nd, sizes))
            except BaseException:
                self._shape.set_router(before_router)
                raise
            finally:
                self._host.install_runtime_fields(live)
        self._states.update(built)
        self._captured_sizes = router.sizes or None
        self.policy.set_cuda_graph_bs(self._captured_sizes)

    # --- every round ---

    def draft_fewest(self, fewest_only: bool) -> None:
        """From the next activation on: the smallest candidate of each batch size whatever the policy says, or the policy again.

        What the policy knows stays as it is: feedback of other steps than its own is counted nowhere.
        """
        self._fewest_only = fewest_only

    def activate_step_by_batch(self, bs: int, kv_tokens: int = 0) -> int:
        """The steps of the round about to be launched with `bs` rows reading `kv_tokens` KV tokens in all.

        Swaps the host's runtime state if the choice has changed. Raises `MissingRuntimeState`.
        """
        steps = self.policy.steps_for(bs, kv_tokens)
        if self._fewest_only:
            steps = min(steps, self._shape.fewest_steps(bs))
        if self._host is not None:
            self._activate(steps, self._shape.num_draft_tokens(steps, bs))
        elif steps != self._active_steps:
            self._activations += self._active_steps is not None
        self._active_steps = steps
        self._active_bs = bs
        return steps

    def _activate(self, steps: int, num_draft_tokens: int) -> None:
        assert self._host is not None
        key = (steps, num_draft_tokens)
        if key == self._active_key:
            return
        if key not in self._states:
            raise MissingRuntimeState(
                f"no runtime state for {steps} steps and {num_draft_tokens} draft tokens; there are states for"
                f" {sorted(self._states)}: call init_states or register first"
            )
        live = dict(self._host.runtime_fields())
        if self._active_key is not None:
            # What the host changed in its fields while the state was live belongs to the state, and returns with it.
            self._states[self._active_key] = {name: live.get(name, value) for name, value in self._active_state()}
        try:
            self._host.install_runtime_fields(self._states[key])
        except BaseException:
            self._host.install_runtime_fields(live)
            raise
        self._activations += self._active_key is not None
        self._active_key = key

    def _active_state(self) -> Iterable[tuple[str, object]]:
        assert self._active_key is not None
        return self._states[self._active_key].items()

    def on_verify_complete(self, correct_drafts: Iterable[float], bs: int, executed_steps: int) -> None:
        """One verify result: correct drafts of the rows still alive, of a round launched with `bs` rows.

        An empty result changes nothing. Raises `InvalidObservation`, and changes nothing, for values that
        `executed_steps` cannot produce. Never swaps the runtime state.
        """
        if executed_steps < 0:
            raise InvalidObservation(f"executed steps {executed_steps}; expected an integer >= 0")
        nd = self._shape.num_draft_tokens(executed_steps, bs)
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
            total = sum(correct_drafts)  # fractions are counted at their floor, but averaged as they are
        self._counters.add(counts, total, rows, nd - 1)
        self.policy.observe(counts, total, rows, bs, executed_steps)

    def on_verify_rounds(self, correct_drafts: np.ndarray, bs: int, executed_steps: int) -> None:
        """The verify results of a block, int [rounds, rows], as if told one by one; at once where the policy does not listen."""
        if self.policy.name != FixedPolicy.name:
            for counts in correct_drafts:
                self.on_verify_complete(counts, bs, executed_steps)
            return
        rounds, rows = correct_drafts.shape
        if not rows:
            return
        proposed = self._shape.num_draft_tokens(executed_steps, bs) - 1
        limit = min(executed_steps, proposed) if self._depth_limited else proposed
        if not proposed and not np.count_nonzero(correct_drafts):
            self._counters.add((rounds * rows,), 0, rounds * rows, 0, calls=rounds)
            return
        counts = checked_counts(correct_drafts.ravel(), limit)
        total = sum(correct * count for correct, count in enumerate(counts))
        self._counters.add(counts, total, rounds * rows, proposed, calls=rounds)

    def rounds_to_next_decision(self, bs: int) -> int:
        """Feeding fewer further results of this batch size than this never changes its steps. At least 1."""
        return self.policy.rounds_to_next_decision(bs)

    # --- a new table, metrics, state ---

    def reload(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | AdaptiveConfig, source: str | None = None
    ) -> None:
        """Go on with another table. Steps in flight keep theirs; the next activation uses the new table.

        Raises `ConfigError`, and the running policy goes on as it was, if the table is invalid, or needs candidates,
        graphs or draft tokens that were not built at start-up.
        """
        new = load_adaptive_config(config, source)
        reload = getattr(self.policy, "reload", None)
        if reload is None:
            raise ConfigError(new.source, [Problem("", f"the {self.policy.name} policy has no table to reload")])
        shape = DraftShape(new, *self._shape_arguments)
        router = RangeRouter(new, self._captured_sizes)
        shape.set_router(router)
        problems = [
            Problem("candidate_steps", f"{steps} steps with {nd} draft tokens were not built at start-up")
            for steps, nd in shape.state_keys()
            if (steps, nd) not in self._first_keys
        ]
        for steps in new.candidate_steps if self._captured_sizes else ():
            reachable = set(router.graph_sizes_of_step(steps) or ())
            missing = sorted(reachable - set(self._built_graph_sizes(steps)))
            if missing:
                problems.append(Problem("candidate_steps", f"{steps} steps have no captured graph for sizes {missing}"))
        if problems:
            raise ConfigError(new.source, problems)
        reload(new)
        self._shape = shape

    def metrics(self) -> AdaptiveMetrics:
        """Counters since the start."""
        return self._counters.read(self._gauges())

    def window(self) -> AdaptiveMetrics:
        """Counters since the last call of `window`."""
        return self._counters.read_window(self._gauges())

    def _gauges(self) -> dict[str, Any]:
        steps = self._active_steps
        slots = getattr(self.policy, "slots", ())
        return {
            "steps": steps,
            "num_draft_tokens": None if steps is None else self._shape.num_draft_tokens(steps, self._active_bs),
            "switches": self.policy.switches,
            "activations": self._activations,
            "ema_accept_len": {
                bound: slot.ema_accept_len for bound, slot in zip(self.policy.config.bounds, slots, strict=False)
            },
        }

    def snapshot(self) -> dict[str, object]:
        """What the next choices depend on, as plain data; counters are in `metrics`."""
        return {"active_steps": self._active_steps, **self.policy.snapshot()}

    def check(self) -> None:
        """Raise `InvariantViolation` if the active steps are no candidate."""
        if self._active_steps is not None and self._active_steps not in self.candidates:
            raise InvariantViolation("STEPS-01", f"active steps {self._active_steps} not in {self.candidates}")


POLICIES = ("fixed", "ema", "goodput")


def fixed_controller(steps: int, **shape: Any) -> AdaptiveController:
    """A controller with one candidate; `shape` as for `AdaptiveController`."""
    return AdaptiveController(FixedPolicy(steps), **shape)


def build_controller(
    policy: str,
    config: str | os.PathLike[str] | Mapping[str, Any] | AdaptiveConfig = "default",
    *,
    initial_steps: int | None = None,
    cost_table: CostTable | None = None,
    **shape: Any,
) -> AdaptiveController:
    """A controller from a policy's name. Raises `ConfigError` for an unknown name, or `goodput` without a cost table.

    `fixed` takes `initial_steps` (default: the middle of the table's candidates) and needs no more of the table.
    """
    if policy == "fixed":
        steps = initial_steps if initial_steps is not None else AdaptiveSpeculativeParams(None, config).initial_steps
        return fixed_controller(steps, **shape)
    if policy == "ema":
        return AdaptiveController(AdaptiveSpeculativeParams(initial_steps, config), **shape)
    if policy == "goodput":
        if cost_table is None:
            raise ConfigError("<arguments>", [Problem("cost_table", "is missing; the goodput policy decides with one")])
        return AdaptiveController(GoodputPolicy(config, cost_table, initial_steps), **shape)
    message = f"is {policy!r}; expected one of {', '.join(POLICIES)}"
    raise ConfigError("<arguments>", [Problem("policy", message)])
