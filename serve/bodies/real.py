"""The real body: a session over a checkpoint, driven one turn at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...core.contract.request import Grammar, Request
from ...core.contract.step import FailureCause
from ...core.prompt import Prompt
from ...core.scheduler.driver import reload_table
from ...core.scheduler.engine import Engine
from ...gpu.session.grammar import grammars_of
from ...gpu.session.session import DecodeSession
from ...gpu.session.text import StreamDecoder, Tokenizer
from .pace import Pace
from .port import Order, Outlet, Piece, TextCodec, TextDecoder, longest_request


class RealBody:
    """Decodes with `session`; `name` is the model's.
    Steps that fail are tried again as `core/scheduler/recovery.py` has it."""

    unsupported: Mapping[str, str] = {
        "tools": "has no effect here: no parser finds the calls of this model in its text",
        "min_tokens": "has no effect here: the model's end of text is not held back",
    }
    hand_over_s: float = 0.0  # a device would idle
    pace: Pace | None = None

    def __init__(self, session: DecodeSession, name: str) -> None:
        self.name = name
        self.tokenizer: Tokenizer = session.tokenizer
        self.make_codec: Callable[[], TextCodec] = partial(Tokenizer.load, session.tokenizer.source)
        self.vocab_size: int = session.tokenizer.vocab_size
        self.engines: Sequence[Engine] = (session.engine,)
        self.context_len: int = longest_request(self.engines)
        self._model_vocab_size = session.plan.target.vocab_size
        self._loop = session.loop
        self._restart = session.executor.restart
        self._stop_tokens = session.tokenizer.eos_ids

    def at_ns(self, at_s: float) -> int:
        return round(at_s * 1e9)

    def check_grammar(self, grammar: Grammar) -> None:
        grammars_of(self.tokenizer, self._model_vocab_size).check(grammar)

    def make_decoder(self, order: Order) -> TextDecoder:
        return StreamDecoder(self.tokenizer, order.stop)

    def submit(self, order: Order) -> str:
        return self._loop.submit(
            Request(
                order.request_id,
                Prompt.of_tokens(order.prompt),
                order.max_tokens,
                order.priority,
                order.namespace,
                sampling=order.sampling,
                stop_tokens=(*(() if order.ignore_eos else self._stop_tokens), *sorted(order.stop_tokens)),
                stop_strings=order.stop,
                outputs=order.outputs,
            )
        )

    def abort(self, request_id: str) -> None:
        self._loop.abort(request_id)

    def wait_s(self) -> float | None:
        return None if self._loop.is_idle else 0.0

    def turn(self, outlet: Outlet) -> None:
        if self._loop.is_idle:
            return
        try:
            deltas = self._loop.turn()
        except (RuntimeError, MemoryError) as error:  # as devices raise; our own contradictions are none of these
            if not self.engines[0].num_uncommitted:
                raise
            is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            cause = FailureCause.OUT_OF_MEMORY if is_memory else FailureCause.RAISED
            self._loop.lose_steps(cause, str(error), self._restart)
            return
        at_ns = time.monotonic_ns()
        outlet.deliver([Piece(d.request_id, at_ns, d.tokens.tolist(), d.outputs, d.finished) for d in deltas])

    def reload(self, table: str, source: str) -> None:
        reload_table(self.engines[0], table, source, time.perf_counter_ns())
