"""The acceptance process of a run, computed once more from its parameters and its own longest runs: how deep runs are,
and how rounds follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import ceil
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from .answer import SimulatorAnswer

SURE = 6
"""Standard deviations that a share of draws may be off."""

GRAIN = 1 / 4096
"""By so much a share may be off in any case: a process may draw from a table of that many qualities."""

SURELY_SOME = 30
"""Of so many on average there is one at least."""

CONTEXTS = 9
"""Quantiles of the draft's confidence over which the tree is averaged."""


def wrong_acceptance(answer: SimulatorAnswer) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the process, as (what was, what should be)."""
    books = answer.books
    if books is None:
        return
    for process in books.get("asked", ()):
        yield from _wrong_windows(process["windows"])
        yield from _wrong_counts(process)
    if not books["runs"]:
        return
    levels = books["asked"][0]["law"]["levels"] if "asked" in books else ((1.0, 0.0),)
    yield from _wrong_depths(books["process"], levels)
    yield from _wrong_rounds(books["rounds"], books["runs"], [output for _, _, output in answer.arrivals])


def _wrong_depths(process: Mapping[str, Any], levels: Sequence[tuple[float, float]]) -> Iterator[tuple[str, str]]:
    expected = survival(**process["parameters"])
    at_first = shares_at(0, survival=expected, levels=levels)
    num_draws = process["num_draws"]
    depths = zip(process["survival"], process["shares"], expected, at_first, strict=True)
    for depth, (claimed, share, should, p) in enumerate(depths, 1):
        if abs(claimed - should) > 1e-9:
            was = f"a run reaches depth {depth} with probability {claimed:.6f}"
            yield was, f"{should:.6f}, by {process['parameters']}"
        if abs(share - p) > SURE * (p * (1 - p) / num_draws) ** 0.5 + GRAIN:
            yield f"{share:.4f} of {num_draws} requests have a run of depth {depth} at their first token", f"{p:.4f}"


def _wrong_windows(windows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Iterator[tuple[str, str]]:
    """Compare runs that were asked for together with the same runs, asked for one at a time."""
    for start, together, alone in windows:
        if together != alone:
            yield f"a window from output position {start} on has the longest runs {together}", f"{alone}, asked singly"


def _wrong_counts(process: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    num_draws = process["num_draws"]
    for position, counts in process["counts"]:
        expected = shares_at(position, **process["law"])
        reached = [sum(counts[depth:]) for depth in range(1, max(len(counts), len(expected) + 1))]
        for depth, (count, p) in enumerate(zip_longest(reached, expected, fillvalue=0), 1):
            spread = SURE * (p * (1 - p) / num_draws) ** 0.5
            is_never = not count and (p - GRAIN / 2) * num_draws > SURELY_SOME
            if abs(count / num_draws - p) > spread + GRAIN * (0 < p < 1) or is_never:
                was = f"{count} of {num_draws} requests have a run of depth {depth} at output position {position}"
                yield was, f"{p * num_draws:.1f} on average, by {process['law']}"


def shares_at(
    position: int,
    *,
    survival: Sequence[float] = (),
    levels: Sequence[tuple[float, float]] = ((1.0, 0.0),),
    drift: float = 0.0,
    mean: float | None = None,
    recorded: Sequence[Sequence[int]] = (),
) -> list[float]:
    """Return the probability that a request's longest run at an output position reaches depth 1, 2, …

    survival, levels, drift:  a normal quality decides, which reaches a depth with this probability at shift 0; it is
                              shifted by one of the levels, (weight, shift), and by `drift` for each position
    mean:                     accept lengths, bonus included, are the two whole numbers about this mean
    recorded:                 a request repeats one of these sequences of longest runs
    """
    if recorded:
        now = [runs[position % len(runs)] for runs in recorded]
        return [fmean(run >= depth for run in now) for depth in range(1, max(now) + 1)]
    if mean is not None:
        return [min(mean - depth, 1.0) for depth in range(1, ceil(mean))]
    normal, total = NormalDist(), sum(weight for weight, _ in levels)

    def moved(p: float) -> float:
        if not 0 < p < 1:
            return p
        quality = normal.inv_cdf(p) + drift * position
        return sum(weight * normal.cdf(quality + shift) for weight, shift in levels) / total

    return [moved(p) for p in survival]


def survival(
    conditional: Sequence[float],
    depths: int,
    topk: int,
    num_nodes: int,
    rank_ratio: float,
    draft_confidence: float | None,
) -> list[float]:
    """Return the probability that the accepted path reaches depth 1 … `depths`.

    conditional:       acceptance of the first choice at depth 1, 2, …; deeper ones have the last value
    rank_ratio:        the next choice is right with this share of what the last one leaves
    draft_confidence:  the probability that a draft gives to its first choice, the median over contexts, whose log-odds
                       have standard deviation 1; each next choice gets half of the one before. None: the true ones
    """
    by_depth = [conditional[min(depth, len(conditional) - 1)] for depth in range(depths)]
    true = [[p * (rank_ratio * (1 - p)) ** rank for rank in range(topk)] for p in by_depth]
    if draft_confidence is None or topk == 1:
        return _in_tree(true, true, num_nodes)
    levels = [NormalDist().inv_cdf((number + 0.5) / CONTEXTS) for number in range(CONTEXTS)]
    odds = draft_confidence / (1 - draft_confidence) * np.exp(levels)
    trees = []
    for first in (odds / (1 + odds)).tolist():
        given = [first, *[(1 - first) * 0.5**rank for rank in range(1, topk)]]
        trees.append(_in_tree([given] * depths, true, num_nodes))
    return [fmean(values) for values in zip(*trees, strict=True)]


def _in_tree(given: list[list[float]], true: list[list[float]], num_nodes: int) -> list[float]:
    """Add up the true probabilities of the nodes of a tree by depth. The tree is grown by those that the draft has
    given: beams as wide as there are choices, then the best nodes besides the root."""
    beam, nodes = [(1.0, 1.0)], []
    for depth, choices in enumerate(zip(given, true, strict=True)):
        level = [(score * g, truth * t) for score, truth in beam for g, t in zip(*choices, strict=True)]
        nodes += [(score, truth, depth) for score, truth in level]
        beam = sorted(level, key=lambda node: -node[0])[: len(choices[0])]
    found = [0.0] * len(given)
    for _, truth, depth in sorted(nodes, key=lambda node: -node[0])[: num_nodes - 1]:
        found[depth] += truth
    return found


def _wrong_rounds(
    rounds: Mapping[str, Any], runs: Mapping[str, Sequence[int]], output_lens: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Compare successive rounds with a walk through each request's longest runs."""
    steps = rounds["steps"]
    for (name, own), length in zip(runs.items(), output_lens, strict=True):
        for what, given, end, most in (
            ("rounds", rounds["counted"][name], len(own), rounds["count"]),
            ("rounds to its end", rounds["to_end"][name], length, length),
        ):
            walked: list[int] = []
            at = 0
            while at < end and len(walked) < most:
                walked.append(min(own[at], steps) + 1)
                at += walked[-1]
            if given != walked:
                yield f"{what} of {name}, with {steps} steps, accept {given}", f"{walked}, from the longest runs {own}"
                return
