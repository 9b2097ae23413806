"""KV moves: the accepted path to the front of its window, and a beam's KV behind its new parents (`core.kv.moves`).

Sources and targets overlap (path 0 → 2 → 3 reads slot 2 and writes it), so every source is read before the first write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import numbers


def move_accepted_torch_(
    k_pools: Tensor, v_pools: Tensor, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor
) -> None:
    columns = min(accept_index.shape[1], node_slots.shape[1])
    targets = node_slots[:, :columns]
    live = numbers(columns, node_slots.device) < accept_lens.unsqueeze(1)
    # A lane past the end copies its slot onto itself: nobody else writes there.
    sources = node_slots.take(accept_index[:, :columns].clamp(min=0).long()) if node_slots.numel() else targets
    sources = torch.where(live, sources, targets)
    move_slots_torch_(k_pools, v_pools, sources.view(-1), targets.reshape(-1))


def move_slots_torch_(k_pools: Tensor, v_pools: Tensor, sources: Tensor, targets: Tensor) -> None:
    k_pools.index_copy_(1, targets, k_pools.index_select(1, sources))
    v_pools.index_copy_(1, targets, v_pools.index_select(1, sources))


def move_bytes(num_slots: int, num_layers: int, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    """K and V of every moved slot, read and written."""
    return 4 * num_slots * num_layers * num_kv_heads * head_dim * element_size
