"""The nodes of a radix tree (radix.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Slots = NDArray[np.int32]
ChildKey = bytes | tuple[str, bytes]
"""The first page of a node's keys; below the root with the namespace before it."""


class RadixNode:
    """A run of keys on the way from the root; callers hold it as a handle and pass it to `lock` and `unlock`.

    Its fields belong to the cache. `eviction.Evictable` says what they mean to an eviction policy.
    """

    __slots__ = (
        "alive",
        "child_key",
        "children",
        "created",
        "in_heap",
        "keys",
        "last_access",
        "locks",
        "num_hits",
        "parent",
        "released",
        "serial",
        "slots",
        "units",
    )

    def __init__(self, keys: Keys, slots: Slots, parent: RadixNode | None, child_key: ChildKey, serial: int) -> None:
        self.keys: Keys = keys
        self.slots: Slots = slots
        self.units: list[Keys] = []  # tags of the units of its pages, for each group of layers (held_groups.py)
        self.parent: RadixNode | None = parent
        self.child_key: ChildKey = child_key
        self.serial: int = serial
        self.children: dict[ChildKey, RadixNode] = {}
        self.locks: int = 0
        self.last_access: int = 0
        self.created: int = 0
        self.released: int = 0
        self.num_hits: int = 0
        self.in_heap: bool = False
        self.alive: bool = True

    def __repr__(self) -> str:
        return f"RadixNode(serial={self.serial}, slots={self.slots.size}, locks={self.locks}, alive={self.alive})"


def nodes_below(root: RadixNode) -> Iterator[RadixNode]:
    """Yield every node but the root, parents first, in order of insertion."""
    waiting = list(reversed(root.children.values()))
    while waiting:
        node = waiting.pop()
        yield node
        if node.children:
            waiting.extend(reversed(node.children.values()))


def num_locked_by(handles: Iterable[RadixNode]) -> int:
    """Return how many slots would have no lock without those of these handles, each named once for each lock."""
    locks: dict[int, tuple[RadixNode, int]] = {}  # by node: itself, and how many of the locks cover it
    for handle in handles:
        node: RadixNode | None = handle
        while node is not None:
            locks[node.serial] = (node, locks.get(node.serial, (node, 0))[1] + 1)
            node = node.parent
    return sum(node.slots.size for node, count in locks.values() if count == node.locks)


def joined_slots(nodes: list[RadixNode]) -> Slots:
    """Return the slots of nodes, one after the other, int32."""
    return np.concatenate([node.slots for node in nodes]) if nodes else np.empty(0, dtype=np.int32)
