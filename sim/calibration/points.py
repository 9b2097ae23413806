"""Measured points: one benchmark run each, checked before anything is fitted.

Every reader of a result file returns records, mappings with the names of `COLUMNS`, which are also the columns of a CSV
file. `point_of` makes a `BenchmarkPoint` of a record or raises ConfigError with the file and the file's own name of
every value that cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ...core.errors import ConfigError, ForedraftError, Problem, count_of, nearest
from ...core.model_shape import ModelShape, lookup_model
from ..cost.hardware import GPU, lookup_gpu

COLUMNS: dict[str, str] = {
    "concurrency": "clients of a closed loop: each sends its next request when one ends",
    "rate_per_s": "instead: requests per second of an open loop with Poisson arrivals",
    "num_requests": "requests of the run; default: many",
    "input_tokens": "mean prompt length",
    "output_tokens": "mean output length",
    "input_std": "standard deviation of the prompt lengths; default: 0, all are equally long",
    "output_std": "standard deviation of the output lengths; default: 0",
    "output_tokens_per_s": "output tokens per second of all requests together",
    "mean_tpot_ms": "mean time per output token after the first",
    "mean_ttft_ms": "mean time to the first token",
    "algorithm": "NONE (default), EAGLE, EAGLE3, STANDALONE, …, as speculation.algorithm",
    "steps": "draft steps",
    "topk": "branching of the draft tree; default: 1, a chain",
    "num_draft_tokens": "nodes of the verify tree, root included; default: steps + 1",
    "accept_length": "mean tokens per verify round, the bonus token included",
    "tensor_parallel": "devices of one replica; default: hardware.tensor_parallel",
    "model": "Hugging Face name or built-in model; default: model.target",
    "gpu": "GPU; default: hardware.gpu",
}
"""The columns of a CSV file. They are also the names of settings after a file's name: FILE:steps=3,algorithm=EAGLE3."""
TEXTS = ("algorithm", "model", "gpu")
WHOLE = ("concurrency", "num_requests", "steps", "topk", "num_draft_tokens", "tensor_parallel")
MEASURED = ("mean_tpot_ms", "output_tokens_per_s", "mean_ttft_ms")
SPECULATION = ("steps", "topk", "num_draft_tokens", "accept_length")
RANGES: dict[str, tuple[float, float, str]] = {
    "concurrency": (1, 4096, "clients"),
    "num_requests": (1, 10**7, "requests"),
    "steps": (0, 63, "steps"),
    "topk": (1, 64, "branches"),
    "num_draft_tokens": (1, 4096, "nodes"),
    "tensor_parallel": (1, 64, "devices"),
    **dict.fromkeys(("input_tokens", "output_tokens"), (1, 10**6, "tokens")),
    **dict.fromkeys(("input_std", "output_std"), (0, 10**6, "tokens")),
    "accept_length": (0, 64, "tokens"),
    "mean_tpot_ms": (1e-3, 60e3, "milliseconds"),
    "mean_ttft_ms": (1e-3, 86.4e6, "milliseconds"),
    "output_tokens_per_s": (1e-3, 1e8, "tokens per second"),
    "rate_per_s": (1e-6, 1e6, "requests per second"),
}
"""Column -> smallest and greatest number, and its unit. What is outside has another unit, or was not measured."""
CONTRADICTION = 0.25
"""Two runs of the same setting whose results differ by more than this share contradict each other."""
FAILED = 0.02
"""A run is refused from this share of failed requests on, because its other requests had another load than the file
says."""


