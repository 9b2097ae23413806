"""Verify trees at their edges: shapes, budgets, garbage scores. The acceptance contract covers the rest."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.contract.step import RoundShape
from foredraft.core.tree.build import (
    MAX_TREE_NODES,
    Candidates,
    TreeShapeError,
    build_chain,
    build_lookup_tree,
    build_tree,
    check_tree_shape,
    expand_topk,
    first_candidates,
    replace_invalid_tokens,
    tree_capacity,
)


def draft(rng, batch_size, topk, steps, levels=None, vocab=50):
    """Candidates of all steps; with `levels`, probabilities from a few values so that ties are everywhere."""
    pick = (lambda shape: rng.random(shape)) if levels is None else (lambda shape: rng.choice(levels, shape))
    candidates, beam = first_candidates(rng.integers(0, vocab, (batch_size, topk)), pick((batch_size, topk)))
    result, beams = [candidates], [beam]
    for _ in range(steps - 1):
        shape = (batch_size, topk, topk)
        candidates, beam = expand_topk(beam, rng.integers(0, vocab, shape), pick(shape))
        result.append(candidates)
        beams.append(beam)
    return result, beams


def test_expand_keeps_the_best_by_cumulative_score_and_numbers_the_candidates():
    first, beam = first_candidates(np.array([[10, 11]]), np.array([[0.5, 0.4]]))
    assert first.parents.tolist() == [[-1, -1]] and beam.candidate_ids.tolist() == [[0, 1]]
    second, beam = expand_topk(beam, np.array([[[20, 21], [22, 23]]]), np.array([[[0.5, 0.1], [0.75, 0.625]]]))
    # 0.25, 0.05 under the first node; 0.3, 0.25 under the second: the tie at 0.25 goes to the lower id.
    assert second.parents.tolist() == [[0, 0, 1, 1]]
    assert beam.candidate_ids.tolist() == [[4, 2]]
    assert beam.tokens.tolist() == [[22, 20]]
    assert beam.sources.tolist() == [[1, 0]]
    third, _ = expand_topk(beam, np.array([[[30, 31], [32, 33]]]), np.full((1, 2, 2), 0.5))
    assert third.parents.tolist() == [[4, 4, 2, 2]]
    tree = build_tree(np.array([9]), [first, second, third], np.array([100]), 6)
    # Scores by id: .5 .4 | .25 .05 .3 .25 | .15 .15 .125 .125, so ids 0, 1, 2, 4, 5 are kept.
    assert tree.tokens.tolist() == [9, 10, 11, 20, 22, 23]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 2]]
    assert tree.positions.tolist() == [100, 101, 101, 102, 102, 102]


def test_capacity_and_refused_shapes():
    assert [tree_capacity(*shape) for shape in [(1, 0), (4, 0), (1, 5), (4, 1), (4, 3), (16, 8)]] == [
        0,
        0,
        5,
        4,
        36,
        1808,
    ]
    check_tree_shape(RoundShape(2, 2, 7))
    with pytest.raises(TreeShapeError, match="at most num_draft_tokens = 7 fits"):
        check_tree_shape(RoundShape(2, 2, 8))
    with pytest.raises(TreeShapeError, match="64"):
        check_tree_shape(RoundShape(8, 16, 65))
    for shape in [(1, 0, 1), (-1, 1, 1), (1, 1, 0)]:
        with pytest.raises(TreeShapeError):
            check_tree_shape(RoundShape(*shape))
    candidates, _ = draft(np.random.default_rng(0), 2, 2, 2)
    with pytest.raises(TreeShapeError):
        build_tree(np.zeros(2), candidates, np.zeros(2), 8)
    with pytest.raises(TreeShapeError):
        build_tree(np.zeros(2), [], np.zeros(2), 2)


def test_a_chain_is_the_tree_with_one_branch():
    rng = np.random.default_rng(5)
    for steps in (1, 2, 7, 63):
        candidates, _ = draft(rng, 3, 1, steps)
        roots, seq_lens = rng.integers(0, 9, 3), rng.integers(0, 99, 3)
        tree = build_tree(roots, candidates, seq_lens, steps + 1, max_position=60)
        chain = build_chain(roots, np.concatenate([c.tokens for c in candidates], axis=1), seq_lens, max_position=60)
        for name in tree.__dataclass_fields__:
            left, right = getattr(tree, name), getattr(chain, name)
            assert np.array_equal(left, right), name
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None), name
        assert np.array_equal(chain.ancestor_mask[0], np.tri(steps + 1, dtype=bool))


def test_no_steps_is_one_root_per_row():
    tree = build_tree(np.array([7, 8]), [], np.array([3, 4]), 1)
    assert tree.tokens.tolist() == [7, 8] and tree.positions.tolist() == [3, 4] and tree.width == 1


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, -1.0, 5.0])
def test_garbage_scores_never_orphan_a_node(garbage):
    rng = np.random.default_rng(1)
    candidates, beams = draft(rng, 8, 3, 3)
    broken = [Candidates(c.tokens, np.where(rng.random(c.scores.shape) < 0.4, garbage, c.scores), c.parents)
              for c in candidates]  # fmt: skip
    tree = build_tree(np.zeros(8), broken, np.zeros(8), 9)
    assert (tree.parents[:, 1:] < np.arange(1, 9)).all() and (tree.parents[:, 1:] >= 0).all()
    _, beam = expand_topk(beams[0], rng.integers(0, 9, (8, 3, 3)), np.full((8, 3, 3), garbage))
    assert np.isfinite(beam.scores).all() and (beam.scores <= beams[0].scores.max(axis=1, keepdims=True)).all()


def test_ids_outside_the_vocabulary_are_replaced_before_the_target_sees_them():
    tokens = np.array([[-1, 0, 9, 10, 2**31 - 1]])
    assert replace_invalid_tokens(tokens, 10).tolist() == [[0, 0, 9, 0, 0]]
    candidates, beam = first_candidates(np.array([[-1, 3]]), np.array([[0.6, 0.4]]), vocab_size=10)
    assert candidates.tokens.tolist() == [[0, 3]]
    candidates, _ = expand_topk(beam, np.array([[[10, 4], [-7, 5]]]), np.full((1, 2, 2), 0.5), vocab_size=10)
    assert candidates.tokens.tolist() == [[0, 4, 0, 5]]


def test_positions_are_clamped_to_the_context():
    tree = build_chain(np.array([1]), np.array([[2, 3, 4]]), np.array([2**33]), max_position=2**33 + 1)
    assert (tree.positions - 2**33).tolist() == [0, 1, 1, 1]


def test_lookup_tree_merges_common_prefixes_and_pads_with_unreachable_nodes():
    paths = [[[5, 6, 7], [5, 6, 8], [9]], [[1]], []]
    tree = build_lookup_tree(np.array([4, 4, 4]), paths, np.array([10, 20, 30]), 6)
    assert tree.tokens.reshape(3, 6).tolist() == [[4, 5, 6, 7, 8, 9], [4, 1, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 2, 0], [-1, 0, -1, -1, -1, -1], [-1] * 6]
    assert tree.positions.reshape(3, 6)[0].tolist() == [10, 11, 12, 13, 13, 11]
    assert tree.retrieve_next_token[1].tolist() == [1, -1, -1, -1, -1, -1]
    assert tree.retrieve_next_sibling[0].tolist() == [-1, 5, -1, 4, -1, -1]
    assert (tree.retrieve_next_sibling[1:] == -1).all()
    assert tree.num_nodes.tolist() == [6, 2, 1] and tree.width == 6
    assert tree.ancestor_mask[0].sum(axis=1).tolist() == [1, 2, 3, 4, 4, 2]
    assert np.array_equal(tree.ancestor_mask[2], np.eye(6, dtype=bool))


def test_lookup_tree_stops_at_its_budget():
    tree = build_lookup_tree(np.array([0]), [[range(1, 100), [50, 51]]], np.array([0]), 4)
    assert tree.tokens.tolist() == [0, 1, 2, 3]
    one = build_lookup_tree(np.array([3]), [[[1, 2]]], np.array([0]), 1)
    assert one.tokens.tolist() == [3] and one.num_nodes.tolist() == [1]
    with pytest.raises(TreeShapeError):
        build_lookup_tree(np.array([0]), [[]], np.array([0]), MAX_TREE_NODES + 1)


def test_sixty_four_nodes_fit_into_the_packed_mask():
    tree = build_lookup_tree(np.array([0]), [[range(1, 64)]], np.array([0]), 64)
    assert np.array_equal(tree.ancestor_mask[0], np.tri(64, dtype=bool))
    assert int(tree.ancestor_bits[0, 63]) == 2**64 - 1


def test_an_idle_batch_keeps_shapes_and_dtypes():
    some, _ = draft(np.random.default_rng(0), 2, 3, 2)
    none, _ = draft(np.random.default_rng(0), 0, 3, 2)
    roots, lens = np.array([1, 2]), np.array([3, 4])
    for full, empty in [
        (build_tree(roots, some, lens, 5), build_tree(roots[:0], none, lens[:0], 5)),
        (build_chain(roots, np.ones((2, 4), int), lens), build_chain(roots[:0], np.ones((0, 4), int), lens[:0])),
        (build_lookup_tree(roots, [[], []], lens, 5), build_lookup_tree(roots[:0], [], lens[:0], 5)),
    ]:
        assert empty.batch_size == 0 and empty.num_draft_tokens == 5 and empty.width == full.width
        assert empty.ancestor_mask.shape == (0, 5, 5)
        for name in full.__dataclass_fields__:
            if name != "width":
                left, right = getattr(full, name), getattr(empty, name)
                assert left.dtype == right.dtype and left.shape[1:] == right.shape[1:] and right.size == 0, name
