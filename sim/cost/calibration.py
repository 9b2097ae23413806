"""Profiles: the measurements of one deployment, in the form of `profile.json` (`hardware.profile`).

A profile has one of two parts:

    parameters   the few numbers of the timing that were fitted to benchmark results: `foredraft calibrate --from`
    steps        the steps of our own executor, which replace all other times: `foredraft calibrate --model`

Parameters hold for the server profile and the kernels around which they were fitted, and apply to whatever prices the
passes. docs/calibration.md describes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from ...core.errors import ConfigError, Problem, count_of, nearest, shown
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from .executor_steps import STRICT, AlgorithmSteps, Count, ExecutorSteps, RoundGrids
from .host import FrontEnd, HostCost

FORMAT = "foredraft-profile"
VERSION = 2
READ = (1, 2)
"""Versions of which a profile of steps is read. Parameters of version 1 were waits, which are not fitted any more."""

ROUND_FACTOR, ROUND_SLOPE = "round_factor", "round_slope"
DRAFTS_FACTOR, DRAFTS_SLOPE = "drafts_factor", "drafts_slope"
PROMPT_FACTOR, FRONT_END = "prompt_factor", "front_end_ns"
PARAMETERS: dict[str, str] = {
    ROUND_FACTOR: "factor on whole rounds, of the device and of the host, at `clients` requests",
    ROUND_SLOPE: "power of requests / `clients` by which that factor changes",
    DRAFTS_FACTOR: "further factor on rounds with drafts",
    DRAFTS_SLOPE: "further power of requests / `clients` of rounds with drafts",
    PROMPT_FACTOR: "factor on passes over prompts",
    FRONT_END: "time of a request before it reaches the scheduler",
}
"""The parameters that a profile may have. A factor that is absent is 1, and another parameter that is absent is 0."""
SLOPES = (ROUND_SLOPE, DRAFTS_SLOPE)


@dataclass(frozen=True, slots=True)
class FittedParameter:
    """A fitted number and its interval (90 %)."""

    __pydantic_config__ = STRICT

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeasuredClients:
    """The fewest, the usual and the most requests at a time of the points: beyond the ends a factor does not change."""

    __pydantic_config__ = STRICT

    least: float
    usual: float
    most: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.usual <= self.most:
            raise ValueError("expected 0 < least ≤ usual ≤ most")


Text = Annotated[str, Field(min_length=1)]
Error = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class FittedParameters:
    """Numbers of the timing that were fitted around a server profile.

    `kernels`: what priced the target's passes (see `RoundCost.kernels`); `error`, `left_out_error`: mean absolute
    relative errors of decoding of the points fitted, and of points that were left out of the fit;
    `left_out_ttft_error`: of times to the first token, None if none was measured.
    """

    __pydantic_config__ = STRICT

    server: Text
    kernels: Text
    values: Mapping[str, FittedParameter]
    clients: MeasuredClients
    points: Count
    error: Error
    left_out_error: Error
    left_out_ttft_error: Error | None = None

    def value(self, name: str) -> float:
        """Return a parameter, or what it is if it was not fitted."""
        if name in self.values:
            return self.values[name].value
        return 1.0 if name in (ROUND_FACTOR, DRAFTS_FACTOR, PROMPT_FACTOR) else 0.0

    def round_factor(self, rows: float, *, has_drafts: bool) -> float:
        """Return the factor on rounds of `rows` requests."""
        power = math.log(min(max(rows, self.clients.least), self.clients.most) / self.clients.usual)
        factor, slope = self.value(ROUND_FACTOR), self.value(ROUND_SLOPE)
        if has_drafts:
            factor, slope = factor * self.value(DRAFTS_FACTOR), slope + self.value(DRAFTS_SLOPE)
        return factor * math.exp(slope * power)

    def host(self, host: HostCost) -> HostCost:
        """Return `host` at the pace of the machine that was measured."""
        return host.at_pace(self.value(ROUND_FACTOR))

    def front_end(self, front_end: FrontEnd) -> FrontEnd:
        """Return `front_end` with the fitted time of a request."""
        return replace(front_end, request_ns=front_end.request_ns + round(self.value(FRONT_END)))


def _with_values(parameters: Any) -> Any:
    """Return `parameters` of a file, in which the fitted numbers stand beside what is said of them, as a
    `FittedParameters`."""
    if not isinstance(parameters, dict):
        return parameters
    if "values" in parameters:
        raise ValueError("unknown key values: each parameter stands under its own name")
    values = {name: value for name, value in parameters.items() if name in PARAMETERS}
    return {name: value for name, value in parameters.items() if name not in values} | {"values": values}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile: for one model on one GPU, with these tensor-parallel sizes."""

    __pydantic_config__ = STRICT

    name: Text
    source: Text
    gpu: Text
    model: Text
    tp: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (1,)
    parameters: Annotated[FittedParameters | None, BeforeValidator(_with_values)] = None
    steps: ExecutorSteps | None = None

    def check(self, gpu: str) -> None:
        """Raise `ConfigError` if this profile was measured on another GPU."""
        if self.gpu != gpu:
            message = f"measured for {self.gpu}, but the run uses {gpu}"
            raise ConfigError.of(self.name, "profile.gpu", message)

    def check_base(self, server: str, kernels: str) -> None:
        """Raise `ConfigError` if the parameters were fitted around another server profile, or over other kernels."""
        if self.parameters is None:
            return
        fitted = (("server", self.parameters.server, server), ("kernels", self.parameters.kernels, kernels))
        problems = [
            Problem(f"parameters.{key}", f"fitted around {was}, but the run uses {used}: set hardware.{key}={was}")
            for key, was, used in fitted
            if was != used
        ]
        if problems:
            raise ConfigError(self.name, problems)

    @property
    def origin(self) -> str:
        """A sentence about this profile for the run's report."""
        fitted = self.parameters
        if fitted is None:
            return f"measured times of {self.source}"
        return (
            f"calibrated from {count_of(fitted.points, 'point')} ({self.source}), which it meets within {fitted.error:.1%} "
            f"on average, points left out within {fitted.left_out_error:.1%}"
        )

    def notices(self, model: str, tp: int) -> Iterator[str]:
        """Yield sentences for the user about fitted parameters that are used outside the range of their
        measurements."""
        if self.model != model:
            yield f"hardware.profile was calibrated with {self.model}; its fit may be worse for {model}"
        if tp not in self.tp:
            yield f"hardware.profile was calibrated with tensor parallel {_words(self.tp)}; its fit may be worse for {tp}"

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float, str, str]] = []
        for name, item in (self.parameters.values if self.parameters is not None else {}).items():
            scale, unit = (1e-3, "us") if name == FRONT_END else (1.0, "")
            interval = f"{item.low * scale:.4g} … {item.high * scale:.4g}"
            rows.append(
                (f"calibrated {name.removesuffix('_ns')}", item.value * scale, unit, f"{self.source}: {interval}")
            )
        return rows


