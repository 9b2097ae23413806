"""Measures an executor's own steps: every cell of a grid several times, in a random order, so that none profits from
the one before.

Device times come from `gpu.measure.step_timer`, host times from served requests (`host_times`). Medians count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.draws import Purpose, hash64
from ..core.errors import ConfigError
from ..gpu.measure.run import device_name
from ..gpu.measure.step_timer import RoundTime, StepTimer
from ..gpu.session.round_cost import doubling
from ..sim.cost.executor_steps import AXES, AlgorithmSteps, ExecutorSteps, Grid, RoundGrids, StepCost
from .arms import TwinArm
from .host_times import Closure, HostTimes, deviation
from .record import TwinRecord
from .served import make_clock

PARTS = RoundTime.__slots__
LONG_PROMPT, LONG_REPEATS = 256, 3  # so many tokens take long and hardly vary: more repeats would take most of the time

OnProgress = Callable[[int, int, str], None]
"""Told how many timings are done, of how many, and what is being measured."""


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """How finely to measure. `contexts` None: three, up to the arms' context."""

    repeats: int = 7
    rows: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    clock: str = "wall"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The result: the profile's part, and how well it adds up to steps that were served."""

    steps: ExecutorSteps
    closures: tuple[Closure, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """One timing, `repeat` of several. Its sizes are chunks, tokens, context of a prompt; steps, nodes, rows, context,
    accepted of a round; and of both in a step: the prompt's tokens, then those of a round."""

    arm: int
    kind: str  # "prefill", "round" or "mixed"
    sizes: tuple[int, ...]
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.arm} {self.kind} {' '.join(map(str, self.sizes))} #{self.repeat}"


def measure_steps(
    arms: Sequence[TwinArm],
    plan: MeasuringPlan = MeasuringPlan(),
    record: TwinRecord | None = None,
    on_progress: OnProgress = lambda done, of, what: None,
) -> Measured:
    """Measure the steps of `arms`, which have one model and device. What `record` has is not timed again.

    Raises ConfigError for arms that differ in model or device, or a clock that the device does not have.
    """
    _check_alike(arms)
    record = record or TwinRecord(None, {})
    clock = make_clock(plan.clock, arms[0].plan.device)
    clock.start()
    cells = list(_cells(arms, plan))
    order = np.argsort([int(hash64(plan.seed, Purpose.TOKEN, np.uint64(i), np.uint64(0))) for i in range(len(cells))])
    if any(cell.key not in record.values for cell in cells):
        timers = [StepTimer(arm.spec, arm.target, arm.draft, arm.ops, clock.now_ns) for arm in arms]
        for cell in {(cell.arm, cell.kind, cell.sizes): cell for cell in cells}.values():
            _time(timers[cell.arm], cell)  # once without counting: masks are made, allocators grow
        for done, index in enumerate(order.tolist()):
            cell = cells[index]
            on_progress(done, len(cells), arms[cell.arm].name)
            if cell.key not in record.values:
                record.add(cell.key, _time(timers[cell.arm], cell))
    samples: dict[tuple[int, str, tuple[int, ...]], list[list[float]]] = {}
    for cell in cells:
        samples.setdefault((cell.arm, cell.kind, cell.sizes), []).append(record.values[cell.key])
    algorithms = {
        algorithm: _algorithm_steps(
            {number: arm for number, arm in enumerate(arms) if arm.algorithm == algorithm}, samples
        )
        for algorithm in dict.fromkeys(arm.algorithm for arm in arms)
    }
    on_progress(len(cells), len(cells), "host")
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


# -- what is timed ----------------------------------------------------------------------------------------------------


