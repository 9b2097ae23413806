"""Whole sessions on the device in bfloat16, which no contract runs: checkpoints loaded, prompts prefilled, rounds with
each kind of draft. Then what cannot be seen in tokens: launches that wait for the device, memory that stays.

Every emitted token must have the greatest of the target's logits, computed in float64 and without a KV pool. Near ties
are allowed: the device may be off by as much as torch's own dense pass in the same dtype. A wrong token is off by about
a logit's deviation.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.algorithm.registry import get_algorithm
from ...core.contract.request import Request
from ...core.prompt import Prompt
from ..disaggregation.session import DisaggregatedSession, plan_disaggregated
from ..disaggregation.topology import WorkerCounts
from ..disaggregation.workers import Workers
from ..executor.executor import TorchExecutor
from ..measure.shapes import draft_shape
from ..models.checkpoint import load_target, random_head, random_weights, save_draft, save_target
from ..models.config import LLAMA, ModelConfig
from ..models.decoder import Decoder
from ..models.eagle import DraftHead
from ..models.families import architecture_of
from ..models.heads.config import HeadConfig
from ..ops.torch_ops import TorchOps
from ..session.devices import can_capture
from ..session.plan import SessionOptions
from ..session.session import DecodeSession
from ..session.text_session import COMPLETED, Output
from ..tiny.dense import DenseAttention
from ..types.attention import E4M3
from ..types.recurrence import StateShape
from ..types.session_options import AUTO, FP8, RING
from .steps import Context, SelftestStep, StepFinding, UnavailableHere

DTYPE = torch.bfloat16
NUM_REQUESTS = 4
HEAD_STEPS = {"EAGLE": 2, "EAGLE3": 3, "MULTI_LAYER_EAGLE": 2, "DFLASH": 3, "DFLASH2": 3, "DSPARK": 3, "P_EAGLE": 3}
"""The draft steps that each head is made for."""
IN_ONE_PASS = ("DFLASH", "DFLASH2", "DSPARK", "P_EAGLE")
LEAST_EQUAL = 0.95  # of the drafts in float32 and in float64: near ties may fall otherwise
AGREEMENT_NOISE = 0.05  # of the STANDALONE draft's weights, relative: it then often agrees with the target
TIES = 4  # each of two logits may be off by twice what the dense pass is off by at most


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: the names of draft and target, the session's options, and how many GPUs it needs.
    `disaggregate`: its workers, if it is a session over workers."""

    draft: str | None
    options: Mapping[str, Any]
    target: str = "target"
    num_gpus: int = 1
    disaggregate: str = ""

    @property
    def kv_in_8_bits(self) -> bool:
        return self.options.get("kv_dtype") == FP8


WAYS = {
    "plain": Way(None, {"algorithm": "NONE"}),
    "STANDALONE chain": Way("STANDALONE", {"steps": 3}),
    "STANDALONE tree, pages of 4": Way("STANDALONE", {"steps": 3, "topk": 2, "num_draft_tokens": 7, "page_size": 4}),
    "EAGLE3 tree": Way("EAGLE3", {"steps": 3, "topk": 3, "num_draft_tokens": 9}),
    "NGRAM": Way(None, {"algorithm": "NGRAM", "steps": 4}),
    "EAGLE chain": Way("EAGLE", {"steps": 2}),
    "MULTI_LAYER_EAGLE": Way("MULTI_LAYER_EAGLE", {"steps": 2}),
    **{f"{name}, all drafts in one pass": Way(name, {"steps": 3}) for name in IN_ONE_PASS},
    "EAGLE3, adaptive steps": Way("EAGLE3", {"adaptive": '{"1": {"candidate_steps": [0, 1, 3]}}'}),
    "keys and values in 8 bits": Way("STANDALONE", {"steps": 3, "kv_dtype": FP8}),
    "windows in pages, tree": Way("windows' draft", {"steps": 3, "topk": 2, "num_draft_tokens": 7}, "windows"),
    "windows in rings": Way("windows' draft", {"steps": 3, "window_kv": RING}, "windows"),
    "recurrent states": Way("states' draft", {"steps": 3}, "states"),
    "two devices, tensor parallel": Way("EAGLE3", {"steps": 3, "tensor_parallel": 2}, num_gpus=2),
    "two devices, prefill to decode": Way("EAGLE3", {"steps": 3}, num_gpus=2, disaggregate="prefill=1,decode=1"),
}
CAPTURED = ("plain", "STANDALONE chain", "STANDALONE tree, pages of 4", "EAGLE3 tree", "DFLASH, all drafts in one pass")


