"""The simulated body: a scenario's deployment in real time, with filler text. It needs neither a model nor torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ...core.contract.events import EventSink
from ...core.contract.request import FinishReason, Grammar, Request
from ...core.contract.text import StreamDecoder, context_of
from ...core.draws import request_key
from ...core.errors import InvariantViolation
from ...core.prompt import MAX_TOKEN_ID, NO_TOKENS, Prompt
from ...core.scheduler.driver import reload_table
from ...core.scheduler.engine import Engine
from ...sim.faults.plan import FaultPlan
from ...sim.faults.service import FaultReport
from ...sim.scenario import Scenario
from ..base.pace import ClockPace
from ..base.port import Order, Outlet, Piece, TextCodec, TokenText, longest_request
from .filler import FillerTokenizer, FillerWords, WordDecoder
from .live import Emission, LiveSimulation
from .shaped import Frame

BLOCK_SIZE = 16
"""The number of tokens in a block; the policy prefix_aware compares prompts block by block."""

MOST_CACHED = 8192
"""Tokens of an answer that the prefix cache can have, so that a long one takes no long work at its arrival."""

AHEAD = 64
"""Tokens of filler text that are made at once."""


class SimulatedBody:
    """Plays `scenario`; `speed` simulated seconds pass in a real one. `clock` is real time in seconds.

    An output is as long as the scenario's workload has them, at most `max_tokens`; with ignore_eos it is `max_tokens`
    long. Sampling parameters are checked and change nothing but the words (seed, logit_bias): no time depends on them.
    JSON that a request wants has the words in it, and ends within `max_tokens` if it can. Log-probabilities are those
    of the words without a bias. `make_codec` makes the tokenizer. `warn` gets a sentence when real time is not kept.
    """

    without_effect: Mapping[str, str] = dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"),
        "has no effect on a simulated server, which has no model",
    )
    unsupported: Mapping[str, str] = MappingProxyType({})
    defaults: Mapping[str, Any] = MappingProxyType({})
    failure: str = ""
    hand_over_s: float = 0.02  # planning takes no simulated time, and would share the interpreter with the sending

    def __init__(
        self,
        scenario: Scenario,
        *,
        speed: float = 1.0,
        origins: Mapping[str, str] | None = None,
        sinks: Callable[[int], Sequence[EventSink]] = lambda replica: (),
        faults: FaultPlan | None = None,
        make_codec: Callable[[], TextCodec] = FillerTokenizer,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Raise a ForedraftError for a scenario that cannot run."""
        self.simulation: LiveSimulation = LiveSimulation(
            scenario, sinks=sinks, origins=origins, faults=faults, deliver=self._tell
        )
        self._outlet: Outlet  # of the turn that runs
        self.name: str = self.simulation.assembly.target.name
        self.make_codec: Callable[[], TextCodec] = make_codec
        self.tokenizer: TextCodec = make_codec()
        self.vocab_size: int = getattr(self.tokenizer, "vocab_size", MAX_TOKEN_ID + 1)
        self._words = FillerWords(self.tokenizer, self.vocab_size)
        self._frame_of = lru_cache(maxsize=64)(partial(Frame.of_text, codec=self.tokenizer))
        self.engines: Sequence[Engine] = self.simulation.engines
        self.context_len: int = longest_request(self.engines)
        self.needs_blocks: bool = "prefix_aware" in (b.policy for b in self.simulation.router.balancers.values())
        assembly = self.simulation.assembly
        if assembly.pools.is_disaggregated or faults is not None:
            reason = "is not simulated in a scenario with pools, or with faults"
            self.unsupported = MappingProxyType({"kv_transfer_params": reason})
        self.tensor_parallel: int = assembly.deployment.parallel.tensor
        self.caches_answers: bool = any(engine.store.cache.keeps_prefixes for engine in self.engines)
        self._speed = speed
        self.pace: ClockPace | None = ClockPace(speed, warn)
        self._clock = clock
        self._start_s = clock()
        self._live: dict[str, _Writing] = {}

    def wake(self) -> None:
        """Do nothing: no turn waits."""

    def at_ns(self, at_s: float) -> int:
        return round((at_s - self._start_s) * self._speed * 1e9)

    def check_grammar(self, grammar: Grammar) -> None:
        self._frame_of(grammar.text)

    def make_decoder(self, order: Order) -> TokenText:
        is_filler = isinstance(self.tokenizer, FillerTokenizer)
        if is_filler and not order.stop and order.sampling.grammar is None:
            return WordDecoder(self._words.texts)
        context = () if is_filler else context_of(self.tokenizer, order.prompt)
        return StreamDecoder(self.tokenizer, order.stop, context, order.min_tokens)

    def submit(self, order: Order) -> str:
        prompt = Prompt.of_tokens(order.prompt)
        if self.needs_blocks:
            blocks = [order.prompt[i : i + BLOCK_SIZE].tobytes().hex() for i in range(0, prompt.length, BLOCK_SIZE)]
            blocks = [order.namespace + block for block in blocks]
            prompt = Prompt.of_blocks([request_key(block) >> 1 for block in blocks], BLOCK_SIZE, prompt.length)
        output_len = order.max_tokens + 1
        if not order.ignore_eos:
            output_len = max(self.simulation.draw_output_len(), order.min_tokens + 1 if order.min_tokens else 0)
        output_len = max(output_len, 2) if order.has_kv else output_len  # the first token came with the KV
        writing = _Writing(order, self._words)
        if order.sampling.grammar is not None:
            frame = self._frame_of(order.sampling.grammar.text)
            most = order.max_tokens if order.ignore_eos else order.max_tokens - 1  # a model needs one to stop
            writing.frame = (frame, frame.length(output_len, most))
            output_len = output_len if order.ignore_eos and frame.has_words else writing.frame[1]
        self._live[order.request_id] = writing
        answer = NO_TOKENS
        if self.caches_answers and not self.needs_blocks:  # else blocks say what follows
            answer = Prompt.of_tokens(writing.words(0, min(output_len, order.max_tokens, MOST_CACHED)))
        request = Request(order.request_id, prompt, order.max_tokens, order.priority, order.namespace, answer=answer)
        self.simulation.submit(request, output_len, self.at_ns(order.at_s), order.engine, has_kv=order.has_kv)
        return ""

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            self.simulation.cancel(request_id, self._now_ns())

    def wait_s(self) -> float | None:
        next_ns = self.simulation.next_ns
        if math.isinf(next_ns):
            return None
        return max(0.0, (next_ns - self._now_ns()) / 1e9 / self._speed)

    def turn(self, outlet: Outlet) -> None:
        begin_s, next_ns, is_awaited = self._clock(), self.simulation.next_ns, bool(self._live)
        self._outlet, now_ns = outlet, self.at_ns(begin_s)
        outlet.release(now_ns)
        self.simulation.advance(now_ns)
        for ahead in self.simulation.foresee(self._now_ns()):
            outlet.prepare([self._piece(emission) for emission in ahead])
        assert self.pace is not None
        is_awaited &= math.isfinite(next_ns)  # a start has events that are late for no client
        behind_s = max(now_ns - next_ns, 0.0) / 1e9 / self._speed if is_awaited else 0.0
        self.pace.turn(begin_s, self._clock(), behind_s)

    def reload(self, table: str, source: str) -> None:
        for engine in self.engines:
            reload_table(engine, table, source, self.simulation.env.now)

    def finish(self) -> FaultReport | None:
        """Return which faults were injected, and which promises broken, once no thread drives the body;
        None without a plan."""
        return self.simulation.faults.finish(not self._live and math.isinf(self.simulation.next_ns))

    def _now_ns(self) -> int:
        return self.at_ns(self._clock())

    def _tell(self, emissions: list[Emission]) -> None:
        self._outlet.deliver([self._piece(emission) for emission in emissions])

    def _piece(self, emission: Emission) -> Piece:
        writing, end = self._live[emission.request_id], emission.finished
        tokens = writing.write(emission.num_tokens)
        if end is not None:
            del self._live[emission.request_id]
            if end.num_output != writing.num_tokens and end.reason not in (FinishReason.ERROR, FinishReason.ABORT):
                counts = f"{writing.num_tokens} tokens were written, {end.num_output} delivered"
                raise InvariantViolation("ACCEPT-12", f"request {emission.request_id!r}: {counts}")
        return Piece(emission.request_id, emission.at_ns, tokens, writing.outputs(tokens), finished=end)


