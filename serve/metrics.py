"""The metrics of a server, for Prometheus, read when `/metrics` is asked for. Each number is counted on one thread:
arrivals, refusals and delays in the event loop, all else on the scheduler's thread.

The engines' own counters and gauges are read at each request. This module counts what engines do not count: latencies,
ends, and accepted drafts. Times are those of the body; for a simulated deployment they are simulated times, at any
speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.contract.events import Committed, Event, EventSink, Planned, Resumed, StepsLost
from ..core.contract.request import FinishedRequest, FinishReason
from ..core.errors import ConfigError, nearest
from ..core.scheduler.engine import Engine
from .bodies.pace import Pace
from .bodies.port import Order, Piece
from .errors import is_full

_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}

# What is measured → its name with vLLM's and with SGLang's dashboards, None: theirs have none. Ours are vLLM's with
# another prefix.
NAMES: Mapping[str, tuple[str | None, str | None, str]] = {
    "running": ("num_requests_running", "num_running_reqs", "Requests that have a row of the batch."),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "Requests that wait for a row or for memory."),
    "kv_use": ("kv_cache_usage_perc", "token_usage", "Share of KV slots that no new request can get, 0 to 1."),
    "prefix_queries": ("prefix_cache_queries", None, "Prompt tokens that were looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "cached_tokens", "Prompt tokens that were found in the prefix cache."),
    "hit_rate": (None, "cache_hit_rate", "Share of looked-up tokens that the prefix cache had, since the start."),
    "prompt_tokens": ("prompt_tokens", "prompt_tokens", "Tokens of prompts."),
    "output_tokens": ("generation_tokens", "generation_tokens", "Tokens of outputs."),
    "ended": ("request_success", None, "Requests that ended, by reason."),
    "requests": (None, "num_requests", "Requests that ended."),
    "aborted": (None, "num_aborted_requests", "Requests that were aborted."),
    "retractions": ("num_preemptions", "num_retracted_requests", "Times that a running request was retracted."),
    "ttft": ("time_to_first_token_seconds", "time_to_first_token_seconds", "Time from arrival to the first token."),
    "itl": ("inter_token_latency_seconds", "inter_token_latency_seconds", "Time between two emissions of a request."),
    "tpot": ("request_time_per_output_token_seconds", "time_per_output_token_seconds", "Mean time per token after the first."),
    "e2e": ("e2e_request_latency_seconds", "e2e_request_latency_seconds", "Time from arrival to the end."),
    "delay": ("response_delay_seconds", None, "Real time from a round's end until its text is at the client's socket."),
    "rounds": ("spec_decode_num_drafts", None, "Verified drafts: rounds, counted per request."),
    "drafted": ("spec_decode_num_draft_tokens", None, "Draft tokens that were verified."),
    "accepted": ("spec_decode_num_accepted_tokens", None, "Draft tokens that were accepted."),
    "accepted_at": ("spec_decode_num_accepted_tokens_per_pos", None, "Accepted draft tokens by their position in the draft."),
    "accept_length": ("spec_decode_accept_length", "spec_accept_length", "Tokens per verified draft, bonus included, since the start."),
    "accept_rate": (None, "spec_accept_rate", "Share of the verified draft tokens that were accepted, since the start."),
    "steps": ("spec_decode_num_steps", None, "Draft steps of the newest decode round."),
    "refused": ("requests_refused", None, "Requests that were refused because too many were being served."),
    "behind": ("behind_real_time_seconds", None, "How late the simulation is, in real seconds; 0 if it keeps up."),
    "possible_speed": ("possible_speed", None, "Greatest --speed that can be expected to hold at the load of the last seconds."),
    "failures": ("steps_lost", None, "Steps of the device that failed."),
}  # fmt: skip
STYLES = ("foredraft", "vllm", "sglang")
OWN = (
    *("response_delay_seconds", "spec_decode_accept_length", "spec_decode_num_steps", "requests_refused", "steps_lost"),
    *("behind_real_time_seconds", "possible_speed"),
)
"""Names that vLLM does not have: shown with our prefix in its style, too."""


class _Histogram:
    """Counts of seconds by bucket, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        edges = [*map(str, _SECONDS), "+Inf"]
        return list(zip(edges, np.cumsum(self.counts).tolist(), strict=True))


