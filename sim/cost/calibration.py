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
from typing import Any

from ...core.errors import ConfigError, Problem, count_of, nearest
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from .executor_steps import ExecutorSteps
from .host import HostCost, LaunchCost
from .steps_file import read_executor_steps

FORMAT = "foredraft-profile"
VERSION = 1

DEVICE, HOST_BASE, HOST_ROW = "device_scale", "host_base_ns", "host_row_ns"
LAUNCH_TIMES = ("graph_gap_ns", "row_gap_ns", "collective_gap_ns", "draft_step_ns", "eagle3_step_ns", "tree_ns")
PARAMETERS: dict[str, str] = {
    DEVICE: "factor on the time of all kernels",
    HOST_BASE: "the host's time per step, without its rows",
    HOST_ROW: "the host's time per step and row",
    "graph_gap_ns": "fixed time of a captured pass: one per plain round, verify and catch-up per speculative round",
    "row_gap_ns": "what the device waits for the host per step and row",
    "collective_gap_ns": "what a collective waits for the slowest device, per doubling of their number",
    "draft_step_ns": "fixed time of a draft step",
    "eagle3_step_ns": "more of that for an EAGLE-3 head; fitted where there are points of other heads, too",
    "tree_ns": "fixed time of a round that drafts a tree",
}
"""The parameters that a profile may have. Times in nanoseconds."""


@dataclass(frozen=True, slots=True)
class FittedParameter:
    """A fitted number, its interval (90 %), and the share of its uncertainty that the measurements took away."""

    value: float
    low: float
    high: float
    told: float


@dataclass(frozen=True, slots=True)
class FittedParameters:
    """Numbers of the timing that were fitted around a server profile. Parameters that are not in `values` stay as in
    the server profile.

    `kernels`: what priced the target's passes (see `RoundCost.kernels`); `error`, `left_out_error`: mean absolute
    relative errors of the points fitted, and of points that were left out of the fit.
    """

    server: str
    kernels: str
    values: Mapping[str, FittedParameter]
    points: int
    error: float
    left_out_error: float

    @property
    def device_scale(self) -> float:
        return self.values[DEVICE].value if DEVICE in self.values else 1.0

    def host(self, host: HostCost) -> HostCost:
        """Return `host` with the fitted times, divided among plan, launch and commit as they were."""
        if HOST_BASE in self.values:
            host = with_host_total(host, "base", self.values[HOST_BASE].value)
        if HOST_ROW in self.values:
            host = with_host_total(host, "row", self.values[HOST_ROW].value)
        return host

    def launch(self, launch: LaunchCost) -> LaunchCost:
        """Return `launch` with the fitted times."""
        fitted: dict[str, Any] = {name: self.values[name].value for name in LAUNCH_TIMES if name in self.values}
        return replace(launch, **fitted)


_HOST_PARTS = ("plan", "launch", "sampling", "commit")


def host_total_ns(host: HostCost, share: str) -> int:
    """Return the host's time per step: its `share` "base", or "row"."""
    return sum(getattr(host, f"{part}_{share}_ns") for part in _HOST_PARTS)


def with_host_total(host: HostCost, share: str, total_ns: float) -> HostCost:
    """Return `host` with another `host_total_ns`, divided among its parts as before; among equal parts if it was 0."""
    before = host_total_ns(host, share)
    names = [f"{part}_{share}_ns" for part in _HOST_PARTS]
    shares = [getattr(host, name) / before if before else 1 / len(names) for name in names]
    parts: dict[str, Any] = {name: round(total_ns * part) for name, part in zip(names, shares, strict=True)}
    return replace(host, **parts)


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
            scale, unit = (1.0, "") if name == DEVICE else (1e-3, "us")
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
    BASE_KEYS = ("server", "kernels", "points", "error", "left_out_error")

    def __init__(self, file: str, data: Mapping[str, Any]) -> None:
        self.file, self.data = file, data
        self.problems: list[Problem] = []

    def calibration(self) -> Calibration:
        data = self.data
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            found = f"{data.get('format')!r}, version {data.get('version')!r}"
            message = f"expected {FORMAT!r}, version {VERSION}, found {found}; `foredraft calibrate` writes such files"
            raise ConfigError.of(self.file, "format", message)
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
        self._known("parameters.", data, (*self.BASE_KEYS, *PARAMETERS))
        server, kernels = (self._text(key, data, "parameters.") for key in ("server", "kernels"))
        errors = [self._number(f"parameters.{key}", data.get(key)) for key in ("points", "error", "left_out_error")]
        values = {}
        for name in PARAMETERS:
            if name in data:
                item = data[name] if isinstance(data[name], dict) else {}
                self._known(f"parameters.{name}.", item, FittedParameter.__slots__)
                numbers = [self._number(f"parameters.{name}.{key}", item.get(key)) for key in FittedParameter.__slots__]
                values[name] = FittedParameter(*numbers)
        if DEVICE in values and not 0.01 <= values[DEVICE].value <= 100:
            self._problem(f"parameters.{DEVICE}.value", f"expected 0.01 … 100, found {values[DEVICE].value:g}")
        return FittedParameters(server, kernels, values, int(errors[0]), *errors[1:])

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

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            self._problem(key, f"expected a number ≥ 0, found {_short(value)}")
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
        document["parameters"] = {key: getattr(fitted, key) for key in _Reader.BASE_KEYS} | items
    if calibration.steps is not None:
        document["steps"] = calibration.steps.to_json()
    return document


def _words(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
