"""Verify trees and their verification as device tensors; the fields and meanings of `core.tree`, on torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """The trees of one verify batch, bs rows of nd nodes. A padding node has parent −1 and nothing points to it."""

    tokens: Tensor  # int64 [bs, nd]; column 0 is the root
    parents: Tensor  # int32 [bs, nd]; node number inside the row, −1 for the root and for padding
    positions: Tensor  # int64 [bs, nd]; seq_len + depth, clamped to the last position of the context
    depths: Tensor  # int64 [bs, nd]
    next_token: Tensor  # int32 [bs, nd]; first child, −1 if none
    next_sibling: Tensor  # int32 [bs, nd]; −1 if none
    ancestor_bits: Tensor  # int64 [bs, nd]; bit j: node j is the node itself or one of its ancestors
    width: int  # nodes on the longest possible path, root included: the columns of accept_index
    # [bs, nd, …] by relay field: what the next round starts from if that node is the last accepted (drafts from the host).
    next_relay: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_nodes(self) -> int:
        """nd, root included."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class DeviceVerified:
    """What verification decides for bs rows."""

    accept_index: Tensor  # int32 [bs, width]; flat index of each accepted node, root first, −1 past the end
    accept_lens: Tensor  # int32 [bs]; accepted nodes = emitted tokens, bonus included: 1 … width
    predict: Tensor  # int64 [bs · nd]; the target's token after each node, −1 where the target failed
    failed: Tensor  # bool [bs]; the target gave no distribution on the accepted path
