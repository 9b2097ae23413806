"""Pages of `/metrics` in the text exposition of Prometheus: their samples, and the workload that histograms of lengths
and counters of requests tell.

A page counts since its server started, so the workload of a time is the difference of two pages. Samples of several
engines are added, also those of several servers whose pages are in one file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from ...observe.input_files import read_lines

PAGE_BEGINS = ("# HELP ", "# TYPE ", "vllm:", "sglang:", "vllm_", "sglang_")
NAMES = {  # kind of length -> names of its histogram: of vLLM, of SGLang
    "prompt": ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
    "output": ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram"),
}
MOST_TOKENS = 1 << 24  # of a request, in a histogram that is taken for one
_ESCAPED = re.compile("(vllm|sglang)_")
"""How names begin in OpenMetrics as some releases of Prometheus' client for Python write it."""
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s{}]+)(?:\s+(?P<time>-?\d+))?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of a page: the value of a name with labels, and the time in Unix milliseconds if the page tells it."""

    name: str
    labels: Mapping[str, str]
    value: float
    time_ms: int | None


def read_samples(path: str, prefixes: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the samples of a page whose names begin with one of `prefixes`. Raises ConfigError with the line that is
    none, or whose value is no finite number from 0 on."""
    for number, line in enumerate(read_lines(path), 1):
        line = _ESCAPED.sub(r"\1:", line.strip()) if line.startswith(("vllm_", "sglang_")) else line.strip()
        if not line.startswith(prefixes):
            continue
        place, found = f"line {number}", _SAMPLE.fullmatch(line)
        if found is None:
            message = f"{line[:80]!r}: expected name{{labels}} value (a truncated line?)"
            raise ConfigError.of(path, place, message)
        value = _finite(found["value"])
        if value is None:
            message = f"{found['name'][:80]} is {found['value'][:40]!r}: expected a finite number"
            raise ConfigError.of(path, place, message)
        if value < 0:
            raise ConfigError.of(path, place, f"{found['name'][:80]} is {value:g}: expected 0 or more")
        time_ms = None if found["time"] is None else int(found["time"])
        yield Sample(found["name"], dict(_LABEL.findall(found["labels"] or "")), value, time_ms)


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and abs(value) <= 1e15 else None


