"""Which operations a device has."""

from __future__ import annotations

import torch

from ..core.errors import ConfigError, Problem
from .ops import Ops

DEVICES = ("cpu", "cuda")


def ops_for(device: str) -> Ops:
    """The device operations for "cpu" or "cuda" (a number may follow, as in "cuda:1", which then becomes the current device).

    Raises `ConfigError` for any other device, and for "cuda" where Triton is not installed.
    """
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError("device", [Problem("device", f"{device!r} is none of {', '.join(DEVICES)}")])
    if kind == "cpu":
        from .torch_ops import TorchOps

        return TorchOps()
    from .kernels.jit import triton

    if triton is None:
        raise ConfigError("device", [Problem("device", "cuda needs Triton, which is not installed")])
    if device != kind:
        # Triton launches on the current device, and streams, events and graphs belong to it, wherever the tensors are.
        torch.cuda.set_device(device)
    from .triton_ops import TritonOps

    return TritonOps()
