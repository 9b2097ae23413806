"""Compaction: every per-node output of the j-th accepted node goes to place j of its row (`core.tree.outputs`)."""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import node_numbers


def compact_torch(values: Tensor, accept_index: Tensor, num_draft_tokens: int) -> Tensor:
    return values.index_select(0, compaction_index(accept_index, num_draft_tokens))


def compaction_index(accept_index: Tensor, num_draft_tokens: int) -> Tensor:
    """The flat node that each place reads from, int32 [bs · nd]; places without an accepted node read themselves."""
    batch_size, width = accept_index.shape
    columns = min(width, num_draft_tokens)
    own = node_numbers(batch_size, num_draft_tokens, num_draft_tokens, accept_index.device, accept_index.dtype)
    accepted = accept_index[:, :columns]
    source = torch.where(accepted >= 0, accepted, own[:, :columns])
    if columns < num_draft_tokens:
        source = torch.cat((source, own[:, columns:]), 1)
    return source.view(-1)


def compact_bytes(num_nodes: int, bytes_per_node: int, batch_size: int, width: int) -> int:
    """Every node's output in and out, and accept_index."""
    return 2 * num_nodes * bytes_per_node + batch_size * width * 4
