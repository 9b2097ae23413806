"""The acceptance process of a run, computed once more from its parameters and its own longest runs: how deep runs are,
and how rounds follow each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from .answer import SimulatorAnswer

SURE = 6
"""Standard deviations that a share of draws may be off."""

GRAIN = 1 / 4096
"""By so much a share may be off in any case: a process may draw from a table of that many qualities."""

CONTEXTS = 9
"""Quantiles of the draft's confidence over which the tree is averaged."""


def wrong_acceptance(answer: SimulatorAnswer) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the process, as (what was, what should be)."""
    books = answer.books
    if books is None or not books["runs"]:
        return
    yield from _wrong_depths(books["process"])
    yield from _wrong_rounds(books["rounds"], books["runs"], [output for _, _, output in answer.arrivals])


def _wrong_depths(process: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    expected = survival(**process["parameters"])
    num_draws = process["num_draws"]
    for depth, (claimed, share, p) in enumerate(zip(process["survival"], process["shares"], expected, strict=True), 1):
        if abs(claimed - p) > 1e-9:
            yield f"a run reaches depth {depth} with probability {claimed:.6f}", f"{p:.6f}, by {process['parameters']}"
        if abs(share - p) > SURE * (p * (1 - p) / num_draws) ** 0.5 + GRAIN:
            yield f"{share:.4f} of {num_draws} requests have a run of depth {depth} at their first token", f"{p:.4f}"


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
