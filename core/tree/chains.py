"""Verification of chains whose drafts were drawn: the rules that look at the draft's own distributions.

Draft i of a chain was drawn from qᵢ, and pᵢ is the target's distribution at the same place. A rule gives each draft a
chance hᵢ, from the drafts up to it, and one coin per draft decides whether it passes:

    rule        weight wᵢ           chance hᵢ                       drafts that stay
    target      1                   p(xᵢ)                           all before the first that does not pass
    rejection   1                   min(1, p(xᵢ) / q(xᵢ))           all before the first that does not pass
    block       min(1, wᵢ₋₁ · p/q)  Rᵢ / (Rᵢ + 1 − wᵢ); last: wᵢ    all up to the last that passes

`target` is the rule of `verify.py`, which never looks at q; where q has all mass on one token, the three are the same.
Behind the last draft that stays a token is drawn from the residual: max(w · p − q, 0) of the next place, normalised
(Rᵢ is its mass behind draft i); for `target` p without the draft; behind the last draft of the chain p itself. All
three emit tokens that are distributed as the target's. For the same drafts `block` keeps at least as many on average as
`rejection`, and that at least as many as `target` (Sun et al., "Block verification accelerates speculative decoding",
arXiv 2403.10444; Leviathan et al., arXiv 2211.17192).

`block` decides with the coins of drafts that do not stay. So coins of chains are keyed by the round that they are for,
which is the position of its root, and the depth: no later round, which may draft at the same positions, has them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ..contract.arrays import Float64Array, Int64Array
from ..draws import Purpose, uniform
from .build import MAX_TREE_NODES, VerifyTree
from .verify import Coins, Verified, argmax_tokens, normalised, sample_tokens, verified_of

LEAST_REST = 1e-12
"""Less of the target beyond the draft is rounding, and no token is drawn from it."""


class AcceptRule(StrEnum):
    """Which drafted tokens verification keeps where a request samples."""

    TARGET = "target"  # by the target's distribution alone; the draft proposes its likeliest tokens
    REJECTION = "rejection"  # the draft draws its tokens
    BLOCK = "block"  # likewise; verification looks at the whole chain

    @property
    def draws_drafts(self) -> bool:
        """Whether the draft draws tokens from its distribution, which verification needs."""
        return self is not AcceptRule.TARGET


@dataclass(frozen=True, slots=True)
class ChainChances:
    """What a rule makes of bs chains of S drafts over a vocabulary of V tokens.

    passes: the chance of each draft, float64 [bs, S]; 0 from the first draft on that a row does not have.
    residuals: the distribution of the token behind 0 … S drafts that stay, up to its sum: float64 [bs, S + 1, V].
    """

    passes: Float64Array
    residuals: Float64Array
    rule: AcceptRule

    def stay(self, coins: np.ndarray) -> Int64Array:
        """Return how many drafts stay, int64 [bs]. `coins` float64 [bs, S] in [0, 1)."""
        passed = coins < self.passes
        if self.rule is AcceptRule.BLOCK:
            last: Int64Array = (passed * np.arange(1, passed.shape[1] + 1)).max(axis=1, initial=0)
            return last
        return np.asarray(np.logical_and.accumulate(passed, axis=1).sum(axis=1))

    def chance_of_staying(self) -> Float64Array:
        """Return the probability that 0 … S drafts stay: float64 [bs, S + 1]."""
        ones = np.ones((len(self.passes), 1))
        if self.rule is AcceptRule.BLOCK:
            fail_after = np.cumprod(np.concatenate([ones, 1 - self.passes[:, ::-1]], axis=1), axis=1)[:, ::-1]
            return np.asarray(np.concatenate([ones, self.passes], axis=1) * fail_after)
        reach = np.cumprod(np.concatenate([ones, self.passes], axis=1), axis=1)
        return np.asarray(reach - np.concatenate([reach[:, 1:], 0 * ones], axis=1))


def chain_chances(
    drafts: np.ndarray,
    draft_probs: np.ndarray,
    target_probs: np.ndarray,
    rule: AcceptRule,
    num_drafts: np.ndarray | None = None,
) -> ChainChances:
    """Apply a rule to chains: `drafts` int [bs, S], `draft_probs` float [bs, S, V], `target_probs` float [bs, S + 1,
    V], both up to their sums.

    `num_drafts` int [bs]: drafts that each row has, all by default. A draft that cannot have been drawn from what is
    given counts as one without doubt. A chain ends before a draft that is no token, and behind the first node without a
    distribution of the target.
    """
    batch_size, steps = drafts.shape
    vocab = target_probs.shape[-1]
    target, target_ok = normalised(target_probs)
    draft, draft_ok = normalised(draft_probs)
    known = (drafts >= 0) & (drafts < vocab)
    at = np.where(known, drafts, 0)[:, :, None]
    p, q = (np.take_along_axis(x, at, axis=2)[:, :, 0] for x in (target[:, :steps], draft))
    draft = np.where((draft_ok & (q > 0))[:, :, None], draft, np.arange(vocab) == at)
    q = np.where(draft_ok & (q > 0), q, 1.0)
    there = np.arange(steps) < (np.full(batch_size, steps) if num_drafts is None else num_drafts)[:, None]
    there = np.logical_and.accumulate(there & known & target_ok[:, :steps], axis=1)

    ratios = np.where(there, p / q, 0.0)
    weights = np.ones((batch_size, steps + 1))
    if rule is AcceptRule.BLOCK:
        for i in range(steps):
            weights[:, i + 1] = np.minimum(weights[:, i] * ratios[:, i], 1.0)
    residuals = weights[:, :, None] * target
    if rule.draws_drafts:
        residuals[:, :steps] = np.maximum(residuals[:, :steps] - np.where(there[:, :, None], draft, 0.0), 0.0)
    passes = p if rule is AcceptRule.TARGET else np.minimum(ratios, 1.0)
    if rule is AcceptRule.BLOCK:
        goes_on = np.concatenate([there[:, 1:], np.zeros((batch_size, 1), bool)], axis=1)
        w, rest = weights[:, 1:], residuals.sum(axis=2)[:, 1:]
        rest = np.where(rest < LEAST_REST, 0.0, rest)
        # With weight 1 and p = q a later draft always passes, so this one's chance is of no account.
        whole = rest + (1 - w)  # in this order rest / whole is 1 where w is
        passes = np.where(goes_on, np.divide(rest, whole, out=np.ones_like(w), where=whole > 0), w)
    # A draft that does not stay has nothing left, but for rounding; nor has any token where p = q.
    rest_of_target = target.copy()
    for left in (residuals, rest_of_target):
        drafted = np.take_along_axis(left[:, :steps], at, axis=2)
        np.put_along_axis(left[:, :steps], at, np.where(there[:, :, None], 0.0, drafted), axis=2)
    for more in (rest_of_target, target):
        residuals = np.where((residuals.sum(axis=2) > 0)[:, :, None], residuals, more)
    return ChainChances(np.where(there, passes, 0.0), residuals, rule)


def draw_chain_coins(seed: int, requests: np.ndarray, seq_lens: np.ndarray, steps: int) -> tuple[np.ndarray, Coins]:
    """Draw the coins of one round of `requests` uint64 [bs] whose roots are at `seq_lens` int [bs]: those by which the
    draft draws, float64 [bs, steps], and those of verification, [bs, steps + 1]."""
    depths = np.arange(steps + 1)
    keys, roots = np.asarray(requests)[:, None], np.asarray(seq_lens, np.int64)[:, None]
    rounds = roots * MAX_TREE_NODES + depths
    return uniform(seed, Purpose.DRAFT_COIN, keys, rounds)[:, :steps], Coins(
        uniform(seed, Purpose.CHAIN_COIN, keys, rounds), uniform(seed, Purpose.BONUS_COIN, keys, roots + depths)
    )


def verify_chains(
    tree: VerifyTree, target_probs: np.ndarray, draft_probs: np.ndarray, coins: Coins, rule: AcceptRule
) -> Verified:
    """Keep drafts and emit so that every token is distributed as the target's. `target_probs` float [bs · nd, V],
    `draft_probs` float [bs, nd − 1, V]: what each draft of a row was drawn from.

    A row fails where the target gave no distribution behind the last draft that stays. Off the path `predict` is the
    argmax.
    """
    batch_size, nodes = tree.parents.shape
    assert ((tree.parents < 0) | (tree.parents == np.arange(nodes) - 1)).all(), "trees have branches, chains have none"
    tokens = tree.tokens.reshape(batch_size, nodes)
    target = target_probs.reshape(batch_size, nodes, target_probs.shape[1])
    found = chain_chances(tokens[:, 1:], draft_probs, target, rule, tree.num_nodes - 1)
    num_correct = found.stay(coins.accept[:, : nodes - 1])
    rows, depths = np.arange(batch_size), np.arange(nodes)
    residual = found.residuals[rows, num_correct]
    failed = ~normalised(target[rows, num_correct])[1]
    bonus = np.where(failed, -1, sample_tokens(residual, coins.bonus[rows, num_correct]))

    on_path = depths <= num_correct[:, None]
    follows = depths < num_correct[:, None]
    predict = argmax_tokens(target_probs).reshape(batch_size, nodes)
    predict = np.where(follows, np.roll(tokens, -1, axis=1), predict)
    predict[rows, num_correct] = bonus
    accept_index = np.full((batch_size, tree.width), -1, np.int32)
    accept_index[:, :nodes] = np.where(on_path, rows[:, None] * nodes + depths, -1)
    return verified_of(accept_index, predict.reshape(-1).astype(np.int32), bonus, failed)
