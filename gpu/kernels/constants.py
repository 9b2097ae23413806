"""Small constant tensors of one device, made once: a decode round's cost on a CPU is its number of tensor calls.

A CUDA graph holds the address of what it reads: a constant is never given up, and it must exist before the graph is
captured. The executor's warm-up run of the same shape makes it. They are never written.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def numbers(n: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return 0 … n − 1, [n]."""
    return torch.arange(n, dtype=dtype, device=device)


@cache
def node_numbers(batch_size: int, nodes: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the flat indices r · nodes + j of each row's first `columns` nodes, [batch_size, columns]."""
    flat = torch.arange(batch_size * nodes, dtype=dtype, device=device)
    return flat.view(batch_size, nodes)[:, :columns].contiguous()


@cache
def node_bits(nodes: int, device: torch.device) -> Tensor:
    """Return 1 << j for node j, int64 [nodes]; bit 63 is the sign."""
    assert nodes <= 64, f"{nodes} nodes do not fit into 64 bits"
    return torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)


@cache
def later(nodes: int, device: torch.device) -> Tensor:
    """Return bool [nodes, nodes]: column j comes after row i."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).triu(1)


@cache
def sequence(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the given integers, int64 [n]."""
    return torch.tensor(values, dtype=torch.int64, device=device)


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def words(*tensors: Tensor) -> list[Tensor]:
    """View contiguous tensors [n, …] with rows of one size as integers [n, words per row] of one width, in
    the same memory."""
    assert all(x.is_contiguous() for x in tensors), "rows that are copied as words lie one behind the other"
    row_bytes = tensors[0][0].numel() * tensors[0].element_size()
    size = next(n for n in _INTEGERS if row_bytes % n == 0 and all(x.data_ptr() % n == 0 for x in tensors))
    return [x.view(len(x), -1).view(_INTEGERS[size]) for x in tensors]
