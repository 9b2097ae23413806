"""Which operations a device has."""

from __future__ import annotations

import torch

from ...core.errors import ConfigError
from ..models.config import ModelConfig
from ..ops.port import Ops

DEVICES = ("cpu", "cuda")
ONE_CORE_LAYER_BYTES = 4 << 20
"""Layers of fewer bytes than this are done by one core before two have agreed on who does what."""


def ops_for(device: str) -> Ops:
    """Return the device operations for "cpu" or "cuda" (a number may follow, as in "cuda:1", which then becomes the
    current device).

    Raises `ConfigError` for any other device, and for "cuda" where Triton is not installed.
    """
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError.of("device", "device", f"{device!r} is none of {', '.join(DEVICES)}")
    if kind == "cpu":
        from ..ops.host_ops import HostOps

        return HostOps()
    from ..kernels.jit import triton

    if triton is None:
        raise ConfigError.of("device", "device", "cuda needs Triton, which is not installed")
    if device != kind:
        # Triton launches on the current device, and streams, events and graphs belong to it, wherever the tensors are.
        torch.cuda.set_device(device)
    from ..ops.tilings import read_tilings, take_tilings, tilings_path
    from ..ops.triton_ops import TritonOps

    if torch.cuda.is_available():
        take_tilings(read_tilings(tilings_path(torch.device(device))))
    return TritonOps()


def set_threads(device: str, threads: int | None, target: ModelConfig, weight_bytes: int) -> None:
    """Set how many threads torch computes with on a CPU, in the whole process; None: one for small models, else torch's
    own choice.

    NumPy computes with one: it does small products alone (`ops.host_ops`), and its pool waits for every thread even if
    another process has the core. On a busy machine a pass over 16 layers of 0.7 MB, 8 tokens, then took 65 ms instead
    of 9.
    """
    if device.partition(":")[0] != "cpu":
        return
    from threadpoolctl import threadpool_limits  # which a machine that only uses its GPU may lack

    threadpool_limits(1, user_api="blas")
    if threads is None and weight_bytes // target.num_layers < ONE_CORE_LAYER_BYTES:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
