"""The policy `confidence`: each round verifies the drafts that are worth their time, whatever rows they are of.

    result of a round:  confidences of all drafts ─► survival of each row's drafts, by the estimator
    next plan:          all (row, position) by survival, greatest first; the first B of them give
                        rows + Σ survival tokens in draft(steps, rows) + verify(rows + B): take the best steps and B
    device:             draft, then verify the B drafts of greatest *current* survival

The host's confidences are those of the last result: of the round before in synchronous mode, of the one before that in
overlap mode. A row without any counts as certain. So the first rounds of a request verify all they may.

The time of prompts does not count: an engine that emits more tokens a round has more newcomers, so their prompts take
as much time for each token, whatever is verified. But a pass with prompts is too large for a graph. So the budget is
chosen by the times of both kinds of passes, by the share of rounds that have prompts beside them. The steps are chosen
by the times of rounds alone, since drafting beside prompts takes longer, too, and no table has that.

The estimator maps a confidence to the probability of acceptance: p = sigmoid(slope · x + bias of the position), x the
confidence's log-odds. Every 100 results it takes one damped Newton step: n labels take n / (n + 50) of it, for the
slope those of all positions, for a bias those of its own. It learns from drafts that were verified, up to the first
rejection of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...contract.step import DecodeResult, DecodeStep, DraftBudget, RoundShape
from ...errors import ConfigError
from ..config import AdaptiveConfig, load_adaptive_config
from ..parking import NEVER_PARKED, Parking
from .pass_costs import PassCosts
from .survival import acceptance_of, are_valid, log_odds

FIRST_SLOPE, FIRST_BIAS = 0.5, -0.2
STEPS_PER_UPDATE = 100
RIDGE = 1e-3
DAMPING = 50  # labels at which half of a Newton step is taken
ROUNDS_PER_LOOK = 200  # of fewer steps than the most, before one with the most measures all positions again
PROMPT_SHARE = 0.02  # of the newest round in the share of rounds with prompts beside them
RATE_SHARE = 0.05  # of the newest round in the averages by which steps are chosen
MOST_SLOPE, MOST_BIAS = 4.0, 20.0
_DECIMALS = 6  # of slope and biases, so that other machines round alike


class AcceptanceCurve:
    """The slope and the biases by which confidences are read, learned from verify results."""

    def __init__(self, depth: int) -> None:
        self.slope: float = FIRST_SLOPE
        self.biases: tuple[float, ...] = (FIRST_BIAS,) * depth
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
        if self._results % STEPS_PER_UPDATE == 0:
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
        slope, self.slope = min(moved_slope, MOST_SLOPE) - self.slope, round(min(moved_slope, MOST_SLOPE), _DECIMALS)
        biases = (self._gradient - self._mixed * slope) / pivots * self._labels / (self._labels + DAMPING)
        moved = np.array(self.biases) + np.where(np.isfinite(biases), biases, 0.0)
        self.biases = tuple(np.round(np.clip(moved, -MOST_BIAS, MOST_BIAS), _DECIMALS).tolist())
        self.num_updates += 1
        self._clear()

    def snapshot(self) -> dict[str, object]:
        return {"slope": self.slope, "biases": list(self.biases), "updates": self.num_updates}


class RowBudgets:
    """Leaves nothing to the device: of policies without confidences."""

    def look(self, rows: np.ndarray, epochs: np.ndarray, kv_tokens: int) -> None:
        """See the batch that is about to be planned: rows int [bs], their epochs, the KV tokens of all."""

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

    def __init__(self, config: str | Mapping[str, Any] | AdaptiveConfig, costs: PassCosts, initial_steps: int | None):
        self.config: AdaptiveConfig = load_adaptive_config(config)
        missing = set(self.config.candidate_steps) - set(costs.steps)
        if missing:
            raise ConfigError.of("<pass costs>", "steps", f"{sorted(missing)} are missing, which the table has")
        self.costs = costs
        self.switches = 0
        self.num_invalid = 0  # rows of results whose confidences were no probabilities
        depth = self.config.candidate_steps[-1]
        self.curve: AcceptanceCurve = AcceptanceCurve(depth)
        self._depth = depth
        self._steps = depth if initial_steps is None else initial_steps
        self._budgets: dict[int, int] = {}
        self._rates: dict[int, float] = {}  # tokens per ns by steps, on average of late
        self._since_look = 0
        self._mixed = 0.0  # share of rounds with prompts beside them, of late
        # By row: the epoch of its request, and its drafts' log-odds in the last result; NaN where it drafted none.
        self._epochs = np.zeros(0, dtype=np.int64)
        self._odds = np.zeros((0, depth))
        self._mean = np.full(depth, 0.5)  # acceptance by position, for those that were not drafted last

    # --- what every policy does ---

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        return self._steps

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        pass

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return 1

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        pass

    def snapshot(self) -> dict[str, object]:
        state: dict[str, object] = {
            "policy": self.name,
            "steps": self._steps,
            "invalid": self.num_invalid,
            "since": self._since_look,
        }
        state["rates"] = {str(steps): rate for steps, rate in self._rates.items()}
        state["mixed"] = self._mixed
        return {**state, "curve": self.curve.snapshot(), "mean": self._mean.tolist()}

    # --- the plan ---

    def look(self, rows: np.ndarray, epochs: np.ndarray, kv_tokens: int) -> None:
        survival = self._survival(rows, epochs)
        bs, best = len(rows), (-1.0, 0)
        for steps in self.config.candidate_steps:
            drafts = np.sort(survival[:, :steps].ravel())[::-1]
            tokens = bs + np.concatenate([[0.0], np.cumsum(drafts)])
            sizes, drafting = bs + np.arange(len(tokens)), self.costs.draft_time(steps, bs, kv_tokens)
            alone = self.costs.verify_times(sizes)
            beside = alone + self._mixed * (self.costs.eager_times(sizes) - alone)
            self._budgets[steps] = int((tokens / (drafting + beside)).argmax())
            rate = float((tokens / (drafting + alone)).max())
            # A choice among many noisy rates takes the one that is too high by chance: their averages are compared.
            known = self._rates.setdefault(steps, rate)
            self._rates[steps] = known + RATE_SHARE * (rate - known)
            if self._rates[steps] > best[0]:
                best = (self._rates[steps], steps)
        chosen = best[1]
        self._since_look = 0 if chosen == self._depth else self._since_look + 1
        if self._since_look >= ROUNDS_PER_LOOK:
            chosen, self._since_look = self._depth, 0
        self.switches += chosen != self._steps
        self._steps = chosen

    def see_prompts(self, num_tokens: int) -> None:
        self._mixed += PROMPT_SHARE * ((num_tokens > 0) - self._mixed)

    def _survival(self, rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the survival of each row's drafts, float64 [bs, depth]; 1 for rows without confidences."""
        self._reach(int(rows.max(initial=0)))
        odds = self._odds[rows]
        p = 1.0 / (1.0 + np.exp(-(self.curve.slope * odds + np.array(self.curve.biases))))
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
        if not shape.steps:
            return None
        return DraftBudget(self._budgets.get(shape.steps, shape.steps), self.curve.slope, self.curve.biases)

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
        rows, steps = step.rows[kept], confidence.shape[1]
        self._epochs[rows] = step.epochs[kept]
        self._odds[rows] = np.nan
        self._odds[rows, :steps] = log_odds(confidence[kept])
        self._mean[:steps] += 0.02 * (
            acceptance_of(confidence[kept], self.curve.slope, self.curve.biases).mean(axis=0) - self._mean[:steps]
        )
        self.curve.add(confidence[kept], nodes[kept], lens[kept])
