"""What a first request would wait for, done before it: products are timed, kernels compiled, and rounds captured.

A spare engine with a few pages runs prompts and rounds with the session's models, which compiles their kernels. The
session's own engine, its log and its prefix cache begin empty. Then the session's executor captures its rounds. Where
the models are in ranks, all of them run the spare engine's steps, and capture the same rounds in the same order; each
worker of a disaggregated session makes its own engine ready.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ...core.contract.request import Request, SamplingParams
from ...core.kv.request_table import ceil_to_page
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineRole
from ...core.scheduler.engine import Engine
from ..executor.build import build_executor
from ..executor.executor import TorchExecutor
from ..executor.graphs import CaptureBounds
from ..executor.parts import ExecutorOptions
from ..models.divided import sharded
from ..parallel.ranks import RankedExecutor
from ..types.shards import Shard
from .loop import DeliverySink
from .memory import captured_bytes
from .plan import SessionPlan
from .session import DecodeSession, named_memory_errors
from .text import Tokenizer

READY_S = 120.0
"""Seconds for captures, by default."""
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "sampled with top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "sampled with penalties": SamplingParams(temperature=1.0, min_p=0.1, presence_penalty=0.1),
}
MAX_TOKENS = 8  # some rounds


@dataclass(frozen=True, slots=True)
class Ready:
    """What was done. `left_out`: the kinds of rounds that run without a graph, for want of time or memory."""

    num_graphs: int
    left_out: tuple[str, ...]

    @property
    def notice(self) -> str:
        """Say which rounds have no graph; empty if all have one."""
        if not self.left_out:
            return ""
        shown = "; ".join(self.left_out[:3]) + ("; …" if len(self.left_out) > 3 else "")
        return (
            f"{len(self.left_out)} kinds of rounds run without a CUDA graph, since time or memory ended "
            f"({self.num_graphs} have one): {shown}"
        )


def make_ready(session: DecodeSession, on_line: Callable[[str], None], seconds: float = READY_S) -> Ready:
    """Compile the kernels of a session, and capture all rounds that may come, the likeliest first, within `seconds` and
    the memory that the plan has for captured rounds. Raises NotEnoughMemory, RankFailed."""
    bounds = capture_bounds(session.plan, seconds)
    return make_executor_ready(session.plan, session.executor, session.tokenizer, on_line, bounds)


def capture_bounds(plan: SessionPlan, seconds: float) -> CaptureBounds:
    """Return what captures may take of the device of one rank."""
    own = sharded(plan.target, Shard(0, plan.options.tensor_parallel))
    return CaptureBounds(seconds, captured_bytes(own, plan.draft, plan.spec, plan.dtype, plan.device))


def make_executor_ready(
    plan: SessionPlan,
    executor: TorchExecutor | RankedExecutor,
    tokenizer: Tokenizer,
    on_line: Callable[[str], None],
    bounds: CaptureBounds,
) -> Ready:
    """Do what `make_ready` does for the executor of an engine that is made of `plan.spec`; an engine that prefills
    compiles what prompts need. Raises NotEnoughMemory, RankFailed."""
    with named_memory_errors(plan):
        if isinstance(executor, TorchExecutor) and executor.device.type == "cuda":
            time_products(plan, executor, on_line, bounds.seconds)
        _compile(plan, executor, tokenizer, on_line, bounds.num_bytes)
    if isinstance(executor, RankedExecutor):
        num_graphs, left_out = executor.capture_all(on_line, bounds)
    else:
        left_out = executor.graphs.capture_all(on_line, bounds)
        num_graphs = len(executor.graphs.reports)
    return Ready(num_graphs, tuple(left_out))


def time_products(plan: SessionPlan, executor: TorchExecutor, on_line: Callable[[str], None], limit_s: float) -> None:
    """Find the fastest ways of the models' products with stored numbers, as far as this device has not timed them, and
    keep them for other processes."""
    from ..ops.tilings import coded_matrices, device_seconds, measure_tilings, take_tilings, tilings_path, write_tilings

    weights = coded_matrices(executor.target, executor.draft_model)
    if weights:
        seconds_of = device_seconds(executor.device)
        found = measure_tilings(weights, plan.dtype, seconds_of, on_line, limit_s)
        take_tilings(found)
        write_tilings(tilings_path(executor.device), found)


def _compile(
    plan: SessionPlan,
    executor: TorchExecutor | RankedExecutor,
    tokenizer: Tokenizer,
    on_line: Callable[[str], None],
    num_bytes: int,
) -> None:
    """Serve a short and a long prompt of each kind with a spare engine of one row, whose KV takes at most `num_bytes`,
    or what a prompt of one token needs."""
    config = plan.spec.config
    max_tokens = 1 if config.role is EngineRole.PREFILL else MAX_TOKENS
    size, reach = config.page_size, 2 * (max_tokens + 2) * plan.sizes.alloc_len
    room = num_bytes * config.num_pages // max(plan.kv_bytes, 1) * size - reach - 2 * size
    longest = max(1, min(config.chunk_size, config.context_len - max_tokens, room))
    pages = ceil_to_page(longest + reach, size) // size + 2
    deliveries = DeliverySink()
    small = plan.spec.with_config(num_pages=min(config.num_pages, pages), max_running=1, role=EngineRole.BOTH)
    engine = small.make_engine(deliveries, tokenizer)
    made: AbstractContextManager[TorchExecutor | RankedExecutor]
    if isinstance(executor, RankedExecutor):
        made = executor.spare(small)
    else:
        made = nullcontext(spare_executor(executor, engine))
    with made as its_executor:
        spare = DecodeSession(engine, its_executor, deliveries, tokenizer, plan=plan)
        for kind, sampling in KINDS.items():
            on_line(f"compiling: {kind} {'prompts' if max_tokens == 1 else 'rounds'}")
            for length in sorted({1, longest}):
                name, prompt = f"warm-up {kind} {length}", Prompt.of_tokens([0] * length)
                spare.run([Request(name, prompt, min(max_tokens, config.context_len - length), sampling=sampling)])
        del spare, its_executor, made
    gc.collect()  # executors are in reference cycles, and their pools are freed before rounds are captured


def spare_executor(own: TorchExecutor, engine: Engine) -> TorchExecutor:
    """Return an executor of `engine` with the models of `own`."""
    options = ExecutorOptions(in_rings=own.pool.rings is not None, accept_rule=own.accept_rule)
    return build_executor(engine, own.target, own.draft_model, own.target.ops, options)
