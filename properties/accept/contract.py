"""The contract of acceptance and compaction: drafts become a verify tree, the target accepts a path of it, outputs and
KV follow.

A round is launched and finished later. In between, others are launched, and the shape of rounds to come may change: a
round keeps its own.

    launch(batch) -> round      drafts to a tree of nd nodes per row, node 0 the root
    tree(round)                 what the target will score
    verify_…(round, …)          which nodes are accepted, and what the target says after each
    compact(round, outputs)     outputs of the j-th accepted node to place j of its row
    move(round, pools)          KV of the j-th accepted node to slot j of its row's window

Arguments are read-only NumPy arrays, answers flat sequences of integers unless stated otherwise. bs rows of nd nodes:
flat node = row · nd + node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ..harness.contract import Capabilities, needs
from ..harness.letters import Choices

MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class AcceptConfig:
    """What `make(config)` builds: rows of requests that end at `context_len` tokens, of a vocabulary of a few ids.

    KV slots come in pages of `page_size` neighbours. `rank` is the number of one of several equal processes: no answer
    may depend on it.
    """

    vocab_size: int = 4
    page_size: int = 1
    context_len: int = 16
    num_rows: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert self.vocab_size >= 2 and self.page_size >= 1 and self.context_len >= 4 and 1 <= self.num_rows <= 4

    @classmethod
    def draw(cls, choose: Choices, has: AcceptCapabilities) -> AcceptConfig:
        """Choose a small vocabulary and a few rows."""
        return cls(
            vocab_size=choose((2, 3, 4, 5, 8, 8, 17, 17)),
            page_size=choose((1, 1, 2, 3, 4, 16)),
            context_len=choose((5, 9, 16, 24, 40)),
            num_rows=choose((1, 2, 3, 4)),
        )


@dataclass(frozen=True, slots=True)
class AcceptCapabilities(Capabilities):
    """What a component declares. Without any it verifies chains greedily."""

    trees: bool = False  # rounds with topk > 1, or with fewer nodes than their steps could fill
    raw_drafts: bool = False  # candidates may be out of the vocabulary, or repeat a sibling
    proposals: bool = False  # `propose(batch)`: trees given node by node, with fewer nodes in some rows than in others
    lookups: bool = False  # `look_up(paths, nodes)`: the tries of texts that may go on
    sampling: bool = False  # `verify_sampling(…)`
    draft_probabilities: bool = False  # `verify_drafted(…)`: chains drawn from known draft distributions
    constraints: bool = False  # `constrain(round, table, states)`: a grammar
    target_failures: bool = False  # logits and probabilities may have NaN
    outputs: bool = False  # `compact(round, outputs)`
    kv: bool = False  # `move(round, pools)`
    plan: bool = False  # `moves(round)` says what `move` copies
    # The copies of `moves` are made one after the other; without it all are read before the first is written
    in_order: bool = False
    links: bool = False  # `links(round)`: what each node sees, and where a walk goes on
    beams: bool = False  # `draft(batch, model)`: the component drafts itself, by beam search
    parameters: bool = False  # `distribution(…)`: temperature, top-k and top-p
    keyed_coins: bool = False  # `coins(…)`: coins that are functions of their keys

    FOUNDATIONS: ClassVar = {"plan": ("kv",), "in_order": ("plan",), "draft_probabilities": ("sampling",)}


class LaunchBatch(NamedTuple):
    """One round to be launched: bs rows, of which the last may be padding (windows of zeros; their answers are
    ignored).

    `launch`: n = k + (S − 1)·k² candidates per row in the order of steps. A step has k children of each of the k best
    before it. `parents` are numbers of candidates, −1 is the root. The best nd − 1 become nodes; a parent is kept with
    its child.
    `propose`: n = nd − 1 nodes as drawn. `parents` are numbers of nodes, 0 the root, −1 no node; a node below no node
    is none.
    """

    roots: np.ndarray  # int64 [bs]; the last emitted token, which has no KV yet
    seq_lens: np.ndarray  # int64 [bs]; tokens with KV: the position of the root
    max_position: int  # positions past it are clamped to it
    windows: np.ndarray  # int64 [bs, nd]; the slot that each node's KV is written to
    tokens: np.ndarray  # int64 [bs, n]
    scores: np.ndarray  # float32 [bs, n]; cumulative draft probabilities
    parents: np.ndarray  # int64 [bs, n]


class DraftModel(Protocol):
    """The suite's draft, which `draft` asks once per step."""

    def __call__(self, step: int, tokens: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best tokens after each beam node and their probabilities, best first: int64 and float32 [bs, n,
        k].

        `tokens` int [bs, n]: the beam, `sources` int [bs, n]: which node of the beam before each of them follows. In
        step 0 the beam is the roots, n = 1; later it is the k best of the step before by cumulative probability, n =
        k."""


Verdict = Sequence[Sequence[int]]
"""(accept_index [bs · width], accept_lens [bs], predict [bs · nd], bonus [bs]).

`accept_index` are the flat nodes of the accepted path, the root first, −1 past its end; the width is the round's own,
at least the length of its longest path. `accept_lens` counts the path's nodes. `predict` is the token that is emitted
after each node of the path, −1 where the target failed; off the path it may be anything. `bonus` is the last token
emitted, the root of the next round; where the target failed, any token of the vocabulary.
"""


class TreeAcceptance(Protocol):
    """Acceptance and compaction."""

    def configure(self, num_steps: int, topk: int, num_nodes: int) -> None:
        """Set the shape (S, k, nd) of rounds launched from now on; those in flight keep theirs."""

    def launch(self, batch: LaunchBatch) -> object:
        """Build the trees of a round. What is returned comes back with every later call about it."""

    def tree(self, round: object) -> Sequence[Sequence[int]]:
        """Return (tokens, parents, positions), [bs · nd] each.
        A parent is a smaller node number of the row; −1 for roots and no node."""

    def verify_greedy(self, round: object, logits: np.ndarray) -> Verdict:
        """Walk while a child is the target's choice: the lowest id of the greatest logit, float64 [bs · nd, V]."""

    @needs("proposals")
    def propose(self, batch: LaunchBatch) -> object:
        """Start a round of trees that are given node by node."""

    @needs("lookups")
    def look_up(self, paths: Sequence[Sequence[Sequence[int]]], num_nodes: int) -> Sequence[Sequence[int]]:
        """Return (tokens, parents) [bs · (nd − 1)], as `propose` takes them: per row the trie of its paths.

        Nodes are in the order of the paths. What does not fit into the tree is left out, the last paths first."""

    @needs("sampling")
    def verify_sampling(
        self, round: object, probs: np.ndarray, accept_coins: np.ndarray, bonus_coins: np.ndarray
    ) -> Verdict:
        """Accept and emit as the target would: probs float64 [bs · nd, V], coins float64 [bs, n] in [0, 1), n > S and
        >= nd: column d for depth d."""

    @needs("draft_probabilities")
    def verify_drafted(
        self,
        round: object,
        probs: np.ndarray,
        draft_probs: np.ndarray,
        accept_coins: np.ndarray,
        bonus_coins: np.ndarray,
    ) -> Verdict:
        """Do the same for a chain, each node's draft drawn from draft_probs float64 [bs · nd, V] after it.
        They may be no distribution."""

    @needs("constraints")
    def constrain(self, round: object, table: np.ndarray, states: np.ndarray) -> None:
        """Take a grammar before verifying: table int64 [states, V] has next states, −1 if forbidden;
        `states` [bs] hold after the root."""

    @needs("outputs")
    def compact(self, round: object, outputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Compact every output [bs · nd, …]: entry row · nd + j becomes that of the j-th accepted node;
        the rest is undefined."""

    @needs("kv")
    def move(self, round: object, pools: np.ndarray) -> np.ndarray:
        """Return pools int64 [m, slots] (a copy that may be written) as they are when the moves are done. m is even:
        keys of so many layers, then their values. Slot 0 is a sink."""

    @needs("plan")
    def moves(self, round: object) -> Sequence[Sequence[int]]:
        """Return (sources, targets): the slots that `move` reads and writes."""

    @needs("links")
    def links(self, round: object) -> Sequence[Sequence[int]]:
        """Return (first children [bs · nd], next siblings [bs · nd], seen [bs · nd · nd], nodes [bs]).

        Children and siblings are node numbers inside the row, −1 for none; siblings follow each other by their numbers.
        `seen` is 1 where node i attends to node j. `nodes` says how many nodes there are.
        """

    @needs("beams")
    def draft(self, batch: LaunchBatch, model: DraftModel) -> object:
        """Draft below the roots by the shape in force, and start the round of the best nodes.
        `batch` has no candidates."""

    @needs("parameters")
    def distribution(
        self, logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray
    ) -> np.ndarray:
        """Return what is sampled from, float64 [n, V], for logits float64 [n, V] and parameters [n].

        Temperature 0 is the lowest id of the greatest logit. Then the k greatest stay (0: all; among equals the lowest
        ids), then the fewest greatest whose mass reaches p (1: all). Logits with NaN or +inf, or without a finite one,
        give NaN everywhere."""

    @needs("keyed_coins")
    def coins(self, seed: int, requests: np.ndarray, seq_lens: np.ndarray, width: int) -> Sequence[np.ndarray]:
        """Return (accept, bonus) coins float64 [bs, width] in [0, 1) for requests uint64 [bs] whose roots are at
        seq_lens int64 [bs].

        Column d is position seq_len + d. A coin is a function of seed, request, position and use, and is used by no
        other."""


def capacity(num_steps: int, topk: int) -> int:
    """Return the candidates of a round: k + (S − 1)·k², none without steps."""
    return topk + (num_steps - 1) * topk * topk if num_steps else 0
