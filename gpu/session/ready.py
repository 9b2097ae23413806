"""What a first request would wait for, done before it: kernels are compiled, and rounds are captured.

A spare engine with a few pages runs prompts and rounds with the session's models, which compiles their kernels. The
session's own engine, its log and its prefix cache begin empty. Then the session's executor captures its rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from ...core.contract.request import Request, SamplingParams
from ...core.kv.request_table import ceil_to_page
from ...core.prompt import Prompt
from ..batch.uploads import on_device
from ..executor.build import build_executor
from ..executor.graphs import CaptureBounds
from .devices import ops_for
from .loop import Deliveries
from .memory import captured_bytes
from .session import DecodeSession, named_memory_errors

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
    the memory that the plan has for captured rounds. Raises NotEnoughMemory."""
    executor, plan = session.own_executor, session.plan
    most = captured_bytes(plan.target, plan.draft, plan.spec, executor.target.dtype)
    with named_memory_errors(plan):
        _compile(session, on_line, most)
    with on_device(executor.device):
        left_out = executor.graphs.capture_all(on_line, CaptureBounds(seconds, most))
    return Ready(len(executor.graphs.reports), tuple(left_out))


def _compile(session: DecodeSession, on_line: Callable[[str], None], num_bytes: int) -> None:
    """Serve a short and a long prompt of each kind with a spare engine of one row, whose KV takes at most `num_bytes`,
    or what a prompt of one token needs."""
    own, plan, config = session.own_executor, session.plan, session.plan.spec.config
    size, reach = config.page_size, 2 * (MAX_TOKENS + 2) * session.engine.sizes.alloc_len
    room = num_bytes * config.num_pages // max(plan.kv_bytes, 1) * size - reach - 2 * size
    longest = max(1, min(config.chunk_size, config.context_len - MAX_TOKENS, room))
    pages = ceil_to_page(longest + reach, size) // size + 2
    deliveries = Deliveries()
    small = plan.spec.with_config(num_pages=min(config.num_pages, pages), max_running=1)
    engine = small.make_engine(deliveries, session.tokenizer)
    executor = build_executor(
        engine, own.target, own.draft_model, ops_for(plan.device), in_rings=own.pool.rings is not None
    )
    spare = DecodeSession(engine, executor, deliveries, session.tokenizer, plan=plan)
    for kind, sampling in KINDS.items():
        on_line(f"compiling: {kind} rounds")
        for length in sorted({1, longest}):
            name, prompt = f"warm-up {kind} {length}", Prompt.of_tokens([0] * length)
            spare.run([Request(name, prompt, min(MAX_TOKENS, config.context_len - length), sampling=sampling)])
    spare.close()
    del executor, spare
    gc.collect()  # executors are in reference cycles, and their pools are freed before rounds are captured
