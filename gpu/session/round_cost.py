"""Measures the times of decode rounds on this device with these models, for the policies goodput and confidence.

For each candidate number of steps, a few rounds of requests run at several batch sizes, with short and with long
contexts; the median counts. For goodput, rounds of 0 steps are those of a parked draft where it may be parked, and
prompts are timed, too: a return computes contexts anew. For confidence, rounds have budgets of several sizes. The table
is measured once, when a session opens, and is part of the log's header, so that a replay decides with the same numbers.

These times are a session's own, from plan to commit, of the engine and executor that it will have, and enter its
decisions alone. `gpu/measure`, which stands above sessions, compares executors: cells in turns, with a clock to choose.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ...core.adaptive import Costs, CostTable
from ...core.adaptive.config import fixed_config
from ...core.adaptive.lengths.confidence import FIRST_BIAS, FIRST_SLOPE
from ...core.adaptive.lengths.pass_costs import PassCosts
from ...core.adaptive.parking import always_parked
from ...core.algorithm.algorithm import DraftKV
from ...core.algorithm.builtin import Eagle3
from ...core.algorithm.hybrid import HybridCosts
from ...core.contract.request import Request, SamplingParams
from ...core.contract.step import DraftBudget
from ...core.errors import ConfigError
from ...core.kv.request_table import ceil_to_page
from ...core.prompt import Prompt
from ...core.scheduler.driver import Driver, Executor
from ...core.scheduler.engine import Engine
from ...core.scheduler.spec import EngineSpec
from ..executor.build import build_executor
from ..executor.executor import TorchExecutor
from ..executor.parts import DraftModel, ExecutorOptions
from ..executor.round import PhaseClock
from ..models.decoder import Decoder
from ..types.ops import Ops

WARM_UP_ROUNDS = 2
TIMED_ROUNDS = 7
SHORT_PROMPT = 16
LONG_PROMPT = 512  # at most; less if the context is short
MakeExecutor = Callable[[Engine], Executor]
"""Makes an executor for an engine, with graphs of its largest batch if the session has graphs."""


def measure_costs(spec: EngineSpec, target: Decoder, draft: DraftModel | None, ops: Ops) -> Costs:
    """Measure by which times the policy of `spec` chooses among its candidates; rounds are captured if the session's
    will be. On a CPU it is processor time of this thread, which other programs hardly change."""

    def make_executor(engine: Engine) -> Executor:
        if target.device.type == "cuda":
            gc.collect()  # executors are in reference cycles, and their pools are large
        batch_size = engine.config.max_running
        sizes = None
        if spec.graph_sizes is not None:  # the one that the session pads such a batch to
            sizes = tuple(size for size in spec.graph_sizes if size >= batch_size)[:1] or (batch_size,)
        options = ExecutorOptions(graph_sizes=sizes, graph_sampling=False, graph_outputs=False)
        return build_executor(engine, target, draft, ops, options)

    measure: Callable[..., Costs] = pass_costs if spec.policy == "confidence" else cost_table
    positions = target.config.max_position_embeddings
    if target.device.type == "cpu":
        return measure(spec, make_executor, time.thread_time_ns, positions=positions, in_turns=True)
    return measure(spec, make_executor, positions=positions)


def measure_hybrid_costs(spec: EngineSpec, target: Decoder, draft: DraftModel | None, ops: Ops) -> HybridCosts:
    """Measure by which times HYBRID chooses: what rounds take beside their drafts, with few and with many tokens,
    greedy and sampled, and what the passes of the head do. On a CPU it is processor time, which other programs hardly
    change."""
    steps, rows = max(1, min(4, spec.max_steps)), batch_sizes(spec)[-1]
    timed = spec.with_config(context_len=target.config.max_position_embeddings)
    timed = replace(timed, algorithm=Eagle3.name, graph_sizes=None, num_draft_tokens=None, topk=1)

    def phases(steps: int, rows: int, is_sampled: bool = False) -> tuple[float, float]:
        engine = _engine_alone(timed, steps, rows, SHORT_PROMPT)
        executor = build_executor(engine, target, draft, ops, ExecutorOptions())
        now_s = time.perf_counter
        if target.device.type == "cpu":
            executor.clock, now_s = PhaseClock(now_s=time.process_time), time.process_time
        rounds = [(now_s(), clock["draft"]) for clock in _clocks_of_rounds(engine, executor, rows, is_sampled)]
        whole, drafting = np.diff(rounds, axis=0)[WARM_UP_ROUNDS:].T
        # The least times: other programs only add to them, and these are compared with those of other moments.
        return float((whole - drafting).min()), float(drafting.min()) / max(steps, 1)

    def verify_costs(few: float, many: float) -> tuple[float, float]:
        token = max(0.0, many - few) / (rows * (steps + 1) - 1)
        return max(0.0, few - token), token

    (few, _), (_, one), (many, all_rows) = phases(0, 1), phases(steps, 1), phases(steps, rows)
    draft_token = max(0.0, all_rows - one) / max(rows - 1, 1)
    draft_costs = max(0.0, one - draft_token), draft_token
    sampled = verify_costs(phases(0, 1, True)[0], phases(steps, rows, True)[0])
    return HybridCosts(*verify_costs(few, many), *draft_costs, *sampled)


def _clocks_of_rounds(
    engine: Engine, executor: TorchExecutor, rows: int, is_sampled: bool
) -> Iterator[dict[str, float]]:
    """Run requests together, and yield the seconds of each phase since the start behind each round of all of them."""
    driver = Driver(engine, executor)
    prompt = Prompt.of_tokens(np.zeros(SHORT_PROMPT, dtype=np.int64))
    most = 2 * (WARM_UP_ROUNDS + TIMED_ROUNDS) * engine.sizes.alloc_len
    for number in range(rows):
        sampling = SamplingParams(temperature=1.0, seed=number) if is_sampled else SamplingParams()
        driver.submit(Request(f"timing {number}", prompt, most, sampling=sampling))
    count = 0
    while count <= WARM_UP_ROUNDS + TIMED_ROUNDS and not engine.is_idle:
        (step,) = driver.plan()
        driver.commit()
        if step.prefill is None and step.decode is not None and len(step.decode.rows) == rows:
            count += 1
            yield dict(executor.clock.seconds)


def cost_table(
    spec: EngineSpec,
    make_executor: MakeExecutor,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    *,
    positions: int,
    in_turns: bool = False,
) -> CostTable:
    """Measure round times at `batch_sizes`, and what a KV token adds at the largest of them.

    The timed requests may be longer than those of the session, up to the model's `positions`. With `in_turns` all steps
    of a batch size are measured together, each a round after the other: then what else a machine does concerns all of
    them alike. It takes a pool for each. Raises ConfigError if the positions hold no round.
    """
    timed = _long_enough(spec, positions)
    candidates = spec.adaptive.candidate_steps
    sizes = batch_sizes(spec)
    timing = _Timing(timed, make_executor, clock_ns, in_turns)
    by_size = [timing.rounds_ns([_Cell(steps, size) for steps in candidates]) for size in sizes]
    long, last = _long_prompt(spec, sizes[-1]), by_size[-1]
    longer = timing.rounds_ns([_Cell(steps, sizes[-1], long) for steps in candidates]) if long else last
    added_tokens = sizes[-1] * max(1, long - SHORT_PROMPT)
    kv_token_ps = [max(0, (more - less) * 1000 // added_tokens) for more, less in zip(longer, last, strict=True)]
    round_ns = zip(*by_size, strict=True)
    prefill_token_ps = _prefill_token_ps(timed, make_executor, clock_ns) if may_park(spec) else 0
    return CostTable(tuple(candidates), sizes, tuple(round_ns), tuple(kv_token_ps), prefill_token_ps)


def pass_costs(
    spec: EngineSpec,
    make_executor: MakeExecutor,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    *,
    positions: int,
    in_turns: bool = False,
) -> PassCosts:
    """Measure rounds at `batch_sizes` without a budget, and with the most steps m those with budgets of several sizes:
    what more drafts add is the target's pass over more tokens. All else is drafting, or comes with the rows.

        T(s, r)      a round of s steps and r rows; T(m, r, b) one with a budget of b drafts
        verify(1)  = T(0, 1)
        verify(t)  = verify(r) + T(m, r, t − r) − T(m, r, 0)     r: the fewest rows that hold t tokens; at most the
                     least time of a round with t tokens or more
        draft(s, r) = T(s, r) − verify(r + s · r)
        budget     = the median of T(m, r, m · r) − T(m, r)

    Raises ConfigError as `cost_table` does.
    """
    rows, candidates, deepest = batch_sizes(spec), spec.adaptive.candidate_steps, spec.max_steps
    timing = _Timing(_long_enough(spec, positions), make_executor, clock_ns, in_turns)
    plain, *counts = _token_sizes(rows, deepest + 1)
    holding = {count: next(size for size in rows if size * (deepest + 1) >= count) for count in counts}
    found: dict[_Cell, int] = {}
    for size in rows:
        drafts = {0, *(count - size for count in counts if holding[count] == size)} if deepest else set()
        cells = [_Cell(steps, size) for steps in sorted({0, *candidates} if size == plain else candidates)]
        cells += [_Cell(deepest, size, drafts=count) for count in sorted(drafts)]
        found |= zip(cells, timing.rounds_ns(cells), strict=True)
    without = {(cell.steps, cell.batch_size): ns for cell, ns in found.items() if cell.drafts is None}
    tokens, verify, budgets = [plain], [without[0, plain]], []
    for count in counts:
        size = holding[count]
        round_ns = found[_Cell(deepest, size, drafts=count - size)]
        if count == size * (deepest + 1):
            budgets.append(round_ns - without[deepest, size])
        added = round_ns - found[_Cell(deepest, size, drafts=0)]
        verify.append(max(verify[-1], int(np.interp(size, tokens, verify)) + added))
        tokens.append(count)
    # No pass takes longer than a round with as many tokens or more: so the parts of a measured round give its time.
    longest = [min(ns for (steps, size), ns in without.items() if size + steps * size >= count) for count in tokens]
    verify = [min(one, most) for one, most in zip(verify, longest, strict=True)]
    draft = [
        tuple(max(0, without[steps, size] - int(np.interp(size + steps * size, tokens, verify))) for size in rows)
        for steps in candidates
    ]
    long = _long_prompt(spec, rows[-1])
    read = rows[-1] * max(1, long - SHORT_PROMPT)
    ends = candidates[0], deepest
    longer = timing.rounds_ns([_Cell(steps, rows[-1], long) for steps in ends]) if long else [0, 0]
    slopes = [max(0, (ns - without[n, rows[-1]]) * 1000 // read) for n, ns in zip(ends, longer, strict=True)]
    kv_token_ps = np.interp(candidates, (candidates[0], deepest), slopes).astype(np.int64).tolist()
    captured = 0 if spec.graph_sizes is None else tokens[-1]
    budget_ns = max(1, int(np.median(budgets))) if budgets else 1
    verify_times = tuple(tokens), tuple(verify), tuple(kv_token_ps), captured, budget_ns
    return PassCosts(candidates, rows, tuple(draft), *verify_times)


def _token_sizes(rows: Sequence[int], nodes: int) -> list[int]:
    """Return how many tokens a pass has for which times are measured: 1, 2, 3, 4, 6, 8, 12, … up to those of all rows,
    and all tokens of each number of rows."""
    most = rows[-1] * nodes if nodes > 1 else 1
    sizes = {size for bits in range(1, most.bit_length() + 1) for size in (1 << bits, 3 << (bits - 1)) if size < most}
    return sorted(sizes | {1} | {size * nodes for size in rows if nodes > 1})


def _long_enough(spec: EngineSpec, positions: int) -> EngineSpec:
    """Return the specification with a context that holds the timed rounds, if the model has these positions."""
    longest = max(spec.config.context_len, _request_slots(spec, SHORT_PROMPT))
    return spec.with_config(context_len=min(positions, longest))


def may_park(spec: EngineSpec) -> bool:
    """Return whether the draft can be parked: it has KV, and may draft nothing."""
    return 0 in spec.adaptive.candidate_steps and spec.make_algorithm().draft_kv is not DraftKV.NONE


def batch_sizes(spec: EngineSpec) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to the greatest batch that may run and that the pool holds."""
    config = spec.config
    room = config.num_pages * config.page_size // _request_slots(spec, SHORT_PROMPT)
    return doubling(max(1, min(config.max_running, room)))