@dataclass(frozen=True, slots=True)
class BenchmarkPoint:
    """One benchmark run: its load, its speculation and its results (None: not given)."""

    source: str  # file, and the line or the benchmark in it
    input_tokens: float
    output_tokens: float
    concurrency: int | None = None
    rate_per_s: float | None = None
    num_requests: int | None = None
    input_std: float = 0.0
    output_std: float = 0.0
    output_tokens_per_s: float | None = None
    mean_tpot_ms: float | None = None
    mean_ttft_ms: float | None = None
    algorithm: str = "NONE"
    steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    accept_length: float = 1.0
    tensor_parallel: int | None = None
    model: str | None = None
    gpu: str | None = None
    file: str = ""
    # Lengths of single requests, where the file has them.
    input_lens: tuple[int, ...] = field(default=(), repr=False)
    output_lens: tuple[int, ...] = field(default=(), repr=False)

    @property
    def is_speculative(self) -> bool:
        return self.steps > 0

    @property
    def title(self) -> str:
        """The setting in a few words."""
        tp = f", TP {self.tensor_parallel}" if (self.tensor_parallel or 1) > 1 else ""
        return f"{self.load}, {self.input_tokens:,.0f} → {self.output_tokens:,.0f} tokens{tp}"

    @property
    def load(self) -> str:
        """The draft and the clients in a few words."""
        load = count_of(self.concurrency, "client") if self.concurrency else f"{self.rate_per_s:g} requests/s"
        draft = "plain"
        if self.is_speculative:
            tree = f", top-{self.topk}, {self.num_draft_tokens} nodes" if self.topk > 1 else ""
            draft = f"{self.algorithm} {count_of(self.steps, 'step')}{tree}"
        return f"{draft}, {load}"

    @property
    def setting(self) -> tuple[Any, ...]:
        """Everything but the results, lengths to two digits: runs of equal settings should have equal results."""
        left_out = ("source", "file", "num_requests", "input_lens", "output_lens", *MEASURED)
        values = (getattr(self, item.name) for item in fields(self) if item.name not in left_out)
        return tuple(float(f"{value:.2g}") if isinstance(value, float) else value for value in values)


Record = Mapping[str, Any]


def point_of(
    source: str, record: Record, names: Mapping[str, str] | None = None, file: str | None = None
) -> BenchmarkPoint:
    """Return the point of a record. `names`: the file's own names of the values, for messages. Raises ConfigError with
    all problems."""
    problems: list[Problem] = []
    called = {column: column for column in COLUMNS} | dict(names or {})

    def problem(column: str, message: str) -> None:
        place = source[len(file) :].strip() if file and source.startswith(file) else ""
        problems.append(Problem(f"{place}{': ' if place else ''}{called.get(column, column)}", message))

    values = dict(_values(record, problem))
    for column in ("input_tokens", "output_tokens"):
        if column not in values and not problems:
            problem(column, "is missing")
    _check_load(values, problem)
    _check_speculation(values, problem)
    if not problems:
        _check_results(values, problem)
    if problems:
        raise ConfigError(file or source, problems)
    input_lens, output_lens = (tuple(record.get(key) or ()) for key in ("input_lens", "output_lens"))
    return BenchmarkPoint(source=source, file=file or source, **values, input_lens=input_lens, output_lens=output_lens)


def _values(record: Record, problem: Any) -> Iterator[tuple[str, Any]]:
    """Yield the given values, converted to their types."""
    for column, value in record.items():
        if column not in COLUMNS or value is None:
            continue
        if column in TEXTS:
            if not isinstance(value, str) or not value.strip():
                problem(column, f"expected a text, found {_short(value)}")
            else:
                yield column, value.strip()
            continue
        number, (least, most, unit) = _number(value), RANGES[column]
        if number is None:
            problem(column, f"expected a finite number, found {_short(value)}")
        elif not least <= number <= most:
            problem(column, f"expected {least:g} … {most:,.0f} {unit}, found {_short(value)}")
        elif column in WHOLE and number != int(number):
            problem(column, f"expected a whole number of {unit}, found {_short(value)}")
        else:
            yield column, int(number) if column in WHOLE else number


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _check_load(values: dict[str, Any], problem: Any) -> None:
    closed, rate = values.get("concurrency"), values.get("rate_per_s")
    if closed is None and rate is None:
        problem("concurrency", "is missing: how many clients, or how many requests per second (rate_per_s)?")
    if closed is not None and rate is not None:
        problem("rate_per_s", "is given beside a concurrency: a load that is limited by both cannot be simulated")


