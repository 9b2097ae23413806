"""What adaptive steps report: acceptance counters over all verified rows, and the gauges of the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AdaptiveMetrics:
    """Counters of a window, with the controller's state at its end.

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
        self._window_start = self._state()

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

    def _state(self) -> tuple[int, int, float, int, list[int]]:
        return self._calls, self._rows, self._correct, self._proposed, list(self._histogram)

    def read(self, gauges: Mapping[str, Any]) -> AdaptiveMetrics:
        return _metrics(self._state(), gauges)

    def read_window(self, gauges: Mapping[str, Any]) -> AdaptiveMetrics:
        """Return everything since the last window; the next window begins here."""
        now, then = self._state(), self._window_start
        self._window_start = now
        old = then[4] + [0] * (len(now[4]) - len(then[4]))
        histogram = [a - b for a, b in zip(now[4], old, strict=True)]
        return _metrics((now[0] - then[0], now[1] - then[1], now[2] - then[2], now[3] - then[3], histogram), gauges)


def _metrics(state: tuple[int, int, float, int, list[int]], gauges: Mapping[str, Any]) -> AdaptiveMetrics:
    calls, rows, correct, proposed, histogram = state
    return AdaptiveMetrics(
        **gauges,
        verify_calls=calls,
        verified_rows=rows,
        correct_drafts=correct,
        proposed_drafts=proposed,
        accept_length=1 + correct / rows if rows else 0.0,
        accept_rate=correct / proposed if proposed else 0.0,
        correct_drafts_histogram=tuple(histogram),
    )
