"""Verify trees: from drafted candidates to the flat batch of nodes that the target scores in one forward pass.

Node 0 of a row is its root: the bonus token of the round before, which has no KV yet and is written at position
seq_len. A node's number is greater than its parent's, and siblings are ordered by number, the preferred one first.

    candidates of step 0      0 … k−1                                     children of the root
    candidates of step s ≥ 1  k + (s−1)·k² + i·k + j                      j-th child of the i-th beam node of step s−1

The beam of a step is its k best candidates. A verify tree keeps the nd − 1 best candidates over all steps, by
cumulative score, the lowest id first among equals, and numbers them by ascending candidate id. A child never scores
above its parent and has a greater id, so the parent of a kept candidate is kept, too. (EAGLE-2's dynamic tree: Li et
al., arXiv 2406.16858.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..contract.arrays import Int64Array
from ..contract.step import RoundShape
from ..errors import ForedraftError

MAX_TREE_NODES = 64
"""Nodes of one tree, root included: the ancestors of a node are packed into 64 bits."""


class TreeShapeError(ForedraftError):
    """A tree shape that cannot be built; the message says which number is wrong and what would fit."""


@dataclass(frozen=True, slots=True)
class VerifyTree:
    """The trees of one verify batch, bs rows of nd nodes each. Flat node index = row · nd + node.

    A row with fewer than nd nodes is padded with nodes that nothing points to (parent −1, token 0): never visited.
    """

    tokens: np.ndarray  # int32 [bs · nd]; entry row · nd is the root
    parents: np.ndarray  # int32 [bs, nd]; node number inside the row, −1 for the root and for padding
    positions: np.ndarray  # int64 [bs · nd]; seq_len + depth, clamped to the last position of the context
    retrieve_next_token: np.ndarray  # int32 [bs, nd]; node number of the first child, −1 if none
    retrieve_next_sibling: np.ndarray  # int32 [bs, nd]; node number of the next sibling, −1 if none
    ancestor_bits: np.ndarray  # uint64 [bs, nd]; bit j is set if node j is the node itself or one of its ancestors
    num_nodes: np.ndarray  # int32 [bs]; nodes that are no padding, root included
    width: int  # nodes on the longest possible path, root included: the columns of accept_index

    @property
    def batch_size(self) -> int:
        return int(self.parents.shape[0])

    @property
    def num_draft_tokens(self) -> int:
        return int(self.parents.shape[1])

    @property
    def ancestor_mask(self) -> np.ndarray:
        """bool [bs, nd, nd]: entry [row, i, j] says that node i attends to node j (itself or an ancestor)."""
        nodes = np.arange(self.num_draft_tokens, dtype=np.uint64)
        return ((self.ancestor_bits[:, :, None] >> nodes) & np.uint64(1)).astype(bool)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All candidates of one draft step: n = k in step 0, n = k² later."""

    tokens: np.ndarray  # int32 [bs, n]
    scores: np.ndarray  # float32 [bs, n]; cumulative: the product of draft probabilities from the root
    parents: np.ndarray  # int32 [bs, n]; candidate id of the parent, −1 for the root


@dataclass(frozen=True, slots=True)
class Beam:
    """The k best candidates of one draft step: the nodes that the draft model runs on next."""

    candidate_ids: np.ndarray  # int32 [bs, k]
    tokens: np.ndarray  # int32 [bs, k]
    scores: np.ndarray  # float32 [bs, k]
    sources: np.ndarray  # int32 [bs, k]; index of the parent in the beam before: which draft KV and hidden state follow
    num_candidates: int  # candidates of all steps so far: the first id of the next step


def tree_capacity(topk: int, steps: int) -> int:
    """Return the candidates of `steps` draft steps with `topk` branches: k + (S−1)·k², and 0 for 0 steps."""
    return topk + (steps - 1) * topk * topk if steps > 0 else 0


