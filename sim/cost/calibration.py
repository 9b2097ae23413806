"""Profiles: what was measured of one deployment, as `profile.json` holds it (`hardware.profile`).

A profile has one part or several:

    parameters   the few numbers of the timing that were fitted to benchmark results: `foretoken calibrate --from`
    tables       times of single operations over grids, as they were measured: they replace the roofline's
    steps        the steps of our own executor: `foretoken calibrate --model`; alone, as they replace all other times

Parameters hold for the server profile and the kernels around which they were fitted, and apply to whatever prices the passes; tables hold
for one model, GPU and tensor parallelism. docs/calibration.md describes the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import ConfigError, Problem, nearest
from ...core.parsing import read_json_object
from ...observe.input_files import read_text
from .executor_steps import ExecutorSteps, read_executor_steps
from .forward import Line
from .host import HostCost, LaunchCost

FORMAT = "foretoken-profile"
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

KV_TOKENS = "kv_tokens"
TABLES: dict[str, tuple[str, ...]] = {
    "target": ("tokens", KV_TOKENS),
    "draft_pass": ("tokens", KV_TOKENS),
    "sampling": ("tokens",),
}
"""The operations that a profile may have times of, and the axes of each: `tokens` of one pass, `kv_tokens` that it reads over the batch.

`target`: the target's forward pass with its LM head; `draft_pass`: one drafting pass of `draft_algorithm`; `sampling`: sampling and
acceptance, of the verified tokens.
"""
MAX_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class FittedParameter:
    """A fitted number, its interval (90 %), and the share of its uncertainty that the measurements took away."""

    value: float
    low: float
    high: float
    told: float


@dataclass(frozen=True, slots=True)
class FittedParameters:
    """Numbers of the timing that were fitted around a server profile. What is not in `values` stays as the server profile has it.

    `kernels`: what priced the target's passes (see `RoundCost.kernels`); `error`, `left_out_error`: mean absolute relative errors of the
    points fitted, and of points that were left out of the fit.
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
        return replace(launch, **{name: self.values[name].value for name in LAUNCH_TIMES if name in self.values})


_HOST_PARTS = ("plan", "launch", "sampling", "commit")


def host_total_ns(host: HostCost, share: str) -> int:
    """Return the host's time per step: its `share` "base", or "row"."""
    return sum(getattr(host, f"{part}_{share}_ns") for part in _HOST_PARTS)


def with_host_total(host: HostCost, share: str, total_ns: float) -> HostCost:
    """Return `host` with another `host_total_ns`, divided among its parts as before; among equal parts if it was 0."""
    before = host_total_ns(host, share)
    names = [f"{part}_{share}_ns" for part in _HOST_PARTS]
    shares = [getattr(host, name) / before if before else 1 / len(names) for name in names]
    return replace(host, **{name: round(total_ns * part) for name, part in zip(names, shares, strict=True)})


@dataclass(frozen=True, slots=True)
class StepTable:
    """Times of one operation over a grid: linear between its points and beyond the last ones.

    axes:  a name and its increasing points, for every dimension of `ns`
    ns:    float64, [points of each axis …]
    """

    axes: tuple[tuple[str, np.ndarray], ...]
    ns: np.ndarray

    def line(self, *at: float) -> Line:
        """Return the time where all axes but `kv_tokens` have the values `at`, linear in KV tokens (least squares over its points)."""
        values = self.ns
        for (_, points), place in zip(self.axes, at, strict=False):
            if len(points) == 1:
                values = values[0]
                continue
            j = min(max(int(np.searchsorted(points, place)), 1), len(points) - 1)
            weight = (place - points[j - 1]) / (points[j] - points[j - 1])
            values = (1 - weight) * values[j - 1] + weight * values[j]
        if self.axes[-1][0] != KV_TOKENS:
            return Line(max(0.0, float(values)))
        points = self.axes[-1][1]
        if len(points) == 1:
            return Line(max(0.0, float(values[0])))
        offset = points - points.mean()
        slope = max(0.0, float(offset @ values / (offset @ offset)))
        return Line(max(0.0, float(values.mean() - slope * points.mean())), slope)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile: for one model on one GPU, with these tensor-parallel sizes."""

    name: str
    source: str
    gpu: str
    model: str
    tp: tuple[int, ...] = (1,)
    parameters: FittedParameters | None = None
    draft_algorithm: str = ""
    tables: Mapping[str, StepTable] = field(default_factory=dict)
    steps: ExecutorSteps | None = None

    def check(self, gpu: str, model: str, tp: int) -> None:
        """Raise `ConfigError` if this profile was measured on another GPU, or has tables of another model or tensor parallelism."""
        used = [("gpu", self.gpu, gpu)]
        if self.tables:
            used += [
                ("model", self.model, model),
                ("tp", _words(self.tp), tp if tp not in self.tp else _words(self.tp)),
            ]
        problems = [
            Problem(f"profile.{key}", f"measured for {measured}, but the run uses {found}")
            for key, measured, found in used
            if measured != found
        ]
        if problems:
            raise ConfigError(self.name, problems)

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
        """What the run's report says of this profile."""
        fitted = self.parameters
        if fitted is None:
            return f"measured times of {self.source}"
        return (
            f"calibrated from {fitted.points} points ({self.source}), which it meets within {fitted.error:.1%} on average, points left out "
            f"within {fitted.left_out_error:.1%}"
        )

    def notices(self, model: str, tp: int) -> Iterator[str]:
        """Yield sentences for the user where fitted parameters are used beyond what they were measured with."""
        if self.model != model:
            yield f"hardware.profile was calibrated with {self.model}; its fit may be worse for {model}"
        if tp not in self.tp:
            yield f"hardware.profile was calibrated with tensor parallel {_words(self.tp)}; its fit may be worse for {tp}"

    def table(self, name: str, algorithm: str | None = None) -> StepTable | None:
        """Return the times of an operation, None if they are not known; those of a draft hold for its `algorithm` alone."""
        return None if algorithm not in (None, self.draft_algorithm) else self.tables.get(name)

    def explain(self) -> list[tuple[str, float, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float, str, str]] = []
        for name, item in (self.parameters.values if self.parameters is not None else {}).items():
            scale, unit = (1.0, "") if name == DEVICE else (1e-3, "us")
            interval = f"{item.low * scale:.4g} … {item.high * scale:.4g}"
            rows.append(
                (f"calibrated {name.removesuffix('_ns')}", item.value * scale, unit, f"{self.source}: {interval}")
            )
        for name, table in self.tables.items():
            least, most = float(table.ns.min()) / 1e3, float(table.ns.max()) / 1e3
            rows.append((f"measured {name}: least", least, "us", self.source))
            rows.append((f"measured {name}: greatest", most, "us", self.source))
        return rows


