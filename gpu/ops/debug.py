"""Debug mode: check every index tensor that moves, writes or reads KV or relay cells before the device uses it.

The checks wait for the device, so a checked executor neither overlaps nor captures graphs. A wrong index raises
`InvariantViolation` with the id under which the reference executor reports the same defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ...core.errors import InvariantViolation
from ...core.kv.moves import KVMovePlan, draft_branch_layout
from ...core.tree.outputs import compaction_index
from ..types.attention import PLAIN, UNSCALED, KVScales, Softmax
from ..types.ops import DecodeBatch, ExtendBatch, KVTensors, Ops, VerifyBatch


class CheckedOps:
    """`ops` behind checks; pools of `num_slots` slots with the sink, or rings of `ring_slots`; a request table of
    `num_rows` rows behind row 0."""

    def __init__(self, ops: Ops, num_slots: int, num_rows: int, ring_slots: int = 0) -> None:
        self._ops = ops
        self._known_slots = (num_slots, ring_slots) if ring_slots else (num_slots,)
        self._num_rows = num_rows

    def __getattr__(self, name: str) -> Any:
        """Pass other operations through: they touch neither KV nor relay cells."""
        return getattr(self._ops, name)

    # -- the forward pass -----------------------------------------------------------------------------------------

    def rope_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVTensors,
        scales: KVScales = UNSCALED,
    ) -> tuple[Tensor, Tensor, Tensor]:
        end = self._pools(kv, slot_axis=0)
        places, written = _column(positions), _column(slots)
        _in_range("STEPS-01", "position", places, len(cos_sin))
        _in_range("ALLOC-11", "written slot", written, end)
        _no_slot_twice("ALLOC-06", written)
        return self._ops.rope_write(q, k, v, cos_sin, positions, slots, kv, scales)

    def decode_attention(self, q: Tensor, kv: KVTensors, batch: DecodeBatch, softmax: Softmax = PLAIN) -> Tensor:
        end = self._pools(kv, slot_axis=0)
        bases, tails, lens = _column(batch.bases), _column(batch.tails), _column(batch.lens)
        order = np.arange(int(lens.max(initial=0)))
        columns = np.where(order < bases[:, None], order, order + (tails - bases)[:, None])
        self._reads(end, batch.table, _column(batch.rows), columns, lens, batch.max_len)
        return self._ops.decode_attention(q, kv, batch, softmax)

    def verify_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: VerifyBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        end = self._pools(kv, slot_axis=0)
        self._prefixes(end, batch)
        nodes = batch.ancestor_bits.shape[1]
        # All 64 bits name a node of a tree of 64; a shift by 64 is none.
        if nodes < 64 and (_host(batch.ancestor_bits).view(np.uint64) >> np.uint64(nodes)).any():
            raise InvariantViolation("ACCEPT-01", f"a node attends to a node past the {nodes} of its tree")
        return self._ops.verify_attention(q, k, v, kv, batch, softmax)

    def extend_attention(
        self, q: Tensor, k: Tensor, v: Tensor, kv: KVTensors, batch: ExtendBatch, softmax: Softmax = PLAIN
    ) -> Tensor:
        end = self._pools(kv, slot_axis=0)
        self._prefixes(end, batch)
        edges, most = _column(batch.starts), batch.max_new_len
        counts = np.diff(edges)
        if edges[0] != 0 or edges[-1] > len(q) or ((counts < 0) | (counts > most)).any():
            message = f"chunks that start at {edges.tolist()} in {len(q)} tokens, at most {most} each"
            raise InvariantViolation("ENGINE-14", message)
        return self._ops.extend_attention(q, k, v, kv, batch, softmax)

    # -- after verification ---------------------------------------------------------------------------------------

    def compact(self, values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
        source = compaction_index(_host(accept_index), num_draft_tokens)  # it raises ACCEPT-18
        if len(source) != len(values):
            raise InvariantViolation("ACCEPT-18", f"{len(values)} nodes in an output, but {len(source)} in the batch")
        return self._ops.compact(values, accept_index, num_draft_tokens)

    def move_accepted_(self, kv: KVTensors, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
        end = self._pools(kv, slot_axis=1)
        windows, path, lens = _host(node_slots), _host(accept_index), _host(accept_lens)
        _in_range("ACCEPT-16", "slot of a window", windows, end)
        _no_slot_twice("ACCEPT-16", windows)
        plan = KVMovePlan.from_accept_index(path, lens, windows)
        plan.check(end, windows)
        self._ops.move_accepted_(kv, node_slots, accept_index, accept_lens)

    def move_slots_(self, kv: KVTensors, sources: Tensor, targets: Tensor) -> None:
        end = self._pools(kv, slot_axis=1)
        self._moves(end, _column(sources), _column(targets))
        self._ops.move_slots_(kv, sources, targets)

    def duplicate_tails_(
        self, kv: KVTensors, table: Tensor, rows: Tensor, seq_lens: Tensor, page_size: int, topk: int, steps: int
    ) -> None:
        end = self._pools(kv, slot_axis=1)
        batch, slots = _host(rows), self._table(end, table)
        _in_range("ALLOC-07", "row", batch, self._num_rows + 1)
        layout = draft_branch_layout(_host(seq_lens), page_size, topk, steps)
        _in_range("ACCEPT-16", "column of a draft branch", layout.tail_dst, slots.shape[1])
        plan = layout.tail_moves(slots, batch)
        self._moves(end, plan.src, plan.dst)
        self._ops.duplicate_tails_(kv, table, rows, seq_lens, page_size, topk, steps)

    # -- the relay ------------------------------------------------------------------------------------------------

    def relay_gather(self, buffers: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        for buffer in buffers:
            self._cells(buffer, _host(rows))
        return self._ops.relay_gather(buffers, rows)

    def relay_scatter_(self, buffers: Sequence[Tensor], rows: Tensor, values: Sequence[Tensor]) -> None:
        cells = _host(rows)
        if (twice := _repeated(cells)) is not None:
            raise InvariantViolation("RELAY-02", f"row {twice} is written twice in one call")
        for buffer, stored in zip(buffers, values, strict=True):
            self._cells(buffer, cells)
            if stored.shape != (len(cells), *buffer.shape[1:]):
                raise InvariantViolation("RELAY-03", f"values {list(stored.shape)} for {len(cells)} cells")
        self._ops.relay_scatter_(buffers, rows, values)

    # -- what the checks share ------------------------------------------------------------------------------------

    def _pools(self, kv: KVTensors, slot_axis: int) -> int:
        """Return the number of slots of a pool that is one of the executor's."""
        k, v = kv
        if k.shape[slot_axis] not in self._known_slots or v.shape[:-1] != k.shape[:-1]:
            expected = " or ".join(map(str, self._known_slots))
            message = f"pools {list(k.shape)} and {list(v.shape)}, expected {expected} slots in both"
            raise InvariantViolation("ALLOC-11", message)
        return k.shape[slot_axis]

    def _table(self, end: int, table: Tensor) -> np.ndarray:
        slots = _host(table)
        if len(slots) != self._num_rows + 1:
            raise InvariantViolation("ALLOC-07", f"a request table of {len(slots)} rows, not {self._num_rows + 1}")
        _in_range("ALLOC-11", "slot of the request table", slots, end)
        if slots[0].any():
            raise InvariantViolation("ALLOC-12", f"the padding row has slot {slots[0].max()}")
        return slots

    def _prefixes(self, end: int, batch: VerifyBatch | ExtendBatch) -> None:
        lens = _column(batch.prefix_lens)
        longest = int(lens.max(initial=0))
        columns = np.broadcast_to(np.arange(longest), (len(lens), longest))
        self._reads(end, batch.table, _column(batch.rows), columns, lens, batch.max_prefix_len)

    def _reads(
        self, end: int, table: Tensor, rows: np.ndarray, columns: np.ndarray, lens: np.ndarray, max_len: int
    ) -> None:
        """Check reads: query i reads its first lens[i] `columns` [m, …] of the table's row rows[i]."""
        slots = self._table(end, table)
        _in_range("ALLOC-07", "row", rows, len(slots))
        _in_range("ALLOC-07", "length", lens, max_len + 1)
        live = np.arange(columns.shape[1]) < lens[:, None]
        _in_range("ALLOC-07", "column", columns[live], slots.shape[1])
        queries, places = np.nonzero(live & (rows != 0)[:, None])
        sunk = slots[rows[queries], columns[queries, places]] == 0
        if sunk.any():
            i = int(sunk.argmax())
            message = f"row {rows[queries[i]]} reads the sink at column {columns[queries[i], places[i]]}"
            raise InvariantViolation("ALLOC-12", message)

    def _moves(self, end: int, sources: np.ndarray, targets: np.ndarray) -> None:
        if sources.shape != targets.shape:
            raise InvariantViolation("ACCEPT-16", f"{sources.shape} sources for {targets.shape} targets")
        _in_range("ACCEPT-16", "source slot", sources, end)
        _in_range("ACCEPT-16", "target slot", targets, end)
        _no_slot_twice("ACCEPT-16", targets)
        sunk = (sources == 0) & (targets != 0)
        if sunk.any():
            raise InvariantViolation("ACCEPT-16", f"slot {targets[sunk.argmax()]} is overwritten from the sink")

    def _cells(self, buffer: Tensor, rows: np.ndarray) -> None:
        if len(buffer) != self._num_rows + 1:
            raise InvariantViolation("RELAY-03", f"a relay buffer of {len(buffer)} rows, not {self._num_rows + 1}")
        _in_range("RELAY-03", "relay row", rows, self._num_rows + 1)


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _column(tensor: Tensor) -> np.ndarray:
    """Return a column of a batch, which kernels read as numbers one behind the other."""
    if not tensor.is_contiguous():
        message = f"a column {list(tensor.shape)} with stride {list(tensor.stride())}: a kernel would read other memory"
        raise InvariantViolation("ALLOC-07", message)
    return _host(tensor)


def _in_range(invariant: str, what: str, numbers: np.ndarray, end: int) -> None:
    wrong = (numbers < 0) | (numbers >= end)
    if wrong.any():
        raise InvariantViolation(invariant, f"{what} {numbers[wrong].flat[0]} is outside 0 … {end - 1}")


def _repeated(numbers: np.ndarray) -> int | None:
    """Return a number other than 0 that occurs twice, or None."""
    ordered = np.sort(numbers[numbers != 0])
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if again.size else None


def _no_slot_twice(invariant: str, slots: np.ndarray) -> None:
    if (twice := _repeated(slots)) is not None:
        raise InvariantViolation(invariant, f"slot {twice} is written twice")
