"""Look-up drafting: what followed the last tokens when they occurred before, in the prompt or in the output.

The longest suffix of the history that occurred before decides; among its occurrences the most recent comes first.
(Prompt look-up decoding: Saxena 2023; Yang et al., "Inference with Reference", arXiv 2304.04487.)
"""

from __future__ import annotations

import numpy as np

from .proposer import Proposal, ProposalRequest

MAX_EXAMINED_PER_BRANCH = 32
"""The number of occurrences to examine for each branch; in repetitive text thousands of them continue alike."""

MAX_MATCH = 8
"""The length of the longest suffix to look for, in tokens."""


class NgramIndex:
    """The searchable history of one request. It keeps the most recent `max_tokens` tokens, at 4 bytes each.

    A search compares the last tokens with the whole history in a few vector operations; there is no table to keep
    in step with it, and memory is at most twice the window.
    """

    def __init__(self, max_tokens: int = 1 << 17) -> None:
        assert max_tokens >= 2, f"max_tokens is {max_tokens}, expected at least 2"
        self.max_tokens = max_tokens
        self._buffer = np.empty(min(64, 2 * max_tokens), np.int32)
        self._start = self._end = 0  # the history is _buffer[_start:_end]

    def __len__(self) -> int:
        return self._end - self._start

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

    def draft(self, num_draft_tokens: int, num_branches: int = 1) -> tuple[np.ndarray, ...]:
        """Return up to `num_branches` continuations of the history, the preferred one first: int32 arrays of at least
        one token.

        Their trie has at most `num_draft_tokens` − 1 nodes. Occurrences are ranked by the length of the match, then by
        recency. They share the nodes equally. Nodes that common prefixes save extend the best continuations. If a
        continuation reaches the end of the history, it repeats itself, because the text is repeating there.
        """
        assert num_draft_tokens >= 1 and num_branches >= 1, f"{num_draft_tokens} nodes in {num_branches} branches"
        history, budget = self.tokens, num_draft_tokens - 1
        ends = _occurrences(history)
        if budget == 0 or ends.size == 0:
            return ()
        return _share_budget(_distinct_continuations(history, ends, budget, num_branches), budget)

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
        return Proposal.of_paths([history.draft(nodes, branches) for history in histories], nodes)


def _occurrences(history: np.ndarray) -> np.ndarray:
    """Return where the suffix occurred before, int64: the positions after the matches, the longest match first."""
    size = history.size
    if size < 2:
        return np.zeros(0, np.int64)
    # ends[i] is the position of the token that followed; the match itself is history[end − length : end].
    ends = np.flatnonzero(history[:-1] == history[-1]) + 1
    lengths = np.ones(ends.size, np.int64)
    alive = np.arange(ends.size)
    for length in range(2, MAX_MATCH + 1):
        alive = alive[ends[alive] >= length]
        alive = alive[history[ends[alive] - length] == history[size - length]] if length <= size else alive[:0]
        if not alive.size:
            break
        lengths[alive] = length
    # From the most recent on, a stable sort by length keeps recency among equals.
    order = ends.size - 1 - np.argsort(-lengths[::-1].astype(np.int16), kind="stable")
    return ends[order]


def _distinct_continuations(history: np.ndarray, ends: np.ndarray, budget: int, num_branches: int) -> list[np.ndarray]:
    """Return the continuations of the best occurrences that differ within an equal share of the budget."""
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
