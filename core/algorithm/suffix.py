"""Suffix decoding: what followed the longest suffix of a text where it stood before, in the prompt, in the output, or
in outputs of earlier requests (arXiv 2411.04975).

```
store    … 7 3 9 ┊ 5 1 4 2 8 ┊ …      outputs of earlier requests, the oldest are forgotten
row      2 5 1 4 2 6 ……… 5 1 4        the suffix 5 1 4 stands twice before: 2 follows both times, then 6 or 8
draft                          2      p = 1; then 6 with p = 1/2, …
```

Each place that ends with the same pair of tokens as the text points to the one before it. So a search follows a chain
of bounded length, whatever the size of the text. Of the places where a suffix of one length stands, each tells what
follows; the share that goes on alike is the probability of a draft. The length with the most expected tokens decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .proposer import Proposal, ProposalRequest

MAX_EXAMINED = 32
"""Places that a search looks at, the most recent first."""
_SEPARATOR = -1
_PLACES_TO_LOOP = 8  # links of so many places are made one by one
_MIX = (0x9E3779B1, 0x85EBCA77)


@dataclass(frozen=True, slots=True)
class SuffixLimits:
    """The bounds of a look-up, with the defaults of vLLM and Arctic Inference."""

    max_match: int = 24  # longest suffix that is looked for
    max_requests: int = 10_000  # whose outputs are kept; 0: none
    max_tokens: int = 1 << 18  # of all kept outputs, and of each row's own text
    drafts_per_match: float = 1.0  # a suffix of n tokens drafts at most n times as many
    least_probability: float = 0.1  # that all drafts up to one are right


DEFAULT_LIMITS = SuffixLimits()


class Lookup(NamedTuple):
    """A chain of drafts for one row, perhaps an empty one."""

    tokens: list[int]
    probabilities: list[float]  # that all drafts up to this one are right
    match: int  # length of the suffix that they follow

    @property
    def expected(self) -> float:
        """The drafts that are right, on average."""
        return sum(self.probabilities)


NOTHING_FOUND = Lookup([], [], 0)


class SuffixIndex:
    """Texts whose places can be found by what stands before them. The oldest half goes when there are twice
    `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 2, f"max_tokens is {max_tokens}, expected at least 2"
        self._max_tokens = max_tokens
        self._tokens = np.empty(64, np.int64)
        self._before = np.empty(64, np.int64)  # the place before that ends with the same hashed pair; −1: none
        self._last = np.full(64, -1, np.int64)  # by hash of a pair
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> np.ndarray:
        """The text, int64; a view that the next `append` may invalidate."""
        return self._tokens[: self._size]

    def append(self, tokens: np.ndarray) -> None:
        """Continue the text with `tokens` int [n]."""
        tokens = np.asarray(tokens, np.int64)[-self._max_tokens :]
        begin, end = self._size, self._size + len(tokens)
        if end > 2 * self._max_tokens:
            self._rebuild(np.concatenate([self.tokens, tokens])[-self._max_tokens :])
            return
        if end > len(self._tokens):
            self._rebuild(np.concatenate([self.tokens, tokens]))
            return
        self._tokens[begin:end] = tokens
        self._size = end
        self._link(max(begin, 1))

    def find(self, suffix: np.ndarray, limits: SuffixLimits, num_drafts: int) -> Lookup:
        """Return up to `num_drafts` drafts behind `suffix` int [n], the end of a text. A suffix of this text itself is
        not found where it ends."""
        if len(suffix) < 2 or self._size < 3:
            return NOTHING_FOUND
        ends = self._ends_of(int(suffix[-2]), int(suffix[-1]))
        if not len(ends):
            return NOTHING_FOUND
        return self._best(ends, self._match_lengths(ends, suffix[-limits.max_match :]), limits, num_drafts)

    # -- links ----------------------------------------------------------------------------------------------------

    def _rebuild(self, tokens: np.ndarray) -> None:
        """Hold this text, in twice the room that it needs, and link it anew."""
        room = 1 << max(6, int(2 * len(tokens) - 1).bit_length())
        self._tokens, self._before = np.empty(room, np.int64), np.empty(room, np.int64)
        self._last = np.full(room, -1, np.int64)
        self._tokens[: len(tokens)] = tokens
        self._size = len(tokens)
        self._link(1)

    def _link(self, begin: int) -> None:
        """Link the places from `begin` on, each the end of a pair."""
        mask, count = len(self._last) - 1, self._size - begin
        if count <= 0:
            return
        tokens = self._tokens[begin - 1 : self._size]
        hashes = (tokens[:-1] * _MIX[0] ^ tokens[1:] * _MIX[1]) >> 7 & mask
        if count <= _PLACES_TO_LOOP:
            for place, key in enumerate(hashes.tolist(), begin):
                self._before[place] = self._last[key]
                self._last[key] = place
            return
        order = np.argsort(hashes, kind="stable")
        keys, places = hashes[order], order + begin
        is_first = np.append(True, keys[1:] != keys[:-1])
        self._before[places] = np.where(is_first, self._last[keys], np.roll(places, 1))
        ends = np.append(is_first[1:], True)
        self._last[keys[ends]] = places[ends]

    def _ends_of(self, first: int, second: int) -> np.ndarray:
        """Return the places where this pair ends and something follows, the most recent first, int64."""
        key = (first * _MIX[0] ^ second * _MIX[1]) >> 7 & (len(self._last) - 1)
        place, found = int(self._last[key]), []
        for _ in range(MAX_EXAMINED):
            if place < 0:
                break
            if place + 1 < self._size:
                found.append(place)
            place = int(self._before[place])
        ends = np.array(found, np.int64)
        are_pairs: np.ndarray = ends[(self._tokens[ends] == second) & (self._tokens[ends - 1] == first)]
        return are_pairs

    def _match_lengths(self, ends: np.ndarray, suffix: np.ndarray) -> np.ndarray:
        """Return how many tokens before and at each place are those of the suffix, int64."""
        back = np.arange(len(suffix))
        places = ends[:, None] - back
        same = (self._tokens[np.maximum(places, 0)] == suffix[::-1]) & (places >= 0)
        lengths: np.ndarray = np.where(same.all(axis=1), len(suffix), same.argmin(axis=1))
        return lengths

    # -- drafts ---------------------------------------------------------------------------------------------------

    def _best(self, ends: np.ndarray, lengths: np.ndarray, limits: SuffixLimits, num_drafts: int) -> Lookup:
        best = NOTHING_FOUND
        for length in np.unique(lengths)[::-1].tolist():
            most = min(num_drafts, int(length * limits.drafts_per_match))
            if most <= best.expected:
                break  # a shorter suffix can draft no more than that
            following = self._following(ends[lengths >= length], most)
            found = Lookup(*_agreed(following, limits.least_probability), length)
            if found.expected > best.expected:
                best = found
        return best

    def _following(self, ends: np.ndarray, count: int) -> list[list[int]]:
        """Return the tokens behind each place. Where the text ends it repeats itself, since it is repeating there."""
        periods = self._size - 1 - ends
        places = ends[:, None] + 1 + np.arange(count) % periods[:, None]
        following: list[list[int]] = self._tokens[places].tolist()
        return following


def _agreed(following: Sequence[Sequence[int]], least: float) -> tuple[list[int], list[float]]:
    """Return the most frequent continuation, token by token, with the share of all that go on so; the most recent one,
    which is the first, among equals."""
    tokens: list[int] = []
    shares: list[float] = []
    alive, total = list(following), len(following)
    for depth in range(len(following[0])):
        counts: dict[int, int] = {}
        for path in alive:
            counts[path[depth]] = counts.get(path[depth], 0) + 1
        token = max(counts, key=counts.__getitem__)
        if token == _SEPARATOR or counts[token] / total < least:
            break
        tokens.append(token)
        shares.append(counts[token] / total)
        alive = [path for path in alive if path[depth] == token]
    return tokens, shares


class PastOutputs:
    """The outputs of earlier requests, as one text with separators. The oldest go with their number or their tokens."""

    def __init__(self, limits: SuffixLimits) -> None:
        self._limits = limits
        self._lengths: deque[int] = deque()
        self._index = SuffixIndex(limits.max_tokens)

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, output: Sequence[int]) -> None:
        if len(output) < 3 or not self._limits.max_requests:
            return
        self._index.append(np.append(output, _SEPARATOR))
        self._lengths.append(len(output) + 1)
        if len(self._lengths) >= 2 * self._limits.max_requests:
            while len(self._lengths) > self._limits.max_requests:
                self._lengths.popleft()
            kept, text = sum(self._lengths), self._index.tokens
            self._index = SuffixIndex(self._limits.max_tokens)
            self._index.append(text[-kept:])

    def find(self, suffix: np.ndarray, num_drafts: int) -> Lookup:
        return self._index.find(suffix, self._limits, num_drafts)


class SuffixDrafts:
    """The proposer of SUFFIX: each row's text, and the outputs of rows that are over. What it proposes depends on them,
    what is emitted does not."""

    def __init__(self, limits: SuffixLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._past = PastOutputs(limits)
        self._texts: dict[int, SuffixIndex] = {}
        self._outputs: dict[int, list[int]] = {}  # of rows that have begun to decode

    def open_row(self, row: int) -> None:
        self._past.add(self._outputs.pop(row, ()))
        self._texts[row] = SuffixIndex(self._limits.max_tokens)

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._texts[row].append(tokens)
        if row in self._outputs:
            self._outputs[row] += tokens.tolist()

    def first_relay(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def look_up(self, row: int, num_drafts: int) -> Lookup:
        """Return the drafts of one row: those of its own text, or of past outputs if these promise more."""
        text = self._texts[row]
        self._outputs.setdefault(row, [])  # what comes after the first round's root is output
        suffix = text.tokens[-self._limits.max_match :]
        own = text.find(suffix, self._limits, num_drafts)
        past = self._past.find(suffix, num_drafts)
        return past if past.expected > own.expected else own

    def propose(self, request: ProposalRequest) -> Proposal:
        nodes = request.num_draft_tokens
        found = [self.look_up(row, nodes - 1) for row in request.rows.tolist()]
        return Proposal.of_paths([[each.tokens] for each in found], nodes)
