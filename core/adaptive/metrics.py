"""What adaptive steps report: acceptance counters over all verified rows, and the gauges of the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AdaptiveMetrics:
    """Counters since the start, with the controller's state.

    `accept_length` is 1 + correct drafts / verified rows and `accept_rate` accepted / proposed draft tokens; both are
    0.0 when nothing was verified or proposed. `correct_drafts_histogram[n]` counts rows with n correct drafts.
    `ema_accept_len` maps the lower bound of each range in which drafts were verified to its slot's EMA (empty for policies without one).
    `switches` counts changes of choice, `activations` changes of the steps that are launched (batch sizes differ).
    """

    steps: int | None
    num_draft_tokens: int | None
    switches: int
    activations: int
    ema_accept_len: Mapping[int, float]
    verify_calls: int
    verified_rows: int
    correct_drafts: float
    proposed_drafts: int
    accept_length: float
    accept_rate: float
    correct_drafts_histogram: tuple[int, ...]


class AdaptiveCounters:
    """Accumulates verify results of rows whose requests are still alive."""

    def __init__(self, max_num_draft_tokens: int) -> None:
        self._histogram = [0] * max_num_draft_tokens
        self._calls = 0
        self._rows = 0
        self._correct: float = 0
        self._proposed = 0

    def add(self, counts: Sequence[int], correct: float, rows: int, proposed_per_row: int, calls: int = 1) -> None:
        """Add one verify call, or several: `counts[n]` rows with n correct drafts, each of `proposed_per_row` draft tokens."""
        histogram = self._histogram
        if len(counts) > len(histogram):
            histogram += [0] * (len(counts) - len(histogram))
        for correct_drafts, count in enumerate(counts):
            if count:
                histogram[correct_drafts] += count
        self._calls += calls
        self._rows += rows
        self._correct += correct
        self._proposed += rows * proposed_per_row

    def read(self, gauges: Mapping[str, Any]) -> AdaptiveMetrics:
        rows, correct, proposed = self._rows, self._correct, self._proposed
        return AdaptiveMetrics(
            **gauges,
            verify_calls=self._calls,
            verified_rows=rows,
            correct_drafts=correct,
            proposed_drafts=proposed,
            accept_length=1 + correct / rows if rows else 0.0,
            accept_rate=correct / proposed if proposed else 0.0,
            correct_drafts_histogram=tuple(self._histogram),
        )
