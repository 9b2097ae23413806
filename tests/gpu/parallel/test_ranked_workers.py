"""Workers of several ranks each, over gloo: rank i of one hands its part of the KV to rank i of the other, and the
outputs are those of one process."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.handoff import PageSeal
from foredraft.core.prompt import Prompt
from foredraft.gpu.disaggregation.session import SECOND_NS, TIMING, DisaggregatedSession, plan_disaggregated
from foredraft.gpu.disaggregation.topology import WorkerCounts
from foredraft.gpu.disaggregation.workers import Workers
from foredraft.gpu.parallel.link import LinkNews, PageParcel
from foredraft.gpu.parallel.rank import Rank
from foredraft.gpu.parallel.ranked_pages import RankedPages
from foredraft.gpu.session.plan import SessionOptions, plan_session
from foredraft.gpu.session.session import DecodeSession
from small_checkpoint import write_head, write_standalone, write_target

pytestmark = pytest.mark.xdist_group("ranked workers")  # one set of processes serves most of these tests

LONGEST = 120
ONE_TO_ONE = WorkerCounts(1, 1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_target(folder / "target")
    heads = {form: write_head(tmp_path_factory.mktemp(form), form) for form in ("EAGLE3", "MULTI_LAYER_EAGLE")}
    return {"target": target, "STANDALONE": write_standalone(tmp_path_factory.mktemp("draft")), **heads}


@pytest.fixture(scope="module")
def pool():
    """Start the processes once for most tests, and anew after one of them has died."""
    started: list[Workers] = []
    yield started
    for workers in started:
        workers.close()


@pytest.fixture
def workers(pool):
    if not pool or len(pool[-1].living()) < ONE_TO_ONE.num_workers:
        pool.append(Workers(ONE_TO_ONE.workers(), ONE_TO_ONE.devices("cpu", 2)))
    return pool[-1]


def options_for(files, ranks, draft=None, **options) -> SessionOptions:
    usual = {"dtype": "float64", "device": "cpu", "debug": True, "chunk_size": 16, "max_running": 4, "threads": 1}
    usual |= {"multi_step_rounds": 1, "tensor_parallel": ranks}
    return SessionOptions(files["target"], files.get(draft), **{**usual, **options})


def requests() -> list[Request]:
    def request(name, begin, length, max_tokens, **fields):
        return Request(name, Prompt.of_tokens(list(range(begin, begin + length))), max_tokens, **fields)

    return [
        request("short", 5, 1, 16),
        request("long", 8, 50, 16),
        request("sampled", 20, 9, 16, sampling=SAMPLED),
        request("again", 8, 50, 12),
        request("outputs", 40, 12, 10, outputs=("logprobs",)),
        request("one token", 60, 20, 1),
    ]


def open_session(workers, options, topology=ONE_TO_ONE) -> DisaggregatedSession:
    return DisaggregatedSession.open(plan_disaggregated(options, topology, LONGEST), workers)


def of_one_process(options) -> dict:
    return DecodeSession.open(options, plan=plan_session(options, LONGEST)).run(requests())


def check_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, output in found.items():
        other = expected[name]
        assert (output.tokens, output.text, output.finish) == (other.tokens, other.text, other.finish), output
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-9)


CELLS = {
    "plain, overlap": (None, {"algorithm": "NONE", "overlap": True}),
    "chain": ("EAGLE3", {"steps": 3}),
    "tree in pages": ("EAGLE3", {"topk": 3, "steps": 2, "num_draft_tokens": 6, "page_size": 4}),
    "small model, overlap": ("STANDALONE", {"steps": 2, "overlap": True}),
    "heads": ("MULTI_LAYER_EAGLE", {"steps": 2}),
    "look-up": (None, {"algorithm": "NGRAM", "steps": 3}),
}


@pytest.mark.fast("chain", ci="plain, overlap")
@pytest.mark.parametrize("name", CELLS)
def test_ranks_hand_their_parts_to_ranks_and_give_the_outputs_of_one_process(name, workers, files):
    draft, options = CELLS[name]
    expected = of_one_process(options_for(files, 1, draft, **options))
    with open_session(workers, options_for(files, 2, draft, **options)) as session:
        check_equal(session.run(requests()), expected)
        reports = session.drain()
    for report in reports.values():
        assert report["free_slots"] == report["total_slots"] and not report["held_rows"] and not report["malformed"]
        counts = report["transfers"]
        assert counts["completed"] == counts["started"] == len(requests()) - 1  # a request of one token ends there
        assert not counts["retries"]
    assert reports["prefill0"]["prefilled"] and not reports["decode0"]["prefilled"]


def test_ranks_of_workers_are_ready_before_the_first_request(workers, files):
    with open_session(workers, options_for(files, 2, "EAGLE3", steps=2, graphs=True, max_running=1)) as session:
        lines: list[str] = []
        ready = session.make_ready(lines.append)
        assert ready.num_graphs == 18 and not ready.left_out, "one batch size"
        assert len([line for line in lines if line.startswith("decode0: capturing: ")]) == 18, "each line once"
        check_equal(session.run(requests()), of_one_process(options_for(files, 1, "EAGLE3", steps=2)))
        later: list[str] = []
        assert session.make_ready(later.append) == ready and not [line for line in later if "capturing" in line]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def rank_of(workers: Workers, worker: str, number: int) -> int:
    """The process of one rank of a worker."""
    pid = workers[worker].pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    ranks = [c for c in children if b"session.rank" in Path(f"/proc/{c}/cmdline").read_bytes()]
    assert len(ranks) == 2
    return sorted(ranks)[number]


@pytest.mark.ci
@pytest.mark.parametrize("worker", ["decode0", pytest.param("prefill0", marks=pytest.mark.slow)])
def test_a_rank_that_dies_ends_its_worker_and_the_session_with_its_name(worker, workers, files):
    session = open_session(workers, options_for(files, 2, algorithm="NONE"))
    deltas = session.stream(requests())
    next(deltas)
    os.kill(rank_of(workers, worker, 1), signal.SIGKILL)
    messages = {delta.message for delta in deltas if delta.finish == "error"}
    assert messages and all(f"worker {worker} ended with exit code 1" in message for message in messages), messages
    assert all("rank 1 was killed by SIGKILL" in message for message in messages), messages


@pytest.mark.slow
def test_requests_of_a_worker_whose_rank_dies_go_on_with_another(files):
    options, topology = options_for(files, 2, "EAGLE3", steps=2), WorkerCounts(1, 2)
    expected = of_one_process(options_for(files, 1, "EAGLE3", steps=2))
    with Workers(topology.workers(), topology.devices("cpu", 2)) as workers:
        session = open_session(workers, options, topology)
        found: dict[str, list[int]] = {}
        for i, delta in enumerate(session.stream(requests())):
            if not i:
                os.kill(rank_of(workers, "decode0", 1), signal.SIGKILL)
            assert delta.finish != "error", delta.message
            found.setdefault(delta.request_id, []).extend(delta.tokens)
        assert [worker.name for worker in workers.living()] == ["prefill0", "decode1"]
        assert {name: tuple(tokens) for name, tokens in found.items()} == {n: o.tokens for n, o in expected.items()}


@pytest.mark.slow
def test_pages_find_their_messages_though_some_are_lost_doubled_or_cut(workers, files):
    faults = {"prefill0": {"duplicate": [2, 3, 9], "drop": [5], "truncate_messages": [7]}}
    plan = plan_disaggregated(options_for(files, 2, "EAGLE3", steps=2), ONE_TO_ONE, LONGEST)
    timing = replace(TIMING, lease_ns=3 * SECOND_NS, hold_ns=7 * SECOND_NS, fence_ns=SECOND_NS)
    with DisaggregatedSession.open(plan, workers, faults=faults, timing=timing) as session:
        check_equal(session.run(requests()), of_one_process(options_for(files, 1, "EAGLE3", steps=2)))
        reports = session.drain()
    assert sum(report["transfers"]["retries"] for report in reports.values())


class RanksThatAnswer:
    """Ranks whose parts of a page have these seals."""

    def __init__(self, *parts: tuple[int, int, int, int]) -> None:
        self.all, self.parts, self.told = dict.fromkeys(f"rank{i}" for i in range(len(parts))), parts, []

    def tell(self, message) -> None:
        self.told.append(message)

    def gather(self, wanted, must_progress=False):
        return {name: {"seals": [part]} for name, part in zip(self.all, self.parts, strict=True)}


def pages_of(*parts) -> RankedPages:
    page_format = {"page_size": 2, "target_bytes": 8, "draft_bytes": 4, "hidden_size": 3, "layout": "float32 1 x 1 x 1"}
    executor = type("Executor", (), {"page_format": page_format, "ranks": RanksThatAnswer(*parts)})()
    return RankedPages(executor, session=7)


def test_the_seal_of_a_page_is_of_all_its_parts():
    pages = pages_of((8, 5, 4, 9), (8, 6, 4, 9))
    assert (pages.format.target_bytes, pages.format.draft_bytes, pages.row_bytes) == (16, 8, 12)
    assert pages.format.layout == "2 ranks of float32 1 x 1 x 1"
    slots = np.array([[4, 5]], np.int32)
    (seal,), content, number = pages.send("decode0", slots)
    assert content is None and number == 1 and pages.send("decode0", slots)[2] == 2 and pages.send("d", slots)[2] == 1
    assert (seal.target_bytes, seal.draft_bytes) == (16, 8)
    others = [
        pages_of((8, 6, 4, 9), (8, 5, 4, 9)),
        pages_of((8, 5, 4, 8), (8, 6, 4, 9)),
        pages_of((8, 5, 4, 9), (7, 6, 4, 9)),
    ]
    for damaged in others:
        assert damaged.arrived(PageParcel(7, (), None, 1), "prefill0", 1) != [seal]
    assert pages.arrived(PageParcel(7, (), None, 1), "prefill0", 1) == [seal]


class PagesThatCount:
    def arrived(self, parcel, peer, num_pages):
        return [PageSeal(0 if parcel.pages is None else len(parcel.pages), 0)] * num_pages


@pytest.mark.ci
def test_a_rank_takes_the_parcel_with_the_number_and_nothing_over_a_broken_link():
    rank, said = Rank(None, lambda rank: None), []
    rank.answer = lambda word, **values: said.append(values["seals"][0][0])
    rank.pages, rank._parcels = PagesThatCount(), {"p": queue.SimpleQueue()}
    for session, number in ((6, 2), (7, 1), (7, 2), (7, 3)):
        content = torch.zeros(10 * session + number, dtype=torch.uint8)
        rank._hear(LinkNews("p", PageParcel(session, (), content, number)))
    rank._hear(LinkNews("p", None))
    for number in (2, 2, 3, 4, 5):
        rank._take_pages(7, "p", number, 1)
    assert said == [72, 0, 73, 0, 0]
