"""Everything that verify produces per draft node, in one record, so that no output can be forgotten on the way.

Tokens, logprobs, hidden states that a user asked for, routed experts, indexer top-k, recurrent state: an entry is a
name and an array whose leading axis counts nodes, bs · nd of them. Beside the entries stands what the next round
starts from. Compaction maps over all arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from ..contract.arrays import Shaped
from ..errors import InvariantViolation
from ..kv.moves import KVMovePlan
from .verify import Verified

A = TypeVar("A", bound=Shaped)


@dataclass(frozen=True, slots=True)
class NodeOutputs(Generic[A]):
    """Per-node arrays [bs · nd, …]. `entries` are what users ask for, by name. An entry may be None: then it is None
    for every row of the batch. Iteration and lookup are those of the entries."""

    entries: Mapping[str, A | None]
    next_relay: Mapping[str, A] = field(default_factory=dict)
    """By relay field: what the next round starts from if that node is the last accepted."""
    draft_hidden: A | None = None
    """The hidden states that the draft's catch-up reads."""

    def __post_init__(self) -> None:
        sizes = {name: array.shape[0] for name, array in self._arrays()}
        if len(set(sizes.values())) > 1:
            raise InvariantViolation("ACCEPT-18", f"per-node outputs have different numbers of nodes: {sizes}")
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))
        object.__setattr__(self, "next_relay", MappingProxyType(dict(self.next_relay)))

    def _arrays(self) -> Iterator[tuple[str, A]]:
        """Yield every array with what it is called in a message."""
        yield from ((name, array) for name, array in self.entries.items() if array is not None)
        yield from ((f"the relay's {name}", array) for name, array in self.next_relay.items())
        if self.draft_hidden is not None:
            yield "the draft's hidden states", self.draft_hidden

    def __getitem__(self, name: str) -> A | None:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_nodes(self) -> int | None:
        """bs · nd, or None if there is no array."""
        return next((array.shape[0] for _, array in self._arrays()), None)

    def compact(
        self: NodeOutputs[np.ndarray], accept_index: np.ndarray, num_draft_tokens: int
    ) -> NodeOutputs[np.ndarray]:
        """Move every output of the j-th accepted node of row r to r · nd + j. `accept_index` int32 [bs, width].

        The stride stays nd. Entries at or past a row's accept length are undefined. All sources are read before
        anything is written: path 0 → 2 → 3 reads entry 2 and overwrites it.
        """
        source = compaction_index(accept_index, num_draft_tokens)
        if self.num_nodes not in (None, source.size):
            message = f"{self.num_nodes} nodes in the outputs, but {accept_index.shape[0]} rows of {num_draft_tokens}"
            raise InvariantViolation("ACCEPT-18", message)
        return self.map(lambda array: array[source])

    def map(self, function: Callable[[A], A]) -> NodeOutputs[A]:
        """Apply `function` to every array, so that all outputs are compacted alike. Executors use this method to
        compact on their device, and to give the nodes of a row an axis of their own."""
        return NodeOutputs(
            {name: None if array is None else function(array) for name, array in self.entries.items()},
            {name: function(array) for name, array in self.next_relay.items()},
            None if self.draft_hidden is None else function(self.draft_hidden),
        )


def compaction_index(accept_index: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    """Return the flat node that each place reads from, int64 [bs · nd]; places without an accepted node read
    themselves.

    The width is that of `accept_index`; it may exceed nd, but no path is longer than its tree (ACCEPT-18).
    """
    batch_size, width = accept_index.shape
    source = np.arange(batch_size * num_draft_tokens, dtype=np.int64).reshape(batch_size, num_draft_tokens)
    accepted = accept_index >= 0
    own_row = accept_index // num_draft_tokens == np.arange(batch_size)[:, None]
    if (accepted & ~own_row).any():
        row = int(np.flatnonzero((accepted & ~own_row).any(axis=1))[0])
        message = f"row {row} accepts nodes {accept_index[row].tolist()}, outside its {num_draft_tokens} nodes"
        raise InvariantViolation("ACCEPT-18", message)
    if accepted[:, num_draft_tokens:].any():
        raise InvariantViolation("ACCEPT-18", f"an accepted path is longer than its tree of {num_draft_tokens} nodes")
    columns = min(width, num_draft_tokens)
    source[:, :columns] = np.where(accepted[:, :columns], accept_index[:, :columns], source[:, :columns])
    return source.reshape(-1)


# -- after verify: the accepted path becomes contiguous ---------------------------------------------------------------
#     verify batch   root  c₁  c₂  c₃          accepted path root → c₂ → c₃
#     KV slots         a    b   c   d          c → b, d → c
#     outputs        o₀   o₁  o₂  o₃          o₀ o₂ o₃ ·
#     emitted tokens  the target's token after root, after c₂, after c₃ (the bonus token)
#
# The width of everything is `accept_index.shape[1]`, never a configured number of steps or nodes.


@dataclass(frozen=True, slots=True)
class Finalized:
    """The results of a decode round for bs rows."""

    emitted_tokens: np.ndarray  # int32 [bs, width]; the target's tokens in order, bonus last, −1 past the end
    bonus_tokens: np.ndarray  # int32 [bs]; the root of the next tree
    moves: KVMovePlan  # KV of the j-th accepted node to the j-th slot of the row's window
    outputs: NodeOutputs[np.ndarray]  # stride nd; entry r · nd + j belongs to the j-th accepted node


def finalize(verified: Verified, node_slots: np.ndarray, outputs: NodeOutputs[np.ndarray]) -> Finalized:
    """Compact one verified batch. `node_slots` int32 [bs, nd] are the slots captured when the step was launched."""
    emitted = emitted_tokens(verified.predict, verified.accept_index)
    return Finalized(
        emitted_tokens=emitted,
        bonus_tokens=gather_last(emitted, verified.accept_lens),
        moves=KVMovePlan.from_accept_index(verified.accept_index, verified.accept_lens, node_slots),
        outputs=outputs.compact(verified.accept_index, node_slots.shape[1]),
    )


def emitted_tokens(predict: np.ndarray, accept_index: np.ndarray) -> np.ndarray:
    """Return the target's token after each accepted node, int32 [bs, width], −1 past the end."""
    if not accept_index.size:
        return np.zeros(accept_index.shape, np.int32)
    return np.where(accept_index >= 0, predict[np.maximum(accept_index, 0)], -1).astype(np.int32)


def gather_last(emitted: np.ndarray, accept_lens: np.ndarray) -> np.ndarray:
    """Return the last emitted token of each row, int32 [bs]: a flat gather whose stride is the width of what is read.

    A row whose target failed has −1 there; the next round gets the valid id 0 instead of a placeholder (RELAY-05).
    """
    batch_size, width = emitted.shape
    last = emitted.reshape(-1)[np.arange(batch_size) * width + accept_lens - 1]
    return np.asarray(np.maximum(last, 0))
