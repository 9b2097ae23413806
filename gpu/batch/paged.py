"""Attention over the paged pools, one class per kind of forward pass. Each writes the new KV while it rotates it.

prefill   ragged chunks: the row's prefix from the pool, the chunk's own tokens from the pass
window    nd new tokens per row under a 64-bit mask (verification, the draft's catch-up): likewise
branches  one query per draft branch; everything from the pool, through a view of shared prefix and own tail
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ops.port import KVView, Ops
from .host_keys import HostPass, view_keys, window_keys
from .pools import KVPool


@dataclass(slots=True)
class PrefillAttention:
    ops: Ops
    pool: KVPool
    table: Tensor
    rows: Tensor  # int64 [n]
    prefix_lens: Tensor  # int64 [n]
    starts: Tensor  # int64 [n + 1]: where each row's tokens begin
    positions: Tensor  # int64 [t]
    slots: Tensor  # int64 [t]
    max_prefix_len: int
    max_new_len: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        keys, values = self.pool.layers[layer]
        scale = q.shape[-1] ** -0.5
        q, k = self.ops.rope_write(q, k, v, cos_sin, self.positions, self.slots, keys, values)
        return self.ops.extend_attention(
            q,
            k,
            v,
            keys,
            values,
            self.table,
            self.rows,
            self.prefix_lens,
            self.starts,
            self.max_prefix_len,
            self.max_new_len,
            scale,
        )

    def host_pass(self) -> None:
        """Prompts have tokens enough to be torch's."""


@dataclass(slots=True)
class WindowAttention:
    ops: Ops
    pool: KVPool
    table: Tensor
    rows: Tensor  # int64 [bs]
    prefix_lens: Tensor  # int64 [bs]
    positions: Tensor  # int64 [bs · nd]
    slots: Tensor  # int64 [bs · nd]
    ancestor_bits: Tensor  # int64 [bs, nd]
    max_prefix_len: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        keys, values = self.pool.layers[layer]
        scale = q.shape[-1] ** -0.5
        q, k = self.ops.rope_write(q, k, v, cos_sin, self.positions, self.slots, keys, values)
        return self.ops.verify_attention(
            q,
            k,
            v,
            keys,
            values,
            self.table,
            self.rows,
            self.prefix_lens,
            self.max_prefix_len,
            self.ancestor_bits,
            scale,
        )

    def host_pass(self) -> HostPass | None:
        pools = self.pool.on_host if self.ops.layers_on_host else None
        if pools is None:
            return None
        keys = window_keys(self.table, self.rows, self.prefix_lens, self.positions, self.slots, self.ancestor_bits)
        return None if keys is None else HostPass(keys, pools)


@dataclass(slots=True)
class BranchAttention:
    ops: Ops
    pool: KVPool
    table: Tensor
    view: KVView
    positions: Tensor  # int64 [m]
    slots: Tensor  # int64 [m]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor) -> Tensor:
        keys, values = self.pool.layers[layer]
        scale = q.shape[-1] ** -0.5
        q, _ = self.ops.rope_write(q, k, v, cos_sin, self.positions, self.slots, keys, values)
        return self.ops.decode_attention(q, keys, values, self.table, self.view, scale)

    def host_pass(self) -> HostPass | None:
        pools = self.pool.on_host if self.ops.layers_on_host else None
        if pools is None:
            return None
        view = self.view
        keys = view_keys(self.table, view.rows, view.bases, view.lens, self.positions, self.slots)
        return None if keys is None else HostPass(keys, pools)
