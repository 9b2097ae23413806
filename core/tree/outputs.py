"""Everything that verify produces per draft node, in one mapping, so that no output can be forgotten on the way.

Tokens, logprobs, hidden states that a user asked for, routed experts, indexer top-k, recurrent state: an entry is a
name and an array whose leading axis counts nodes, bs · nd of them. Compaction maps over all entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ..errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class NodeOutputs:
    """Named per-node arrays [bs · nd, …]. An entry may be None: then it is None for every row of the batch."""

    entries: Mapping[str, np.ndarray | None]

    def __post_init__(self) -> None:
        sizes = {name: array.shape[0] for name, array in self.entries.items() if array is not None}
        if len(set(sizes.values())) > 1:
            raise InvariantViolation("ACCEPT-18", f"per-node outputs have different numbers of nodes: {sizes}")
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))

    def __getitem__(self, name: str) -> np.ndarray | None:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def num_nodes(self) -> int | None:
        """bs · nd, or None if no entry has an array."""
        return next((array.shape[0] for array in self.entries.values() if array is not None), None)

    def compact(self, accept_index: np.ndarray, num_draft_tokens: int) -> NodeOutputs:
        """Move every output of the j-th accepted node of row r to r · nd + j. `accept_index` int32 [bs, width].

        The stride stays nd. Entries at or past a row's accept length are undefined. All sources are read before
        anything is written: path 0 → 2 → 3 reads entry 2 and overwrites it.
        """
        source = compaction_index(accept_index, num_draft_tokens)
        if self.num_nodes not in (None, source.size):
            raise InvariantViolation(
                "ACCEPT-18",
                f"{self.num_nodes} nodes in the outputs, but {accept_index.shape[0]} rows of {num_draft_tokens}",
            )
        return self.map(lambda array: array[source])

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> NodeOutputs:
        """Apply `function` to every array, so that all outputs are compacted alike. Executors compact on their device by it."""
        return NodeOutputs({name: None if array is None else function(array) for name, array in self.entries.items()})


def compaction_index(accept_index: np.ndarray, num_draft_tokens: int) -> np.ndarray:
    """Return the flat node that each place reads from, int64 [bs · nd]; places without an accepted node read themselves.

    The width is that of `accept_index`; it may exceed nd, but no path is longer than its tree (ACCEPT-18).
    """
    batch_size, width = accept_index.shape
    source = np.arange(batch_size * num_draft_tokens, dtype=np.int64).reshape(batch_size, num_draft_tokens)
    accepted = accept_index >= 0
    own_row = accept_index // num_draft_tokens == np.arange(batch_size)[:, None]
    if (accepted & ~own_row).any():
        row = int(np.flatnonzero((accepted & ~own_row).any(axis=1))[0])
        raise InvariantViolation(
            "ACCEPT-18", f"row {row} accepts nodes {accept_index[row].tolist()}, outside its {num_draft_tokens} nodes"
        )
    if accepted[:, num_draft_tokens:].any():
        raise InvariantViolation("ACCEPT-18", f"an accepted path is longer than its tree of {num_draft_tokens} nodes")
    columns = min(width, num_draft_tokens)
    source[:, :columns] = np.where(accepted[:, :columns], accept_index[:, :columns], source[:, :columns])
    return source.reshape(-1)
