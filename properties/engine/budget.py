"""Which drafts of a batch are worth verifying, as plainly as possible: their survival, and the budget of most tokens in
the time of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence

Draft = tuple[float, int, int]
"""A draft by which drafts are ordered: minus its survival, its position, its row."""
NEAR = 1e-5
"""Survivals that differ by less may be ordered either way: devices multiply in single precision. Those of rows that are
equal up to there may not."""


def are_valid(confidences: Sequence[float]) -> bool:
    """Return whether all are probabilities."""
    return all(0 <= value <= 1 for value in confidences)


def survival_of(confidences: Sequence[float] | None, slope: float, biases: Sequence[float], most: int) -> list[float]:
    """Return the probability that each of the `most` first drafts of a row is reached and accepted; 1 if there are no
    confidences or one of them is none."""
    if confidences is None or not are_valid(confidences):
        return [1.0] * most
    found, survival = [], 1.0
    for value, bias in zip(confidences[:most], biases, strict=False):
        odds = 40.0 if value == 1 else -40.0 if value == 0 else math.log(value) - math.log1p(-value)
        survival /= 1 + math.exp(-(slope * max(-40.0, min(40.0, odds)) + bias))
        found.append(survival)
    return found


def passed_over(
    lengths: Sequence[int], survivals: Sequence[Sequence[float]], own_ties: bool = False
) -> tuple[Draft, Draft] | None:
    """Return a draft that is not verified although it comes before one that is, and this one. `lengths` are the drafts
    that each row verifies, `survivals` those of all drafts that it may. With `own_ties` equal drafts have no order."""
    last: Draft | None = None  # of those that are verified
    left: list[Draft] = []
    for row, (own, values) in enumerate(zip(lengths, survivals, strict=True)):
        for position, survival in enumerate(values, start=1):
            draft = (-survival, position, row)
            if position <= own:
                last = draft if last is None else max(last, draft)
            else:
                left.append(draft)
    first = min(left, default=None)
    if first is None or last is None or first > last:
        return None
    if last[0] - first[0] > NEAR:
        return first, last
    upto = [survivals[row][:position] for _, position, row in (first, last)]
    is_equal = upto[0] == upto[1] or all(value == 1 for values in upto for value in values)
    return (first, last) if is_equal and not own_ties else None


def rates(survivals: Sequence[Sequence[float]], num_sampling: int, num_tokens: int, costs: Sequence[float]) -> list:
    """Return the tokens that a round of each budget yields for its time, from the budget 0 to all drafts.

    `num_sampling` rows yield a token without drafts, `num_tokens` are computed without drafts.
    """
    found, tokens, (of_pass, of_token) = [], float(num_sampling), costs
    for budget, survival in enumerate([0.0, *sorted((value for row in survivals for value in row), reverse=True)]):
        tokens += survival
        found.append(tokens / (of_pass + of_token * (num_tokens + budget)))
    return found
