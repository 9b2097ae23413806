"""What simulated acceptance must be, by the slowest way there is, and the moment that the checkers look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import exp, pi, sqrt
from statistics import NormalDist

import numpy as np

from .contract import SHIFTS, WEIGHTS, ProcessConfig

NORMAL = NormalDist()
GRAIN = 1 / 4096
"""By so much a probability may be off, since the fresh part of a quality may come from a table of that many."""


@dataclass(frozen=True, slots=True)
class Share:
    """A measured share of many requests, and what it must be, give or take `tolerance`."""

    what: str
    measured: float
    due: float
    tolerance: float


@dataclass(slots=True)
class Moment:
    """One operation and its effects."""

    config: ProcessConfig
    operation: object = "make"
    differences: list[tuple[str, object, object]] = field(default_factory=list)  # (what, was, should): two ways to ask
    shares: list[Share] = field(default_factory=list)
    asked: bool = False


def walked(runs: Sequence[int], steps: int, rounds: int | None, length: int) -> list[int]:
    """Return what successive rounds emit that start before `length`, at most `rounds` of them; `runs` by position."""
    lens: list[int] = []
    at = 0
    while at < length and (rounds is None or len(lens) < rounds):
        lens.append(min(runs[at], steps) + 1)
        at += lens[-1]
    return lens


# -- the latent quality -----------------------------------------------------------------------------------------------


def survival(config: ProcessConfig, depth: int) -> float:
    """Return the probability that a run reaches a depth where nothing shifts the quality."""
    product = 1.0
    for at in range(depth):
        product *= config.conditional[min(at, len(config.conditional) - 1)]
    return product


def reaches(config: ProcessConfig, depth: int, position: int, shift: float = 0.0) -> float:
    """Return the probability of reaching a depth at a position, over all requests."""
    tail = survival(config, depth)
    if tail <= 0.0 or tail >= 1.0:
        return tail
    threshold = NORMAL.inv_cdf(1 - tail)
    moved = shift + config.drift * position / 1000
    if not config.stretch_len:
        return NORMAL.cdf(moved - threshold)
    total = sum(WEIGHTS)
    return sum(w / total * NORMAL.cdf(moved + s - threshold) for s, w in zip(SHIFTS, WEIGHTS, strict=True))


def correlation(config: ProcessConfig, one: int, other: int) -> float:
    """Return the correlation of a request's qualities at two positions, one < other."""
    length = config.correlation_len
    knots, phases = zip(*(divmod(position, length) for position in (one, other)), strict=True)
    first, second = ((phase + 0.5) / length * pi / 2 for phase in phases)
    # Between knots k and k + 1 the field is cos · k + sin · (k + 1).
    weights = {knots[0]: np.cos(first), knots[0] + 1: np.sin(first)}
    others = {knots[1]: np.cos(second), knots[1] + 1: np.sin(second)}
    field_part = sum(weight * others.get(knot, 0.0) for knot, weight in weights.items())
    return config.request_share + config.field_share * float(field_part)


def both_reach(config: ProcessConfig, one: int, other: int) -> float:
    """Return the probability that runs at both positions of a request reach depth 1, without stretches and drift."""
    tail = survival(config, 1)
    rho = correlation(config, one, other)
    return both_exceed(NORMAL.inv_cdf(1 - tail), rho)


@cache
def both_exceed(threshold: float, rho: float) -> float:
    """Return the probability that two standard normal numbers of this correlation, at least 0, exceed
    a threshold both."""
    if rho > 1 - 1e-9:
        return NORMAL.cdf(-threshold)
    steps, reach = 2000, 8.0
    total = 0.0
    for at in range(steps):
        u = -reach + 2 * reach * (at + 0.5) / steps
        total += exp(-u * u / 2) * NORMAL.cdf((sqrt(rho) * u - threshold) / sqrt(1 - rho)) ** 2
    return total * 2 * reach / steps / sqrt(2 * pi)


# -- trees ------------------------------------------------------------------------------------------------------------


def tree_survival(config: ProcessConfig, topk: int, steps: int, num_nodes: int, rank_ratio: float) -> list[float]:
    """Return the probability of reaching depth 1 … steps:
    the sum over the kept nodes of a depth, of which one path at most is right."""
    beam, nodes = [1.0], []
    for depth in range(1, steps + 1):
        p = config.conditional[min(depth, len(config.conditional)) - 1]
        level = [value * p * (rank_ratio * (1 - p)) ** rank for value in beam for rank in range(topk)]
        nodes += [(-value, len(nodes) + at, depth) for at, value in enumerate(level)]
        beam = sorted(level, reverse=True)[:topk]
    found = [0.0] * steps
    for value, _, depth in sorted(nodes)[: num_nodes - 1]:
        found[depth - 1] -= value
    return found


def tolerance_of(share: float, count: int) -> float:
    """Return by how much a share of so many independent requests may be off:
    six standard deviations, which one in 10⁹ exceeds."""
    return 6 * sqrt(max(share * (1 - share), 0.01) / count) + GRAIN
