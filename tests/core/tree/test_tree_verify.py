"""Verification at its edges: ties, failures of the target, sampling parameters.
The acceptance contract covers the rest."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from foredraft.core.tree.build import build_chain, build_lookup_tree
from foredraft.core.tree.verify import (
    Coins,
    argmax_tokens,
    draw_coins,
    target_distribution,
    verify_greedy,
    verify_sampling,
)
from hypothesis import given
from hypothesis import strategies as st


def random_tree(rng, batch_size, nodes, vocab):
    """Any trie at all, some rows padded, a few ids outside the vocabulary, no two equal siblings."""
    paths = [
        [rng.integers(-1, vocab + 1, rng.integers(0, nodes)).tolist() for _ in range(rng.integers(0, 5))]
        for _ in range(batch_size)
    ]
    return build_lookup_tree(rng.integers(0, vocab, batch_size), paths, rng.integers(0, 99, batch_size), nodes)


def check_shape_of(verified, tree):
    assert verified.accept_index.shape == (tree.batch_size, tree.width)
    for name in ("accept_index", "accept_lens", "num_correct_drafts", "predict", "bonus_tokens"):
        assert getattr(verified, name).dtype == np.int32, name
    assert verified.target_failed.dtype == bool
    assert np.array_equal(verified.num_correct_drafts, verified.accept_lens - 1)
    assert verified.predict.shape == tree.tokens.shape
    lanes = np.arange(tree.width) < verified.accept_lens[:, None]
    assert ((verified.accept_index >= 0) == lanes).all()
    for row, path in enumerate(verified.accept_index):
        nodes = path[path >= 0] - row * tree.num_draft_tokens
        assert nodes[0] == 0
        assert tree.parents[row, nodes].tolist() == [-1, *nodes[:-1].tolist()]  # ACCEPT-01: one path, no gap


def test_greedy_sampling_is_greedy_verification():
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 200, 8, 2)
    logits = rng.normal(size=(1600, 2))
    coins = draw_coins(1, np.arange(200), np.zeros(200, int), tree.width)
    sampled = verify_sampling(tree, target_distribution(logits, temperature=0.0), coins)
    greedy = verify_greedy(tree, argmax_tokens(logits))
    assert greedy.accept_lens.max() > 2
    for name in greedy.__dataclass_fields__:
        assert np.array_equal(getattr(sampled, name), getattr(greedy, name)), name


def test_ties_of_the_target_take_the_lowest_id():
    assert argmax_tokens(np.array([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_a_draft_token_of_probability_zero_is_never_accepted_even_at_coin_zero():
    tree = build_lookup_tree(np.array([0]), [[[1], [2]]], np.array([5]), 3)
    probs = np.array([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    coins = Coins(np.zeros((1, 3)), np.zeros((1, 3)))
    verified = verify_sampling(tree, probs, coins)
    assert verified.accept_index.tolist() == [[0, 2, -1]]
    assert verified.predict[[0, 2]].tolist() == [2, 0]


@pytest.mark.parametrize("coin", [0.0, 0.3, 1.0 - 2.0**-53])
def test_bonus_is_never_a_rejected_token_nor_one_without_mass(coin):
    tree = build_chain(np.array([0]), np.array([[1]]), np.array([5]))
    probs = np.array([[0.0, 0.4, 0.6, 0.0], [0.25] * 4])
    verified = verify_sampling(tree, probs, Coins(np.full((1, 2), 0.4), np.full((1, 2), coin)))
    assert verified.accept_lens.tolist() == [1] and verified.bonus_tokens.tolist() == [2]


def test_rounding_never_leaves_a_node_without_a_token():
    # The children hold all of the mass, but their sum falls short of the greatest coin by rounding.
    probs = np.full((11, 10), 0.1)
    probs[1:] = np.eye(10)[0]
    tree = build_lookup_tree(np.array([0]), [[[token] for token in range(10)]], np.array([0]), 11)
    top = Coins(np.full((1, 11), np.nextafter(1.0, 0.0)), np.full((1, 11), np.nextafter(1.0, 0.0)))
    verified = verify_sampling(tree, probs, top)
    assert verified.accept_index[0, :2].tolist() == [0, 10]
    assert verified.predict[0] == 9 and not verified.target_failed.any()


@pytest.mark.parametrize("bad", [[np.nan, 0.5, 0.5], [np.inf, 0.0, 0.0], [0.0, 0.0, 0.0], [-0.5, 1.0, 0.5]])
def test_a_target_without_a_distribution_fails_its_own_request_only(bad):
    tree = build_chain(np.array([0, 0, 0]), np.array([[1], [1], [2]]), np.array([5, 5, 5]))
    good = [0.0, 1.0, 0.0]
    probs = np.array([bad, good, good, bad, good, bad])  # the last one is behind a rejected draft
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verified = verify_sampling(tree, probs, Coins(np.zeros((3, 2)), np.zeros((3, 2))))
    assert verified.target_failed.tolist() == [True, True, False]
    assert verified.accept_lens.tolist() == [1, 2, 1]
    assert verified.bonus_tokens.tolist() == [0, 0, 1]


def test_greedy_reports_a_failed_target_on_the_path_only():
    logits = np.array([[np.nan, 0, 0], [0, 0, 1], [0, 1, 0], [-np.inf] * 3, [0, 1, 0], [np.inf, 0, 0]])
    targets = argmax_tokens(logits)
    assert targets.tolist() == [-1, 2, 1, -1, 1, -1]
    tree = build_chain(np.array([0, 0, 0]), np.array([[-1], [1], [2]]), np.array([5, 5, 5]))
    verified = verify_greedy(tree, targets)
    assert verified.target_failed.tolist() == [True, True, False]
    assert verified.accept_lens.tolist() == [1, 2, 1]
    assert (verified.bonus_tokens >= 0).all()


def test_coins_depend_on_request_and_position_alone():
    wide = draw_coins(9, np.array([5, 6]), np.array([10, 20]), 8)
    later = draw_coins(9, np.array([6, 7, 5]), np.array([22, 1, 13]), 3)
    assert np.array_equal(wide.accept[0, 3:6], later.accept[2])
    assert np.array_equal(wide.bonus[1, 2:5], later.bonus[0])
    assert not np.intersect1d(wide.accept, wide.bonus).size
    assert not np.array_equal(wide.accept, draw_coins(8, np.array([5, 6]), np.array([10, 20]), 8).accept)


def test_an_idle_batch_verifies_to_nothing():
    tree = build_chain(np.zeros(0, int), np.zeros((0, 3), int), np.zeros(0, int))
    coins = draw_coins(0, np.zeros(0, np.uint64), np.zeros(0, np.int64), tree.width)
    for verified in (verify_greedy(tree, np.zeros(0, np.int32)), verify_sampling(tree, np.zeros((0, 9)), coins)):
        check_shape_of(verified, tree)
        assert verified.accept_index.shape == (0, 4)
    assert target_distribution(np.zeros((0, 9))).shape == (0, 9)


def reference_distribution(logits, temperature, top_p, top_k):
    """One row by the definition: sort, cut, cut, normalise."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: top_k if top_k > 0 else None]
    if top_p < 1.0:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token]
            if mass >= top_p * total:
                break
        kept = nucleus
    result = np.zeros(len(logits))
    result[kept] = weights[kept]
    return result / result.sum()


@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
)
def test_target_distribution_equals_its_definition(seed, temperature, top_p, top_k):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(size=(4, 7)) * 3, 1)
    got = target_distribution(logits, temperature, np.full(4, top_p), np.full(4, top_k))
    for row in range(4):
        assert np.allclose(got[row], reference_distribution(logits[row], temperature, top_p, top_k), atol=1e-12)
    assert np.allclose(got.sum(axis=1), 1.0)


def test_target_distribution_at_its_edges():
    logits = np.array([[1.0, 5.0, 5.0], [1.0, 5.0, 5.0], [0.0, np.nan, 1.0], [-np.inf, 2.0, -np.inf], [-np.inf] * 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probs = target_distribution(logits, temperature=np.array([0.0, 1e-310, 1.0, 1.0, 1.0]), top_k=0)
        cut = target_distribution(logits[:1], top_k=1)
    assert probs[0].tolist() == [0.0, 1.0, 0.0]
    assert probs[1].tolist() == [0.0, 0.5, 0.5]
    assert np.isnan(probs[2]).all() and np.isnan(probs[4]).all()
    assert probs[3].tolist() == [0.0, 1.0, 0.0]
    assert cut.tolist() == [[0.0, 1.0, 0.0]]