class _Times:
    """When a request came, and when its tokens did."""

    __slots__ = ("arrival_ns", "first_ns", "last_ns", "num_tokens")

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = arrival_ns
        self.first_ns = self.last_ns = -1
        self.num_tokens = 0


class ServerMetrics:
    """Counts since the start. `sink(i)` is an event sink of engine i; `engines` are set once they are made."""

    def __init__(self) -> None:
        self.engines: Sequence[Engine] = ()
        self.pace: Pace | None = None
        self.num_refused = 0  # by the limit of outputs
        self.num_queue_full = 0  # by the engine's limit of its queue
        self.totals: Counter[str] = Counter()
        self.ended: Counter[str] = Counter(dict.fromkeys(_REASONS.values(), 0))
        self.accepted_at: list[int] = []
        self.steps: dict[int, int] = {}
        self.histograms: dict[str, _Histogram] = {
            name: _Histogram() for name in ("ttft", "itl", "tpot", "e2e", "delay")
        }
        self._open: dict[str, _Times] = {}

    def sink(self, engine: int) -> EventSink:
        """Return a sink that counts accepted drafts, retractions and failed steps."""

        def take(event: Event) -> None:
            if isinstance(event, Planned | StepsLost | Resumed):
                self.totals["retractions"] += len(event.retracted)
                self.totals["failures"] += isinstance(event, StepsLost)
            elif isinstance(event, Committed) and event.kept is not None:
                decode, result = event.step.decode, event.result.decode
                assert decode is not None and result is not None, "only a decode keeps tokens"
                self.steps[engine] = decode.steps
                self._count_drafts(result.accept_lens[event.kept > 0], decode.num_draft_tokens - 1)

        return take

    def _count_drafts(self, accept_lens: np.ndarray, drafted: int) -> None:
        accepted = (accept_lens - 1).clip(min=0)
        self.totals["rounds"] += len(accepted)
        self.totals["drafted"] += drafted * len(accepted)
        self.totals["accepted"] += int(accepted.sum())
        exactly = np.bincount(accepted)
        at_least = (np.cumsum(exactly[::-1])[::-1])[1:].tolist()
        self.accepted_at += [0] * (max(drafted, len(at_least)) - len(self.accepted_at))
        for position, count in enumerate(at_least):
            self.accepted_at[position] += count

    def ordered(self, order: Order, arrival_ns: int) -> None:
        """Note a request that goes to the body."""
        self._open[order.request_id] = _Times(arrival_ns)
        self.totals["prompt_tokens"] += len(order.prompt)

    def deliver(self, pieces: Sequence[Piece]) -> None:
        """Count the results of a turn."""
        for piece in pieces:
            times = self._open[piece.request_id]
            if piece.tokens:
                if times.num_tokens:
                    self.histograms["itl"].add((piece.at_ns - times.last_ns) / 1e9)
                else:
                    times.first_ns = piece.at_ns
                    self.histograms["ttft"].add((piece.at_ns - times.arrival_ns) / 1e9)
                times.last_ns = piece.at_ns
                times.num_tokens += len(piece.tokens)
                self.totals["output_tokens"] += len(piece.tokens)
            if piece.finished is not None:
                self._end(piece.finished, piece.at_ns, self._open.pop(piece.request_id))

    def _end(self, end: FinishedRequest, at_ns: int, times: _Times) -> None:
        reason = end.reason
        if reason is FinishReason.ERROR and is_full(end.message):
            self.num_queue_full += 1
            return
        self.ended[_REASONS[reason]] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.histograms["e2e"].add((at_ns - times.arrival_ns) / 1e9)
            if times.num_tokens > 1:
                self.histograms["tpot"].add((times.last_ns - times.first_ns) / 1e9 / (times.num_tokens - 1))

    def values(self) -> dict[str, float]:
        """Return the numbers that have no further label, over all engines."""
        stores = [engine.store for engine in self.engines]
        caches = [store.cache for store in stores if store.cache is not None]
        slots = sum(store.allocator.num_total_slots for store in stores)
        queries, hits = sum(cache.queries for cache in caches), sum(cache.hits for cache in caches)
        totals = self.totals
        return {
            "running": sum(len(engine.requests.running) for engine in self.engines),
            "waiting": sum(engine.num_waiting for engine in self.engines),
            "kv_use": 1 - sum(store.available_slots for store in stores) / slots if slots else 0.0,
            "prefix_queries": queries,
            "prefix_hits": hits,
            "hit_rate": hits / queries if queries else 0.0,
            "requests": sum(self.ended.values()),
            "aborted": self.ended["abort"],
            "accept_length": 1 + totals["accepted"] / totals["rounds"] if totals["rounds"] else 0.0,
            "accept_rate": totals["accepted"] / totals["drafted"] if totals["drafted"] else 0.0,
            "steps": max(self.steps.values(), default=0),
            "refused": self.num_refused + self.num_queue_full,
            **self._pace_values(),
            **{name: totals[name] for name in _TOTALS},
        }

    def _pace_values(self) -> dict[str, float]:
        if self.pace is None:
            return {}
        return {"behind": self.pace.behind_s, "possible_speed": self.pace.possible_speed or math.nan}


