"""Measured times of an executor's own steps: grids over rows, context and shape, and the cost that follows from them
for a simulated device.

`foredraft calibrate --model` measures them (docs/calibration.md). A round is the sum of its parts, each interpolated
linearly:

    draft      steps × rows × context         kv_move    steps × rows (trees)
    verify     nodes × rows × context         extend     accepted nodes × rows × context
    rest       rows: relay, launch, reading the results

or, where rounds were captured, one time per shape, rows × context. A step with prompt chunks adds `prefill`, chunks ×
tokens × context, as our executor runs both one after the other, less what one step does once (`shared_ns`). Below a
grid its first value is used. Beyond it, chunks, tokens and context continue along the last slope; rows, steps and nodes
beyond the measured ones are refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationInfo

from ...core.contract.step import RoundShape
from ...core.errors import ConfigError, Problem, nearest
from ...core.scheduler.spec import EngineSpec
from .host import HostCost
from .passes.decode_work import DecodeWork

AXES: dict[str, tuple[str, ...]] = {
    "prefill": ("chunks", "tokens", "context"),
    "rest": ("rows",),
    "draft": ("steps", "rows", "context"),
    "verify": ("nodes", "rows", "context"),
    "kv_move": ("steps", "rows"),
    "extend": ("accepted", "rows", "context"),
    "graph": ("rows", "context"),
}
GROWING = ("chunks", "tokens", "context")  # axes along which a grid goes on behind its end
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""The reading of a profile: no unknown keys, and no values of another type."""


