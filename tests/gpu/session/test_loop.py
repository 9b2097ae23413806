"""The loop around an engine: what it tells of each request, with submits and aborts in between.
The reference executor is the device."""

import numpy as np
import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import FinishReason, Request
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.session.loop import DecodeLoop, DeliverySink, all_of
from foredraft.properties.executor.reference import (
    HashDraft,
    HashLanguageModel,
    ReferenceExecutor,
    expected_outputs,
    plain_greedy,
)

MODEL = HashLanguageModel(seed=1, vocab_size=24)


def make(**config) -> DecodeLoop:
    defaults = {"num_pages": 400, "context_len": 96, "max_running": 4, "chunk_size": 16, "multi_step_rounds": 4}
    deliveries = DeliverySink()
    engine = Engine(
        EngineConfig(**{**defaults, **config}, track_tokens=True),
        get_algorithm("STANDALONE"),
        fixed_controller(3),
        events=all_of([deliveries]),
    )
    return DecodeLoop(engine, ReferenceExecutor(engine, HashDraft(MODEL)), deliveries)


def ask(number: int, max_tokens: int = 20, **fields) -> Request:
    return Request(f"r{number}", Prompt.of_tokens([(number + j) % 24 for j in range(5 + number)]), max_tokens, **fields)


class Collected:
    """All deltas of a run, joined by request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.ends = {}

    def add(self, deltas) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "a delta after the last one"
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens.tolist())
            logprobs = delta.outputs.get("logprobs", [])
            assert len(logprobs) in (0, len(delta.tokens))
            self.logprobs.setdefault(delta.request_id, []).extend(map(float, logprobs))
            if delta.finished is not None:
                self.ends[delta.request_id] = delta.finished

    def run(self, loop: DecodeLoop, turns: int = 1000) -> None:
        for _ in range(turns):
            if loop.is_idle:
                return
            self.add(loop.turn())


# Little memory makes requests give their rows back and come again; what they had delivered must not come twice.
@pytest.mark.parametrize(
    "config", [{}, {"overlap": False, "multi_step_rounds": 1}, {"num_pages": 62, "prefix_cache": False}]
)
def test_the_deltas_of_a_request_are_its_output(config):
    loop, collected = make(**config), Collected()
    requests = [ask(n, outputs=("logprobs",) if n % 2 else ()) for n in range(9)]
    for request in requests:
        assert loop.submit(request) == ""
    collected.run(loop)
    assert loop.is_idle and loop.driver.engine.is_idle
    for request in requests:
        name, end = request.request_id, collected.ends[request.request_id]
        wanted = plain_greedy(MODEL, request, 20)
        assert collected.tokens[name] == wanted.tolist() == end.tokens.tolist()
        if request.outputs:
            expected = expected_outputs(MODEL, request, wanted)["logprobs"]
            assert np.allclose(collected.logprobs[name], expected)
        else:
            assert collected.logprobs[name] == []


def test_little_memory_does_retract():
    """Else the case above would not show what it is there for."""
    loop, seen = make(num_pages=62, prefix_cache=False), []
    engine = loop.driver.engine
    engine._events = all_of([engine._events, lambda event: seen.extend(getattr(event, "retracted", ()))])
    for n in range(9):
        loop.submit(ask(n))
    Collected().run(loop)
    assert seen


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_aborted_requests_end_with_what_they_had(turns, overlap):
    loop, collected = make(overlap=overlap), Collected()
    requests = [ask(n, max_tokens=40) for n in range(6)]
    for request in requests:
        loop.submit(request)
    collected.run(loop, turns)
    loop.abort_all()
    loop.abort_all()  # requests that are aborted already stay so
    collected.run(loop)
    assert loop.is_idle
    assert set(collected.ends) == {request.request_id for request in requests}
    for request in requests:
        end = collected.ends[request.request_id]
        assert end.reason is FinishReason.ABORT
        wanted = plain_greedy(MODEL, request, 40)[: end.num_output]
        assert collected.tokens[request.request_id] == wanted.tolist() == end.tokens.tolist()
    assert turns < 2 or any(end.num_output for end in collected.ends.values())


def test_the_loop_says_where_its_time_went():
    ticks = iter(range(0, 10**9, 10))
    loop = make()
    driver = loop.driver
    driver.clock_ns = lambda: next(ticks)
    waiting_ns = 100_000
    collect = driver.executor.collect
    driver.executor.collect = lambda: [next(ticks) for _ in range(waiting_ns // 10)] and collect()
    loop.submit(ask(1))
    Collected().run(loop)
    assert driver.num_steps >= 2
    assert 20 * driver.num_steps <= driver.host_ns < waiting_ns, "waiting for results is not the host's time"


def test_the_first_token_of_a_request_that_left_is_not_told():
    loop, collected = make(), Collected()
    for name, length in (("before", 16), ("left", 8), ("stays", 8)):
        loop.submit(Request(name, Prompt.of_tokens(range(length)), 12))
    collected.run(loop, 1)  # the second step computes the prompts of both others, and is in flight
    loop.abort("left")
    collected.run(loop)
    assert collected.tokens["left"] == [] and collected.ends["left"].num_output == 0
    assert len(collected.tokens["stays"]) == len(collected.tokens["before"]) == 12
