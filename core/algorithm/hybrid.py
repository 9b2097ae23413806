"""HYBRID: which rows of a round draft by look-up, which by the model, and which draft nothing.

```
row 0   suffix of 9 tokens found      look-up drafts 6          root ─ 4 ─ 4 ─ 1 ─ 7 ─ 0 ─ 2
row 1   nothing found                 the model drafts 2        root ─ 8 ─ 3
row 2   neither pays                  nothing                   root
```

The rounds that are compared have m model passes, and of look-ups the drafts that are right with a probability of at
least p. Row r emits, on average, E(r) = 1 + max(the model's first m, these drafts), and the round takes t(m, p). The
greatest Σ E(r) / t is chosen, the fewest passes among equals. What is likely is learned: for the model by position, for
look-ups by the length of the suffix that was found, for both also by row. What is not tried is forgotten, so that it is
tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .suffix import Lookup

_PRIOR_TRIALS = 8.0
_ROW_PRIOR_TRIALS = 6.0  # how much all rows weigh in the estimate of one
_KEPT_PER_ROUND = 0.995  # of what is known of all rows
_KEPT_PER_ROW_ROUND = 0.9  # of what is known of one row
_MODEL_PRIOR = 0.75
_ROUNDS_TO_STAY = 8  # over which the pass that catches up with a row is spread: the model drafts for it again
_THRESHOLDS = np.array([1.1, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.13, 0.08, 0.04])  # p; above 1: no look-up at all
_MATCHES = (1, 2, 3, 4, 6, 9, 13, 24)  # the least length of a suffix in each class
_MATCH_PRIOR = np.array([0.3, 0.4, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95])


@dataclass(frozen=True, slots=True)
class HybridCosts:
    """Times of passes, in any unit: of the target over t tokens, base + t · token, and so of the draft over its
    rows."""

    verify_base: float = 1.0
    verify_token: float = 0.02
    draft_base: float = 0.12
    draft_token: float = 0.005

    def round_times(
        self, tokens: np.ndarray, model_rows: np.ndarray, steps: np.ndarray, late: np.ndarray
    ) -> np.ndarray:
        """Return the times of rounds that verify so many tokens, of which `model_rows` rows run `steps` passes of the
        draft, behind one over `late` tokens that its KV lacks."""
        passes = (model_rows > 0) * steps * (self.draft_base + self.draft_token * model_rows)
        catching_up = (late > 0) * self.draft_base + self.draft_token * late
        times: np.ndarray = self.verify_base + self.verify_token * tokens + passes + catching_up / _ROUNDS_TO_STAY
        return times


HYBRID_COSTS = HybridCosts()
"""Of a head of one layer on a target of about ten, where nothing is measured."""


class RightShare:
    """The decayed share of tried drafts that were right, of several classes."""

    def __init__(self, prior: np.ndarray) -> None:
        self._prior = prior
        self._tried = np.zeros(len(prior))
        self._right = np.zeros(len(prior))

    def add(self, classes: np.ndarray | int, tried: np.ndarray | float, right: np.ndarray | float) -> None:
        np.add.at(self._tried, classes, tried)
        np.add.at(self._right, classes, right)

    def fade(self) -> None:
        self._tried *= _KEPT_PER_ROUND
        self._right *= _KEPT_PER_ROUND

    @property
    def shares(self) -> np.ndarray:
        shares: np.ndarray = (self._right + _PRIOR_TRIALS * self._prior) / (self._tried + _PRIOR_TRIALS)
        return shares


@dataclass(slots=True)
class _RowRecord:
    """What one row has shown: drafts that were tried, and right, of the model and of look-ups."""

    model: list[float] = field(default_factory=lambda: [0.0, 0.0])
    look_up: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(frozen=True, slots=True)
class RoundChoice:
    """Drafts of one round: `model_steps` for the rows of `by_model` bool [bs], and so many by look-up, int [bs]."""

    model_steps: int
    by_model: np.ndarray
    look_ups: np.ndarray


class HybridChoice:
    """Chooses for the rows of one executor, and learns from what they emit. It reads no clock."""

    def __init__(self, most_steps: int, costs: HybridCosts) -> None:
        self._most = most_steps
        self._costs = costs
        self._model = RightShare(np.full(max(most_steps, 1), _MODEL_PRIOR))
        self._look_up = RightShare(_MATCH_PRIOR)
        self._rows: dict[int, _RowRecord] = {}

    def open_row(self, row: int) -> None:
        self._rows[row] = _RowRecord()

    def choose(self, rows: Sequence[int], found: Sequence[Lookup], most: int, behind: np.ndarray) -> RoundChoice:
        """Return the choice for a round whose rows draft at most `most` tokens, and forget a little. `behind` int [bs]:
        tokens that the model's KV lacks, which it computes before it drafts."""
        by_model = np.stack([self._model_survival(row, most) for row in rows])
        by_look_up = np.stack([self._survival(row, each, most) for row, each in zip(rows, found, strict=True)])
        self._model.fade()
        self._look_up.fade()
        model = np.hstack([np.zeros((len(rows), 1)), by_model.cumsum(axis=1)])[:, :, None]  # [bs, m, 1]
        likely = by_look_up[:, None, :] >= _THRESHOLDS[:, None]  # [bs, threshold, drafts]
        look_up, lengths = (x[:, None, :] for x in ((by_look_up[:, None, :] * likely).sum(2), likely.sum(2)))
        chosen, steps = model > look_up, np.arange(most + 1)[:, None]
        emitted = (1.0 + np.maximum(model, look_up)).sum(axis=0)
        tokens = (1 + np.where(chosen, steps, lengths)).sum(axis=0)
        late = (chosen * behind[:, None, None]).sum(axis=0)
        times = self._costs.round_times(tokens, chosen.sum(axis=0), steps, late)
        m, k = np.unravel_index(int((emitted / times).argmax()), times.shape)
        is_model = chosen[:, m, k]
        return RoundChoice(int(m), is_model, np.where(is_model, 0, lengths[:, 0, k]))

    def _model_survival(self, row: int, most: int) -> np.ndarray:
        shares = self._model.shares[:most]
        mean = float(shares.mean()) if most else 0.0
        factor = self._row_share(self._rows[row].model, mean) / mean if mean else 0.0
        survival: np.ndarray = np.minimum(shares * factor, 0.99).cumprod()
        return survival

    def _survival(self, row: int, found: Lookup, most: int) -> np.ndarray:
        survival = np.zeros(most)
        count = min(len(found.tokens), most)
        if count:
            share = float(self._look_up.shares[_class_of(found.match)])
            right = self._row_share(self._rows[row].look_up, share)
            survival[:count] = np.array(found.probabilities[:count]) * right ** np.arange(1, count + 1)
        return survival

    @staticmethod
    def _row_share(record: Sequence[float], share: float) -> float:
        tried, right = record
        return (right + _ROW_PRIOR_TRIALS * share) / (tried + _ROW_PRIOR_TRIALS)

    # -- what was right -------------------------------------------------------------------------------------------

    def learn_model(self, row: int, drafted: int, right: int) -> None:
        """Take in how many of the model's drafts were right; those behind the first wrong one were not tried."""
        tried = min(right + 1, drafted)
        positions = np.arange(tried)
        self._model.add(positions, 1.0, positions < right)
        self._note(self._rows[row].model, tried, right)

    def learn_look_up(self, row: int, found: Lookup, drafted: int, right: int) -> None:
        """Take in how many drafts of a look-up were right."""
        tried = min(right + 1, drafted)
        self._look_up.add(_class_of(found.match), tried, right)
        self._note(self._rows[row].look_up, tried, right)

    @staticmethod
    def _note(record: list[float], tried: int, right: int) -> None:
        record[0] = record[0] * _KEPT_PER_ROW_ROUND + tried
        record[1] = record[1] * _KEPT_PER_ROW_ROUND + right


def _class_of(match: int) -> int:
    return int(np.searchsorted(_MATCHES, match, side="right")) - 1