def doubling(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … and `most`."""
    return tuple(sorted({min(1 << i, most) for i in range(most.bit_length() + 1)}))


def _rounds_reach(spec: EngineSpec) -> int:
    """Return the slots past the prompt that the measured rounds may write, in either mode."""
    nodes = max(spec.max_num_draft_tokens, spec.max_steps * spec.topk + 1)
    return (WARM_UP_ROUNDS + TIMED_ROUNDS + 4) * nodes


def _request_slots(spec: EngineSpec, prompt_len: int) -> int:
    page_size = spec.config.page_size
    branches = spec.topk * 2 * page_size if page_size > 1 else 0  # branches fill pages of their own
    return ceil_to_page(prompt_len + _rounds_reach(spec) + branches, page_size) + page_size


def _long_prompt(spec: EngineSpec, batch_size: int) -> int:
    """Return the longest prompt that fits context and pool at this batch size;
    0 if it is not much longer than the short one."""
    config = spec.config
    reach = _request_slots(spec, 0)
    longest = min(LONG_PROMPT, config.context_len - reach, config.num_pages * config.page_size // batch_size - reach)
    return longest if longest >= 4 * SHORT_PROMPT else 0


class _Cell(NamedTuple):
    """The rounds that are timed together. `drafts`: how many a budget lets the device verify, of all rows; None: there
    is no budget."""

    steps: int
    batch_size: int
    prompt_len: int = SHORT_PROMPT
    drafts: int | None = None


@dataclass(frozen=True, slots=True)
class _Timing:
    """Times rounds of engines like that of `spec`; the cells of one call in turns, or one after the other."""

    spec: EngineSpec
    make_executor: MakeExecutor
    clock_ns: Callable[[], int]
    in_turns: bool

    def rounds_ns(self, cells: Sequence[_Cell]) -> list[int]:
        """Return the median time of one round of each cell, from plan to commit; of 0 steps with a parked draft, if
        goodput can park it. Raises ConfigError if no round fits."""
        if not self.in_turns:
            return [_median(list(self._rounds(cell))) for cell in cells]
        times = zip_longest(*map(self._rounds, cells))
        return [_median([ns for ns in column if ns is not None]) for column in zip(*times, strict=True)]

    def _rounds(self, cell: _Cell) -> Iterator[int]:
        spec, steps, batch_size, clock_ns = self.spec, cell.steps, cell.batch_size, self.clock_ns
        engine = _engine_alone(spec, steps, batch_size, cell.prompt_len)
        if steps == 0 and spec.policy == "goodput" and may_park(spec):
            engine.controller.policy.parking = always_parked()
        if steps and cell.drafts is not None:
            budget = DraftBudget(cell.drafts, FIRST_SLOPE, (FIRST_BIAS,) * steps)
            engine.rounds.budget_for = lambda shape: budget
        driver = Driver(engine, self.make_executor(engine), clock_ns)
        prompt = Prompt.of_tokens(np.zeros(cell.prompt_len, dtype=np.int64))
        for number in range(batch_size):
            driver.submit(Request(f"timing {number}", prompt, _rounds_reach(spec)))
        count = 0
        while count < WARM_UP_ROUNDS + TIMED_ROUNDS and not engine.is_idle:
            begin = clock_ns()
            (step,) = driver.plan()
            driver.commit()
            if step.prefill is None and step.decode is not None and len(step.decode.rows) == batch_size:
                count += 1
                yield clock_ns() - begin
        if not count:
            message = f"{spec.policy} measures rounds after {cell.prompt_len} tokens, and a context of"
            message = f"{message} {spec.config.context_len} holds none; choose ema"
            raise ConfigError.of("<arguments>", "policy", message)


def _prefill_token_ps(spec: EngineSpec, make_executor: MakeExecutor, clock_ns: Callable[[], int]) -> int:
    """Return the median time in which target and draft compute one token of a prompt, at least 1 ps."""
    prompt_len = _long_prompt(spec, 1) or SHORT_PROMPT
    engine = _engine_alone(spec, spec.adaptive.candidate_steps[-1], 1, prompt_len)
    driver = Driver(engine, make_executor(engine), clock_ns)
    prompt = Prompt.of_tokens(np.zeros(prompt_len, dtype=np.int64))
    for number in range(WARM_UP_ROUNDS + TIMED_ROUNDS):
        driver.submit(Request(f"timing {number}", prompt, 1))
    token_ps: list[int] = []
    while not engine.is_idle:
        begin = clock_ns()
        for step in driver.plan():
            driver.commit()
            if step.prefill is not None:
                token_ps.append((clock_ns() - begin) * 1000 // int(step.prefill.lens.sum()))
    return _median(token_ps)


def _median(times: list[int]) -> int:
    """Return the median without the first rounds, at least 1."""
    return max(1, int(np.median(times[min(WARM_UP_ROUNDS, len(times) - 1) :])))


def _engine_alone(spec: EngineSpec, steps: int, batch_size: int, prompt_len: int) -> Engine:
    """Return an engine whose rounds have this many steps, for requests of one length that all run at once."""
    topk = spec.topk if steps else 1
    alone = replace(
        spec,
        policy="fixed",
        adaptive=fixed_config(steps),
        initial_steps=steps,
        num_draft_tokens=spec.draft_shape.round_shape(steps, batch_size).nodes if topk > 1 else None,
        topk=topk,
        cost_table=None,
        decodes_text=False,
    ).with_config(
        num_pages=batch_size * _request_slots(spec, prompt_len) // spec.config.page_size + 1,
        chunk_size=max(spec.config.chunk_size, prompt_len),
        overlap=False,
        mode_reason="timing",
        multi_step_rounds=1,
        max_running=batch_size,
        prefix_cache=False,
        rules=replace(spec.config.rules, watermark=0.0),
    )
    return alone.make_engine()
