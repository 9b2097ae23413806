"""KV moves after verify, and the page layout of draft branches.

Verify writes the nodes of a tree side by side. Then the accepted path is moved to the front of the row's window, so
that position seq_len + j holds the j-th accepted node. Sources and targets may be the same slots:

    nodes      0  1  2  3  4        accepted path 0 → 2 → 3
    slots      a  b  c  d  e        moves c → b, d → c: slot c is read and written

so `apply_moves` gathers every source before it writes the first target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvariantViolation

Slots = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KVMovePlan:
    """Copy pool[src[i]] to pool[dst[i]], all reads before all writes. Slot 0 is the shared sink of padding lanes.

    `src`  int32 [n]  slots to read
    `dst`  int32 [n]  slots to write, none twice except slot 0
    """

    src: Slots
    dst: Slots

    @classmethod
    def from_accept_index(cls, accept_index: Slots, accept_lens: Slots, node_slots: Slots) -> KVMovePlan:
        """Return the moves that make each accepted path contiguous at the front of its row's window.

        `accept_index` int32 [bs, width]: node r·nd + i of each accepted node, −1 past the end; `accept_lens` int32
        [bs]; `node_slots` int32 [bs, nd]: the slots captured when the step was launched, one per node. The width is
        taken from `accept_index` and nd from `node_slots`, never from a configuration. The plan leaves out lanes past a
        row's accept length, and nodes that are already in their place.

        Raises `InvariantViolation` (ACCEPT-16) if a live lane points at no node, or a path is longer than its window.
        """
        num_rows, width = accept_index.shape
        num_nodes = node_slots.shape[1]
        assert accept_lens.shape == (num_rows,), f"accept_lens is {accept_lens.shape}, expected ({num_rows},)"
        assert node_slots.shape[0] == num_rows, f"node_slots has {node_slots.shape[0]} rows, expected {num_rows}"
        live = np.arange(width) < accept_lens[:, None]
        rows, lanes = np.nonzero(live)
        nodes = accept_index[live]
        if nodes.size == 0:
            return cls(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
        if accept_lens.max() > min(width, num_nodes):
            message = f"a path of {accept_lens.max()} nodes in a window of {num_nodes} slots"
            raise InvariantViolation("ACCEPT-16", message)
        if nodes.min() < 0 or nodes.max() >= num_rows * num_nodes:
            wrong = nodes[(nodes < 0) | (nodes >= num_rows * num_nodes)][0]
            raise InvariantViolation("ACCEPT-16", f"accepted node {wrong} is outside 0..{num_rows * num_nodes - 1}")
        src = node_slots.ravel()[nodes]
        dst = node_slots[rows, lanes]
        moves = src != dst
        return cls(src[moves].astype(np.int32), dst[moves].astype(np.int32))

    def check(self, num_pool_slots: int, windows: Slots) -> None:
        """Raise `InvariantViolation` (ACCEPT-16) unless every move stays inside one row's window and inside the pool.

        `windows` int32 [bs, w]: the slots that each row owned at launch (0 where there is none). No slot but 0 may be
        written twice, a move never leaves its row, and nothing owned is overwritten from the sink.
        """
        if self.src.shape != self.dst.shape or self.src.ndim != 1:
            raise InvariantViolation("ACCEPT-16", f"{self.src.shape} sources for {self.dst.shape} targets")
        for name, slots in (("source", self.src), ("target", self.dst)):
            wrong = slots[(slots < 0) | (slots >= num_pool_slots)]
            if wrong.size:
                raise InvariantViolation("ACCEPT-16", f"{name} slot {wrong[0]} is outside the pool of {num_pool_slots}")
        written = np.sort(self.dst[self.dst != 0])
        twice = written[1:][written[1:] == written[:-1]]
        if twice.size:
            raise InvariantViolation("ACCEPT-16", f"slot {twice[0]} is written twice")
        source_rows = self._owners("source", self.src, windows)
        target_rows = self._owners("target", self.dst, windows)
        foreign = np.flatnonzero((self.dst != 0) & (source_rows != target_rows))
        if foreign.size:
            i = foreign[0]
            whose = "the sink" if source_rows[i] < 0 else f"row {source_rows[i]}"
            message = f"slot {self.src[i]} of {whose} is moved to slot {self.dst[i]} of row {target_rows[i]}"
            raise InvariantViolation("ACCEPT-16", message)

    @staticmethod
    def _owners(name: str, slots: Slots, windows: Slots) -> NDArray[np.int64]:
        """Return the row of `windows` that each slot lies in, −1 for slot 0; a slot in no window is a violation."""
        flat = windows.ravel()
        order = np.argsort(flat, kind="stable")
        place = np.searchsorted(flat, slots, sorter=order)
        inside = place < flat.size
        inside[inside] = flat[order[place[inside]]] == slots[inside]
        foreign = slots[~inside & (slots != 0)]
        if foreign.size:
            raise InvariantViolation("ACCEPT-16", f"{name} slot {foreign[0]} belongs to no row of the step")
        owners = np.full(slots.size, -1, dtype=np.int64)
        owned = slots != 0
        owners[owned] = order[place[owned]] // windows.shape[1]
        return owners


def apply_moves(pool: np.ndarray, plan: KVMovePlan) -> None:
    """Carry out `plan` on `pool` [slots, …], in place: the whole gather is a copy, made before the first write."""
    gathered = pool[plan.src]
    pool[plan.dst] = gathered


@dataclass(frozen=True, slots=True)
class DraftBranchLayout:
    """The positions at which each draft branch of each row writes its KV when branches fill pages of their own.

        page size 4, seq_len 6, 2 branches of 3 steps:   base = 4, 2 pages per branch
        position   4 5 6 7 8 9 10 11 │ 12 13 14 15 16 …
                   T T 0 0 0         │ T' T' 1  1  1          T the tail of the prefix, T' its duplicate

    `pages_per_branch`  int64 [bs]
    `branch_starts`     int64 [bs, topk]  position of each branch's first draft token; step s writes `start + s`
    `tail_rows`         int64 [m]         row in the batch of each position that has to be duplicated
    `tail_src`          int64 [m]         its position in the prefix
    `tail_dst`          int64 [m]         its position in a branch's first page
    """

    pages_per_branch: NDArray[np.int64]
    branch_starts: NDArray[np.int64]
    tail_rows: NDArray[np.int64]
    tail_src: NDArray[np.int64]
    tail_dst: NDArray[np.int64]

    def tail_moves(self, table_slots: Slots, rows: NDArray[np.int32]) -> KVMovePlan:
        """Return the duplication as slots.

        `table_slots` int32 [num_rows + 1, width]: the request table; `rows` [bs].
        """
        table_rows = rows[self.tail_rows]
        return KVMovePlan(table_slots[table_rows, self.tail_src], table_slots[table_rows, self.tail_dst])


def draft_branch_layout(seq_lens: NDArray[np.int64], page_size: int, topk: int, steps: int) -> DraftBranchLayout:
    """Lay out `topk` branches of `steps` draft tokens behind each prefix of `seq_lens` int64 [bs] tokens.

    With t = seq_len mod p: n = ⌈(t + S) / p⌉ pages per branch; branch b begins at (seq_len − t) + b·n·p + t. Branch 0
    continues in the real tail page. The other branches have a duplicate of the tail at the start of their first page.
    Verify does not use this layout: it writes from seq_len on, without a gap.
    """
    assert topk >= 1, f"topk is {topk}, expected at least 1"
    assert steps >= 0, f"steps is {steps}, expected at least 0"
    seq_lens = np.asarray(seq_lens, dtype=np.int64)
    tails = seq_lens % page_size
    pages = (tails + (steps + page_size - 1)) // page_size
    starts = seq_lens[:, None] + (pages * page_size)[:, None] * np.arange(topk, dtype=np.int64)
    # One entry for each (row, branch ≥ 1, offset in the tail); without a step no branch reads its tail.
    in_tail = np.arange(page_size) < tails[:, None]
    needed = np.broadcast_to(in_tail[:, None, :], (seq_lens.size, topk if steps else 0, page_size))[:, 1:, :]
    rows, branches, offsets = np.nonzero(needed)
    sources = (seq_lens - tails)[rows] + offsets
    targets = sources + (branches + 1) * (pages * page_size)[rows]
    return DraftBranchLayout(pages, starts, rows, sources, targets)
