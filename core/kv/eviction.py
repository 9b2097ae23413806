"""The order in which the prefix cache evicts: policies by name, and a lazy heap of unlocked leaves.

An entry of the heap may be out of date: its node may have a greater priority by now, never a smaller one. The heap
corrects an entry when it reaches the top. So a match costs nothing here, and an eviction never scans the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sized
from typing import Generic, Protocol, TypeVar

from ..errors import InvariantViolation, Problem, nearest

Priority = tuple[int, ...]


class Evictable(Protocol):
    """A node of the cache, as a policy sees it. All numbers are logical; no clock is read.

    `last_access`  when a match or an insertion last passed through the node
    `created`      when it was inserted
    `released`     when its last lock was taken back, or when it was inserted
    `num_hits`     matches that passed through it
    `serial`       unique, ascending in the order of creation
    """

    last_access: int
    created: int
    released: int
    num_hits: int
    serial: int
    locks: int

    @property
    def children(self) -> Sized: ...

    in_heap: bool
    alive: bool


NodeT = TypeVar("NodeT", bound=Evictable)

EVICTION_POLICIES: dict[str, Callable[[Evictable], Priority]] = {
    "lru": lambda node: (node.last_access,),
    "fifo": lambda node: (node.created,),
    "lfu": lambda node: (node.num_hits, node.last_access),
    "release": lambda node: (node.released,),
}


def unknown_policy(policy: str) -> Problem | None:
    """Return the problem with the name of a policy, or None."""
    if policy in EVICTION_POLICIES:
        return None
    known = ", ".join(EVICTION_POLICIES)
    hint = nearest(policy, EVICTION_POLICIES)
    return Problem("policy", f"unknown eviction policy {policy!r}, expected one of {known}{hint}")


class EvictionQueue(Generic[NodeT]):
    """The leaves that may be evicted, least priority first. A node has at most one entry (`node.in_heap`)."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._priority = EVICTION_POLICIES[policy]
        self._heap: list[tuple[Priority, int, NodeT]] = []

    def offer(self, node: NodeT) -> None:
        """Add `node` to the heap if it is an unlocked leaf that is not in it yet."""
        if not node.locks and not node.children and not node.in_heap:
            heapq.heappush(self._heap, (self._priority(node), node.serial, node))
            node.in_heap = True

    def pop(self) -> NodeT | None:
        """Remove and return the unlocked leaf that is evicted first, or None if there is none."""
        while self._heap:
            priority, serial, node = heapq.heappop(self._heap)
            if node.locks or node.children:
                node.in_heap = False  # The node is offered again when its last lock or child is removed.
            elif priority != (current := self._priority(node)):
                heapq.heappush(self._heap, (current, serial, node))
            else:
                node.in_heap = False
                return node
        return None

    def check(self) -> frozenset[int]:
        """Raise `InvariantViolation` (RADIX-08) for an entry that should not be; return the serials that wait."""
        serials = []
        for priority, serial, node in self._heap:
            if not node.in_heap or not node.alive:
                raise InvariantViolation("RADIX-08", f"{node!r} waits for eviction after its end")
            if priority > self._priority(node):
                raise InvariantViolation("RADIX-08", f"the {self.policy} priority of {node!r} has fallen")
            serials.append(serial)
        waiting = frozenset(serials)
        if len(waiting) != len(serials):
            raise InvariantViolation("RADIX-08", "a node waits for its eviction twice")
        return waiting
