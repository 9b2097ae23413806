"""HYBRID: which rows of a round draft by look-up, which by the model, and which draft nothing.

```
row 0   suffix of 9 tokens found      look-up drafts 6          root ─ 4 ─ 4 ─ 1 ─ 7 ─ 0 ─ 2
row 1   nothing found                 the model drafts 2        root ─ 8 ─ 3
row 2   neither pays                  nothing                   root
```

The rounds that are compared have m passes of the model over all rows, and of look-ups the drafts that are right with a
probability of at least p. Row r emits, on average, E(r) = 1 + max(the model's first m, these drafts), and the round
takes t(m, p). Each row has a rate E(r) / t, and one that is best for it. The greatest sum of rates is chosen, each as a
share of the row's best one, so that a row with long look-ups does not decide for all rows; among equals the one with
the fewest passes. What is likely is learned: for the model by position, for look-ups by the length of the suffix that
was found, and by row. What is not tried is forgotten, so that it is tried again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .suffix import Lookup

_PRIOR_TRIALS = 8.0
_ROW_PRIOR_TRIALS = 4.0  # of all rows, in the estimate of one; few, since texts differ
_KEPT_PER_ROUND = 0.995  # of what is known of all rows
_KEPT_PER_ROW_ROUND = 0.9  # of what is known of one row
_MODEL_PRIOR = 0.75
_ROUNDS_TO_STAY = 2  # over which the pass that catches up with rows is spread: the model drafts again
_THRESHOLDS = np.array([1.1, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.13, 0.08, 0.04])  # p; above 1: no look-up at all
_MATCHES = (1, 2, 3, 4, 6, 9, 13, 24)  # the least length of a suffix in each class
_MATCH_PRIOR = np.array([0.3, 0.4, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95])


@dataclass(frozen=True, slots=True)
class HybridCosts:
    """Times of passes, in any unit: of the target over t tokens, base + t · token, and so of the draft over its tokens.
    Where a row samples, the target's have `sampled_base` and `sampled_token`."""

    verify_base: float = 1.0
    verify_token: float = 0.02
    draft_base: float = 0.12
    draft_token: float = 0.005
    sampled_base: float = 1.0
    sampled_token: float = 0.02

    def verify_times(self, tokens: np.ndarray, is_sampled: bool) -> np.ndarray:
        """Return the times of the target's passes over so many tokens, with all of a round but the draft."""
        base, token = self.verify_base, self.verify_token
        if is_sampled:
            base, token = self.sampled_base, self.sampled_token
        times: np.ndarray = base + token * tokens
        return times

    def draft_times(self, steps: np.ndarray, rows: int, late: int) -> np.ndarray:
        """Return the times of so many passes of the draft over all rows, behind one over `late` tokens that its KV
        lacks."""
        times: np.ndarray = steps * (self.draft_base + self.draft_token * rows)
        if late:
            times = times + (steps > 0) * (self.draft_base + self.draft_token * late) / _ROUNDS_TO_STAY
        return times


HYBRID_COSTS = HybridCosts()
"""Of a head of one layer on a target of about ten, where nothing is measured."""


class RightShare:
    """The decayed share of tried drafts that were right, of several classes."""

    def __init__(self, prior: np.ndarray) -> None:
        self._prior = prior
        self._tried = np.zeros(len(prior))
        self._right = np.zeros(len(prior))

    def add(self, classes: int | slice, tried: float | np.ndarray, right: float | np.ndarray) -> None:
        self._tried[classes] += tried
        self._right[classes] += right

    def fade(self) -> None:
        self._tried *= _KEPT_PER_ROUND
        self._right *= _KEPT_PER_ROUND

    @property
    def shares(self) -> np.ndarray:
        shares: np.ndarray = (self._right + _PRIOR_TRIALS * self._prior) / (self._tried + _PRIOR_TRIALS)
        return shares


@dataclass(frozen=True, slots=True)
class RoundChoice:
    """Drafts of one round: `model_steps` for the rows of `by_model` bool [bs], and so many by look-up, int [bs]."""

    model_steps: int
    by_model: np.ndarray
    look_ups: np.ndarray


