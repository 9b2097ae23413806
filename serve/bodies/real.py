"""The real body: a session over a checkpoint, driven one turn at a time, in this process or by workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...core.contract.request import Grammar, Request
from ...core.contract.step import FailureCause
from ...core.contract.text import PromptScores, StreamDecoder, context_of
from ...core.prompt import Prompt
from ...core.scheduler.driver import reload_table
from ...core.scheduler.engine import Engine
from ...gpu.parallel.ranks import RankedExecutor
from ...gpu.session.grammar import grammars_of
from ...gpu.session.loop import RequestDelta
from ...gpu.session.session import DecodeSession
from ...gpu.session.text import Tokenizer
from ...gpu.tiny.scoring import score_prompt
from ..base.pace import ClockPace
from ..base.port import Order, Outlet, Piece, RemoteEngine, TextCodec, TokenText, longest_request

if TYPE_CHECKING:
    import numpy as np

    from ...gpu.disaggregation.session import DisaggregatedSession


class ModelBody:
    """What bodies over a checkpoint share; `name` is the model's. A subclass has the engines: it defines `turn`,
    `wait_s` and `reload`."""

    unsupported: Mapping[str, str] = {
        "tools": "has no effect here: no parser finds the calls of this model in its text",
        "kv_transfer_params": "has no effect here: no other program sends KV to this server, or takes it",
    }
    without_effect: Mapping[str, str] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})
    hand_over_s: float = 0.0  # a device would idle
    pace: ClockPace | None = None
    failure: str = ""

    def __init__(
        self,
        session: DecodeSession | DisaggregatedSession,
        name: str,
        engines: Sequence[Engine | RemoteEngine],
        context_len: int,
    ) -> None:
        self.name = name
        self.engines = engines
        self.context_len = context_len
        self.tokenizer: Tokenizer = session.tokenizer
        self.make_codec: Callable[[], TextCodec] = partial(Tokenizer.load, session.tokenizer.source)
        self.vocab_size: int = session.tokenizer.vocab_size
        self._model_vocab_size = session.plan.target.vocab_size
        self._queue = session.loop
        self._stop_tokens = session.tokenizer.eos_ids

    def at_ns(self, at_s: float) -> int:
        return round(at_s * 1e9)

    def check_grammar(self, grammar: Grammar) -> None:
        grammars_of(self.tokenizer, self._model_vocab_size).check(grammar)

    def make_decoder(self, order: Order) -> TokenText:
        context = context_of(self.tokenizer, order.prompt)
        return StreamDecoder(self.tokenizer, order.stop, context, order.min_tokens)

    def submit(self, order: Order) -> str:
        return self._queue.submit(
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
                min_tokens=order.min_tokens,
            )
        )

    def abort(self, request_id: str) -> None:
        self._queue.abort(request_id)

    def wake(self) -> None:
        """Do nothing: no turn waits for news."""


class RealBody(ModelBody):
    """Decodes with `session` in this process.
    Steps that fail are tried again as `core/scheduler/recovery.py` has it."""

    def __init__(self, session: DecodeSession, name: str) -> None:
        super().__init__(session, name, (session.engine,), longest_request((session.engine,)))
        self._engine = session.engine
        self._loop = session.loop
        self._restart = session.executor.restart
        self._executor = session.executor
        self._scorer = ThreadPoolExecutor(1, "scores")

    def wait_s(self) -> float | None:
        return None if self._loop.is_idle else 0.0

    def turn(self, outlet: Outlet) -> None:
        if self._loop.is_idle:
            return
        try:
            deltas = self._loop.turn()
        except (RuntimeError, MemoryError) as error:  # as devices raise; our own contradictions are none of these
            if not self._engine.num_uncommitted:
                raise
            is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            cause = FailureCause.OUT_OF_MEMORY if is_memory else FailureCause.RAISED
            self._loop.lose_steps(cause, str(error), self._restart)
            return
        at_ns = time.monotonic_ns()
        outlet.deliver(pieces_of(deltas, at_ns))

    def score(self, prompt: np.ndarray, num_top: int) -> Future[PromptScores]:
        """Compute them beside the turns; ranks compute them between their steps, which come in one order."""
        if isinstance(self._executor, RankedExecutor):
            done: Future[PromptScores] = Future()
            done.set_result(self._executor.score(prompt, num_top))
            return done
        return self._scorer.submit(score_prompt, self._executor.target, prompt, num_top)

    def reload(self, table: str, source: str) -> None:
        reload_table(self._engine, table, source, time.perf_counter_ns())


def pieces_of(deltas: Sequence[RequestDelta], at_ns: int) -> list[Piece]:
    """Return what a loop brought as pieces."""
    return [Piece(d.request_id, at_ns, d.tokens.tolist(), d.outputs, d.finished) for d in deltas]