def session_steps(context: Context) -> Iterator[SelftestStep]:
    for way in WAYS:
        yield SelftestStep("sessions", f"bfloat16, {way}", partial(greedy, context, way))
    for name in IN_ONE_PASS:
        yield SelftestStep("sessions", f"drafts are those of float64, {name}", partial(same_drafts, context, name))
    for way in CAPTURED:
        run = partial(launches_without_waiting, context, way)
        yield SelftestStep("sessions", f"launching never waits, {way}", run, needs_gpu=True)
    yield SelftestStep("sessions", "close() frees", partial(close_frees, context))


# -- models -----------------------------------------------------------------------------------------------------------


def shape_of(context: Context) -> ModelConfig:
    d, heads, context_len = (64, 4, 512) if context.on_gpu else (8, 4, 96)
    return ModelConfig(
        architecture=LLAMA,
        vocab_size=512 if context.on_gpu else 64,
        hidden_size=d * heads,
        intermediate_size=2 * d * heads,
        num_layers=4 if context.on_gpu else 3,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=d,
        max_position_embeddings=context_len,
    )


def shapes_of(context: Context) -> Mapping[str, ModelConfig]:
    """Return the shapes of the targets: a plain one, one with sliding windows, one with recurrent layers."""
    shape = shape_of(context)
    d = shape.head_dim
    windows: dict[str, Any] = {"window": 24 if context.on_gpu else 6, "windowed_layers": (0, 2), "qk_norm": True}
    state = StateShape(heads=4, key_heads=2, key_dim=d, value_dim=d, kernel=4)
    recurrent: dict[str, Any] = {"state": state, "recurrent_layers": (0, 2), "output_gate": True, "qk_norm": True}
    return {
        "target": shape,
        "windows": replace(shape, architecture=architecture_of("olmo3"), **windows),
        "states": replace(shape, architecture=architecture_of("qwen3_5"), **recurrent),
    }


def models_of(context: Context) -> Mapping[str, Path]:
    """Return the directories of targets and their drafts by name, written once; their weights are exact in bfloat16."""
    return context.once("models", lambda: _write_models(context))


def _write_models(context: Context) -> Mapping[str, Path]:
    shapes, drafts = (
        shapes_of(context),
        {"target": "STANDALONE", "windows": "windows' draft", "states": "states' draft"},
    )
    places = {name: context.directory / name for name in (*shapes, *drafts.values(), *HEAD_STEPS)}
    is_written = context.directory / "written"
    if is_written.is_file():  # by another process
        return places
    for name, shape in shapes.items():
        target = random_weights(shape, TorchOps(), "cpu", torch.bfloat16, 1)
        _sharpen(target)
        save_target(target, places[name])
        if name == "target":
            _write_heads(target, places)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in target.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.mul_(1 + AGREEMENT_NOISE * noise)
        save_target(target, places[drafts[name]])
        for written in (name, drafts[name]):
            _write_tokenizer(places[written], shape.vocab_size)
    is_written.touch()
    return places


@torch.no_grad()
def _sharpen(model: Decoder | DraftHead) -> None:
    """Make weights so large that greedy text does not repeat itself, and that places of a block draft unlike tokens."""
    for part, parameter in model.named_parameters():
        if "norm" not in part:
            parameter.mul_(50.0 * model.hidden_size**-0.5)


