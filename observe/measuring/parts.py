"""The metrics of a run whose replicas were simulated in several processes: the numbers and rows that one process
would have counted, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..output_files import ROW_GROUP
from .histogram import added_counts
from .lives import ReplicaMetrics
from .summary import GAUGES, Measurements

if TYPE_CHECKING:
    import pyarrow

    from .metrics import RunMetrics

COMPLETED = ("stop", "length")
REQUESTS, ROUNDS, LOAD = "requests.parquet", "rounds.parquet", "load.parquet"


def counts_of(measured: Measurements) -> dict[str, Any]:
    """Return what a part that is over has counted, as plain data; its times are in its files."""
    replicas = list(measured.replicas.values())
    accounts = [state.account for state in replicas]
    assert not any(one.requests or one.leaving for one in accounts), "every request of a part that is over has ended"
    return {
        "replicas": [[state.number, state.account.config, state.max_held] for state in replicas],
        "counts": measured.counts,
        "totals": measured.totals,
        "itl": measured.itl.to_json(),
        "drafts_by_steps": [[steps, counts.tolist()] for steps, counts in measured.drafts_by_steps.items()],
        "rounds_at_steps": measured.rounds_at_steps.tolist(),
    }


def add_parts(metrics: RunMetrics, folders: Sequence[Path], counts: Sequence[Mapping[str, Any]]) -> None:
    """Add to the metrics of a run what its parts have counted (`counts_of`), and written to `folders`
    (`RunMetrics(is_part=True)`)."""
    for part in counts:
        _add_counts(metrics.measured, part)
    levels = np.zeros(len(GAUGES), dtype=np.int64)
    rest = np.zeros((0, 1 + len(GAUGES)), dtype=np.int64)
    for rows in merged_rows([folder / LOAD for folder in folders]):
        changes = np.stack([rows[name] for name in GAUGES], axis=1)
        changes[0] += levels
        gauges = np.cumsum(changes, axis=0)
        levels = gauges[-1]
        rest = metrics.load.add_samples(np.concatenate([rest, np.column_stack([rows["event_ns"], gauges])]))
    for rows in merged_rows([folder / ROUNDS for folder in folders]):
        metrics.load.add_rounds(rows["time_ns"], rows["tokens"], rows["steps"])
        if metrics.files:
            metrics.files[1].add(rows, len(rows["time_ns"]))
    for rows in merged_rows([folder / REQUESTS for folder in folders]):
        done = np.isin(rows["reason"], COMPLETED)
        times = (rows[name][done] for name in ("arrival_ns", "first_token_ns", "finish_ns", "num_output"))
        metrics.measured.add_completed(*times)
        if metrics.files:
            metrics.files[0].add(rows, len(done))


def _add_counts(measured: Measurements, part: Mapping[str, Any]) -> None:
    for number, config, max_held in part["replicas"]:
        state = measured.replicas[number] = ReplicaMetrics(number)
        state.account.config, state.max_held = config, max_held
    for own, others in ((measured.counts, part["counts"]), (measured.totals, part["totals"])):
        for name, count in others.items():
            own[name] += count
    measured.itl.merge(part["itl"])
    drafts = measured.drafts_by_steps
    for steps, counts in part["drafts_by_steps"]:
        drafts[steps] = added_counts(drafts.get(steps, np.zeros(1, dtype=np.int64)), np.array(counts))
    measured.rounds_at_steps = added_counts(measured.rounds_at_steps, np.array(part["rounds_at_steps"]))


def merged_rows(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of tables, each of which is in the order of its column `event_ns`, in the order of `event_ns` and
    `replica`: some thousand at a time, as columns by name. A null is −1."""
    parts = [_Rows(path) for path in paths]
    while reading := [part for part in parts if not part.is_over]:
        behind = min(reading, key=lambda part: part.last_ns)
        yield from _in_order([part.take(behind.last_ns) for part in parts])
        behind.read()
    yield from _in_order([part.rows for part in parts])


class _Rows:
    """The rows of one table that were read and not taken yet."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        self.rows = pyarrow.Table.from_batches([], file.schema_arrow)  # `empty_table` would load pandas
        self.is_over: bool = False
        self._batches = file.iter_batches(ROW_GROUP)
        self.read()

    @property
    def last_ns(self) -> int:
        return int(self.rows["event_ns"][-1].as_py())

    def read(self) -> None:
        """Read some more rows."""
        import pyarrow

        batch = next(self._batches, None)
        self.is_over = batch is None
        if batch is not None:
            self.rows = pyarrow.concat_tables([self.rows, pyarrow.Table.from_batches([batch])])

    def take(self, before_ns: int) -> pyarrow.Table:
        """Return the rows of earlier times."""
        size = int(np.searchsorted(_numbers(self.rows["event_ns"]), before_ns))
        taken, self.rows = self.rows[:size], self.rows[size:]
        return taken


def _in_order(tables: Sequence[pyarrow.Table]) -> Iterator[dict[str, Any]]:
    """Yield the rows of tables in their order, if there are any."""
    import pyarrow

    rows = pyarrow.concat_tables(tables).sort_by([("event_ns", "ascending"), ("replica", "ascending")])
    if len(rows):
        yield {name: _values(rows[name]) for name in rows.column_names}


def _values(column: pyarrow.ChunkedArray) -> Any:
    import pyarrow

    if pyarrow.types.is_string(column.type):
        return column.to_pylist()
    return _numbers(column).astype(np.int64)


def _numbers(column: pyarrow.ChunkedArray) -> np.ndarray:
    """Return a column of numbers, with −1 for nulls. (`to_numpy` and `fill_null` would load pandas, which takes longer
    than to put the rows of a run together.)"""
    parts = [np.empty(0, dtype=np.int64)]
    for chunk in column.chunks:
        begin, end = chunk.offset, chunk.offset + len(chunk)
        present, values = chunk.buffers()
        numbers = np.frombuffer(values, dtype=chunk.type.to_pandas_dtype())[begin:end]
        if present is not None and chunk.null_count:
            is_present = np.unpackbits(np.frombuffer(present, dtype=np.uint8), bitorder="little")[begin:end]
            numbers = np.where(is_present == 1, numbers, -1)
        parts.append(numbers)
    return np.concatenate(parts)
