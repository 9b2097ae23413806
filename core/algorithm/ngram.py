"""Look-up drafting: what followed the last tokens when they occurred before, in the prompt or in the output.

The longest suffix of the history that occurred before decides; among its occurrences the most recent comes first.
(Prompt look-up decoding: Saxena 2023; Yang et al., "Inference with Reference", arXiv 2304.04487.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, Problem
from .proposer import Proposal, ProposalRequest

MAX_EXAMINED_PER_BRANCH = 32
"""Occurrences that are looked at for each branch: in repetitive text thousands of them continue alike."""

MAX_MATCH = 1024
"""The longest suffix that can be asked for."""


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """Continuations for one row, preferred first; their trie has at most num_draft_tokens − 1 nodes."""

    paths: tuple[np.ndarray, ...]  # int32 arrays, each at least one token
    match_length: int  # tokens of the longest suffix that occurred before, 0 if none is long enough


class NgramIndex:
    """The searchable history of one request. It keeps the most recent `max_tokens` tokens, at 4 bytes each.

    A search compares the last tokens with the whole history in a few vector operations; there is no table to keep
    in step with it, and memory is at most twice the window.
    """

    __slots__ = ("_buffer", "_end", "_start", "max_tokens")

    def __init__(self, max_tokens: int = 1 << 17) -> None:
        if max_tokens < 2:
            raise ConfigError("<arguments>", [Problem("max_tokens", f"{max_tokens} is less than 2")])
        self.max_tokens = max_tokens
        self._buffer = np.empty(min(64, 2 * max_tokens), np.int32)
        self._start = self._end = 0  # the history is _buffer[_start:_end]

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def tokens(self) -> np.ndarray:
        """The history, int32, oldest first; a view that the next `append` may invalidate."""
        return self._buffer[self._start : self._end]

    def append(self, tokens: np.ndarray | list[int]) -> None:
        """Add tokens (int [n], the prompt first, then what was emitted) at the end; the oldest beyond the window go."""
        tokens = np.asarray(tokens, np.int32)[-self.max_tokens :]
        if self._end + tokens.size > self._buffer.size:
            self._make_room(tokens.size)
        self._buffer[self._end : self._end + tokens.size] = tokens
        self._end += tokens.size
        self._start = max(self._start, self._end - self.max_tokens)

    def draft(
        self, num_draft_tokens: int, min_match: int = 1, max_match: int = 8, num_branches: int = 1
    ) -> LookupDraft:
        """Up to `num_branches` continuations of the history, for a tree of `num_draft_tokens` nodes, root included.

        Occurrences are ranked by the length of the match (at most `max_match`, at least `min_match`), then by recency.
        Each of them shares the budget equally; what common prefixes save extends the best ones. A
        continuation that reaches the end of the history goes on with itself: the text is then repeating.
        """
        _check_arguments(num_draft_tokens, min_match, max_match, num_branches)
        history, budget = self.tokens, num_draft_tokens - 1
        ends, lengths = _occurrences(history, min_match, max_match)
        if budget == 0 or ends.size == 0:
            return LookupDraft((), 0)
        chosen = _distinct_continuations(history, ends, budget, num_branches)
        return LookupDraft(_share_budget(chosen, budget), int(lengths[0]))

    def _make_room(self, extra: int) -> None:
        """Move the window to the front of a buffer that doubles until it is twice the window."""
        kept = self.tokens[max(0, len(self) + extra - self.max_tokens) :]
        size = self._buffer.size
        while size < min(2 * self.max_tokens, 2 * (kept.size + extra)):
            size *= 2
        size = min(size, 2 * self.max_tokens)
        buffer = self._buffer if size == self._buffer.size else np.empty(size, np.int32)
        buffer[: kept.size] = kept.copy()
        self._buffer, self._start, self._end = buffer, 0, kept.size


class NgramProposer:
    """The proposer of NGRAM: each row's history, looked up once a round."""

    def __init__(self) -> None:
        self._histories: dict[int, NgramIndex] = {}

    def open_row(self, row: int) -> None:
        self._histories[row] = NgramIndex()

    def observe(self, row: int, tokens: np.ndarray) -> None:
        self._histories[row].append(tokens)

    def first_relay(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {}

    def propose(self, request: ProposalRequest) -> Proposal:
        nodes = request.num_draft_tokens
        branches = max(1, min(request.topk, nodes - 1))
        histories = [self._histories[row] for row in request.rows.tolist()]
        return Proposal.of_paths([history.draft(nodes, num_branches=branches).paths for history in histories], nodes)


def _occurrences(history: np.ndarray, min_match: int, max_match: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the suffix occurred before: positions after the matches, best first, and the matches' lengths."""
    size = history.size
    if size < min_match + 1:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    # ends[i] is the position of the token that followed; the match itself is history[end − length : end].
    ends = np.flatnonzero(history[:-1] == history[-1]) + 1
    lengths = np.ones(ends.size, np.int64)
    alive = np.arange(ends.size)
    for length in range(2, max_match + 1):
        alive = alive[ends[alive] >= length]
        alive = alive[history[ends[alive] - length] == history[size - length]] if length <= size else alive[:0]
        if not alive.size:
            break
        lengths[alive] = length
    long_enough = lengths >= min_match
    ends, lengths = ends[long_enough], lengths[long_enough]
    # From the most recent on, a stable sort by length keeps recency among equals.
    order = ends.size - 1 - np.argsort(-lengths[::-1].astype(np.int16), kind="stable")
    return ends[order], lengths[order]


def _distinct_continuations(history: np.ndarray, ends: np.ndarray, budget: int, num_branches: int) -> list[np.ndarray]:
    """The continuations of the best occurrences that differ within an equal share of the budget."""
    share = max(1, budget // num_branches)
    chosen: list[np.ndarray] = []
    seen: set[bytes] = set()
    for end in ends[: MAX_EXAMINED_PER_BRANCH * num_branches].tolist():
        # From the end of the history on, the continuation repeats with the distance between match and suffix.
        period = history.size - end
        path = history[end : end + budget] if period >= budget else np.resize(history[end:], budget)
        key = path[:share].tobytes()
        if key not in seen:
            seen.add(key)
            chosen.append(path)
            if len(chosen) == min(num_branches, budget):
                break
    return chosen


def _share_budget(paths: list[np.ndarray], budget: int) -> tuple[np.ndarray, ...]:
    """Cut the paths so that their trie has at most `budget` nodes: an equal share first, then the best ones grow."""
    share = budget // len(paths)
    nodes: set[bytes] = set()
    cut = []
    for path in paths:
        nodes.update(path[: depth + 1].tobytes() for depth in range(share))
        cut.append(share)
    for i, path in enumerate(paths):
        while cut[i] < budget and (path[: cut[i] + 1].tobytes() in nodes or len(nodes) < budget):
            cut[i] += 1
            nodes.add(path[: cut[i]].tobytes())
    return tuple(path[:length].copy() for path, length in zip(paths, cut, strict=True))


def _check_arguments(num_draft_tokens: int, min_match: int, max_match: int, num_branches: int) -> None:
    problems = []
    if num_draft_tokens < 1:
        problems.append(Problem("num_draft_tokens", f"{num_draft_tokens} is less than 1"))
    if not 1 <= min_match <= max_match <= MAX_MATCH:
        bounds = f"1 ≤ min_match ≤ max_match ≤ {MAX_MATCH}"
        problems.append(Problem("min_match", f"expected {bounds}, not {min_match} and {max_match}"))
    if num_branches < 1:
        problems.append(Problem("num_branches", f"{num_branches} is less than 1"))
    if problems:
        raise ConfigError("<arguments>", problems)