def check_tree_shape(shape: RoundShape) -> None:
    """Raise `TreeShapeError` unless the steps of `shape`, with `topk` candidates each, can fill its nodes."""
    steps, topk, num_draft_tokens = shape
    if topk < 1 or steps < 0 or num_draft_tokens < 1:
        raise TreeShapeError(
            f"a tree needs topk ≥ 1, steps ≥ 0 and num_draft_tokens ≥ 1, not {topk}, {steps} and {num_draft_tokens}"
        )
    if num_draft_tokens > MAX_TREE_NODES:
        raise TreeShapeError(f"num_draft_tokens = {num_draft_tokens} is more than a tree can hold ({MAX_TREE_NODES})")
    capacity = tree_capacity(topk, steps)
    if num_draft_tokens - 1 > capacity:
        raise TreeShapeError(
            f"num_draft_tokens = {num_draft_tokens} needs {num_draft_tokens - 1} candidates, but {steps} steps with "
            f"topk = {topk} draft only {capacity}: at most num_draft_tokens = {capacity + 1} fits"
        )


def replace_invalid_tokens(tokens: np.ndarray, vocab_size: int | None) -> np.ndarray:
    """Return draft ids as int32, ids outside [0, vocab_size) replaced by 0 before the target sees them (ACCEPT-09).

    Token 0 is a draft like any other: the target accepts it only where it would have emitted it itself.
    """
    if vocab_size is None:
        return tokens.astype(np.int32, copy=False)
    return np.where((tokens >= 0) & (tokens < vocab_size), tokens, 0).astype(np.int32)


def first_candidates(
    tokens: np.ndarray, probabilities: np.ndarray, vocab_size: int | None = None
) -> tuple[Candidates, Beam]:
    """Make the candidates of step 0: the draft's top-k after the root.
    `tokens` int [bs, k], `probabilities` float [bs, k]."""
    scores = _clean_scores(probabilities)
    tokens = replace_invalid_tokens(tokens, vocab_size)
    batch_size, topk = tokens.shape
    ids = np.broadcast_to(np.arange(topk, dtype=np.int32), (batch_size, topk))
    beam = Beam(ids, tokens, scores, np.zeros((batch_size, topk), np.int32), topk)
    return Candidates(tokens, scores, np.full((batch_size, topk), -1, np.int32)), beam


