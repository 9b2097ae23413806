"""Drafts, targets and coins of a run: small functions of a seed, made of round numbers so that ties and
zeros are frequent."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.draws import Purpose, hash64
from .contract import AcceptConfig, LaunchBatch, capacity

_BROKEN = {"nan": np.nan, "inf": np.inf, "masked": 0.0}
GARBAGE_SCORES = tuple(_BROKEN)
GARBAGE_IDS = ("out-of-range", "twice")
BROKEN_DRAFTS = ("", *_BROKEN)
_ALMOST_ONE = 1.0 - 2.0**-53


@lru_cache(maxsize=512)
def _bits(seed: int, lane: int, *shape: int) -> np.ndarray:
    """Return uint64 [shape], a function of the seed, the lane and the place."""
    count = int(np.prod(shape))
    return frozen(hash64(seed, Purpose.SWARM, 1, np.arange(count), lane).reshape(shape) >> np.uint64(8))


def _below(n: int, seed: int, lane: int, *shape: int) -> np.ndarray:
    return (_bits(seed, lane, *shape) % np.uint64(n)).astype(np.int64)


def frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@lru_cache(maxsize=1024)
def candidates(
    shape: tuple[int, int, int], num_rows: int, vocab_size: int, seed: int, garbage: str = ""
) -> tuple[np.ndarray, ...]:
    """Return tokens int64, cumulative scores float32 and parents int64 [bs, n] of a beam search over made-up drafts;
    siblings differ, unless the drafts are `garbage`."""
    steps, topk, _ = shape
    n = capacity(steps, topk)
    families = n // topk
    firsts = _below(vocab_size, seed, 2, num_rows, families)
    tokens = (firsts[:, :, None] + np.arange(topk)).reshape(num_rows, families * topk) % vocab_size
    probabilities = (1 + _below(15, seed, 3, num_rows, n)) / np.float32(16)
    scores = probabilities.astype(np.float32)
    parents = np.full((num_rows, n), -1, np.int64)
    beam = np.broadcast_to(np.arange(topk), (num_rows, topk))
    for step in range(1, steps):
        start = topk + (step - 1) * topk * topk
        here = slice(start, start + topk * topk)
        parents[:, here] = np.repeat(beam, topk, axis=1)
        scores[:, here] *= np.take_along_axis(scores, parents[:, here], axis=1)
        beam = start + np.argsort(-scores[:, here], axis=1, kind="stable")[:, :topk]
    spoilt = _below(3, seed, 4, num_rows, n) == 0
    if garbage in GARBAGE_SCORES:
        scores[spoilt] = _BROKEN[garbage]
    elif garbage == "out-of-range":
        wrong = np.array([-1, vocab_size, vocab_size + 7, -(2**31), 2**31 - 1, 2**40])
        tokens[spoilt] = wrong[_below(len(wrong), seed, 5, num_rows, n)][spoilt]
    elif garbage == "twice":
        tokens = np.repeat(tokens[:, ::topk], topk, axis=1)[:, :n]
    return frozen(tokens), frozen(scores), frozen(parents)


@lru_cache(maxsize=256)
def proposals(num_nodes: int, num_rows: int, vocab_size: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return tokens int64, scores float32 [bs, 0] and parents int64 [bs, nd − 1] of trees:
    some nodes are none, siblings differ."""
    n = num_nodes - 1
    tokens = _below(vocab_size, seed, 6, num_rows, n)
    parents = np.minimum(_below(max(n, 1), seed, 7, num_rows, n), np.arange(n))
    parents[_below(4, seed, 8, num_rows, n) == 0] = -1
    for row in range(num_rows):
        taken: set[tuple[int, int]] = set()
        for node in range(n):
            pair = (int(parents[row, node]), int(tokens[row, node]))
            if pair in taken:
                parents[row, node] = -1
            taken.add(pair)
    return frozen(tokens), np.zeros((num_rows, 0), np.float32), frozen(parents)


@lru_cache(maxsize=64)
def continuations(num_rows: int, vocab_size: int, seed: int) -> tuple[list[list[int]], ...]:
    """Return per row up to three paths of up to five tokens, which often begin alike."""
    tokens = _below(min(vocab_size, 3), seed, 14, num_rows, 15).reshape(num_rows, 3, 5).tolist()
    lengths = _below(6, seed, 15, num_rows, 3).tolist()
    return tuple(
        [path[:length] for path, length in zip(*row, strict=True)] for row in zip(tokens, lengths, strict=True)
    )


