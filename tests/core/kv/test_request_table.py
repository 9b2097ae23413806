"""The request table against loops over single cells."""

import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from foredraft.core.contract.step import NO_WRITES, TableWrites, WrittenRanges
from foredraft.core.errors import InvariantViolation
from foredraft.core.kv.request_table import InvalidRow, RequestTable, RequestTableFull
from hypothesis import given
from hypothesis import strategies as st

WIDTH = 12


@st.composite
def ranges(draw):
    """Ranges [start, start + count) in distinct rows, of equal, unit or any counts."""
    num_rows = draw(st.integers(0, 6))
    rows = draw(st.permutations(range(1, 7)))[:num_rows]
    kind = draw(st.sampled_from(["any", "equal", "ones"]))
    equal = draw(st.integers(0, WIDTH))
    counts = {"any": None, "equal": equal, "ones": 1}[kind]
    all_counts = [draw(st.integers(0, WIDTH)) if counts is None else counts for _ in rows]
    starts = [draw(st.integers(0, WIDTH - count)) for count in all_counts]
    return rows, starts, all_counts


@given(ranges(), st.sampled_from([np.int32, np.int64]))
def test_write_and_gather_equal_single_cells(case, dtype):
    rows, starts, counts = case
    table, expected = RequestTable(6, WIDTH), np.zeros((7, WIDTH), dtype=np.int32)
    cells = [(row, start + j) for row, start, count in zip(rows, starts, counts, strict=True) for j in range(count)]
    slots = np.arange(100, 100 + len(cells), dtype=np.int32)
    for (row, col), slot in zip(cells, slots, strict=True):
        expected[row, col] = slot
    rows, starts, counts = np.array(rows, dtype=np.int32), np.array(starts, dtype=dtype), np.array(counts, dtype=dtype)
    table.write(rows, starts, counts, slots)
    assert (table.slots == expected).all()
    assert table.gather_ragged(rows, starts, counts).tolist() == slots.tolist()
    writes = TableWrites([WrittenRanges(rows, starts, counts, slots)])
    assert writes.rows.dtype == writes.columns.dtype == writes.slots.dtype == np.int32
    assert list(zip(writes.rows.tolist(), writes.columns.tolist(), strict=True)) == cells
    assert writes.slots.tolist() == slots.tolist()
    for row, start, count in zip(rows, starts, counts, strict=True):
        assert (
            table.gather(int(row), int(start), int(start + count)).tolist()
            == expected[row, start : start + count].tolist()
        )


def test_writes_join_single_ranges_and_batches_in_order():
    batch = WrittenRanges(np.array([2, 1]), np.array([3, 4]), np.array([0, 2]), np.array([8, 9], dtype=np.int32))
    single = WrittenRanges(5, 7, 3, np.array([1, 2, 3], dtype=np.int32))
    writes = TableWrites([batch, single])
    assert writes.rows.tolist() == [1, 1, 5, 5, 5]
    assert writes.columns.tolist() == [4, 5, 7, 8, 9]
    assert writes.slots.tolist() == [8, 9, 1, 2, 3]
    assert NO_WRITES.rows.dtype == np.int32 and not len(NO_WRITES.slots)


def test_what_gather_returns_does_not_follow_the_table():
    table = RequestTable(1, WIDTH)
    table.write(np.array([1]), np.array([0]), np.array([2]), np.array([8, 9], dtype=np.int32))
    before = table.gather(1, 0, 2)
    table.slots[:] = 0
    assert before.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("rows", "starts", "counts", "num_slots"),
    [
        ([1, 2], [WIDTH - 1, 0], [2, 2], 4),
        ([1, 2], [0, WIDTH - 1], [1, 2], 3),
        ([1, 2], [0, WIDTH], [1, 1], 2),
        ([1, 2], [0, -1], [1, 1], 2),
        ([1, 3], [0, 0], [1, 1], 2),
        ([1, -1], [0, 0], [1, 1], 2),
        ([1, 2], [0, 0], [1, 2], 4),
        ([1, 2], [0, 0], [2, 2], 3),
        ([1, 2], [0, 0], [4, -1], 3),
        ([1, 2], [0, 0], [-1, -1], 0),
        ([1], [0], [WIDTH + 1], WIDTH + 1),
        ([1, 2], [0, 0], [1, 1], 3),
    ],
)
def test_a_write_that_does_not_fit_writes_nothing(rows, starts, counts, num_slots):
    table = RequestTable(2, WIDTH)
    with pytest.raises(InvariantViolation, match="ALLOC-07"):
        table.write(np.array(rows), np.array(starts), np.array(counts), np.arange(7, 7 + num_slots, dtype=np.int32))
    assert not table.slots.any()


@pytest.mark.parametrize(("row", "start", "stop"), [(3, 0, 1), (-1, 0, 1), (1, 2, 1), (1, -1, 1), (1, 0, WIDTH + 1)])
def test_a_gather_outside_is_refused(row, start, stop):
    with pytest.raises(InvariantViolation, match="ALLOC-07"):
        RequestTable(2, WIDTH).gather(row, start, stop)


def test_a_ragged_gather_outside_is_refused():
    with pytest.raises(InvariantViolation, match="ALLOC-07"):
        RequestTable(2, WIDTH).gather_ragged(np.array([1, 2]), np.array([0, WIDTH - 1]), np.array([1, 2]))


def test_rows_and_epochs():
    table = RequestTable(3, WIDTH)
    assert [table.acquire() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RequestTableFull, match="all 3 rows"):
        table.acquire()
    table.release(2)
    assert table.num_free_rows == 1 and not table.is_taken(2) and table.is_taken(1)
    assert table.acquire() == 2
    assert table.epochs.tolist() == [0, 1, 2, 1]
    table.check()


@pytest.mark.parametrize("row", [0, -1, 2, 4])
def test_a_row_that_is_not_held_is_not_released(row):
    table = RequestTable(3, WIDTH)
    table.acquire()
    with pytest.raises(InvalidRow):
        table.release(row)
    assert table.num_free_rows == 2
    table.check()


def test_check_finds_planted_defects():
    def write_padding(table):
        table.slots[0, 3] = 5

    def free_twice(table):
        table._free_rows.append(3)

    def free_held(table):
        table._free_rows.append(1)

    def forget_epoch(table):
        table.epochs[1] = 0

    for defect, invariant in (
        (write_padding, "ALLOC-12"),
        (free_twice, "ALLOC-02"),
        (free_held, "ALLOC-01"),
        (forget_epoch, "RELAY-03"),
    ):
        table = RequestTable(3, WIDTH)
        table.acquire()
        table.check()
        defect(table)
        with pytest.raises(InvariantViolation) as caught:
            table.check()
        assert caught.value.invariant == invariant


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; other systems have no huge pages on request")
def test_a_wide_table_takes_memory_only_where_it_is_written():
    """Also where each row has some slots: no row commits a huge page."""
    table = RequestTable(2048, 131_072)
    before = _resident_bytes()
    rows = np.arange(1, 2049)
    table.write(rows, rows * 50, np.full(2048, 8), np.arange(2048 * 8, dtype=np.int32))
    assert table.slots.nbytes > 2**30
    assert _resident_bytes() - before < 64 * 2**20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
