"""Recorded requests as a workload: a window of a trace, replayed at its own speed or another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from ...core.draws import Purpose, uniform
from ...core.prompt import Prompt
from .conversations import block_names
from .trace_files import TraceRows, read_chunks
from .trace_inference import BLOCKS
from .trace_layout import AS_IT_SAYS, TraceLayout, TraceOptions, resolve_layout
from .workload import TimedRequest


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The size of a whole trace."""

    format: str
    num_rows: int
    num_requests: int  # rows that become requests: with a prompt and an output
    notes: tuple[str, ...] = ()  # how it is read where the file does not say so


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace file as a workload; iterating it yields `TimedRequest`s in order of time.

    path:       the file
    options:    its format, columns and unit of time, as far as a scenario gives them
    rate_scale: 2 replays twice as fast
    start_s:    rows before this time (seconds after the first row, before scaling) are passed over; times then count
                from here
    stop_s:     rows at or after this time are left out
    limit:      at most so many requests
    resample_s: None replays the trace as it is; else windows of so many seconds (before scaling) that are drawn with
                replacement, until they are as long as the trace: another sample of the same traffic for each seed
    seed:       of these draws

    Errors while reading: TraceError, and ConfigError for a file that cannot be read.
    """

    path: str | Path
    options: TraceOptions = AS_IT_SAYS
    rate_scale: float = 1.0
    start_s: float = 0.0
    stop_s: float | None = None
    limit: int | None = None
    resample_s: float | None = None
    seed: int = 0

    def __iter__(self) -> Iterator[TimedRequest]:
        if self.resample_s is not None:
            return self._resampled(self.resample_s)
        return self._as_it_is()

    def _resampled(self, window_s: float) -> Iterator[TimedRequest]:
        """Yield the requests of windows drawn from the trace, which ends where it begins. The windows begin anywhere,
        each with the same probability (a circular block bootstrap: Politis and Romano 1992)."""
        rows = list(replace(self, rate_scale=1.0, limit=None, resample_s=None))
        if not rows:
            return
        times = np.array([row.time_ns for row in rows], dtype=np.int64)
        span = int(times[-1]) + 1 if self.stop_s is None else round((self.stop_s - self.start_s) * 1e9)
        width = min(max(round(window_s * 1e9), 1), span)
        windows = np.arange(-(-span // width))
        starts = np.floor(uniform(self.seed, Purpose.WINDOW, 0, windows) * span).astype(np.int64)
        number = 0
        for window, start in zip(windows.tolist(), starts.tolist(), strict=True):
            begins = window * width
            length = min(width, span - begins)
            inside = (times - start) % span
            which = np.flatnonzero(inside < length)
            for i in which[np.argsort(inside[which], kind="stable")].tolist():
                if number == self.limit:
                    return
                time_ns = round((begins + int(inside[i])) / self.rate_scale)
                yield replace(rows[i], time_ns=time_ns, row=number)
                number += 1

    def _as_it_is(self) -> Iterator[TimedRequest]:
        start_ns, stop_ns = self._bounds_ns
        left = self.limit
        row = 0
        layout = self.layout()
        names = self._block_names(layout)
        for chunk in read_chunks(str(self.path), layout):
            for arrival in self._arrivals(chunk, row, start_ns, stop_ns, names, layout.block_size):
                yield arrival
                if left is not None:
                    left -= 1
                    if left == 0:
                        return
            row += len(chunk.lines)
            if stop_ns is not None and int(chunk.times_ns[-1]) >= stop_ns:
                return

    @property
    def has_block_hashes(self) -> bool:
        """Whether the rows say what their prompts contain; reads the first lines."""
        return BLOCKS in self.layout().columns

    def layout(self) -> TraceLayout:
        """Return how the file is read. Raises TraceError."""
        return resolve_layout(str(self.path), self.options)

    def _block_names(self, layout: TraceLayout) -> dict[int, int]:
        """Return the names of block ids that are also those of outputs."""
        if BLOCKS not in layout.columns:
            return {}
        columns = (
            zip(chunk.prompt_lens.tolist(), chunk.output_lens.tolist(), chunk.hash_ids or (), strict=True)
            for chunk in read_chunks(str(self.path), layout)
        )
        return block_names(chain.from_iterable(columns), layout.block_size)

    def scan(self) -> TraceSummary:
        """Read and check the whole file; windows, limit and scale do not apply."""
        layout = self.layout()
        num_rows = num_requests = 0
        for chunk in read_chunks(str(self.path), layout):
            num_rows += len(chunk.prompt_lens)
            num_requests += int(((chunk.prompt_lens > 0) & (chunk.output_lens > 0)).sum())
        return TraceSummary(layout.format, num_rows, num_requests, layout.notes)

    def read_window(self) -> TraceRows:
        """Return the requests from `start_s` to `stop_s`, without their hash ids and sessions; limit and scale do not
        apply. Checks the file up to there."""
        start_ns, stop_ns = self._bounds_ns
        columns: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(3)]
        lines: list[int] = []
        for chunk in read_chunks(str(self.path), self.layout()):
            kept = _kept(chunk, start_ns, stop_ns)
            for column, values in zip(columns, (chunk.times_ns, chunk.prompt_lens, chunk.output_lens), strict=True):
                column.append(values[kept])
            lines += [chunk.lines[i] for i in kept.tolist()]
            if stop_ns is not None and int(chunk.times_ns[-1]) >= stop_ns:
                break
        times_ns, prompt_lens, output_lens = (np.concatenate(column) for column in columns)
        return TraceRows(times_ns - start_ns, prompt_lens, output_lens, lines)

    @property
    def _bounds_ns(self) -> tuple[int, int | None]:
        return round(self.start_s * 1e9), None if self.stop_s is None else round(self.stop_s * 1e9)

    def _arrivals(
        self,
        chunk: TraceRows,
        first_row: int,
        start_ns: int,
        stop_ns: int | None,
        names: dict[int, int],
        block_size: int,
    ) -> Iterator[TimedRequest]:
        which = _kept(chunk, start_ns, stop_ns)
        times = chunk.times_ns[which] - start_ns
        if self.rate_scale != 1.0:
            times = np.rint(times / self.rate_scale).astype(np.int64)
        columns = zip(
            which.tolist(),
            times.tolist(),
            chunk.prompt_lens[which].tolist(),
            chunk.output_lens[which].tolist(),
            strict=True,
        )
        hash_ids, sessions = chunk.hash_ids, chunk.sessions
        for i, time_ns, prompt_len, output_len in columns:
            if hash_ids is None:
                prompt = Prompt(prompt_len)
            else:
                ids = [names.get(block) or block for block in hash_ids[i]]
                prompt = Prompt.of_blocks(ids, block_size, prompt_len)
            session = sessions[i] or None if sessions is not None else None
            yield TimedRequest(time_ns, prompt, output_len, session, 0, first_row + i)


def _kept(chunk: TraceRows, start_ns: int, stop_ns: int | None) -> np.ndarray:
    """Return which rows become requests: those of the window with a prompt and an output. int64 [n]."""
    kept = (chunk.prompt_lens > 0) & (chunk.output_lens > 0) & (chunk.times_ns >= start_ns)
    if stop_ns is not None:
        kept &= chunk.times_ns < stop_ns
    return np.flatnonzero(kept)
