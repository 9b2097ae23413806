"""Fits how independently the tokens of one request choose experts, and prints it with its errors, as
`sim/cost/passes/tokens.py` has it.

    python benchmarks/fit_expert_independence.py

`published/experts.csv` has counts of distinct experts that successive tokens of one request reached in a layer. Routed
independently, n tokens reach E · (1 − (1 − k/E)ⁿ) of E experts with k per token; those of a request count as n = 1 +
independence · (tokens − 1). Least squares on the logarithm of the counts; the error of a count is also given with the
independence of the others.

The database of measured kernels routes its tokens by another law: some experts are more popular than others. Where the
popularity of an expert is a quantile of a power law, the same counts give the second independence, which measured
passes take.

The last table is a curve that a fit does not use: times of a verify pass by tokens at batch 1
(`published/verify_times.csv`), as a fixed time and a time per distinct expert. It supports the shape, but fits any
independence above 0.4 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from foredraft.sim.cost.passes.tokens import EXPERT_INDEPENDENCE, UNEVEN_INDEPENDENCE
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


EXPONENT, LEAST, MOST = 1.2, 0.01, 2.0
"""The law of popularity: that of the database's tables (ai-dynamo/aiconfigurator, collector, "power_law_1.2")."""


def chances(experts: int, per_token: int, is_even: bool) -> np.ndarray:
    """Return the chance of each expert to be one of a token's, [experts]; they sum to `per_token`."""
    if is_even:
        return np.full(experts, per_token / experts)
    low, high = LEAST ** (1 - EXPONENT), MOST ** (1 - EXPONENT)
    popularity = (low + (np.arange(experts) + 0.5) / experts * (high - low)) ** (1 / (1 - EXPONENT))
    found = per_token * popularity / popularity.sum()
    while (found > 1).any():  # a token chooses an expert once
        found[found > 1] = 1
        others = found < 1
        found[others] *= (per_token - (~others).sum()) / found[others].sum()
    return found


def distinct_experts(experts: int, per_token: int, tokens: float, independence: float, is_even: bool = True) -> float:
    """Return the distinct experts that so many tokens of one request reach."""
    missed = (1 - chances(experts, per_token, is_even)) ** (1 + independence * (tokens - 1))
    return float((1 - missed).sum())


def errors(counts: Sequence[Count], independence: float, is_even: bool = True) -> np.ndarray:
    """Return predicted / published − 1 of each count."""
    return np.array([distinct_experts(*count[:3], independence, is_even) / count.distinct - 1 for count in counts])


def fit(counts: Sequence[Count], is_even: bool = True) -> float:
    """Return the independence, 0 … 1."""

    def loss(independence: float) -> float:
        return float(np.sum(np.log1p(errors(counts, independence, is_even)) ** 2))

    return float(minimize_scalar(loss, bounds=(0, 1), method="bounded").x)


def verify_curve() -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and milliseconds of the verify passes at batch 1."""
    rows = [row for row in read_rows("verify_times.csv") if row["batch_size"] == "1"]
    return np.array([float(row["tokens"]) for row in rows]), np.array([float(row["verify_ms"]) for row in rows])


def curve_errors(independence: float, experts: int = 128, per_token: int = 8) -> np.ndarray:
    """Return predicted / published − 1 of the curve's points, by a fixed time and a time per distinct expert;
    the model is not named."""
    tokens, times = verify_curve()
    distinct = [distinct_experts(experts, per_token, count, independence) for count in tokens]
    features = np.stack([np.ones_like(tokens), distinct], axis=1)
    features /= times[:, None]
    return features @ nnls(features, np.ones_like(times))[0] - 1


def main() -> None:
    counts = published_counts()
    stored = {True: EXPERT_INDEPENDENCE, False: UNEVEN_INDEPENDENCE}
    for is_even, words in ((True, "experts equally popular"), (False, "experts by a power law")):
        print(f"{words}: independence {fit(counts, is_even):.2f} (sim/cost/passes/tokens.py: {stored[is_even]})")
        for i, (count, error) in enumerate(zip(counts, errors(counts, fit(counts, is_even), is_even), strict=True)):
            left_out = errors([count], fit(counts[:i] + counts[i + 1 :], is_even), is_even)[0]
            alone = errors([count], 1.0, is_even)[0]
            print(
                f"    {count.tokens:2} tokens, {count.per_token} of {count.experts} experts: {count.distinct:.1f} distinct, "
                f"error {100 * error:+.1f} %, left out {100 * left_out:+.1f} %; as if independent {100 * alone:+.1f} %"
            )
    independence = fit(counts)
    for value in (0.2, 0.4, independence, 1.0):
        listed = " ".join(f"{100 * error:+.1f}" for error in curve_errors(value))
        print(f"    curve at batch 1 with independence {value:.2f}: errors in % {listed}")


if __name__ == "__main__":
    main()
