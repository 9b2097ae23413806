"""The contract of a step controller: it chooses the draft steps of a batch, and learns from accepted drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices
from .rule import RuleTable

CAPTURED = ((), (), (32,), (4, 16), (1, 2, 4, 8), (1, 3, 6, 12))
BOUNDS = ((1,), (1, 4), (2, 5), (1, 16), (1, 2, 8))
CANDIDATES = ((1,), (1, 3), (2, 5), (0, 2), (0, 7), (1, 3, 7), (0, 1, 3), (0, 1, 2, 3, 5, 7))


@dataclass(frozen=True, slots=True)
class StepControllerConfig:
    """What `make(config)` builds.

    `table` is a JSON object. A key of digits is the lower bound of a range of batch sizes. It maps to an entry whose
    `candidate_steps` are the draft steps to choose from (0: do not speculate). The other keys (`update_interval`,
    `warmup_batches`, `ema_alpha`, `min_dwell_batches`, and with `average_rule` `up_hysteresis`, `down_hysteresis`,
    `ceiling_coeff`) hold for all ranges. `captured` are the batch sizes with CUDA graphs. A batch is padded to the next
    captured size, if there is one. The padded size belongs to the range with the largest bound not above it, or to the
    first range if all bounds are above it. `initial` are the steps to begin with (−1: the controller's own choice).

    A round of S steps and b rows that reads k KV tokens takes `base_ns` + S · `draft_ns` + b · (S + 1) · `token_ns` + k
    · `kv_token_ps` / 1000 nanoseconds, with k = b · `kv_per_row`. A component must not look at the other fields, which
    describe its surroundings.
    """

    table: str
    captured: tuple[int, ...] = ()
    initial: int = -1
    base_ns: int = 7_000_000
    draft_ns: int = 700_000
    token_ns: int = 21_000
    kv_token_ps: int = 39_300
    kv_per_row: int = 500
    fail_at: int = 0  # which graph fails to be built at first, counted from 1; 0: none
    lift: int = 0  # how much longer than drawn all accepted runs are
    varied: str = "acceptance"  # or "cost": what an invariant over two runs changes in the second one

    @classmethod
    def draw(cls, choose: Choices, has: StepControllerCapabilities) -> StepControllerConfig:
        """Choose a table of one to three ranges; for a controller that is not adaptive, one range
        with one candidate."""
        captured, fail_at = choose(CAPTURED), choose((0, 0, 1, 2) if has.adaptive else (0, 0, 1))
        if not has.adaptive:
            return cls(RuleTable((1,), ((choose((0, 1, 3, 7)),),)).text(), captured, fail_at=fail_at)
        knobs = choose((1, 2, 5, 5)), choose((0, 1, 3, 10)), choose((1.0, 0.5, 0.2, 0.05)), choose((0,) * 7 + (16,))
        costs = {}
        if has.goodput:
            costs["draft_ns"] = choose((700_000, 100_000, 2_000_000))
            costs["token_ns"] = choose((21_000, 5_000, 200_000))
            costs["kv_per_row"] = choose((500, 0, 20_000))
            costs["varied"] = choose(("acceptance", "cost"))
        if has.average_rule:
            knobs += choose((0.0, 0.0, 0.5)), choose((-0.25, -0.25, 0.0, -0.5)), choose((0.0, 0.0, 0.0, 1.0, 2.0))
        bounds = choose(BOUNDS)
        table = RuleTable(bounds, tuple(choose(CANDIDATES) for _ in bounds), *knobs)
        if has.average_rule:
            costs["initial"] = choose((-1, -1, table.union[0]))
        return cls(table.text(), captured, fail_at=fail_at, **costs)

    def round_time_ns(self, steps: int, batch_size: int, kv_tokens: int) -> int:
        kv_ns = self.kv_token_ps * kv_tokens // 1000
        return self.base_ns + steps * self.draft_ns + batch_size * (steps + 1) * self.token_ns + kv_ns


@dataclass(frozen=True, slots=True)
class StepControllerCapabilities(Capabilities):
    """What a controller declares. Each flag adds methods, operations that call them, and invariants."""

    # It chooses among several candidates. Without it the table has one range with one candidate.
    adaptive: bool = False
    inspection: bool = False  # `state()`
    counters: bool = False  # `counted()`
    gauges: bool = False  # `gauges()`: what an operator sees of the results so far
    # `average(batch_size)`: each range keeps a moving average, fed by rounds of its own current steps alone (unless
    # `untold_steps`)
    averages: bool = False
    # It chooses by the published rule of the moving average. A range begins at `initial`, else at the middle candidate
    # of all ranges, or at its own middle one if it does not have that. It looks again every `update_interval` results
    # after `warmup_batches`, and probes from 0, with `probes` more and more rarely.
    average_rule: bool = False
    # It leaves 0 steps within a bound that follows from its table, and tries in vain more and more rarely
    probes: bool = False
    # It switches at most once per `update_interval`, ten times in 10,000 rounds with a dwell or a known cost, and not
    # at all once constant input has settled it
    settles: bool = False
    sizing: bool = False  # `reserved()`
    estimates: bool = False  # `expected(steps, batch_size)`
    # `copied()`: what it expects does not depend on the order of the results between two of its looks. These are a
    # multiple of `update_interval` results apart; the first comes after so many, or after the warm-up if that is longer
    unordered: bool = False
    multi_steps: bool = False  # `observe_multi_step(…)`: a step may run several rounds, whose results come together
    goodput: bool = False  # it knows the modelled cost, and is held to the throughput of the best fixed steps
    # `attach(build, captured)` and `graph(steps, batch_size)`: the graph of a round is found under its key
    runtime: bool = False
    reload: bool = False  # `reload(text)`
    misuse: bool = False  # it refuses or leaves out results that no round can have
    # It does not know the steps of a round, so a late result moves the average whatever the round's steps were.
    untold_steps: bool = False

    RELAXES: ClassVar[tuple[str, ...]] = ("untold_steps",)
    FOUNDATIONS: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(
            ("averages", "average_rule", "probes", "settles", "estimates", "goodput", "reload"), ("adaptive",)
        ),
        "unordered": ("estimates",),
    }


BuildGraph = Callable[[int, int, int], object]
"""What a controller with `runtime` is given: builds the graph of (steps, draft tokens, batch size). May raise."""


class StepController(Protocol):
    """A step controller. Its choice may depend on the calls so far and on nothing else.

    To refuse is to return False or to raise one of `REFUSALS`; nothing may have changed then.
    """

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        """Return the steps for a round of `batch_size` rows that reads `kv_tokens` KV tokens.
        To ask again changes nothing."""

    def observe(self, correct_drafts: Sequence[float], batch_size: int, executed_steps: int) -> object:
        """Take one verify result: the correct drafts (0 … executed_steps) of the rows still alive, from a round
        launched with `batch_size` rows and `executed_steps`. It may come late, after the choice has changed. With
        `misuse`, impossible values are refused or left out."""

    @needs("multi_steps")
    def observe_multi_step(
        self, correct_drafts: Sequence[Sequence[int]], batch_size: int, executed_steps: int
    ) -> object:
        """Take the results of the successive rounds of one step, as `observe` takes them one by one."""

    @needs("inspection")
    def state(self) -> object:
        """Return all that future choices depend on, as plain data:
        numbers, strings, None, lists and dictionaries of them."""

    @needs("counters")
    def counted(self) -> Sequence[int]:
        """Return, so far: verify results with at least one row, rows, correct drafts, proposed
        drafts (steps · rows)."""

    @needs("gauges")
    def gauges(self) -> Mapping[str, object]:
        """Return, so far: `steps`, those that were chosen last (None before); `draft_tokens` of a round of these, its
        root included; `changes` of the chosen steps; `accept_length`, 1 + correct drafts / rows; `accept_rate`, correct
        / proposed drafts, both 0.0 without any; `histogram`, whose entry n counts the rows with n correct drafts.

        With `average_rule` also `switches` of all ranges; `averages`, (lower bound, average) of the ranges that have
        had a draft verified; and `ranges`, of each its steps, average, results, switches, results until it looks again,
        whether it probes, probes that failed one after the other, and looks until it probes.

        With `goodput` also `results`, those with at least one row; and `waiting`, (draft steps, histogram) of the
        drafting rows, with steps that it can choose, whose results come after its last look, which is at most 1,000
        results ago."""

    @needs("averages")
    def average(self, batch_size: int) -> float:
        """Return the average of the range of a batch size:
        `(1 − ema_alpha) · average + ema_alpha · mean` per result."""

    @needs("sizing")
    def reserved(self) -> int:
        """Return the draft tokens, root included, that every reservation has room for:
        those of the largest candidate of any range."""

    @needs("estimates")
    def expected(self, steps: int, batch_size: int) -> float:
        """Return the tokens per row that it expects of a round of these steps, a candidate of this batch size:
        1 … steps + 1."""

    @needs("unordered")
    def copied(self) -> StepController:
        """Return another controller in the same state. What one learns, the other does not know."""

    @needs("runtime")
    def attach(self, build: BuildGraph, captured: Sequence[int] | None) -> object:
        """Build a graph for every candidate (with steps + 1 draft tokens) and exactly those captured sizes (None: no
        graphs) whose range has it, and route by these sizes. If a build fails, the error goes on and nothing has
        changed; `attach` may be called again."""

    @needs("runtime")
    def graph(self, steps: int, batch_size: int) -> object:
        """Return what `build` returned for these steps and the captured size that the batch is padded to. None if there
        is none so large, and before graphs were built; never builds."""

    @needs("reload")
    def reload(self, text: str) -> object:
        """Go on with another table, whose candidates and ranges are among those of the first one."""
