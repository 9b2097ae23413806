"""Expected accept lengths of draft shapes, learned from the verify results of all shapes, with a memory that follows
changes.

A row with n correct drafts in a round of S steps shows that positions 1 … n were accepted and, if n < S, that position
n + 1 was rejected. It says nothing about later positions. `AcceptanceEstimate` counts these results for one shape,
`AcceptLengths` learns from all shapes.

All shapes share p_j, the acceptance of the draft's first choice at depth j. The acceptance at that depth of a shape's
own tree is q = 1 − (1 − p_j)^w. The exponent w is 1 for a chain, greater where several nodes of a tree compete for one
token, and below 1 where a tree has too few nodes for every path to go on. It follows from p_j by the tree that such a
draft would build (`core/acceptance/tree.py`).

    E(shape) = c · (1 + Σ_{j ≤ depth} q_1 ⋯ q_j)

This is an assumption about trees, and rounds of different lengths meet different stretches of text. So each shape has a
correction c: the acceptance of its own rounds, divided by the prediction of the shared p_j. With few rows c stays near
1: log c has a normal prior with mean 0 and standard deviation `_SPREAD_OF_CHAINS` or `_SPREAD_OF_TREES`. A chain
accepts all that a shorter chain accepts, so the corrections of chains are bounded by each other (`_order_chains`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..acceptance.tree import MAX_DEPTH, tree_survival
from ..contract.step import RoundShape

PRIOR_ROWS = 8.0
"""Weight of the extrapolation from the position before, in rows: one independent row."""

FIRST_POSITION_PRIOR = 0.6
"""Acceptance of position 1 before anything was measured (EAGLE heads on chat text measure about .6)."""

ROWS_PER_INDEPENDENT_ROW = 8.0
"""Rows of one request resemble each other, so this many rows count as one independent draw. It is the design effect of
requests of about 100 rounds whose accept lengths differ by a factor of two (5th to 95th percentile)."""

_SLOW_ROUNDS = 2048.0
_FAST_ROUNDS = 64.0
_FLOOR_ROWS = 16.0
_CHANGE_DEVIATIONS = 4.0
_CHANGE_SHIFT = 0.05
_SPREAD_OF_CHAINS = 0.02
_SPREAD_OF_TREES = 0.06
_RANK_RATIO = 0.6  # how fast acceptance falls with rank, as `GaussianAcceptance.for_tree` assumes
_TREES_FOLLOW = 0.02  # the exponents are computed again when some p_j has changed by this much
_ROUNDS_OF_FITTING = 6  # rounds in which p_j and the exponents are fitted in turns
_MOST = 1.0 - 1e-6


class AcceptanceEstimate:
    """Decayed counts of trials and acceptances of one draft shape by position, over a slow and a fast memory.

    The slow memory (2,048 rounds) gives the estimates. The fast memory (64 rounds) detects a change: its acceptance of
    a position differs by 4 standard deviations from the older part of the slow memory, or, if that part has too few
    rows, from what the other shapes have seen. Then the owner calls `forget_the_past`: only the weight of a few rows of
    the fast memory is left, and positions that it has not tried are unknown again. `last_tried[j]` is the round in
    which position j + 1 was last tried, −1 for never.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.last_tried: list[int] = [-1] * depth
        self._slow_trials = [0.0] * depth
        self._slow_accepts = [0.0] * depth
        self._fast_trials = [0.0] * depth
        self._fast_accepts = [0.0] * depth
        self._pending: dict[int, list[int]] = {}

    def add(self, counts: Sequence[int]) -> None:
        """Add one verify result: `counts[n]` rows had n correct drafts, out of len(counts) − 1."""
        pending = self._pending.get(len(counts))
        if pending is None:
            self._pending[len(counts)] = list(counts)
            return
        for correct, count in enumerate(counts):
            if count:
                pending[correct] += count

    @property
    def has_rows(self) -> bool:
        """Whether any result was ever added."""
        return bool(self._pending) or (self.depth > 0 and self._slow_trials[0] > 0)

    def fold(self, now: int, rounds: int, elsewhere: Sequence[tuple[float, float]] = ()) -> bool:
        """Move the results of the last `rounds` rounds into the memories. Returns whether acceptance has changed.

        `elsewhere` has by position the acceptance that other shapes predict, and the number of rows behind it.
        """
        trials = [0] * self.depth
        accepts = [0] * self.depth
        for width in sorted(self._pending):
            counts = self._pending[width]
            deepest = min(width - 1, self.depth)
            reached = sum(counts[deepest:])  # rows that accepted at least `position`
            for position in range(deepest, 0, -1):
                accepts[position - 1] += reached
                reached += counts[position - 1]
                trials[position - 1] += reached
        self._pending.clear()
        slow, fast = math.exp(-rounds / _SLOW_ROUNDS), math.exp(-rounds / _FAST_ROUNDS)
        for j in range(self.depth):
            kept = self._slow_trials[j]
            # A position without trials keeps its ratio; its weight decays down to `_FLOOR_ROWS`.
            keep = max(slow, min(1.0, _FLOOR_ROWS / kept)) if kept > 0 else 0.0
            self._slow_trials[j] = kept * keep + trials[j]
            self._slow_accepts[j] = self._slow_accepts[j] * keep + accepts[j]
            self._fast_trials[j] = self._fast_trials[j] * fast + trials[j]
            self._fast_accepts[j] = self._fast_accepts[j] * fast + accepts[j]
            if trials[j]:
                self.last_tried[j] = now
        return any(self._has_changed(j, *elsewhere[j : j + 1]) for j in range(self.depth))

    def forget_the_past(self) -> None:
        """Restart both memories from the fast one, scaled down to `_FLOOR_ROWS` rows, because acceptance has changed
        some rounds ago.
        """
        for j in range(self.depth):
            known = self._fast_trials[j]
            keep = min(1.0, _FLOOR_ROWS / known) if known >= 1.0 else 0.0
            self._slow_trials[j] = self._fast_trials[j] = known * keep
            self._slow_accepts[j] = self._fast_accepts[j] = self._fast_accepts[j] * keep
            if known < 1.0:
                self.last_tried[j] = -1

    def _has_changed(self, j: int, elsewhere: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Return whether the fast memory contradicts what was known before at position j + 1."""
        recent, accepts = self._fast_trials[j], self._fast_accepts[j]
        if recent < 1.0:
            return False
        older, least = self._slow_trials[j] - recent, _CHANGE_SHIFT
        if older >= _FLOOR_ROWS / 2:
            p = min(max((self._slow_accepts[j] - accepts) / older, 0.0), 1.0)
        else:
            p, older = elsewhere
            least += _SPREAD_OF_TREES  # shapes differ without a change
        if older < _FLOOR_ROWS / 2:
            return False
        shift = accepts - p * recent
        variance = (p * (1 - p) * recent * (1 + recent / older) + 1) * ROWS_PER_INDEPENDENT_ROW
        return abs(shift) > least * recent and shift**2 > _CHANGE_DEVIATIONS**2 * variance

    @property
    def recent_rows(self) -> float:
        """The decayed number of rows in the fast memory."""
        return self._fast_trials[0] if self.depth else 0.0

    def trials(self, position: int) -> float:
        """Return the decayed number of rows that tried a position (from 1 on)."""
        return self._slow_trials[position - 1]

    def accepts(self, position: int) -> float:
        """Return the decayed number of rows that accepted a position (from 1 on)."""
        return self._slow_accepts[position - 1]

    def snapshot(self) -> dict[str, object]:
        return {
            "trials": list(self._slow_trials),
            "accepts": list(self._slow_accepts),
            "fast_trials": list(self._fast_trials),
            "fast_accepts": list(self._fast_accepts),
            "last_tried": list(self.last_tried),
            "pending": {width: list(counts) for width, counts in sorted(self._pending.items())},
        }


class _Correction(NamedTuple):
    """The correction of one shape: factor c, the variance of log c, and the standard deviation that remains because the
    shape has too few rows of its own.
    """

    factor: float
    variance: float
    unknown: float


class AcceptLengths:
    """The estimate from the results of all shapes.

    Shapes with branches are trees, unless their steps do not limit the accepted runs.
    """

    def __init__(self, shapes: Sequence[RoundShape], depth_limited: bool = True) -> None:
        self.changes: int = 0
        self._are_trees = depth_limited and any(shape.topk > 1 for shape in shapes)
        self._own = {
            shape: AcceptanceEstimate(shape.steps if depth_limited else shape.nodes - 1)
            for shape in shapes
            if shape.steps > 0
        }
        self.depth: int = max((own.depth for own in self._own.values()), default=0)
        self._exponents = {shape: [1.0] * own.depth for shape, own in self._own.items()}
        self._built_for: list[float] = []
        spread = _SPREAD_OF_TREES if self._are_trees else _SPREAD_OF_CHAINS
        self._corrections = dict.fromkeys(self._own, _Correction(1.0, 0.0, spread))
        self.probabilities: list[float] = [FIRST_POSITION_PRIOR] * self.depth
        self._learn()

    def add(self, shape: RoundShape, counts: Sequence[int]) -> None:
        """Add one verify result of a shape: `counts[n]` rows had n correct drafts."""
        own = self._own.get(shape)
        if own is not None:
            own.add(counts)

    def fold(self, now: int, rounds: int) -> bool:
        """Move the results of the last `rounds` rounds into the memories. Returns whether acceptance has changed."""
        rows = [self.trials(position) for position in range(1, self.depth + 1)]
        known = {shape: self._elsewhere(shape, rows) for shape, own in self._own.items() if own.has_rows}
        folded = [self._own[shape].fold(now, rounds, others) for shape, others in known.items()]
        changed = any(folded)
        if changed:
            self.changes += 1
            for own in self._own.values():
                own.forget_the_past()
        self._learn()
        return changed

    def _elsewhere(self, shape: RoundShape, rows: Sequence[float]) -> list[tuple[float, float]]:
        """Return by position the acceptance that is predicted for a shape, and the rows of the other shapes. `rows` are
        those of all shapes."""
        own, predicted = self._own[shape], self._accepted(shape, self.probabilities)
        return [(q, rows[j] - own.trials(j + 1)) for j, q in enumerate(predicted)]

    def last_tried(self, position: int) -> int:
        """Return the round in which a position (from 1 on) was last tried by any shape, −1 for never."""
        return max((own.last_tried[position - 1] for own in self._own.values() if position <= own.depth), default=-1)

    def trials(self, position: int) -> float:
        """Return the decayed number of rows that tried a position (from 1 on), in all shapes."""
        return sum(own.trials(position) for own in self._own.values() if position <= own.depth)

    def expected(self, shape: RoundShape, probabilities: Sequence[float] | None = None) -> float:
        """Return the expected accept length of a shape, with the learned p_j or with others."""
        if shape not in self._own:
            return 1.0
        p = self.probabilities if probabilities is None else probabilities
        return self._corrections[shape].factor * self._predicted(shape, p)

    def unknown(self, shape: RoundShape) -> float:
        """Return the standard deviation of log E that remains because the shape has too few rows of its own."""
        return self._corrections[shape].unknown if shape in self._own else 0.0

    def doubt(self, one: RoundShape, other: RoundShape, measured: int) -> float:
        """Return the standard deviation of log E(one) / E(other) from positions 1 … `measured` and the corrections."""
        slopes = [0.0] * self.depth
        for shape, sign in ((one, 1.0), (other, -1.0)):
            for j, slope in enumerate(self._slopes(shape)):
                slopes[j] += sign * slope
        variance = sum(self._corrections[shape].variance for shape in {one, other} if shape in self._own)
        for j in range(min(measured, self.depth)):
            variance += slopes[j] ** 2 * self._variance(j + 1)
        return math.sqrt(variance)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _accepted(self, shape: RoundShape, p: Sequence[float]) -> list[float]:
        """Return the acceptance at each depth of a shape's own tree, given that all before were accepted."""
        exponents = self._exponents[shape]
        if not self._are_trees:
            return list(p[: len(exponents)])
        return [1.0 - (1.0 - min(p[j], _MOST)) ** w for j, w in enumerate(exponents)]

    def _predicted(self, shape: RoundShape, p: Sequence[float]) -> float:
        total = run = 1.0
        for q in self._accepted(shape, p):
            run *= q
            total += run
        return total

    def _slopes(self, shape: RoundShape) -> list[float]:
        """Return d log E / d p_j by position."""
        if shape not in self._own:
            return []
        accepted, runs = self._accepted(shape, self.probabilities), [1.0]
        for q in accepted:
            runs.append(runs[-1] * q)
        total, tail, slopes = sum(runs), 0.0, []
        for j in range(len(accepted), 0, -1):
            tail += runs[j]
            w, p = self._exponents[shape][j - 1], min(self.probabilities[j - 1], _MOST)
            steepness = w * (1.0 - p) ** (w - 1.0)
            slopes.append(steepness * tail / (max(accepted[j - 1], 1e-9) * total))
        return slopes[::-1]

    def _variance(self, position: int) -> float:
        """Return the variance of p at a position, with the dependence between rows."""
        p = self.probabilities[position - 1]
        return p * (1 - p) * ROWS_PER_INDEPENDENT_ROW / (self.trials(position) + PRIOR_ROWS)

    # -- learning ------------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        self.probabilities = self._shared()
        for _ in range(_ROUNDS_OF_FITTING if self._are_trees else 0):
            if not self._refit_exponents():
                break
            self.probabilities = self._shared()
        for shape, own in self._own.items():
            self._corrections[shape] = self._correction(shape, own)
        if not self._are_trees:
            self._order_chains()

    def _order_chains(self) -> None:
        """Correct chains so that none yields less than a shorter one, for it accepts all that the shorter one does.

        Corrections contradict that where acceptance has changed since a chain was last used. So the chain with the most
        rows of late keeps its estimate and bounds the others, then the one with the next most, and so on.
        """
        ordered: list[tuple[int, float]] = []  # depth, expected tokens
        for shape, own in sorted(self._own.items(), key=lambda item: -item[1].recent_rows):
            least = max((tokens for depth, tokens in ordered if depth <= own.depth), default=0.0)
            most = min((tokens for depth, tokens in ordered if depth >= own.depth), default=math.inf)
            tokens = self.expected(shape)
            bounded = min(max(tokens, least), most)
            if bounded != tokens:
                factor = self._corrections[shape].factor * bounded / tokens
                self._corrections[shape] = self._corrections[shape]._replace(factor=factor)
            ordered.append((own.depth, bounded))

    def _shared(self) -> list[float]:
        """Return p_1 … p_depth from the rows of all shapes; unknown ones extrapolate the position before."""
        prior, p = FIRST_POSITION_PRIOR, []
        for position in range(1, self.depth + 1):
            trials = accepts = 0.0
            for shape, own in self._own.items():
                if position <= own.depth and own.trials(position) > 0:
                    rows = own.trials(position)
                    trials += rows
                    accepts += rows * self._first_choice(
                        own.accepts(position) / rows, self._exponents[shape][position - 1]
                    )
            prior = (accepts + PRIOR_ROWS * prior) / (trials + PRIOR_ROWS)
            p.append(prior)
        return p

    def _first_choice(self, q: float, exponent: float) -> float:
        """Return the p that gives acceptance q."""
        return q if exponent == 1.0 else 1.0 - (1.0 - min(q, _MOST)) ** (1.0 / exponent)

    def _refit_exponents(self) -> bool:
        """Compute the exponents anew if some p_j has moved. Returns whether it has."""
        p = self.probabilities
        if self._built_for and all(abs(a - b) <= _TREES_FOLLOW for a, b in zip(p, self._built_for, strict=True)):
            return False
        self._built_for = p
        for shape, own in self._own.items():
            if shape.steps > MAX_DEPTH:
                continue
            survival = tree_survival(lambda depth: p[min(depth, len(p)) - 1], shape, _RANK_RATIO)
            before = 1.0
            for j in range(own.depth):
                q = min(survival[j] / before, _MOST) if before > 0 else 0.0
                first = min(max(p[j], 1e-6), _MOST)
                # Beyond the tree's nodes nothing can be accepted; a lower bound keeps 1 / exponent finite.
                self._exponents[shape][j] = max(math.log1p(-q) / math.log1p(-first), 1e-3)
                before = survival[j]
        return True

    def _correction(self, shape: RoundShape, own: AcceptanceEstimate) -> _Correction:
        spread = _SPREAD_OF_TREES if self._are_trees else _SPREAD_OF_CHAINS
        if not own.trials(1):
            return _Correction(1.0, 0.0, spread)
        prior = self._accepted(shape, self.probabilities)
        total = run = 1.0
        variance = 0.0
        runs, q = [1.0], []
        for position in range(1, own.depth + 1):
            trials = own.trials(position)
            q.append((own.accepts(position) + PRIOR_ROWS * prior[position - 1]) / (trials + PRIOR_ROWS))
            run *= q[-1]
            total += run
            runs.append(run)
        tail = 0.0
        for position in range(own.depth, 0, -1):
            tail += runs[position]
            slope = tail / (max(q[position - 1], 1e-9) * total)
            known = (own.trials(position) + PRIOR_ROWS) / ROWS_PER_INDEPENDENT_ROW
            variance += slope**2 * q[position - 1] * (1 - q[position - 1]) / known
        weight = spread**2 / (spread**2 + variance)
        log = weight * math.log(total / self._predicted(shape, self.probabilities))
        return _Correction(math.exp(log), weight * (1 - weight) * spread**2, spread * math.sqrt(1 - weight))

    def snapshot(self) -> dict[str, object]:
        return {
            "changes": self.changes,
            "built_for": list(self._built_for),
            "shapes": {f"{shape.steps}:{shape.nodes}": own.snapshot() for shape, own in self._own.items()},
        }