def _check_speculation(values: dict[str, Any], problem: Any) -> None:
    algorithm = values["algorithm"] = values.get("algorithm", "NONE").upper()
    if algorithm == "NONE":
        if values.get("steps") or values.get("accept_length", 1.0) > 1.0:
            problem("algorithm", "is missing, but the run speculates: say it, such as FILE:algorithm=EAGLE3,steps=3")
        for column in SPECULATION:
            values.pop(column, None)
        return
    for column in ("steps", "accept_length"):
        if not values.get(column):
            problem(column, f"is missing for a run of {algorithm}: say it, such as FILE:{column}=3")
    steps, topk = values.get("steps") or 0, values.setdefault("topk", 1)
    nodes = values.setdefault("num_draft_tokens", steps + 1)
    if steps and nodes <= steps:
        problem("num_draft_tokens", f"{nodes} with {steps} steps: expected more than the steps, the root included")
    if steps and topk == 1 and nodes != steps + 1:
        problem("num_draft_tokens", f"{nodes} with {steps} steps and topk 1: a chain has {steps + 1}")
    if steps and not 1 <= values.get("accept_length", 1.0) <= steps + 1:
        problem("accept_length", f"{values['accept_length']:g} with {steps} steps: expected 1 … {steps + 1}")


def _check_results(values: dict[str, Any], problem: Any) -> None:
    tpot, rate, closed = values.get("mean_tpot_ms"), values.get("output_tokens_per_s"), values.get("concurrency")
    if tpot is None and rate is None:
        problem("mean_tpot_ms", "is missing, and there is no output_tokens_per_s either: nothing to fit")
    if tpot is None and closed is None:
        problem("mean_tpot_ms", "is missing: the throughput of an open loop tells its rate and not the server")
    if tpot is not None and values["output_tokens"] < 2:
        problem("output_tokens", "is 1: there is no output token after the first, so no mean_tpot_ms")
    elif tpot is not None and rate is not None and closed is not None:
        most = closed * 1e3 / tpot * values["output_tokens"] / max(values["output_tokens"] - 1, 1)
        if rate > 1.1 * most:
            message = (
                f"{rate:,.0f} tokens/s contradict a mean TPOT of {tpot:g} ms: {closed} clients get at most {most:,.0f}"
            )
            problem("output_tokens_per_s", message)


def check_together(points: Sequence[BenchmarkPoint]) -> None:
    """Raise ConfigError if two points contradict each other, are one run twice, or are of different models or GPUs."""
    for name, look_up in (("model", lookup_model), ("gpu", lookup_gpu)):
        seen: dict[str, str] = {}
        for point in points:
            value = getattr(point, name)
            if value is not None:
                seen.setdefault(canonical(look_up, value), point.source)
        if len(seen) > 1:
            (known, by), (other, another), *_ = seen.items()
            message = f"{other}, but {by} measured {known}: a profile holds for one"
            raise ConfigError.of(another, name, message)
    runs: dict[BenchmarkPoint, BenchmarkPoint] = {}
    for point in points:
        first = runs.setdefault(replace(point, source="", file=""), point)
        if first is not point:
            message = f"is {first.source} once more, number by number: leave one of them out, or measure again"
            raise ConfigError.of(point.source, "", message)
    by_setting: dict[tuple[Any, ...], BenchmarkPoint] = {}
    for point in points:
        first = by_setting.setdefault(point.setting, point)
        for column in MEASURED:
            one, other = getattr(first, column), getattr(point, column)
            # Times to the first token vary more from run to run.
            share = CONTRADICTION * (2 if column == "mean_ttft_ms" else 1)
            if one is not None and other is not None and max(one, other) > (1 + share) * min(one, other):
                message = (
                    f"{other:g} contradicts {one:g} of {first.source}, a run of the same setting: leave one of them out"
                )
                raise ConfigError.of(point.source, column, message)


def canonical(look_up: Callable[[str], ModelShape | GPU], name: str) -> str:
    """Return the catalogue's name of a model or GPU, or the name itself if it is not in the catalogue."""
    try:
        return look_up(name).name
    except ForedraftError:
        return name


def unknown_column(name: str) -> str:
    """Return the message for an unknown column."""
    return f"unknown column{nearest(name, COLUMNS)}; known: {', '.join(COLUMNS)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} …"
