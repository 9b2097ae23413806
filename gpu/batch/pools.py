"""KV pools on a device: keys and values of every layer, addressed by the engine's slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...core.contract.step import PrefillStep
from ...core.scheduler.config import EngineConfig, EngineSizes
from ..models.config import ModelConfig
from ..types.attention import PLAIN, UNSCALED, KVScales, KVShape, Softmax
from ..types.ops import AttentionBatch, DecodeBatch, ExtendBatch, KVTensors, Ops, VerifyBatch
from ..types.recurrence import PassStates, RecurrentWeights, StateShape
from .states import ChunkStates, StatePool
from .uploads import upload, uploads_to
from .zeros import zeros


@dataclass(frozen=True, slots=True)
class Rings:
    """Where the KV of windowed layers lies if it is not paged: each request-table row has a ring of `length` slots of
    its own, in which a token at column c has slot c mod `length`. What has left the window is overwritten.

    `length` is at least the window and the most tokens that one pass writes into a row, less one.
    """

    layers: tuple[int, ...]  # in the order of the pool
    length: int
    num_rows: int
    row_width: int

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig, sizes: EngineSizes) -> Rings | None:
        """Return the rings of a model's windowed layers in an engine; None if it has none, or no others."""
        layers = tuple(place for place, layer in enumerate(model.attention_layers) if layer in model.windowed_layers)
        if not layers or len(layers) == len(model.attention_layers):
            return None
        most = max(engine.chunk_size, sizes.alloc_len)
        return cls(layers, model.window - 1 + most, engine.max_running, sizes.row_width)

    @property
    def num_slots(self) -> int:
        return 1 + self.num_rows * self.length

    def table(self, device: torch.device) -> Tensor:
        """Return the slot of every cell of the request table, int32 [num_rows + 1, row width]; 0 in row 0."""
        columns = torch.arange(self.row_width, dtype=torch.int32, device=device) % self.length
        firsts = 1 + torch.arange(-1, self.num_rows, dtype=torch.int32, device=device) * self.length
        table = firsts.unsqueeze(1) + columns
        table[0] = 0
        return table


class KVPool:
    """Keys and values of one model, [layers, slots, Hk, d] each. Slot 0 (page 0) is the sink that padding writes to.

    If layers keep different shapes of a token, rows of [layers, slots, 1, width] hold the widest. `states`: of the
    model's recurrent layers, if it has some. `rings`: of windowed layers that are not paged, if there are some; their
    slots are those of `ring_table`, int32 [num_rows + 1, row width]. `scales`: of each layer, for a dtype of 8-bit
    numbers, which hold keys and values divided by them.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
        rings: Rings | None = None,
        scales: Sequence[KVScales] = (),
    ) -> None:
        self.scales: tuple[KVScales, ...] = tuple(scales) or (UNSCALED,) * len(shapes)
        self.states: StatePool | None = states
        self.rings: Rings | None = rings
        ringed = () if rings is None else rings.layers
        paged = tuple(layer for layer in range(len(shapes)) if layer not in ringed)
        self.all_layers: KVTensors
        self.keys: Tensor
        self.values: Tensor
        self.all_layers, views = _zeros([shapes[layer] for layer in paged], num_slots, dtype, device)
        self.keys, self.values = self.all_layers
        found = dict(zip(paged, views, strict=True))
        self.all_ringed: KVTensors | None = None
        if rings is not None:
            self.all_ringed, views = _zeros([shapes[layer] for layer in ringed], rings.num_slots, dtype, device)
            self.ring_table: Tensor = rings.table(device)
            found |= zip(ringed, views, strict=True)
        self.layers: tuple[KVTensors, ...] = tuple(found[layer] for layer in range(len(shapes)))

    @cached_property
    def on_host(self) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
        """The layers' memory as arrays; None on a GPU, and for dtypes that NumPy lacks."""
        if self.keys.device.type != "cpu" or self.keys.dtype not in (torch.float32, torch.float64):
            return None
        if self.rings is not None:
            return None
        return tuple((keys.numpy(), values.numpy()) for keys, values in self.layers)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        of_rings = 0 if self.all_ringed is None else sum(tensor.nbytes for tensor in self.all_ringed)
        of_states = 0 if self.states is None else self.states.num_bytes
        return self.keys.nbytes + self.values.nbytes + of_rings + of_states

    def ring_slots(self, cells: Tensor) -> Tensor:
        """Return the slots that cells of the request table have in the rings, int64 of the same shape."""
        return self.ring_table.view(-1)[cells].long()