class _Writing:
    """The output of a request so far: how many tokens it has, and those that come next, made many at once. `frame`: of
    JSON, with the tokens of all of it."""

    __slots__ = ("_ahead", "_edges", "_key", "_outputs", "_seed", "_words", "frame", "num_tokens")

    def __init__(self, order: Order, words: FillerWords) -> None:
        self.frame: tuple[Frame, int] | None = None
        self._words = words
        self._seed = order.sampling.seed
        self._key = 0 if self._seed else order.number
        self._edges = words.edges(order.sampling.logit_bias) if order.sampling.logit_bias else words.all_edges
        self._outputs = order.outputs
        self._ahead: list[int] = []
        self.num_tokens = 0

    def words(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens of the output from `first` on, int64 [count]."""
        tokens = self._words.draw(self._seed, self._key, first, count, self._edges)
        if self.frame is not None:
            frame, length = self.frame
            frame.put(tokens, first, length)
        return tokens

    def write(self, count: int) -> list[int]:
        """Return the next `count` tokens."""
        if count > len(self._ahead):
            known = self.num_tokens + len(self._ahead)
            self._ahead += self.words(known, max(count, AHEAD)).tolist()
        tokens, self._ahead = self._ahead[:count], self._ahead[count:]
        self.num_tokens += count
        return tokens

    def outputs(self, tokens: list[int]) -> Mapping[str, list[Any]]:
        """Return the outputs that the request asks for beside its tokens, with one entry for each token."""
        if not self._outputs:
            return {}
        found = self._words.outputs(len(tokens))
        return {name: found[name] for name in self._outputs}
