"""Captured rounds and eager launching, on a CPU: everything but the capture itself is the code that a GPU runs."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cells import random_cell
from foredraft.cli.app import app
from foredraft.core.adaptive import build_controller
from foredraft.core.adaptive.graphs import MissingGraph
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.contract.step import RoundShape
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.batch.uploads import Uploads
from foredraft.gpu.draft import branches
from foredraft.gpu.executor import executor as gpu_executor
from foredraft.gpu.executor import prompt_runner, running
from foredraft.gpu.executor import round as gpu_round
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.capture import capture_halves
from foredraft.gpu.executor.graphs import CaptureBounds, CapturedRound, RoundGraphs, RoundKind
from foredraft.gpu.executor.outputs import USER_OUTPUTS
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.executor.shaping import Changed, MaskPlace
from foredraft.gpu.session import ready as ready_module
from foredraft.gpu.session.plan import SessionOptions
from foredraft.gpu.session.ready import KINDS, make_ready
from foredraft.gpu.session.session import DecodeSession
from foredraft.gpu.types.ops import VerifyBatch
from foredraft.gpu.types.shards import Shard
from hostile_driver import Dice
from matrix_cells import OPS, noisy_copy, run_real_cell, small_head, small_model
from serving import Way, chain
from serving import serve as serve_way


@pytest.mark.fast("False-STANDALONE", "False-NGRAM", "True-MULTI_LAYER_EAGLE")
@pytest.mark.parametrize("algorithm", ["NONE", "STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM"])
@pytest.mark.parametrize("eager", [False, True])
def test_padded_captured_rounds_and_eager_launching_change_no_token(algorithm, eager, monkeypatch):
    used = []

    find = RoundGraphs.find

    def counting(*arguments):
        found = find(*arguments)
        used.append(found is not None)
        return found

    monkeypatch.setattr(RoundGraphs, "find", counting)
    dice = Dice(31)
    fixed = {"algorithm": algorithm, "faults": "none", "drafts": "model", "outputs": False, "topk": 1}
    rounds = 0
    for number in range(2):
        if algorithm != "NONE":
            fixed |= {"topk": 1 + 3 * number, "steps": 3}
        rounds += run_real_cell(random_cell(dice, number, fixed), graph_sizes=(1, 3, 8), eager=eager).rounds
    assert rounds > 10
    assert any(used)


def serve(draft_name: str, *, graph_sizes, table, requests, seed=3, whole=False, debug=True):
    controller = build_controller("ema", table)
    config = EngineConfig(num_pages=400, context_len=96, max_running=4, track_tokens=True, overlap=False)
    engine = Engine(config, get_algorithm(draft_name), controller)
    draft = noisy_copy(0, 0.05) if draft_name == "STANDALONE" else small_head(0, draft_name)
    options = ExecutorOptions(graph_sizes=graph_sizes, seed=seed, debug=debug)
    executor = build_executor(engine, small_model(0), draft, OPS, options)
    driver = Driver(engine, executor)
    for request in requests:
        driver.submit(request)
    ends = driver.run_until_idle()
    return ends if whole else {name: end.tokens.tolist() for name, end in ends.items()}, executor


TABLE = {
    "1": {"candidate_steps": [1, 3], "update_interval": 2, "warmup_batches": 0},
    "3": {"candidate_steps": [0, 1], "update_interval": 2, "warmup_batches": 0},
}


def prompts(n: int, shown: dict | None = None, **sampling) -> list[Request]:
    """`shown`: by number, the outputs that a request asks to see."""
    dice = np.random.Generator(np.random.PCG64(5))
    sampling, shown = SamplingParams(**sampling), shown or {}
    return [
        Request(f"r{i}", Prompt.of_tokens(dice.integers(0, 24, 6 + i)), 20, sampling=sampling, outputs=shown.get(i, ()))
        for i in range(n)
    ]


def test_a_graph_is_captured_once_when_the_first_round_needs_it():
    _, executor = serve("STANDALONE", graph_sizes=(1, 2, 4), table=TABLE, requests=prompts(3))
    reports = executor.graphs.reports
    captured = [(report.steps, report.batch_size) for report in reports]
    assert set(captured) <= {(1, 1), (3, 1), (1, 2), (3, 2), (0, 4), (1, 4)}, "routing reaches no other"
    assert {1, 4} <= {size for _, size in captured} and len(captured) == len(set(captured))
    assert all(report.seconds > 0 and (report.kind, report.with_outputs) == ("greedy", False) for report in reports)
    told = []
    executor.graphs.on_capture = told.append
    for _ in range(2):
        assert executor.graphs.find(RoundShape.chain(1), 2, RoundKind.FILTERED) is not None
    assert [(report.kind, report.batch_size) for report in told] == [("filtered", 2)]
    with pytest.raises(MissingGraph):
        executor.graphs.find(RoundShape.chain(3), 4, RoundKind.GREEDY)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_captured_round_is_one_copy_to_the_device(sampling, monkeypatch):
    """Rows, sampling and all; what is relayed never leaves the cells."""
    sent: list[str] = []
    for name in ("send", "fill"):
        method = getattr(Uploads, name)
        monkeypatch.setattr(Uploads, name, lambda self, *a, n=name, m=method: sent.append(n) or m(self, *a))
    run = CapturedRound.run
    monkeypatch.setattr(CapturedRound, "run", lambda *a: sent.append("round") or run(*a))
    serve("EAGLE3", graph_sizes=(4,), table=TABLE, requests=prompts(1, **sampling), debug=False)
    rounds = [part.strip() for part in " ".join(sent).split("round")[2:]]
    # The slots of the next round's nodes are the other copy, and in overlap mode come with the step before.
    assert len(rounds) > 5 and set(rounds) <= {"fill", "fill send"}, sent


OUT_OF_MEMORY = (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=("torch", "driver"))
def test_a_graph_that_does_not_fit_is_not_tried_again(error, monkeypatch):
    """Its rounds run without one, and give the same tokens."""
    expected, _ = serve("STANDALONE", graph_sizes=None, table=TABLE, requests=prompts(3))
    tried = []

    def fails(self, key, kind, with_outputs, changed):
        tried.append((key, kind, with_outputs, changed))
        raise error

    monkeypatch.setattr(RoundGraphs, "_capture", fails)
    found, executor = serve("STANDALONE", graph_sizes=(4,), table=TABLE, requests=prompts(3))
    assert found == expected and not executor.graphs.reports
    assert tried and len(tried) == len(set(tried))


def test_a_graph_that_does_not_fit_on_another_rank_is_none_here(monkeypatch):
    """The other rank's round runs without one, so this rank's does: both make the same exchanges."""
    expected, _ = serve("STANDALONE", graph_sizes=None, table=TABLE, requests=prompts(3))
    monkeypatch.setattr(Shard, "on_any", lambda shard, holds: True)
    found, executor = serve("STANDALONE", graph_sizes=(4,), table=TABLE, requests=prompts(3))
    assert found == expected and not executor.graphs.reports
    assert set(executor.graphs._captured.values()) == {None}


def test_a_round_with_masks_is_two_graphs_and_the_second_is_captured_after_the_first_has_run():
    """Between them the host makes the masks of the drafted tokens, in the memory that the second one reads."""
    said: list[str] = []
    words, nodes = 2, 3
    place = MaskPlace(nodes, words, torch.zeros(MaskPlace.size(nodes + 4, words), dtype=torch.uint8))

    def capture(run):
        said.append("capture")
        result = run()
        return lambda: said.append("replay") or result

    def finish(passed):
        return place.masks  # where a graph would read

    def make_masks(tree):
        assert tree == "tree"
        return np.array([-1, 0, -1], np.int32), np.array([bits], np.int32)

    replay = capture_halves(lambda: SimpleNamespace(tree="tree"), finish, capture, place)
    assert said == ["capture", "replay", "capture"]
    for bits in ([5, -2], [1, 0]):
        masks = replay(make_masks)
        assert masks.index.tolist() == [-1, 0, -1] and masks.bits[0].tolist() == bits
    assert said[3:] == ["replay"] * 4


def test_what_a_round_brings_the_host_is_one_copy():
    rows, width = 3, 5
    given = [torch.randint(9, (rows,)).int(), torch.rand(rows) < 0.5, torch.randint(9, (rows, width))]
    place = running.pack(given)
    assert place.dtype == torch.uint8 and len(place) == rows * (4 + 1 + 8 * width)
    for found, expected in zip(running.unpacked(place.clone(), given), given, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_everything_runs_on_the_executors_device(algorithm, monkeypatch):
    """A server's thread has a current GPU of its own: passes, uploads and graphs must not follow it."""
    depth, used = [], Counter()

    @contextmanager
    def guard(device):
        depth.append(device)
        yield
        depth.pop()

    def inside(owner, name):
        method = getattr(owner, name)

        def guarded(*arguments, **named):
            assert depth and set(depth) == {torch.device("cpu")}, f"{name} outside the device's block"
            used[name] += 1
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, guarded)

    def begin(executor):
        monkeypatch.setattr(gpu_executor, "on_device", guard)
        executor._eager = True
        for owner, name in ((Uploads, "send"), (Uploads, "fill"), (executor.target, "forward"), (prompt_runner, "to_host"),
                            (RoundGraphs, "_capture"), (OPS, "relay_scatter_")):  # fmt: skip
            inside(owner, name)

    way = Way("NGRAM", None, {"steps": 3}) if algorithm == "NGRAM" else chain(algorithm, 3, overlap=True)
    serve_way(way, prompts(3), graph_sizes=(4,), before=begin)
    assert len(used) == 6, used