def _cells(arms: Sequence[TwinArm], plan: MeasuringPlan) -> Iterable[_Cell]:
    seen: set[str | tuple[str, int, int, int]] = set()
    for number, arm in enumerate(arms):
        if arm.algorithm not in seen:
            seen.add(arm.algorithm)
            for sizes in _prompt_sizes(arm, plan):
                repeats = plan.repeats if sizes[1] < LONG_PROMPT else min(plan.repeats, LONG_REPEATS)
                yield from (_Cell(number, "prefill", sizes, repeat) for repeat in range(repeats))
            if arm.spec.config.max_running > 1:  # a step with both needs a row for each
                yield from (_Cell(number, "mixed", _mixed_sizes(arm, plan), i) for i in range(3 * plan.repeats))
    for number, arm in enumerate(arms):
        config = arm.spec.config
        for steps, nodes in arm.spec.draft_shape.tree_sizes():
            topk = arm.spec.topk if steps else 1
            if (arm.algorithm, topk, steps, nodes) in seen:
                continue
            seen.add((arm.algorithm, topk, steps, nodes))
            most = min(steps + 1, nodes)
            accepts = list(dict.fromkeys((most, 1, (most + 1) // 2)))  # with one repeat the most that there is
            for rows in plan.rows or doubling(config.max_running):
                for context in _contexts(arm, plan):
                    for repeat in range(plan.repeats):
                        accepted = accepts[repeat % len(accepts)]
                        yield _Cell(number, "round", (steps, nodes, rows, context, accepted), repeat)


def _contexts(arm: TwinArm, plan: MeasuringPlan) -> tuple[int, ...]:
    if plan.contexts is not None:
        return plan.contexts
    longest = arm.spec.config.context_len - arm.spec.max_num_draft_tokens - 1
    return tuple(sorted({max(1, longest // 8), max(1, longest // 2), longest}))


def _prompt_sizes(arm: TwinArm, plan: MeasuringPlan) -> Iterable[tuple[int, int, int]]:
    """Yield chunks, their tokens together, and the context before each, as far as a step and a row can hold them."""
    config = arm.spec.config
    longest = max(_contexts(arm, plan))
    most = min(config.chunk_size, longest * config.max_running)
    for chunks in sorted({1, min(2, config.max_running), config.max_running}):
        for tokens in sorted({min(n, most, chunks * longest) for n in (16, 64, 256, 1024)}):
            for context in sorted({0, longest // 2}):
                each = -(-tokens // chunks)
                if tokens >= chunks:
                    yield chunks, tokens, min(context, max(0, longest - each))


def _mixed_sizes(arm: TwinArm, plan: MeasuringPlan) -> tuple[int, ...]:
    """Return the sizes of the one step with both:
    its prompt is one of the prompt cells, its round one of the round cells."""
    steps, nodes = arm.spec.draft_shape.tree_sizes()[0]
    _, tokens, _ = next(iter(_prompt_sizes(arm, plan)))
    return tokens, steps, nodes, 1, _contexts(arm, plan)[0], 1


def _time(timer: StepTimer, cell: _Cell) -> list[float]:
    if cell.kind == "prefill":
        return [timer.prefill(*cell.sizes)]
    if cell.kind == "mixed":
        tokens, steps, nodes, rows, context, accepted = cell.sizes
        return [timer.mixed(tokens, rows, steps, nodes, context, accepted)]
    steps, nodes, rows, context, accepted = cell.sizes
    time = timer.round(rows, steps, nodes, context, accepted)
    return [getattr(time, part) for part in PARTS]


# -- grids ------------------------------------------------------------------------------------------------------------

Samples = Mapping[tuple[int, str, tuple[int, ...]], list[list[float]]]


def _algorithm_steps(arms: Mapping[int, TwinArm], samples: Samples) -> AlgorithmSteps:
    """Make the grids of the arms of one algorithm, by their numbers."""
    prefill: dict[tuple[int, ...], list[float]] = {}
    rest: dict[tuple[int, ...], list[float]] = {}
    parts: dict[int, dict[str, dict[tuple[int, ...], list[float]]]] = {}
    graphs: dict[tuple[int, int, int], dict[tuple[int, ...], list[float]]] = {}
    for (number, kind, sizes), values in samples.items():
        if number not in arms:
            continue
        if kind == "prefill":
            prefill.setdefault(sizes, []).extend(value[0] for value in values)
        if kind != "round":
            continue
        steps, nodes, rows, context, accepted = sizes
        topk = arms[number].spec.topk if steps else 1
        of = parts.setdefault(topk, {name: {} for name in ("draft", "verify", "kv_move", "extend")})
        for value in values:
            time = RoundTime(*value)
            rest.setdefault((rows,), []).append(time.rest)
            if time.graph:
                graphs.setdefault((steps, topk, nodes), {}).setdefault((rows, context), []).append(time.graph)
            of["draft"].setdefault((steps, rows, context), []).append(time.draft)
            of["verify"].setdefault((nodes, rows, context), []).append(time.verify)
            of["kv_move"].setdefault((steps, rows), []).append(time.kv_move)
            of["extend"].setdefault((accepted, rows, context), []).append(time.extend)
    rounds = {
        topk: RoundGrids(**{name: _grid(name, cells) for name, cells in of.items()}) for topk, of in parts.items()
    }
    captured = {shape: _grid("graph", cells) for shape, cells in graphs.items()}
    found = AlgorithmSteps(_grid("prefill", prefill), _grid("rest", rest), rounds, captured)
    return replace(found, shared_ns=_shared_ns(arms, samples, found))


def _shared_ns(arms: Mapping[int, TwinArm], samples: Samples, found: AlgorithmSteps) -> int:
    """Return by how much the step with both is shorter than its parts: at most what a round has beside its passes."""
    shared = 0.0
    for (number, kind, (tokens, *shape)), values in samples.items():
        if number in arms and kind == "mixed":
            steps, nodes, rows, context, accepted = shape
            topk = arms[number].spec.topk if steps else 1
            cost = StepCost(found, True, "")
            alone = cost.prefill_ns([(tokens, 0)])
            alone += int(cost.rounds_ns(rows, steps, topk, nodes, np.array([context]), np.array([accepted]))[0])
            shared = min(alone - np.median([value[0] for value in values]), found.rest.at(rows=rows).ns)
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
    names = {"round": "decode", "prefill": "prefill"}
    found: dict[str, list[float]] = {}
    totals: dict[tuple[int, str, tuple[int, ...]], list[float]] = {}
    for (number, kind, sizes), values in samples.items():
        # Rounds that accept more are longer, and no noise.
        totals.setdefault((number, kind, sizes), []).extend(sum(value) for value in values)
    for (_, kind, _), seconds in totals.items():
        if len(seconds) >= 2 and kind in names:
            found.setdefault(kind, []).append(deviation(np.log(seconds)))
    return {names[kind]: float(np.median(spreads)) for kind, spreads in found.items()}


class ArmPace:
    """Times a few rounds of an arm on a CPU between the runs of a comparison:
    how fast the machine is, by the profile."""

    def __init__(self, arm: TwinArm, cost: StepCost, clock: str) -> None:
        timed_by = make_clock(clock, arm.plan.device)
        timed_by.start()
        self._timer = StepTimer(arm.spec, arm.target, arm.draft, arm.ops, timed_by.now_ns)
        steps, nodes = arm.spec.draft_shape.tree_sizes()[0]
        contexts = _contexts(arm, MeasuringPlan())
        context = contexts[len(contexts) // 2]
        self._sizes = [(rows, steps, nodes, context, 1) for rows in doubling(arm.spec.config.max_running)]
        topk = arm.spec.topk if steps else 1
        at = np.array([context]), np.array([1])
        self._priced = sum(int(cost.rounds_ns(rows, steps, topk, nodes, *at)[0]) for rows, *_ in self._sizes)
        self.now()  # once without counting, as the profile's were

    def now(self) -> float:
        """Return what the rounds take now, relative to what the profile says;
        each is timed three times, medians count."""
        took = [np.median([self._timer.round(*sizes).total for _ in range(3)]) for sizes in self._sizes]
        return float(sum(took)) / self._priced
