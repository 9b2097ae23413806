"""What is true of requests, their KV and their rounds, token by token, and the moment that the checkers look at.

code    one number for (owner, position, token, all tokens before it); what stands in a slot of layer 0. Layer l has
        code + l.
table   row -> the slots of its positions, in pages that lie in no order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...core.draws import Purpose, hash64
from ..harness.text import listed
from .contract import MAX_NODES, AcceptCapabilities, AcceptConfig, LaunchBatch
from .expected import PathDrafter, RecordedCoins
from .inputs import frozen

LAYERS = 4  # keys and values of two layers
_MASK = (1 << 62) - 1
_STEP = 0x9E3779B97F4A7C15
_PLACE = 0x2545F4914F6CDD1D


def after(prefix: int, token: int) -> int:
    """Return the hash of a prefix and one more token."""
    return ((prefix ^ (token & 0xFFFFFFFF)) * _STEP + 1) & _MASK


def code_of(prefix: int, position: int) -> int:
    """Return what stands in the slot of a token, `prefix` being the hash up to and including it;
    a multiple of LAYERS."""
    return ((prefix ^ (position + 1) * _PLACE) * _STEP & _MASK) // LAYERS * LAYERS


@lru_cache(maxsize=4096)
def depths_of(parents: tuple[int, ...]) -> list[int] | None:
    """Return how far below the root each node is, -1 for no node;
    None unless parents are earlier nodes, and −1 for the root."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return None
        depths.append((max(depths[parent], 0) + 1 if parent >= 0 else -1) if node else 0)
    return depths


@dataclass(slots=True)
class RowRequest:
    """A request in a row: `codes[i]` is what must stand at position i;
    `root` is its last token, which has no KV yet."""

    prefix: int  # hash of the tokens with KV
    root: int
    codes: list[int] = field(default_factory=list)

    def commit(self, token: int) -> None:
        self.prefix = after(self.prefix, token)
        self.codes.append(code_of(self.prefix, len(self.codes)))


@dataclass(slots=True)
class LaunchedRound:
    """A launched round: everything as it was when it was launched.
    The first `len(rows)` rows are live, the others padding."""

    shape: tuple[int, int, int]
    is_proposed: bool
    rows: tuple[int, ...]
    garbage: str
    batch: LaunchBatch
    handle: object
    nodes: int
    tokens: list[list[int]]  # [bs][nd], as the component says
    parents: list[list[int]]
    positions: list[list[int]]
    depths: list[list[int]]  # -1 for no node
    table: np.ndarray | None = None  # the grammar, if there is one
    states: list[list[int]] | None = None  # [bs][nd]; the grammar's state after each node, −1 past a forbidden token

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def deepest(self) -> int:
        """Nodes on the longest path of the live rows."""
        return 1 + max((max(depths) for depths in self.depths[: len(self.rows)]), default=0)

    @property
    def num_coins(self) -> int:
        """Coins per row: at least one for each depth that any tree of the shape has."""
        return max(self.nodes, self.shape[0] + 1)

    def children(self, row: int, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents[row]) if parent == node]

    def tree(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and parents, int64 [bs, nd]."""
        shape = (self.num_rows, self.nodes)
        return np.array(self.tokens, np.int64).reshape(shape), np.array(self.parents, np.int64).reshape(shape)

    def rows_of(self, flat: np.ndarray) -> list[list[Any]]:
        """Return [bs · nd] values as [bs][nd]."""
        return flat.reshape(self.num_rows, self.nodes).tolist()

    def constrain(self, table: np.ndarray, states: np.ndarray) -> None:
        """Follow a grammar from the rows' states through the trees."""
        self.table, self.states = table, []
        rows, vocab = table.tolist(), range(table.shape[1])
        for row, start in enumerate(states.tolist()):
            found = [start] + [-1] * (self.nodes - 1)
            for node, parent in enumerate(self.parents[row]):
                token = self.tokens[row][node]
                if parent >= 0 and found[parent] >= 0 and token in vocab:
                    found[node] = rows[found[parent]][token]
            self.states.append(found)

    def allowed(self) -> np.ndarray | None:
        """Return bool [bs · nd, V]: what the grammar allows after each node, everything after a dead one;
        None without a grammar."""
        if self.states is None:
            return None
        states = np.array(self.states, np.int64).reshape(-1)
        return (self.table[np.maximum(states, 0)] >= 0) | (states < 0)[:, None]


class Walk(NamedTuple):
    """A row's accepted path, and the token that is emitted after each of its nodes."""

    number: int  # in the batch
    path: list[int]
    emitted: list[int]


@dataclass(slots=True)
class AcceptAnswer:
    """A verdict, and the KV and outputs behind it."""

    accept_index: tuple[int, ...]
    accept_lens: tuple[int, ...]
    predict: tuple[int, ...]
    bonus: tuple[int, ...]
    width: int = 0
    is_formed: bool = False  # lengths fit each other; if not, nothing else of it is looked at
    walks: list[Walk] = field(default_factory=list)  # of the rows that accept a path from the root, padding included
    before: np.ndarray | None = None  # pools int64 [layers, slots] before the moves
    after: np.ndarray | None = None
    moves: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (sources, targets)
    given: dict[str, np.ndarray] = field(default_factory=dict)  # outputs before compaction
    compacted: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, round: LaunchedRound) -> AcceptAnswer:
        """Split the flat sequences by their own width; find the rows whose nodes are a path."""
        rows, nodes, lens = round.num_rows, round.nodes, self.accept_lens
        flat = len(self.accept_index)
        fits = len(lens) == len(self.bonus) == rows and len(self.predict) == rows * nodes
        self.is_formed = fits and (flat % rows == 0 if rows else not flat)
        if not self.is_formed:
            return self
        self.width = flat // rows if rows else 0
        for number, (length, links) in enumerate(zip(lens, round.parents, strict=True)):
            path = [node - number * nodes for node in self.lanes(number)[: max(length, 0)]]
            is_linked = all(0 < node < nodes and links[node] == above for above, node in pairwise(path))
            if path and len(path) == length and path[0] == 0 and is_linked:
                emitted = [self.predict[number * nodes + node] for node in path]
                self.walks.append(Walk(number, path, emitted))
        return self

    def lanes(self, number: int) -> tuple[int, ...]:
        """Return a row's part of `accept_index`."""
        return self.accept_index[number * self.width : (number + 1) * self.width]


