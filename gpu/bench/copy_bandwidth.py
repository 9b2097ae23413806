"""The memory bandwidth that a device really has: bytes read plus bytes written per second of a big copy.

A round of decoding reads weights and KV and writes next to nothing, so it can be no faster than its bytes divided by this. A datasheet's
figure is never reached, and would make every share look smaller than what the kernels could change.
"""

from __future__ import annotations

import time

import torch

GPU_BYTES = 1 << 30
CPU_BYTES = 1 << 28  # several times the caches
COPIES = 9


def copy_bandwidth(device: torch.device | str, num_bytes: int | None = None) -> float:
    """Return bytes per second, reads and writes together; the median of a few copies of `num_bytes` (default: far beyond any cache)."""
    device = torch.device(device)
    size = num_bytes or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES + 1):
        seconds.append(_timed_copy(source, target))
    return 2 * source.nbytes / sorted(seconds[1:])[COPIES // 2]


def _timed_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type != "cuda":
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    target.copy_(source)
    end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3
