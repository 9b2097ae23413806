"""The policy `confidence`: each round verifies the drafts that are worth their time, whatever rows they are of.

    result of a round:  confidences of all drafts ─► survival of each row's drafts, by the estimator
    next plan:          all (row, position) by survival, greatest first; the first B of them give
                        rows + Σ survival tokens in draft(steps, rows) + verify(rows + B): take the best steps and B
    device:             draft, then verify the B drafts of greatest *current* survival

The host's confidences are those of the last result: of the round before in synchronous mode, of the one before that in
overlap mode. A row without any counts as certain. So the first rounds of a request verify all they may.

The time of prompts does not count: an engine that emits more tokens a round has more newcomers, so their prompts take
as much time for each token, whatever is verified. But a pass with prompts is too large for a graph. So steps and budget
are chosen by the times of both kinds of passes, by the share of rounds that have prompts beside them.

Where a budget itself costs time (`PassCosts.budget_ns`, which sessions measure), rounds that verify all drafts without
one may be better. Then the policy rests: it plans such rounds, ever more of them, and a round with a budget between
them. They also say how many drafts of each position are accepted where none is left out, and steps are chosen by that.
In the beginning the most steps are drafted, until enough rows have shown what each position is worth.

The estimator maps a confidence to the probability of acceptance: p = sigmoid(slope · x + bias of the position), x the
confidence's log-odds. Every 100 results it takes one damped Newton step: n labels take n / (n + 50) of it, for the
slope those of all positions, for a bias those of its own. It learns from drafts that were verified, up to the first
rejection of each row. With temperatures the slope is 1, each position's is divided by its own, and nothing is learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...contract.arrays import Float64Array
from ...contract.step import DecodeResult, DecodeStep, DraftBudget, RoundShape
from ...errors import ConfigError
from ..config import AdaptiveConfig, load_adaptive_config
from ..parking import NEVER_PARKED, Parking
from .pass_costs import PassCosts
from .survival import acceptance_of, are_valid, log_odds, sigmoid

FIRST_SLOPE, FIRST_BIAS = 0.5, -0.2
STEPS_PER_UPDATE = 100
LABELS_PER_UPDATE = 200  # where rounds with confidences are rare
RIDGE = 1e-3
DAMPING = 50  # labels at which half of a Newton step is taken
ROUNDS_PER_LOOK = 200  # of fewer steps than the most, before one with the most measures all positions again
LOOK_SHARE = 0.004  # of the time may go into such rounds
PROMPT_SHARE = 0.02  # of the newest round in the share of rounds with prompts beside them
FIRST_REST, LONGEST_REST = 16, 128  # rounds without a budget, before one with it shows whether that is still right
ROWS_TO_KNOW, ROUNDS_TO_KNOW = 256, 24  # with the most steps, before fewer are chosen where budgets cost something
RATE_SHARE = 0.05  # of the newest round in the averages by which steps are chosen
MOST_SLOPE, MOST_BIAS = 4.0, 20.0
WHOLE_SHARE = 0.002  # of the newest round in what is known of rounds that verify all drafts
WHOLE_PRIOR = 8.0  # rows with which the curve counts there
_DECIMALS = 6  # of slope and biases, so that other machines round alike


class AcceptanceCurve:
    """The slope and the biases by which confidences are read, learned from verify results."""

    def __init__(self, depth: int, most_labels: float = math.inf, temperatures: tuple[float, ...] = ()) -> None:
        """Take a step as soon as there are `most_labels`, too; with `temperatures`, one for each position, never."""
        self._most_labels = most_labels
        self.temperatures = temperatures
        self.slope: float = 1.0 if temperatures else FIRST_SLOPE
        self.biases: tuple[float, ...] = (0.0 if temperatures else FIRST_BIAS,) * depth
        self.num_updates = 0
        self._results = 0
        self._clear()

    def _clear(self) -> None:
        depth = len(self.biases)
        self._labels = np.zeros(depth, dtype=np.int64)
        self._gradient_slope = self._curvature_slope = 0.0
        self._gradient, self._curvature, self._mixed = np.zeros(depth), np.zeros(depth), np.zeros(depth)

    def add(self, confidence: np.ndarray, row_nodes: np.ndarray, accept_lens: np.ndarray) -> None:
        """Take one round's valid rows: confidences [n, steps], nodes verified and accepted, int [n] each."""
        if self.temperatures:
            return
        steps = confidence.shape[1]
        position = np.arange(1, steps + 1)
        is_label = (position < row_nodes[:, None]) & (position <= accept_lens[:, None])
        x, p = log_odds(confidence), acceptance_of(confidence, self.slope, self.biases)
        error = np.where(is_label, (position < accept_lens[:, None]) - p, 0.0)
        weight = np.where(is_label, p * (1 - p), 0.0)
        self._labels[:steps] += is_label.sum(axis=0)
        self._gradient_slope += float((error * x).sum())
        self._curvature_slope += float((weight * x * x).sum())
        self._gradient[:steps] += error.sum(axis=0)
        self._curvature[:steps] += weight.sum(axis=0)
        self._mixed[:steps] += (weight * x).sum(axis=0)
        self._results += 1
        if self._results % STEPS_PER_UPDATE == 0 or self._labels.sum() >= self._most_labels:
            self._step()

    def _step(self) -> None:
        """Take a Newton step. Biases meet each other only through the slope, so one division solves the system. Each
        bias follows the slope that is taken, and moves by the labels of its own position."""
        total = int(self._labels.sum())
        if not total:
            return
        pivots = self._curvature + RIDGE
        ratio = self._mixed / pivots
        slope = (self._gradient_slope - ratio @ self._gradient) / (self._curvature_slope + RIDGE - ratio @ self._mixed)
        moved_slope = self.slope + float(slope) * total / (total + DAMPING)
        if not moved_slope >= 0:  # also where it is no number
            moved_slope = self.slope
        moved_slope = min(moved_slope, MOST_SLOPE)
        change, self.slope = moved_slope - self.slope, round(moved_slope, _DECIMALS)
        biases = (self._gradient - self._mixed * change) / pivots * self._labels / (self._labels + DAMPING)
        moved = np.array(self.biases) + np.where(np.isfinite(biases), biases, 0.0)
        self.biases = tuple(np.round(np.clip(moved, -MOST_BIAS, MOST_BIAS), _DECIMALS).tolist())
        self.num_updates += 1
        self._clear()

    def budget(self, drafts: int) -> DraftBudget:
        return DraftBudget(drafts, self.slope, self.biases, self.temperatures)

    @property
    def slopes(self) -> tuple[float, ...]:
        """The slope at each position."""
        return self.budget(0).slopes

    def snapshot(self) -> dict[str, object]:
        return {"slope": self.slope, "biases": list(self.biases), "updates": self.num_updates}


