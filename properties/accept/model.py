"""What is true of requests, their KV and their rounds, kept plainly: token by token.

code    one number for (owner, position, token, all tokens before it); what stands in a slot of layer 0. Layer l has code + l.
table   row -> the slots of its positions, in pages that lie in no order
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...core.draws import Purpose, hash64
from .contract import MAX_NODES, AcceptConfig, Batch

LAYERS = 4  # keys and values of two layers
_MASK = (1 << 62) - 1
_STEP = 0x9E3779B97F4A7C15
_PLACE = 0x2545F4914F6CDD1D


def after(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token."""
    return ((prefix ^ (token & 0xFFFFFFFF)) * _STEP + 1) & _MASK


def code_of(prefix: int, position: int) -> int:
    """What stands in the slot of a token, `prefix` being the hash up to and including it; a multiple of LAYERS."""
    return ((prefix ^ (position + 1) * _PLACE) * _STEP & _MASK) // LAYERS * LAYERS


@dataclass(slots=True)
class Request:
    """A request in a row: `codes[i]` is what must stand at position i; `root` is its last token, which has no KV yet."""

    prefix: int  # hash of the tokens with KV
    root: int
    codes: list[int] = field(default_factory=list)

    def commit(self, token: int) -> None:
        self.prefix = after(self.prefix, token)
        self.codes.append(code_of(self.prefix, len(self.codes)))


@dataclass(slots=True)
class Round:
    """A launched round: everything as it was when it was launched. The first `len(rows)` rows are live, the others padding."""

    name: str
    shape: tuple[int, int, int]
    is_proposed: bool
    rows: tuple[int, ...]
    garbage: str
    batch: Batch
    handle: object
    nodes: int
    tokens: list[list[int]]  # [bs][nd], as the component says
    parents: list[list[int]]
    positions: list[list[int]]
    depths: list[list[int]]
    present: list[list[bool]]  # whether a node is one
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

    def constrain(self, table: np.ndarray, states: np.ndarray) -> None:
        self.table = table
        rows = table.tolist()
        vocab = range(table.shape[1])
        self.states = []
        for row, start in enumerate(states.tolist()):
            found = [start] + [-1] * (self.nodes - 1)
            for node, parent in enumerate(self.parents[row]):
                token = self.tokens[row][node]
                if parent >= 0 and found[parent] >= 0 and token in vocab:
                    found[node] = rows[found[parent]][token]
            self.states.append(found)

    def allowed(self) -> np.ndarray | None:
        """bool [bs · nd, V]: what the grammar allows after each node, everything after a dead one; None without a grammar."""
        if self.states is None:
            return None
        states = np.array(self.states, np.int64).reshape(-1)
        return (self.table[np.maximum(states, 0)] >= 0) | (states < 0)[:, None]


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
        self.requests: list[Request] = [None] * config.num_rows  # type: ignore[list-item]
        for row in range(config.num_rows):
            self.replace(row, 1 + row)

    def replace(self, row: int, num_tokens: int) -> None:
        """Another request in a row, its prompt computed."""
        self.num_owners += 1
        owner = self.num_owners
        request = Request(owner * _PLACE & _MASK, owner % self.config.vocab_size)
        for position in range(num_tokens):
            request.commit((owner + position) % self.config.vocab_size)
        self.requests[row] = request
        for layer in range(LAYERS):
            self.pools[layer, self.table[row, :num_tokens]] = np.array(request.codes, np.int64) + layer

    def seq_len(self, row: int) -> int:
        return len(self.requests[row].codes)

    def window(self, row: int, nodes: int) -> np.ndarray:
        start = self.seq_len(row)
        return self.table[row, start : start + nodes]

    def write_nodes(self, round: Round) -> None:
        """The target has computed a round: every node's KV stands in its slot, at the position that the component gave it."""
        for number, row in enumerate(round.rows):
            prefixes: list[int] = []
            for node, parent in enumerate(round.parents[number]):
                before = prefixes[parent] if parent >= 0 else self.requests[row].prefix
                prefixes.append(after(before, round.tokens[number][node]))
            codes = [code_of(p, at) for p, at in zip(prefixes, round.positions[number], strict=True)]
            for layer in range(LAYERS):
                self.pools[layer, round.batch.windows[number]] = np.array(codes, np.int64) + layer

    def first_wrong(self) -> tuple[int, int, int] | None:
        """(row, position, layer) of the first slot that does not hold its position's token; None if all do."""
        for row, request in enumerate(self.requests):
            expected = np.array(request.codes, np.int64) + np.arange(LAYERS)[:, None]
            wrong = self.pools[:, self.table[row, : len(request.codes)]] != expected
            if wrong.any():
                layer, position = np.argwhere(wrong)[0].tolist()
                return row, position, layer
        return None