_TOTALS = ("prompt_tokens", "output_tokens", "retractions", "rounds", "drafted", "accepted", "failures")
_MODEL = "model_name"
"""The label that every metric has."""
_GAUGES = (
    "running",
    "waiting",
    "kv_use",
    "hit_rate",
    "accept_length",
    "accept_rate",
    "steps",
    "behind",
    "possible_speed",
)


class Exposition(Collector):
    """Writes `metrics` with the names of `style`: foredraft, vllm or sglang. Raises ConfigError for another."""

    def __init__(self, metrics: ServerMetrics, model: str, style: str = "foredraft") -> None:
        if style not in STYLES:
            message = f"{style!r} is none of {', '.join(STYLES)}{nearest(style, STYLES)}"
            raise ConfigError.of("<arguments>", "metrics_as", message)
        self._metrics = metrics
        self._model = model
        self._style = style
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def __call__(self) -> tuple[bytes, str]:
        """Return the text of `/metrics` and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        values = self._metrics.values()
        for key in NAMES:
            name, text = self._name(key), NAMES[key][2]
            if name is None:
                continue
            if key in self._metrics.histograms:
                yield self._histogram(self._metrics.histograms[key], name, text)
            elif key == "ended":
                yield self._counters(self._metrics.ended.items(), name, text, "finished_reason")
            elif key == "accepted_at":
                by_position = ((str(position), count) for position, count in enumerate(self._metrics.accepted_at))
                yield self._counters(by_position, name, text, "position")
            elif key in values:
                kind = GaugeMetricFamily if key in _GAUGES else CounterMetricFamily
                family = kind(name, text, labels=[_MODEL])
                family.add_metric([self._model], values[key])
                yield family

    def _histogram(self, histogram: _Histogram, name: str, text: str) -> Metric:
        family = HistogramMetricFamily(name, text, labels=[_MODEL])
        family.add_metric([self._model], histogram.buckets(), histogram.total)
        return family

    def _counters(self, counts: Iterable[tuple[str, int]], name: str, text: str, label: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=[_MODEL, label])
        for value, count in counts:
            family.add_metric([self._model, value], count)
        return family

    def _name(self, key: str) -> str | None:
        vllm, sglang, _ = NAMES[key]
        if self._style == "sglang":
            return None if sglang is None else f"sglang:{sglang}"
        if vllm is None:
            return None
        return f"{'foredraft' if self._style == 'foredraft' or vllm in OWN else 'vllm'}:{vllm}"