def _write_heads(target: Decoder, places: Mapping[str, Path]) -> None:
    for name, steps in HEAD_STEPS.items():
        config = draft_shape(target.config, get_algorithm(name), steps)
        assert isinstance(config, HeadConfig), "no language model"
        head = random_head(config, target, seed=3)
        _sharpen(head)
        save_draft(head, places[name])


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer whose tokens are numbers, as text: requests have tokens, and nothing is read."""
    import tokenizers
    from tokenizers import models

    words = {f"{number} ": number for number in range(vocab_size)}
    tokenizers.Tokenizer(models.WordLevel(words, unk_token="0 ")).save(str(directory / "tokenizer.json"))


# -- requests and what they must become --------------------------------------------------------------------------------


def requests_of(context: Context, prefix: str = "") -> list[Request]:
    """Return prompts of several lengths, longer than a chunk too, and outputs that end at different times."""
    draws = np.random.default_rng(3)
    vocab, growth, output = shape_of(context).vocab_size, *((9, 24) if context.on_gpu else (5, 6))
    return [
        Request(f"{prefix}{i}", Prompt.of_tokens(draws.integers(3, vocab, 4 + growth * i)), output + 5 * i)
        for i in range(NUM_REQUESTS)
    ]


def options_of(context: Context, way: Way, **changes: Any) -> SessionOptions:
    models = models_of(context)
    known: dict[str, Any] = {"device": context.device, "dtype": "bfloat16", "chunk_size": 16, "max_running": 3}
    known["ops"] = context.ops_choice
    draft = None if way.draft is None else models[way.draft]
    return SessionOptions(models[way.target], draft, **known | dict(way.options) | changes)


def session_of(context: Context, way: Way, **changes: Any) -> DecodeSession:
    return DecodeSession.open(options_of(context, way, **changes))


@contextlib.contextmanager
def opened(context: Context, way: Way) -> Iterator[DecodeSession | DisaggregatedSession]:
    """Open the session of a way, and close it with its processes at the end. Raises UnavailableHere if the machine has
    fewer GPUs than it needs."""
    if context.on_gpu and torch.cuda.device_count() < way.num_gpus:
        raise UnavailableHere(f"needs {way.num_gpus} GPUs, torch finds {torch.cuda.device_count()}")
    options = options_of(context, way)
    if way.num_gpus > 1:
        options = replace(options, device=context.device.partition(":")[0])  # each rank or worker has one of its own
    if not way.disaggregate:
        with contextlib.closing(DecodeSession.open(options)) as session:
            yield session
        return
    topology = WorkerCounts.parse(way.disaggregate)
    plan = plan_disaggregated(options, topology)
    with (
        Workers(topology.workers(), topology.devices(options.device)) as workers,
        DisaggregatedSession.open(plan, workers) as over_workers,
    ):
        yield over_workers


class ReferenceLogits:
    """A target's logits over whole texts, without a pool:
    in float64 on the CPU, and in bfloat16 on the device to know its errors.

    `kept`: the numbers in which keys and values are kept; None: as they are.
    """

    def __init__(self, context: Context, target: str, kept: torch.dtype | None = None) -> None:
        directory = models_of(context)[target]
        self._kept = kept
        self._exact = load_target(directory, TorchOps(), "cpu", torch.float64)
        self._rounded = load_target(directory, TorchOps(), context.device, DTYPE)
        self._known: dict[tuple[int, ...], tuple[Tensor, float]] = {}

    def check(self, requests: Sequence[Request], outputs: Mapping[str, Output]) -> str:
        """Raise AssertionError unless every output is complete and each of its tokens is the greatest logit's
        or ties with it."""
        tokens = first = 0
        allowed, gaps = 0.0, []
        for request in requests:
            output = outputs[request.request_id]
            assert output.finish in COMPLETED, (
                f"request {request.request_id!r} ended as {output.finish}: {output.message}"
            )
            assert len(output.tokens) == request.max_tokens, f"{len(output.tokens)} tokens, not {request.max_tokens}"
            prompt = request.prompt.materialize()
            assert prompt is not None, "the prompts have tokens"
            logits, error = self._logits((*prompt.tolist(), *output.tokens))
            emitted = torch.tensor(output.tokens)[:, None]
            rows = logits[len(prompt) - 1 : -1]
            gap = rows.max(1).values - rows.gather(1, emitted)[:, 0]
            gaps.append((gap, request.request_id))
            allowed = max(allowed, TIES * error)
            tokens, first = tokens + len(output.tokens), first + int((gap == 0).sum())
        for gap, name in gaps:
            at = int(gap.argmax())
            message = (
                f"request {name!r}: token {at} is {float(gap[at]):.4g} below the greatest logit; a tie is {allowed:.4g}"
            )
            assert float(gap[at]) <= allowed, message
        worst = max(float(gap.max()) for gap, _ in gaps)
        return f"{first} of {tokens} tokens have the greatest logit, the others are {worst:.2g} below it at most (a tie: {allowed:.2g})"

    @torch.no_grad()
    def _logits(self, text: tuple[int, ...]) -> tuple[Tensor, float]:
        """Return the exact logits after each token of `text` [n, V], and the greatest error of those in bfloat16."""
        if text not in self._known:
            exact, rounded = (self._dense_logits(model, text) for model in (self._exact, self._rounded))
            self._known[text] = exact, float((exact - rounded.cpu().double()).abs().max())
        return self._known[text]

    def _dense_logits(self, model: Decoder, text: Sequence[int]) -> Tensor:
        tokens = torch.tensor(text, device=model.device)
        attention = DenseAttention([len(text)], device=model.device, kept=self._kept)
        return model.logits(model.forward(tokens, attention).hidden)


def reference_of(context: Context, way: Way = WAYS["plain"]) -> ReferenceLogits:
    kept = E4M3 if way.kv_in_8_bits else None
    return context.once(f"reference {way.target} {kept}", lambda: ReferenceLogits(context, way.target, kept))


# -- steps ------------------------------------------------------------------------------------------------------------


def greedy(context: Context, name: str) -> StepFinding:
    way = WAYS[name]
    with opened(context, way) as session:
        reference = reference_of(context, way)
        requests, again = requests_of(context), requests_of(context, "again ")
        text = reference.check(requests, session.run(requests))
        reference.check(again, session.run(again))  # from the prefix cache
        stats, missed = session.stats(), _without_graph(session)
    if way.draft is not None and way.draft not in HEAD_STEPS:
        assert stats.correct_drafts > 0, "a draft that nearly equals its target was never accepted"
    accept = f"; {stats.accept_length:.2f} tokens a round" if stats.drafted else ""
    return StepFinding(text + accept + missed)


def _without_graph(session: DecodeSession | DisaggregatedSession) -> str:
    """Return how many rounds ran without a CUDA graph; nothing of a session that has none, or none here."""
    executor = session.executor if isinstance(session, DecodeSession) else None
    if not isinstance(executor, TorchExecutor) or not executor.graphs.are_on:
        return ""
    return f"; {executor.graphs.num_missed} of {executor.counters.rounds} rounds without a CUDA graph"


def same_drafts(context: Context, name: str) -> StepFinding:
    """Check that what a drafter with random weights proposes in float32 on the device, which its target hardly ever
    accepts, is what it proposes in float64 on the CPU."""
    there = _proposed(context, name, device=context.device, dtype="float32")
    exact = _proposed(context, name, device="cpu", dtype="float64", ops=AUTO)
    assert len(there) == len(exact), f"{len(there)} drafts on the device, {len(exact)} in float64"
    equal = sum(one == other for one, other in zip(there, exact, strict=True))
    assert equal >= LEAST_EQUAL * len(exact), f"{equal} of {len(exact)} drafts are those of float64"
    return StepFinding(f"{equal} of {len(exact)} drafts are those of float64")


def _proposed(context: Context, name: str, **changes: Any) -> list[int]:
    """Return every token that the head `name` drafts for one request, round after round."""
    way, proposed = WAYS[f"{name}, all drafts in one pass"], list[int]()
    with contextlib.closing(session_of(context, way, overlap=False, graphs=False, **changes)) as session:
        draft = session.own_executor.draft
        propose = draft.propose

        def watched(*arguments: Any) -> Any:
            tree = propose(*arguments)
            proposed.extend(tree.tokens[0, 1:].tolist())
            return tree

        vars(draft)["propose"] = watched
        session.run(requests_of(context)[-1:])
    return proposed


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let torch raise an error where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches_without_waiting(context: Context, way: str) -> StepFinding:
    """Check that with every shape seen once, no launch waits for the device; torch raises an error where one does."""
    if not can_capture(context.ops_choice, context.device):
        raise UnavailableHere(f"the operations {context.ops_choice} wait for the device")
    session = session_of(context, WAYS[way], overlap=True, prefix_cache=False)
    session.run(requests_of(context))
    launch, launches = session.executor.launch, []

    def watched(step: Any) -> None:
        with no_synchronisation():
            launch(step)
        launches.append(step.step_id)

    vars(session.executor)["launch"] = watched
    session.run(requests_of(context, "again "))
    session.close()
    assert launches, "no launch was watched"
    return StepFinding(f"{len(launches)} launches, none waited")


def close_frees(context: Context) -> StepFinding:
    """Check that what a session holds is freed by `close` and its last reference, without a collection of cycles."""
    way, before = WAYS["STANDALONE chain"], 0
    captures = not context.on_gpu or can_capture(context.ops_choice, context.device)
    with contextlib.closing(session_of(context, way, graphs=captures)) as first:
        first.run(requests_of(context))  # compiling kernels leaves cycles
    del first
    gc.collect()
    gc.disable()
    try:
        for turn in range(2):  # what the first leaves, libraries' workspaces and constants, is not the session's
            session = session_of(context, way, graphs=captures)
            session.run(requests_of(context))
            executor = session.own_executor
            held = [weakref.ref(x) for x in (executor.pool.keys, executor.target, executor)]
            del executor
            session.close()
            del session
            alive = [
                name for name, ref in zip(("KV pool", "target", "executor"), held, strict=True) if ref() is not None
            ]
            assert not alive, f"after close() these live on: {', '.join(alive)}"
            if context.on_gpu and turn == 0:
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
    finally:
        gc.enable()
    if not context.on_gpu:
        return StepFinding("pool, target and executor are gone")
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    assert after <= before, f"a second session left {after - before:,} bytes"
    return StepFinding(
        f"pool, target and executor are gone; {after / 2**20:.1f} MiB stay allocated, a second session adds none"
    )
