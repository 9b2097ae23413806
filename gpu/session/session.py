"""A session: a model, its draft, and the engine that serves requests with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ...core.algorithm.algorithm import Drafter
from ...core.contract.events import EventSink
from ...core.contract.request import FinishReason, Grammar, Request, SamplingParams
from ...core.errors import ConfigError, InvariantViolation, Problem
from ...core.prompt import Prompt
from ...core.scheduler.config import EngineRole
from ...core.scheduler.driver import Executor
from ...core.scheduler.engine import Engine
from ...observe.engine_lines import engine_lines
from ..batch.uploads import on_device
from .loop import DecodeLoop, Deliveries, Delta, LatencyMeter, all_of
from .memory import NotEnoughMemory
from .plan import SessionOptions, SessionPlan, plan_session
from .prompts import grammars_of
from .text import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from ...core.scheduler.spec import EngineSpec
    from ..executor.build import DraftModel
    from ..executor.executor import TorchExecutor
    from ..executor.shaping import Matcher
    from ..models.decoder import Decoder
    from ..ops.port import Ops


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
    """The result of one request. `text` ends before the stop string that ended it; `tokens` are all that were delivered."""

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

    @property
    def accept_length(self) -> float | None:
        """Tokens that one verify round brings a request, its own bonus token included."""
        return 1 + self.correct_drafts / self.verified_rows if self.verified_rows else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds > 0 else None

    def shares(self) -> dict[str, float]:
        """Share of the time by phase, and `other`: what none of them had. On a GPU the host works beside the device."""
        if self.seconds <= 0:
            return {}
        shares = {name: seconds / self.seconds for name, seconds in self.phase_seconds.items()}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


@dataclass(slots=True)
class _Receiving:
    """A request that is being served."""

    request: Request
    decoder: StreamDecoder
    num_tokens: int = 0


@dataclass(slots=True)
class _Totals:
    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    receiving: dict[str, _Receiving] = field(default_factory=dict)


class DecodeSession:
    """Serves requests with an engine and its executor; see `open`. `deliveries` must be among the engine's sinks."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        deliveries: Deliveries,
        tokenizer: Tokenizer,
        *,
        plan: SessionPlan | None = None,
        phase_seconds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.engine = engine
        self.executor = executor
        self.tokenizer = tokenizer
        self.plan = plan
        self.loop = DecodeLoop(engine, executor, deliveries)
        self._phase_seconds = phase_seconds
        self._totals = _Totals()
        self._latencies = LatencyMeter()
        self._closed: SessionStats | None = None  # the last numbers

    @classmethod
    def open(
        cls,
        options: SessionOptions,
        *,
        plan: SessionPlan | None = None,
        tokenizer: Tokenizer | None = None,
        make_sinks: Callable[[EngineSpec], Sequence[EventSink]] = lambda spec: (),
    ) -> DecodeSession:
        """Load the models and make the engine. `make_sinks` is given the engine's specification, for a log's header.

        A `plan` and a `tokenizer` that were made before are used. Raises ConfigError and other ForetokenErrors.
        """
        plan = plan or plan_session(options)
        tokenizer = tokenizer or Tokenizer.load(options.model)
        check_vocabulary(tokenizer, plan)
        deliveries = Deliveries()
        engine, executor, plan = load_engine(plan, tokenizer, lambda spec: [deliveries, *make_sinks(spec)])
        return cls(
            engine, executor, deliveries, tokenizer, plan=plan, phase_seconds=lambda: dict(executor.clock.seconds)
        )

    def stream(
        self, requests: Iterable[Request], interrupted: Callable[[], bool] = lambda: False
    ) -> Generator[TextDelta, None, None]:
        """Serve `requests`; yield what each of them gets as it comes, and at last why it ended.

        Once `interrupted`, asked between steps, returns True, all requests end with what they have; likewise if the consumer stops.
        """
        begin = time.perf_counter()
        loop, totals = self.loop, self._totals
        try:
            for request in requests:
                yield from self._submit(request)
            gave_up = False
            while not loop.is_idle:
                if not gave_up and interrupted():
                    gave_up = True
                    loop.abort_all()
                # All are counted before the first is yielded, as the consumer may stop at any of them.
                yield from [self._as_text(delta) for delta in loop.turn()]
        except GeneratorExit:
            loop.abort_all()
            while not loop.is_idle:
                for delta in loop.turn():
                    self._as_text(delta)
            raise
        finally:
            totals.seconds += time.perf_counter() - begin

    def run(
        self,
        requests: Iterable[Request],
        on_delta: Callable[[TextDelta], None] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, Output]:
        """Serve `requests` to their end and return their outputs, in the order of `requests`."""
        requests = tuple(requests)
        return collect_outputs(requests, self.stream(requests, interrupted), on_delta)

    def stats(self) -> SessionStats:
        """Return the numbers since the session was opened."""
        if self._closed is not None:
            return self._closed
        totals, metrics = self._totals, self.engine.controller.metrics()
        return SessionStats(
            seconds=totals.seconds,
            requests=totals.requests,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            rounds=metrics.verify_calls,
            verified_rows=metrics.verified_rows,
            drafted=metrics.proposed_drafts,
            correct_drafts=metrics.correct_drafts,
            phase_seconds={**self._phase_seconds(), "host": self.loop.driver.host_ns / 1e9},
            switches=metrics.activations,
            ema_accept_len={"engine": metrics.ema_accept_len} if metrics.ema_accept_len else {},
            latencies=self._latencies.read(),
        )

    def close(self, complete: bool = False) -> None:
        """Free models, pools and graphs; `stats` stay as they are. Nothing is served afterwards."""
        if self._closed is None:
            self._closed = self.stats()
            del self.executor, self.loop, self._phase_seconds

    def _submit(self, request: Request) -> Iterator[TextDelta]:
        totals = self._totals
        totals.requests += 1
        refusal = self.loop.submit(request)
        if refusal:
            yield TextDelta(request.request_id, "", (), (), REFUSED, refusal)
            return
        self._latencies.sent(request.request_id)
        totals.prompt_tokens += request.prompt.length
        totals.receiving[request.request_id] = _Receiving(request, StreamDecoder(self.tokenizer, request.stop_strings))

    def _as_text(self, delta: Delta) -> TextDelta:
        totals, end = self._totals, delta.finished
        receiving = totals.receiving[delta.request_id]
        receiving.num_tokens += len(delta.tokens)
        totals.output_tokens += len(delta.tokens)
        if len(delta.tokens):
            self._latencies.delivered(delta.request_id, len(delta.tokens))
        text = receiving.decoder.push(delta.tokens)
        finish, message = None, ""
        if end is not None:
            del totals.receiving[delta.request_id]
            if end.num_output != receiving.num_tokens:
                told = f"{receiving.num_tokens} tokens were told, {end.num_output} delivered"
                raise InvariantViolation("ACCEPT-12", f"request {delta.request_id!r}: {told}")
            text += receiving.decoder.finish()
            finish, message = FINISH[end.reason], end.message
            self._latencies.ended(delta.request_id, finish in COMPLETED)
        logprobs = tuple(float(value) for value in delta.outputs.get("logprobs", ()))
        return TextDelta(delta.request_id, text, tuple(delta.tokens.tolist()), logprobs, finish, message)


