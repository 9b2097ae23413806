"""The metrics of a run, counted while it runs: memory does not grow with its length, except for three numbers per
completed request.

An event is only noted. Every few hundred steps the notes are processed together, as columns over all rounds and rows.
Once they are sorted by request, a few vector operations give the gaps between emissions, and the sums per request and
per round.

    event ──► notes ──flush──► open requests ──close──► latencies, requests.parquet
                        └────► round sums ────────────► totals, timeline, rounds.parquet

A token is *emitted* when the round that accepted it ends (`StepResult.round_end_ns`). A request's first token comes
with the last chunk of its prompt; after a retraction the next token comes that way too, and the gap counts as an
inter-token latency like any other.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...core.contract.events import Committed, EngineStarted, Event, Planned, Resumed, StepsLost
from ...core.contract.request import FinishReason
from ..output_files import ParquetColumns
from .histogram import added_counts, series
from .lives import ReplicaMetrics, RequestLives
from .load import LoadSamples, MeasuredLoad, PartLoad
from .summary import GAUGES, REASONS, SLO, Measurements, summarize

REQUEST_FIELDS = (
    ("request_id", "string"),
    ("replica", "int32"),
    ("arrival_ns", "int64"),
    ("first_scheduled_ns", "int64?"),
    ("first_token_ns", "int64?"),
    ("finish_ns", "int64"),
    ("prompt_len", "int32"),
    ("num_cached", "int32"),
    ("num_output", "int32"),
    ("correct_drafts", "int32"),
    ("verify_rounds", "int32"),
    ("retractions", "int32"),
    ("reason", "string"),
)
ROUND_FIELDS = (
    ("time_ns", "int64"),
    ("replica", "int32"),
    ("step_id", "int64"),
    ("prefill_tokens", "int32"),
    ("decode_rows", "int32"),
    ("steps", "int32?"),
    ("num_draft_tokens", "int32?"),
    ("tokens", "int32"),
    ("correct_drafts", "int32"),
    ("held_slots", "int64"),
    ("waiting", "int32"),
)
EVENT_FIELD = ("event_ns", "int64")  # of the rows of a part: when the event came that closed a request, or a step
SAMPLE_FIELDS = (EVENT_FIELD, ("replica", "int32"), *((name, "int64") for name in GAUGES))


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the whole table as dictionaries, one per row, for runs whose rows fit in memory."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


_FLUSH_ENTRIES = 1 << 14  # rows × rounds
_FLUSH_EVENTS = 1 << 11
_KEPT_BYTES = 1 << 23  # several flushes

# Columns of the notes on a committed step.
_REPLICA, _STEP_ID, _ROUNDS, _PREFILL, _ROWS, _STEPS, _ND, _HELD, _WAITING, _EVENT = range(10)


class RunMetrics:
    """Metrics of a run of one or more replicas. With `out_dir` it writes `requests.parquet` and
    `rounds.parquet` there.

    `is_part`: some replicas of a run, whose load over time is that of all. The files in `out_dir` are then those that
    `measuring.parts.add_parts` puts together.
    """

    def __init__(
        self, out_dir: str | os.PathLike[str] | None = None, *, num_buckets: int = 120, is_part: bool = False
    ) -> None:
        measured = Measurements()
        self.measured: Measurements = measured
        self.lives: RequestLives = RequestLives(measured.replicas, measured.counts, measured.totals)
        self.load: LoadSamples = MeasuredLoad(measured, num_buckets)
        self.files: list[ParquetColumns] = []  # of requests, of rounds, and of a part's load
        self._closed_at: array[int] | None = array("q") if is_part else None  # times of `lives.closing`
        if out_dir is not None:
            folder, more = Path(out_dir), (EVENT_FIELD,) if is_part else ()
            self.files = [
                ParquetColumns(folder / "requests.parquet", (*REQUEST_FIELDS, *more)),
                ParquetColumns(folder / "rounds.parquet", (*ROUND_FIELDS, *more)),
            ]
            if is_part:
                self.files.append(ParquetColumns(folder / "load.parquet", SAMPLE_FIELDS))
                self.load = PartLoad(self.files[-1])
        self._samples = array("q")  # (now, *GAUGES) of events since requests were last seen in the system
        self._passed_ns = -1  # the greatest time of an event that left the gauges as they were
        self._flush_at = _FLUSH_EVENTS * (1 + len(GAUGES))  # so many values, those that a flush has left there included
        # Until a block of this size was freed once, the C library returns the memory of every flush to the system, to
        # take it again page by page.
        np.empty(_KEPT_BYTES, dtype=np.uint8)
        self._begin_notes()

    def _begin_notes(self) -> None:
        self._steps: list[tuple[int, ...]] = []
        self._round_ends: list[np.ndarray] = []
        self._num_rounds = 0
        # Pieces: the emissions of one round's decode rows, or of the first tokens of one step.
        self._piece_slots: list[Any] = []
        self._piece_lens: list[int] = []
        self._piece_rounds: list[int] = []
        self._kept: list[Any] = []
        self._accepted: list[Any] = []  # accept lengths; 0 for first tokens, which are not drafted
        self._delivered_ns: list[Any] = []  # of each entry, -1: with a later one; empty: all when their round ends
        self._num_entries = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def sink(self, replica: int) -> Callable[[Event], None]:
        """Return the event sink for the engine of `replica`."""
        lives, totals = self.lives, self.measured.totals
        state = self.measured.replicas.setdefault(replica, ReplicaMetrics(replica))
        account = state.account

        def take(event: Event) -> None:
            if type(event) is EngineStarted:
                account.take(event)
                return
            if type(event) is Committed:
                self._note(state, event)
            running, waiting = account.num_running, account.num_waiting
            changes = account.take(event)
            if changes:
                lives.follow(state, changes, event)
                lives.running += account.num_running - running
                if self._closed_at is not None:
                    self._closed_at.extend([event.now_ns] * (len(lives.closing) - len(self._closed_at)))
            elif type(event) is Committed:  # the gauges are as they were
                if event.now_ns > self._passed_ns:
                    self._passed_ns = event.now_ns
                return
            lives.waiting += account.num_waiting - waiting
            if type(event) is Planned:
                held = int(event.num_held_slots)
                lives.held += held - state.held
                state.held = held
                if held > state.max_held:
                    state.max_held = held
            elif type(event) is StepsLost:
                totals["lost_steps"] += len(event.step_ids)
            elif type(event) is Resumed:
                totals["restarts"] += event.restarted
            running, waiting = lives.running, lives.waiting
            now_ns = event.now_ns if event.now_ns >= self._passed_ns else self._passed_ns
            self._samples.extend((now_ns, running, waiting, lives.held, running + waiting))
            if self._num_entries >= _FLUSH_ENTRIES or len(self._samples) >= self._flush_at:
                self.flush()

        return take

    def observe_device(self, replica: int, busy_ns: int) -> None:
        """Add `busy_ns` to the busy time of the device of `replica`."""
        state = self.measured.replicas.setdefault(replica, ReplicaMetrics(replica))
        state.busy_ns = (state.busy_ns or 0) + busy_ns

    def _note(self, state: ReplicaMetrics, event: Committed) -> None:
        """Note what a committed step delivered, before the requests are closed that it ended."""
        step, result = event.step, event.result
        decode, first = step.decode, event.first_tokens
        account, plan = state.account, state.account.in_flight[0]
        prefill_tokens = 0 if step.prefill is None else sum(step.prefill.lens.tolist())
        rounds, batch_size, steps, nd = 1, 0, -1, -1
        if first:
            self._piece_slots.append([account.requests[request_id].column for request_id in first])
            self._piece_lens.append(len(first))
            self._piece_rounds.append(self._num_rounds)
            self._kept.append([1] * len(first))
            self._accepted.append([0] * len(first))
            if event.deliveries is not None:
                self._delivered_ns.append(event.deliveries.first_ns)
        if decode is not None:
            assert result.decode is not None and event.kept is not None, "a result has the parts of its step"
            rounds, batch_size = result.decode.rounds, len(decode.rows)
            steps, nd = decode.shape.steps, decode.shape.nodes
            slots = account.columns_of(decode.rows)
            if rounds == 1:
                self._piece_slots.append(slots)
                self._piece_lens.append(batch_size)
                self._piece_rounds.append(self._num_rounds)
            else:
                self._piece_slots.extend([slots] * rounds)
                self._piece_lens.extend([batch_size] * rounds)
                self._piece_rounds.extend(range(self._num_rounds, self._num_rounds + rounds))
            self._kept.append(event.kept.reshape(-1))
            self._accepted.append(result.decode.accept_lens.reshape(-1))
            nodes = result.decode.nodes_of(decode)
            if nodes is not None:  # the flush counts the drafts of the shape
                self.measured.totals["proposed_drafts"] -= int(((nd - nodes) * (event.kept > 0)).sum())
            if event.deliveries is not None:
                self._delivered_ns.append(event.deliveries.at_ns.reshape(-1))
            if steps != state.last_steps:
                self.measured.totals["switches"] += state.last_steps >= 0
                state.last_steps = steps
        held, waiting = plan.num_held_slots, plan.num_waiting
        self._steps.append(
            (state.number, step.step_id, rounds, prefill_tokens, batch_size, steps, nd, held, waiting, event.now_ns)
        )
        self._round_ends.append(result.round_end_ns)
        self._num_rounds += rounds
        self._num_entries += rounds * batch_size + len(first)

    # -- working the notes off ----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Process the notes since the last flush."""
        self._flush_gauges()
        if self._steps:
            self._flush_rounds()
        if closing := self.lives.take_closing():
            self._close_requests(closing)
        self._begin_notes()

    def _flush_gauges(self) -> None:
        if self._samples and self._passed_ns > self._samples[-1 - len(GAUGES)]:
            self._samples.extend((self._passed_ns, *self._samples[-len(GAUGES) :]))
        samples = np.frombuffer(self._samples, dtype=np.int64).reshape(-1, 1 + len(GAUGES))
        if samples.size:
            self._samples = array("q", self.load.add_samples(samples).tobytes())
            self._flush_at = len(self._samples) + _FLUSH_EVENTS * (1 + len(GAUGES))

    def _flush_rounds(self) -> None:
        steps = np.array(self._steps, dtype=np.int64)
        per_round = steps if self._num_rounds == len(steps) else np.repeat(steps, steps[:, _ROUNDS], axis=0)
        ends = np.concatenate(self._round_ends)
        tokens = correct = np.zeros(len(ends), dtype=np.int64)
        if self._num_entries:
            tokens, correct = self._flush_emissions(per_round, ends)
        decoding = per_round[:, _STEPS] >= 0
        steps_in_use = per_round[decoding, _STEPS]
        self.measured.rounds_at_steps = added_counts(self.measured.rounds_at_steps, np.bincount(steps_in_use))
        self.measured.totals["decode_rounds"] += len(steps_in_use)
        self.measured.totals["committed_steps"] += len(steps)
        self.measured.totals["prefill_tokens"] += int(steps[:, _PREFILL].sum())
        self.measured.totals["delivered_tokens"] += int(tokens.sum())
        self.load.add_rounds(ends, tokens, per_round[:, _STEPS])
        if self.files:
            names = ("replica", "step_id", "rounds", "prefill_tokens", "decode_rows", "steps", "num_draft_tokens")
            columns: dict[str, Any] = dict(zip((*names, "held_slots", "waiting", "event_ns"), per_round.T, strict=True))
            columns.update(time_ns=ends, tokens=tokens, correct_drafts=correct)
            self.files[1].add(columns, len(ends))

    def _flush_emissions(self, per_round: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute gaps and sums per request; returns tokens and correct drafts per round, int64 [rounds]."""
        # Small keys sort by radix.
        key = np.uint16 if self.lives.open.capacity <= 1 << 16 else np.int64
        slots = np.concatenate(self._piece_slots, dtype=key, casting="unsafe")
        kept = np.concatenate(self._kept)
        accepted = np.concatenate(self._accepted)
        rounds = np.repeat(np.array(self._piece_rounds), self._piece_lens)
        delivered_ns = np.concatenate(self._delivered_ns) if self._delivered_ns else None
        live = kept > 0
        if not live.all():
            slots, kept, accepted, rounds = slots[live], kept[live], accepted[live], rounds[live]
            delivered_ns = None if delivered_ns is None else delivered_ns[live]
        drafted = accepted > 0
        correct = np.maximum(accepted - 1, 0)
        num_rounds = len(ends)
        tokens_per_round = np.bincount(rounds, kept, num_rounds).astype(np.int64)
        correct_per_round = np.bincount(rounds, correct, num_rounds).astype(np.int64)
        verified_per_round = np.bincount(rounds, drafted, num_rounds).astype(np.int64)
        self.measured.totals["verified_rows"] += int(verified_per_round.sum())
        self.measured.totals["correct_drafts"] += int(correct_per_round.sum())
        self.measured.totals["proposed_drafts"] += int((verified_per_round * (per_round[:, _ND] - 1)).sum())
        self._count_drafts(per_round[rounds[drafted], _STEPS], correct[drafted])
        if len(slots):
            order = np.argsort(slots, kind="stable")
            slots = slots[order].astype(np.int64)
            starts = _starts_of(slots)
            self._credit(slots[starts], starts, kept[order], correct[order], drafted[order])
            if delivered_ns is None:
                self._time(slots[starts], starts, ends[rounds[order]])
            elif (is_sent := delivered_ns[order] >= 0).any():
                slots = slots[is_sent]
                starts = _starts_of(slots)
                self._time(slots[starts], starts, delivered_ns[order][is_sent])
        return tokens_per_round, correct_per_round

    def _count_drafts(self, steps: np.ndarray, correct: np.ndarray) -> None:
        """Count verified rows by the steps of their round and their correct drafts, int64 [n] each."""
        if not len(steps):
            return
        width = 1 + max(int(steps.max()), int(correct.max()))
        by_steps = np.bincount(steps * width + correct, minlength=width * width).reshape(width, width)
        for number in np.flatnonzero(by_steps.any(axis=1)).tolist():
            before = self.measured.drafts_by_steps.get(number, np.zeros(1, dtype=np.int64))
            self.measured.drafts_by_steps[number] = added_counts(before, np.trim_zeros(by_steps[number], "b"))

    def _credit(
        self, owners: np.ndarray, starts: np.ndarray, kept: np.ndarray, correct: np.ndarray, drafted: np.ndarray
    ) -> None:
        """Add emissions, sorted by request, to the open requests `owners`, whose emissions begin at `starts`."""
        opened = self.lives.open.columns
        opened.num_output[owners] += np.add.reduceat(kept, starts)
        opened.correct_drafts[owners] += np.add.reduceat(correct, starts)
        opened.verify_rounds[owners] += np.add.reduceat(drafted, starts, dtype=np.int64)

    def _time(self, owners: np.ndarray, starts: np.ndarray, times: np.ndarray) -> None:
        """Add the times of emissions, sorted by request and time, to the open requests, and their gaps."""
        opened = self.lives.open.columns
        before = np.empty_like(times)
        before[1:] = times[:-1]
        before[starts] = opened.last_token_ns[owners]
        newly = before[starts] < 0
        opened.first_token_ns[owners[newly]] = times[starts[newly]]
        gaps = times - before
        if newly.any():
            gaps = np.delete(gaps, starts[newly])
        # A request that was handed over has tokens by the clocks of two hosts, which may differ.
        self.measured.itl.add(np.maximum(gaps, 0))
        opened.last_token_ns[owners] = times[np.concatenate([starts[1:], [len(times)]]) - 1]

    def _close_requests(self, closing: list[tuple[int, int, int, int]]) -> None:
        slots, reasons, times, outputs = np.array(closing, dtype=np.int64).T
        ids, columns = self.lives.open.close(slots)
        finish = np.where(times >= 0, times, columns["last_token_ns"])
        num_output = np.where(outputs >= 0, outputs, columns["num_output"])
        for name, count in zip(REASONS, np.bincount(reasons, minlength=len(REASONS)).tolist(), strict=True):
            self.measured.counts[name] += count if name != "transferred" else 0  # counted when they happened
        done = (reasons == FinishReason.STOP) | (reasons == FinishReason.LENGTH)
        arrival, first = columns["arrival_ns"][done], columns["first_token_ns"][done]
        self.measured.add_completed(arrival, first, finish[done], num_output[done])
        self.measured.totals["input_tokens"] += int(columns["prompt_len"][done].sum())
        self.measured.totals["output_tokens"] += int(num_output[done].sum())
        cut = (reasons == FinishReason.LENGTH) & (num_output < columns["max_tokens"])
        self.measured.totals["truncated"] += int(cut.sum())
        if self.files:
            names = [REASONS[reason] for reason in reasons.tolist()]
            row = {**columns, "request_id": ids, "finish_ns": finish, "num_output": num_output, "reason": names}
            if self._closed_at is not None:
                row["event_ns"], self._closed_at = np.array(self._closed_at), array("q")
            self.files[0].add(row, len(ids))

    # -- results ------------------------------------------------------------------------------------------------------

    def summary(
        self, duration_ns: int | None = None, slo: SLO | None = None, *, incomplete: bool = False
    ) -> dict[str, Any]:
        """Return all metrics under flat names (see `summary.py`).
        `duration_ns` defaults to the time from first to last event."""
        if not incomplete:
            self.lives.end_moved()
        self.flush()
        return summarize(self.measured, duration_ns, slo, incomplete)

    def timeline(self) -> dict[str, Any]:
        """Return the run in at most `num_buckets` equal buckets:
        lists of one number per bucket, None where nothing was measured."""
        self.flush()
        return series(self.load.timeline, self.measured.capacity)

    def close(self) -> None:
        """Process the remaining notes and end the files. A second call does nothing."""
        self.lives.end()
        self.flush()
        files, self.files = self.files, []
        for file in files:
            file.close()


def _starts_of(slots: np.ndarray) -> np.ndarray:
    """Return where the entries of each request begin, in `slots` that are sorted: int64 [requests]."""
    return np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
