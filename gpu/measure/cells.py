"""The single steps of an executor that are timed: prompts, rounds, both in one step, over rows, nodes and context.

`StepTimer` times one through the executor's port, in any order. A round's rows are sent back to their old length before
each timing, so that a cell can be timed again between others. What the KV holds does not matter for the time, nor which
tokens are accepted; how many are is decided here, since a CPU's catch-up is as wide as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ...core.contract.request import Request
from ...core.contract.step import NO_WRITES, DecodeStep, Join, PrefillStep, RoundShape, Step, TableWrites, WrittenRanges
from ...core.kv.request_table import ceil_to_page
from ...core.prompt import Prompt
from ...core.scheduler.spec import EngineSpec
from ..executor.round import EventPhaseClock, PhaseClock
from ..session.round_cost import doubling
from ..types.ops import DeviceTree, DeviceVerified, KVTensors, Ops
from .arm import Arm
from .clock import Clock
from .turns import OnSample, Timed, TimingRecord, take_turns

LONG_PROMPT, LONG_REPEATS = 256, 3  # so many tokens take long and hardly vary: more repeats would take most of the time
_ENDLESS = 1 << 40  # tokens that a row may still emit


@dataclass(frozen=True, slots=True)
class PromptCell:
    """A step of `chunks` last chunks with `tokens` new tokens in all, each behind `context` tokens of its prompt."""

    chunks: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class RoundCell:
    """A round of `rows` rows with `context` tokens of KV each, of which every one accepts `accepted` nodes."""

    shape: RoundShape  # as it is computed
    rows: int
    context: int
    accepted: int


@dataclass(frozen=True, slots=True)
class MixedCell:
    """A step with a prompt of `tokens` tokens in the last row, and a round of the first rows, which are fewer than
    all."""

    tokens: int
    round: RoundCell


StepCell = PromptCell | RoundCell | MixedCell


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Nanoseconds of one decode round by part. A captured round has `graph` instead of the four parts before it.

    `verify`: the target's pass, the choice of tokens and the compaction of outputs; `rest`: relay, launch, and reading
    the results.
    """

    draft: float
    verify: float
    kv_move: float
    extend: float
    graph: float
    rest: float


