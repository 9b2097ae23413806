"""The books of a radix tree, recounted from its nodes alone. Each function raises InvariantViolation with the id of the
rule that is broken."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantViolation
from .allocator import KVAllocator, PageState, Slots
from .radix_node import RadixNode, nodes_below


def page_states(allocator: KVAllocator, fenced: Iterable[Slots], root: RadixNode) -> NDArray[np.uint8]:
    """Return the `PageState` of each page: `fenced` are the slots behind a fence, `root` is that of the tree."""
    states = np.full(allocator.num_pages + 1, PageState.HELD, np.uint8)
    states[0] = states[allocator.free_pages] = PageState.FREE
    for slots in fenced:
        states[slots // allocator.page_size] = PageState.FENCED
    for node in nodes_below(root):
        states[node.slots // allocator.page_size] = PageState.SHARED if node.locks else PageState.CACHED
    return states


def check_tree(root: RadixNode, page_size: int) -> tuple[int, int]:
    """Check every node. Returns the slots of nodes without a lock, and those of locked nodes."""
    if not root.alive or root.parent is not None or root.slots.size:
        raise InvariantViolation("RADIX-02", "the root is gone, or no longer the root")
    num_evictable = num_protected = 0
    for node in nodes_below(root):
        _check_node(root, node, page_size)
        if node.locks:
            num_protected += node.slots.size
        else:
            num_evictable += node.slots.size
    return num_evictable, num_protected


def _check_node(root: RadixNode, node: RadixNode, page: int) -> None:
    parent = node.parent
    if parent is None:
        raise InvariantViolation("RADIX-07", f"{node!r} has no parent")
    if node.locks < 0 or parent.locks < node.locks:
        raise InvariantViolation("RADIX-02", f"{node!r} below {parent!r}")
    if not node.alive or parent.children.get(node.child_key) is not node:
        raise InvariantViolation("RADIX-07", f"{node!r} and {parent!r} are not linked both ways")
    if node.keys.size != node.slots.size or node.keys.size == 0 or node.keys.size % page:
        raise InvariantViolation("RADIX-07", f"{node!r} has {node.keys.size} keys, in pages of {page}")
    if not _is_filed_rightly(root, node, page):
        raise InvariantViolation("RADIX-07", f"{node!r} is filed under another first page than its own")
    by_page = node.slots.reshape(-1, page)
    if (by_page[:, 0] % page).any() or (by_page - by_page[:, :1] != np.arange(page)).any() or by_page.min() < page:
        raise InvariantViolation("ALLOC-12", f"the slots of {node!r} are no whole pages, or the dummy page")


def _is_filed_rightly(root: RadixNode, node: RadixNode, page: int) -> bool:
    key, first_page = node.child_key, node.keys[:page].tobytes()
    if node.parent is root:
        return isinstance(key, tuple) and key[1] == first_page
    return key == first_page


def check_waiting(root: RadixNode, waiting: Collection[int]) -> None:
    """Check that every unlocked leaf waits for its eviction. `waiting`: the serial numbers of the nodes that do."""
    for node in nodes_below(root):
        if not node.locks and not node.children and node.serial not in waiting:
            raise InvariantViolation("RADIX-08", f"{node!r} is an unlocked leaf that would never be evicted")


def check_locks(root: RadixNode, locked: Iterable[RadixNode]) -> None:
    """Check the locks of all nodes. `locked`: the node of every lock that is held, as often as it is held."""
    expected: dict[int, int] = {}
    for handle in locked:
        node: RadixNode | None = handle
        if not handle.alive:
            raise InvariantViolation("RADIX-04", f"{handle!r} was evicted under a lock")
        while node is not None:
            expected[node.serial] = expected.get(node.serial, 0) + 1
            node = node.parent
    for node in (root, *nodes_below(root)):
        if node.locks != expected.get(node.serial, 0):
            raise InvariantViolation("RADIX-06", f"{node!r} has {expected.get(node.serial, 0)} live holders")