@dataclass(frozen=True, slots=True)
class Shares:
    """What many rows emitted, as (share, probability): each token in first place, each accepted child with an accepted
    grandchild.

    A share may be off by the tolerance, which is known beforehand: the rows' coins lie on a grid.
    """

    first: dict[int, tuple[float, float]]
    second: dict[tuple[int, int], tuple[float, float]]
    impossible: tuple[int, int] | None  # (row, token) of something emitted that has probability 0


def shares_of(
    answer: AcceptAnswer, weights: np.ndarray, tokens: list[int], parents: list[int], probs: np.ndarray
) -> Shares:
    """Add up what the rows emit, each with its weight.
    `tokens` and `parents` of one row, `probs` float64 [nd, V] of its nodes."""
    first, second = Counter(), Counter()
    impossible = None
    for (row, path, emitted), weight in zip(answer.walks, weights.tolist(), strict=True):
        first[emitted[0]] += weight
        if len(emitted) > 2:
            second[emitted[0], emitted[1]] += weight
        for node, token in zip(path, emitted, strict=True):
            if not (0 <= token < probs.shape[1] and probs[node, token] > 0):
                impossible = impossible or (row, token)
    should = {token: float(mass) for token, mass in enumerate(probs[0])}
    should_second: dict[tuple[int, int], float] = {}
    for node, parent in enumerate(parents):
        if parent > 0 and parents[parent] == 0:
            pair = (tokens[parent], tokens[node])
            should_second[pair] = float(probs[0, pair[0]] * probs[parent, pair[1]])
    return Shares(
        {token: (first[token], should.get(token, 0.0)) for token in sorted({*first, *should})},
        {pair: (second[pair], should_second.get(pair, 0.0)) for pair in sorted({*second, *should_second})},
        impossible,
    )


@dataclass(slots=True)
class AcceptMoment:
    """One operation, the round that it was about, and what the component answered."""

    config: AcceptConfig
    capabilities: AcceptCapabilities
    model: AcceptModel
    operation: object = "make"
    round: LaunchedRound | None = None
    answer: AcceptAnswer | None = None
    wanted: list[list[int]] | None = None  # [bs][nd]; the target's own choice, −1 where it has none; greedy rounds only
    probs: np.ndarray | None = None  # float64 [bs · nd, V]; sampled rounds only
    failing: list[list[bool]] | None = None  # [bs][nd]; whether the target gives no numbers
    shares: Shares | None = None
    wrong_kv: tuple[int, int, int] | None = None  # (row, position, layer)
    links: tuple[tuple[int, ...], ...] | None = None  # what the component says of a round's nodes
    drafted: tuple[int, int, int] | None = None  # the shape of a round that the component drafted itself
    drafter: PathDrafter | None = None  # the draft model that it asked
    parameters: list[tuple[float, int, float]] | None = None  # per row: temperature, top-k, top-p
    filtered: tuple[np.ndarray, np.ndarray] | None = None  # logits, and the probabilities that they became
    coins: RecordedCoins | None = None

    def live(self) -> range:
        """Return the numbers of the round's live rows, none if the answer is unusable."""
        return range(len(self.round.rows) if self.answer is not None and self.answer.is_formed else 0)

    def walks(self) -> list[Walk]:
        """Return the live rows that accept a path."""
        live = self.live()
        return [walk for walk in self.answer.walks if walk.number in live] if live else []

    def fails(self, walk: Walk) -> bool:
        """Return whether the path ends where the target gave no numbers."""
        return self.failing is not None and self.failing[walk.number][walk.path[-1]]


