"""Ranks as processes, over gloo: their outputs are those of one process, with every draft; and whatever happens to one
of them ends all, with its name."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from family_shapes import SHAPES
from foredraft.core.contract.request import Grammar, Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.parallel.ranks import RankFailed, Ranks, open_ranks, orders_of
from foredraft.gpu.session.loop import Deliveries, all_of
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text import Tokenizer
from kinds_of_drafts import DRAFTS
from small_checkpoint import write_head, write_standalone, write_target

pytestmark = pytest.mark.xdist_group("ranks")  # one set of processes serves most of these tests

LONGEST = 120
TEXT = "def add(a, b):\n    return a + b\nfor i in range(10): print(i)\n" * 3
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target) -> dict[str, dict]:
    """Options of every kind of draft, its checkpoint among them."""
    made = {"small model": {"draft": write_standalone(tmp_path_factory.mktemp("draft")), "steps": 3}}
    for name, options in DRAFTS.items():
        made[name] = dict(options)
        if name.startswith("itself"):
            made[name]["draft"] = target
        elif name.startswith("EAGLE"):
            made[name]["draft"] = write_head(tmp_path_factory.mktemp(name), name)
    heads = write_head(tmp_path_factory.mktemp("heads"), "MULTI_LAYER_EAGLE")
    made["heads"] = {"draft": heads, "algorithm": "MULTI_LAYER_EAGLE", "steps": 2}
    made["adaptive"] = {**made["itself, as a chain"], "adaptive": "with-zero"}
    return {"none": {"algorithm": "NONE"}, **made}


@pytest.fixture(scope="module")
def pool():
    """Keep the processes for the next test, until one has died."""
    started: dict[int, Ranks] = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def started(pool):
    def ranks_of(size: int) -> Ranks:
        if size not in pool or len(pool[size].living()) < size:
            pool[size] = Ranks(("cpu",) * size)
        return pool[size]

    return ranks_of


def options_for(model, size=1, **options) -> SessionOptions:
    usual = {"dtype": "float64", "device": "cpu", "debug": True, "chunk_size": 16, "max_running": 4, "threads": 1}
    return SessionOptions(model, tensor_parallel=size, **{**usual, **options})


def requests_of(model) -> list[Request]:
    """Greedy and sampled requests of several lengths, more than run together; one with penalties, one that asks for
    outputs."""
    words = Tokenizer.load(model).encode(TEXT).tolist()
    assert len(words) > 60

    def request(name, begin, length, max_tokens, **fields):
        return Request(name, Prompt.of_tokens(words[begin : begin + length]), max_tokens, **fields)

    return [
        request("short", 0, 1, 16),
        request("long", 3, 50, 16),
        request("sampled", 5, 9, 16, sampling=SAMPLED),
        request("again", 3, 50, 12),
        request("penalties", 1, 20, 12, sampling=replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.2)),
        request("outputs", 8, 12, 10, outputs=("logprobs", "hidden_states")),
    ]


@contextmanager
def opened(ranks: Ranks, options: SessionOptions):
    """A session on ranks that serve another one afterwards."""
    plan, tokenizer, deliveries = plan_session(options, LONGEST), Tokenizer.load(options.model), Deliveries()
    make_engine = lambda spec: spec.make_engine(all_of([deliveries]), tokenizer)  # noqa: E731
    engine, executor, plan = open_ranks(plan, make_engine, ranks)
    yield DecodeSession(engine, executor, deliveries, tokenizer, plan=plan)


@pytest.fixture(scope="module")
def alone(target, drafts):
    """Outputs and statistics of one process, for each kind of draft."""
    known = {}

    def outputs_of(name):
        if name not in known:
            options = options_for(target, **drafts[name], block_rounds=1)
            session = DecodeSession.open(options, plan=plan_session(options, LONGEST))
            known[name] = session.run(requests_of(target)), session.stats()
        return known[name]

    return outputs_of


KINDS = ("none", "small model", *DRAFTS, "heads", "adaptive")
FAST_ON_TWO, FAST_ON_FOUR = KINDS, ("none", "EAGLE3")
CELLS = [
    pytest.param(size, name, marks=() if name in fast else pytest.mark.slow, id=f"{size} ranks, {name}")
    for size, fast in ((2, FAST_ON_TWO), (4, FAST_ON_FOUR))
    for name in KINDS
]


@pytest.mark.parametrize(("size", "name"), CELLS)
def test_ranks_give_the_outputs_of_one_process(size, name, target, drafts, alone, started):
    """Tokens, texts, log-probabilities: with as many rounds and accepted drafts."""
    expected, of_one = alone(name)
    with opened(started(size), options_for(target, size, **drafts[name])) as session:
        found, stats = session.run(requests_of(target)), session.stats()
    assert found.keys() == expected.keys()
    for request_id, output in found.items():
        other = expected[request_id]
        assert (output.tokens, output.text, output.finish) == (other.tokens, other.text, other.finish), request_id
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert (stats.rounds, stats.correct_drafts) == (of_one.rounds, of_one.correct_drafts)
    assert name == "none" or stats.drafted
