"""Our engine, `core.scheduler`, behind the engine contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...core.adaptive import AdaptiveController
from ...core.adaptive.lengths.confidence import ConfidencePolicy
from ...core.adaptive.lengths.pass_costs import PassCosts
from ...core.adaptive.lengths.survival import acceptance_of, choose_nodes
from ...core.algorithm.algorithm import NO_SPECULATION, SpecAlgorithm
from ...core.algorithm.builtin import Eagle, Standalone
from ...core.contract.request import GREEDY, FinishedRequest, Request, SamplingParams
from ...core.contract.step import (
    ChosenNodes,
    DecodeResult,
    FailureCause,
    MultiStepEnd,
    PrefillResult,
    Step,
    StepFailure,
    StepResult,
)
from ...core.contract.text import TextDecoder
from ...core.errors import InvariantViolation
from ...core.kv.groups import KVGroup
from ...core.kv.units import WindowUnits
from ...core.prompt import Prompt
from ...core.scheduler.config import VERIFY_ALL, VERIFY_REMAINING, EngineConfig
from ...core.scheduler.engine import Engine
from ...core.scheduler.rules import OurRules, SGLangRules
from ...properties.engine.contract import EngineCapabilities, Event, ServingConfig, StepAnswer, Wish
from ...properties.engine.language import text
from .kv_store import pages_of_units
from .step_controller import GivenStepsPolicy, NotedController

ALGORITHMS: dict[str, SpecAlgorithm] = {"none": NO_SPECULATION, "draft": Standalone(), "head": Eagle()}
MARKS = "marks"
WITH_MARKS = (MARKS,)
NO_TIMES = np.zeros(0, dtype=np.int64)  # of rounds: nothing is measured


class InFlight(NamedTuple):
    """A step that was handed out, with the requests of its chunks and rows."""

    step: Step
    chunks: list[str]
    rows: list[str]


class SuiteDecoder(TextDecoder):
    """Reads tokens as the suite does."""

    def decode(self, tokens: np.ndarray) -> str:
        return text(tokens.tolist())


class CoreEngine:
    """Translates between the contract, which names requests, and our engine, which numbers rows and takes
    results as arrays."""

    capabilities = replace(EngineCapabilities.all(), groups=False, budgets=False, invalid_confidences=False)

    def __init__(self, config: ServingConfig) -> None:
        self.policy = GivenStepsPolicy(config.candidates)
        nodes = config.tree_nodes or None
        self.controller: NotedController = NotedController(self.policy, config.topk, nodes)
        self.engine = self.build(self.configured(config), ALGORITHMS[config.algorithm], self.controller)
        self.steps: dict[int, InFlight] = {}  # and the one committed last
        self.requests: dict[int, str] = {}  # row -> request
        self.stop_tokens: dict[str, tuple[int, ...]] = {}
        self.newest_interrupted = 0

    def configured(self, config: ServingConfig) -> EngineConfig:
        return _engine_config(config)

    def build(self, config: EngineConfig, algorithm: SpecAlgorithm, controller: AdaptiveController) -> Engine:
        return Engine(config, algorithm, controller, text_decoder=SuiteDecoder())

    # -- clients ------------------------------------------------------------------------------------------------------

    def submit(self, wish: Wish) -> int:
        request = Request(
            wish.request,
            Prompt.of_tokens(wish.prompt),
            wish.max_tokens,
            priority=wish.priority,
            sampling=_sampling(wish.seed),
            stop_tokens=tuple(wish.stop_tokens),
            stop_strings=tuple(wish.stop_strings),
            outputs=WITH_MARKS if wish.marks else (),
        )
        outcome = self.engine.submit(request, 0)
        if outcome.refusal:
            raise ValueError(outcome.refusal)
        self.stop_tokens[wish.request] = request.stop_tokens
        self._interrupt(outcome.replan)
        return self.engine.requests.live[wish.request].max_tokens

    def abort(self, request: str) -> list[Event]:
        outcome = self.engine.abort(request, 0)
        self._interrupt(outcome.replan)
        return [] if outcome.finished is None else [_end(outcome.finished)]

    def retract(self, request: str) -> None:
        self._interrupt(self.engine.request_retraction(request, 0))

    def deny(self, count: int) -> None:
        self.engine.deny_allocations(count, 0)

    def lose(self, step: int) -> list[Event]:
        outcome = self.engine.lose_steps(StepFailure(step, FailureCause.RAISED), 0)
        return [_end(finished) for finished in outcome.finished]

    def resume(self) -> None:
        self.engine.resume(0)

    def restart(self) -> None:
        self.engine.resume(0, restarted=True)

    def set_steps(self, steps: int) -> None:
        self.policy.set_steps(steps)
        self._interrupt(True)

    def _interrupt(self, replan: bool) -> None:
        if replan:
            self.newest_interrupted = self.engine.last_step_id

    def interrupts(self) -> int:
        return self.newest_interrupted

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan(self) -> dict | None:
        step = self.engine.plan(0)
        return None if step is None else self.view(step)

    def view(self, step: Step) -> dict:
        requests, key = self.requests, self.key
        enters = []
        for join in step.joins:
            requests[join.row] = join.request.request_id
            enters.append(join.request.request_id)
        prefill, decode, steps, rounds = [], [], 0, 1
        if step.prefill is not None:
            part, at = step.prefill, 0
            tokens = part.tokens.tolist()
            columns = (part.rows.tolist(), part.starts.tolist(), part.lens.tolist(), part.tail_tokens.tolist())
            for row, start, length, tail in zip(*columns, strict=True):
                prefill.append((requests[row], start, tokens[at : at + length], tail, key(row)))
                at += length
        if step.decode is not None:
            part = step.decode
            lengths = zip(part.rows.tolist(), part.seq_lens.tolist(), strict=True)
            decode = [(requests[row], length, None, key(row)) for row, length in lengths]
            steps, rounds = part.shape.steps, part.max_rounds
        names = [chunk[0] for chunk in prefill], [row[0] for row in decode]
        self.steps[step.step_id] = InFlight(step, *names)
        loads = [(join.request.request_id, join.num_loaded) for join in step.joins if join.num_loaded]
        view = {"step": step.step_id, "enters": enters, "prefill": prefill, "decode": decode, "loads": loads}
        view["writes"] = self._writes(step)
        return view | {"steps": steps, "rounds": rounds}

    def _writes(self, step: Step) -> list[tuple[str, int, list[int]]]:
        """Return what the step writes into the device's table; not what it writes of requests that have left."""
        writes, running = step.table_writes, self.engine.requests.running
        cells = zip(writes.rows.tolist(), writes.columns.tolist(), writes.slots.tolist(), strict=True)
        return [(self.requests[row], at, [slot]) for row, at, slot in cells if row in running]

    def key(self, row: int) -> int:
        """Return what an executor draws the tokens of a row from."""
        return self.engine.requests.live[self.requests[row]].request.sampling.seed

    def commit(self, answer: StepAnswer) -> list[Event]:
        flight = self.steps[answer.step]
        try:
            outcome = self.engine.commit(self.result(flight, answer), 0)
        except InvariantViolation as violation:
            if violation.invariant == "RELAY-07":
                raise ValueError(str(violation)) from violation  # that is how it refuses
            raise
        for number in [number for number in self.steps if number < answer.step]:
            del self.steps[number]
        events: list[Event] = []
        for request in outcome.first_tokens:
            events.append(("tokens", request, [answer.first[flight.chunks.index(request)]]))
        if outcome.kept is not None:
            for runs, counts in zip(answer.runs, outcome.kept.tolist(), strict=True):
                for request, run, count in zip(flight.rows, runs, counts, strict=True):
                    if count:
                        events.append(("tokens", request, run[:count]))
        events += map(_end, outcome.finished)
        return events

    def result(self, flight: InFlight, answer: StepAnswer) -> StepResult:
        """Return an answer as the engine wants it."""
        step, prefill, decode, failures = flight.step, None, None, ()
        if flight.chunks:
            stops = [self.stop_tokens[request] for request in flight.chunks]
            stopped = [token in wanted for token, wanted in zip(answer.first, stops, strict=True)]
            outputs = {MARKS: np.array(answer.first_marks)} if answer.first_marks else None
            prefill = PrefillResult(np.array(answer.first), np.array(stopped) if any(stopped) else None, outputs)
        if flight.rows:
            decode = self._decode_result(flight, answer)
        if answer.failed:
            parts = [part.rows.tolist() for part in (step.prefill, step.decode) if part is not None]
            rows = dict(zip(flight.chunks + flight.rows, chain(*parts), strict=True))
            failures = tuple((rows[request], "the device said so") for request in answer.failed)
        return StepResult(answer.step, prefill, decode, NO_TIMES, failures)

    def _decode_result(self, flight: InFlight, answer: StepAnswer) -> DecodeResult:
        rounds, rows, width = len(answer.runs), len(flight.rows), max(flight.step.decode.shape.steps + 1, 1)
        columns = list(chain(*answer.runs))  # round after round
        lens = list(map(len, columns))
        stops = [self.stop_tokens[request] for request in flight.rows]
        stop_index = outputs = None
        if any(stops):
            stop_index = [_first_stop(run, wanted) for run, wanted in zip(columns, stops * rounds, strict=True)]
            stop_index = np.array(stop_index, dtype=np.int32).reshape(rounds, rows) if max(stop_index) >= 0 else None
        beside = list(chain(*answer.marks))
        if any(beside):
            marks = np.array([_wide(run, width, 0) for run in beside]).reshape(rounds, rows, width)
            outputs = tuple([{MARKS: of_round} for of_round in marks])
        return DecodeResult(
            rounds,
            np.array(lens, dtype=np.int32).reshape(rounds, rows),
            stop_index,
            np.zeros(rows, dtype=bool),
            MultiStepEnd.ASKED,
            np.array([_wide(run, width, -1) for run in columns]).reshape(rounds, rows, width),
            outputs,
        )

    # -- what it shows ------------------------------------------------------------------------------------------------

    def waiting(self) -> list[str]:
        return [record.request.request_id for record in self.engine.requests.waiting]

    def running(self) -> list[str]:
        leaving = [record.request.request_id for record in self.engine.requests.leaving.values()]
        return self.engine.requests.running_ids + leaving

    def slots_of(self, request: str) -> list[int]:
        store, row = self.engine.store, self.engine.requests.live[request].row
        return store.table.slots[row, : store.allocated[row]].tolist()

    def free_pages(self) -> list[int]:
        return self.engine.store.allocator.free_pages.tolist()

    def cached_pages(self) -> list[int]:
        store = self.engine.store
        size = store.page_size
        return [slot // size for slot in store.cache.cached_slots()[::size].tolist()]

    def counters(self) -> tuple[int, int, int]:
        metrics = self.engine.controller.metrics()
        return metrics.verified_rows, metrics.proposed_drafts, int(metrics.correct_drafts)

    def lessons(self) -> list[tuple[int, int]]:
        lessons, self.controller.lessons = self.controller.lessons, []
        return lessons


@cache
def _sampling(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed) if seed else GREEDY


def _wide(run: Sequence[int], width: int, filling: int) -> list[int]:
    return [*run, *[filling] * (width - len(run))]


def _first_stop(run: Sequence[int], stop_tokens: tuple[int, ...]) -> int:
    return next((at for at, token in enumerate(run) if token in stop_tokens), -1) if stop_tokens else -1


def _end(finished: FinishedRequest) -> Event:
    marks = None if finished.outputs is None else [int(mark) for mark in finished.outputs.get(MARKS, [])]
    return "end", finished.request_id, finished.reason.name.lower(), finished.tokens.tolist(), marks


def _engine_config(config: ServingConfig) -> EngineConfig:
    return EngineConfig(
        num_pages=config.num_pages,
        context_len=config.context_len,
        page_size=config.page_size,
        overlap=config.overlap,
        max_running=config.max_running,
        max_queue=config.max_queue or None,
        chunk_size=config.chunk_size,
        max_step_tokens=config.step_tokens or None,
        mixed=config.mixed,
        prefix_cache=config.prefix_cache,
        host_pages=config.host_pages,
        multi_step_rounds=config.multi_step_rounds,
        preempt=config.preempt,
        ageing_bound=config.ageing,
        track_tokens=True,
        rules=OurRules(batch_wait_rounds=config.waits[0], batch_wait_tokens=config.waits[1] / 8),
    )


RULES: tuple[SGLangRules, ...] = (
    SGLangRules(guarantee_rounds=8),
    SGLangRules(guarantee_rounds=8, guarantee_limit=4, retraction_policy="priority"),
    SGLangRules(guarantee_output=0.0),
    SGLangRules(guarantee_output=0.3, guarantee_floor=1.0),
)
"""The rules of SGLang with other settings, by `ServingConfig.rules`. A share that falls does so faster."""


class CoreEngineByOtherRules(CoreEngine):
    """Our engine with the rules of SGLang."""

    capabilities: EngineCapabilities = replace(
        CoreEngine.capabilities, waits=False, own_victims=True, to_tail=True, estimates=True
    )

    def configured(self, config: ServingConfig) -> EngineConfig:
        return replace(_engine_config(config), rules=RULES[config.rules])


class CoreEngineByConfidence(CoreEngine):
    """Our engine with the policy `confidence`, where the configuration has times of passes; no row verifies more drafts
    than it may still emit."""

    capabilities: EngineCapabilities = replace(
        CoreEngine.capabilities,
        adaptive=False,
        multi_steps=False,
        lessons=False,
        budgets=True,
        invalid_confidences=True,
        ragged_drafts=True,
    )

    def __init__(self, config: ServingConfig) -> None:
        super().__init__(config)
        self.confidence: ConfidencePolicy | None = None
        self.chosen: dict[int, ChosenNodes] = {}  # by step
        if config.costs[0]:
            self.confidence = ConfidencePolicy(
                {"1": {"candidate_steps": [config.max_steps]}}, _pass_costs(config), None
            )
            self.controller = AdaptiveController(self.confidence)
            algorithm = ALGORITHMS[config.algorithm]
            self.engine = self.build(self.configured(config), algorithm, self.controller)

    def configured(self, config: ServingConfig) -> EngineConfig:
        # Without a budget the counters leave out rows that verify fewer drafts than the others.
        return replace(_engine_config(config), verify=VERIFY_REMAINING if config.costs[0] else VERIFY_ALL)

    def view(self, step: Step) -> dict:
        view, part = super().view(step), step.decode
        if part is None:
            return view
        nodes = [part.shape.nodes] * len(part.rows) if part.row_nodes is None else part.row_nodes.tolist()
        if part.shape.topk == 1:
            view["decode"] = [(*row, own - 1) for row, own in zip(view["decode"], nodes, strict=True)]
        if part.budget is not None:
            view |= {"budget": part.budget.drafts, "curve": (part.budget.slope, part.budget.biases)}
        return view

    def lengths(self, step: int, confidences: Sequence[Sequence[float]]) -> list[int]:
        part, values = self.steps[step].step.decode, np.array(confidences, dtype=np.float32)
        survival = np.cumprod(acceptance_of(values, part.budget.slope, part.budget.biases), axis=1)
        most = np.full(len(values), part.shape.nodes) if part.row_nodes is None else part.row_nodes
        self.chosen[step] = ChosenNodes(choose_nodes(survival, most, part.budget.drafts), values)
        return (self.chosen[step].row_nodes - 1).tolist()

    def _decode_result(self, flight: InFlight, answer: StepAnswer) -> DecodeResult:
        result, chosen = super()._decode_result(flight, answer), self.chosen.pop(answer.step, None)
        if chosen is None:
            return result
        return replace(result, row_nodes=chosen.row_nodes[None], confidence=chosen.confidence[None])

    def confidences_of(self, request: str) -> list[float] | None:
        row = self.engine.requests.live[request].row
        policy, epoch = self.confidence, self.engine.store.table.epochs[row]
        if row >= len(policy._epochs) or policy._epochs[row] != epoch:
            return None
        return (1 / (1 + np.exp(-policy._odds[row]))).tolist()

    def num_invalid(self) -> int:
        return self.confidence.num_invalid


def _pass_costs(config: ServingConfig) -> PassCosts:
    """Return the times of the configuration: linear, so prompts beside a round change none."""
    of_pass, of_token = config.costs
    verify = tuple(of_pass + of_token * tokens for tokens in (1, 2))
    return PassCosts((config.max_steps,), (1,), ((0,),), (1, 2), verify, (0,))


class CoreEngineWithGroups(CoreEngine):
    """Our engine for models whose layers keep less of a request than all its tokens, too."""

    capabilities: EngineCapabilities = replace(CoreEngine.capabilities, groups=True)

    def configured(self, config: ServingConfig) -> EngineConfig:
        groups = [
            KVGroup(each.window, each.eighths / 8 or 1.0, each.states, None if each.eighths else each.capacity)
            for each in config.layer_groups
        ]
        return replace(_engine_config(config), groups=tuple(groups))

    def units_of(self, request: str) -> list[tuple[int, list[int]]]:
        row = self.engine.requests.live[request].row
        tables = []
        for held in self.engine.store.groups.all:
            units = held.units_of(row).tolist()
            if isinstance(held, WindowUnits):
                tables.append((int(held.first[row]), units))
            else:
                own = held.num_own(row)
                tables.append((units[own] if len(units) > own else -1, units[:own]))
        return tables

    def cached_units(self) -> list[list[int]]:
        return [units.tolist() for units in self.engine.store.groups.cached_units()]

    def free_units(self) -> list[int]:
        return [held.pool.ids.num_free_slots for held in self.engine.store.groups.all]

    def unit_pages(self) -> list[list[int]]:
        return pages_of_units(self.engine.store)


make = CoreEngine
make_with_groups = CoreEngineWithGroups
make_by_other_rules = CoreEngineByOtherRules
make_by_confidence = CoreEngineByConfidence
