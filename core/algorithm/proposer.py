"""Drafts from the host: the port through which an algorithm without a model proposes.

    open_row ─► observe (the prompt) ─► first_relay ─► observe (its first token) ─► propose ─► observe (what was
    emitted) ─► propose …

A proposal should depend only on the row's text and on the relayed values: then a seed always draws the same tokens.
(SUFFIX also looks at outputs of earlier requests, as the servers do that have it.) After a retraction, or on another
worker, an executor opens the row again and shows it its whole text at once. The device knows first which nodes were
accepted. So a proposer gives values for every node of its tree. The executor relays the values of the last accepted
node, and the next round starts from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..tree.build import trie_of_paths


@dataclass(frozen=True, slots=True)
class ProposalRequest:
    """The request of one round to a proposer, for bs rows."""

    rows: np.ndarray  # int64 [bs]; each has observed its text up to the root, the last emitted token
    steps: int  # draft depth that the controller chose; a tree's size is its only hard limit
    topk: int  # branching
    num_draft_tokens: int  # nd, root included; 1 where nothing is drafted
    relayed: Mapping[str, np.ndarray]  # [bs, *shape_suffix] of every field of the algorithm's own


@dataclass(frozen=True, slots=True)
class Proposal:
    """Trees below bs roots: draft j is node j + 1.
    A parent comes before its children; where there is no draft it is −1."""

    tokens: np.ndarray  # int [bs, nd − 1]
    parents: np.ndarray  # int [bs, nd − 1]; 0 is the root
    # [bs, nd, *shape_suffix] per field of the algorithm's own: what the next round starts from if that node is the last
    # accepted.
    next_relay: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[Sequence[int] | np.ndarray]], num_draft_tokens: int) -> Proposal:
        """Make the tries of `paths[row]`, continuations of the root, the preferred one first;
        for algorithms without relay fields."""
        return cls(*trie_of_paths(paths, num_draft_tokens))


class Proposer(Protocol):
    """Proposes for the rows of one executor. Row numbers are used again: `open_row` forgets what was in the row."""

    def open_row(self, row: int) -> None:
        """Begin an empty text in `row`, which a request takes."""

    def observe(self, row: int, tokens: np.ndarray) -> None:
        """Continue the text of `row` with `tokens` int64 [n]; how it is cut into calls must not matter."""

    def first_relay(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the values that the first round of `rows` int64 [n] starts from: [n, *shape_suffix] per field of its
        own. Their prompts were observed."""
        ...

    def propose(self, request: ProposalRequest) -> Proposal: ...
