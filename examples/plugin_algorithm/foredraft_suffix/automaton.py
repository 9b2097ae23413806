"""The suffix automaton of a growing text. It also counts how often each token followed each context.

A state stands for all substrings that end at the same places of the text; `length` is the length of the longest one.
The suffix link of a state leads to the state of its longest suffix that also ends elsewhere. So the link of the whole
text's state leads to the longest suffix that occurred before. The transitions out of that state are the tokens that
followed it.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985: at most 2n states, built online in
time linear in n. As a draft for language models: Hu et al., arXiv 2411.10666, and Oliaro et al., arXiv 2411.04975.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = 0  # the state of the empty string
NOWHERE = -1

COUNTED_CONTEXTS = 8
"""The number of contexts, longest first, that count an appended token. To count it in all contexts would be slow."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts by score, highest first, each after its parent. Entry j is node j + 1; node 0 is the end of the text."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    is_leaf: list[bool]  # of every node, the root included


class SuffixAutomaton:
    """The automaton of at least the last `window` tokens. At twice as many it is rebuilt from the last `window`."""

    def __init__(self, window: int = 8192) -> None:
        assert window >= 1
        self.window = window
        self._clear()

    def _clear(self) -> None:
        self.text: list[int] = []
        self._length = [0]
        self._link = [NOWHERE]
        self._next: list[dict[int, int]] = [{}]
        self._repeats: list[dict[int, int]] = [{}]  # how often a token followed, without the first time
        self._last = ROOT

    @property
    def num_states(self) -> int:
        return len(self._length)

    @property
    def match_length(self) -> int:
        """The length of the longest suffix of the text that occurred before."""
        return self._length[self._context]

    @property
    def _context(self) -> int:
        """The state of the longest suffix that occurred before."""
        return max(self._link[self._last], ROOT)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)
            if len(self.text) >= 2 * self.window:
                kept = self.text[-self.window :]
                self._clear()
                for old in kept:
                    self._append(old)

    def _append(self, token: int) -> None:
        self._count(token)
        self.text.append(token)
        state = self._add_state(self._length[self._last] + 1, {}, {})
        before = self._last
        while before != NOWHERE and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        self._link[state] = ROOT if before == NOWHERE else self._longest_suffix(before, token)
        self._last = state

    def _count(self, token: int) -> None:
        context = self._context
        for _ in range(COUNTED_CONTEXTS):
            if context <= ROOT:
                break
            if token in self._next[context]:
                repeats = self._repeats[context]
                repeats[token] = repeats.get(token, 0) + 1
            context = self._link[context]

    def _longest_suffix(self, before: int, token: int) -> int:
        """Return the state of (longest string of `before`) + `token`.

        If that string belongs to a state of longer strings, split it off into a state of its own.
        """
        found = self._next[before][token]
        if self._length[found] == self._length[before] + 1:
            return found
        clone = self._add_state(self._length[before] + 1, dict(self._next[found]), dict(self._repeats[found]))
        self._link[clone] = self._link[found]
        self._link[found] = clone
        while before != NOWHERE and self._next[before].get(token) == found:
            self._next[before][token] = clone
            before = self._link[before]
        return clone

    def _add_state(self, length: int, transitions: dict[int, int], repeats: dict[int, int]) -> int:
        self._length.append(length)
        self._link.append(ROOT)
        self._next.append(transitions)
        self._repeats.append(repeats)
        return len(self._length) - 1

    # -- drafting -------------------------------------------------------------------------------------------------

    def followers(self, state: int) -> list[tuple[int, int, int]]:
        """Return (count, token, state) of each token that followed `state`, highest count first, then newest first."""
        repeats = self._repeats[state]
        newest_first = reversed(self._next[state].items())
        found = [(1 + repeats.get(token, 0), token, target) for token, target in newest_first]
        return sorted(found, key=lambda follower: -follower[0])

    def draft(self, num_drafts: int, branches: int, trust: float, min_match: int = 1) -> DraftTree:
        """Return the `num_drafts` best continuations of the longest suffix that occurred before.

        Each node has at most `branches` children. A node's score is its parent's score, times the share of its token
        among the followers, times `trust`: trees grow deep with high trust and wide with low trust. If a context has no
        follower because the text ended with it, its longest repeated suffix replaces it.
        """
        tree = DraftTree([], [], [], [True])
        if self.match_length < max(min_match, 1):
            return tree
        waiting: list[tuple[float, int, int, int, int, int]] = []  # (−score, tie breaker, token, state, parent, depth)
        number = self._offer(waiting, 0, self._context, 1.0, trust, branches, 0, 1)
        while waiting and len(tree.tokens) < num_drafts:
            minus_score, _, token, state, parent, depth = heapq.heappop(waiting)
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.depths.append(depth)
            tree.is_leaf.append(True)
            tree.is_leaf[parent] = False
            number = self._offer(waiting, number, state, -minus_score, trust, branches, len(tree.tokens), depth + 1)
        return tree

    def _offer(
        self,
        waiting: list[tuple[float, int, int, int, int, int]],
        number: int,
        state: int,
        score: float,
        trust: float,
        branches: int,
        parent: int,
        depth: int,
    ) -> int:
        """Add the followers of `state` to `waiting`; return the next tie breaker."""
        while state > ROOT and not self._next[state]:
            state = self._link[state]
        if state <= ROOT:
            return number
        followers = self.followers(state)
        total = sum(count for count, _, _ in followers)
        for count, token, target in followers[:branches]:
            heapq.heappush(waiting, (-score * trust * count / total, number, token, target, parent, depth))
            number += 1
        return number
