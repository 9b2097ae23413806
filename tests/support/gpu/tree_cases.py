"""Random trees and their targets, as the NumPy specification has them, and the same as tensors."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from foredraft.core.tree.build import Candidates, VerifyTree, build_chain, build_lookup_tree, build_tree, tree_capacity
from foredraft.gpu.types.ops import DeviceCandidates, DeviceTree

VOCAB = 5
MAX_POSITION = 40
KINDS = ["chain", "beam", "lookup"]


def random_candidates(rng: np.random.Generator, bs: int, topk: int, steps: int) -> list[Candidates]:
    """Return scores with many ties, some of them NaN, infinite or above the parent's;
    tokens that repeat or are no tokens."""
    levels, before = [], 0
    for step in range(steps):
        n = topk if step == 0 else topk * topk
        scores = rng.choice([0.0, -0.0, 0.25, 0.5, 1.0, np.nan, -np.inf, np.inf, 0.75, 0.3], (bs, n)).astype(np.float32)
        tokens = rng.integers(-1, VOCAB + 1, (bs, n)).astype(np.int32)
        if step == 0:
            parents = np.full((bs, n), -1, np.int32)
        else:
            size = levels[-1].tokens.shape[1]
            beam = np.stack([rng.choice(size, topk, replace=False) for _ in range(bs)]) if bs else np.zeros((0, topk))
            parents = np.repeat(beam + before - size, topk, axis=1).astype(np.int32)
        levels.append(Candidates(tokens, scores, parents))
        before += n
    return levels


def flat_candidates(levels: list[Candidates], bs: int) -> DeviceCandidates:
    """Return the candidates as `Ops.build_tree` takes them."""
    empty = [Candidates(np.zeros((bs, 0), np.int32), np.zeros((bs, 0), np.float32), np.zeros((bs, 0), np.int32))]
    stacked = [
        np.concatenate([getattr(level, name) for level in levels or empty], axis=1)
        for name in ("tokens", "scores", "parents")
    ]
    depths = tuple(depth for depth, level in enumerate(levels, 1) for _ in range(level.tokens.shape[1]))
    tokens, scores, parents = map(torch.from_numpy, stacked)
    return DeviceCandidates(tokens.long(), scores, parents, depths)


def random_tree(rng: np.random.Generator, bs: int, kind: str) -> VerifyTree:
    """Return a chain, a beam's tree or a look-up tree of random size; kinds "chain", "beam" and "lookup"."""
    roots, lengths = rng.integers(0, VOCAB, bs), rng.integers(1, MAX_POSITION, bs)
    if kind == "chain":
        return build_chain(roots, rng.integers(-1, VOCAB + 1, (bs, rng.integers(0, 7))), lengths, MAX_POSITION)
    if kind == "beam":
        topk, steps = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        nodes = int(rng.integers(1, min(tree_capacity(topk, steps) + 1, 64) + 1))
        return build_tree(roots, random_candidates(rng, bs, topk, steps), lengths, nodes, MAX_POSITION)
    paths = [[rng.integers(0, VOCAB, rng.integers(1, 6)) for _ in range(rng.integers(0, 5))] for _ in range(bs)]
    return build_lookup_tree(roots, paths, lengths, int(rng.integers(1, 12)), MAX_POSITION)


def on_device(tree: VerifyTree, device: str = "cpu") -> DeviceTree:
    shape = tree.parents.shape
    positions = torch.from_numpy(tree.positions.copy()).view(shape)
    bits = tree.ancestor_mask.sum(axis=2) - 1
    columns = (
        torch.from_numpy(tree.tokens.astype(np.int64)).view(shape),
        torch.from_numpy(tree.parents.copy()),
        positions,
        torch.from_numpy(np.where(tree.parents < 0, 0, bits)),
        torch.from_numpy(tree.retrieve_next_token.copy()),
        torch.from_numpy(tree.retrieve_next_sibling.copy()),
        torch.from_numpy(tree.ancestor_bits.view(np.int64).copy()),
    )
    return DeviceTree(*(column.to(device) for column in columns), tree.width)


def random_targets(rng: np.random.Generator, tree: VerifyTree) -> np.ndarray:
    """Return the target's choice at every node, int32 [bs · nd]: often a child's token, sometimes −1."""
    bs, nodes = tree.parents.shape
    targets = rng.integers(-1, VOCAB, (bs, nodes)).astype(np.int32)
    tokens = tree.tokens.reshape(bs, nodes)
    for row in range(bs):
        for node in range(1, nodes):
            if tree.parents[row, node] >= 0 and rng.random() < 0.5:
                targets[row, tree.parents[row, node]] = tokens[row, node]
    return targets.reshape(-1)


def random_probs(rng: np.random.Generator, tree: VerifyTree) -> np.ndarray:
    """Return float64 [bs · nd, VOCAB]: with zeros, all mass on one token, not normalised, and some that are
    no distribution."""
    n = tree.parents.size
    probs = rng.random((n, VOCAB)) * (rng.random((n, VOCAB)) < 0.6)
    empty = probs.sum(axis=1) == 0
    probs[empty, rng.integers(0, VOCAB, empty.sum())] = 1.0
    probs[rng.random(n) < 0.5] *= 3.0
    for value in (np.nan, np.inf, -0.25):
        rows = np.flatnonzero(rng.random(n) < 0.1 / 3)
        probs[rows, rng.integers(0, VOCAB, len(rows))] = value
    probs[rng.random(n) < 0.1 / 3] = 0.0
    return probs


def assert_same(found: Any, expected: Any) -> None:
    """Assert that tensors (or dataclasses and tuples of them) have equal dtypes and values, on whatever devices."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected), f"{found}\n{expected}"
    elif is_dataclass(expected):
        for f in fields(expected):
            assert_same(getattr(found, f.name), getattr(expected, f.name))
    elif isinstance(expected, tuple | list):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert found == expected