@pytest.mark.fast("sampling0", ci="*")
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8, "seed": 7}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}],
)
def test_sampled_rounds_draw_the_same_tokens_with_and_without_graphs(sampling):
    with_graphs, executor = serve("EAGLE3", graph_sizes=(4,), table=TABLE, requests=prompts(4, **sampling))
    without, _ = serve("EAGLE3", graph_sizes=None, table=TABLE, requests=prompts(4, **sampling))
    kinds = {report.kind for report in executor.graphs.reports}
    filtered = {"top_p", "top_k"} & sampling.keys()
    assert kinds == {RoundKind.FILTERED if filtered else RoundKind.SAMPLED if sampling else RoundKind.GREEDY}
    assert with_graphs == without


def test_padding_rows_leave_the_pools_and_the_relay_of_others_alone():
    _, executor = serve("STANDALONE", graph_sizes=(4,), table=TABLE, requests=prompts(1))
    executor.future_map.check()
    keys = executor.pool.keys
    written = (keys != 0).flatten(2).any(dim=2).any(dim=0)
    assert written[0], "padding writes to the sink"
    held = torch.zeros_like(written)
    held[executor._rows.table.flatten().long()] = True
    assert not (written & ~held)[1:].any(), "a padded row wrote to a slot that no row was given"


