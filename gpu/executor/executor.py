"""The real executor: steps of `core.Engine` on a torch device.

    launch    give a GPU the step's first round at once, behind those in its stream; a CPU has no stream and begins at
              collect
    collect   read the oldest step's rounds back, and run the further rounds of a multi-step in between

Both make the moves of a table (`running.py`), of as many steps as can go on.

Nothing between two launches waits for the device, except a look-up draft: it needs the tokens of the round before on
the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.algorithm.algorithm import AlgorithmShape, SpecAlgorithm
from ...core.algorithm.arrival import fill_cells
from ...core.contract.future_map import FutureMap
from ...core.contract.step import Arrivals, DecodeStep, Join, PrefillResult, PrefillStep, Step, StepResult
from ...core.errors import InvariantViolation, nearest
from ...core.scheduler.engine import Engine
from ...core.scheduler.spec import default_graph_sizes
from ..batch.pools import KVPool
from ..batch.uploads import on_device
from ..draft.port import Draft
from ..models.decoder import Decoder
from .graphs import RoundGraphs
from .parts import DraftModel, ExecutorModels, ExecutorOptions, RowParts
from .prompt_runner import PromptRunner
from .relay import TorchStorage
from .round import DecodeRound, EventPhaseClock, PhaseClock
from .round_runner import RoundRunner
from .running import AHEAD, IN_TURN, RunningStep, StepMove, arrived, chosen_of, result_of
from .shaping import Changed


@dataclass(slots=True)
class ExecutorCounters:
    """What an executor has done since it was made."""

    rounds: int = 0
    prefilled: int = 0  # prompt tokens computed


class TorchExecutor:
    """Executes the steps of one engine with a target model and a draft. See `gpu.executor.build.build_executor`."""

    def __init__(self, engine: Engine, models: ExecutorModels, options: ExecutorOptions) -> None:
        assert engine.config.track_tokens, "this executor delivers tokens: EngineConfig.track_tokens"
        config, sizes = engine.config, engine.sizes
        self.algorithm: SpecAlgorithm = engine.algorithm
        self.target: Decoder = models.target
        self.device: torch.device = models.target.device
        self.pool: KVPool = models.pool
        self.draft: Draft = models.draft
        self.draft_model: DraftModel | None = models.draft_model
        self.draft_pool: KVPool | None = models.draft_pool
        self.relayed: AlgorithmShape = models.relayed
        self.accept_rule = options.accept_rule
        self.counters = ExecutorCounters()
        on_gpu = self.device.type == "cuda"
        self.clock: PhaseClock = EventPhaseClock() if on_gpu else PhaseClock()
        self._eager = on_gpu if options.eager is None else options.eager
        self._ops = models.ops
        self._producers = dict(options.producers)
        self._outputs = options.outputs
        parts = RowParts.of(engine, models, options)
        self._rows, self._forced, self._shaping = parts.rows, parts.forced, parts.shaping
        self.relay_storage: TorchStorage = parts.relay_storage
        self.future_map: FutureMap = parts.future_map
        own = models.ops, models.target, models.pool, models.draft
        decode_round = DecodeRound(*own, self._producers, parked=models.parked, accept_rule=options.accept_rule)
        self.graphs = RoundGraphs(decode_round, parts, models, options)
        self._prompts = PromptRunner(models, parts, self._producers)
        given = options.graph_sizes
        self._rounds = RoundRunner(
            decode_round,
            self.graphs,
            parts,
            alloc_len=sizes.alloc_len,
            padded_sizes=default_graph_sizes(config.max_running) if given is None else sorted(given),
            device=self.device,
            debug=options.debug,
        )
        self._queue: deque[RunningStep] = deque()
        self._last_step_id = 0
        self._stop_through = 0
        self.launched_table = np.zeros((config.max_running + 1, sizes.row_width), np.int32) if options.debug else None

    # -- the port -------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> None:
        """Put `step` behind those in flight."""
        if step.step_id != self._last_step_id + 1:
            raise InvariantViolation("RELAY-07", f"step {step.step_id} is launched after step {self._last_step_id}")
        self._last_step_id = step.step_id
        if self.launched_table is not None:
            writes = step.table_writes
            self.launched_table[writes.rows, writes.columns] = writes.slots
        self._queue.append(RunningStep(step, step.max_rounds))
        self._run_ahead()

    def collect(self) -> StepResult:
        """Wait for the oldest step and return its result."""
        while not self.advance(1):
            pass
        running = self._queue.popleft()
        self._run_ahead()
        self.clock.settle()
        return result_of(running)

    def advance(self, rounds: int) -> bool:
        """Run and read up to `rounds` decode rounds of the oldest step; start it if it has not begun.
        Return whether it is over."""
        running = self._queue[0]
        self._move(running, IN_TURN, rounds)
        return running.is_over

    def request_stop(self, last_step_id: int) -> None:
        """End steps up to `last_step_id` at their next round boundary; the round that runs now is finished."""
        self._stop_through = max(self._stop_through, last_step_id)
        for running in self._queue:
            if running.has_begun and running.step.step_id <= last_step_id:
                running.limit = min(running.limit, running.decoded.rounds + 1)

    def relay_cell(self, row: int, epoch: int) -> dict[str, np.ndarray]:
        """Return the values of a row's relay cell, each [1, *shape_suffix], which no round here will read."""
        _, values = self.future_map.resolve(np.array([row]), np.array([epoch]))
        return {name: value.cpu().numpy() for name, value in values.items()}

    def restart(self) -> None:
        """Forget all rows, relay cells and steps in flight, since a step has failed: the engine has given up all KV."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._queue.clear()
        self._rows.forget()
        self._shaping.forget()
        self.draft.close_rows(None)
        self.future_map.drop(np.arange(1, self.future_map.num_rows + 1))

    def close(self) -> None:
        """Do nothing: all that an executor has is freed with it."""

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    # -- the moves of a step --------------------------------------------------------------------------------------

    def _move(self, running: RunningStep, order: Sequence[StepMove], rounds: int) -> None:
        """Make the moves of a step that are due in this order, with up to `rounds` of its rounds."""
        with on_device(self.device), torch.no_grad():
            while (move := running.due(order, rounds)) is not None:
                MOVES[move](self, running)
                running.moved(move)
                rounds -= move is StepMove.READ_ROUND

    def _run_ahead(self) -> None:
        """Enqueue the first rounds of launched steps, in order, where the device has a stream; stop behind a step that
        may run further rounds."""
        for running in self._queue if self._eager else ():
            self._move(running, AHEAD, 1)
            # The next round's drafts or grammar may depend on this round's tokens.
            waits = self.draft.on_host or self._follows_grammars(running.step)
            if running.limit > 1 or (waits and not running.is_over):
                return

    def _begin(self, running: RunningStep) -> None:
        step = running.step
        self.draft.close_rows([row for row, _ in step.released])
        for row, _ in step.released:
            self.future_map.drop(np.array([row]))
            self._rows.close(row)
            self._shaping.close(row)
        for join in step.joins:
            self._rows.open(join)
            self._check_outputs(join, running)
            if problem := self._shaping.open(join):
                self._rows.ended[join.row] = True
                running.failures.append((join.row, problem))
        self._rows.write_table(step.table_writes)
        if step.arrivals is not None:
            self._arrive(running, step.arrivals)
        if step.decode is not None:
            self._rows.check_owners(step.decode.rows, step.decode.epochs)
            if step.step_id <= self._stop_through or self._rows.ended[step.decode.rows].any():
                running.limit = 1

    def _arrive(self, running: RunningStep, arrivals: Arrivals) -> None:
        """Open rows whose prompts another worker has computed: their KV is in the pools;
        fill their relay cells without a pass."""
        batch = arrivals.batch
        texts = {join.row: _cached_tokens(join) for join in running.step.joins}
        for join in running.step.joins:
            if join.num_received:
                self._open_produced(join)
        for i, row in enumerate(batch.rows.tolist()):
            self.draft.open_row(row, texts[row])
            self._observe(row, arrivals.first_tokens[i : i + 1])
        failures = fill_cells(self.algorithm, arrivals, self.future_map)
        self._rows.ended[[row for row, _ in failures]] = True
        running.failures += failures
        self._forced.begin(batch.rows, batch.seq_lens)

    def _open_produced(self, join: Join) -> None:
        for producer in self._producers.values():
            producer.open_row(join)

    def _enqueue_prompts(self, running: RunningStep) -> None:
        part = prefill_of(running)
        self._rows.check_owners(part.rows, part.epochs)
        joins = {join.row: join for join in running.step.joins}
        begins = np.concatenate([[0], np.cumsum(part.lens)])
        assert part.tokens is not None, "an executor with tokens gets them"
        for i, row in enumerate(part.rows.tolist()):
            if row in joins:
                self.draft.open_row(row, _cached_tokens(joins[row]))
                self._open_produced(joins[row])
            self._observe(row, part.tokens[begins[i] : begins[i + 1]])
        running.prefill_tokens = self._prompts.enqueue(part, self.clock)
        self.counters.prefilled += len(part.tokens)

    def _read_prompts(self, running: RunningStep) -> None:
        pending, running.prefill_tokens = running.prefill_tokens, None
        assert pending is not None, "chunks are read once they are in the stream"
        part = prefill_of(running)
        _, failed, sampled, outputs = arrived(pending)
        n = len(part.rows)
        tokens = np.full(n, -1, np.int64)
        stopped = np.zeros(n, bool)
        last = np.flatnonzero(part.is_last)
        tokens[last] = np.maximum(sampled, 0)
        failed = failed.copy()
        failed[last] |= sampled < 0
        self._report_failures(running, part.rows, failed)
        # A chunk without numbers ends its request at once: its KV may be spoilt, and must not enter the prefix cache.
        self._rows.ended[part.rows[failed]] = True
        stops, _ = self._rows.settle(part.rows[last], tokens[last][:, None], np.ones(len(last), np.int32), failed[last])
        stopped[last] = stops >= 0
        for i in last.tolist():
            self._emitted(int(part.rows[i]), tokens[i : i + 1])
        spread = {}
        for name, values in outputs.items():
            spread[name] = np.zeros((n, *values.shape[1:]), values.dtype)
            spread[name][last] = values
        running.prefill = PrefillResult(tokens, stopped if stopped.any() else None, spread or None)
        self._cut_short_behind(running)
        if running.step.decode is None:
            running.round_ends_ns.append(time.perf_counter_ns())

    def _observe(self, row: int, tokens: np.ndarray) -> None:
        """Pass the next tokens of a row's text, which no round has emitted, to look-up drafts, penalties, grammars."""
        if self.draft.on_host:
            self.draft.observe(row, tokens)
        self._shaping.observe(row, tokens)

    def _emitted(self, row: int, tokens: np.ndarray) -> None:
        """Pass the tokens that a row has emitted to the parts on the host: look-up drafts, grammars."""
        if self.draft.on_host:
            self.draft.observe(row, tokens)
        self._shaping.emitted(row, tokens)

    def _follows_grammars(self, step: Step) -> bool:
        parts = (step.prefill, step.decode)
        return any(part is not None and self._shaping.changed(part.rows) is Changed.WITH_MASKS for part in parts)

    def _enqueue_round(self, running: RunningStep) -> None:
        running.pending = self._rounds.enqueue(decode_of(running), running.decoded.rounds, self.clock)

    def _read_round(self, running: RunningStep) -> None:
        pending, running.pending = running.pending, None
        assert pending is not None, "a round is read once it is in the stream"
        part = decode_of(running)
        accept_lens, failed, emitted, outputs = arrived(pending)
        failed, was_over = failed.copy(), self._rows.ended[part.rows]
        self._report_failures(running, part.rows, failed)
        stops, ended = self._rows.settle(part.rows, emitted, accept_lens, failed)
        if self.draft.on_host or self._shaping.changed(part.rows) is Changed.WITH_MASKS:
            for i in np.flatnonzero(~was_over).tolist():
                self._emitted(int(part.rows[i]), np.maximum(emitted[i, : accept_lens[i]], 0))
        running.decoded.add(accept_lens, stops, emitted, outputs, ended, chosen_of(pending))
        self._cut_short_behind(running)
        running.round_ends_ns.append(time.perf_counter_ns())
        self.counters.rounds += 1

    def _cut_short_behind(self, running: RunningStep) -> None:
        """Let steps that were begun behind this one stop after their first round if one of their rows has ended, as
        steps that begin later do."""
        for behind in self._queue:
            part = behind.step.decode
            if behind is not running and behind.has_begun and part is not None and self._rows.ended[part.rows].any():
                behind.limit = 1

    def _check_outputs(self, join: Join, running: RunningStep) -> None:
        """Fail a request, and only it, that asks for an output which does not exist."""
        for name in join.request.outputs:
            if name not in self._outputs:
                self._rows.ended[join.row] = True
                running.failures.append((join.row, f"there is no output {name!r}{nearest(name, self._outputs)}"))
                return

    def _report_failures(self, running: RunningStep, rows: np.ndarray, failed: np.ndarray) -> None:
        """Note which of these rows fail in a step: those of `failed`, to which rows are added whose grammar cannot be
        followed any further."""
        problems = self._shaping.problems(rows)
        failed[list(problems)] = True
        for i in np.flatnonzero(failed & ~self._rows.ended[rows]).tolist():
            running.failures.append((int(rows[i]), problems.get(i, "the target gave no distribution")))


def prefill_of(running: RunningStep) -> PrefillStep:
    part = running.step.prefill
    assert part is not None, "a step with prompt chunks makes this move"
    return part


# Not of the executor's own methods: what refers to itself is freed only by a collection of cycles, with its pools.
MOVES: dict[StepMove, Callable[[TorchExecutor, RunningStep], None]] = {
    StepMove.BEGIN: TorchExecutor._begin,
    StepMove.ENQUEUE_PROMPTS: TorchExecutor._enqueue_prompts,
    StepMove.ENQUEUE_ROUND: TorchExecutor._enqueue_round,
    StepMove.READ_PROMPTS: TorchExecutor._read_prompts,
    StepMove.READ_ROUND: TorchExecutor._read_round,
    StepMove.GO_ON: TorchExecutor._enqueue_round,
    StepMove.END: lambda executor, running: None,  # the result is made when it is collected
}


def decode_of(running: RunningStep) -> DecodeStep:
    part = running.step.decode
    assert part is not None, "a step with rounds makes this move"
    return part


def _cached_tokens(join: Join) -> np.ndarray:
    assert join.cached_tokens is not None, "an executor with tokens gets them"
    return join.cached_tokens