class RowBudgets:
    """Leaves nothing to the device: of policies without confidences."""

    def look(self, rows: np.ndarray, epochs: np.ndarray, kv_tokens: int, most_drafts: np.ndarray | None = None) -> None:
        """See the batch that is about to be planned: rows int [bs], their epochs, the KV tokens of all, and the most
        drafts that each row may verify, int [bs]; None if only the round's shape bounds them."""

    def see_prompts(self, num_tokens: int) -> None:
        """Note the prompt tokens that a round's pass computes beside it."""

    def budget_for(self, shape: RoundShape) -> DraftBudget | None:
        """Return the budget of a round of this shape for the batch that was seen last."""
        return None

    def take(self, step: DecodeStep, result: DecodeResult, present: np.ndarray) -> None:
        """Take the confidences of the last round of a result; `present` bool [bs]: rows that still have their
        request."""


NO_BUDGETS = RowBudgets()


class ConfidencePolicy(RowBudgets):
    """Chooses steps and budget by predicted tokens per second. Deterministic; it decides in every round.

    Raises `ConfigError`, also if `costs` lack a candidate.
    """

    name = "confidence"
    parking: Parking = NEVER_PARKED

    def __init__(
        self,
        config: str | Mapping[str, Any] | AdaptiveConfig,
        costs: PassCosts,
        initial_steps: int | None,
        temperatures: tuple[float, ...] = (),
    ):
        self.config: AdaptiveConfig = load_adaptive_config(config)
        missing = set(self.config.candidate_steps) - set(costs.steps)
        if missing:
            raise ConfigError.of("<pass costs>", "steps", f"{sorted(missing)} are missing, which the table has")
        self.costs = costs
        self.switches = 0
        self.num_invalid = 0  # rows of results whose confidences were no probabilities
        depth = self.config.candidate_steps[-1]
        most_labels = LABELS_PER_UPDATE if costs.budget_ns else math.inf
        self.curve: AcceptanceCurve = AcceptanceCurve(depth, most_labels, temperatures)
        self._depth = depth
        self._steps = depth if initial_steps is None else initial_steps
        self._candidates = np.array(self.config.candidate_steps)
        self._budgets: dict[int, int] = dict.fromkeys(self.config.candidate_steps, 0)
        # By candidate, on average of late: the tokens per ns of the best budget, and those over a round without one.
        self._rates, self._gains = np.zeros((2, len(self._candidates)))
        self._since_look = 0
        self._rest, self._pause, self._rested_rows = 0, FIRST_REST, 0
        self._weighed_rows = 0
        self._may_rest = costs.budget_ns > 0
        self._is_informed = not self._may_rest  # whether a result had confidences since the last rest
        self._whole = _WholeRounds(depth)
        self._times = _Times(costs, self.config.candidate_steps)
        self._mixed = 0.0  # share of rounds with prompts beside them, of late
        # By row: the epoch of its request, and its drafts' log-odds in the last result; NaN where it drafted none.
        self._epochs = np.zeros(0, dtype=np.int64)
        self._odds = np.zeros((0, depth))
        self._mean = np.full(depth, 0.5)  # acceptance by position, for those that were not drafted last

    # --- what every policy does ---

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        return self._steps

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        if self._rest:  # other rounds are counted at their plan
            self._since_look += executed_steps < self._depth
            self._rest -= 1
        self._whole.add(counts)

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return max(1, self._rest)

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        pass

    def snapshot(self) -> dict[str, object]:
        state: dict[str, object] = {
            "policy": self.name,
            "steps": self._steps,
            "invalid": self.num_invalid,
            "since": self._since_look,
        }
        state["rates"] = [self._rates.tolist(), self._gains.tolist()]
        state["rest"] = [self._rest, self._pause, self._rested_rows, self._weighed_rows, self._is_informed]
        state["mixed"] = self._mixed
        state["whole"] = self._whole.snapshot()
        return {**state, "curve": self.curve.snapshot(), "mean": self._mean.tolist()}

    # --- the plan ---

    def look(self, rows: np.ndarray, epochs: np.ndarray, kv_tokens: int, most_drafts: np.ndarray | None = None) -> None:
        bs = len(rows)
        if self._rest and 2 * bs > 3 * self._rested_rows:  # more rows give a budget more to choose from
            self._rest, self._pause, self._is_informed = 0, FIRST_REST, False
        if self._rest and bs == self._weighed_rows:
            return
        chosen, self._weighed_rows = self._steps, bs
        if self._is_informed and not self._is_new:
            self._weigh(self._survival(rows, epochs), kv_tokens, most_drafts)
        else:  # all drafts are verified
            self._budgets = dict.fromkeys(self._budgets, bs * self._depth)
        if (self._is_informed or self._rest) and not self._is_new:
            best = int(self._rates_of(bs, kv_tokens).argmax())
            chosen = self.config.candidate_steps[best]
        self._since_look = 0 if chosen == self._depth else self._since_look + (not self._rest)
        if self._rest:
            pass
        elif self._is_new or self._is_look_due(bs, kv_tokens, chosen):
            chosen, self._since_look = self._depth, 0
        elif not chosen and not self._is_informed:  # nothing is drafted, so no confidences can come
            self._rest, self._rested_rows = self._pause, bs
        elif self._is_informed and self._may_rest:
            self._rest_if_better(best, bs)
        self.switches += chosen != self._steps
        self._steps = chosen

    def _is_look_due(self, bs: int, kv_tokens: int, steps: int) -> bool:
        """Return whether a round should draft the most steps; where costs are measured, if that costs a small share of
        the rounds since the last one."""
        if self._since_look < ROUNDS_PER_LOOK or not self._may_rest:
            return self._since_look >= ROUNDS_PER_LOOK
        times = self._times.of_rounds(bs, kv_tokens)
        usual = times[self.config.candidate_steps.index(steps)]
        return bool(times[-1] - usual <= LOOK_SHARE * self._since_look * usual)

    def _rates_of(self, bs: int, kv_tokens: int) -> Float64Array:
        """Return by which rates the steps are chosen, by candidate. A choice among many noisy rates takes the one that
        is too high by chance, so these are averages."""
        if not self._may_rest:
            return self._rates
        whole = self._whole.tokens(bs)[self._candidates] / self._times.of_rounds(bs, kv_tokens)
        return whole if self._rest else np.asarray(whole * np.maximum(self._gains, 1.0), dtype=np.float64)

    @property
    def _is_new(self) -> bool:
        return self._may_rest and self._whole.is_new

    def _weigh(self, survival: np.ndarray, kv_tokens: int, most_drafts: np.ndarray | None) -> None:
        """Set the best budgets, and note by how much these beat rounds that verify all drafts."""
        bs, share = len(survival), RATE_SHARE if self._gains.any() else 1.0
        survival = self._whole.corrected(survival, share) if self._may_rest else survival
        order = np.argsort(-survival.ravel(), kind="stable")
        taken = order % self._depth < self._candidates[:, None] if self._depth else np.zeros((1, 0), bool)
        if most_drafts is not None and self._depth:
            taken &= order % self._depth < most_drafts[order // self._depth]
        begin = np.zeros((len(self._candidates), 1))
        tokens = bs + np.concatenate([begin, np.cumsum(taken * survival.ravel()[order], axis=1)], axis=1)
        sizes = bs + np.concatenate([begin.astype(np.int64), np.cumsum(taken, axis=1)], axis=1)
        drafting, alone, eager = self._times.of(bs, kv_tokens, sizes)
        times = drafting + alone + self._mixed * (eager - alone)
        best = (tokens / times).argmax(axis=1)
        self._budgets = dict(zip(self.config.candidate_steps, (np.diagonal(sizes[:, best]) - bs).tolist(), strict=True))
        with_budget = (tokens / (times + self.costs.budget_ns)).max(axis=1)
        self._rates += share * (with_budget - self._rates)
        self._gains += share * (with_budget * times[:, -1] / tokens[:, -1] - self._gains)

    def _rest_if_better(self, index: int, bs: int) -> None:
        """Let the next rounds verify all drafts without a budget, where that pays; ever longer while it does."""
        if self._gains[index] > 1:
            self._pause = FIRST_REST
            return
        self._rest, self._rested_rows, self._is_informed = self._pause, bs, False
        self._pause = min(2 * self._pause, LONGEST_REST)

    def see_prompts(self, num_tokens: int) -> None:
        self._mixed += PROMPT_SHARE * ((num_tokens > 0) - self._mixed)

    def _survival(self, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the survival of each row's drafts, float64 [bs, depth]; 1 for rows without confidences."""
        self._reach(int(rows.max(initial=0)))
        odds = self._odds[rows]
        p = sigmoid(np.array(self.curve.slopes) * odds + np.array(self.curve.biases))
        p = np.where(np.isnan(odds), self._mean, p)
        p[self._epochs[rows] != epochs] = 1.0
        survival: np.ndarray = np.cumprod(p, axis=1)
        return survival

    def _reach(self, row: int) -> None:
        more = row + 1 - len(self._epochs)
        if more > 0:
            self._epochs = np.concatenate([self._epochs, np.full(more, -1, dtype=np.int64)])
            self._odds = np.concatenate([self._odds, np.full((more, self._depth), np.nan)])

    def budget_for(self, shape: RoundShape) -> DraftBudget | None:
        if not shape.steps or self._rest:
            return None
        return self.curve.budget(self._budgets[shape.steps])

    # --- the result ---

    def take(self, step: DecodeStep, result: DecodeResult, present: np.ndarray) -> None:
        if result.confidence is None or result.row_nodes is None:
            return
        confidence, nodes, lens = result.confidence[-1], result.row_nodes[-1], result.accept_lens[-1]
        valid = are_valid(confidence)
        self.num_invalid += int(np.count_nonzero(present & ~valid))
        # A row that is not present belongs to another request by now, or to none.
        gone, kept = step.rows[present & ~valid], present & valid
        self._reach(int(step.rows.max(initial=0)))
        self._epochs[gone] = -1
        if not kept.any():
            return
        self._is_informed = not self._rest  # a result that comes in a rest is old when the rest ends
        rows, steps = step.rows[kept], confidence.shape[1]
        self._epochs[rows] = step.epochs[kept]
        self._odds[rows] = np.nan
        self._odds[rows, :steps] = log_odds(confidence[kept])
        self._mean[:steps] += 0.02 * (
            acceptance_of(confidence[kept], self.curve.slopes, self.curve.biases).mean(axis=0) - self._mean[:steps]
        )
        self.curve.add(confidence[kept], nodes[kept], lens[kept])
        if not self._may_rest:
            return
        planned = steps + 1 if step.row_nodes is None else step.row_nodes[kept]
        if (nodes[kept] == planned).all():  # the budget left nothing out
            whole = nodes[kept] > steps
            self._whole.add(np.bincount(lens[kept][whole] - 1, minlength=steps + 1).tolist())
        else:
            self._whole.forget()


class _WholeRounds:
    """How many drafts are accepted where rows verify all of them: what the curve says of the chosen ones alone need not
    be right for all. Rounds of other kinds let it be forgotten."""

    def __init__(self, depth: int) -> None:
        self._rows, self._accepted = np.zeros(depth), np.zeros(depth)  # that drafted and that accepted position k
        self._survival = np.ones(depth)  # by the curve, on average of late
        self._deepest = [0, 0]  # rows and rounds so far that drafted the most

    def add(self, counts: Sequence[int]) -> None:
        """Take a round in which so many rows had 0, 1, … drafts accepted, of all that were drafted."""
        reached = np.cumsum(counts[::-1])[::-1]
        steps = len(counts) - 1
        if steps == len(self._rows):
            self._deepest = [self._deepest[0] + int(reached[0]), self._deepest[1] + 1]
        self._rows[:steps] += reached[0] - self._rows[:steps] * WHOLE_SHARE
        self._accepted[:steps] += reached[1:] - self._accepted[:steps] * WHOLE_SHARE

    @property
    def is_new(self) -> bool:
        return self._deepest[0] < ROWS_TO_KNOW and self._deepest[1] < ROUNDS_TO_KNOW

    def forget(self) -> None:
        self._rows *= 1 - WHOLE_SHARE
        self._accepted *= 1 - WHOLE_SHARE

    def corrected(self, survival: np.ndarray, share: float) -> Float64Array:
        """Return what the curve says of the drafts of a round, float64 [bs, depth], such that it is right on average.
        The round counts with `share` in that average."""
        self._survival += share * (survival.mean(axis=0) - self._survival)
        found = np.minimum(survival * (self._found / np.maximum(self._survival, np.finfo(np.float64).tiny)), 1.0)
        return np.asarray(np.minimum.accumulate(found, axis=1), dtype=np.float64)

    def tokens(self, bs: int) -> Float64Array:
        """Return the tokens of a round of `bs` rows with 0, 1, … steps, float64 [depth + 1]."""
        tokens: Float64Array = bs * np.cumsum(np.concatenate([[1.0], self._found]))
        return tokens

    @property
    def _found(self) -> Float64Array:
        """The survival of drafts on average, by the rounds so far and by the curve, float64 [depth]."""
        found = (self._accepted + WHOLE_PRIOR * self._survival) / (self._rows + WHOLE_PRIOR)
        return np.asarray(np.minimum.accumulate(found), dtype=np.float64)

    def snapshot(self) -> list[list[float]]:
        return [self._rows.tolist(), self._accepted.tolist(), self._survival.tolist(), list(self._deepest)]


class _Times:
    """The times of `PassCosts` for all candidates, of sizes that come again and again."""

    def __init__(self, costs: PassCosts, candidates: Sequence[int]) -> None:
        self._costs, self._candidates = costs, candidates
        self._kv_token_ns = (
            np.array([costs.draft_time(steps, 1, 1000) - costs.draft_time(steps, 1) for steps in candidates]) / 1000
        )
        self._drafting: dict[int, np.ndarray] = {}
        self._passes = np.zeros((2, 0, 0))  # alone and beside prompts, by candidate and tokens

    def of_rounds(self, bs: int, kv_tokens: int) -> Float64Array:
        """Return the times of rounds that verify all drafts, by candidate."""
        drafting, alone, _ = self.of(bs, kv_tokens, bs + bs * np.array(self._candidates)[:, None])
        times: Float64Array = (drafting + alone)[:, 0]
        return times

    def of(self, bs: int, kv_tokens: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the times of drafting [candidates, 1], and of passes of `sizes` [candidates, n], alone and beside
        prompts."""
        if bs not in self._drafting:
            self._drafting[bs] = np.array([self._costs.draft_time(steps, bs) for steps in self._candidates])
        most = int(sizes[-1, -1])
        if most >= self._passes.shape[2]:
            tokens = np.arange(2 * most + 1)
            eager = self._costs.eager_times(tokens)
            padded = [self._costs.padded(steps, tokens) for steps in self._candidates]
            self._passes = np.stack([[self._costs.verify_times(computed), eager] for computed in padded], axis=1)
        alone, eager = self._passes[:, np.arange(len(sizes))[:, None], sizes]
        return (self._drafting[bs] + kv_tokens * self._kv_token_ns)[:, None], alone, eager