def test_a_session_captures_the_sizes_that_its_batches_can_have(models):
    plain = SessionOptions(model=models["target"], draft=models["EAGLE3"], dtype="float64", max_running=3)
    texts, sizes = [], []
    for options in (plain, replace(plain, graphs=True, multi_step_rounds=1, overlap=True)):
        session = DecodeSession.open(options)
        tokens = session.tokenizer.encode("import os\n")
        requests = [Request(f"r{i}", Prompt.of_tokens(tokens[: 2 + i]), 6 + 6 * i) for i in range(3)]
        texts.append({name: output.text for name, output in session.run(requests).items()})
        sizes.append(
            [
                report.batch_size
                for report in session.executor.graphs.reports
                if (report.kind, report.with_outputs) == (RoundKind.GREEDY, False)
            ]
        )
    assert texts[0] == texts[1]
    assert sizes == [[], [4, 2, 1]]


def test_a_session_that_is_ready_captures_nothing_more_and_has_served_nothing(nano_pair):
    session = DecodeSession.open(
        SessionOptions(model=nano_pair / "target", draft=nano_pair / "eagle3", max_running=3, graphs=True)
    )
    lines: list[str] = []
    ready, reports = make_ready(session, lines.append), session.executor.graphs.reports
    assert (ready.num_graphs, ready.left_out, ready.notice) == (len(reports), (), "")
    captured = {(report.batch_size, report.kind, report.with_outputs, report.changed) for report in reports}
    assert captured == set(itertools.product((1, 2, 4), RoundKind, (False, True), Changed))
    assert len(lines) == len(KINDS) + len(reports)
    assert [(report.changed, report.with_outputs) for report in reports[:3]] == [(Changed.NOWHERE, False)] * 3
    assert session.stats().requests == 0 and session.engine.num_uncommitted == 0
    penalised = SamplingParams(temperature=1.0, presence_penalty=0.5)
    session.run([Request("r", Prompt.of_tokens([5, 6]), 6, sampling=penalised, outputs=("logprobs",))])
    assert len(reports) == ready.num_graphs


