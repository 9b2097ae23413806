"""What a server counts, engine by engine. Each number is counted on one thread: arrivals, refusals, delays and the
longest outputs in the event loop, all else on the scheduler's thread.

The engines' own counters and gauges are read at each request of `/metrics`. Times are those of the body; for a
simulated deployment they are simulated times, at any speed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...core.contract.events import Committed, Event, EventSink, Planned, Resumed, StepsLost
from ...core.contract.request import FinishedRequest, FinishReason
from ...core.scheduler.engine import Engine
from ...observe.measuring.gauges import count_drafts, gauges_of
from ..base.errors import is_full
from ..base.pace import ClockPace
from ..base.port import Order, Piece, RemoteEngine
from .series import ALL_EDGES, Buckets

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
SECOND_NS = 10**9


class Histogram:
    """Counts of values between the edges of all buckets, and their sum."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(ALL_EDGES) + 1)
        self.total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(ALL_EDGES, value)] += 1
        self.total += value

    def at_most(self, edges: Buckets) -> list[int]:
        """Return how many values are at most each edge, and how many there are."""
        below = np.cumsum(self.counts)
        return [*(int(below[bisect_left(ALL_EDGES, edge)]) for edge in edges), int(below[-1])]


def merged(histograms: Sequence[Histogram]) -> Histogram:
    """Return the histogram of all values."""
    found = Histogram()
    found.counts = np.sum([found.counts, *(one.counts for one in histograms)], axis=0).tolist()
    found.total = sum(one.total for one in histograms)
    return found


def _push(events: deque[tuple[int, int]], now_ns: int, number: int) -> None:
    """Add an event to those of the last second."""
    events.append((now_ns, number))
    while events[0][0] <= now_ns - SECOND_NS:
        events.popleft()


def _newest(events: deque[tuple[int, int]], now_ns: int) -> int:
    return sum(number for at_ns, number in tuple(events) if at_ns > now_ns - SECOND_NS)


class Life:
    """A request so far: what it asks for, when it came, was admitted and got tokens, and where."""

    __slots__ = (
        *("admitted_ns", "arrival_ns", "engine", "first_ns", "last_ns", "max_tokens", "order"),
        *("num_cached", "num_prompt", "num_retractions", "num_tokens", "streams"),
    )

    def __init__(self, order: Order, arrival_ns: int) -> None:
        self.order = order
        self.arrival_ns = arrival_ns
        self.admitted_ns = self.first_ns = self.last_ns = -1
        self.engine = 0
        self.num_prompt: int = len(order.prompt)
        self.max_tokens: int = order.max_tokens
        self.num_tokens = self.num_cached = self.num_retractions = 0
        self.streams = "true" if order.streams else "false"