def expand_topk(
    beam: Beam, tokens: np.ndarray, probabilities: np.ndarray, vocab_size: int | None = None
) -> tuple[Candidates, Beam]:
    """Make the candidates of a further step: `tokens` int [bs, k, k] and `probabilities` float [bs, k, k] after each
    node of the beam.

    Returns the step's k² candidates and the beam of its k best, best first, the lowest id first among equals.
    """
    batch_size, topk, _ = tokens.shape
    scores = (beam.scores[:, :, None] * _clean_scores(probabilities)).reshape(batch_size, topk * topk)
    flat_tokens = replace_invalid_tokens(tokens, vocab_size).reshape(batch_size, topk * topk)
    parents = np.repeat(beam.candidate_ids, topk, axis=1)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    next_beam = Beam(
        candidate_ids=(best + beam.num_candidates).astype(np.int32),
        tokens=np.take_along_axis(flat_tokens, best, axis=1),
        scores=np.take_along_axis(scores, best, axis=1),
        sources=(best // topk).astype(np.int32),
        num_candidates=beam.num_candidates + topk * topk,
    )
    return Candidates(flat_tokens, scores, parents), next_beam


def build_tree(
    roots: np.ndarray,
    candidates: Sequence[Candidates],
    seq_lens: np.ndarray,
    num_draft_tokens: int,
    max_position: int | None = None,
) -> VerifyTree:
    """Build the verify tree of the best `num_draft_tokens − 1` of all `candidates`, given by step.

    `roots` int [bs], `seq_lens` int [bs]. Scores may be products of probabilities or sums of logarithms; NaN counts as
    the worst, and no child counts as better than its parent. Raises `TreeShapeError` if there are not enough
    candidates.
    """
    batch_size = roots.shape[0]
    if not candidates:
        check_tree_shape(RoundShape(0, 1, num_draft_tokens))
        return build_chain(roots, np.zeros((batch_size, 0), np.int32), seq_lens, max_position)
    check_tree_shape(RoundShape(len(candidates), candidates[0].tokens.shape[1], num_draft_tokens))
    tokens = np.concatenate([step.tokens for step in candidates], axis=1)
    parent_ids = np.concatenate([step.parents for step in candidates], axis=1)
    scores = _monotone_scores(candidates)
    depths = np.repeat(np.arange(1, len(candidates) + 1), [step.tokens.shape[1] for step in candidates])

    kept = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, : num_draft_tokens - 1], axis=1)
    node_of = np.full((batch_size, tokens.shape[1] + 1), -1, np.int32)
    np.put_along_axis(node_of, kept + 1, np.arange(1, num_draft_tokens, dtype=np.int32)[None, :], axis=1)
    node_of[:, 0] = 0  # candidate id −1 is the root
    parents = np.full((batch_size, num_draft_tokens), -1, np.int32)
    parents[:, 1:] = np.take_along_axis(node_of, np.take_along_axis(parent_ids, kept, axis=1) + 1, axis=1)
    assert (parents[:, 1:] >= 0).all(), "a kept candidate's parent was not kept"

    node_tokens = np.empty((batch_size, num_draft_tokens), np.int32)
    node_tokens[:, 0] = roots
    node_tokens[:, 1:] = np.take_along_axis(tokens, kept, axis=1)
    node_depths = np.zeros((batch_size, num_draft_tokens), np.int64)
    node_depths[:, 1:] = depths[kept]
    num_nodes = np.full(batch_size, num_draft_tokens, np.int32)
    return _assemble(node_tokens, parents, node_depths, seq_lens, num_nodes, len(candidates) + 1, max_position)


def build_chain(
    roots: np.ndarray, draft_tokens: np.ndarray, seq_lens: np.ndarray, max_position: int | None = None
) -> VerifyTree:
    """Build a tree without branches: `roots` int [bs], `draft_tokens` int [bs, S], nd = S + 1.
    S = 0 is plain decoding."""
    batch_size, steps = draft_tokens.shape
    nodes = steps + 1
    check_tree_shape(RoundShape(steps, 1, nodes))
    tokens = np.empty((batch_size, nodes), np.int32)
    tokens[:, 0] = roots
    tokens[:, 1:] = draft_tokens
    parents, next_token, bits = _chain_links(nodes)
    shape = (batch_size, nodes)
    return VerifyTree(
        tokens=tokens.reshape(-1),
        parents=np.broadcast_to(parents, shape),
        positions=_positions(seq_lens, np.arange(nodes, dtype=np.int64), max_position),
        retrieve_next_token=np.broadcast_to(next_token, shape),
        retrieve_next_sibling=np.broadcast_to(np.int32(-1), shape),
        ancestor_bits=np.broadcast_to(bits, shape),
        num_nodes=np.full(batch_size, nodes, np.int32),
        width=nodes,
    )


def build_lookup_tree(
    roots: np.ndarray,
    paths: Sequence[Sequence[Sequence[int] | np.ndarray]],
    seq_lens: np.ndarray,
    num_draft_tokens: int,
    max_position: int | None = None,
) -> VerifyTree:
    """Build a trie of continuations per row, preferred path first; what does not fit into nd nodes is left out.

    `paths[row]` are token sequences that follow the root. Any depth below nd is possible, so width = nd.
    """
    tokens, parents = trie_of_paths(paths, num_draft_tokens)
    return build_proposed_tree(roots, tokens, parents, seq_lens, max_position)


