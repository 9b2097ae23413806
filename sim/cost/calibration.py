"""Profiles: the measurements of one deployment, in the form of `profile.json` (`hardware.profile`).

A profile has one of two parts:

    parameters   the few numbers of the timing that were fitted to benchmark results: `foredraft calibrate --from`
    steps        the steps of our own executor, which replace all other times: `foredraft calibrate --model`

Parameters hold for the server profile and the kernels around which they were fitted, and apply to whatever prices the
passes. docs/calibration.md describes the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import ConfigError, Problem, count_of, nearest
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from .executor_steps import ExecutorSteps
from .host import FrontEnd, HostCost
from .steps_file import read_executor_steps

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

    value: float
    low: float
    high: float


class MeasuredClients(NamedTuple):
    """The fewest, the usual and the most requests at a time of the points: beyond the ends a factor does not change."""

    least: float
    usual: float
    most: float


@dataclass(frozen=True, slots=True)
class FittedParameters:
    """Numbers of the timing that were fitted around a server profile.

    `kernels`: what priced the target's passes (see `RoundCost.kernels`); `error`, `left_out_error`: mean absolute
    relative errors of decoding of the points fitted, and of points that were left out of the fit;
    `left_out_ttft_error`: of times to the first token, None if none was measured.
    """

    server: str
    kernels: str
    values: Mapping[str, FittedParameter]
    clients: MeasuredClients
    points: int
    error: float
    left_out_error: float
    left_out_ttft_error: float | None = None

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


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile: for one model on one GPU, with these tensor-parallel sizes."""

    name: str
    source: str
    gpu: str
    model: str
    tp: tuple[int, ...] = (1,)
    parameters: FittedParameters | None = None
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
    return _Reader(file, read_json_object(file, read_text)).calibration()


class _Reader:
    """Reads the object of a profile and notes every problem."""

    KEYS = ("format", "version", *Calibration.__slots__)
    BASE_KEYS = ("server", "kernels", "points", "error", "left_out_error", "left_out_ttft_error")

    def __init__(self, file: str, data: Mapping[str, Any]) -> None:
        self.file, self.data = file, data
        self.problems: list[Problem] = []

    def calibration(self) -> Calibration:
        data = self.data
        version = data.get("version")
        if data.get("format") != FORMAT or type(version) is not int or version not in READ:
            found = f"{data.get('format')!r}, version {version!r}"
            message = f"expected {FORMAT!r}, version {VERSION}, found {found}; `foredraft calibrate` writes such files"
            raise ConfigError.of(self.file, "format", message)
        if version != VERSION and data.get("parameters") is not None:
            message = f"{version} has waits, in whose place factors on rounds are fitted: run `foredraft calibrate --from` again"
            raise ConfigError.of(self.file, "version", message)
        self._known("", data, self.KEYS)
        texts = {key: self._text(key, data) for key in ("name", "source", "gpu", "model")}
        tp = data.get("tp")
        if not isinstance(tp, list) or not tp or not all(type(n) is int and n >= 1 for n in tp):
            self._problem("tp", f"expected a list of integers ≥ 1, found {_short(tp)}")
            tp = []
        given = data.get("parameters")
        parameters = self._parameters(given) if given is not None else None
        steps = None
        if data.get("steps") is not None:
            if given is not None:
                self._problem("steps", "stand alone: they replace what parameters are about")
            try:
                steps = read_executor_steps(data["steps"], self.file)
            except ConfigError as error:
                self.problems += error.problems
        elif given is None:
            self._problem("parameters", "missing, and there are no steps either")
        if self.problems:
            raise ConfigError(self.file, self.problems)
        return Calibration(**texts, tp=tuple(tp), parameters=parameters, steps=steps)

    def _parameters(self, data: Any) -> FittedParameters | None:
        if not isinstance(data, dict):
            self._problem("parameters", f"expected an object, found {_short(data)}")
            return None
        self._known("parameters.", data, (*self.BASE_KEYS, "clients", *PARAMETERS))
        server, kernels = (self._text(key, data, "parameters.") for key in ("server", "kernels"))
        points, error, left_out = (
            self._number(f"parameters.{key}", data.get(key)) for key in ("points", "error", "left_out_error")
        )
        first = data.get("left_out_ttft_error")
        if first is not None:
            first = self._number("parameters.left_out_ttft_error", first)
        values = {}
        for name in PARAMETERS:
            if name in data:
                item = data[name] if isinstance(data[name], dict) else {}
                prefix = f"parameters.{name}."
                self._known(prefix, item, FittedParameter.__slots__)
                least = -math.inf if name in SLOPES else 0.0
                values[name] = FittedParameter(
                    *(self._number(f"{prefix}{key}", item.get(key), least) for key in FittedParameter.__slots__)
                )
                self._plausible(name, values[name].value)
        return FittedParameters(server, kernels, values, self._clients(data), int(points), error, left_out, first)

    def _clients(self, data: Mapping[str, Any]) -> MeasuredClients:
        """Return the requests at a time of the points."""
        given, prefix = data.get("clients"), "parameters.clients."
        if not isinstance(given, dict):
            self._problem("parameters.clients", f"expected an object, found {_short(given)}")
            return MeasuredClients(1.0, 1.0, 1.0)
        self._known(prefix, given, MeasuredClients._fields)
        found = MeasuredClients(*(self._number(f"{prefix}{key}", given.get(key)) for key in MeasuredClients._fields))
        if not 0 < found.least <= found.usual <= found.most:
            self._problem("parameters.clients", f"expected 0 < least ≤ usual ≤ most, found {_short(given)}")
        return found

    def _plausible(self, name: str, value: float) -> None:
        """Note a parameter that no deployment can have."""
        if name in SLOPES:
            low, high = -2.0, 2.0
        elif name == FRONT_END:
            low, high = 0.0, 1e12
        else:
            low, high = 0.01, 100.0
        if not low <= value <= high:
            self._problem(f"parameters.{name}.value", f"expected {low:g} … {high:g}, found {value:g}")

    def _known(self, prefix: str, data: Mapping[str, Any], known: Any) -> None:
        for key in data:
            if key not in known:
                self._problem(f"{prefix}{key}", f"unknown key{nearest(key, known)}")

    def _text(self, key: str, data: Mapping[str, Any], prefix: str = "") -> str:
        value = data.get(key)
        if not isinstance(value, str) or not value:
            self._problem(f"{prefix}{key}", f"expected a text, found {_short(value)}")
            return ""
        return value

    def _number(self, key: str, value: Any, least: float = 0.0) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
            self._problem(key, f"expected a number{' ≥ 0' if least == 0 else ''}, found {_short(value)}")
            return 0.0
        return float(value)

    def _problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(key, message))


def profile_document(calibration: Calibration) -> dict[str, Any]:
    """Return the JSON object that `load_calibration` reads as `calibration`."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    document |= {key: getattr(calibration, key) for key in ("name", "source", "gpu", "model")}
    document["tp"] = list(calibration.tp)
    fitted = calibration.parameters
    if fitted is not None:
        items = {n: {k: getattr(item, k) for k in FittedParameter.__slots__} for n, item in fitted.values.items()}
        base = {key: getattr(fitted, key) for key in _Reader.BASE_KEYS}
        document["parameters"] = base | {"clients": fitted.clients._asdict()} | items
    if calibration.steps is not None:
        document["steps"] = calibration.steps.to_json()
    return document


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