class AcceptModel:
    """Rows of requests over a pool of slots."""

    def __init__(self, config: AcceptConfig) -> None:
        self.config = config
        size = config.page_size
        pages = -(-(config.context_len + MAX_NODES) // size)
        total = config.num_rows * pages
        order = np.argsort(hash64(3, Purpose.SWARM, 2, np.arange(total)), kind="stable") + 1
        slots = (order[:, None] * size + np.arange(size)).reshape(config.num_rows, pages * size)
        self.table = slots.astype(np.int64)
        self.num_slots = (total + 1) * size
        self.pools = np.stack([-LAYERS * np.arange(1, self.num_slots + 1) - layer for layer in range(LAYERS)])
        self.num_owners = 0
        self.requests: list[RowRequest] = []
        for row in range(config.num_rows):
            self.replace(row, 1 + row)

    def replace(self, row: int, num_tokens: int) -> None:
        """Put another request into a row, its prompt computed."""
        self.num_owners += 1
        owner = self.num_owners
        request = RowRequest(owner * _PLACE & _MASK, owner % self.config.vocab_size)
        for position in range(num_tokens):
            request.commit((owner + position) % self.config.vocab_size)
        self.requests[row : row + 1] = [request]  # the first one of the last row is appended
        self._write(self.table[row, :num_tokens], request.codes)

    def _write(self, slots: np.ndarray, codes: Sequence[int]) -> None:
        for layer in range(LAYERS):
            self.pools[layer, slots] = np.array(codes, np.int64) + layer

    def seq_len(self, row: int) -> int:
        return len(self.requests[row].codes)

    def window(self, row: int, nodes: int) -> np.ndarray:
        """Return the slots that the next round's nodes are written to."""
        start = self.seq_len(row)
        return self.table[row, start : start + nodes]

    def batch(self, rows: Sequence[int], num_rows: int, nodes: int, drafts: Sequence[np.ndarray]) -> LaunchBatch:
        """Return what a round of these rows is launched with, and of rows of padding up to `num_rows`."""
        roots, seq_lens = np.zeros(num_rows, np.int64), np.ones(num_rows, np.int64)
        windows = np.zeros((num_rows, nodes), np.int64)
        for number, row in enumerate(rows):
            roots[number], seq_lens[number] = self.requests[row].root, self.seq_len(row)
            windows[number] = self.window(row, nodes)
        held = map(frozen, (roots, seq_lens))
        return LaunchBatch(*held, self.config.context_len - 1, frozen(windows), *drafts)

    def write_nodes(self, round: LaunchedRound) -> None:
        """Write the KV of a round's nodes, each at the position that the component gave it, as the target does."""
        for number, row in enumerate(round.rows):
            prefixes: list[int] = []
            for node, parent in enumerate(round.parents[number]):
                before = prefixes[parent] if parent >= 0 else self.requests[row].prefix
                prefixes.append(after(before, round.tokens[number][node]))
            codes = [code_of(p, at) for p, at in zip(prefixes, round.positions[number], strict=True)]
            self._write(round.batch.windows[number], codes)

    def commit(self, m: AcceptMoment) -> list[int]:
        """Make final what was accepted, up to the end of the context. Returns the rows whose requests end: there, or
        without an answer that can be followed."""
        ended = list(m.round.rows)
        for walk in m.walks():
            row, bonus = m.round.rows[walk.number], m.answer.bonus[walk.number]
            if not 0 <= bonus < self.config.vocab_size or m.fails(walk):
                continue
            request = self.requests[row]
            for node in walk.path[: self.config.context_len - len(request.codes)]:
                request.commit(m.round.tokens[walk.number][node])
            request.root = bonus
            if len(request.codes) < self.config.context_len - 1:
                ended.remove(row)
        return ended

    def first_wrong(self) -> tuple[int, int, int] | None:
        """Return (row, position, layer) of the first slot that does not hold its position's token; None if all do."""
        for row, request in enumerate(self.requests):
            expected = np.array(request.codes, np.int64) + np.arange(LAYERS)[:, None]
            wrong = self.pools[:, self.table[row, : len(request.codes)]] != expected
            if wrong.any():
                layer, position = np.argwhere(wrong)[0].tolist()
                return row, position, layer
        return None


def verdict_in_words(m: AcceptMoment, number: int) -> str:
    """Return what the verdict says of a row of the round, for a history."""
    answer, round = m.answer, m.round
    text = f"row {round.rows[number]}: accepts the flat nodes {listed(answer.lanes(number))}"
    for walk in answer.walks:
        if walk.number == number:
            text = f"row {round.rows[number]}: path {listed(walk.path)} emits {listed(walk.emitted)}"
    if answer.moves is not None:
        window = set(round.batch.windows[number].tolist())
        pairs = [f"{source} to {target}" for source, target in zip(*answer.moves, strict=True) if target in window]
        text += f", moves {', '.join(pairs[:9]) or 'nothing'}"
    return text