class StepTimer:
    """An executor of `arm` whose rows are all occupied. `now_ns` must be a clock of this thread if the device is a CPU.

    The pool holds every row at its full width, whatever the arm's `spec` says.
    """

    def __init__(self, arm: Arm, now_ns: Callable[[], int]) -> None:
        spec = arm.spec
        page_size = spec.config.page_size
        row_slots = ceil_to_page(spec.resolve_sizes().row_width, page_size)
        pages = spec.config.max_running * row_slots // page_size
        spec = replace(spec.without_costs, decodes_text=False)  # steps are chosen here
        spec = spec.with_config(num_pages=pages, prefix_cache=False)
        engine = spec.make_engine()
        self._now_ns = now_ns
        self._accepted = 1
        self._laps: list[tuple[str, float]] = []
        executor = self.executor = arm.executor(engine)
        on_lap = lambda name, seconds: self._laps.append((name, seconds * 1e9))  # noqa: E731
        on_gpu = executor.device.type == "cuda"
        executor.clock = EventPhaseClock(on_lap) if on_gpu else PhaseClock(on_lap, lambda: now_ns() / 1e9)
        self._width = engine.sizes.row_width
        self._page_size = page_size
        self._row_slots = row_slots
        self._vocab_size = arm.target.vocab_size
        self._step_id = 0
        self._epoch = 0
        self._open: dict[int, int] = {}  # row -> epoch
        self._relayed: dict[str, Tensor] = {}
        self._ops = arm.ops
        self._forced = self._forced_operations(arm.ops)
        self._begin_rows(spec.config.max_running)

    def time(self, cell: StepCell) -> list[float]:
        """Return the nanoseconds of a step from its launch to its result; of a round those of its parts, the fields of
        a `RoundTime`."""
        if isinstance(cell, RoundCell):
            return list(astuple(self._parts(self._run(decode=self._decode_part(cell)))))
        if isinstance(cell, MixedCell):
            last = np.array([len(self._open)], np.int32)
            decode = self._decode_part(cell.round)
            released = self._release(last)
            return [self._run(self._prefill_part(last, np.array([cell.tokens]), 0), decode, released)]
        rows = np.arange(1, cell.chunks + 1, dtype=np.int32)
        lens = np.full(cell.chunks, cell.tokens // cell.chunks, np.int64)
        lens[: cell.tokens % cell.chunks] += 1
        released = self._release(rows)
        return [self._run(self._prefill_part(rows, lens, cell.context), None, released, cell.context)]

    def _release(self, rows: np.ndarray) -> tuple[tuple[int, int], ...]:
        self._epoch += 1
        return tuple((row, self._open.pop(row)) for row in rows.tolist())

    def _decode_part(self, cell: RoundCell) -> DecodeStep:
        """Return a round of the first rows, which are sent back to the cell's context."""
        rows = cell.rows
        numbers = np.arange(1, rows + 1, dtype=np.int32)
        epochs = np.array([self._open[row] for row in numbers.tolist()])
        lengths = np.full(rows, cell.context, np.int64)
        future_map, device = self.executor.future_map, self.executor.device
        future_map.drop(numbers)
        future_map.publish(numbers, epochs, torch.from_numpy(lengths).to(device))
        future_map.stash(numbers, epochs, {name: values[:rows] for name, values in self._relayed.items()})
        self._accepted = min(cell.accepted, cell.shape.nodes)
        return DecodeStep(numbers, epochs, lengths, lengths, cell.shape, 1)

    def _begin_rows(self, num_rows: int) -> None:
        """Occupy every row, and keep the relay values after a prompt as the start of all rounds."""
        rows = np.arange(1, num_rows + 1, dtype=np.int32)
        self._run(self._prefill_part(rows, np.full(num_rows, 2, np.int64), 0), context=0)
        epochs = np.array([self._open[row] for row in rows.tolist()])
        _, relayed = self.executor.future_map.resolve(rows, epochs)
        self._relayed = {name: values.clone() for name, values in relayed.items()}

    def _prefill_part(self, rows: np.ndarray, lens: np.ndarray, context: int) -> PrefillStep:
        n = len(rows)
        tokens = (np.arange(int(lens.sum())) * 7919 + 11) % self._vocab_size
        starts, last = np.full(n, context, np.int64), np.ones(n, bool)
        return PrefillStep(rows, np.full(n, self._epoch), starts, lens, last, tokens, np.full(n, -1, np.int64))

    def _joins(self, rows: list[int], context: int) -> tuple[Join, ...]:
        cached = np.zeros(context, np.int64)
        request = Request("timing", Prompt.of_tokens(np.zeros(1, np.int64)), 1 << 30)
        self._open |= dict.fromkeys(rows, self._epoch)
        return tuple(Join(row, self._epoch, request, _ENDLESS, 0, context, cached) for row in rows)

    def _writes(self, rows: list[int]) -> TableWrites:
        """Return the slots of rows that are used for the first time: the same ones for ever."""
        if self._step_id:
            return NO_WRITES
        starts = self._page_size + (np.array(rows) - 1)[:, None] * self._row_slots
        slots = (starts + np.arange(self._width)).astype(np.int32).reshape(-1)
        n = len(rows)
        return TableWrites([WrittenRanges(np.array(rows), np.zeros(n, np.int64), np.full(n, self._width), slots)])

    def _run(
        self,
        prefill: PrefillStep | None = None,
        decode: DecodeStep | None = None,
        released: tuple[tuple[int, int], ...] = (),
        context: int = 0,
    ) -> float:
        """Run a step; its nanoseconds from the launch to the result. Laps are those of this step alone."""
        joins: tuple[Join, ...] = ()
        writes = NO_WRITES
        if prefill is not None:
            rows = prefill.rows.tolist()
            joins, writes = self._joins(rows, context), self._writes(rows)
        self._step_id += 1
        step = Step(self._step_id, joins, released, writes, prefill, decode)
        self._synchronize()
        self._laps.clear()
        vars(self._ops).update(self._forced)
        try:
            begin = self._now_ns()
            self.executor.launch(step)
            self.executor.collect()
            self._synchronize()
            lasted = self._now_ns() - begin
        finally:
            for name in self._forced:
                delattr(self._ops, name)
        self.executor.clock.settle()
        if prefill is not None and self._relayed:
            self.executor.future_map.drop(prefill.rows)
        return float(lasted)

    def _synchronize(self) -> None:
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)

    def _parts(self, total: float) -> RoundTime:
        laps = self._laps
        of = {name: sum(ns for lap, ns in laps if lap == name) for name in ("verify", "kv_move", "graph", "relay")}
        drafts = [ns for lap, ns in laps if lap == "draft"]
        propose, extend = drafts if drafts else (0.0, 0.0)
        rest = total - propose - extend - of["verify"] - of["graph"]  # the KV move is a part of verify
        return RoundTime(propose, of["verify"] - of["kv_move"], of["kv_move"], extend, of["graph"], rest)

    def _forced_operations(self, ops: Ops) -> dict[str, Callable[..., object]]:
        """Return operations with which every row accepts as many nodes as this timer says, and the KV move is timed by
        itself.

        Graphs were captured without these operations, and captured rounds have the same width for any number of
        accepted nodes.
        """
        verify, move = ops.verify_greedy, ops.move_accepted_
        made: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

        def verify_greedy(tree: DeviceTree, target_ids: Tensor) -> DeviceVerified:
            found = verify(tree, target_ids)
            key = (*tree.tokens.shape, tree.width, self._accepted)
            if key not in made:
                made[key] = _accept(tree, self._accepted)
            index, lens = made[key]
            return DeviceVerified(index, lens, found.predict.clamp(min=0), torch.zeros_like(found.failed))

        def move_accepted_(kv: KVTensors, node_slots: Tensor, accept_index: Tensor, accept_lens: Tensor) -> None:
            with self.executor.clock.phase("kv_move"):
                move(kv, node_slots, accept_index, accept_lens)

        return {"verify_greedy": verify_greedy, "move_accepted_": move_accepted_}


def _accept(tree: DeviceTree, accepted: int) -> tuple[Tensor, Tensor]:
    """Return accept_index [bs, width] and accept_lens [bs] of rows that accept their root and the last
    nodes of the tree."""
    bs, nodes = tree.tokens.shape
    accepted = min(accepted, tree.width)
    path = torch.tensor([0, *range(nodes - accepted + 1, nodes)], dtype=torch.int32, device=tree.tokens.device)
    index = torch.full((bs, tree.width), -1, dtype=torch.int32, device=path.device)
    first = torch.arange(bs, dtype=torch.int32, device=path.device)[:, None] * nodes
    index[:, :accepted] = first + path
    return index, torch.full((bs,), accepted, dtype=torch.int32, device=path.device)


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