@dataclass(frozen=True)
class LengthHistogram:
    """Requests by their tokens: `bounds` are the greatest lengths of classes, of which the last has none.

    `counts` are the requests of each class, `total` the tokens of all.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def requests(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.requests

    def percentile(self, share: float) -> float | None:
        """Return the bound of the class in which this share of the requests is reached; None in the last class."""
        reached = 0.0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            reached += count
            if reached >= share * self.requests:
                return bound if math.isfinite(bound) else None
        return None

    def table(self) -> dict[str, Any]:
        """Return the lengths of a scenario: one value for each class that has requests, so that the mean is that of the
        histogram.

        The value of a class lies between its bounds, at one share of its width for all classes. The last class, and
        the first where that share is not enough, takes the rest of the tokens.
        """
        lows = [1.0, *(bound + 1 for bound in self.bounds)]
        highs = [*self.bounds, 2 * lows[-1]]
        least = sum(count * low for count, low in zip(self.counts, lows, strict=True))
        width = sum(count * (high - low) for count, low, high in zip(self.counts, lows, highs, strict=True))
        share = min(max((self.total - least) / width, 0.0), 1.0) if width else 0.0
        values = [low + share * (high - low) for low, high in zip(lows, highs, strict=True)]
        rest = self.total - sum(count * value for count, value in zip(self.counts, values, strict=True))
        if rest > 0 and self.counts[-1]:
            values[-1] += rest / self.counts[-1]
        kept = [(max(1, round(value)), count) for value, count in zip(values, self.counts, strict=True) if count]
        return {"kind": "empirical", "values": [value for value, _ in kept], "weights": [count for _, count in kept]}


@dataclass(frozen=True)
class PageWorkload:
    """What pages tell of a workload: lengths, requests, and the seconds that they cover (None if the pages do not say).

    `server`: whose metrics they are.
    """

    server: str
    prompt: LengthHistogram
    output: LengthHistogram
    seconds: float | None

    @property
    def requests(self) -> int:
        """Requests that ended: their outputs were counted."""
        return round(self.output.requests)

    @property
    def rate(self) -> float | None:
        """Requests per second; None if the pages do not say how long they took."""
        return None if not self.seconds else self.output.requests / self.seconds

    def table(self) -> dict[str, Any]:
        """Return the table `workload` of a scenario, without a rate if none is known."""
        rate = {} if self.rate is None else {"arrivals": "poisson", "rate": float(f"{self.rate:.6g}")}
        return {**rate, "prompt": self.prompt.table(), "output": self.output.table()}


def read_workload(page: str, since: str | None, seconds: float | None) -> PageWorkload:
    """Return the workload that a page tells, or what it counts more than the earlier page `since`.

    seconds: that the counts cover; None: between the times of the samples, if both pages have them. Raises ConfigError
    for a page without histograms of lengths, of several models, or that counts less than `since`.
    """
    late, early = _histograms(page), None if since is None else _histograms(since)
    if seconds is None and early is not None and since is not None:
        begin, end = _time_ms(since), _time_ms(page)
        seconds = None if begin is None or end is None else (end - begin) / 1e3
        if seconds is not None and seconds <= 0:
            raise ConfigError.of(page, "", f"its samples are {-seconds:g} s older than those of {since}")
    server, found = late
    if early is not None:
        if early[0] != server or any(early[1][kind].bounds != found[kind].bounds for kind in found):
            raise ConfigError.of(page, "", f"has other histograms than {since}: expected two pages of one server")
        found = {kind: _difference(page, str(since), kind, found[kind], early[1][kind]) for kind in found}
    for kind, histogram in found.items():
        if not histogram.requests:
            raise ConfigError.of(page, NAMES[kind][server == "sglang"], "counts no request")
    return PageWorkload(server, found["prompt"], found["output"], seconds)


def _histograms(path: str) -> tuple[str, dict[str, LengthHistogram]]:
    """Return whose metrics a page has, and its histograms by kind."""
    samples = list(read_samples(path, tuple(name for names in NAMES.values() for name in names)))
    models = {one.labels["model_name"] for one in samples if "model_name" in one.labels}
    if len(models) > 1:
        message = f"histograms of several models, {', '.join(sorted(models))[:200]}: expected those of one"
        raise ConfigError.of(path, "", message)
    for place, server in enumerate(("vllm", "sglang")):
        names = {kind: found[place] for kind, found in NAMES.items()}
        if any(one.name.startswith(f"{name}_") for one in samples for name in names.values()):
            return server, {kind: _histogram(path, name, samples) for kind, name in names.items()}
    expected = " or ".join(f"{vllm}_bucket with {output}_bucket" for vllm, output in zip(*NAMES.values(), strict=True))
    raise ConfigError.of(path, "", f"has no histograms of lengths: expected {expected} (SGLang: --enable-metrics)")


def _histogram(path: str, name: str, samples: Iterable[Sample]) -> LengthHistogram:
    reached: dict[float, float] = {}
    total = 0.0
    for one in samples:
        if one.name == f"{name}_bucket":
            bound = _bound(path, name, one.labels.get("le", ""))
            reached[bound] = reached.get(bound, 0.0) + one.value
        elif one.name == f"{name}_sum":
            total += one.value
    if math.inf not in reached or len(reached) < 2:
        raise ConfigError.of(path, f"{name}_bucket", 'expected classes up to le="+Inf" (a truncated page?)')
    bounds = sorted(reached)
    totals = [reached[bound] for bound in bounds]
    counts = [after - before for before, after in zip((0.0, *totals), totals, strict=False)]
    if min(counts) < 0:
        raise ConfigError.of(path, f"{name}_bucket", "counts fall with le: expected counts of all requests up to it")
    if sum(counts) and not total:
        raise ConfigError.of(path, f"{name}_sum", "is missing or 0 (a truncated page?)")
    return LengthHistogram(tuple(bounds[:-1]), tuple(counts), total)


def _bound(path: str, name: str, text: str) -> float:
    value = math.inf if text == "+Inf" else _finite(text)
    if value is None or not (value == math.inf or 0 < value <= MOST_TOKENS):
        raise ConfigError.of(path, f"{name}_bucket", f'le="{text[:20]}": expected a number of tokens, or +Inf')
    return value


def _difference(page: str, since: str, kind: str, late: LengthHistogram, early: LengthHistogram) -> LengthHistogram:
    counts = tuple(after - before for after, before in zip(late.counts, early.counts, strict=True))
    if min(counts) < 0 or late.total < early.total:
        message = f"counts fewer {kind}s than {since}: the server was started again, or the pages are swapped"
        raise ConfigError.of(page, "", message)
    return LengthHistogram(late.bounds, counts, late.total - early.total)


def _time_ms(path: str) -> int | None:
    names = tuple(name for names in NAMES.values() for name in names)
    return max((one.time_ms for one in read_samples(path, names) if one.time_ms is not None), default=None)


def is_page(path: str) -> bool:
    """Return whether a file begins as a page of metrics."""
    first = next((line for line in read_lines(path) if line.strip()), "")
    return first.startswith(PAGE_BEGINS)


def unknown_of(found: PageWorkload) -> Sequence[str]:
    """Return what pages do not tell, as the objects of a sentence."""
    rate = () if found.rate is not None else ("how long they took, so no rate: give --seconds, or set workload.rate",)
    return (
        *rate,
        "when requests came: the workload's arrivals are Poisson",
        "which prompt had which output: the workload draws both independently",
        "what the prompts contain, so nothing about prefix reuse",
    )
