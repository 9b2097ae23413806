"""Pages of KV as rows of bytes, out of the pools and into them.

    row = keys [layers, page, Hk, d] · values, of the target's pool │ the same of the draft's pool, where there is one

A row's checksum is a weighted sum of its 32-bit words, Σ wᵢ · mᵢ modulo 2⁶⁴ with odd mᵢ: whichever word is changed, the
sum changes. It is the same on every device, and all pages that travel together are summed in a few operations where
they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...core.handoff import PageFormat, PageSeal
from ..batch.pools import KVPool
from ..executor.executor import TorchExecutor
from ..kernels.layers.e4m3 import as_bytes
from .link import PageParcel

_WORD_BYTES = 4
_WEIGHT_STEP = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: its multiples spread over all 64 bits
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class PageTensors:
    """The pools of one executor, page-wise. `format` must be equal on both sides of a transfer."""

    def __init__(self, executor: TorchExecutor, page_size: int) -> None:
        self._pools = [pool for pool in (executor.pool, executor.draft_pool) if pool is not None]
        self._page_size = page_size
        self._rows: Tensor | None = None  # of the parcel that was taken last
        sizes = [pool.num_bytes // pool.num_slots * page_size for pool in self._pools]
        self.format = PageFormat(
            page_size=page_size,
            target_bytes=sizes[0],
            draft_bytes=sizes[1] if len(sizes) > 1 else 0,
            hidden_size=executor.relayed.hidden_size if executor.algorithm.needs_hidden_states else 0,
            layout=" | ".join(map(_layout, self._pools)),
        )
        self._sizes = sizes
        self.row_bytes = sum(sizes)

    @property
    def device(self) -> torch.device:
        return self._pools[0].keys.device

    def send(self, peer: str, slots: np.ndarray) -> tuple[list[PageSeal], Tensor | None, int]:
        """Return the seals of the pages at `slots` int32 [n, page_size] and a copy of them for the parcel to `peer`,
        uint8 [bytes]. Pages in this process travel with their messages, so the parcel needs no number."""
        rows = self.read(slots)
        return self.seals(rows), rows.view(-1), 0

    def arrived(self, parcel: PageParcel, peer: str, num_pages: int) -> list[PageSeal]:
        """Take the pages of a parcel, and return a seal for each of `num_pages`; see `seals_of_arrived`."""
        self._rows, seals = self.seals_of_arrived(parcel.pages, num_pages)
        return seals

    def write_arrived(self, slots: np.ndarray, rows: Sequence[int]) -> None:
        """Write the pages with these numbers in the last parcel to `slots` int32 [n, page_size]."""
        assert self._rows is not None, "no pages have arrived"
        self.write(slots, self._rows[list(rows)])
        self._rows = None

    def read(self, slots: np.ndarray) -> Tensor:
        """Return the pages at `slots` int32 [n, page_size]: uint8 [n, row_bytes], a copy."""
        n = len(slots)
        places = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self.device)
        parts = []
        for pool in self._pools:
            for cells in as_bytes(pool.keys, pool.values):
                found = cells[:, places].unflatten(1, (n, self._page_size)).transpose(0, 1)
                parts.append(found.flatten(1).view(torch.uint8))
        return torch.cat(parts, dim=1)

    def write(self, slots: np.ndarray, rows: Tensor) -> None:
        """Put `rows` uint8 [n, row_bytes] to `slots` int32 [n, page_size]."""
        n, begin = len(slots), 0
        places = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self.device)
        rows = rows.to(self.device)
        for cells in (cells for pool in self._pools for cells in as_bytes(pool.keys, pool.values)):
            layers, _, heads, dim = cells.shape
            size = layers * self._page_size * heads * dim * cells.element_size()
            part = rows[:, begin : begin + size].contiguous().view(cells.dtype)
            part = part.view(n, layers, self._page_size, heads, dim).transpose(0, 1)
            cells.index_copy_(1, places, part.reshape(layers, len(places), heads, dim))
            begin += size

    def seals(self, rows: Tensor) -> list[PageSeal]:
        """Return the seal of each row, uint8 [n, row_bytes]."""
        target, draft = self._sizes[0], self.format.draft_bytes
        sums = [_checksums(rows[:, :target]), _checksums(rows[:, target:]) if draft else [0] * len(rows)]
        return [PageSeal(target, a, draft, b) for a, b in zip(*sums, strict=True)]

    def seals_of_arrived(self, content: Tensor | None, num_pages: int) -> tuple[Tensor, list[PageSeal]]:
        """Return the whole rows in `content` uint8 [bytes], and a seal for each of `num_pages`.

        The seal of a page that was cut off has the bytes that arrived, and no checksum.
        """
        if content is None:
            content = torch.empty(0, dtype=torch.uint8)
        whole = min(num_pages, len(content) // self.row_bytes)
        rows = content[: whole * self.row_bytes].view(whole, self.row_bytes)
        seals = self.seals(rows)
        left = len(content) - whole * self.row_bytes
        while len(seals) < num_pages:
            there, left = min(left, self.row_bytes), 0
            seals.append(PageSeal(min(there, self._sizes[0]), 0, max(0, there - self._sizes[0]), 0))
        return rows, seals


def _layout(pool: KVPool) -> str:
    layers, _, heads, dim = pool.keys.shape
    others = "" if pool.values.shape[-1] == dim else f" + {pool.values.shape[-1]}"
    return f"{str(pool.keys.dtype).removeprefix('torch.')} {layers} x {heads} x {dim}{others}"


def _checksums(rows: Tensor) -> list[int]:
    """Return the checksum of each row of bytes [n, size]; the last word is filled up with zeros."""
    if rows.shape[1] % _WORD_BYTES:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _WORD_BYTES))
    words = rows.contiguous().view(torch.int32)
    sums = (words.long() * _weights(words.shape[1], words.device)).sum(dim=1)
    return [value & _MASK for value in sums.tolist()]


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    weights = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_WEIGHT_STEP) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)
