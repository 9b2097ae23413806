"""Random batches for the forward pass's kernels: pages in a random order, ragged rows, trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..types.attention import Softmax
from ..types.ops import DecodeBatch, ExtendBatch, KVTensors, VerifyBatch

MAX_POSITIONS = 512


@dataclass
class PagedBatch:
    """Pools with pages handed to rows 1 … bs in a random order; row 0 and page 0 are padding."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    rows: Tensor
    prefix_lens: Tensor
    starts: Tensor  # of the new tokens

    @property
    def max_prefix_len(self) -> int:
        return int(self.prefix_lens.max()) if self.prefix_lens.numel() else 0

    @property
    def max_new_len(self) -> int:
        return int(self.starts.diff().max()) if self.starts.numel() > 1 else 0

    @property
    def kv(self) -> KVTensors:
        return KVTensors(self.k_pool, self.v_pool)

    def tree(self, bits: Tensor, max_prefix_len: int | None = None) -> VerifyBatch:
        """Return the rows with these masks; the bound is the longest prefix if it is not given."""
        bound = self.max_prefix_len if max_prefix_len is None else max_prefix_len
        return VerifyBatch(self.table, self.rows, self.prefix_lens, bound, bits)

    def chunks(self, max_prefix_len: int | None = None, max_new_len: int | None = None) -> ExtendBatch:
        """Return the rows as a prefill; bounds that are not given are exact."""
        prefix = self.max_prefix_len if max_prefix_len is None else max_prefix_len
        new = self.max_new_len if max_new_len is None else max_new_len
        return ExtendBatch(self.table, self.rows, self.prefix_lens, self.starts, prefix, new)


def make_batch(
    seed: int,
    prefix_lens: list[int],
    new_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    d: int = 16,
    page: int = 4,
    dtype: torch.dtype = torch.float64,
) -> PagedBatch:
    generator = torch.Generator().manual_seed(seed)
    bs = len(prefix_lens)
    pages_each = [-(-(prefix + new) // page) for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    width = max([*pages_each, 1]) * page
    order = torch.randperm(sum(pages_each), generator=generator) + 1
    num_slots = (sum(pages_each) + 1) * page
    table = torch.zeros(bs + 1, width, dtype=torch.int32)
    row_order = (torch.randperm(bs, generator=generator) + 1).tolist()
    for i, pages in enumerate(torch.split(order, pages_each) if bs else ()):
        slots = (pages.unsqueeze(1) * page + torch.arange(page)).flatten()
        table[row_order[i], : len(slots)] = slots.int()
    n = sum(new_lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return PagedBatch(
        q=normal(n, heads, d),
        k=normal(n, kv_heads, d),
        v=normal(n, kv_heads, d),
        k_pool=normal(num_slots, kv_heads, d),
        v_pool=normal(num_slots, kv_heads, d),
        table=table,
        rows=torch.tensor(row_order, dtype=torch.int64),
        prefix_lens=torch.tensor(prefix_lens, dtype=torch.int64),
        starts=torch.tensor([0, *torch.tensor(new_lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64),
    )


def softmaxes(heads: int, dtype: torch.dtype = torch.float64) -> list[Softmax]:
    """Return every way in which families differ from the plain softmax, alone and together."""
    sinks = torch.linspace(-2, 2, heads, dtype=dtype)
    return [
        Softmax(window=5),
        Softmax(0.6, softcap=0.7),
        Softmax(sinks=sinks),
        Softmax(0.3, 3, 1.5, sinks),
        Softmax(window=1),
    ]


def random_tree_bits(seed: int, bs: int, nd: int, padding: bool = False) -> Tensor:
    """Draw trees, int64 [bs, nd]: each node hangs below an earlier one; with `padding` some nodes belong to no tree."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.zeros(bs, nd, dtype=torch.int64)
    for row in range(bs):
        for node in range(nd):
            above = int(bits[row, int(torch.randint(node, (), generator=generator))]) if node else 0
            own = above | 1 << node
            if padding and node and torch.rand((), generator=generator) < 0.3:
                own = 0
            bits[row, node] = own - (1 << 64) if own >= 1 << 63 else own
    return bits


def decode_view(
    batch: PagedBatch, lens: list[int], bases: list[int] | None = None, tails: list[int] | None = None
) -> DecodeBatch:
    """Return what the batch's rows see; without bases a plain decode, whose bases are its lens."""
    as_lens = torch.tensor(lens, dtype=torch.int64)
    return DecodeBatch(
        table=batch.table,
        rows=batch.rows,
        bases=as_lens if bases is None else torch.tensor(bases, dtype=torch.int64),
        tails=torch.zeros_like(as_lens) if tails is None else torch.tensor(tails, dtype=torch.int64),
        lens=as_lens,
        max_len=max(lens, default=0),
    )


def rotary_table(d: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(MAX_POSITIONS, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1).float()
