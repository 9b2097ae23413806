"""A language model and its draft that are nothing but hashes, so that a wrong read becomes a wrong token.

The target's answer is a pure function of the hash of *all* tokens before it:

    hash(prefix + token) = mix(hash(prefix), token)        the empty prefix has a hash of its own in every namespace
    logits(prefix)[v]    = mix(hash(prefix), v)            and, on regular prefixes, a boost for the last token's
                                                           successor

The draft sees the same hash. `agreement` sets how often its first choice is the target's argmax. Elsewhere the argmax
is at one of the next ranks, so that a tree finds what a chain misses. All draws are keyed by the prefix alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.contract.request import Request
from ....core.draws import Purpose, hash64, request_key, uniform
from ....core.tree.verify import argmax_tokens

HIDDEN_SIZE = 4
"""A hidden state is the prefix hash itself, 16 bits per lane: exact in float32."""

NUM_EXPERTS = 16
"""Routed experts and indexer top-k are pairs of small integers that follow from the prefix hash."""

_REGULAR_LANE, _AGREEMENT_LANE, _RANK_LANE, _CONFIDENCE_LANE = 1, 2, 3, 4
_BOOST = 16.0
_LANES = np.array([0, 16, 32, 48], dtype=np.uint64)


def namespace_salt(namespace: str) -> int:
    """Return the hash of the empty prefix, 64 bits: KV of one namespace makes no sense in another."""
    return request_key(f"namespace {namespace}")


def extend_hash(hashes: np.ndarray | int, tokens: np.ndarray | int) -> np.ndarray | np.uint64:
    """Return the hashes uint64 [n] of prefixes that grow by one token int [n] each."""
    return hash64(0, Purpose.TOKEN, hashes, tokens)


def prefix_hashes(salt: int, tokens: Sequence[int]) -> np.ndarray:
    """Return the hash after each of `tokens`, uint64 [n], for a prefix whose hash is `salt`."""
    hashes = np.empty(len(tokens), dtype=np.uint64)
    state = int(salt)
    for i, token in enumerate(tokens):
        state = int(hash64(0, Purpose.TOKEN, state, int(token)))
        hashes[i] = state
    return hashes


def hidden_of(hashes: np.ndarray) -> np.ndarray:
    """Return the hidden state of each prefix: float32 [n, HIDDEN_SIZE] from uint64 [n]."""
    return ((hashes[:, None] >> _LANES) & np.uint64(0xFFFF)).astype(np.float32)


def hash_of(hidden_states: np.ndarray) -> np.ndarray:
    """Return the prefix hash uint64 [n] that a hidden state [n, HIDDEN_SIZE] was made of."""
    lanes = hidden_states.astype(np.uint64) << _LANES
    return lanes[:, 0] | lanes[:, 1] | lanes[:, 2] | lanes[:, 3]


@dataclass(frozen=True, slots=True)
class HashLanguageModel:
    """The target. `regularity` is the share of prefixes on which the next token is the last one's successor, in
    cycles of `period`."""

    seed: int = 0
    vocab_size: int = 32
    regularity: float = 0.0
    spread: float = 3.0  # logits lie in [0, spread)
    period: int = 0  # tokens; 0: the vocabulary

    def logits(self, hashes: np.ndarray, last_tokens: np.ndarray) -> np.ndarray:
        """Return logits float64 [n, V] after prefixes uint64 [n] that end in `last_tokens` int [n]."""
        words = np.arange(self.vocab_size)
        logits = uniform(self.seed, Purpose.MODEL, hashes[:, None], words) * self.spread
        if self.regularity > 0.0:
            regular = uniform(self.seed, Purpose.MODEL, hashes, 0, _REGULAR_LANE) < self.regularity
            last, period = np.asarray(last_tokens), self.period or self.vocab_size
            successor = last - last % period + (last + 1) % period
            logits[regular, successor[regular]] += _BOOST
        return logits

    def argmax(self, hashes: np.ndarray, last_tokens: np.ndarray) -> np.ndarray:
        """Return the lowest id of the greatest logit, int32 [n]."""
        return argmax_tokens(self.logits(hashes, last_tokens))


@dataclass(frozen=True, slots=True)
class HashDraft:
    """The draft. `agreement`: probability that its first choice is the target's argmax;
    else it is one of the `depth` next."""

    target: HashLanguageModel
    agreement: float = 0.7
    depth: int = 6

    def top_k(
        self, hashes: np.ndarray, last_tokens: np.ndarray, k: int, head: int = 0, right: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens int64 [n, k] and probabilities float32 [n, k], best first, of draft head `head`.

        `right` bool [n] overrides the dial: True puts the argmax first, False leaves it out (simulated acceptance).
        """
        seed, vocab = self.target.seed, self.target.vocab_size
        n = len(hashes)
        truth = self.target.argmax(hashes, last_tokens).astype(np.int64)
        ranks = self._ranks(hashes, head) if right is None else np.where(right, 0, vocab)
        scores = uniform(seed, Purpose.DRAFT, hashes[:, None], np.arange(vocab), head * 8)
        scores[np.arange(n), truth] = -1.0
        others = np.argsort(-scores, axis=1, kind="stable")
        columns = np.arange(k)
        before = others[:, np.minimum(columns, vocab - 1)]
        after = others[:, np.maximum(columns - 1, 0)]
        tokens = np.where(columns < ranks[:, None], before, after)
        tokens = np.where(columns == ranks[:, None], truth[:, None], tokens)
        confidence = 0.3 + 0.6 * uniform(seed, Purpose.DRAFT, hashes, 0, head * 8 + _CONFIDENCE_LANE)
        probabilities = confidence[:, None] * (1.0 - confidence[:, None]) ** columns
        return tokens.astype(np.int64), probabilities.astype(np.float32)

    def _ranks(self, hashes: np.ndarray, head: int) -> np.ndarray:
        """Return where the target's argmax stands in the draft's ranking, int64 [n]."""
        seed = self.target.seed
        agrees = uniform(seed, Purpose.DRAFT, hashes, 0, head * 8 + _AGREEMENT_LANE) < self.agreement
        later = uniform(seed, Purpose.DRAFT, hashes, 0, head * 8 + _RANK_LANE) * self.depth
        return np.where(agrees, 0, 1 + later.astype(np.int64))


