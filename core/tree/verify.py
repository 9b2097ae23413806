"""Verification: which nodes of a tree the target accepts, and the token that it emits after the last of them.

Greedy: from the root, step to the child that equals the target's argmax while there is one.

Sampling is lossless for any draft, because it never looks at draft probabilities. At a node with target distribution p
and children c₁ … cₘ (in order, a repeated token counts once) one coin u in [0, 1) accepts the first child with u <
p(c₁) + … + p(cᵢ). If there is none, the token is drawn from the residual: p without the children, normalised. A token
x is thus emitted with probability p(x), whether it is a child or not. The walk goes on from an accepted child; behind
a leaf the residual is p itself. Coins are keyed by (seed, purpose, request, position), so accept coins and bonus coins
are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..draws import Purpose, stream_keys, uniform_at
from .build import VerifyTree


@dataclass(frozen=True, slots=True)
class Verified:
    """The decisions of verification for bs rows."""

    accept_index: np.ndarray  # int32 [bs, width]; flat index of each accepted node, root first, −1 past the end
    accept_lens: np.ndarray  # int32 [bs]; accepted nodes = emitted tokens, bonus included: 1 … width
    num_correct_drafts: np.ndarray  # int32 [bs]; accept_lens − 1
    predict: np.ndarray  # int32 [bs · nd]; the target's token after each node; on the accepted path: what is emitted
    bonus_tokens: np.ndarray  # int32 [bs]; the last emitted token: the root of the next tree
    target_failed: np.ndarray  # bool [bs]; the target gave no distribution on the accepted path: nothing can be emitted


@dataclass(frozen=True, slots=True)
class Coins:
    """The two coins of every depth of every row, float64 [bs, width] in [0, 1). Column d is position seq_len + d."""

    accept: np.ndarray
    bonus: np.ndarray


def draw_coins(seed: int, requests: np.ndarray, seq_lens: np.ndarray, width: int) -> Coins:
    """Draw coins for `requests` uint64 [bs] whose roots are at `seq_lens` int [bs].

    If a request has its own seed, its key is made of that seed alone, so only the seed decides its draws.
    """
    positions = np.asarray(seq_lens, np.int64)[:, None] + np.arange(width)
    keys = np.asarray(requests)[:, None]
    accept = stream_keys(seed, Purpose.ACCEPT_COIN, keys)
    bonus = stream_keys(seed, Purpose.BONUS_COIN, keys)
    return Coins(uniform_at(accept, positions), uniform_at(bonus, positions))


def verify_greedy(tree: VerifyTree, target_argmax: np.ndarray) -> Verified:
    """Accept the path that greedy decoding would take. `target_argmax` int32 [bs · nd], −1 where the target failed.

    With tokens sampled from the target in place of the argmax, this is also an exact sampler: sample first, then match.
    """
    batch_size, nodes = tree.parents.shape
    targets = target_argmax.reshape(batch_size, nodes)
    tokens = tree.tokens.reshape(batch_size, nodes)
    rows = np.arange(batch_size)
    accept_index = np.full((batch_size, tree.width), -1, np.int32)
    current = np.zeros(batch_size, np.int64)
    walking = np.ones(batch_size, bool)
    for depth in range(tree.width):
        accept_index[walking, depth] = (rows * nodes + current)[walking]
        wanted = targets[rows, current]
        matches = (tree.parents == current[:, None]) & (tokens == wanted[:, None])
        walking = walking & (wanted >= 0) & matches.any(axis=1)
        if not walking.any():
            break
        current = np.where(walking, matches.argmax(axis=1), current)
    bonus = targets[rows, current]
    return verified_of(accept_index, target_argmax.astype(np.int32), bonus, bonus < 0)


def verify_sampling(tree: VerifyTree, target_probs: np.ndarray, coins: Coins) -> Verified:
    """Accept and emit so that every token is distributed as the target's. `target_probs` float [bs · nd, V].

    A row of probabilities that is not finite, is negative somewhere or sums to 0 fails its request if the walk reaches
    it. Off the accepted path `predict` is the argmax.
    """
    batch_size, nodes = tree.parents.shape
    tokens = tree.tokens.reshape(batch_size, nodes)
    rows = np.arange(batch_size)
    accept_index = np.full((batch_size, tree.width), -1, np.int32)
    predict = argmax_tokens(target_probs)
    bonus = np.zeros(batch_size, np.int32)
    failed = np.zeros(batch_size, bool)
    current = np.zeros(batch_size, np.int64)
    walking = rows
    for depth in range(tree.width):
        if not walking.size:
            break
        flat = walking * nodes + current[walking]
        accept_index[walking, depth] = flat
        probs, usable = normalised(target_probs[flat])
        children = tree.parents[walking] == current[walking, None]
        child, residual = _accept_child(probs, tokens[walking], children, coins.accept[walking, depth])
        emitted = np.where(
            child >= 0,
            tokens[walking, np.maximum(child, 0)],
            sample_tokens(residual, coins.bonus[walking, depth]),
        )
        predict[flat] = np.where(usable, emitted, -1)
        bonus[walking] = predict[flat]
        failed[walking] = ~usable
        going = usable & (child >= 0)
        current[walking[going]] = child[going]
        walking = walking[going]
    assert not walking.size, "a path is longer than the width of the tree"
    return verified_of(accept_index, predict, bonus, failed)


def argmax_tokens(scores: np.ndarray) -> np.ndarray:
    """Return the lowest id of the greatest entry of logits or probabilities float [n, V] → int32 [n].

    −1 marks a failed row: NaN or +inf somewhere, or −inf everywhere.
    """
    if scores.shape[0] == 0:
        return np.zeros(0, np.int32)
    best = scores.argmax(axis=1)
    # The greatest entry of a row with a NaN is NaN, so one look per row is enough.
    return np.where(np.isfinite(scores[np.arange(len(best)), best]), best, -1).astype(np.int32)


def sample_tokens(probs: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Sample by the inverse CDF: the first id whose cumulative mass exceeds coin · total. float [n, V], [n] → int32
    [n].

    A token of probability 0 is never returned (unless the row has no mass at all, which gives 0).
    """
    if probs.shape[0] == 0:
        return np.zeros(0, np.int32)
    cumulative = np.cumsum(probs, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    # coin · total can round up to total; then the last token with mass is meant, just below the end.
    threshold = np.minimum(coins * total, np.nextafter(total, 0.0))
    tokens: np.ndarray = (cumulative > threshold[:, None]).argmax(axis=1)
    return tokens.astype(np.int32)


def target_distribution(
    logits: np.ndarray,
    temperature: float | np.ndarray = 1.0,
    top_p: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
) -> np.ndarray:
    """Return the distribution that sampling parameters make of logits float [n, V] → float64 [n, V]. Parameters: one,
    or [n].

    temperature 0 is greedy: all mass on the lowest id of the greatest logit. top_k ≤ 0 keeps all; among equal
    logits at the edge the lowest ids stay. top_p keeps the shortest prefix, in descending order, whose mass reaches
    top_p, at least one token. top_k is applied before top_p. A row with NaN, with +inf, or without a finite logit
    becomes all NaN, which verification reports as a failed target.
    """
    n, vocab = logits.shape
    if n == 0:
        return np.zeros((0, vocab))
    temperature, top_p = (np.broadcast_to(np.asarray(v, np.float64), n) for v in (temperature, top_p))
    top_k = np.broadcast_to(np.asarray(top_k, np.int64), n)
    logits = logits.astype(np.float64)
    best = argmax_tokens(logits)
    failed, greedy = best < 0, temperature <= 0.0

    shifted = np.where(failed[:, None], 0.0, logits - np.where(failed, 0.0, logits.max(axis=1))[:, None])
    with np.errstate(over="ignore"):
        probs = np.exp(shifted / np.where(greedy, 1.0, temperature)[:, None])
    order = np.argsort(-shifted, axis=1, kind="stable")
    ranked = np.take_along_axis(probs, order, axis=1)
    ranked[np.arange(vocab) >= np.where(top_k > 0, top_k, vocab)[:, None]] = 0.0
    mass_before = np.cumsum(ranked, axis=1) - ranked
    keep = (mass_before < top_p[:, None] * ranked.sum(axis=1, keepdims=True)) | (top_p >= 1.0)[:, None]
    keep[:, 0] = True
    ranked = np.where(keep, ranked, 0.0)
    np.put_along_axis(probs, order, ranked / ranked.sum(axis=1, keepdims=True), axis=1)
    probs[greedy] = np.arange(vocab) == best[greedy, None]
    probs[failed] = np.nan
    return probs


def _accept_child(
    probs: np.ndarray, tokens: np.ndarray, children: np.ndarray, coins: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the accepted child of one node per row (node number, −1 if none) and the residual, float64 [n, V].

    `tokens` int32 [n, nd] and `children` bool [n, nd] describe the row's tree; `probs` is normalised.
    """
    n, nodes = tokens.shape
    children = children & (tokens >= 0) & (tokens < probs.shape[1])
    known = np.where(children, tokens, 0)
    masses = np.zeros((n, nodes))
    residual = probs.copy()
    rows = np.arange(n)
    # Removing each child's mass as it is counted makes a repeated token count once.
    for node in np.flatnonzero(children.any(axis=0)):
        here = rows[children[:, node]]
        masses[here, node] = residual[here, known[here, node]]
        residual[here, known[here, node]] = 0.0
    possible = masses > 0.0
    accepted = possible & (coins[:, None] < np.cumsum(masses, axis=1))
    # With all mass on the children the coin can only miss by rounding: the last possible child is meant.
    exhausted = possible.any(axis=1) & ~accepted.any(axis=1) & (residual.sum(axis=1) <= 0.0)
    last_possible = nodes - 1 - possible[:, ::-1].argmax(axis=1)
    child = np.where(accepted.any(axis=1), accepted.argmax(axis=1), -1)
    return np.where(exhausted, last_possible, child), residual


def normalised(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows float […, V] as float64 that sum to 1, and which rows are distributions at all, bool […] (the others
    become zeros)."""
    probs = probs.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        total = probs.sum(axis=-1)
    usable = np.isfinite(total) & (total > 0.0) & (probs >= 0.0).all(axis=-1)
    scale = np.where(usable, total, 1.0)
    return np.where(usable[..., None], probs, 0.0) / scale[..., None], usable


def verified_of(accept_index: np.ndarray, predict: np.ndarray, bonus: np.ndarray, failed: np.ndarray) -> Verified:
    """Return the record of these decisions."""
    accept_lens = (accept_index >= 0).sum(axis=1, dtype=np.int32)
    return Verified(
        accept_index=accept_index,
        accept_lens=accept_lens,
        num_correct_drafts=accept_lens - np.int32(1),
        predict=predict,
        # A failed row ends here; a valid id in its place keeps placeholders out of every later input (RELAY-05).
        bonus_tokens=np.where(failed, 0, bonus).astype(np.int32),
        target_failed=failed,
    )
