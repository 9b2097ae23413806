"""The prefill part of a step on the device: ragged prompt chunks, row after row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.contract.step import PrefillStep
from ..ops.port import ExtendBatch, Ops
from .pools import KVPool, PagedAttention
from .uploads import upload, uploads_to


@dataclass(frozen=True, slots=True)
class Chunks:
    """n chunks with t tokens. `extended` lays the same chunks out with room for tokens that were not there at planning."""

    part: PrefillStep
    table: Tensor  # int32 [num_rows + 1, row width]
    lens: np.ndarray  # int64 [n]
    ends: np.ndarray  # int64 [n]: where each chunk's tokens end among the t
    last: np.ndarray  # int64 [m]: the chunks that end their prompts
    rows: Tensor  # int64 [n]
    prefix_lens: Tensor  # int64 [n]
    starts: Tensor  # int64 [n + 1]
    positions: Tensor  # int64 [t]
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
        slots = table.view(-1)[on_device.pop("cells")].long()
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
        return PagedAttention(ops, pool, batch, self.positions, self.slots)

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
        """Return the token after each of the chunks' tokens, int64 [t]; 0 where it is still to be sampled. For chunks as planned."""
        shifted = np.append(self.part.tokens[1:], 0)
        shifted[self.ends - 1] = np.maximum(self.part.tail_tokens, 0)
        return shifted
