"""Makes a profile of an executor's own steps: device times from `gpu.measure`, host times from served requests
(`host_times`). Medians count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.contract.step import RoundShape
from ..core.errors import ConfigError
from ..gpu.measure.cells import (
    MeasuringPlan,
    MixedCell,
    OfArm,
    PromptCell,
    RoundCell,
    RoundTime,
    StepTimer,
    contexts_of,
    time_steps,
)
from ..gpu.measure.clock import make_clock
from ..gpu.measure.run import device_name
from ..gpu.measure.turns import OnSample, Timed, TimingRecord, take_turns
from ..gpu.session.round_cost import doubling
from ..sim.cost.executor_steps import AXES, AlgorithmSteps, ExecutorSteps, Grid, RoundGrids, StepCost
from .arms import TwinArm
from .host_times import Closure, HostTimes, deviation


@dataclass(frozen=True, slots=True)
class Measured:
    """The result: the profile's part, and how well it adds up to steps that were served."""

    steps: ExecutorSteps
    closures: tuple[Closure, ...]


def measure_steps(
    arms: Sequence[TwinArm],
    plan: MeasuringPlan,
    record: TimingRecord | None = None,
    on_progress: OnSample = lambda done, of, name: None,
) -> Measured:
    """Measure the steps of `arms`, which have one model and device. What `record` has is not timed again.

    Raises ConfigError for arms that differ in model or device, or a clock that the device does not have.
    """
    _check_alike(arms)
    clock = make_clock(plan.clock, arms[0].plan.device)
    samples = time_steps(arms, plan, clock, record or TimingRecord(), on_progress)
    algorithms = {
        algorithm: _algorithm_steps(
            {number: arm for number, arm in enumerate(arms) if arm.algorithm == algorithm}, samples
        )
        for algorithm in dict.fromkeys(arm.algorithm for arm in arms)
    }
    host = HostTimes(arms, plan.clock, plan.seed)
    steps = ExecutorSteps(
        device=device_name(arms[0].plan.device),
        threads=_threads(arms[0]),
        padded=arms[0].plan.device == "cpu",
        target=shape_of(arms[0]),
        host=host.cost,
        algorithms=algorithms,
        spread={**_spreads(samples), "host": host.spread()},
    )
    return Measured(steps, host.closures(steps))


def shape_of(arm: TwinArm) -> dict[str, int]:
    """Return the target's shape, by which a profile is recognised."""
    config = arm.plan.target
    return {
        "hidden": config.hidden_size,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "vocab": config.vocab_size,
    }


def _threads(arm: TwinArm) -> int:
    import torch

    return torch.get_num_threads() if arm.plan.device == "cpu" else 0


def _check_alike(arms: Sequence[TwinArm]) -> None:
    first = arms[0].plan
    for arm in arms[1:]:
        if (arm.plan.options.model, arm.plan.device, arm.plan.dtype) != (
            first.options.model,
            first.device,
            first.dtype,
        ):
            message = f"{arm.name} has another model, device or number format than {arms[0].name}; a profile is of one"
            raise ConfigError.of("<arguments>", "model", message)


# -- grids ------------------------------------------------------------------------------------------------------------

Samples = Mapping[OfArm, list[list[float]]]


def _algorithm_steps(arms: Mapping[int, TwinArm], samples: Samples) -> AlgorithmSteps:
    """Make the grids of the arms of one algorithm, by their numbers."""
    prefill: dict[tuple[int, ...], list[float]] = {}
    rest: dict[tuple[int, ...], list[float]] = {}
    parts: dict[int, dict[str, dict[tuple[int, ...], list[float]]]] = {}
    graphs: dict[RoundShape, dict[tuple[int, ...], list[float]]] = {}
    for (number, cell), values in samples.items():
        if number not in arms:
            continue
        if isinstance(cell, PromptCell):
            prefill[cell.chunks, cell.tokens, cell.context] = [value[0] for value in values]
        if not isinstance(cell, RoundCell):
            continue
        of = parts.setdefault(cell.shape.topk, {name: {} for name in ("draft", "verify", "kv_move", "extend")})
        for value in values:
            time = RoundTime(*value)
            rest.setdefault((cell.rows,), []).append(time.rest)
            if time.graph:
                graphs.setdefault(cell.shape, {}).setdefault((cell.rows, cell.context), []).append(time.graph)
            of["draft"].setdefault((cell.shape.steps, cell.rows, cell.context), []).append(time.draft)
            of["verify"].setdefault((cell.shape.nodes, cell.rows, cell.context), []).append(time.verify)
            of["kv_move"].setdefault((cell.shape.steps, cell.rows), []).append(time.kv_move)
            of["extend"].setdefault((cell.accepted, cell.rows, cell.context), []).append(time.extend)
    rounds = {
        topk: RoundGrids(**{name: _grid(name, cells) for name, cells in of.items()}) for topk, of in parts.items()
    }
    captured = {shape: _grid("graph", cells) for shape, cells in graphs.items()}
    found = AlgorithmSteps(_grid("prefill", prefill), _grid("rest", rest), rounds, captured)
    return replace(found, shared_ns=_shared_ns(arms, samples, found))