def _zeros(
    shapes: Sequence[KVShape], num_slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVTensors, list[KVTensors]]:
    """Return keys and values of layers, and each layer's view of its own."""
    widest = widest_of(shapes)
    cells = (len(shapes), num_slots, widest.heads)
    keys, values = (zeros((*cells, size), dtype, device) for size in (widest.key_dim, widest.value_dim))
    # Indexing a tensor costs as much as a small kernel, so each layer's view is made once.
    views = [
        KVTensors(*_cells_of(shape, widest, own_keys, own_values))
        for shape, own_keys, own_values in zip(shapes, keys, values, strict=True)
    ]
    return KVTensors(keys, values), views


def widest_of(shapes: Sequence[KVShape]) -> KVShape:
    """Return the shape of a pool's cells that has room for each of `shapes`, which is theirs if they are all one."""
    if len(set(shapes)) == 1:
        return shapes[0]
    keys, values = (max(shape.heads * dim for shape, dim in dims) for dims in zip(*map(_dims, shapes), strict=True))
    return KVShape(1, keys, values)


def _dims(shape: KVShape) -> tuple[tuple[KVShape, int], tuple[KVShape, int]]:
    return (shape, shape.key_dim), (shape, shape.value_dim)


def _cells_of(shape: KVShape, widest: KVShape, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's view of its cells [slots, …]: keys [slots, Hk, d] and values [slots, Hk, d]."""
    if shape == widest:
        return keys, values
    dims = (keys, shape.key_dim), (values, shape.value_dim)
    first, second = (cells[:, 0, : shape.heads * dim].unflatten(1, (shape.heads, dim)) for cells, dim in dims)
    return first, second


def bytes_per_slot(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
    """Return bytes that one token's keys and values take."""
    return len(shapes) * widest_of(shapes).elements * dtype.itemsize


@dataclass(slots=True)
class PagedAttention:
    """Writes the KV of n new tokens while it rotates them, then attends. For a pool with rings `cells` int64 [n] are
    the tokens' cells of the request table."""

    ops: Ops
    pool: KVPool
    batch: AttentionBatch
    positions: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]
    states: PassStates | None = None  # of a model with recurrent layers
    cells: Tensor | None = None
    _in_rings: tuple[AttentionBatch, Tensor] | None = field(default=None, init=False)

    @property
    def in_round(self) -> bool:
        return not isinstance(self.batch, ExtendBatch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """See `Attention`."""
        ops, batch, slots, kv = self.ops, self.batch, self.slots, self.pool.layers[layer]
        if (rings := self.pool.rings) is not None and layer in rings.layers:
            batch, slots = self._ringed()
        q = softmax.scaled(q, self.positions)
        scales = self.pool.scales[layer]
        q, k, v = ops.rope_write(q, k, v, cos_sin, self.positions, slots, kv, scales)
        softmax = softmax.over(scales, q)
        if isinstance(batch, DecodeBatch):
            return ops.decode_attention(q, kv, batch, softmax)
        if isinstance(batch, VerifyBatch):
            return ops.verify_attention(q, k, v, kv, batch, softmax)
        return ops.extend_attention(q, k, v, kv, batch, softmax)

    def keep(self, layer: int, k: Tensor, v: Tensor, cos_sin: Tensor) -> None:
        """Write the KV of the pass's tokens, k and v [n, Hk, d] not rotated yet, without attention to it."""
        pool = self.pool
        assert pool.rings is None, "a draft's KV lies in pages"
        self.ops.rope_write(k[:, :1], k, v, cos_sin, self.positions, self.slots, pool.layers[layer], pool.scales[layer])

    def _ringed(self) -> tuple[AttentionBatch, Tensor]:
        """Return the batch and the slots of layers in rings."""
        if self._in_rings is None:
            assert self.cells is not None, "a pass over a pool with rings knows its cells"
            batch = replace(self.batch, table=self.pool.ring_table)
            self._in_rings = batch, self.pool.ring_slots(self.cells)
        return self._in_rings

    def recur(self, layer: int, projected: Tensor, weights: RecurrentWeights, shape: StateShape) -> Tensor:
        """See `Attention`."""
        assert self.states is not None, "the pass of a model with recurrent layers has their states"
        return self.ops.recur(self.states, layer, projected, weights, shape)


@dataclass(frozen=True, slots=True)
class Chunks:
    """n chunks with t tokens. `extended` lays the same chunks out with room for tokens that were not
    there at planning."""

    part: PrefillStep
    table: Tensor  # int32 [num_rows + 1, row width]
    lens: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]: where each chunk's tokens end among the t
    last: np.ndarray  # int64 [m]: the chunks that end their prompts
    rows: Tensor  # int64 [n]
    prefix_lens: Tensor  # int64 [n]
    starts: Tensor  # int64 [n + 1]
    positions: Tensor  # int64 [t]
    cells: Tensor  # int64 [t]: of the request table
    slots: Tensor  # int64 [t]; 0 for tokens past the chunk
    max_prefix_len: int
    max_new_len: int
    max_position: int

    @classmethod
    def lay_out(cls, part: PrefillStep, table: Tensor, max_position: int, extra: int = 0) -> Chunks:
        """Lay out the chunks as planned, and behind each last one `extra` tokens whose KV is not kept."""
        device = table.device
        lens = part.lens + extra * part.is_last
        ends = np.cumsum(lens)
        offsets = np.arange(ends[-1]) - np.repeat(ends - lens, lens)
        positions = np.repeat(part.starts, lens) + offsets
        # Tokens whose KV is not kept may lie past the row's end.
        columns = np.minimum(positions, table.shape[1] - 1)
        arrays = {
            "rows": part.rows.astype(np.int64),
            "prefix_lens": part.starts,
            "starts": np.concatenate([[0], ends]),
            "positions": np.minimum(positions, max_position),
            "cells": np.repeat(part.rows.astype(np.int64), lens) * table.shape[1] + columns,
        }
        if extra:
            arrays["kept"] = offsets < np.repeat(part.lens, lens)
        on_device = dict(zip(arrays, uploads_to(device).send(*arrays.values()), strict=True))
        slots = table.view(-1)[on_device["cells"]].long()
        if extra:
            slots = slots * on_device.pop("kept")
        return cls(
            part=part,
            table=table,
            lens=lens,
            ends=ends,
            last=np.flatnonzero(part.is_last),
            slots=slots,
            max_prefix_len=int(part.starts.max()),
            max_new_len=int(lens.max()),
            max_position=max_position,
            **on_device,
        )

    def extended(self, extra: int) -> Chunks:
        return Chunks.lay_out(self.part, self.table, self.max_position, extra)

    def attention(self, ops: Ops, pool: KVPool) -> PagedAttention:
        """Return the attention of a pass over these tokens, with the KV in `pool`."""
        batch = ExtendBatch(self.table, self.rows, self.prefix_lens, self.starts, self.max_prefix_len, self.max_new_len)
        states = None
        if pool.states is not None:
            kept = upload(self.table.device, self.part.lens.astype(np.int64))
            states = ChunkStates(pool.states, self.rows, self.prefix_lens, self.starts, kept, self.max_new_len)
        return PagedAttention(ops, pool, batch, self.positions, self.slots, states, self.cells)

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    def last_places(self) -> Tensor:
        """Return where each prompt's last token stands among the t: int64 [m] on the device."""
        return upload(self.table.device, self.ends[self.last] - 1)

    def any_token(self, flags: Tensor) -> Tensor:
        """Return whether any of a chunk's tokens has its flag, bool [t] → [n]."""
        before = torch.cat([flags.new_zeros(1, dtype=torch.int64), flags.cumsum(0)])[self.starts]
        return before.diff() > 0

    def shifted_tokens(self) -> np.ndarray:
        """Return the token after each of the chunks' tokens, int64 [t]; 0 where it is still to be sampled.
        For chunks as planned."""
        assert self.part.tokens is not None, "an executor with tokens gets them"
        shifted: np.ndarray = np.append(self.part.tokens[1:], 0)
        shifted[self.ends - 1] = np.maximum(self.part.tail_tokens, 0)
        return shifted
