"""Rows of any dtype seen as integers, for kernels that only copy: as wide as the rows allow, and no arithmetic on half precision."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def words(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors [n, …], whose rows have the same size, as integers [n, words per row] of one width; they share their memory."""
    assert all(x.is_contiguous() for x in tensors), "rows that are copied as words lie one behind the other"
    row_bytes = tensors[0][0].numel() * tensors[0].element_size()
    size = next(n for n in _INTEGERS if row_bytes % n == 0 and all(x.data_ptr() % n == 0 for x in tensors))
    return [x.view(len(x), -1).view(_INTEGERS[size]) for x in tensors]
