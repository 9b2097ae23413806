"""Speculative sampling is exact: the joint distribution of emitted tokens is the target's (ACCEPT-04).

A toy target over four tokens, whose next-token distribution depends on the token before, decodes the same text in many
independent rows, with drafts that are good, bad, repeated or outside the vocabulary. The counts of all texts of three
tokens are compared with the exact probabilities by chi-square, at fixed seeds.
"""

from __future__ import annotations

import numpy as np
import pytest
from foretoken.core.tree.build import Candidates, build_chain, build_tree
from foretoken.core.tree.finalize import emitted_tokens
from foretoken.core.tree.verify import Coins, draw_coins, verify_sampling

VOCAB, TEXT, ROWS = 4, 3, 40_000
# Row t: the distribution after token t. Token 3 is impossible after tokens 0 and 1.
TARGET = np.array(
    [[0.50, 0.30, 0.20, 0.00], [0.10, 0.60, 0.30, 0.00], [0.05, 0.15, 0.30, 0.50], [0.25, 0.25, 0.25, 0.25]]
)
EXACT = (TARGET[0][:, None, None] * TARGET[:, :, None] * TARGET[None, :, :]).ravel()


def chain_draft(rng, roots):
    return build_chain(roots, rng.integers(0, VOCAB, (len(roots), 2)), np.zeros(len(roots), int))


def always_the_same_chain(rng, roots):
    return build_chain(roots, np.full((len(roots), 2), 1), np.zeros(len(roots), int))


def tree_draft(rng, roots, low=0, high=VOCAB):
    """Two branches, two steps, all six candidates; siblings may be equal."""
    rows = len(roots)
    first = Candidates(rng.integers(low, high, (rows, 2)), rng.random((rows, 2)), np.full((rows, 2), -1))
    second = Candidates(rng.integers(low, high, (rows, 4)), rng.random((rows, 4)), np.tile([0, 0, 1, 1], (rows, 1)))
    return build_tree(roots, [first, second], np.zeros(rows, int), 7)


def garbage_tree_draft(rng, roots):
    return tree_draft(rng, roots, -2, VOCAB + 2)


def no_draft(rng, roots):
    return build_chain(roots, np.zeros((len(roots), 0), int), np.zeros(len(roots), int))


def decode(draft, coins_of, seed):
    """Rounds until every row has TEXT tokens after token 0, int [ROWS, TEXT]."""
    rng = np.random.default_rng(seed)
    text = np.full((ROWS, TEXT + 4), -1)
    lengths = np.zeros(ROWS, int)
    roots = np.zeros(ROWS, int)
    while (lengths < TEXT).any():
        rows = np.flatnonzero(lengths < TEXT)
        tree = draft(rng, roots[rows])
        probs = TARGET[np.clip(tree.tokens, 0, VOCAB - 1)]
        verified = verify_sampling(tree, probs, coins_of(rows, lengths[rows], tree.width))
        emitted = emitted_tokens(verified.predict, verified.accept_index)
        for j in range(tree.width):
            here = verified.accept_lens > j
            text[rows[here], lengths[rows[here]] + j] = emitted[here, j]
        lengths[rows] += verified.accept_lens
        roots[rows] = verified.bonus_tokens
    return text[:, :TEXT]


def chi_square(text):
    counts = np.bincount(text @ (VOCAB ** np.arange(TEXT - 1, -1, -1)), minlength=VOCAB**TEXT)
    possible = EXACT > 0
    assert counts[~possible].sum() == 0, "a token of probability 0 was emitted"
    return float(((counts - ROWS * EXACT)[possible] ** 2 / (ROWS * EXACT[possible])).sum()), int(possible.sum()) - 1


def bound(degrees, sigmas=4.0):
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + sigmas * np.sqrt(spread)) ** 3


def keyed_coins(rows, lengths, width):
    return draw_coins(17, rows, lengths, width)


@pytest.mark.parametrize("draft", [chain_draft, always_the_same_chain, tree_draft, garbage_tree_draft, no_draft])
def test_text_has_exactly_the_targets_distribution(draft):
    statistic, degrees = chi_square(decode(draft, keyed_coins, seed=1))
    assert statistic < bound(degrees)


@pytest.mark.parametrize("draft", [chain_draft, tree_draft])
def test_second_token_given_the_first(draft):
    text = decode(draft, keyed_coins, seed=2)
    for first in range(3):
        after = np.bincount(text[text[:, 0] == first, 1], minlength=VOCAB)
        expected = after.sum() * TARGET[first]
        possible = expected > 0
        assert ((after - expected)[possible] ** 2 / expected[possible]).sum() < bound(possible.sum() - 1)


@pytest.mark.parametrize("draft", [chain_draft, tree_draft])
def test_the_test_notices_one_coin_used_for_both_decisions(draft):
    def one_coin(rows, lengths, width):
        coins = draw_coins(17, rows, lengths, width)
        return Coins(coins.accept, coins.accept)

    statistic, degrees = chi_square(decode(draft, one_coin, seed=1))
    assert statistic > 2 * bound(degrees)
