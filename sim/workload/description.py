"""Describes a workload: rates over time, lengths, burstiness, and the share of its prompts that a prefix cache finds
again.

The same code describes traces and synthetic workloads, so that a fit can be compared with its trace.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...core.errors import ForedraftError
from ...core.prompt import Prompt
from .workload import TimedRequest


@dataclass(frozen=True, slots=True)
class PrefixReuse:
    """Prompt tokens that were in a cache when their request came, as shares of all prompt tokens.

    Attributes:
        infinite: The share found by a cache that forgets nothing: what no cache exceeds.
        caches: By size in tokens, the share found.
        requests: The share of requests that find anything in the infinite cache.
        distinct_tokens: Tokens in the infinite cache at the end.
    """

    infinite: float
    caches: Mapping[int, float]
    requests: float
    distinct_tokens: int


class ReuseMeter:
    """Feeds prompts to an infinite cache and to caches of given sizes, one after the other, as if each were
    computed at once."""

    def __init__(self, cache_tokens: Sequence[int] = ()) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # (node before it, hash id) -> node
        self._lens: list[int] = []  # longest stretch that was seen of each node
        self._caches = {size: _LeastRecentlyUsed(size) for size in cache_tokens}
        self._found = dict.fromkeys(cache_tokens, 0)
        self._found_infinite = self._num_requests = self._num_hits = self._tokens = 0
        self._unknown = False

    def add(self, prompt: Prompt) -> None:
        if prompt.hash_ids is None:
            self._unknown = True
            return
        path, hit, whole = [], 0, True
        before = -1
        for hash_id, length in _pieces(prompt):
            node = self._nodes.setdefault((before, hash_id), len(self._lens))
            seen = 0
            if node == len(self._lens):
                self._lens.append(length)
            else:
                seen = min(self._lens[node], length)
                self._lens[node] = max(self._lens[node], length)
            if whole:
                hit += seen
                whole = seen == length
            path.append((node, length))
            before = node
        most = prompt.length - 1  # the last token is computed in any case: its output is the first one emitted
        self._num_requests += 1
        self._tokens += prompt.length
        self._found_infinite += min(hit, most)
        self._num_hits += hit > 0
        for size, cache in self._caches.items():
            self._found[size] += min(cache.look_up(path), most)

    def read(self) -> PrefixReuse | None:
        """Return the result; None if the content of some prompt is not known."""
        if self._unknown or not self._tokens:
            return None
        shares = {size: found / self._tokens for size, found in self._found.items()}
        requests = self._num_hits / self._num_requests
        return PrefixReuse(self._found_infinite / self._tokens, shares, requests, sum(self._lens))


def _pieces(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Yield the hash id and the length of each block or segment of a prompt of known content."""
    assert prompt.hash_ids is not None
    if prompt.segment_lens is not None:
        yield from zip(prompt.hash_ids, prompt.segment_lens, strict=True)
        return
    left = prompt.length
    for hash_id in prompt.hash_ids:
        yield hash_id, min(left, prompt.block_size)
        left -= prompt.block_size


class _LeastRecentlyUsed:
    """A cache of so many tokens, piece by piece."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = 0
        self._lens: OrderedDict[int, int] = OrderedDict()  # node -> tokens; the next to go first

    def look_up(self, path: Sequence[tuple[int, int]]) -> int:
        """Return how many leading tokens of a prompt are in the cache, and store the whole prompt. path: (node, tokens)
        from the prompt's start on."""
        lens = self._lens
        hit = 0
        for node, length in path:
            seen = min(lens.get(node, 0), length)
            hit += seen
            if seen < length:
                break
        for node, length in reversed(path):  # the beginning goes last: without it the rest cannot be found
            held = lens.pop(node, 0)
            lens[node] = max(held, length)
            self._held += lens[node] - held
        while self._held > self._size:
            self._held -= lens.popitem(last=False)[1]
        return hit


PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
WINDOWS_S = (0.1, 1.0, 10.0, 60.0, 600.0)
"""Windows in which arrivals are counted, for the index of dispersion and the peak."""
LEAST_WINDOWS = 10  # of one width: fewer say nothing about a variance
BUCKETS = 60  # of the rate over time


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. `percentiles`: of `PERCENTILES`, interpolated."""

    mean: float
    std: float
    least: int
    greatest: int
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        found = np.percentile(lengths, PERCENTILES).tolist()
        named = dict(zip(PERCENTILES, found, strict=True))
        return cls(float(lengths.mean()), float(lengths.std()), int(lengths.min()), int(lengths.max()), named)


@dataclass(frozen=True, slots=True)
class ArrivalDescription:
    """When requests come.

    Attributes:
        span_s: From the first request to the last.
        rate: Requests per second over that span; None if all come at once.
        rates, bucket_s: Requests per second in successive buckets of this width.
        peaks: By window in seconds, the greatest number of requests per second in any of them.
        dispersion: By window in seconds, variance over mean of the requests in each; 1 is Poisson, 0 a clock, more is
            burstier.
        gap_cv: Standard deviation over mean of the gaps between requests; 1 is Poisson.
        tick_s: Requests come together at times about so far apart, as they were recorded; None unless most share their
            time with another.
    """

    span_s: float
    rate: float | None
    rates: Sequence[float]
    bucket_s: float
    peaks: Mapping[float, float]
    dispersion: Mapping[float, float]
    gap_cv: float | None
    tick_s: float | None

    @classmethod
    def of(cls, times_ns: np.ndarray) -> ArrivalDescription:
        span_ns = int(times_ns[-1] - times_ns[0])
        span_s = span_ns / 1e9
        if not span_ns:
            return cls(0.0, None, (), 0.0, {}, {}, None, None)
        gaps = np.diff(times_ns)
        shared = 2 * int((gaps == 0).sum()) > len(gaps)
        tick_ns = int(np.median(gaps[gaps > 0]) if shared else np.gcd.reduce(gaps))
        counts = {w: counts_in(times_ns, w) for w in WINDOWS_S if w * 1e9 >= tick_ns and w <= span_s}
        num_buckets = int(min(BUCKETS, max(span_ns // tick_ns, 1)))
        rates = np.histogram(times_ns, np.linspace(times_ns[0], times_ns[-1], num_buckets + 1))[0]
        bucket_s = span_s / num_buckets
        return cls(
            span_s,
            (len(times_ns) - 1) / span_s,
            (rates / bucket_s).tolist(),
            bucket_s,
            {w: float(found.max() / w) for w, found in counts.items() if len(found)},
            dispersion_of(counts),
            float(gaps.std() / gaps.mean()),
            tick_ns / 1e9 if shared else None,
        )


def counts_in(times_ns: np.ndarray, window_s: float) -> np.ndarray:
    """Return how many requests come in each whole window: int64 [windows]. times_ns: int64 [n], ascending."""
    window_ns = round(window_s * 1e9)
    places = (times_ns - times_ns[0]) // window_ns
    whole = int(times_ns[-1] - times_ns[0]) // window_ns
    return np.bincount(places[places < whole], minlength=whole)


def dispersion_of(counts: Mapping[float, np.ndarray]) -> dict[float, float]:
    """Return variance over mean of the counts in windows of each width that has enough of them."""
    found = {w: values for w, values in counts.items() if len(values) >= LEAST_WINDOWS and values.any()}
    return {w: float(values.var(ddof=1) / values.mean()) for w, values in found.items()}


@dataclass(frozen=True, slots=True)
class Description:
    """A workload in numbers. `length_correlation`: of the ranks of prompts' and outputs' lengths (Spearman); None of
    equal ones.

    `reuse` is None if the workload does not say what its prompts contain, `sessions` (how many conversations or users)
    if it names none.
    """

    num_requests: int
    arrivals: ArrivalDescription
    prompt: Lengths
    output: Lengths
    length_correlation: float | None
    reuse: PrefixReuse | None
    sessions: int | None

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain data; windows and percentiles are texts, as JSON has it."""
        data: dict[str, Any] = _plain(asdict(self))
        return data


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    return [_plain(below) for below in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Columns:
    """The requests of a workload as columns: int64 [n] each."""

    times_ns: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray


def describe(workload: Iterable[TimedRequest], cache_tokens: Sequence[int] = ()) -> tuple[Description, Columns]:
    """Describe an open-loop workload, with the hit rate of prefix caches of these sizes beside that of an infinite one.

    Raises ForedraftError if the workload has no requests, and what reading it raises.
    """
    columns: tuple[array[int], ...] = tuple(array("q") for _ in range(3))
    meter = ReuseMeter(cache_tokens)
    sessions: Counter[str] = Counter()
    for arrival in _noted(workload, columns):
        meter.add(arrival.prompt)
        if arrival.session is not None:
            sessions[arrival.session] += 1
    if not columns[0]:
        raise ForedraftError("the workload has no requests")
    times, prompts, outputs = (np.frombuffer(column, np.int64) for column in columns)
    correlation = None
    if prompts.min() < prompts.max() and outputs.min() < outputs.max():
        correlation = float(np.corrcoef(_ranks(prompts), _ranks(outputs))[0, 1])
    described = Description(
        len(times), ArrivalDescription.of(times), Lengths.of(prompts), Lengths.of(outputs), correlation, meter.read(), len(sessions) or None
    )  # fmt: skip
    return described, Columns(times, prompts, outputs)


def _noted(workload: Iterable[TimedRequest], columns: tuple[array[int], ...]) -> Iterator[TimedRequest]:
    times, prompts, outputs = columns
    for arrival in workload:
        times.append(arrival.time_ns or 0)
        prompts.append(arrival.prompt.length)
        outputs.append(arrival.output_len)
        yield arrival


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the mean rank of each value among all values; equal values have the same rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]
