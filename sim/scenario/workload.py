"""The tables of a scenario that say which requests come: `[workload]` and `[clients]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..workload.trace_layout import TraceOptions
from ..workload.traces import TraceSource
from . import conditions as when
from .refusals import length_needs_it, no_curve
from .table import Count, NoEffect, Positive, Rate, RefusedIf, ScenarioTable, Seconds, Share, Tokens

NEEDED = RefusedIf(length_needs_it)


class Length(ScenarioTable):
    kind: Literal["fixed", "uniform", "lognormal", "empirical"] = Field(
        default="fixed", description="distribution of the length in tokens"
    )
    value: Annotated[Tokens | None, NEEDED] = Field(default=None, description="fixed: the length")
    low: Annotated[Tokens, NoEffect(when.length_has_no_bounds)] = Field(
        default=1, description="uniform, lognormal: the smallest length"
    )
    high: Annotated[Tokens | None, NEEDED, NoEffect(when.length_has_no_bounds)] = Field(
        default=None, description="uniform, lognormal: the greatest length; default for lognormal: the model's context"
    )
    mean: Annotated[Positive | None, NEEDED] = Field(default=None, description="lognormal: the mean before clipping")
    sigma: Annotated[Annotated[float, Field(gt=0, le=10)] | None, NEEDED] = Field(
        default=None, description="lognormal: standard deviation of the logarithm"
    )
    values: Annotated[Annotated[list[Tokens], Field(min_length=1)] | None, NEEDED] = Field(
        default=None, description="empirical: the lengths"
    )
    weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="empirical: weight of each length; default: all equal"
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Length:
        """Refuse numbers that the kind would ignore, and numbers that contradict each other."""
        of_kind = {"fixed": ("value",), "lognormal": ("mean", "sigma"), "empirical": ("values", "weights")}
        used = of_kind.get(self.kind, ())
        foreign = [
            key for keys in of_kind.values() for key in keys if key not in used and getattr(self, key) is not None
        ]
        if foreign:
            raise ValueError(f"a {self.kind} length has no {' or '.join(foreign)}")
        if self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low}, more than high, {self.high}")
        if self.weights is not None and (len(self.weights) != len(self.values or ()) or not any(self.weights)):
            raise ValueError("weights: expected one for each value, one of them positive")
        return self


LENGTHS: dict[str, dict[str, Any]] = {
    "prompt": {"kind": "lognormal", "mean": 768.0, "sigma": 0.9},
    "output": {"kind": "lognormal", "mean": 256.0, "sigma": 0.8},
}


class Prefixes(ScenarioTable):
    groups: Annotated[int, Field(ge=1, le=1_000_000)] = Field(default=1, description="number of shared prefixes")
    length: Tokens = Field(default=512, description="tokens of a shared prefix")
    zipf: Annotated[float, Field(ge=0, le=10), NoEffect(when.one_group)] = Field(
        default=1.0, description="group i has weight 1 / i**zipf; 0: all groups are alike"
    )


OF_TRACE, OF_CLIENTS = NoEffect(when.requests_are_of_the_trace), NoEffect(when.clients_are_closed)


class Workload(ScenarioTable):
    trace: str | None = Field(
        default=None,
        description="a file of recorded requests (docs/traces.md has the formats) instead of synthetic ones",
    )
    format: Annotated[
        Literal["auto", "azure", "mooncake", "bailian", "burstgpt", "csv", "jsonl", "vllm-log", "sglang-log", "otlp"],
        NoEffect(when.requests_are_synthetic, says="auto"),
    ] = Field(default="auto", description="format of the trace; auto: by its first lines")
    columns: Annotated[str | None, NoEffect(when.requests_are_synthetic, says=None)] = Field(
        default=None,
        description="trace: names of its columns or keys, as arrival=NAME,prompt=NAME,output=NAME and session=NAME; "
        "default: by the names that are usual",
    )
    time_unit: Annotated[Literal["auto", "s", "ms", "us", "ns"], NoEffect(when.requests_are_synthetic, says="auto")] = (
        Field(default="auto", description="trace: unit of its times; auto: as its format or the column's name says")
    )
    rate_scale: Annotated[Rate, OF_CLIENTS, NoEffect(when.clients_of_a_trace_are_closed)] = Field(
        default=1.0, description="factor on the rate of the trace; 2 replays it twice as fast"
    )
    start_s: Annotated[float, Field(ge=0, le=1e9), NoEffect(when.requests_are_synthetic, says=0.0)] = Field(
        default=0.0, description="trace: leave out arrivals before this time"
    )
    stop_s: Annotated[Seconds | None, OF_CLIENTS] = Field(default=None, description="no arrival at or after this time")
    resample_s: Annotated[
        Annotated[Seconds, Field(ge=1e-3)] | None, NoEffect(when.requests_are_synthetic, says=None)
    ] = Field(
        default=None,
        description="trace: replay windows of so many seconds that the seed draws from it with replacement, as long "
        "together as the trace; default: the trace as it is",
    )
    num_requests: Count | None = Field(
        default=None,
        description="most requests; default: 1000 synthetic ones, in a closed loop 3 more of each client for the ramp, or the "
        "whole trace",
    )
    arrivals: Annotated[Literal["poisson", "gamma", "constant", "day", "curve"], OF_TRACE, OF_CLIENTS] = Field(
        default="poisson", description="process of synthetic arrivals"
    )
    rate: Annotated[Rate, OF_TRACE, OF_CLIENTS] = Field(
        default=8.0, description="requests per second (day, curve: the mean)"
    )
    amplitude: Annotated[Share, OF_TRACE, OF_CLIENTS, NoEffect(when.arrivals_are_others, ("day",))] = Field(
        default=0.5, description="day: the peak is this share above the mean"
    )
    curve: Annotated[
        list[Annotated[float, Field(ge=0, le=1e6)]] | None,
        OF_TRACE,
        OF_CLIENTS,
        NoEffect(when.arrivals_are_others, ("curve",)),
        RefusedIf(no_curve),
    ] = Field(
        default=None,
        description="curve: rates at equal distances over period_s, in any unit, with straight lines between them",
    )
    period_s: Annotated[
        Seconds, Field(ge=1e-3), OF_TRACE, OF_CLIENTS, NoEffect(when.arrivals_are_others, ("day", "curve"))
    ] = Field(default=86_400.0, description="day, curve: length of the period, which then repeats")
    burstiness: Annotated[
        float,
        Field(ge=0.05, le=20),
        OF_TRACE,
        OF_CLIENTS,
        NoEffect(when.arrivals_are_others, ("gamma", "day", "curve")),
    ] = Field(
        default=1.0,
        description="gamma, day, curve: coefficient of variation of the gaps; 1 is Poisson, more is burstier",
    )
    concurrency: Count | None = Field(
        default=None, description="closed loop: number of clients; each sends its next request when its last one ends"
    )
    prompt: Annotated[Length, OF_TRACE] = Field(default=Length(**LENGTHS["prompt"]), description="prompt lengths")
    output: Annotated[Length, OF_TRACE] = Field(default=Length(**LENGTHS["output"]), description="output lengths")
    prefixes: Annotated[Prefixes | None, OF_TRACE] = Field(
        default=None, description="shared prefixes of synthetic prompts; default: no known content"
    )
    max_tokens: Annotated[Count | Literal["output"] | None, NoEffect(when.cap_is_beyond_the_context)] = Field(
        default=None,
        description="most output tokens that a request asks for; output: the length that it will emit, and no token "
        "ends it before, as in benchmarks (ignore_eos); default: the room in the context, or, if outputs are "
        "guaranteed, the length that it will emit",
    )
    urgent_share: Annotated[Share, OF_TRACE] = Field(
        default=0.0, description="share of synthetic requests with priority 1"
    )

    @property
    def trace_options(self) -> TraceOptions:
        """How the trace is to be read."""
        return TraceOptions(self.format, self.columns, self.time_unit)

    @property
    def contents_are_known(self) -> bool:
        """Whether the content of prompts is known, so that equal beginnings can be found. Raises TraceError."""
        if self.trace is None:
            return self.prefixes is not None
        return TraceSource(self.trace, self.trace_options).has_block_hashes

    @model_validator(mode="after")
    def _stops_after_its_start(self) -> Workload:
        if self.trace is not None and self.stop_s is not None and self.stop_s <= self.start_s:
            raise ValueError(f"stop_s is {self.stop_s:g}, expected more than start_s, {self.start_s:g}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _complete_lengths(cls, data: Any) -> Any:
        """If a lognormal length is given in part, keep its other defaults. A value or values imply their kind."""
        if not isinstance(data, dict):
            return data
        return data | {key: _completed(data[key], LENGTHS[key]) for key in LENGTHS if key in data}


def _completed(given: Any, default: dict[str, Any]) -> Any:
    if not isinstance(given, dict):
        return given
    implied = "fixed" if "value" in given else "empirical" if "values" in given else "lognormal"
    kind = given.get("kind", implied)
    return (default if kind == "lognormal" else {}) | {"kind": kind} | given


class Clients(ScenarioTable):
    deadline_s: Seconds | None = Field(default=None, description="time after which a client cancels")
    cancel_share: Share = Field(default=0.0, description="share of requests whose client leaves at a random moment")
    cancel_mean_s: Annotated[Seconds, NoEffect(when.no_client_leaves)] = Field(
        default=10.0, description="mean time until such a client leaves (exponential)"
    )