def routed_experts(hashes: np.ndarray) -> np.ndarray:
    """Return the experts that a mixture layer would have used on the last token of each prefix, int32 [n, 2]."""
    return np.stack([(hashes >> np.uint64(s)) % np.uint64(NUM_EXPERTS) for s in (8, 24)], axis=1).astype(np.int32)


def indexer_topk(hashes: np.ndarray) -> np.ndarray:
    """Return the positions that a sparse attention indexer would have chosen, int32 [n, 2]."""
    return np.stack([(hashes >> np.uint64(s)) % np.uint64(4096) for s in (12, 36)], axis=1).astype(np.int32)


def recurrent_state(hashes: np.ndarray) -> np.ndarray:
    """Return the state of a recurrence over the whole prefix, int64 [n]."""
    return (hashes >> np.uint64(1)).astype(np.int64)


def log_probabilities(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probability float64 [n] of tokens int [n] under logits [n, V], at temperature 1."""
    top = logits.max(axis=1)
    normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return logits[np.arange(len(tokens)), tokens] - normaliser


def plain_greedy(model: HashLanguageModel, request: Request, max_tokens: int) -> np.ndarray:
    """Decode greedily, token by token, without engine or KV: the oracle.
    int64 [≤ max_tokens], up to the first stop token."""
    context = request.prompt.materialize()
    state = int(prefix_hashes(namespace_salt(request.namespace), context.tolist())[-1])
    last = int(context[-1])
    output: list[int] = []
    while len(output) < max_tokens:
        last = int(model.argmax(np.array([state], dtype=np.uint64), np.array([last]))[0])
        output.append(last)
        if last in request.stop_tokens:
            break
        state = int(extend_hash(state, last))
    return np.array(output, dtype=np.int64)


USER_OUTPUTS = ("logprobs", "hidden_states", "routed_experts", "indexer_topk", "recurrent_state")
"""Per-node outputs that a request may ask for."""


def node_outputs(
    hashes: np.ndarray, logits: np.ndarray, predict: np.ndarray, wanted: Iterable[str] = USER_OUTPUTS
) -> dict[str, np.ndarray]:
    """Return the wanted user outputs of n nodes: `hashes` uint64 [n] of their prefixes, logits [n, V], the token
    int [n] after each."""
    made = {
        "logprobs": lambda: log_probabilities(logits, np.maximum(predict, 0)),
        "hidden_states": lambda: hidden_of(hashes),
        "routed_experts": lambda: routed_experts(hashes),
        "indexer_topk": lambda: indexer_topk(hashes),
        "recurrent_state": lambda: recurrent_state(hashes),
    }
    return {name: made[name]() for name in USER_OUTPUTS if name in wanted}


def expected_outputs(model: HashLanguageModel, request: Request, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return what a request that emitted `tokens` int [n] must have got per token, recomputed from the
    final sequence alone."""
    context = np.concatenate([request.prompt.materialize(), tokens])
    hashes = prefix_hashes(namespace_salt(request.namespace), context.tolist())
    before = slice(request.prompt.length - 1, len(context) - 1)
    return node_outputs(hashes[before], model.logits(hashes[before], context[before]), tokens)