class HybridChoice:
    """Chooses for the rows of one executor, and learns from what they emit. It reads no clock."""

    def __init__(self, most_steps: int, costs: HybridCosts) -> None:
        self._costs = costs
        self._model = RightShare(np.full(max(most_steps, 1), _MODEL_PRIOR))
        self._look_up = RightShare(_MATCH_PRIOR)
        self._records: dict[int, tuple[float, float]] = {}  # of a row's look-ups: drafts that were tried, and right

    def open_row(self, row: int) -> None:
        self._records[row] = (0.0, 0.0)

    def choose(
        self, rows: Sequence[int], found: Sequence[Lookup], most: int, late: int = 0, is_sampled: bool = False
    ) -> RoundChoice:
        """Return the choice for a round whose rows draft at most `most` tokens, and forget a little. `late`: tokens
        that the model's KV lacks, which it computes before it drafts. `is_sampled`: some row samples."""
        survivals = [(i, self._survival(rows[i], each, most)) for i, each in enumerate(found) if each.tokens]
        model = np.zeros(most + 1)  # right drafts of so many steps
        self._model.shares[:most].cumprod().cumsum(out=model[1:])
        self._model.fade()
        self._look_up.fade()
        steps, num_rows = np.arange(most + 1), len(rows)
        drafting = self._costs.draft_times(steps, num_rows, late)
        if survivals:
            thresholds = _THRESHOLDS[:, None]
            look_up, lengths = (
                np.zeros((num_rows, 1, len(thresholds))),
                np.zeros((num_rows, 1, len(thresholds)), np.int64),
            )
            for i, survival in survivals:
                likely = survival >= thresholds  # [threshold, drafts]
                look_up[i], lengths[i] = (survival * likely).sum(axis=1), likely.sum(axis=1)
            chosen = model[:, None] > look_up  # [bs, m, threshold]
            tokens = num_rows + np.where(chosen, steps[:, None], lengths).sum(axis=0)
            is_mixed = (~chosen & (lengths > 0)).any(axis=0)  # and rows have unequal lengths
            times = self._costs.verify_times(tokens, is_sampled) + drafting[:, None] + is_mixed * self._costs.draft_base
            rates = (1.0 + np.maximum(model[:, None], look_up)) / times
            value = (rates / rates.max(axis=(1, 2), keepdims=True)).sum(axis=0)
            m, k = divmod(int(value.argmax()), len(thresholds))
            by_model = chosen[:, m, k]
            counts = np.where(by_model, 0, lengths[:, 0, k])
        else:
            times = self._costs.verify_times(num_rows * (1 + steps), is_sampled) + drafting
            m = int(((1.0 + model) / times).argmax())
            by_model, counts = np.full(num_rows, m > 0), np.zeros(num_rows, np.int64)
        return RoundChoice(m, by_model, counts)

    def _survival(self, row: int, found: Lookup, most: int) -> np.ndarray:
        """Return the probabilities that all drafts of a look-up up to each one are right, float64 [drafts]."""
        share = float(self._look_up.shares[_class_of(found.match)])
        tried, right = self._records[row]
        share = (right + _ROW_PRIOR_TRIALS * share) / (tried + _ROW_PRIOR_TRIALS)
        probabilities = np.array(found.probabilities[:most])
        survival: np.ndarray = probabilities * share ** np.arange(1, len(probabilities) + 1)
        return survival

    # -- what was right -------------------------------------------------------------------------------------------

    def learn_model(self, drafted: int, right: int) -> None:
        """Take in how many of the model's drafts were right; those behind the first wrong one were not tried."""
        tried = min(right + 1, drafted)
        self._model.add(slice(tried), 1.0, 0.0)
        self._model.add(slice(right), 0.0, 1.0)

    def learn_look_up(self, row: int, found: Lookup, drafted: int, right: int) -> None:
        """Take in how many drafts of a look-up were right."""
        tried = min(right + 1, drafted)
        self._look_up.add(_class_of(found.match), tried, right)
        before = self._records[row]
        self._records[row] = before[0] * _KEPT_PER_ROW_ROUND + tried, before[1] * _KEPT_PER_ROW_ROUND + right


def _class_of(match: int) -> int:
    return bisect_right(_MATCHES, match) - 1
