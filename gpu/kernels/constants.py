"""Small constant tensors of one device, made once: a decode round's cost on a CPU is its number of tensor calls.

A constant must exist before a CUDA graph that reads it is captured; the executor's warm-up run of the same shape makes it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def numbers(n: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """0 … n − 1, [n]. Nobody writes into it."""
    return torch.arange(n, dtype=dtype, device=device)


@lru_cache(maxsize=1024)
def node_numbers(batch_size: int, nodes: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The flat indices r · nodes + j of each row's first `columns` nodes, [batch_size, columns]. Nobody writes into it."""
    flat = torch.arange(batch_size * nodes, dtype=dtype, device=device)
    return flat.view(batch_size, nodes)[:, :columns].contiguous()


@lru_cache(maxsize=64)
def node_bits(nodes: int, device: torch.device) -> Tensor:
    """1 << j for node j, int64 [nodes]; bit 63 is the sign. Nobody writes into it."""
    assert nodes <= 64, f"{nodes} nodes do not fit into 64 bits"
    return torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)


@lru_cache(maxsize=64)
def later(nodes: int, device: torch.device) -> Tensor:
    """bool [nodes, nodes]: column j comes after row i. Nobody writes into it."""
    return torch.ones(nodes, nodes, dtype=torch.bool, device=device).triu(1)


@lru_cache(maxsize=64)
def sequence(values: tuple[int, ...], device: torch.device) -> Tensor:
    """The given integers, int64 [n]. Nobody writes into it."""
    return torch.tensor(values, dtype=torch.int64, device=device)