def load_calibration(path: str | Path) -> Calibration:
    """Read a profile. Raises `ConfigError` with the file and every problem: unknown keys, wrong types, numbers that no time can be."""
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
            message = f"expected {FORMAT!r}, version {VERSION}, found {found}; `foretoken calibrate` writes such files"
            raise ConfigError(self.file, [Problem("format", message)])
        self._known("", data, self.KEYS)
        texts = {key: self._text(key, data) for key in ("name", "source", "gpu", "model")}
        tp = data.get("tp")
        if not isinstance(tp, list) or not tp or not all(type(n) is int and n >= 1 for n in tp):
            self._problem("tp", f"expected a list of integers ≥ 1, found {_short(tp)}")
        given = data.get("parameters")
        parameters = self._parameters(given) if given is not None else None
        tables = dict(self._tables(data.get("tables")))
        algorithm = self._text("draft_algorithm", data) if "draft_pass" in tables else data.get("draft_algorithm", "")
        steps = None
        if data.get("steps") is not None:
            if given is not None or tables:
                self._problem("steps", "stand alone: they replace what parameters and tables are about")
            try:
                steps = read_executor_steps(data["steps"], self.file)
            except ConfigError as error:
                self.problems += error.problems
        elif given is None and not data.get("tables"):
            self._problem("parameters", "missing, and there are no tables and no steps either")
        if self.problems:
            raise ConfigError(self.file, self.problems)
        return Calibration(
            **texts, tp=tuple(tp), parameters=parameters, draft_algorithm=algorithm, tables=tables, steps=steps
        )

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

    def _tables(self, data: Any) -> Iterator[tuple[str, StepTable]]:
        if not isinstance(data, dict | None):
            self._problem("tables", f"expected an object, found {_short(data)}")
        if not isinstance(data, dict):
            return
        self._known("tables.", data, TABLES)
        for name, item in data.items():
            table = self._table(name, item) if name in TABLES else None
            if table is not None:
                yield name, table

    def _table(self, name: str, item: Any) -> StepTable | None:
        key = f"tables.{name}"
        axes = item.get("axes") if isinstance(item, dict) else None
        if not isinstance(axes, dict) or tuple(axes) != TABLES[name]:
            found = _short(list(axes) if isinstance(axes, dict) else item)
            self._problem(
                f"{key}.axes", f"expected an object with {', '.join(TABLES[name])} in this order, found {found}"
            )
            return None
        self._known(f"{key}.", item, ("axes", "ns"))
        before = len(self.problems)
        points = {axis: self._array(f"{key}.axes.{axis}", values) for axis, values in axes.items()}
        for axis, values in points.items():
            if values is not None and (values.ndim != 1 or not values.size or (np.diff(values) <= 0).any()):
                self._problem(f"{key}.axes.{axis}", "expected a list of increasing numbers")
        ns = self._array(f"{key}.ns", item.get("ns"))
        if len(self.problems) == before:
            expected = tuple(len(values) for values in points.values())
            if ns.shape != expected:
                self._problem(
                    f"{key}.ns", f"expected lists of {_words(expected, ' × ')} times, found {_words(ns.shape, ' × ')}"
                )
        return StepTable(tuple(points.items()), ns) if len(self.problems) == before else None

    def _array(self, key: str, value: Any) -> np.ndarray | None:
        try:
            array = np.array(value) if isinstance(value, list) else None
        except ValueError:  # lists of different lengths
            array = None
        if array is None or array.dtype.kind not in "iuf" or array.size > MAX_CELLS or (array < 0).any():
            self._problem(key, f"expected lists of numbers ≥ 0, equally long, found {_short(value)}")
            return None
        return array.astype(float)

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
    if calibration.tables:
        document["draft_algorithm"] = calibration.draft_algorithm
        document["tables"] = {
            name: {"axes": {axis: points.tolist() for axis, points in table.axes}, "ns": table.ns.tolist()}
            for name, table in calibration.tables.items()
        }
    if calibration.steps is not None:
        document["steps"] = calibration.steps.to_json()
    return document


def _words(numbers: tuple[int, ...], between: str = ", ") -> str:
    return between.join(map(str, numbers))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
