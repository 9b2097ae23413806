"""Rows of parts in the order of one process, however they are read, and loads over time that depend on no grouping."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow
import pytest
from foredraft.observe.measuring import parts
from foredraft.observe.measuring.histogram import LogHistogram, Timeline
from pyarrow import parquet


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_rows_come_in_the_order_of_time_and_replica(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "ROW_GROUP", batch)
    rng = np.random.default_rng(batch)
    schema = pyarrow.schema([("event_ns", "int64"), ("replica", "int64"), ("name", "string")])
    rows, paths = [], []
    for part in range(3):
        keys = sorted(zip(rng.integers(0, 12, 40).tolist(), rng.choice([part, part + 3], 40).tolist(), strict=True))
        keys = keys if part else []  # one part has no rows
        own = [(time, replica, f"{part}-{place}") for place, (time, replica) in enumerate(keys)]
        columns = [list(column) for column in zip(*own, strict=True)] or [[], [], []]
        table = pyarrow.table(columns, schema=schema)
        paths.append(tmp_path / f"{part}.parquet")
        parquet.write_table(table, paths[-1])
        rows += own
    found = [
        row
        for columns in parts.merged_rows(paths)
        for row in zip(columns["event_ns"].tolist(), columns["replica"].tolist(), columns["name"], strict=True)
    ]
    assert found == sorted(rows, key=lambda row: row[:2])  # stable: rows of a replica keep their order


def test_a_timeline_does_not_depend_on_how_its_samples_are_grouped():
    rng = np.random.default_rng(0)
    times = 7 + np.cumsum(rng.integers(0, 10**9, 200))
    values = rng.integers(0, 10**8, (1, 199))
    read = []
    for cuts in ([0, 199], [0, 1, 50, 51, 199]):
        timeline = Timeline(7, ("held",), (), num_buckets=16)
        for low, high in pairwise(cuts):
            timeline.add_gauges(times[low : high + 1], values[:, low:high])
        read.append(timeline.read())
    assert read[0] == read[1]


def test_histograms_are_added_as_plain_data():
    values = np.random.default_rng(1).integers(0, 10**12, 300)
    whole, first, second = LogHistogram(), LogHistogram(), LogHistogram()
    whole.add(values)
    first.add(values[:100])
    second.add(values[100:])
    together = LogHistogram()
    for part in (LogHistogram(), first, second):
        together.merge(part.to_json())
    assert (together.mean, together.std) == (whole.mean, whole.std)
    assert together.quantiles([0.0, 0.5, 0.99, 1.0]) == whole.quantiles([0.0, 0.5, 0.99, 1.0])
