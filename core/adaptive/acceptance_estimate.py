"""Conditional acceptance by draft position, estimated from verify results, with a memory that follows changes.

A row with n correct drafts in a round of S steps says: positions 1 … n were accepted, position n + 1 was rejected if
n < S, and nothing about the rest. So rounds of S steps inform about every step count up to S at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR_ROWS = 1.0
"""Weight of the extrapolation from the position before, in rows."""

FIRST_POSITION_PRIOR = 0.6
"""Acceptance of position 1 before anything was measured (EAGLE heads on chat text measure about .6)."""

ROWS_PER_INDEPENDENT_ROW = 8.0
"""Rows of one request resemble each other, so this many rows weigh as one independent draw: the design effect of
requests of about 100 rounds whose accept lengths differ by a factor of two (5th to 95th percentile)."""

_SLOW_ROUNDS = 2048.0
_FAST_ROUNDS = 64.0
_FLOOR_ROWS = 16.0
_CHANGE_DEVIATIONS = 4.0
_CHANGE_SHIFT = 0.05


class AcceptanceEstimate:
    """Decayed counts of trials and acceptances by position, over a slow and a fast memory.

    The slow memory (2,048 rounds) gives the estimates. The fast one (64 rounds) watches for a change: when what it
    holds of a position differs by 4 standard deviations from the older part of the slow one, it replaces the slow one,
    and positions that it has not tried are unknown again. `changes` counts that. `last_tried[j]` is the round in which
    position j + 1 was last tried, −1 for never.
    """

    __slots__ = (
        "_fast_accepts",
        "_fast_trials",
        "_pending",
        "_slow_accepts",
        "_slow_trials",
        "changes",
        "depth",
        "last_tried",
    )

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.changes = 0
        self.last_tried = [-1] * depth
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

    def fold(self, now: int, rounds: int) -> bool:
        """Take what was added over the last `rounds` rounds into the memories; True if acceptance has changed."""
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
            # A position that is not tried loses weight, never its ratio, and never the last few rows.
            keep = max(slow, min(1.0, _FLOOR_ROWS / kept)) if kept > 0 else 0.0
            self._slow_trials[j] = kept * keep + trials[j]
            self._slow_accepts[j] = self._slow_accepts[j] * keep + accepts[j]
            self._fast_trials[j] = self._fast_trials[j] * fast + trials[j]
            self._fast_accepts[j] = self._fast_accepts[j] * fast + accepts[j]
            if trials[j]:
                self.last_tried[j] = now
        return self._follow_change()

    def _follow_change(self) -> bool:
        if not any(self._has_changed(j) for j in range(self.depth)):
            return False
        for j in range(self.depth):
            known = self._fast_trials[j] >= 1.0
            self._slow_trials[j] = self._fast_trials[j] if known else 0.0
            self._slow_accepts[j] = self._fast_accepts[j] if known else 0.0
            if not known:
                self.last_tried[j] = -1
        self.changes += 1
        return True

    def _has_changed(self, j: int) -> bool:
        """Return whether what the fast memory holds of position j + 1 contradicts the older part of the slow one."""
        recent, accepts = self._fast_trials[j], self._fast_accepts[j]
        older = self._slow_trials[j] - recent
        if recent < 1.0 or older < _FLOOR_ROWS / 2:
            return False
        p = min(max((self._slow_accepts[j] - accepts) / older, 0.0), 1.0)
        shift = accepts - p * recent
        variance = (p * (1 - p) * recent * (1 + recent / older) + 1) * ROWS_PER_INDEPENDENT_ROW
        return abs(shift) > _CHANGE_SHIFT * recent and shift**2 > _CHANGE_DEVIATIONS**2 * variance

    def probabilities(self) -> list[float]:
        """Estimated conditional acceptance of positions 1 … depth; unknown ones extrapolate the position before."""
        prior = FIRST_POSITION_PRIOR
        estimates = []
        for trials, accepts in zip(self._slow_trials, self._slow_accepts, strict=True):
            prior = (accepts + PRIOR_ROWS * prior) / (trials + PRIOR_ROWS)
            estimates.append(prior)
        return estimates

    def variance(self, position: int, p: float) -> float:
        """Of the estimate `p` of a position (from 1 on), with the dependence between rows."""
        rows = self._slow_trials[position - 1] / ROWS_PER_INDEPENDENT_ROW
        return p * (1 - p) / (rows + PRIOR_ROWS / ROWS_PER_INDEPENDENT_ROW)

    def trials(self, position: int) -> float:
        """Decayed number of rows that tried a position (from 1 on)."""
        return self._slow_trials[position - 1]

    def snapshot(self) -> dict[str, object]:
        """Return the state as plain data."""
        return {
            "trials": list(self._slow_trials),
            "accepts": list(self._slow_accepts),
            "fast_trials": list(self._fast_trials),
            "fast_accepts": list(self._fast_accepts),
            "last_tried": list(self.last_tried),
            "pending": {width: list(counts) for width, counts in sorted(self._pending.items())},
            "changes": self.changes,
        }
