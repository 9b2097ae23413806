"""Copies arrays from the host to the device: the arrays of a step go through pinned memory, several in one copy.

A copy from pageable memory may hold the host up until the stream has come to it, and in overlap mode the host must run
ahead. So arrays are written to a ring of pinned slabs. A slab that is full records an event in the stream, and is
written again once that has passed:

    slab   0          1          2          3
           event ✓    event …    writing    free          next: 3, then 0 (whose copies have run), then 1
                                                          (waits for its event)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

SLAB_BYTES = 1 << 20
NUM_SLABS = 4
ALIGNMENT = 16  # of every array, as kernels are compiled for


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the thread's current one within a block:
    streams, events, graphs and Triton's launches belong to the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Event(Protocol):
    """A mark in a stream, such as `torch.cuda.Event`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return where each array begins when they lie one behind the other, and where the last ends, in bytes."""
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return begins, end


class Uploads:
    """The copies to one device, on its current stream; the owner of their pinned memory.
    On a CPU arrays are only wrapped."""

    def __init__(
        self,
        device: torch.device,
        make_slab: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        make_event: Callable[[], Event] = torch.cuda.Event,
        *,
        slab_bytes: int = SLAB_BYTES,
        num_slabs: int = NUM_SLABS,
    ) -> None:
        self._device = device
        self._make_slab, self._make_event = make_slab, make_event
        self._slab_bytes, self._num_slabs = slab_bytes, num_slabs
        self._slabs: list[Tensor] = []
        self._events: list[Event | None] = []  # of slabs that are full
        self._current, self._used = 0, 0

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """Return the arrays as tensors of the device, sent in one copy.
        On a CPU they share the arrays' memory: do not change these."""
        arrays = tuple(map(np.ascontiguousarray, arrays))
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        begins, end = layout(arrays)
        place = torch.empty(end, dtype=torch.uint8, device=self._device)
        self.fill(place, arrays)
        return views(place, arrays, begins)

    def fill(self, place: Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Write contiguous arrays to `place` uint8 [n] of the device, laid out by `layout`."""
        begins, end = layout(arrays)
        if not end or place.device.type == "meta":
            return
        staged = self._stage(end) if place.device.type != "cpu" else place
        host = staged.numpy()
        for array, begin in zip(arrays, begins, strict=True):
            host[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        if staged is not place:
            place.copy_(staged, non_blocking=True)

    def _stage(self, size: int) -> Tensor:
        """Return `size` bytes of pinned memory that no copy reads any more."""
        if size > self._slab_bytes:
            return self._make_slab(size)  # torch keeps its memory until the copy has run
        if not self._slabs:
            self._slabs = [self._make_slab(self._slab_bytes) for _ in range(self._num_slabs)]
            self._events = [None] * self._num_slabs
        if self._used + size > self._slab_bytes:
            event = self._events[self._current] = self._make_event()
            event.record()
            self._current, self._used = (self._current + 1) % self._num_slabs, 0
            before, self._events[self._current] = self._events[self._current], None
            if before is not None:
                before.synchronize()
        begin, self._used = self._used, self._used + size
        return self._slabs[self._current][begin : begin + size]


def views(place: Tensor, arrays: Sequence[np.ndarray], begins: Sequence[int]) -> list[Tensor]:
    """Return the parts of `place` uint8 [n] as tensors of the arrays' shapes and dtypes."""
    return [
        place[begin : begin + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for array, begin in zip(arrays, begins, strict=True)
    ]


@cache
def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def uploads_to(device: torch.device) -> Uploads:
    """Return the owner of all copies to the device in this process, one for "cuda" and for the number
    that it stands for."""
    if device.type == "cuda" and device.index is None:
        return uploads_to(torch.device("cuda", torch.cuda.current_device()))
    return _uploads_of(device)


@cache
def _uploads_of(device: torch.device) -> Uploads:
    return Uploads(device)


def upload(device: torch.device, array: np.ndarray) -> Tensor:
    """Return an array as a tensor of the device."""
    return uploads_to(device).send(array)[0]