@lru_cache(maxsize=64)
def grammar(vocab_size: int, num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make an automaton of three states: table int64 [3, V], −1 where a token is forbidden (never all of them);
    the rows' states [bs]."""
    table = _below(6, seed, 9, 3, vocab_size)
    table[table > 2] = -1
    for state in range(3):
        if (table[state] < 0).all():
            table[state, (seed + state) % vocab_size] = (state + 1) % 3
    return frozen(table), frozen(_below(3, seed, 10, num_rows))


def _places(
    tokens: np.ndarray, parents: np.ndarray, vocab_size: int, seed: int = 0, agreement: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Return where in [bs · nd, V] the drafts stand:
    after the parents, at the tokens, of about `agreement` of four nodes."""
    agreed = _below(4, seed, 11, *parents.shape) < agreement
    row, node = np.nonzero(agreed & (parents >= 0) & (tokens >= 0) & (tokens < vocab_size))
    return row * tokens.shape[1] + parents[row, node], tokens[row, node]


def _with_failures(scores: np.ndarray, seed: int) -> np.ndarray:
    """Put NaN into about a third of the nodes."""
    spoilt = np.flatnonzero(_below(3, seed, 16, len(scores)) == 0)
    scores[spoilt, seed % scores.shape[1]] = np.nan
    return scores


def logits(
    tokens: np.ndarray, parents: np.ndarray, vocab_size: int, seed: int, agreement: int, failing: bool = False
) -> np.ndarray:
    """Return float64 [bs · nd, V] for trees tokens, parents int64 [bs, nd]: small integers, with ties. About
    `agreement` of four drafts are the greatest. With `failing`, some nodes have NaN."""
    found = _below(8, seed, 12, tokens.size, vocab_size).astype(np.float64)
    found[_places(tokens, parents, vocab_size, seed, agreement)] = 9.0
    return frozen(_with_failures(found, seed) if failing else found)


def probabilities(
    tokens: np.ndarray,
    parents: np.ndarray,
    vocab_size: int,
    seed: int,
    agreement: int,
    allowed: np.ndarray | None = None,
    failing: bool = False,
) -> np.ndarray:
    """Return float64 [bs · nd, V] of sixteenths or so, half of them 0;
    something that is `allowed` bool [bs · nd, V] has mass."""
    weights = np.maximum(_below(8, seed, 13, tokens.size, vocab_size) - 4, 0)
    weights[_places(tokens, parents, vocab_size, seed, agreement)] += 6
    possible = weights if allowed is None else weights * allowed
    dead = np.flatnonzero(possible.sum(axis=1) == 0)
    places = (seed + dead) % vocab_size if allowed is None else allowed[dead].argmax(axis=1)
    weights[dead, places] = 1
    found = weights / weights.sum(axis=1, keepdims=True)
    return frozen(_with_failures(found, seed) if failing else found)


def draft_probabilities(tokens: np.ndarray, parents: np.ndarray, vocab_size: int, seed: int, broken: str) -> np.ndarray:
    """Return float64 [bs · nd, V]: what the draft after each node was drawn from; it has mass on the draft.
    Some are `broken`."""
    weights = _below(4, seed, 14, tokens.size, vocab_size)
    weights[_places(tokens, parents, vocab_size)] += 2
    weights[weights.sum(axis=1) == 0, 0] = 1
    found = weights / weights.sum(axis=1, keepdims=True)
    if broken:
        found[_below(2, seed, 15, tokens.size) == 0] = _BROKEN[broken]
    return frozen(found)


def coins(num_rows: int, num_nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return accept and bonus coins, float64 [bs, nd]: one in eight at an end of [0, 1)."""
    found = []
    for lane in (17, 18):
        bits = _bits(seed, lane, num_rows, num_nodes)
        coin = (bits >> np.uint64(8)).astype(np.float64) / 2.0**48
        kind = bits & np.uint64(15)
        coin[kind == 0], coin[kind == 1] = 0.0, _ALMOST_ONE
        found.append(frozen(coin))
    return tuple(found)


OUTPUT_SHAPES: dict[str, tuple[int, ...]] = {
    "tokens": (),
    "logprobs": (2,),
    "hidden_states": (3,),
    "routed_experts": (2, 2),
}


@lru_cache(maxsize=512)
def outputs(num_nodes: int) -> dict[str, np.ndarray]:
    """Return int64 [bs · nd, …] per output: no number stands in two nodes, or in two outputs."""
    found = {}
    for number, (name, shape) in enumerate(OUTPUT_SHAPES.items()):
        size = int(np.prod(shape))
        values = np.arange(1, num_nodes * size + 1).reshape(num_nodes, *shape) * len(OUTPUT_SHAPES) + number
        found[name] = frozen(values)
    return found


# -- many rows that cover the unit square -----------------------------------------------------------------------------

GRID_ACCEPT, GRID_BONUS = 16, 32
GRID = GRID_ACCEPT * GRID_BONUS
FIRST_TOLERANCE = 1 / GRID_ACCEPT + 1 / GRID_BONUS
"""An interval's share of n midpoints is off by at most 1/n, that of a box by at most the sum over its sides."""
SECOND_TOLERANCE = 1 / GRID_ACCEPT + 2 / GRID_BONUS
"""Where every n-th part has one point anywhere in it, an interval's share is off by at most 2/n."""


@lru_cache(maxsize=8)
def grid(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coins float64 [GRID, nd]. Depth 0: every pair of midpoints of the two grids. Depth 1: the accept coin is
    spread evenly over each sixteenth of that of depth 0, by reversed bits (van der Corput). The rest is hashed."""
    accept, bonus = (array.copy() for array in coins(GRID, num_nodes, 77))
    index = np.arange(GRID)
    accept[:, 0] = (index // GRID_BONUS + 0.5) / GRID_ACCEPT
    bonus[:, 0] = (index % GRID_BONUS + 0.5) / GRID_BONUS
    if num_nodes > 1:
        num_bits = GRID.bit_length() - 1
        turned = sum(((index >> bit) & 1) << (num_bits - 1 - bit) for bit in range(num_bits))
        accept[:, 1] = (turned + 0.5) / GRID
    return frozen(accept), frozen(bonus)


# -- rows that are alike -----------------------------------------------------------------------------------------------


def equal_rows(config: AcceptConfig, shape: tuple[int, int, int], seed: int, num_rows: int) -> LaunchBatch:
    """Make rows without KV of their own (all windows are the sink), with the same root and candidates."""
    found = candidates(shape, 1, config.vocab_size, seed)
    repeated = (frozen(np.repeat(array, num_rows, axis=0)) for array in found)
    roots, seq_lens = (np.full(num_rows, value, np.int64) for value in (seed % config.vocab_size, 1))
    return LaunchBatch(roots, seq_lens, config.context_len - 1, np.zeros((num_rows, shape[2]), np.int64), *repeated)


def drafted_rows(config: AcceptConfig, seed: int) -> tuple[LaunchBatch, np.ndarray, np.ndarray, np.ndarray]:
    """Make one-step chains, as many as the grid has coins for each token that the draft may draw. Returns the batch,
    the target's and the draft's probabilities float64 [2, V] of a row's nodes, and the rows' weights."""
    vocab = config.vocab_size
    no_tree = np.zeros((1, 1), np.int64), np.full((1, 1), -1, np.int64)
    target, leaf = (probabilities(*no_tree, vocab, seed + more, 0)[0] for more in (0, 1))
    draft = np.zeros(vocab)
    for place, mass in ((seed, 0.5), (seed * 3 + 1, 0.25), (seed * 5 + 2, 0.25)):
        draft[place % vocab] += mass
    drawn = np.flatnonzero(draft)
    rows = len(drawn) * GRID
    batch = equal_rows(config, (1, 1, 2), seed, rows)._replace(tokens=np.repeat(drawn, GRID)[:, None])
    weights = np.repeat(draft[drawn], GRID) / GRID
    return batch, np.stack([target, leaf]), np.stack([draft, draft]), weights


def sampled_logits(vocab_size: int, num_rows: int, seed: int, failing: bool) -> tuple[np.ndarray, ...]:
    """Return logits float64 [num_rows, vocab_size], many of them equal, and temperature, top-k and top-p of each row.
    With `failing`, some rows have values that are no numbers or no logits at all."""
    bits = hash64(seed, Purpose.SWARM, 5, np.arange(num_rows * (vocab_size + 4))).reshape(num_rows, -1) >> np.uint64(20)
    logits = (bits[:, 4:] % np.uint64(13)).astype(np.float64) / 4.0
    if failing:
        logits[bits[:, 4:] % np.uint64(29) == 0] = -np.inf
        logits[seed % num_rows, seed % vocab_size] = np.nan
        logits[(seed + 1) % num_rows] = -np.inf
        logits[(seed + 2) % num_rows, seed % vocab_size] = np.inf
    temperature = np.array([0.0, 0.5, 1.0, 1.0, 2.0])[(bits[:, 0] % np.uint64(5)).astype(int)]
    top_k = np.array([0, 0, 1, 2, 3, vocab_size, vocab_size + 1])[(bits[:, 1] % np.uint64(7)).astype(int)]
    top_p = np.array([1.0, 1.0, 0.95, 0.7, 0.5, 0.3, 0.01])[(bits[:, 2] % np.uint64(7)).astype(int)]
    return logits, temperature, top_k, top_p
