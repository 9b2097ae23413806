"""Tokens that a step in flight computes for a request that is retracted before the step is committed.

By most rules they are dropped, and computed again. With `ServerRules.delivers_late_tokens` they count as emitted: the
request waits with them as part of its context, and may end while it waits. It enters again when they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ...contract.request import cut_runs
from ...contract.step import DecodeResult, PrefillResult
from ..flights import StepInFlight
from ..life import RequestRecord, RequestState

RowEpoch = tuple[int, int]


class LateRun(NamedTuple):
    """What has arrived for a waiting request."""

    record: RequestRecord
    has_ended: bool
    stopped: bool


class LateTokens:
    """The requests that were retracted while a step in flight computed tokens for them."""

    def __init__(self, is_delivered: bool) -> None:
        """Expect nothing yet. `is_delivered`: late tokens are delivered at all."""
        self._is_delivered = is_delivered
        self._expected: dict[RowEpoch, RequestRecord] = {}

    def expect(self, record: RequestRecord, in_flight: Iterable[StepInFlight]) -> None:
        """Wait for the tokens of a request that leaves its row, if a step in flight computes any."""
        if self._is_delivered and any(flight.emits_for(record.row) for flight in in_flight):
            self._expected[record.row, record.epoch] = record

    def is_expected(self, record: RequestRecord) -> bool:
        """Return whether tokens for this waiting request are still to come."""
        return any(expected is record for expected in self._expected.values())

    def clear(self) -> None:
        """Expect nothing: the steps in flight are lost."""
        self._expected.clear()

    def first_tokens(self, flight: StepInFlight, result: PrefillResult) -> list[LateRun]:
        """Deliver the tokens after prompts whose requests were retracted."""
        prefill = flight.step.prefill
        if prefill is None or not self._expected:
            return []
        arrived: list[LateRun] = []
        for i, place in enumerate(zip(prefill.rows.tolist(), prefill.epochs.tolist(), strict=True)):
            record = self._take(place) if prefill.is_last[i] else None
            if record is not None:
                stopped = result.stopped is not None and bool(result.stopped[i])
                tokens = None if result.tokens is None else result.tokens[i : i + 1]
                arrived.append(_deliver(record, 1, stopped, tokens))
        return arrived

    def runs(self, flight: StepInFlight, result: DecodeResult, kept: np.ndarray) -> list[LateRun]:
        """Deliver the tokens of rounds whose requests were retracted, and count them in `kept` int64 [rounds, bs]."""
        decode = flight.step.decode
        if decode is None or not self._expected:
            return []
        arrived: list[LateRun] = []
        for i, place in enumerate(zip(decode.rows.tolist(), decode.epochs.tolist(), strict=True)):
            record = self._take(place)
            if record is None:
                continue
            before = int(result.accept_lens[:-1, i].sum())
            stops = None if result.stop_index is None else result.stop_index[-1, i : i + 1]
            remaining = np.array([record.max_tokens - record.emitted_before - before])
            run = cut_runs(result.accept_lens[-1, i : i + 1], stops, remaining)
            kept[:-1, i], kept[-1, i] = result.accept_lens[:-1, i], run.kept[0]
            tokens = None
            if result.tokens is not None:
                tokens = np.concatenate([row[i, :count] for row, count in zip(result.tokens, kept[:, i], strict=True)])
            arrived.append(_deliver(record, before + int(run.kept[0]), bool(run.stopped[0]), tokens))
        return arrived

    def _take(self, place: RowEpoch) -> RequestRecord | None:
        record = self._expected.pop(place, None)
        return record if record is not None and record.state is RequestState.WAITING else None


def _deliver(record: RequestRecord, count: int, stopped: bool, tokens: np.ndarray | None) -> LateRun:
    record.emitted_before += count
    if record.context is not None and tokens is not None:
        record.context = np.concatenate([record.context, tokens.astype(record.context.dtype)])
    elif record.context is not None:
        record.context = record.request.continued(record.prompt_len + record.emitted_before)
    return LateRun(record, stopped or record.emitted_before == record.max_tokens, stopped)
