"""Copies to the device: right values, one copy, and no pinned slab written before the copies from it have run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from foredraft.gpu.batch import uploads as uploads_module
from foredraft.gpu.batch.uploads import ALIGNMENT, Uploads, layout, views

SLAB, NUM_SLABS = 256, 3


class LateStream:
    """A stream that runs a copy when an event behind it is waited for, from memory as it is then."""

    def __init__(self) -> None:
        self.waiting: list = []  # copies as functions, events as objects
        self.waits = 0

    def make_event(self) -> LateEvent:
        return LateEvent(self)

    def run(self, until: object | None) -> None:
        while self.waiting:
            item = self.waiting.pop(0)
            if item is until:
                return
            if callable(item):
                item()


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self.stream = stream

    def record(self) -> None:
        self.stream.waiting.append(self)

    def synchronize(self) -> None:
        self.stream.waits += 1
        if self in self.stream.waiting:
            self.stream.run(self)


@pytest.fixture
def late() -> tuple[LateStream, Uploads]:
    stream = LateStream()
    return stream, Uploads(
        torch.device("cuda"),
        lambda size: torch.zeros(size, dtype=torch.uint8),
        stream.make_event,
        slab_bytes=SLAB,
        num_slabs=NUM_SLABS,
    )


class Place:
    """Memory of the device: `copy_` only joins the stream."""

    device = torch.device("cuda")

    def __init__(self, stream: LateStream, size: int) -> None:
        self.memory, self.stream = torch.zeros(size, dtype=torch.uint8), stream

    def copy_(self, staged: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.stream.waiting.append(lambda: self.memory.copy_(staged))


@pytest.mark.parametrize("slabs", [NUM_SLABS, 1])
def test_no_slab_is_written_before_its_copies_have_run(late, slabs):
    stream, uploads = late
    uploads._num_slabs = slabs
    draws = np.random.default_rng(1)
    sent = []
    for _ in range(60):
        arrays = [draws.integers(-9, 9, draws.integers(0, 9)).astype(t) for t in (np.int64, np.int32, np.float64, bool)]
        begins, end = layout(arrays)
        place = Place(stream, end)
        uploads.fill(place, arrays)
        sent.append((place, [array.copy() for array in arrays], begins))
        for array in arrays:
            array[:] = 0  # the caller may change it
    large = Place(stream, 4 * SLAB)
    uploads.fill(large, [np.ones(SLAB // 2)])
    stream.run(None)
    for place, arrays, begins in sent:
        for found, array in zip(views(place.memory, arrays, begins), arrays, strict=True):
            np.testing.assert_array_equal(found.numpy(), array)
            assert found.storage_offset() * found.element_size() % ALIGNMENT == 0
    assert large.memory.view(torch.float64).eq(1).all()
    assert stream.waits > 3, "the ring came round several times"


def test_on_a_cpu_arrays_are_wrapped():
    found = Uploads(torch.device("cpu")).send(np.arange(3), np.array([True]), np.zeros((2, 0), np.int32))
    assert [x.dtype for x in found] == [torch.int64, torch.bool, torch.int32]
    assert found[0].tolist() == [0, 1, 2] and found[2].shape == (2, 0)
    assert uploads_module.upload(torch.device("cpu"), np.arange(2)).tolist() == [0, 1]