@pytest.mark.fast("tree in pages", ci="*")
@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": "NGRAM"},
        {"draft": "STANDALONE", "policy": "goodput", "adaptive": "default"},
        {"draft": "EAGLE3", "topk": 2, "num_draft_tokens": 4, "page_size": 4},
        {"draft": "EAGLE3", "policy": "confidence", "steps": 2},
    ],
    ids=["look-up", "adaptive", "tree in pages", "budgets"],
)
def test_other_sessions_are_made_ready_too(models, more):
    draft = models[more["draft"]] if "draft" in more else None
    session = DecodeSession.open(
        SessionOptions(model=models["target"], dtype="float64", max_running=2, graphs=True, **more | {"draft": draft})
    )
    ready = make_ready(session, lambda line: None)
    assert not ready.left_out and session.stats().requests == 0
    session.run([Request("r", Prompt.of_tokens([5, 6]), 12)])
    assert len(session.own_executor.graphs.reports) == ready.num_graphs


def test_the_spare_engine_takes_no_more_memory_than_captures_may(nano_pair, monkeypatch):
    session = DecodeSession.open(SessionOptions(model=nano_pair / "target", max_running=1, graphs=True))
    pools: list[int] = []

    def noted(engine, *rest, **options):
        pools.append(engine.config.num_pages * session.plan.kv_bytes // session.plan.spec.config.num_pages)
        return build_executor(engine, *rest, **options)

    monkeypatch.setattr(ready_module, "build_executor", noted)
    for room in (session.plan.kv_bytes // 2, session.plan.kv_bytes // 3):
        monkeypatch.setattr(ready_module, "captured_bytes", lambda *_, room=room: room)
        make_ready(session, lambda line: None)
        assert pools[-1] <= room
    assert pools[1] < pools[0]


def test_rounds_beyond_a_bound_run_without_a_graph_and_are_named(nano_pair, monkeypatch):
    session = DecodeSession.open(SessionOptions(model=nano_pair / "target", max_running=2, graphs=True))
    graphs, runs = session.own_executor.graphs, []
    graphs.on_round = lambda has_graph, _: runs.append(has_graph)
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("foredraft.gpu.executor.graphs.time.monotonic", lambda: next(clock))
    ready = make_ready(session, lambda line: None, seconds=2.5)  # the clock goes on by one at each look
    assert ready.num_graphs == len(graphs.reports) == 2 and {report.kind for report in graphs.reports} == {"greedy"}
    assert "batch 2, 0 steps, sampled" in ready.left_out and "2 have one" in ready.notice
    for name, sampling in (("greedy", SamplingParams()), ("sampled", SamplingParams(temperature=1.0))):
        session.run([Request(name, Prompt.of_tokens([5, 6]), 4, sampling=sampling)])
    assert set(runs[:3]) == {True} and set(runs[3:]) == {False} and len(graphs.reports) == 2


def test_memory_bounds_captures_too(nano_pair):
    session = DecodeSession.open(SessionOptions(model=nano_pair / "target", max_running=1, graphs=True))
    lines: list[str] = []
    left_out = session.own_executor.graphs.capture_all(lines.append, CaptureBounds(60.0, num_bytes=0))
    assert not lines and not session.own_executor.graphs.reports and len(left_out) == 18


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--warm-only", "--max-running", "3"],
        ["bench", "--warm", "--batch-sizes", "1,2,4", "--context-lengths", "8"],
    ],
)
def test_warming_on_a_cpu_says_what_a_gpu_would_do(nano_pair, capsys, command):
    options = ["--model", str(nano_pair / "target"), "--draft", str(nano_pair / "eagle3"), "--device", "cpu"]
    app([*command, *options], standalone_mode=False)
    expected = "nothing to compile on a CPU; on a GPU: EAGLE3's kernels, graphs of batches of 1, 2, 4\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