def load_calibration(path: str | Path) -> Calibration:
    """Read a profile. Raises `ConfigError` with the file and every problem: unknown keys, wrong types, numbers that are
    impossible as times."""
    file = str(path)
    return read_profile(read_json_object(file, read_text), file)


_PROFILE = TypeAdapter(Calibration)
_HEAD = {"format", "version"}
_KEYS = [
    *(item.name for part in (Calibration, FittedParameters, ExecutorSteps, AlgorithmSteps, RoundGrids, HostCost) for item in fields(part)),
    *PARAMETERS,
]  # fmt: skip


def read_profile(data: Mapping[str, Any], source: str) -> Calibration:
    """Read the object of a profile. Raises `ConfigError` as `load_calibration` does."""
    version = data.get("version")
    if data.get("format") != FORMAT or type(version) is not int or version not in READ:
        found = f"{data.get('format')!r}, version {version!r}"
        message = f"expected {FORMAT!r}, version {VERSION}, found {found}; `foredraft calibrate` writes such files"
        raise ConfigError.of(source, "format", message)
    if version != VERSION and data.get("parameters") is not None:
        message = (
            f"{version} has waits, in whose place factors on rounds are fitted: run `foredraft calibrate --from` again"
        )
        raise ConfigError.of(source, "version", message)
    try:
        profile = _PROFILE.validate_json(json.dumps({key: value for key, value in data.items() if key not in _HEAD}))
    except ValidationError as error:
        raise ConfigError(source, [_problem(detail) for detail in error.errors()]) from None
    if (profile.parameters is None) == (profile.steps is None):
        message = "missing, and there are no steps either" if profile.steps is None else "stand alone, without steps"
        raise ConfigError.of(source, "parameters", message)
    if problems := [*_implausible(profile.parameters)]:
        raise ConfigError(source, problems)
    return profile


def _problem(detail: Mapping[str, Any]) -> Problem:
    """Return what is wrong under the key of the file."""
    key = (
        ".".join(str(part) for part in detail["loc"])
        .replace("parameters.values.", "parameters.")
        .removesuffix(".[key]")
    )
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return Problem(key, f"unknown key{nearest(str(detail['loc'][-1]), _KEYS)}")
    message = detail["msg"].removeprefix("Value error, ")
    return Problem(key, f"{message[0].lower()}{message[1:]}, found {shown(detail['input'])}")


def _implausible(fitted: FittedParameters | None) -> Iterator[Problem]:
    """Yield the parameters that no deployment can have."""
    for name, item in (fitted.values if fitted is not None else {}).items():
        low, high = (-2.0, 2.0) if name in SLOPES else (0.0, 1e12) if name == FRONT_END else (0.01, 100.0)
        if not low <= item.value <= high:
            yield Problem(f"parameters.{name}.value", f"expected {low:g} … {high:g}, found {item.value:g}")
        for end in ("low", "high"):
            if name not in SLOPES and getattr(item, end) < 0:
                yield Problem(f"parameters.{name}.{end}", f"expected a number ≥ 0, found {getattr(item, end):g}")


def profile_document(calibration: Calibration) -> dict[str, Any]:
    """Return the JSON object that `load_calibration` reads as `calibration`."""
    document: dict[str, Any] = _PROFILE.dump_python(calibration, mode="json", exclude_none=True)
    if calibration.parameters is not None:
        document["parameters"] |= document["parameters"].pop("values")
    return {"format": FORMAT, "version": VERSION} | document


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
