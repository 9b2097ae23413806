"""Ranks as processes, over gloo: their outputs are those of one process, with every draft; and whatever happens to one
of them ends all, with its name."""

from __future__ import annotations

import os
import signal
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from family_shapes import SHAPES
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.measure.plan import BenchOptions, plan_bench
from foredraft.gpu.measure.run import Bench
from foredraft.gpu.parallel import processes
from foredraft.gpu.parallel.ranks import RankFailed, Ranks
from foredraft.gpu.session.loop import DeliverySink, all_of
from foredraft.gpu.session.orders import SessionRanks, open_ranks, orders_of
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.session.text import Tokenizer
from foredraft.gpu.tiny.scoring import score_prompt
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
    made["adaptive"] = {"draft": target, "adaptive": "with-zero"}
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
            pool[size] = SessionRanks(("cpu",) * size)
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
    plan, tokenizer, deliveries = plan_session(options, LONGEST), Tokenizer.load(options.model), DeliverySink()
    make_engine = lambda spec: spec.make_engine(all_of([deliveries]), tokenizer)  # noqa: E731
    engine, executor, plan = open_ranks(plan, make_engine, ranks)
    yield DecodeSession(engine, executor, deliveries, tokenizer, plan=plan)


@pytest.fixture(scope="module")
def alone(target, drafts):
    """Outputs and statistics of one process, for each kind of draft."""
    known = {}

    def outputs_of(name):
        if name not in known:
            options = options_for(target, **drafts[name], multi_step_rounds=1)
            session = DecodeSession.open(options, plan=plan_session(options, LONGEST))
            known[name] = session.run(requests_of(target)), session.stats()
        return known[name]

    return outputs_of


def test_ranks_judge_a_prompt_as_one_process_does(started, target):
    """Between the steps of requests, one of which may have been launched."""
    prompt = requests_of(target)[1].prompt.tokens
    alone = DecodeSession.open(options_for(target))
    expected = score_prompt(alone.executor.target, prompt, 5)
    with opened(started(2), options_for(target, 2)) as session:
        for request in requests_of(target)[:2]:
            assert session.loop.submit(request) == ""
        session.loop.turn()
        found = session.executor.score(prompt, 5)
        while not session.loop.is_idle:
            session.loop.turn()
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-9) and len(found.logprobs) == len(prompt) - 1
    assert [[token for token, _ in pairs] for pairs in found.tops] == [[t for t, _ in pairs] for pairs in expected.tops]


KINDS = ("none", "small model", *DRAFTS, "heads", "adaptive")
FAST_ON_TWO, FAST_ON_FOUR = KINDS, ("none", "EAGLE3")
CELLS = [
    pytest.param(size, name, marks=() if name in fast else pytest.mark.slow, id=f"{size} ranks, {name}")
    for size, fast in ((2, FAST_ON_TWO), (4, FAST_ON_FOUR))
    for name in KINDS
]


@pytest.mark.fast("2 ranks, none", "2 ranks, EAGLE3", "2 ranks, look-up", ci="*")
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


@pytest.mark.fast("EAGLE-qwen3_5", ci="*")
@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=pytest.mark.slow), "qwen3_5"])
@pytest.mark.parametrize("name", ["none", "small model", "EAGLE", "look-up"])
def test_ranks_keep_the_states_of_their_own_heads(family, name, drafts, started, tmp_path):
    hybrid = write_target(tmp_path, SHAPES[family])
    options = options_for(hybrid, **drafts[name], multi_step_rounds=1)
    one = DecodeSession.open(options, plan=plan_session(options, LONGEST))
    expected = {key: output.tokens for key, output in one.run(requests_of(hybrid)).items()}
    with opened(started(2), options_for(hybrid, 2, **drafts[name])) as session:
        assert {key: output.tokens for key, output in session.run(requests_of(hybrid)).items()} == expected
        assert session.stats().rounds == one.stats().rounds


# -- ranks that fail ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two():
    ranks = SessionRanks(("cpu", "cpu"))
    yield ranks
    ranks.close(at_once=True)


def check_gone(ranks: Ranks) -> None:
    assert not ranks.living()
    for worker in ranks.all.values():
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def fails_in_a_step(ranks: Ranks, target: Path, harm) -> str:
    """Decode, do harm after the first tokens, and return the error's message."""
    with opened(ranks, options_for(target, 2, algorithm="NONE")) as session:
        deltas = session.stream(requests_of(target))
        next(deltas)
        harm(session)
        with pytest.raises(RankFailed) as caught:
            for _ in deltas:
                pass
    check_gone(ranks)
    return str(caught.value)


def signals_rank_1(number: int):
    return lambda session: os.kill(session.executor.ranks.all["rank1"].pid, number)


@pytest.mark.ci
def test_a_rank_that_dies_ends_the_session_with_its_name(two, target):
    message = fails_in_a_step(two, target, signals_rank_1(signal.SIGKILL))
    assert message == "rank 1 was killed by SIGKILL; the session is over, and all 2 ranks have ended"


@pytest.mark.ci
def test_a_rank_that_dies_is_named_when_the_other_ranks_error_is_heard_with_its_death(two, target):
    hear = two.hear

    def harm(session):
        def hear_two(wait_s: float) -> list:
            two.hear, heard = hear, []
            while len(heard) < 2:
                heard += hear(wait_s)
            return sorted(heard, key=lambda news: news[1] is None)  # the death last

        two.hear = hear_two
        signals_rank_1(signal.SIGKILL)(session)

    assert fails_in_a_step(two, target, harm).startswith("rank 1 was killed by SIGKILL; ")


