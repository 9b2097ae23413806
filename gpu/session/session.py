"""A session: a model, its draft, and the engine that serves requests with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.hybrid import HYBRID_COSTS
from ...core.contract.events import EventSink
from ...core.contract.request import Grammar, Request
from ...core.errors import ConfigError, Problem
from ...core.scheduler.config import EngineRole
from ...core.scheduler.engine import Engine
from ...core.tree.chains import AcceptRule
from ...observe.engine_lines import EngineLines, engine_lines
from ..types.session_options import INT8, RING, SessionOptions
from .devices import QuantizedChoice, keeps_quantized
from .grammar import grammars_of
from .loop import DecodeLoop, DeliverySink, all_of
from .memory import NotEnoughMemory
from .plan import SessionPlan, plan_session
from .text import Tokenizer, spelled_alike
from .text_session import SessionStats, TextDelta, TextSession, numbers_of

if TYPE_CHECKING:
    from ...core.scheduler.spec import EngineSpec
    from ..executor.executor import TorchExecutor
    from ..executor.parts import DraftModel
    from ..executor.shaping import Matcher
    from ..models.decoder import Decoder, TokenTwins
    from ..parallel.ranks import RankedExecutor, Ranks
    from ..types.ops import Ops


class DecodeSession(TextSession):
    """Serves requests with an engine and its executor; see `open`. `deliveries` must be among the engine's sinks."""

    def __init__(
        self,
        engine: Engine,
        executor: TorchExecutor | RankedExecutor,
        deliveries: DeliverySink,
        tokenizer: Tokenizer,
        *,
        plan: SessionPlan,
        phase_seconds: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(tokenizer)
        self.engine = engine
        self.executor = executor
        self.plan = plan
        self.loop: DecodeLoop = DecodeLoop(engine, executor, deliveries)
        self._phase_seconds = phase_seconds
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
        With `tensor_parallel` the models are in processes of their own, which `close` ends.

        A `plan` and a `tokenizer` that were made before are used. Raises ConfigError and other ForedraftErrors.
        """
        plan = plan or plan_session(options)
        tokenizer = tokenizer or Tokenizer.load(options.model)
        check_vocabulary(tokenizer, plan)
        deliveries = DeliverySink()
        load = load_engine if plan.options.tensor_parallel == 1 else load_ranks
        engine, executor, plan = load(plan, tokenizer, lambda spec: [deliveries, *make_sinks(spec)])
        return cls(
            engine, executor, deliveries, tokenizer, plan=plan, phase_seconds=lambda: dict(executor.clock.seconds)
        )

    @property
    def own_executor(self) -> TorchExecutor:
        """The executor, of a session whose models are in this process."""
        from ..parallel.ranks import RankedExecutor

        assert not isinstance(self.executor, RankedExecutor), "its models are in the ranks' processes"
        return self.executor

    def stats(self) -> SessionStats:
        """Return the numbers since the session was opened."""
        if self._closed is not None:
            return self._closed
        ema_accept_len = self.engine.controller.metrics().ema_accept_len
        return self._stats(
            **numbers_of(self.engine),
            phase_seconds={**self._phase_seconds(), "host": self.loop.driver.host_ns / 1e9},
            ema_accept_len={"engine": ema_accept_len} if ema_accept_len else {},
            cpu_seconds=self._cpu_seconds if self._computes_here else None,
        )

    def close(self, complete: bool = False) -> None:
        """Free models, pools and graphs; `stats` stay as they are. Nothing is served afterwards."""
        if self._closed is None:
            self._closed = self.stats()
            self.executor.close()
            del self.executor, self.loop, self._phase_seconds

    @property
    def _computes_here(self) -> bool:
        return self.plan.device == "cpu" and self.plan.options.tensor_parallel == 1

    def _begin(self, request: Request) -> str:
        return self.loop.submit(request)

    def _serve(self) -> list[TextDelta]:
        return [self._as_text(delta) for delta in self.loop.turn()]

    @property
    def _is_serving(self) -> bool:
        return not self.loop.is_idle

    def _abort_all(self) -> None:
        self.loop.abort_all()


def load_engine(
    plan: SessionPlan, tokenizer: Tokenizer, make_sinks: Callable[[EngineSpec], Sequence[EventSink]]
) -> tuple[Engine, TorchExecutor, SessionPlan]:
    """Load the models of `plan` and make their engine and executor. Also return the plan with the values that were
    measured meanwhile."""
    from ..executor.build import build_executor
    from ..executor.parts import ExecutorOptions
    from .devices import ops_for, set_threads

    options, spec = plan.options, plan.spec
    ops = ops_for(plan.device, options.ops)
    set_threads(plan.device, options.threads, plan.target, plan.weight_bytes)
    with named_memory_errors(plan):
        target, draft = load_models(plan, ops)
        if spec.lacks_costs:
            from .round_cost import measure_costs

            # A decode worker's engine takes no prompts, the one that is measured does.
            whole = spec.with_role(EngineRole.BOTH)
            spec = replace(spec, cost_table=measure_costs(whole, target, draft, ops))
            plan = replace(plan, spec=spec)
        costs = HYBRID_COSTS
        if plan.algorithm.looks_up_past_outputs and draft is not None:
            from .round_cost import measure_hybrid_costs

            costs = measure_hybrid_costs(spec.with_role(EngineRole.BOTH), target, draft, ops)
        engine, lines = _make_engine(spec, tokenizer, make_sinks)
        executor = build_executor(
            engine,
            target,
            draft,
            ops,
            ExecutorOptions(
                graph_sizes=spec.graph_sizes,
                seed=options.seed,
                debug=options.debug,
                hybrid_costs=costs,
                in_rings=options.window_kv == RING,
                accept_rule=AcceptRule(options.accept_rule or AcceptRule.TARGET),
                make_matcher=partial(_make_matcher, tokenizer, plan.target.vocab_size),
            ),
        )
    if lines is not None:
        executor.graphs.on_round = lines.round_ran
        executor.graphs.on_capture = lines.graph_captured
    return engine, executor, plan


def load_ranks(
    plan: SessionPlan,
    tokenizer: Tokenizer,
    make_sinks: Callable[[EngineSpec], Sequence[EventSink]],
    ranks: Ranks | None = None,
) -> tuple[Engine, RankedExecutor, SessionPlan]:
    """Do what `load_engine` does, with an executor whose models are in a process for each rank: `ranks` that run
    already, or new ones. Raises RankFailed."""
    from .orders import open_ranks

    return open_ranks(plan, lambda spec: _make_engine(spec, tokenizer, make_sinks)[0], ranks)


def _make_engine(
    spec: EngineSpec, tokenizer: Tokenizer, make_sinks: Callable[[EngineSpec], Sequence[EventSink]]
) -> tuple[Engine, EngineLines | None]:
    """Make an engine, and what writes its lines if something listens."""
    sinks, lines = make_sinks(spec), engine_lines("engine")
    engine = spec.make_engine(all_of([*sinks, *([] if lines is None else [lines])]), tokenizer)
    if lines is not None:
        lines.engine = engine
    return engine, lines


def _make_matcher(tokenizer: Tokenizer, vocab_size: int, grammar: Grammar) -> Matcher:
    return grammars_of(tokenizer, vocab_size).make(grammar)


def load_models(plan: SessionPlan, ops: Ops) -> tuple[Decoder, DraftModel | None]:
    """Load the target and its draft, and lay their weights out for the passes of the session."""
    models = _load_models(plan, ops)
    lay_out_models(plan.options, *models)
    return models


def lay_out_models(options: QuantizedChoice, target: Decoder, draft: DraftModel | None) -> None:
    """Lay the weights out on a CPU, or round large matrices to 8-bit integers if the options say so."""
    from ..models.projection import pack_projections

    for model in (target, draft):
        if model is not None:
            pack_projections(model, in_int8=options.quantized == INT8)


def _load_models(plan: SessionPlan, ops: Ops) -> tuple[Decoder, DraftModel | None]:
    """Load the target and its draft. Errors in the draft's files are found before the target's weights are read,
    which takes longer."""
    from ..models.checkpoint import load_draft, load_target, network_of
    from ..models.decoder import Decoder

    options, algorithm = plan.options, plan.algorithm
    load = partial(load_target, ops=ops, device=plan.device, dtype=plan.dtype, context_len=plan.spec.config.context_len)
    load = partial(load, kv_dtype=plan.kv_dtype, in_int8=options.quantized == INT8)
    load = partial(load, keep_quantized=keeps_quantized(options, plan.target, plan.device))
    if options.draft is None:
        return load(options.model, shard=plan.shard), None
    if algorithm.drafter is Drafter.MODEL:  # it shares nothing with the target
        draft = load(options.draft, min_positions=plan.target.max_position_embeddings)
        draft.twins = twins_of(options.model, options.draft, plan.target.vocab_size, draft)
        return load(options.model, shard=plan.shard), draft
    load_head = partial(load_draft, options.draft, algorithm.draft_form, network=network_of(algorithm))
    load_head(Decoder(plan.target, ops, "meta", plan.dtype))
    target = load(options.model, shard=plan.shard)
    return target, load_head(target)


def twins_of(model: Path, directory: Path, target_vocab: int, draft: Decoder) -> TokenTwins | None:
    """Return how a draft with another tokenizer reads and writes the target's tokens; None if it has the target's."""
    import torch

    from ..models.decoder import TokenTwins

    alike = spelled_alike(model, directory, target_vocab, draft.vocab_size)
    if alike is None:
        return None
    return TokenTwins(*(torch.from_numpy(x).to(draft.device) for x in (alike.read_as, alike.own_ids, alike.target_ids)))


@contextmanager
def named_memory_errors(plan: SessionPlan) -> Iterator[None]:
    """Turn OutOfMemoryError into NotEnoughMemory, which says what the plan reserved:
    the plan estimates activations, logits and graphs."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        gib = 1 << 30
        raise NotEnoughMemory(
            f"not enough memory on {plan.device}: beside {plan.weight_bytes / gib:.2f} GiB of weights and {plan.kv_bytes / gib:.2f} GiB "
            "of KV there is no room for activations and graphs; fewer --max-running or --kv-tokens need less"
        ) from error


def check_vocabulary(tokenizer: Tokenizer, plan: SessionPlan) -> None:
    """Raise ConfigError if the tokenizer makes tokens that the model does not have."""
    if tokenizer.vocab_size > plan.target.vocab_size:
        message = f"has {tokenizer.vocab_size} tokens, the model's vocab_size is {plan.target.vocab_size}"
        raise ConfigError.of(tokenizer.source, "tokenizer.json", f"{message}: they do not belong together")


def check_lengths(requests: Iterable[Request], plan: SessionPlan, source: str, places: Mapping[str, str]) -> None:
    """Raise ConfigError for every request whose prompt leaves no room for output;
    `places` say where each stands in `source`."""
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