class EngineCounts:
    """Counts of one engine since the start: numbers by what they count and a label ("": none), and histograms."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[str, str]] = Counter(
            {("ended", reason): 0 for reason in REASONS.values()}
            | {(key, "true" if streams else "false"): 0 for key in _OF_STREAMS for streams in (False, True)}
        )
        self.histograms: dict[tuple[str, str], Histogram] = {(key, ""): Histogram() for key in _HISTOGRAMS}
        for key in _HISTOGRAMS_OF_STREAMS:
            self.histograms |= {(key, streams): Histogram() for streams in ("false", "true")}
        self.newest: dict[str, float] = dict.fromkeys(("steps", "nodes", "sum_seq_lens"), 0)
        # Of the last second of events: (ns, output tokens), and (ns, retracted requests).
        self.emitted: deque[tuple[int, int]] = deque()
        self.retracted: deque[tuple[int, int]] = deque()
        self.hears_events: bool = True

    def hear_no_events(self) -> None:
        """Leave out what only the events of an engine say: it is in another process."""
        self.hears_events = False
        self.newest = {}
        del self.histograms["step_tokens", ""]

    def take(self, event: Event, lives: Mapping[str, Life], engine: int) -> None:
        """Count an event of the engine."""
        if isinstance(event, Planned | StepsLost | Resumed):
            if event.retracted:
                self._retract(event.retracted, event.now_ns, lives)
            self.totals["failures", ""] += isinstance(event, StepsLost)
        if isinstance(event, Planned) and event.step is not None:
            for join in event.step.joins:
                if (life := lives.get(join.request.request_id)) is not None:
                    life.engine = engine
                    self.admit(life, event.now_ns, join.num_cached, join.num_loaded, join.num_received)
        elif isinstance(event, Committed):
            self._commit(event)

    def _retract(self, retracted: Sequence[str], now_ns: int, lives: Mapping[str, Life]) -> None:
        _push(self.retracted, now_ns, len(retracted))
        self.totals["retractions", ""] += len(retracted)
        for request_id in retracted:
            if (life := lives.get(request_id)) is not None:
                life.num_retractions += 1
                self.totals["retracted_prompt", ""] += life.num_prompt
                self.totals["retracted_output", ""] += life.num_tokens

    def admit(self, life: Life, now_ns: int, cached: int, loaded: int = 0, received: int = 0) -> None:
        """Note that a request takes a row; a second time after a retraction, or where its KV was sent to. `cached`
        prompt tokens are in the prefix cache, `loaded` of them in host memory; `received` came from another engine."""
        if life.admitted_ns >= 0 and not received:
            return
        cached = 0 if received else cached
        computed = 0 if received else life.num_prompt - cached
        loaded = min(loaded, cached)
        if life.admitted_ns < 0:
            life.admitted_ns, life.num_cached = now_ns, cached
        totals = self.totals
        totals["prompt_tokens", ""] += life.num_prompt
        totals["cached_tokens", ""] += life.num_prompt - computed
        totals["prompt_by_source", "local_compute"] += computed
        totals["prompt_by_source", "local_cache_hit"] += cached - loaded
        totals["prompt_by_source", "external_kv_transfer"] += life.num_prompt if received else loaded
        totals["external_queries", ""] += life.num_prompt - (cached - loaded)
        totals["external_hits", ""] += loaded
        for source, number in (("device", cached - loaded), ("host", loaded)):
            if number:
                totals["cached_by_source", source] += number
                totals["by_mode", "prefill_cache"] += number

    def _commit(self, event: Committed) -> None:
        totals, step = self.totals, event.step
        count_drafts(totals, event)
        prefilled = 0 if step.prefill is None else int(step.prefill.lens.sum())
        emitted = len(event.first_tokens)
        totals["by_mode", "prefill_compute"] += prefilled
        if event.kept is not None:
            decode = step.decode
            assert decode is not None, "only a decode keeps tokens"
            decoded = int(event.kept.sum())
            emitted += decoded
            totals["by_mode", "decode"] += decoded
            self.newest |= {"steps": decode.shape.steps, "nodes": decode.shape.nodes}
            self.newest["sum_seq_lens"] = int(decode.seq_lens.sum())
        totals["output_tokens", ""] += emitted
        self.histograms["step_tokens", ""].add(prefilled + emitted)
        _push(self.emitted, event.now_ns, emitted)

    def end(self, end: FinishedRequest, at_ns: int, life: Life) -> None:
        """Count the end of a request."""
        totals, streams = self.totals, life.streams
        totals["ended", REASONS[end.reason]] += 1
        totals["prompt_of", streams] += life.num_prompt
        totals["output_of", streams] += life.num_tokens
        totals["requests_of", streams] += 1
        if end.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        add, admitted_ns = self.add, life.admitted_ns if life.admitted_ns >= 0 else at_ns
        add("e2e", (at_ns - life.arrival_ns) / 1e9, streams)
        add("queue", max(admitted_ns - life.arrival_ns, 0) / 1e9)
        add("inference", (at_ns - admitted_ns) / 1e9)
        add("request_prompt", life.num_prompt)
        add("request_output", life.num_tokens)
        add("request_computed", life.num_prompt - life.num_cached)
        add("request_retractions", life.num_retractions)
        add("max_tokens", life.max_tokens)
        if life.num_tokens:
            add("prefill", (life.first_ns - admitted_ns) / 1e9)
            add("decode", (life.last_ns - life.first_ns) / 1e9)
        if life.num_tokens > 1:
            add("tpot", (life.last_ns - life.first_ns) / 1e9 / (life.num_tokens - 1), streams)

    def add(self, key: str, value: float, label: str = "") -> None:
        """Count a value of a histogram."""
        self.histograms[key, label].add(value)


_HISTOGRAMS_OF_STREAMS = ("ttft", "tpot", "e2e")
_HISTOGRAMS = (
    *("itl", "queue", "inference", "prefill", "decode", "request_retractions", "request_prompt", "request_output"),
    *("request_computed", "max_tokens", "n", "longest_output", "step_tokens"),
)
_OF_STREAMS = ("prompt_of", "output_of", "requests_of")


class ServerMetrics:
    """Counts since the start. `sink(i)` is an event sink of engine i; `engines` are set once they are made."""

    def __init__(self) -> None:
        self.engines: Sequence[Engine | RemoteEngine] = ()
        self.pace: ClockPace | None = None
        self.adapters: Sequence[str] = ()
        self.num_refused = 0  # by the limit of outputs
        self.num_queue_full: int = 0  # by the engine's limit of its queue
        self.delay: Histogram = Histogram()
        self.counts: defaultdict[int, EngineCounts] = defaultdict(EngineCounts)
        self.on_end: Callable[[FinishedRequest, int, Life], None] | None = None  # also hears of each end
        self._open: dict[str, Life] = {}

    def sink(self, engine: int) -> EventSink:
        """Return a sink that counts the events of an engine."""
        counts = self.counts[engine]

        def take(event: Event) -> None:
            counts.take(event, self._open, engine)

        return take

    def admitted(self, engine: int, request_id: str, num_cached: int, now_ns: int) -> None:
        """Note that an engine of another process begins a prompt."""
        if (life := self._open.get(request_id)) is not None:
            life.engine = engine
            self.counts[engine].admit(life, now_ns, num_cached)

    def moved(self, engine: int, request_id: str) -> None:
        """Note that an engine of another process has got the KV of a request."""
        if (life := self._open.get(request_id)) is not None:
            life.engine = engine
            self.counts[engine].admit(life, life.admitted_ns, 0, received=life.num_prompt)

    def ordered(self, order: Order, arrival_ns: int) -> Life:
        """Note a request that goes to the body, and return what is known of it."""
        life = self._open[order.request_id] = Life(order, arrival_ns)
        if order.is_first:
            self.counts[0].add("n", order.num_outputs)
        return life

    def replied(self, longest: int) -> None:
        """Note the tokens of the longest output of a request whose outputs have all ended."""
        self.counts[0].add("longest_output", longest)

    def deliver(self, pieces: Sequence[Piece]) -> None:
        """Count the results of a turn."""
        for piece in pieces:
            life = self._open[piece.request_id]
            if piece.tokens:
                counts = self.counts[life.engine]
                if life.num_tokens:
                    counts.add("itl", (piece.at_ns - life.last_ns) / 1e9)
                else:
                    life.first_ns = piece.at_ns
                    counts.add("ttft", (piece.at_ns - life.arrival_ns) / 1e9, life.streams)
                life.last_ns = piece.at_ns
                life.num_tokens += len(piece.tokens)
                if not counts.hears_events:
                    counts.totals["output_tokens", ""] += len(piece.tokens)
                    _push(counts.emitted, piece.at_ns, len(piece.tokens))
            if piece.finished is not None:
                self._end(piece.finished, piece.at_ns, self._open.pop(piece.request_id))

    def _end(self, end: FinishedRequest, at_ns: int, life: Life) -> None:
        if end.reason is FinishReason.ERROR and is_full(end.message):
            self.num_queue_full += 1
        else:
            self.counts[life.engine].end(end, at_ns, life)
        if self.on_end is not None:
            self.on_end(end, at_ns, life)

    # -- as `/metrics` has them ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> dict[str, int]:
        """Requests that ended, by reason, over all engines."""
        return {reason: sum(one.totals["ended", reason] for one in self.counts.values()) for reason in REASONS.values()}

    def server_values(self) -> dict[str, float]:
        """Return the numbers of the server as a whole that have no further label."""
        pace = {}
        if self.pace is not None:
            pace = {"behind": self.pace.behind_s, "possible_speed": self.pace.possible_speed or math.nan}
        return {"refused": self.num_refused + self.num_queue_full, **pace}

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the adapters whose requests run, and those whose requests wait."""
        lives = [life for life in tuple(self._open.values()) if life.order.adapter]
        running = {life.order.adapter for life in lives if life.admitted_ns >= 0}
        waiting = {life.order.adapter for life in lives if life.admitted_ns < 0}
        return sorted(running), sorted(waiting)

    def values(self, number: int, now_ns: int) -> dict[str, float]:
        """Return the numbers of engine `number` that have no further label."""
        engine, counts = self.engines[number], self.counts[number]
        totals, gauges = counts.totals, engine.gauges if isinstance(engine, RemoteEngine) else gauges_of(engine)
        found = {
            "throughput": _newest(counts.emitted, now_ns),
            "aborted": totals["ended", "abort"],
            **counts.newest,
            **{key: totals[key, ""] for key in _TOTALS if counts.hears_events or (key, "") in totals},
            **gauges,
        }
        if counts.hears_events:
            found["retracted_now"] = _newest(counts.retracted, now_ns)
            if not gauges["running"]:
                found["sum_seq_lens"] = 0
        if "prefix_queries" in gauges:
            found["hit_rate"] = gauges["prefix_hits"] / gauges["prefix_queries"] if gauges["prefix_queries"] else 0.0
        if "host_used" in gauges:
            found |= {key: totals[key, ""] for key in ("external_queries", "external_hits")}
            found["prefix_hits"] -= totals["external_hits", ""]  # the engine counts both
        if rounds := totals["rounds", ""]:
            found["accept_length"] = 1 + totals["accepted", ""] / rounds
            found["accept_rate"] = totals["accepted", ""] / totals["drafted", ""]
        return found

    def labelled(self, number: int, key: str) -> dict[str, float]:
        """Return the numbers of engine `number` by their label."""
        if key == "waiting_by_reason":
            return {"capacity": waiting} if (waiting := self.values(number, 0).get("waiting")) is not None else {}
        return {label: value for (name, label), value in tuple(self.counts[number].totals.items()) if name == key}


_TOTALS = (
    *("prompt_tokens", "output_tokens", "cached_tokens", "retractions", "retracted_prompt", "retracted_output"),
    *("rounds", "drafted", "accepted", "failures"),
)