def load_engine(
    plan: SessionPlan, tokenizer: Tokenizer, make_sinks: Callable[[EngineSpec], Sequence[EventSink]]
) -> tuple[Engine, TorchExecutor, SessionPlan]:
    """Load the models of `plan` and make their engine and executor; the plan comes back with what was measured on the way."""
    from ..executor.build import build_executor
    from .devices import ops_for, set_threads

    options, spec = plan.options, plan.spec
    ops = ops_for(plan.device)
    set_threads(plan.device, options.threads, plan.target, plan.weight_bytes)
    with named_memory_errors(plan):
        target, draft = load_models(plan, ops)
        if spec.policy == "goodput" and spec.cost_table is None:
            from .round_cost import measure_cost_table

            # A decode worker's engine takes no prompts, the one that is measured does.
            whole = spec.with_role(EngineRole.BOTH)
            spec = replace(spec, cost_table=measure_cost_table(whole, target, draft, ops))
            plan = replace(plan, spec=spec)
        sinks, lines = make_sinks(spec), engine_lines("engine")
        if lines is not None:
            sinks = [*sinks, lines]
        engine = spec.make_engine(all_of(sinks), tokenizer)
        executor = build_executor(
            engine,
            target,
            draft,
            ops,
            graph_sizes=spec.graph_sizes,
            seed=options.seed,
            debug=options.debug,
            make_matcher=partial(_make_matcher, tokenizer, plan.target.vocab_size),
        )
    if lines is not None:
        lines.engine = engine
        executor.graphs.on_round = lines.round_ran
        executor.graphs.on_capture = lines.graph_captured
    return engine, executor, plan