def trie_of_paths(
    paths: Sequence[Sequence[Sequence[int] | np.ndarray]], num_draft_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens int64 and parents int32 [bs, nd − 1] of the nodes below each root, as
    `build_proposed_tree` takes them."""
    tokens = np.zeros((len(paths), num_draft_tokens - 1), np.int64)
    parents = np.full((len(paths), num_draft_tokens - 1), -1, np.int32)
    for row, row_paths in enumerate(paths):
        children: dict[tuple[int, int], int] = {}
        for path in row_paths:
            node = 0
            for token in path:
                child = children.get((node, int(token)))
                if child is None:
                    child = len(children) + 1
                    if child == num_draft_tokens:
                        break
                    children[node, int(token)] = child
                    tokens[row, child - 1], parents[row, child - 1] = token, node
                node = child
    return tokens, parents


def build_proposed_tree(
    roots: np.ndarray,
    draft_tokens: np.ndarray,
    draft_parents: np.ndarray,
    seq_lens: np.ndarray,
    max_position: int | None = None,
) -> VerifyTree:
    """Build trees as they were proposed: node j + 1 is `draft_tokens` below `draft_parents`, int [bs, nd − 1]; 0 is the
    root, −1 none.

    A parent's number is smaller than its children's. A node whose parent is missing is missing, too.
    Any depth below nd is possible, so width = nd.
    """
    batch_size, nodes = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    assert roots.shape == (batch_size,), "one tree per root"
    check_tree_shape(RoundShape(MAX_TREE_NODES, 1, nodes))
    node_bits = np.uint64(1) << np.arange(nodes, dtype=np.uint64)
    # Parent −1 looks up the last column, which stays 0: nodes below a missing one are missing.
    bits = np.zeros((batch_size, nodes + 1), np.uint64)
    bits[:, 0] = 1
    depths = np.zeros((batch_size, nodes + 1), np.int64)
    rows = np.arange(batch_size)
    for node in range(1, nodes):
        above = rows, draft_parents[:, node - 1]
        found = bits[above]
        bits[:, node] = found | node_bits[node] * (found > 0)
        depths[:, node] = depths[above] + 1
    bits, depths = bits[:, :nodes], depths[:, :nodes]
    present = bits > 0
    parents = np.full((batch_size, nodes), -1, np.int32)
    tokens = np.zeros((batch_size, nodes), np.int32)
    tokens[:, 0] = roots
    np.copyto(parents[:, 1:], draft_parents, where=present[:, 1:])
    np.copyto(tokens[:, 1:], draft_tokens, where=present[:, 1:], casting="same_kind")
    num_nodes = np.count_nonzero(present, axis=1).astype(np.int32)
    bits = np.where(present, bits, node_bits)
    return _assemble(tokens, parents, depths * present, seq_lens, num_nodes, nodes, max_position, bits)


def shorten_trees(tree: VerifyTree, row_nodes: np.ndarray) -> VerifyTree:
    """Return trees of which each row keeps its first `row_nodes` nodes, int [bs], at least the root; the others become
    padding."""
    kept = np.arange(tree.num_draft_tokens) < row_nodes[:, None]
    first, sibling = (
        np.where(kept & (link < row_nodes[:, None]), link, -1).astype(np.int32)
        for link in (tree.retrieve_next_token, tree.retrieve_next_sibling)
    )
    own_bits = np.uint64(1) << np.arange(tree.num_draft_tokens, dtype=np.uint64)
    positions = tree.positions.reshape(kept.shape)
    return replace(
        tree,
        tokens=np.where(kept, tree.tokens.reshape(kept.shape), 0).reshape(-1).astype(np.int32),
        parents=np.where(kept, tree.parents, -1).astype(np.int32),
        positions=np.where(kept, positions, positions[:, :1]).reshape(-1),
        retrieve_next_token=first,
        retrieve_next_sibling=sibling,
        ancestor_bits=np.where(kept, tree.ancestor_bits, own_bits),
        num_nodes=np.minimum(tree.num_nodes, row_nodes).astype(np.int32),
    )


def _clean_scores(probabilities: np.ndarray) -> np.ndarray:
    """Return probabilities as float32 in [0, 1]; NaN counts as 0, so that it ranks last."""
    return np.clip(np.nan_to_num(probabilities.astype(np.float32), nan=0.0), 0.0, 1.0)


def _monotone_scores(candidates: Sequence[Candidates]) -> np.ndarray:
    """Return scores of all candidates, float [bs, n], with no child above its parent."""
    clean: list[np.ndarray] = []
    for depth, step in enumerate(candidates):
        scores = np.where(np.isnan(step.scores), -np.inf, step.scores)
        if depth:
            before = np.concatenate(clean, axis=1)
            scores = np.minimum(scores, np.take_along_axis(before, step.parents, axis=1))
        clean.append(scores)
    return np.concatenate(clean, axis=1)


def _assemble(
    tokens: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    seq_lens: np.ndarray,
    num_nodes: np.ndarray,
    width: int,
    max_position: int | None,
    ancestor_bits: np.ndarray | None = None,
) -> VerifyTree:
    """Derive links and ancestors (unless they are known) from the parents of nodes in topological order."""
    nodes = parents.shape[1]
    numbers = np.arange(nodes)
    child_of = parents[:, None, :] == numbers[:, None]  # [row, parent, child]
    first_child = np.where(child_of.any(axis=2), child_of.argmax(axis=2), -1)
    later_sibling = (parents[:, :, None] == parents[:, None, :]) & (numbers[None, :] > numbers[:, None])
    later_sibling &= (parents >= 0)[:, :, None]
    next_sibling = np.where(later_sibling.any(axis=2), later_sibling.argmax(axis=2), -1)
    return VerifyTree(
        tokens=tokens.reshape(-1),
        parents=parents,
        positions=_positions(seq_lens, depths, max_position),
        retrieve_next_token=first_child.astype(np.int32),
        retrieve_next_sibling=next_sibling.astype(np.int32),
        ancestor_bits=_ancestor_bits(parents, width) if ancestor_bits is None else ancestor_bits,
        num_nodes=num_nodes,
        width=width,
    )


def _ancestor_bits(parents: np.ndarray, width: int) -> np.ndarray:
    """Return uint64 [bs, nd] of each node and its ancestors:
    every pass climbs one level, the deepest path has `width`."""
    node_bits = np.uint64(1) << np.arange(parents.shape[1], dtype=np.uint64)
    bits = np.broadcast_to(node_bits, parents.shape).copy()
    ancestors = parents
    for _ in range(width - 1):
        exists = ancestors >= 0
        above = np.where(exists, ancestors, 0)
        bits |= np.where(exists, node_bits[above], np.uint64(0))
        ancestors = np.where(exists, np.take_along_axis(parents, above, axis=1), -1)
    return bits


def _positions(seq_lens: np.ndarray, depths: np.ndarray, max_position: int | None) -> Int64Array:
    positions: Int64Array = np.asarray(seq_lens, np.int64)[:, None] + depths
    if max_position is not None:
        # Drafts past the end of the context are never emitted, but the model must not look up their positions.
        positions = np.minimum(positions, max_position)
    return positions.reshape(-1)


@lru_cache(maxsize=MAX_TREE_NODES)
def _chain_links(nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parents, first children and ancestor bits of one chain; shared by all rows, hence read-only."""
    parents = np.arange(-1, nodes - 1, dtype=np.int32)
    next_token = np.arange(1, nodes + 1, dtype=np.int32)
    next_token[-1] = -1
    bits = (np.uint64(2) << np.arange(nodes, dtype=np.uint64)) - np.uint64(1)
    for array in (parents, next_token, bits):
        array.setflags(write=False)
    return parents, next_token, bits
