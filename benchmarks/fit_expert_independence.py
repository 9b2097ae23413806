"""Fits how independently the tokens of one request choose experts, and prints it with its errors, as
`sim/cost/forward.py` has it.

    python benchmarks/fit_expert_independence.py

`published/experts.csv` has counts of distinct experts that successive tokens of one request reached in a layer. Routed
independently, n tokens reach E · (1 − (1 − k/E)ⁿ) of E experts with k per token; those of a request count as n = 1 +
independence · (tokens − 1). Least squares on the logarithm of the counts; the error of a count is also given with the
independence of the others.

The second table is a curve that a fit does not use: times of a verify pass by tokens at batch 1
(`published/verify_times.csv`), as a fixed time and a time per distinct expert. It supports the shape, but fits any
independence above 0.4 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from foredraft.sim.cost.forward import EXPERT_INDEPENDENCE
from points import read_rows
from scipy.optimize import minimize_scalar, nnls


class Count(NamedTuple):
    """Distinct experts that `tokens` successive tokens of a request reached."""

    experts: int
    per_token: int
    tokens: int
    distinct: float


def published_counts() -> list[Count]:
    """Return the rows of experts.csv."""
    names = ("experts", "experts_per_token", "tokens")
    return [Count(*(int(row[n]) for n in names), float(row["distinct_experts"])) for row in read_rows("experts.csv")]


def distinct_experts(experts: int, per_token: int, tokens: float, independence: float) -> float:
    """Return the distinct experts that so many tokens of one request reach."""
    return experts * (1 - (1 - per_token / experts) ** (1 + independence * (tokens - 1)))


def errors(counts: Sequence[Count], independence: float) -> np.ndarray:
    """Return predicted / published − 1 of each count."""
    return np.array([distinct_experts(*count[:3], independence) / count.distinct - 1 for count in counts])


def fit(counts: Sequence[Count]) -> float:
    """Return the independence, 0 … 1."""
    found = minimize_scalar(lambda x: np.sum(np.log1p(errors(counts, x)) ** 2), bounds=(0, 1), method="bounded")
    return float(found.x)


def verify_curve() -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and milliseconds of the verify passes at batch 1."""
    rows = [row for row in read_rows("verify_times.csv") if row["batch_size"] == "1"]
    return np.array([float(row["tokens"]) for row in rows]), np.array([float(row["verify_ms"]) for row in rows])


def curve_errors(independence: float, experts: int = 128, per_token: int = 8) -> np.ndarray:
    """Return predicted / published − 1 of the curve's points, by a fixed time and a time per distinct expert;
    the model is not named."""
    tokens, times = verify_curve()
    features = np.stack([np.ones_like(tokens), distinct_experts(experts, per_token, tokens, independence)], axis=1)
    features /= times[:, None]
    return features @ nnls(features, np.ones_like(times))[0] - 1


def main() -> None:
    counts = published_counts()
    independence = fit(counts)
    print(f"independence {independence:.2f} (sim/cost/forward.py: {EXPERT_INDEPENDENCE})")
    for i, (count, error) in enumerate(zip(counts, errors(counts, independence), strict=True)):
        others = counts[:i] + counts[i + 1 :]
        left_out = errors([count], fit(others))[0]
        print(
            f"    {count.tokens:2} tokens, {count.per_token} of {count.experts} experts: {count.distinct:.1f} distinct, "
            f"error {100 * error:+.1f} %, left out {100 * left_out:+.1f} %; as if independent {100 * errors([count], 1.0)[0]:+.1f} %"
        )
    for value in (0.2, 0.4, independence, 1.0):
        listed = " ".join(f"{100 * error:+.1f}" for error in curve_errors(value))
        print(f"    curve at batch 1 with independence {value:.2f}: errors in % {listed}")


if __name__ == "__main__":
    main()
