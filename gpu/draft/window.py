"""The draft's catch-up: one pass over what a round has accepted, a window of columns per row.

column      0      1      …   a − 1     a …
position    len    len+1      len+a−1            a accepted nodes; KV of columns ≥ a goes to the sink
"""

from __future__ import annotations

from torch import Tensor

from ...core.tree.build import MAX_TREE_NODES
from ..batch.pools import KVPool, PagedAttention
from ..kernels.constants import numbers
from ..kernels.rounds.build_tree import chain_links
from ..ops.port import Ops, VerifyBatch
from .port import RoundBatch


def window_slots(batch: RoundBatch, columns: int) -> Tensor:
    """Return the slots of `columns` positions from each row's length on, int64 [bs, columns]."""
    places = batch.lengths[:, None] + numbers(columns, batch.rows.device)
    width = batch.table.shape[1]
    if columns > batch.num_draft_tokens + 1:
        # Heads beyond the round's steps guess past what a row has reserved; at the end of the context that is past the table.
        places = places.clamp(max=width - 1)
    return batch.table.view(-1)[batch.rows[:, None] * width + places].long()


def window_attention(
    ops: Ops, pool: KVPool, batch: RoundBatch, columns: int, beyond: int, accept_lens: Tensor
) -> PagedAttention:
    """Return the attention of a window that keeps the KV of accepted nodes; `beyond` of its columns are more than these."""
    column = numbers(columns, batch.rows.device)
    slots = window_slots(batch, columns) * (column < accept_lens[:, None])
    positions = (batch.lengths[:, None] + column).clamp(max=batch.max_position)
    bits = chain_links(len(batch.row_numbers), columns, batch.rows.device).ancestor_bits  # a window is a chain
    window = VerifyBatch(
        batch.table,
        batch.rows,
        batch.lengths,
        batch.max_len,
        bits,
        planned_rows=batch.padded_rows,
        planned_nodes=min(batch.max_nodes + beyond, MAX_TREE_NODES),
    )
    return PagedAttention(ops, pool, window, positions.view(-1), slots.view(-1))


def at_column(values: Tensor, columns: Tensor) -> Tensor:
    """Return the values [bs, w, …] at one column per row (int [bs]) → [bs, …]."""
    rows = numbers(values.shape[0], values.device)
    return values[rows, columns]
