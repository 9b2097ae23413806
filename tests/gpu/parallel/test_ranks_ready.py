"""Ranks that capture ahead, over gloo: all of them the same rounds, in the same order, until one reaches a bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.graphs import CaptureBounds
from foredraft.gpu.parallel.ranks import RankFailed, Ranks
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.ready import KINDS, make_ready
from foredraft.gpu.session.session import DecodeSession
from small_checkpoint import write_head, write_target

pytestmark = pytest.mark.xdist_group("ranks")

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3, presence_penalty=0.5)
ROOM = CaptureBounds(60.0, 1 << 40)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def head(tmp_path_factory, target) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), "EAGLE3")


def open_session(model: Path, size: int, **options) -> DecodeSession:
    usual = {"dtype": "float64", "device": "cpu", "chunk_size": 16, "max_running": 2, "threads": 1, "graphs": True}
    chosen = SessionOptions(model, tensor_parallel=size, **{**usual, "multi_step_rounds": 1, **options})
    return DecodeSession.open(chosen, plan=plan_session(chosen, 60))


def requests() -> list[Request]:
    return [
        Request("greedy", Prompt.of_tokens([5, 6, 7]), 12),
        Request("sampled", Prompt.of_tokens([9] * 20), 12, sampling=SAMPLED, outputs=("logprobs",)),
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [{"steps": 3}, pytest.param({"adaptive": "with-zero", "policy": "goodput"}, marks=pytest.mark.slow)],
    ids=["chain", "goodput"],
)
def test_ranks_are_ready_as_one_process_is_and_capture_nothing_more(options, target, head):
    found = []
    for size in (1, 2):
        session, lines = open_session(target, size, draft=head, **options), []
        ready = make_ready(session, lines.append)
        tokens = {name: output.tokens for name, output in session.run(requests()).items()}
        found.append((ready, lines, tokens))
        if size == 2:
            later: list[str] = []
            assert session.executor.capture_all(later.append, ROOM) == (ready.num_graphs, []) and not later
        session.close()
    ready, lines, _ = found[0]
    assert ready.num_graphs and not ready.left_out and len(lines) == len(KINDS) + ready.num_graphs
    assert found[1] == found[0], "each line is told once"


@pytest.mark.ci
@pytest.mark.parametrize("number", [0, 1])
def test_a_bound_that_one_rank_reaches_ends_the_captures_of_all(number, target):
    session = open_session(target, 2, algorithm="NONE")
    ranks, lines = session.executor.ranks, []
    tell = ranks.tell

    def with_no_room_on_one(message):
        for i, worker in enumerate(ranks.all.values()):
            worker.say(message | ({"num_bytes": 0} if i == number and message["do"] == "capture_all" else {}))

    ranks.tell = with_no_room_on_one
    num_graphs, left_out = session.executor.capture_all(lines.append, ROOM)
    ranks.tell = tell
    assert (num_graphs, lines) == (0, []) and "batch 2, 0 steps, sampled" in left_out
    assert len(session.run(requests())["greedy"].tokens) == 12, "rounds run without a graph on both"
    session.close()


@pytest.mark.ci
def test_a_rank_that_has_captured_other_rounds_ends_the_session_with_its_name(target):
    session = open_session(target, 2, algorithm="NONE")
    gather = Ranks.gather

    def one_less(ranks, wanted, **options):
        answers = gather(ranks, wanted, **options)
        answers["rank1"]["captured"][0] -= 1
        return answers

    session.executor.ranks.gather = one_less.__get__(session.executor.ranks)
    with pytest.raises(RankFailed, match="rank 1 has captured other rounds than rank 0"):
        session.executor.capture_all(lambda line: None, ROOM)
    assert not session.executor.ranks.living()
