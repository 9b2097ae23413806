"""The checker against kernels that are broken on purpose, one for each kind of fault, and against right ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from memory_checker import MemoryFault, Ownership, checked_memory


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr, masked: tl.constexpr, shift: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < n) if masked else (i == i)
    tl.store(y + i, tl.load(x + i + shift, mask=mask) + 1, mask=mask)


@triton.jit
def store_all_at(y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, i + tl.program_id(0))


@triton.jit
def store_lanes_at_one(y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i // 2, i)


@triton.jit
def shift_left(x, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i + BLOCK)
    tl.store(x + i, value)


@triton.jit
def copy_slots(pool, out, slots, width: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    channel = tl.arange(0, width)
    tl.store(out + row * width + channel, tl.load(pool + slot * width + channel))


@triton.jit
def count(total, BLOCK: tl.constexpr):
    tl.atomic_add(total + tl.arange(0, BLOCK), 1)


@triton.jit
def sum_last(x, total, arrived, n, early: tl.constexpr):
    """Store a number each; the last program to arrive adds them up."""
    tl.store(x + tl.program_id(0), 1)
    is_last = tl.atomic_add(arrived, 1) == n - 1
    if early or is_last:
        tl.store(total, tl.load(x) + tl.load(x + n - 1))


@contextlib.contextmanager
def faults(kind: str, **options) -> Iterator[None]:
    with checked_memory(**options), pytest.raises(MemoryFault) as error:
        yield
    assert error.value.kind == kind


def test_a_right_kernel_passes_and_is_seen():
    x, y = torch.arange(7.0), torch.zeros(7)
    with checked_memory() as seen:
        add_one[(2,)](x, y, 7, BLOCK=4, masked=True, shift=0)
    assert torch.equal(y, x + 1)
    assert seen.launches == 1 and seen.accesses == 14


@pytest.mark.parametrize(("masked", "shift"), [(False, 0), (True, -1), (True, 1)])
def test_outside(masked: bool, shift: int):
    x, y = torch.arange(7.0), torch.zeros(8)
    with faults("outside"):
        add_one[(2,)](x, y, 7, BLOCK=4, masked=masked, shift=shift)


def test_outside_of_a_view_but_inside_its_storage():
    x, y = torch.zeros(4, 4)[:, :3], torch.zeros(16)
    with faults("outside"):
        add_one[(1,)](x, y, 16, BLOCK=16, masked=True, shift=0)
    whole = torch.zeros(16)
    with faults("outside", within=[whole[:8]]):
        add_one[(1,)](whole, y, 16, BLOCK=16, masked=True, shift=0)


def test_unwritten():
    with faults("unwritten"):
        add_one[(1,)](torch.empty(4), torch.zeros(4), 4, BLOCK=4, masked=True, shift=0)


def test_what_a_kernel_or_torch_wrote_is_written():
    with checked_memory():
        x, y, z = torch.empty(4), torch.empty(4), torch.empty(4)
        x.fill_(1)
        add_one[(1,)](x, y, 4, BLOCK=4, masked=True, shift=0)
        add_one[(1,)](y, z, 4, BLOCK=4, masked=True, shift=0)
        assert torch.equal(z, torch.full((4,), 3.0))


def test_a_part_of_a_pool_that_is_unwritten_again():
    pool, out = torch.zeros(3, 4), torch.zeros(1, 4)
    with checked_memory() as checker:
        checker.unwrite(pool[1])
        copy_slots[(1,)](pool, out, torch.tensor([2]), width=4)
        with pytest.raises(MemoryFault, match=r"^unwritten: "):
            copy_slots[(1,)](pool, out, torch.tensor([1]), width=4)


def test_double_store_by_programs_and_the_sink_that_may():
    y = torch.zeros(4, dtype=torch.int32)
    with faults("double store"):
        store_all_at[(2,)](y, BLOCK=4)
    with checked_memory(sinks=[y]):
        store_all_at[(2,)](y, BLOCK=4)
    with checked_memory(sinks=[y[:3]]), pytest.raises(MemoryFault):
        store_all_at[(2,)](y, BLOCK=4)


def test_double_store_by_lanes():
    with faults("double store"):
        store_lanes_at_one[(1,)](torch.zeros(4, dtype=torch.int32), BLOCK=4)


@pytest.mark.parametrize("shuffle", [None, 0, 1, 2])
def test_race(shuffle: int | None):
    """In any order: what is read first and written then, or written first and read then."""
    with faults("race", shuffle=shuffle):
        shift_left[(3,)](torch.arange(16), BLOCK=4)


def test_read_only():
    x = torch.arange(4.0)
    with faults("read-only", read_only=[x]):
        add_one[(1,)](x, x, 4, BLOCK=4, masked=True, shift=0)


def test_foreign():
    pool, out = torch.zeros(4, 4), torch.zeros(2, 4)
    rule = Ownership(pool, owners=[0, 1, 2, 2], row_of=lambda x, y, z: x + 1)
    for slots in ([1, 2], [0, 3], [1, 0]):
        with checked_memory(ownership=[rule]):
            copy_slots[(2,)](pool, out, torch.tensor(slots), width=4)
    with faults("foreign", ownership=[rule]):
        copy_slots[(2,)](pool, out, torch.tensor([1, 1]), width=4)


def test_atomics_may_meet_but_not_outside():
    total = torch.zeros(4, dtype=torch.int32)
    with checked_memory():
        count[(3,)](total, BLOCK=4)
    assert total.tolist() == [3] * 4
    with faults("outside"):
        count[(1,)](total, BLOCK=8)


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_before_an_atomic_may_be_read_behind_it(seed: int):
    x, total, arrived = (torch.zeros(n, dtype=torch.int32) for n in (3, 1, 1))
    with checked_memory(shuffle=seed):
        sum_last[(3,)](x, total, arrived, 3, early=False)
    assert total.tolist() == [2] and arrived.tolist() == [3]
    with pytest.raises(MemoryFault, match=r"race|double store"), checked_memory(shuffle=seed):
        sum_last[(3,)](x, total, arrived.zero_(), 3, early=True)


def test_a_shuffled_grid_runs_every_program_once():
    x, y = torch.arange(32.0), torch.zeros(32)
    with checked_memory(shuffle=5) as seen:
        add_one[(8,)](x, y, 32, BLOCK=4, masked=True, shift=0)
    assert torch.equal(y, x + 1)
    assert seen.order != sorted(seen.order)


def test_nothing_stays_wrapped():
    with checked_memory() as seen:
        pass
    torch.empty(4)
    add_one[(1,)](torch.zeros(4), torch.zeros(4), 4, BLOCK=4, masked=True, shift=0)
    assert seen.launches == 0 and not seen.unwritten
