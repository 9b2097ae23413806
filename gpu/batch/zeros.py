"""Zeroed memory for pools, which are sized for the most that may ever run."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, as torch's own memory on a CPU has


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros.

    On a CPU the system gives it memory where it is first written. `torch.zeros` writes all of it at once: a pool for
    256 requests takes its full size although one runs.
    """
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(tuple(shape))
