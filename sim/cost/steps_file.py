"""Reads the measured steps of an executor out of a profile, and notes every problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ...core.contract.step import RoundShape
from ...core.errors import ConfigError, Problem, nearest
from .executor_steps import AXES, AlgorithmSteps, ExecutorSteps, Grid, RoundGrids
from .host import HostCost

MAX_POINTS = 1 << 20


def read_executor_steps(value: Any, source: str) -> ExecutorSteps:
    """Read what `ExecutorSteps.to_json` wrote. Raises ConfigError with every problem."""
    reader = _Reader("steps")
    found = reader.tables(value)
    if reader.problems or found is None:
        raise ConfigError(source, reader.problems)
    return found


class _Reader:
    """Collects the problems of one profile's tables."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.problems: list[Problem] = []

    def tables(self, value: Any) -> ExecutorSteps | None:
        known = [item.name for item in fields(ExecutorSteps)]
        data = self._object(value, "", known)
        host = self._object(data.get("host"), "host", [item.name for item in fields(HostCost)])
        for name, number in host.items():
            if name.endswith("_ns") and (type(number) is not int or number < 0):
                self._problem(f"host.{name}", f"expected an integer ≥ 0, found {number!r}")
        parts = self._object(data.get("algorithms"), "algorithms")
        read = {name: self._algorithm(part, f"algorithms.{name}") for name, part in parts.items()}
        algorithms = {name: tables for name, tables in read.items() if tables is not None}
        spread = self._object(data.get("spread"), "spread")
        for name, number in spread.items():
            if not _is_time(number):
                self._problem(f"spread.{name}", f"expected a number ≥ 0, found {number!r}")
        target = self._object(data.get("target"), "target")
        for name, number in target.items():
            if type(number) is not int:
                self._problem(f"target.{name}", f"expected an integer, found {number!r}")
        for name, kind in (("device", str), ("threads", int), ("padded", bool)):
            if type(data.get(name)) is not kind:
                self._problem(name, f"expected {kind.__name__}, found {data.get(name)!r}")
        if not parts:
            self._problem("algorithms", "expected at least one")
        if self.problems:
            return None
        return ExecutorSteps(
            data["device"], data["threads"], data["padded"], target, HostCost(**host), algorithms, spread
        )

    def _algorithm(self, value: Any, key: str) -> AlgorithmSteps | None:
        data = self._object(value, key, [item.name for item in fields(AlgorithmSteps)])
        rounds: dict[int, RoundGrids] = {}
        for topk, parts in self._object(data.get("rounds"), f"{key}.rounds").items():
            place = f"{key}.rounds.{topk}"
            names = [item.name for item in fields(RoundGrids)]
            read = {name: self._grid(part, name, place) for name, part in self._object(parts, place, names).items()}
            grids = {name: grid for name, grid in read.items() if grid is not None}
            if not topk.isdecimal() or int(topk) < 1:
                self._problem(place, "expected a branching ≥ 1 as its name")
            elif len(grids) == len(names):
                contexts = {grid.axes["context"] for name, grid in grids.items() if "context" in AXES[name]}
                if len(contexts) > 1:
                    self._problem(place, "expected the same context axis in draft, verify and extend")
                rounds[int(topk)] = RoundGrids(**grids)
        graphs: dict[RoundShape, Grid] = {}
        for shape, grid in self._object(data.get("graphs"), f"{key}.graphs").items():
            numbers = shape.split("-")
            if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
                self._problem(f"{key}.graphs.{shape}", "expected steps-topk-nodes as its name")
            elif (found := self._grid(grid, "graph", f"{key}.graphs", shape)) is not None:
                graphs[RoundShape(*map(int, numbers))] = found
        prefill, rest = (self._grid(data.get(name), name, key) for name in ("prefill", "rest"))
        shared = data.get("shared_ns")
        if not isinstance(shared, int) or isinstance(shared, bool) or shared < 0:
            self._problem(f"{key}.shared_ns", f"expected an integer ≥ 0, found {shared!r}")
            return None
        if self.problems or prefill is None or rest is None:
            return None
        return AlgorithmSteps(prefill, rest, rounds, graphs, shared)

    def _grid(self, value: Any, kind: str, key: str, name: str | None = None) -> Grid | None:
        place = f"{key}.{name or kind}"
        before = len(self.problems)
        data = self._object(value, place, ["axes", "ns"])
        axes = self._object(data.get("axes"), f"{place}.axes", AXES[kind])
        for axis, points in axes.items():
            whole = isinstance(points, list) and points and all(type(point) is int and point >= 0 for point in points)
            if not whole or sorted(set(points)) != points:
                self._problem(f"{place}.axes.{axis}", f"expected ascending whole numbers, found {str(points)[:60]}")
        if len(self.problems) > before:
            return None
        ordered = {axis: tuple(axes[axis]) for axis in AXES[kind]}
        shape = tuple(len(points) for points in ordered.values())
        if math.prod(shape) > MAX_POINTS:
            self._problem(place, f"has {math.prod(shape)} points; expected at most {MAX_POINTS}")
            return None
        try:
            ns = np.array(data["ns"], dtype=float)
        except (TypeError, ValueError):
            ns = np.empty(0)
        if ns.shape != shape or not np.isfinite(ns).all() or (ns < 0).any():
            expected = " × ".join(f"{len(points)} {axis}" for axis, points in ordered.items())
            self._problem(f"{place}.ns", f"expected {expected} numbers ≥ 0")
            return None
        return Grid(ordered, ns)

    def _object(self, value: Any, key: str, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return `value` if it is an object, with exactly these names if they are given; else note why not."""
        if not isinstance(value, dict):
            self._problem(key, f"expected an object, found {str(value)[:60]}")
            return {}
        if names is not None:
            for name in value:
                if name not in names:
                    self._problem(f"{key}.{name}".lstrip("."), f"unknown key{nearest(name, names)}")
            for name in names:
                if name not in value:
                    self._problem(f"{key}.{name}".lstrip("."), "missing")
        return value

    def _problem(self, key: str, message: str) -> None:
        self.problems.append(Problem(f"{self.key}.{key}".rstrip("."), message))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
