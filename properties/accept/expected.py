"""What trees, drafts, distributions and coins must be, by the slowest way there is:
one row, one node, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isfinite, isnan

import numpy as np

from ...core.draws import Purpose, hash64
from .contract import LaunchBatch

_MASK = (1 << 62) - 1

Path = tuple[int, ...]
"""The tokens from below the root to a node."""


# -- which nodes ------------------------------------------------------------------------------------------------------


def node_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[Path | None]:
    """Return the path of each node of a row, None for no node."""
    found: list[Path | None] = []
    for node, parent in enumerate(parents):
        above = found[parent] if parent >= 0 else None
        found.append(() if node == 0 else None if above is None else (*above, tokens[node]))
    return found


def kept_scores(
    batch: LaunchBatch, number: int, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[float], list[float]] | None:
    """Return the cumulative scores of a row's nodes, and the best that there were among its candidates, both from the
    best one down.

    None where two candidates are the same text, or nodes are no candidates (ACCEPT-09 says so)."""
    scores: list[float] = []
    paths: list[Path] = []
    columns = (batch.tokens[number].tolist(), batch.scores[number].tolist(), batch.parents[number].tolist())
    for token, score, parent in zip(*columns, strict=True):
        # No number is the worst score; no child counts as better than its parent.
        clean = 0.0 if isnan(score) else score
        scores.append(min(clean, scores[parent]) if parent >= 0 else clean)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    by_path = dict(zip(paths, scores, strict=True))
    nodes = node_paths(tokens, parents)[1:]
    if len(by_path) < len(paths) or any(path not in by_path for path in nodes):
        return None
    kept = sorted((by_path[path] for path in nodes), reverse=True)
    return kept, sorted(scores, reverse=True)[: len(kept)]


@dataclass(slots=True)
class PathDrafter:
    """A draft model for one round: what follows a path is a function of the path alone.
    Every path that it is asked about is kept."""

    seed: int
    vocab_size: int
    topk: int
    beams: list[list[Path]]  # per row: of the step before
    levels: list[list[list[Path]]] = field(default_factory=list)  # per step and row: what it was asked about
    strange: str = ""  # the first question that follows from no answer

    @classmethod
    def of(cls, seed: int, vocab_size: int, topk: int, num_rows: int) -> PathDrafter:
        return cls(seed, vocab_size, topk, [[()] for _ in range(num_rows)])

    def after(self, row: int, path: Path) -> list[tuple[int, np.float32]]:
        """Return the k tokens after a path with their probabilities, the best first."""
        state = row + 1
        for token in path:
            state = (state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 1 & _MASK
        bits = hash64(self.seed, Purpose.SWARM, state, np.arange(self.vocab_size), lane=3)
        order = np.argsort(bits, kind="stable")[: self.topk].tolist()
        shares = [1 + int(bits[token] >> np.uint64(40)) for token in order]
        total = 2.0 * sum(shares)
        return sorted(zip(order, (np.float32(s / total) for s in shares), strict=True), key=lambda item: -item[1])

    def answer(self, step: int, tokens: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the k tokens after each beam node and their probabilities, int64 and float32 [bs, n, k].

        `tokens` int [bs, n]: the beam of this step; `sources` int [bs, n]: the node of the step before that each
        follows. In step 0 the beam is the root."""
        width = tokens.shape[1]
        beams: list[list[Path]] = []
        for row, before in enumerate(self.beams):
            beam: list[Path] = []
            for node in range(width):
                token, source = int(tokens[row, node]), int(sources[row, node])
                path = () if step == 0 else (*before[source], token) if 0 <= source < len(before) else None
                if step and (path is None or token not in [item for item, _ in self.after(row, path[:-1])]):
                    self.strange = self.strange or f"step {step} of row {row} goes on from token {token} below {source}"
                    path = (token,)
                beam.append(path)
            beams.append(beam)
        self.beams = beams
        self.levels.append(beams)
        given = [[self.after(row, path) for path in beam] for row, beam in enumerate(beams)]
        ids = [[[token for token, _ in found] for found in beam] for beam in given]
        shares = [[[share for _, share in found] for found in beam] for beam in given]
        return np.array(ids, np.int64).reshape(-1, width, self.topk), np.array(shares, np.float32).reshape(
            -1, width, self.topk
        )

    def best(self, row: int, steps: int, num_nodes: int) -> set[Path]:
        """Return the best nodes of a beam search over this draft."""
        return best_nodes(lambda _, path: self.after(row, path), steps, self.topk, num_nodes)