def _priced_ns(cost: StepCost, cell: RoundCell) -> int:
    """Return what a profile says of a round."""
    context, accepted = np.array([cell.context]), np.array([cell.accepted])
    return int(cost.rounds_ns(cell.rows, cell.shape, context, accepted)[0])


def _shared_ns(arms: Mapping[int, TwinArm], samples: Samples, found: AlgorithmSteps) -> int:
    """Return by how much the step with both is shorter than its parts: at most what a round has beside its passes."""
    shared = 0.0
    for (number, cell), values in samples.items():
        if number in arms and isinstance(cell, MixedCell):
            cost = StepCost(found, True, "")
            alone = cost.prefill_ns([(cell.tokens, 0)]) + _priced_ns(cost, cell.round)
            both = np.median([value[0] for value in values])
            shared = min(alone - both, found.rest.at(rows=cell.round.rows).ns)
    return max(0, round(float(shared)))


def _grid(name: str, cells: Mapping[tuple[int, ...], list[float]]) -> Grid:
    """Return the medians of cells as a grid. A cell that could not be measured takes the value of the
    nearest one that could."""
    axes = {axis: tuple(sorted({key[i] for key in cells})) for i, axis in enumerate(AXES[name])}
    ns = np.zeros(tuple(len(points) for points in axes.values()))
    medians = {key: float(np.median(values)) for key, values in cells.items()}
    known = np.array(list(medians))
    for place in np.ndindex(ns.shape):
        key = tuple(points[i] for points, i in zip(axes.values(), place, strict=True))
        if key not in medians:
            apart = np.abs(np.log1p(known) - np.log1p(key)).sum(axis=1)
            key = tuple(known[apart.argmin()].tolist())
        ns[place] = medians[key]
    return Grid(axes, ns)


def _spreads(samples: Samples) -> dict[str, float]:
    """Return the standard deviation of the logarithm of a step's time, by kind of step:
    the median over cells, outliers weigh little."""
    # Rounds that accept more are longer, and no noise.
    logarithms = [(cell, np.log([sum(value) for value in values])) for (_, cell), values in samples.items()]
    found = {
        name: [deviation(of_cell) for cell, of_cell in logarithms if isinstance(cell, kind) and len(of_cell) >= 2]
        for name, kind in (("decode", RoundCell), ("prefill", PromptCell))
    }
    return {name: float(np.median(spreads)) for name, spreads in found.items() if spreads}


class ArmPace:
    """Times a few rounds of an arm on a CPU between the runs of a comparison:
    how fast the machine is, by the profile."""

    def __init__(self, arm: TwinArm, cost: StepCost, clock: str) -> None:
        timer = StepTimer(arm, make_clock(clock, arm.plan.device).now_ns)
        shape = arm.spec.draft_shape.round_shapes()[0].computed
        contexts = contexts_of(arm.spec, MeasuringPlan())
        rows = doubling(arm.spec.config.max_running)
        cells = [RoundCell(shape, each, contexts[len(contexts) // 2], 1) for each in rows]
        self._timed = [self._of(arm, timer, cell) for cell in cells]
        self._priced = sum(_priced_ns(cost, cell) for cell in cells)
        self.now()  # once without counting, as the profile's were

    @staticmethod
    def _of(arm: TwinArm, timer: StepTimer, cell: RoundCell) -> Timed[float]:
        return Timed(arm.name, 3, lambda sample: sum(timer.time(cell)))

    def now(self) -> float:
        """Return what the rounds take now, relative to what the profile says;
        each is timed three times, medians count."""
        return float(sum(map(np.median, take_turns(self._timed)))) / self._priced