@pytest.mark.slow
def test_a_rank_that_stops_answering_ends_the_session_with_its_name(two, target):
    two.silence_s = 2.0
    assert fails_in_a_step(two, target, signals_rank_1(signal.SIGSTOP)).startswith("rank 1 did not answer for 2 s")


@pytest.mark.slow
def test_a_rank_that_does_not_take_part_ends_the_session_with_its_name(two, target):
    """It answers, but begins no exchange: it was not told the step, as if its main thread hung."""

    def harm(session):
        rank0 = two.all["rank0"]
        two.tell, two.silence_s = rank0.say, 3.0

    message = fails_in_a_step(two, target, harm)
    assert message.startswith("rank 1 did not go on for 3 s in a step, after ")


@pytest.mark.slow
def test_a_rank_whose_step_raises_ends_the_session_with_its_name(two, target):
    """The other rank waits for it, and is not the one that is named."""

    def harm(session):
        two.all["rank1"].say({"do": "collect", "executor": 0})  # where nothing was launched

    assert fails_in_a_step(two, target, harm).startswith("rank 1: IndexError")


@pytest.mark.slow
def test_a_rank_that_computes_something_else_ends_the_session_with_its_name(two, target):
    from foredraft.core.contract.step import Step
    from foredraft.gpu.parallel.wire import step_to_json

    def with_another_seed(step: Step) -> Step:
        joins = [
            replace(
                join, request=replace(join.request, sampling=replace(SAMPLED, temperature=5.0, top_p=1.0, seed=number))
            )
            for number, join in enumerate(step.joins)
        ]
        return replace(step, joins=tuple(joins))

    def harm(session):
        def launch(step: Step) -> None:
            two.all["rank0"].say({"do": "launch", "executor": 0, "step": step_to_json(step)})
            two.all["rank1"].say({"do": "launch", "executor": 0, "step": step_to_json(with_another_seed(step))})

        session.executor.launch = launch

    assert fails_in_a_step(two, target, harm).startswith("rank 1 computed another result of step ")


@pytest.mark.ci
@pytest.mark.parametrize(
    "what", ["dtype", pytest.param("options", marks=pytest.mark.slow), pytest.param("model", marks=pytest.mark.slow)]
)
def test_a_rank_that_has_something_else_is_named(what, two, target, tmp_path):
    plan = plan_session(options_for(target, 2, algorithm="NONE"), LONGEST)
    orders = orders_of(plan, two.devices)
    if what == "dtype":
        orders[1]["dtype"] = "float32"
    elif what == "options":
        orders[1]["options"]["seed"] = 7
    else:
        orders[1]["options"]["model"] = str(write_target(tmp_path, seed=9))
    with pytest.raises(RankFailed, match=f"rank 1 differs in the {what}: ") as caught:
        two.open(orders)
    assert "rank 0 has " in str(caught.value)
    check_gone(two)


@pytest.mark.slow
def test_a_rank_of_another_version_is_named(target, tmp_path, monkeypatch):
    found = tmp_path / "foredraft-99.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: foredraft\nVersion: 99.0\n", encoding="utf-8")
    usual, environments = processes._environment, []

    def environment():
        environments.append(usual())
        if len(environments) == 2:
            environments[-1]["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environments[-1].get('PYTHONPATH', '')}"
        return environments[-1]

    monkeypatch.setattr(processes, "_environment", environment)
    with SessionRanks(("cpu", "cpu")) as ranks:
        with pytest.raises(RankFailed, match=r"rank 1 differs in the version of foredraft: 99\.0; rank 0 has "):
            ranks.open(orders_of(plan_session(options_for(target, 2), LONGEST), ranks.devices))
        check_gone(ranks)


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_is_the_error_of_the_rank_that_reads_it(two, target, tmp_path):
    plan = plan_session(options_for(target, 2, algorithm="NONE"), LONGEST)
    orders = orders_of(plan, two.devices)
    orders[1]["options"]["model"] = str(tmp_path / "none")
    with pytest.raises(RankFailed, match=r"rank 1: .*none"):
        two.open(orders)
    check_gone(two)


@pytest.mark.slow
def test_a_benchmark_of_ranks_decodes_what_one_process_decodes(target):
    options = BenchOptions(target, batch_sizes="2", context_lengths="12", output_tokens=12, steps="2", repeat=1)
    options = replace(options, algorithm="NGRAM", device="cpu", dtype="float64", prompts=2)
    outputs = []
    for ranks in (1, 2):
        with closing(Bench(plan_bench(replace(options, tensor_parallel=ranks)))) as bench:
            arms = bench.arms(bench.plan.cells[0])
            outputs.append([arm.run().outputs for arm in arms])
            (results,) = bench.cells()
        assert [result.equal_outputs for result in results] == [2, 2]
        assert all(result.tokens_per_s > 0 and result.shares["verify"] > 0 for result in results)
    for one, other in zip(*outputs, strict=True):
        assert [a[: len(b)] for a, b in zip(one, other, strict=True)] == [
            b[: len(a)] for a, b in zip(one, other, strict=True)
        ]
