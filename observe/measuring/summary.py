"""The summary of a run: flat names, those of the serving benchmarks of vLLM and SGLang where they have one.

Latencies are of completed requests (ended by stop or length), in milliseconds:

    ttft   arrival to first token          itl    gap between two emissions of a request, one per verify round
    e2el   arrival to last token           tpot   (e2el − ttft) / (output tokens − 1), of requests with at least 2

Percentiles are interpolated; those of itl come from a histogram and are off by at most 0.1 %. `total_*_tokens` and the
throughputs count completed requests, `delivered_tokens` all delivered tokens. What is undefined (no requests, no SLO)
is None, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.contract.arrays import Float64Array
from ...core.errors import InvariantViolation
from .histogram import GaugeAreas, LogHistogram, added_counts
from .lives import GrowingColumn, ReplicaMetrics

SHORT_NAMES = {  # what a simulation and a measurement of the same load are compared by
    "output_throughput": "tokens/s",
    "mean_ttft_ms": "TTFT mean",
    "p99_ttft_ms": "TTFT p99",
    "mean_tpot_ms": "TPOT mean",
    "p99_tpot_ms": "TPOT p99",
    "median_itl_ms": "ITL p50",
    "p99_itl_ms": "ITL p99",
    "accept_length": "accept length",
    "mean_running": "batch",
}
LEAST_PROCESSOR_SHARE = 0.9
"""Of the time that a measuring process works: with less of a processor, what it measures in wall time are the other
processes of the machine, and counts as not measured."""
REASONS = ("refused", "stop", "length", "abort", "error", "transferred")  # by FinishReason; 0 never entered
GAUGES = ("running", "waiting", "held", "system")
TOTALS = (
    "submitted",
    "input_tokens",
    "output_tokens",
    "delivered_tokens",
    "truncated",
    "retractions",
    "looked_up_tokens",
    "cached_tokens",
    "loaded_tokens",
    "verified_rows",
    "correct_drafts",
    "proposed_drafts",
    "decode_rounds",
    "committed_steps",
    "prefill_tokens",
    "switches",
    "lost_steps",
    "restarts",
)
PERCENTILES = (90, 95, 99)
CURVE_SHARES = tuple(
    sorted(
        {
            *(i / 100 for i in range(100)),
            *(round(1 - 10**-nines * i, 6) for nines in (3, 4, 5) for i in range(1, 10)),
            1.0,
        }
    )
)
"""Shares of all values at which a distribution's curve is drawn:
every percent, and towards the tail ten times as fine for each nine."""
_MS = 1e-6  # per nanosecond
ROUNDING = 1e-9  # of a sum of shares


def _nanoseconds() -> GrowingColumn:
    return GrowingColumn(np.int64)


@dataclass(slots=True)
class Measurements:
    """The sums and values that a summary is made of."""

    replicas: dict[int, ReplicaMetrics] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # requests by their end
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    itl: LogHistogram = field(default_factory=LogHistogram)
    ttft_ns: GrowingColumn = field(default_factory=_nanoseconds)  # of completed requests, as the next two
    e2el_ns: GrowingColumn = field(default_factory=_nanoseconds)
    num_output: GrowingColumn = field(default_factory=lambda: GrowingColumn(np.int64))
    # draft steps -> verified rows by correct drafts
    drafts_by_steps: dict[int, np.ndarray] = field(default_factory=dict)
    rounds_at_steps: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    gauges: GaugeAreas = field(default_factory=lambda: GaugeAreas(len(GAUGES)))
    empty_system: np.ndarray = field(default_factory=lambda: np.zeros((0, 1 + len(GAUGES)), np.int64))  # later samples
    first_ns: int | None = None
    last_ns: int = 0

    def add_completed(
        self, arrival_ns: np.ndarray, first_ns: np.ndarray, finish_ns: np.ndarray, num_output: np.ndarray
    ) -> None:
        """Note the times and output tokens of completed requests, int64 [n] each."""
        self.ttft_ns.extend(first_ns - arrival_ns)
        self.e2el_ns.extend(np.maximum(finish_ns, first_ns) - arrival_ns)
        self.num_output.extend(num_output)

    @property
    def capacity(self) -> int:
        """KV slots of all replicas."""
        return sum(state.capacity for state in self.replicas.values())


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a good request keeps to; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    attainment: float = 0.99
    """The share of requests that `slo_taken` is about."""

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2el_ms))


def summarize(measured: Measurements, duration_ns: int | None, slo: SLO | None, incomplete: bool) -> dict[str, Any]:
    """Return the flat summary of a run."""
    given_ns = duration_ns
    if duration_ns is None:
        duration_ns = measured.last_ns - (measured.first_ns or 0)
    seconds = duration_ns / 1e9
    counts, totals = measured.counts, measured.totals
    completed = counts["stop"] + counts["length"]
    unfinished = sum(len(state.account.requests) for state in measured.replicas.values())
    total_tokens = totals["input_tokens"] + totals["output_tokens"]
    summary: dict[str, Any] = {
        "incomplete": bool(incomplete or unfinished),
        "submitted": totals["submitted"],
        "completed": completed,
        "failed": counts["error"],
        "refused": counts["refused"],
        "aborted": counts["abort"] + sum(len(state.account.leaving) for state in measured.replicas.values()),
        "unfinished": unfinished,
        "truncated": totals["truncated"],
        "retractions": totals["retractions"],
        "duration": seconds,
        "total_input_tokens": totals["input_tokens"],
        "total_output_tokens": totals["output_tokens"],
        "mean_input_tokens": ratio(totals["input_tokens"], completed),
        "mean_output_tokens": ratio(totals["output_tokens"], completed),
        "delivered_tokens": totals["delivered_tokens"],
        "request_throughput": ratio(completed, seconds),
        "output_throughput": ratio(totals["output_tokens"], seconds),
        "total_token_throughput": ratio(total_tokens, seconds),
    }
    summary.update(_goodput(measured, seconds, slo))
    summary.update(latencies(measured))
    summary.update(_speculation(measured))
    summary.update(_resources(measured, duration_ns, _mean_gauges(measured, given_ns)))
    return summary


def ratio(amount: float, of: float) -> float | None:
    return float(amount) / of if of else None


def share(amount: float, of: float) -> float | None:
    """Return a part of a whole, 0 … 1, or None of nothing. Raises InvariantViolation SIM-07 for more than the whole."""
    if not 0 <= amount <= of * (1 + ROUNDING):
        raise InvariantViolation("SIM-07", f"{amount} of {of} is no share")
    return min(float(amount) / of, 1.0) if of else None


def _tpot_ns(measured: Measurements) -> Float64Array:
    """Return tpot per completed request, float64; 0 where there is but one token."""
    decoding = measured.e2el_ns.values - measured.ttft_ns.values
    per_token: Float64Array = decoding / np.maximum(measured.num_output.values - 1, 1)
    return per_token


def _goodput(measured: Measurements, seconds: float, slo: SLO | None) -> dict[str, Any]:
    """Return the rate of completed requests that met every limit, their share of all requests, without those that
    clients gave up, and the factor on all limits with which `slo.attainment` of these would meet them (None: no factor
    does)."""
    if slo is None or not slo.has_limits:
        return {"request_goodput": None, "slo_attainment": None, "slo_taken": None}
    taken = np.zeros(len(measured.ttft_ns.values))
    for values, limit in (
        (measured.ttft_ns.values, slo.ttft_ms),
        (_tpot_ns(measured), slo.tpot_ms),
        (measured.e2el_ns.values, slo.e2el_ms),
    ):
        if limit is not None:
            taken = np.maximum(taken, values / (limit / _MS))
    good = int((taken <= 1).sum())
    ended = len(taken) + measured.counts["error"] + measured.counts["refused"]
    last = math.ceil(slo.attainment * ended - 1e-9)  # the request, by what it takes, that must be within the limits
    factor = float(np.sort(taken)[last - 1]) if 0 < last <= len(taken) else None
    return {
        "request_goodput": ratio(good, seconds),
        "slo_attainment": share(good, ended),
        "slo_taken": factor,
    }


def latencies(measured: Measurements) -> dict[str, Any]:
    """Return mean, median, standard deviation and percentiles of ttft, tpot, itl and e2el, in ms;
    None without a value."""
    several = measured.num_output.values > 1
    named: dict[str, Any] = {}
    named.update(_of_values("ttft", measured.ttft_ns.values))
    named.update(_of_values("tpot", _tpot_ns(measured)[several]))
    named.update(_of_histogram("itl", measured.itl))
    named.update(_of_values("e2el", measured.e2el_ns.values))
    gaps = measured.itl.quantiles(CURVE_SHARES) if measured.itl.count else []
    return named | {"itl_quantiles_ms": [gap * _MS for gap in gaps]}


def _named(name: str, mean: float | None, std: float | None, quantiles: list[float | None]) -> dict[str, Any]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES)]
    values = [mean, quantiles[0], std, *quantiles[1:]]
    return {key: None if value is None else float(value) * _MS for key, value in zip(keys, values, strict=True)}


def _of_values(name: str, values: np.ndarray) -> dict[str, Any]:
    if not len(values):
        return _named(name, None, None, [None] * (1 + len(PERCENTILES)))
    return _named(name, values.mean(), values.std(), np.percentile(values, [50, *PERCENTILES]).tolist())


def _of_histogram(name: str, histogram: LogHistogram) -> dict[str, Any]:
    return _named(name, histogram.mean, histogram.std, [histogram.quantile(p / 100) for p in (50, *PERCENTILES)])


def _speculation(measured: Measurements) -> dict[str, Any]:
    """Return the numbers of speculation. `accept_length` = 1 + correct drafts / verified rows, over rows that still
    belonged to their request; `switches` are changes of the draft steps between consecutive decode rounds of a
    replica."""
    totals = measured.totals
    histogram = np.zeros(1, dtype=np.int64)
    for counts in measured.drafts_by_steps.values():
        histogram = added_counts(histogram, counts.copy())
    correct, proposed = totals["correct_drafts"], totals["proposed_drafts"]
    per_row = ratio(correct, totals["verified_rows"])
    summary: dict[str, Any] = {
        "accept_length": None if per_row is None else 1 + per_row,
        "accept_rate": share(correct, proposed),
        "verified_rows": totals["verified_rows"],
        "correct_drafts": correct,
        "proposed_drafts": proposed,
        "wasted_draft_tokens": proposed - correct,
        "wasted_draft_share": share(proposed - correct, proposed),
        "correct_drafts_histogram": histogram.tolist(),
        "decode_rounds": totals["decode_rounds"],
        "committed_steps": totals["committed_steps"],
        "switches": totals["switches"],
        "lost_steps": totals["lost_steps"],
        "restarts": totals["restarts"],
    }
    for steps, rounds in enumerate(measured.rounds_at_steps.tolist()):
        if rounds:
            summary[f"rounds_at_steps_{steps}"] = share(rounds, totals["decode_rounds"])
    for steps, counts in sorted(measured.drafts_by_steps.items()):
        summary[f"correct_drafts_at_steps_{steps}"] = counts.tolist()
    return summary


def _resources(measured: Measurements, duration_ns: int, mean_gauges: list[float | None]) -> dict[str, Any]:
    replicas = [measured.replicas[number] for number in sorted(measured.replicas)]
    running, waiting, held, system = mean_gauges
    max_running, max_waiting, _, max_system = measured.gauges.maxima
    capacity = measured.capacity
    peaks = [min(state.max_held / state.capacity, 1.0) for state in replicas if state.capacity]
    busy = [None if state.busy_ns is None else share(state.busy_ns, duration_ns) for state in replicas]
    known = [part for part in busy if part is not None]
    return {
        "prefill_tokens": measured.totals["prefill_tokens"],
        "prefix_cache_hit_rate": share(measured.totals["cached_tokens"], measured.totals["looked_up_tokens"]),
        **_from_host(measured.totals),
        "kv_capacity_slots": capacity or None,
        "kv_occupancy_mean": share(held, capacity) if held is not None else None,
        "kv_occupancy_max": max(peaks, default=None),
        "mean_concurrency": system,
        "max_concurrency": max_system,
        "mean_running": running,
        "max_running": max_running,
        "mean_queue_length": waiting,
        "max_queue_length": max_waiting,
        "replicas": len(replicas),
        "device_busy_share": share(sum(known), len(known)),
        "device_busy_share_per_replica": busy,
    }


def _from_host(totals: Mapping[str, int]) -> dict[str, Any]:
    """Return the share of looked-up tokens that came from host memory, if any did."""
    if not totals["loaded_tokens"]:
        return {}
    return {"host_cache_hit_rate": share(totals["loaded_tokens"], totals["looked_up_tokens"])}


def _mean_gauges(measured: Measurements, duration_ns: int | None) -> list[float | None]:
    """Return the gauges' means over the run. Rows that engines still hold after its end, for late messages of peers, do
    not count.

    Where a host's clock jumped, events may bear later times than the run's end: then the means are over the time that
    they show.
    """
    begin_ns = (measured.first_ns or 0) if duration_ns is None else 0
    end_ns = max(measured.last_ns if duration_ns is None else duration_ns, measured.gauges.end_ns)
    areas = list(measured.gauges.areas)
    empty = measured.empty_system
    times = np.minimum(np.append(empty[:, 0], end_ns), end_ns)
    for i, row in enumerate(empty[:, 1:].T.astype(object)):
        areas[i] += int((row * np.diff(times)).sum())
    return [ratio(area, end_ns - begin_ns) for area in areas]