def _ascending(points: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(set(points)) != list(points):
        raise ValueError("expected ascending whole numbers")
    return points


def _times(value: Any, read: ValidationInfo) -> np.ndarray:
    """Return the times of a grid, whose axes have been read."""
    axes = read.data.get("axes")
    if axes is None:
        return np.empty(0)  # their own problem is told
    try:
        ns = np.array(value, dtype=float)
    except (TypeError, OverflowError):
        ns = np.empty(0)
    if ns.shape != tuple(map(len, axes.values())) or not np.isfinite(ns).all() or (ns < 0).any():
        raise ValueError(f"expected {' × '.join(f'{len(points)} {axis}' for axis, points in axes.items())} numbers ≥ 0")
    return ns


def _over(kind: str) -> BeforeValidator:
    """Return the validator of a grid of this kind, which has its axes, in any order."""

    def ordered(value: Any) -> Any:
        axes = value.get("axes") if isinstance(value, dict) else None
        if not isinstance(axes, dict) or set(axes) != set(AXES[kind]):
            raise ValueError(f"expected times over the axes {', '.join(AXES[kind])}")
        return {**value, "axes": {name: axes[name] for name in AXES[kind]}}

    return BeforeValidator(ordered)


Count = Annotated[int, Field(ge=0)]
Axis = Annotated[tuple[Count, ...], Field(min_length=1, strict=False), AfterValidator(_ascending)]
Times = Annotated[np.ndarray, PlainValidator(_times), PlainSerializer(lambda ns: ns.round().tolist())]


@dataclass(frozen=True, slots=True)
class Grid:
    """Nanoseconds over the product of named axes, float64 of their lengths; each axis ascends."""

    __pydantic_config__ = STRICT

    axes: Mapping[str, Axis]
    ns: Times

    def at(self, **coordinates: float) -> Grid:
        """Return the rest of the grid at these coordinates; if no axis is left, `ns` is one number.

        Raises ConfigError outside an axis that does not go on.
        """
        axes, ns = dict(self.axes), self.ns
        for name, value in coordinates.items():
            points = axes[name]
            low, share = _place(points, value, name)
            axis = list(axes).index(name)
            first = ns.take(low, axis)
            step = ns.take(min(low + 1, len(points) - 1), axis) - first
            ns = first + min(share, 1.0) * step + max(share - 1.0, 0.0) * np.maximum(step, 0.0)
            del axes[name]
        return Grid(axes, ns)


def _place(points: Sequence[int], value: float, name: str) -> tuple[int, float]:
    """Return the point before `value`, and how far it is on the way to the next, above 1 behind the last."""
    if value > points[-1] and name not in GROWING:
        raise ConfigError.of("steps", name, f"{value:g} was not measured; the profile ends at {points[-1]}")
    if len(points) == 1 or value <= points[0]:
        return 0, 0.0
    low = min(bisect_left(points, value), len(points) - 1) - 1
    return low, (value - points[low]) / (points[low + 1] - points[low])


@dataclass(frozen=True, slots=True)
class RoundGrids:
    """The parts of rounds with one branching: 1 for chains and plain decoding."""

    __pydantic_config__ = STRICT

    draft: Annotated[Grid, _over("draft")]
    verify: Annotated[Grid, _over("verify")]
    kv_move: Annotated[Grid, _over("kv_move")]
    extend: Annotated[Grid, _over("extend")]

    def __post_init__(self) -> None:
        if not self.draft.axes["context"] == self.verify.axes["context"] == self.extend.axes["context"]:
            raise ValueError("expected the same context axis in draft, verify and extend")


def _shape(name: Any) -> Any:
    """Return the shape of a captured round by its name in a profile, steps-topk-nodes."""
    if not isinstance(name, str) or not re.fullmatch("-".join([_NUMBER] * 3), name):
        raise ValueError("expected steps-topk-nodes as its name, numbers without leading zeros")
    return RoundShape(*map(int, name.split("-")))


def _branching(name: Any) -> Any:
    if isinstance(name, str) and not re.fullmatch(_NUMBER, name):
        raise ValueError("expected a top-k as its name, a number without leading zeros")
    return int(name) if isinstance(name, str) else name


_NUMBER = "(?:0|[1-9][0-9]{0,8})"  # two spellings of one number would be one key
Branching = Annotated[int, BeforeValidator(_branching), Field(ge=1)]
ShapeName = Annotated[
    RoundShape, PlainValidator(_shape), PlainSerializer(lambda shape: "-".join(map(str, shape)), return_type=str)
]


@dataclass(frozen=True, slots=True)
class AlgorithmSteps:
    """The steps of one algorithm with its draft. `graphs`: captured rounds.

    `shared_ns`: by how much a step with a prompt and a round is shorter than two steps.
    """

    __pydantic_config__ = STRICT

    prefill: Annotated[Grid, _over("prefill")]
    rest: Annotated[Grid, _over("rest")]
    rounds: Mapping[Branching, RoundGrids]  # by topk
    graphs: Mapping[ShapeName, Annotated[Grid, _over("graph")]] = field(default_factory=dict)
    shared_ns: Count = 0


@dataclass(frozen=True, slots=True)
class ExecutorSteps:
    """The measurements of one model on one device. `padded`: a pass is as long as its longest row's KV, else as the
    mean.

    `target`: the shape that was measured, by the names of its config.json; `spread`: standard deviation of the
    logarithm of a step's time, by kind of step (prefill, decode, host).
    """

    __pydantic_config__ = STRICT

    device: str
    threads: int
    padded: bool
    target: Mapping[str, int]
    host: HostCost
    algorithms: Annotated[Mapping[str, AlgorithmSteps], Field(min_length=1)]
    spread: Mapping[str, Annotated[float, Field(ge=0)]] = field(default_factory=dict)

    def cost(self, spec: EngineSpec, source: str) -> StepCost:
        """Return the cost of steps of `spec`. Raises ConfigError with everything that the profile lacks."""
        found = self.algorithms.get(spec.algorithm)
        if found is None:
            known = ", ".join(self.algorithms)
            message = (
                f"{spec.algorithm} was not measured{nearest(spec.algorithm, self.algorithms)}; the profile has {known}"
            )
            raise ConfigError.of(source, "steps.algorithms", message)
        cost = StepCost(found, self.padded, f"steps measured on {self.device}")
        problems = []
        shapes = spec.draft_shape
        for steps in spec.adaptive.candidate_steps:
            for rows in (1, spec.config.max_running):
                try:
                    cost.decode_ns(rows, shapes.round_shape(steps, rows), 1)
                except ConfigError as error:
                    problems += [
                        Problem(f"steps.algorithms.{spec.algorithm}.{p.key}", p.message) for p in error.problems
                    ]
        if problems:
            raise ConfigError(source, list(dict.fromkeys(problems)))
        return cost

    def check_target(self, source: str, **shape: int) -> None:
        """Raise ConfigError if the measured model has another shape."""
        problems = [
            Problem(f"steps.target.{name}", f"measured with {self.target[name]}, but the run's model has {value}")
            for name, value in shape.items()
            if name in self.target and self.target[name] != value
        ]
        if problems:
            raise ConfigError(source, problems)

    def merged(self, other: ExecutorSteps) -> ExecutorSteps:
        """Return these tables with the algorithms of `other`, measured on the same device with the same model."""
        return replace(self, algorithms={**self.algorithms, **other.algorithms})


class _Curve:
    """A round over context for every number of accepted nodes: ns float64 [accepted, contexts]."""

    __slots__ = ("_ns", "_points", "_slopes")

    def __init__(self, points: tuple[int, ...], ns: np.ndarray) -> None:
        self._points = np.array(points, float)
        steps = np.diff(ns, axis=1) / np.diff(self._points) if len(points) > 1 else np.zeros((len(ns), 1))
        self._ns = ns
        self._slopes = np.append(steps, np.maximum(steps[:, -1:], 0.0), axis=1) if len(points) > 1 else steps

    def __call__(self, contexts: np.ndarray, accepted: np.ndarray) -> NDArray[np.int64]:
        """Return nanoseconds, int64 [m], for contexts and accepted nodes [m]."""
        points = self._points
        low = np.clip(np.searchsorted(points, contexts, side="right") - 1, 0, len(points) - 1)
        column = np.clip(np.asarray(accepted) - 1, 0, len(self._ns) - 1)
        beyond = np.maximum(contexts - points[low], 0.0)
        found: NDArray[np.int64] = (self._ns[column, low] + beyond * self._slopes[column, low]).astype(np.int64)
        return found


class StepCost:
    """Device times of steps, from measurements. The methods are those of `RoundCost`; more exact ones use the rows that
    a simulated device knows.

    `sees_rows`: `rounds_ns` takes each round's context and the most nodes that a row accepts.
    """

    sees_rows: Literal[True] = True

    def __init__(self, tables: AlgorithmSteps, padded: bool, priced_by: str) -> None:
        self.tables = tables
        self.padded = padded
        self.priced_by = priced_by
        self.kernel_sources: dict[str, str] = {"all": priced_by}
        self._curves: dict[tuple[int, RoundShape], _Curve] = {}
        self._prefills: dict[tuple[int, int, int], int] = {}

    def at_pace(self, pace: float) -> StepCost:
        """Return the cost on the same machine if everything takes `pace` times as long."""
        known = self.tables

        def slower(grid: Grid) -> Grid:
            return replace(grid, ns=grid.ns * pace)

        rounds = {
            topk: RoundGrids(**{part.name: slower(getattr(grids, part.name)) for part in fields(grids)})
            for topk, grids in known.rounds.items()
        }
        graphs = {shape: slower(grid) for shape, grid in known.graphs.items()}
        shared_ns = round(known.shared_ns * pace)
        return StepCost(
            AlgorithmSteps(slower(known.prefill), slower(known.rest), rounds, graphs, shared_ns),
            self.padded,
            self.priced_by,
        )

    def rounds_ns(
        self, batch_size: int, shape: RoundShape, contexts: np.ndarray, accepted: np.ndarray
    ) -> NDArray[np.int64]:
        """Return nanoseconds of rounds, int64 [m], by context [m] (`padded` says which) and the most accepted
        nodes of a row [m]."""
        key = (batch_size, shape)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._curve(*key)
        return curve(contexts, accepted)

    @overload
    def decode_ns(self, batch_size: int, shape: RoundShape, kv_tokens: int, num_verified: int | None = None) -> int: ...
    @overload
    def decode_ns(
        self, batch_size: int, shape: RoundShape, kv_tokens: NDArray[np.int64], num_verified: int | None = None
    ) -> NDArray[np.int64]: ...
    def decode_ns(
        self, batch_size: int, shape: RoundShape, kv_tokens: int | NDArray[np.int64], num_verified: int | None = None
    ) -> int | NDArray[np.int64]:
        """Do what `RoundCost.decode_ns` does, for rows of equal length of which one accepts everything. Rounds were
        measured with all nodes of every row, so `num_verified` changes nothing."""
        contexts = np.atleast_1d(np.asarray(kv_tokens) / batch_size)
        found = self.rounds_ns(batch_size, shape, contexts, np.full(len(contexts), shape.steps + 1))
        return found if isinstance(kv_tokens, np.ndarray) else int(found[0])

    def step_ns(self, prefill_tokens: Sequence[tuple[int, int]], decode: DecodeWork | None = None) -> int:
        """Do what `RoundCost.step_ns` does: the chunks, then the round."""
        if decode is None:
            return self.prefill_ns(prefill_tokens) if prefill_tokens else 0
        round_ns = self.decode_ns(*decode)
        return self.both_ns(prefill_tokens, round_ns) if prefill_tokens else round_ns

    def both_ns(self, chunks: Sequence[tuple[int, int]], round_ns: int) -> int:
        """Return nanoseconds of a step with prompt chunks and a round that takes `round_ns` alone."""
        prefill_ns = self.prefill_ns(chunks)
        return max(prefill_ns + round_ns - self.tables.shared_ns, prefill_ns, round_ns)

    def prefill_ns(self, chunks: Sequence[tuple[int, int]]) -> int:
        """Return nanoseconds of prompt chunks (new tokens, tokens before them)."""
        key = (len(chunks), sum(new for new, _ in chunks), max(past for _, past in chunks))
        if key not in self._prefills:
            number, tokens, context = key
            self._prefills[key] = int(self.tables.prefill.at(chunks=number, tokens=tokens, context=context).ns)
        return self._prefills[key]

    def decode_parts(
        self, batch_size: int, shape: RoundShape, kv_tokens: int, num_verified: int | None = None
    ) -> dict[str, int]:
        """Return `decode_ns` as the only part, because a captured round is measured as a whole."""
        return {"round": self.decode_ns(batch_size, shape, kv_tokens)}

    def is_captured(self, batch_size: int, nodes: int) -> bool:
        """Return whether rounds of so many rows and tokens per row were measured as a captured graph."""
        return any(
            shape.nodes == nodes and batch_size <= graph.axes["rows"][-1] for shape, graph in self.tables.graphs.items()
        )

    def explain(self) -> list[tuple[str, float | str, str, str]]:
        """Return rows (name, value, unit, source) for `--explain`."""
        rows: list[tuple[str, float | str, str, str]] = []
        for topk, grids in self.tables.rounds.items():
            for part in fields(grids):
                grid = getattr(grids, part.name)
                reach = ", ".join(f"{name} {points[0]} … {points[-1]}" for name, points in grid.axes.items())
                what = f"{part.name.replace('_', ' ')} of {'chains' if topk == 1 else f'trees of top-{topk}'}"
                rows.append(
                    (f"measured {what}: longest", float(grid.ns.max()) / 1e6, "ms", f"{self.priced_by}; {reach}")
                )
        return rows

    def _curve(self, rows: int, shape: RoundShape) -> _Curve:
        graph = self.tables.graphs.get(shape.computed)
        rest = self.tables.rest.at(rows=rows).ns
        if graph is not None and rows <= graph.axes["rows"][-1]:
            size = graph.axes["rows"][bisect_left(graph.axes["rows"], rows)]  # a captured round computes its padding
            return _Curve(graph.axes["context"], graph.at(rows=size).ns[None, :] + rest)
        steps, topk, nodes = shape.computed
        grids = self.tables.rounds.get(topk)
        if grids is None:
            known = ", ".join(map(str, self.tables.rounds))
            message = f"top-{topk} was not measured; the profile has top-{known}"
            raise ConfigError.of("tables", "rounds", message)
        draft, verify = grids.draft.at(steps=steps, rows=rows), grids.verify.at(nodes=nodes, rows=rows)
        fixed = draft.ns + verify.ns + rest + grids.kv_move.at(steps=steps, rows=rows).ns
        most = min(steps + 1, nodes)
        extends = np.stack([grids.extend.at(accepted=n, rows=rows).ns for n in range(1, most + 1)])
        return _Curve(draft.axes["context"], fixed + extends)
