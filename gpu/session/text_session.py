"""The common part of sessions: requests go in, text comes out, and the served requests are counted and timed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.contract.request import FinishReason, Request
from ...core.contract.text import StreamDecoder, context_of
from ...core.errors import InvariantViolation
from ...core.scheduler.engine import Engine
from ...observe.measuring.summary import Measurements, latencies
from .loop import RequestDelta
from .text import Tokenizer

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "error",
}
COMPLETED = ("stop", "length")
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step brought to one request, as text; all deltas together are its `Output`."""

    request_id: str
    text: str  # text that is certain; it may lag behind the tokens
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # one per token if the request asked for them
    finish: str | None = None  # in the last delta: "stop", "length", "aborted", "error", "refused"
    message: str = ""  # why, for the last two; of "length" what limits the output if it is not max_tokens


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request. `text` ends before the stop string that ended it;
    `tokens` are all that were delivered."""

    request_id: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class SessionStats:
    """What a session has done so far; the seconds are those in which it was serving."""

    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    rounds: int  # verify rounds of the whole batch
    verified_rows: int  # verify rounds, counted per request
    drafted: int
    correct_drafts: int
    # prefill, draft, verify (or graph: both, captured), relay; host: plan, launch, commit
    phase_seconds: Mapping[str, float]
    switches: int = 0  # changes of the draft steps
    # Engine -> lower bound of a range of batch sizes -> EMA of correct drafts per request; empty where none is kept.
    ema_accept_len: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    latencies: Mapping[str, float | None] = field(default_factory=dict)  # ms, as summary.json names them
    cpu_seconds: float | None = None  # of this process's threads in those seconds; None where they do not compute

    @property
    def accept_length(self) -> float | None:
        """Tokens that one verify round brings a request, its own bonus token included."""
        return 1 + self.correct_drafts / self.verified_rows if self.verified_rows else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds > 0 else None

    @property
    def cpu_share(self) -> float | None:
        """Processor time of the computing threads per second of serving; below 1 they waited for a core. None where
        others compute."""
        return self.cpu_seconds / self.seconds if self.cpu_seconds is not None and self.seconds > 0 else None

    def shares(self) -> dict[str, float]:
        """Share of the time by phase; `other` is the rest. On a GPU the host works beside the device."""
        if self.seconds <= 0:
            return {}
        shares = {name: seconds / self.seconds for name, seconds in self.phase_seconds.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


class _Receiving:
    """A request that is being served: the text of its tokens, how many have come, and when."""

    __slots__ = ("decoder", "first_ns", "last_ns", "num_tokens", "sent_ns")

    def __init__(self, decoder: StreamDecoder) -> None:
        self.decoder = decoder
        self.sent_ns = time.perf_counter_ns()
        self.first_ns = self.last_ns = self.num_tokens = 0


class TextSession(ABC):
    """Serves requests as text. A subclass runs the engines:
    it defines `_begin`, `_serve`, `_is_serving` and `_abort_all`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._receiving: dict[str, _Receiving] = {}
        self._seconds = self._cpu_seconds = 0.0
        self._requests = self._prompt_tokens = self._output_tokens = 0
        self._measured = Measurements()  # TTFT, TPOT and E2EL of completed requests, ITL between deliveries of all

    @abstractmethod
    def _begin(self, request: Request) -> str:
        """Submit the request; return the reason if it was refused, or an empty text."""

    @abstractmethod
    def _serve(self) -> list[TextDelta]:
        """Take a turn, or wait a moment for one, and return the pieces that requests got."""

    @property
    @abstractmethod
    def _is_serving(self) -> bool:
        """Whether more deltas will come."""

    @abstractmethod
    def _abort_all(self) -> None:
        """Give all requests up; their last deltas come with the next turns."""

    def stream(
        self, requests: Iterable[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[TextDelta, None, None]:
        """Serve `requests`; yield the pieces of each as they come, and at last the reason why it ended.

        Once `interrupted`, asked between turns, returns True, all requests end with what they have; likewise if the
        consumer stops.
        """
        begin, cpu_begin = time.perf_counter(), time.process_time()
        try:
            for request in requests:
                yield from self._submit(request)
            gave_up = False
            while self._is_serving:
                if not gave_up and interrupted():
                    gave_up = True
                    self._abort_all()
                # All are counted before the first is yielded, as the consumer may stop at any of them.
                yield from self._serve()
        except (GeneratorExit, KeyboardInterrupt):
            self._abort_all()
            while self._is_serving:
                self._serve()
            raise
        finally:
            self._seconds += time.perf_counter() - begin
            self._cpu_seconds += time.process_time() - cpu_begin

    def run(
        self,
        requests: Iterable[Request],
        on_delta: Callable[[TextDelta], None] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, Output]:
        """Serve `requests` to their end and return their outputs, in their order;
        `on_delta` gets each delta as it comes."""
        requests = tuple(requests)
        parts: dict[str, list[TextDelta]] = {request.request_id: [] for request in requests}
        with closing(self.stream(requests, interrupted)) as deltas:
            for delta in deltas:
                parts[delta.request_id].append(delta)
                if on_delta is not None:
                    on_delta(delta)
        return {request_id: join_deltas(deltas) for request_id, deltas in parts.items()}

    def _submit(self, request: Request) -> Iterator[TextDelta]:
        self._requests += 1
        if refusal := self._begin(request):
            yield TextDelta(request.request_id, "", (), (), REFUSED, refusal)
            return
        self._prompt_tokens += request.prompt.length
        prompt = request.prompt.materialize()
        context = [] if prompt is None else context_of(self.tokenizer, prompt)
        decoder = StreamDecoder(self.tokenizer, request.stop_strings, context, request.min_tokens)
        self._receiving[request.request_id] = _Receiving(decoder)

    def _text_of(self, request_id: str, tokens: Sequence[int]) -> str:
        """Count tokens that have come; return the text that is certain now."""
        receiving = self._receiving[request_id]
        self._output_tokens += len(tokens)
        if tokens:
            now_ns = time.perf_counter_ns()
            if receiving.num_tokens:
                self._measured.itl.add(np.array([now_ns - receiving.last_ns]))
            else:
                receiving.first_ns = now_ns
            receiving.last_ns = now_ns
            receiving.num_tokens += len(tokens)
        return receiving.decoder.push(tokens)

    def _last_text_of(self, request_id: str, finish: str) -> str:
        """Forget a request that has ended; return the rest of its text."""
        receiving, measured = self._receiving.pop(request_id), self._measured
        if finish in COMPLETED and receiving.num_tokens:
            measured.ttft_ns.extend(np.array([receiving.first_ns - receiving.sent_ns]))
            measured.e2el_ns.extend(np.array([receiving.last_ns - receiving.sent_ns]))
            measured.num_output.extend(np.array([receiving.num_tokens]))
        return receiving.decoder.finish()

    def _as_text(self, delta: RequestDelta) -> TextDelta:
        request_id, tokens, end = delta.request_id, delta.tokens.tolist(), delta.finished
        text, finish, message = self._text_of(request_id, tokens), None, ""
        if end is not None:
            num_received = self._receiving[request_id].num_tokens
            if end.num_output != num_received:
                message = f"request {request_id!r}: {num_received} tokens were received, {end.num_output} delivered"
                raise InvariantViolation("ACCEPT-12", message)
            finish, message = FINISH[end.reason], end.message
            text += self._last_text_of(request_id, finish)
        logprobs = tuple(float(value) for value in delta.outputs.get("logprobs", ()))
        return TextDelta(request_id, text, tuple(tokens), logprobs, finish, message)

    def _stats(self, **of_engines: Any) -> SessionStats:
        """Return the counts of this session together with those of its engines."""
        return SessionStats(
            seconds=self._seconds,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            latencies=latencies(self._measured),
            **of_engines,
        )


def numbers_of(engine: Engine) -> dict[str, Any]:
    """Return the counts of an engine, by their names in `SessionStats`."""
    metrics = engine.controller.metrics()
    return {
        "rounds": metrics.verify_calls,
        "verified_rows": metrics.verified_rows,
        "drafted": metrics.proposed_drafts,
        "correct_drafts": metrics.correct_drafts,
        "switches": metrics.activations,
    }


def join_deltas(deltas: Sequence[TextDelta]) -> Output:
    last = deltas[-1]
    assert last.finish is not None, "the last delta says how the request ended"
    return Output(
        last.request_id,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(value for delta in deltas for value in delta.logprobs),
        last.finish,
        last.message,
    )
