"""What a first request would wait for, done before it: kernels compiled into Triton's cache, graphs captured."""

from __future__ import annotations

from collections.abc import Callable

from ...core.contract.request import Request, SamplingParams
from ...core.prompt import Prompt
from ..batch.uploads import on_device
from .session import DecodeSession

KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "sampled with top-p": SamplingParams(temperature=1.0, top_p=0.9),
}
MAX_TOKENS = 8  # some rounds


def warm_up(session: DecodeSession, on_line: Callable[[str], None]) -> int:
    """Serve a short and a long prompt of each kind, and capture the graphs of all batches; return how many graphs there are.

    Batches with user outputs or changed logits are captured when they come.
    """
    config, executor = session.engine.config, session.executor
    for kind, sampling in KINDS.items():
        on_line(f"compiling: {kind} rounds")
        for length in {1, max(1, min(config.chunk_size, config.context_len - MAX_TOKENS))}:
            name, prompt = f"warm-up {kind} {length}", Prompt.of_tokens([0] * length)
            session.run([Request(name, prompt, min(MAX_TOKENS, config.context_len - length), sampling=sampling)])
    with on_device(executor.device):
        executor.graphs.capture_all(on_line)
    return len(executor.graphs.reports)