def test_a_row_that_asks_for_outputs_leaves_its_batch_on_the_graph(sampling, monkeypatch):
    """All rows of its rounds are captured, and it sees what it sees without graphs."""
    eager = []
    begin = gpu_round.DecodeRound.begin

    def counting(self, *arguments):
        eager.append(arguments[-1] is not gpu_round.unmeasured)
        return begin(self, *arguments)

    monkeypatch.setattr(gpu_round.DecodeRound, "begin", counting)
    requests = prompts(4, {1: USER_OUTPUTS, 3: ("logprobs",)}, **sampling)
    ends = []
    for sizes in ((4,), None):
        eager.clear()
        ends.append(serve("EAGLE3", graph_sizes=sizes, table=TABLE, requests=requests, whole=True)[0])
        assert len(eager) > 5 and set(eager) == {sizes is None}
    for name, end in ends[0].items():
        assert end.tokens.tolist() == ends[1][name].tokens.tolist()
        asked = requests[int(name[1])].outputs
        assert set(end.outputs or ()) == set(ends[1][name].outputs or ()) == set(asked)
        for output in asked:
            np.testing.assert_allclose(end.outputs[output], ends[1][name].outputs[output])


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3", "MULTI_LAYER_EAGLE"])
def test_kernels_are_planned_alike_for_every_step_count_captured_or_not(algorithm, monkeypatch):
    """Blocks and parts follow from what a kernel is planned for:
    not from a round's steps, nor from the rows that it happens to have."""
    planned: dict[str, set] = {"verify": set(), "catch-up": set()}

    def recording(kind):
        def make(*arguments, **plan):
            batch = VerifyBatch(*arguments, **plan)
            planned[kind].add((batch.planned_rows, batch.planned_nodes))
            return batch

        return make

    monkeypatch.setattr(gpu_round, "VerifyBatch", recording("verify"))
    monkeypatch.setattr(branches, "VerifyBatch", recording("catch-up"))
    table = {"1": {"candidate_steps": [0, 1, 3], "update_interval": 1, "warmup_batches": 0}}
    found = []
    for sizes in ((4,), None):
        for seen in planned.values():
            seen.clear()
        _, executor = serve(algorithm, graph_sizes=sizes, table=table, requests=prompts(3))
        found.append({kind: {nodes for _, nodes in seen} for kind, seen in planned.items()})
        rows = {rows for seen in planned.values() for rows, _ in seen}
        assert rows == {4} if sizes else rows <= {1, 2, 4}
    assert found[0] == found[1]
    assert found[0]["verify"] == {4}
    heads = {4 + head for head in range(executor.relayed.steps)}
    assert found[0]["catch-up"] == {"STANDALONE": {5}, "EAGLE3": {4}}.get(algorithm, heads)