def _make_matcher(tokenizer: Tokenizer, vocab_size: int, grammar: Grammar) -> Matcher:
    return grammars_of(tokenizer, vocab_size).make(grammar)


def load_models(plan: SessionPlan, ops: Ops) -> tuple[Decoder, DraftModel | None]:
    """Load the target and its draft. Errors in the draft's files are found before the target's weights are read, which takes longer."""
    from ..models.checkpoint import load_draft, load_target
    from ..models.decoder import Decoder

    options, algorithm = plan.options, plan.algorithm
    if options.draft is None:
        return load_target(options.model, ops, plan.device, plan.dtype), None
    if algorithm.drafter is Drafter.MODEL:  # it shares nothing with the target
        draft = load_target(options.draft, ops, plan.device, plan.dtype, plan.target.max_position_embeddings)
        return load_target(options.model, ops, plan.device, plan.dtype), draft
    load_draft(options.draft, algorithm.draft_form, Decoder(plan.target, ops, "meta", plan.dtype))
    target = load_target(options.model, ops, plan.device, plan.dtype)
    return target, load_draft(options.draft, algorithm.draft_form, target)


@contextmanager
def named_memory_errors(plan: SessionPlan) -> Iterator[None]:
    """Raise NotEnoughMemory, with what the plan counted, where what it could not count (graphs, activations, logits) does not fit."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        gib = 1 << 30
        raise NotEnoughMemory(
            f"not enough memory on {plan.device}: beside {plan.weight_bytes / gib:.2f} GiB of weights and {plan.kv_bytes / gib:.2f} GiB "
            "of KV there is no room for activations and graphs; fewer --max-running or --kv-tokens need less"
        ) from error


def collect_outputs(
    requests: Sequence[Request], stream: Generator[TextDelta, None, None], on_delta: Callable[[TextDelta], None] | None
) -> dict[str, Output]:
    """Read `stream` to its end and return the requests' outputs, in their order; `on_delta` gets each delta as it comes."""
    parts: dict[str, list[TextDelta]] = {request.request_id: [] for request in requests}
    with closing(stream) as deltas:
        for delta in deltas:
            parts[delta.request_id].append(delta)
            if on_delta is not None:
                on_delta(delta)
    return {request_id: join_deltas(deltas) for request_id, deltas in parts.items()}


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


def check_vocabulary(tokenizer: Tokenizer, plan: SessionPlan) -> None:
    """Raise ConfigError if the tokenizer makes tokens that the model does not have."""
    if tokenizer.vocab_size > plan.target.vocab_size:
        message = f"has {tokenizer.vocab_size} tokens, the model's vocab_size is {plan.target.vocab_size}"
        raise ConfigError(tokenizer.source, [Problem("tokenizer.json", f"{message}: they do not belong together")])


def check_lengths(requests: Iterable[Request], plan: SessionPlan, source: str, places: Mapping[str, str]) -> None:
    """Raise ConfigError for every request whose prompt leaves no room for output; `places` say where each stands in `source`."""
    problems = []
    config, sizes = plan.spec.config, plan.sizes
    for request in requests:
        if sizes.max_tokens(config, request.prompt.length, request.max_tokens) < 1:
            message = (
                f"the prompt has {request.prompt.length} tokens; with context_len {config.context_len} and a pool of "
                f"{config.num_pages * config.page_size} tokens there is room for {plan.max_prompt_len()}"
            )
            problems.append(Problem(places.get(request.request_id, ""), message))
    if problems:
        raise ConfigError(source, problems)


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