def best_nodes(
    after: Callable[[int, Path], list[tuple[int, np.float32]]], steps: int, topk: int, num_nodes: int
) -> set[Path]:
    """Return the nodes that a beam search keeps: k per step are followed, the best of all steps are kept.

    `after(step, path)` are the k tokens that the draft gives after a path, with their probabilities.
    """
    beam: list[tuple[np.float32, Path]] = [(np.float32(1.0), ())]
    candidates: list[tuple[np.float32, Path]] = []
    for step in range(steps):
        level = [
            (np.float32(score * share), (*path, token)) for score, path in beam for token, share in after(step, path)
        ]
        candidates += level
        beam = sorted(level, key=lambda item: -item[0])[:topk]
    return {path for _, path in sorted(candidates, key=lambda item: -item[0])[: num_nodes - 1]}


# -- what a node sees, and where the walk goes on ----------------------------------------------------------------------


def links_of(parents: Sequence[int]) -> tuple[list[int], list[int], list[list[int]]]:
    """Return of a row's nodes: the first child, the next sibling (-1 for none), and for each node 1 where it
    attends to a node."""
    nodes = range(len(parents))
    first = [next((child for child in nodes if parents[child] == node), -1) for node in nodes]
    sibling = [
        next((o for o in nodes if o > node and parents[node] >= 0 and parents[o] == parents[node]), -1)
        for node in nodes
    ]
    seen = []
    for node in nodes:
        above, row = node, [0] * len(parents)
        while above >= 0:
            row[above] = 1
            above = parents[above]
        seen.append(row)
    return first, sibling, seen


# -- what is sampled from ---------------------------------------------------------------------------------------------


def distribution(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float] | None:
    """Return the probabilities by temperature, then the k greatest, then the fewest greatest that have mass p together.
    None where rounding decides which these are; NaN everywhere for logits that are no answer."""
    vocab = len(logits)
    finite = [value for value in logits if isfinite(value)]
    if any(isnan(value) or value == inf for value in logits) or not finite:
        return [float("nan")] * vocab
    order = sorted(range(vocab), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return [float(token == order[0]) for token in range(vocab)]
    masses = [exp((value - max(finite)) / temperature) if isfinite(value) else 0.0 for value in logits]
    kept = order[:top_k] if top_k > 0 else order
    total = sum(masses[token] for token in kept)
    if top_p < 1:
        reached = 0.0
        for count, token in enumerate(kept, 1):
            reached += masses[token] / total
            if abs(reached - top_p) < 1e-9:
                return None
            if reached > top_p:
                kept = kept[:count]
                break
        total = sum(masses[token] for token in kept)
    return [masses[token] / total if token in kept else 0.0 for token in range(vocab)]


# -- coins ------------------------------------------------------------------------------------------------------------

COIN_BINS = 16
MOST_CHI_SQUARE = 90.0
"""Sixteen equal bins of even coins exceed this with probability 1e-12."""
MOST_CORRELATION = 0.25
"""A thousand independent pairs exceed this with probability 1e-14."""


@dataclass(slots=True)
class RecordedCoins:
    """All coins of one operation: what each key gave, whenever it was asked.
    A key is (seed, request, position, use)."""

    given: dict[tuple[int, int, int, str], list[float]] = field(default_factory=dict)
    most: tuple[np.ndarray, np.ndarray] | None = None  # accept and bonus coins of the first answer, float64 [bs, width]

    def note(self, seed: int, requests: np.ndarray, seq_lens: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Keep the answer about these rows: column d is the coin of position seq_len + d."""
        self.most = self.most or tuple(parts)
        for use, coins in zip(("accept", "bonus"), parts, strict=True):
            for request, start, row in zip(requests.tolist(), seq_lens.tolist(), coins.tolist(), strict=True):
                for depth, coin in enumerate(row):
                    self.given.setdefault((seed, request, start + depth, use), []).append(coin)

    def uneven(self) -> str:
        """Return what is not as even and independent as coins are; empty if all is."""
        accept, bonus = self.most
        for use, coins in zip(("accept", "bonus"), self.most, strict=True):
            bins = np.bincount((coins * COIN_BINS).astype(int).ravel(), minlength=COIN_BINS)
            expected = coins.size / COIN_BINS
            chi_square = float(((bins - expected) ** 2 / expected).sum())
            if chi_square > MOST_CHI_SQUARE:
                return f"{coins.size} {use} coins fall into sixteenths {bins.tolist()}, chi-square {chi_square:.0f}"
        pairs = {
            "the bonus coin": (accept, bonus),
            "that of the next position": (accept[:, :-1], accept[:, 1:]),
            "that of the next request": (accept[:-1], accept[1:]),
        }
        for what, (one, other) in pairs.items():
            correlation = float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
            if not abs(correlation) < MOST_CORRELATION:
                return f"an accept coin and {what} have a correlation of {correlation:.2f} over {one.size} pairs"
        return ""
