"""The single steps of an executor that are timed: prompts, rounds, both in one step, over rows, nodes and context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ...core.contract.step import RoundShape
from ...core.scheduler.spec import EngineSpec
from ..session.round_cost import doubling
from .arm import Arm
from .clock import Clock
from .step_timer import MixedCell, PromptCell, RoundCell, StepCell, StepTimer
from .turns import OnSample, Timed, TimingRecord, take_turns

LONG_PROMPT, LONG_REPEATS = 256, 3  # so many tokens take long and hardly vary: more repeats would take most of the time
OfArm = tuple[int, StepCell]
"""A cell on an arm, by the arm's number."""


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """How finely to measure. `contexts` None: three, up to the arms' context."""

    repeats: int = 7
    rows: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    clock: str = "wall"
    seed: int = 0


def time_steps(
    arms: Sequence[Arm],
    plan: MeasuringPlan,
    clock: Clock,
    record: TimingRecord,
    on_sample: OnSample = lambda done, of, name: None,
) -> Mapping[OfArm, list[list[float]]]:
    """Return the samples of all cells, each as `StepTimer.time` returns it. What `record` has is not timed again."""
    timer = cache(lambda number: StepTimer(arms[number], clock.now_ns))

    def timed(number: int, cell: StepCell, repeats: int) -> Timed[list[float]]:
        keys = [f"{number} {cell} #{sample}" for sample in range(repeats)]

        def time() -> list[float]:
            return timer(number).time(cell)

        def warm() -> None:
            if not all(key in record.values for key in keys):
                time()  # masks are made, allocators grow

        return Timed(arms[number].name, repeats, lambda sample: record.sample(keys[sample], time), warm)

    cells = step_cells([arm.spec for arm in arms], plan)
    samples = take_turns([timed(*of_arm, repeats) for of_arm, repeats in cells.items()], plan.seed, on_sample)
    return dict(zip(cells, samples, strict=True))


def step_cells(specs: Sequence[EngineSpec], plan: MeasuringPlan) -> dict[OfArm, int]:
    """Return how often each cell is timed. Arms of one algorithm share their prompts, and rounds of one shape."""
    found: dict[OfArm, int] = {}
    seen: set[str | tuple[str, RoundShape]] = set()
    for number, spec in enumerate(specs):
        if spec.algorithm not in seen:
            seen.add(spec.algorithm)
            for prompt in _prompts(spec, plan):
                is_long = prompt.tokens >= LONG_PROMPT
                found[number, prompt] = min(plan.repeats, LONG_REPEATS) if is_long else plan.repeats
            if spec.config.max_running > 1:  # a step with both needs a row for each
                found[number, _mixed(spec, plan)] = 3 * plan.repeats
    for number, spec in enumerate(specs):
        for shape in (each.computed for each in spec.draft_shape.round_shapes()):
            if (spec.algorithm, shape) in seen:
                continue
            seen.add((spec.algorithm, shape))
            most = min(shape.steps + 1, shape.nodes)
            accepts = list(dict.fromkeys((most, 1, (most + 1) // 2)))  # with one repeat the most that there is
            for rows in plan.rows or doubling(spec.config.max_running):
                for context in contexts_of(spec, plan):
                    for i, accepted in enumerate(accepts[: plan.repeats]):
                        repeats = len(range(i, plan.repeats, len(accepts)))
                        found[number, RoundCell(shape, rows, context, accepted)] = repeats
    return found


def contexts_of(spec: EngineSpec, plan: MeasuringPlan) -> tuple[int, ...]:
    """Return the lengths of KV at which rounds are timed."""
    if plan.contexts is not None:
        return plan.contexts
    longest = spec.config.context_len - spec.max_num_draft_tokens - 1
    return tuple(sorted({max(1, longest // 8), max(1, longest // 2), longest}))


def _prompts(spec: EngineSpec, plan: MeasuringPlan) -> Iterator[PromptCell]:
    """Yield prompts as far as a step and a row can hold them."""
    config = spec.config
    longest = max(contexts_of(spec, plan))
    most = min(config.chunk_size, longest * config.max_running)
    for chunks in sorted({1, min(2, config.max_running), config.max_running}):
        for tokens in sorted({min(n, most, chunks * longest) for n in (16, 64, 256, 1024)}):
            for context in sorted({0, longest // 2}):
                each = -(-tokens // chunks)
                if tokens >= chunks:
                    yield PromptCell(chunks, tokens, min(context, max(0, longest - each)))


def _mixed(spec: EngineSpec, plan: MeasuringPlan) -> MixedCell:
    """Return the one step with both: its prompt is one of the prompt cells, its round one of the round cells."""
    shape = spec.draft_shape.round_shapes()[0].computed
    return MixedCell(next(_prompts(spec, plan)).tokens, RoundCell(shape, 1, contexts_of(spec, plan)[0], 1))
