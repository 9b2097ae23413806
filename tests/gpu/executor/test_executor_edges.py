"""The real executor where it gets uncomfortable: a target that fails, blocks that are stopped, the ends of texts
and of the context."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from functools import cache

import numpy as np
import pytest
import torch
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.adaptive import AdaptiveController
from foredraft.core.adaptive.slot import AdaptiveSpeculativeParams
from foredraft.core.algorithm.builtin import Standalone
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Committed
from foredraft.core.contract.handoff_batch import DraftInput, HandoffBatch
from foredraft.core.contract.hidden import CaptureHiddenMode
from foredraft.core.contract.request import FinishReason, Request
from foredraft.core.contract.step import Arrivals, Join, MultiStepEnd, Step, TableWrites
from foredraft.core.draws import request_key
from foredraft.core.errors import ForedraftError
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.gpu.executor.build import build_executor
from foredraft.gpu.executor.parts import ExecutorOptions
from foredraft.gpu.executor.running import STEP_TRANSITIONS, StepMove, StepState
from foredraft.gpu.models.decoder import Decoder
from foredraft.properties.executor.record import ParksOnDemand
from hostile_driver import Disturbance
from matrix_cells import OPS, count_blocks, oracle, small_config, small_model
from serving import CONFIG, Served, Way, chain, serve, tree
from serving_matrix import VOCAB_SIZE

DEBUG = ExecutorOptions(debug=True)
WAYS = {
    "plain": Way(),
    "chain": chain("STANDALONE", 4),
    "tree": tree("STANDALONE", 3, 4, 14, page_size=4, num_pages=120),
    "EAGLE": chain("EAGLE", 3),
    "EAGLE-3 tree": tree("EAGLE3", 3, 3, 12),
    "heads": tree("MULTI_LAYER_EAGLE", 3, 3, 12, chunk_size=3),
    "look-up": Way("NGRAM", None, {"steps": 5}),
    "suffix": Way("SUFFIX", None, {"steps": 5}),
    "hybrid": chain("HYBRID", 4),
}


def requests_for(number: int = 6, **fields) -> list[Request]:
    return [
        Request(f"r{i}", Prompt.of_tokens([(7 * i + 3 * j) % 24 for j in range(2 + 5 * i)]), 20 + i, **fields)
        for i in range(number)
    ]


def plain_tokens(request: Request, length: int | None = None) -> list[int]:
    return oracle(0).continuation(request.prompt.materialize().tolist(), length or request.max_tokens)


# -- a parked draft ----------------------------------------------------------------------------------------------------


class ParksTwice(ParksOnDemand):
    """Drafts `steps` tokens; parks the draft and lets it return when so many rounds are planned."""

    def __init__(self, steps: int) -> None:
        super().__init__(AdaptiveSpeculativeParams(steps, {"1": {"candidate_steps": [0, steps]}}))
        self._steps, self._planned = steps, 0

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        self._planned += 1
        if self._planned in (4, 10, 14, 20):
            self.turn()
        return 0 if self.parking.is_parked else self._steps


@pytest.mark.fast("STANDALONE-None", "EAGLE3-graphs", ci="*")
@pytest.mark.parametrize("graph_sizes", [None, (1, 2, 4)], ids=["None", "graphs"])
@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE"])
def test_no_pass_of_a_parked_draft_runs_and_it_returns_with_the_kv_of_all_contexts(algorithm, graph_sizes):
    way, policy, passes = chain(algorithm, 3, noise=0.0, multi_step_rounds=1), ParksTwice(3), Counter()

    def count_passes(executor):
        for name in ("prefill", "catch_up"):
            run = getattr(executor.draft, name)
            setattr(executor.draft, name, lambda *given, run=run, name=name: passes.update([name]) or run(*given))

    run = serve(
        way, requests_for(), disturbance=None, controller=AdaptiveController(policy), before=count_passes,
        graph_sizes=graph_sizes, debug=graph_sizes is None,
    )  # fmt: skip
    assert run.tokens == {request.request_id: plain_tokens(request) for request in requests_for()}
    committed = [event for event in run.events if isinstance(event, Committed)]
    rounds = [event for event in committed if event.step.decode is not None]
    drafted = [event for event in rounds if not event.step.decode.shape.is_parked]
    prompts = [event.step.prefill for event in committed if event.step.prefill is not None]
    assert policy.parking.num_returns == 2 and 0 < len(drafted) < len(rounds)
    assert passes == {"catch_up": len(drafted), "prefill": sum(not part.is_parked for part in prompts)}
    if algorithm == "STANDALONE":  # the target itself: it would reject what lacks KV
        assert all((event.result.decode.accept_lens == 4).all() for event in drafted)


# -- a draft whose vocabulary is padded to another size ---------------------------------------------------------------


def resized_copy(vocab_size: int) -> Decoder:
    """`small_model(0)` with a vocabulary that is cut, or padded by rows whose logits would be the greatest."""
    draft = Decoder(small_config(vocab_size=vocab_size), OPS, "cpu", torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(draft.parameters(), small_model(0).parameters(), strict=True):
            if mine.shape == theirs.shape:
                mine.copy_(theirs)
            else:
                mine[: len(theirs)] = theirs[: len(mine)]
        if vocab_size > VOCAB_SIZE:  # one of each pair has a great logit
            draft.output_embedding[VOCAB_SIZE:] = 50 * torch.tensor([[1.0], [-1.0]]).repeat(2, 1)
    return draft


@pytest.mark.fast("3-20", ci="*")
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 4, VOCAB_SIZE + 4])
@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_with_another_padding_drafts_what_both_know(vocab_size, topk):
    way = Way("STANDALONE", resized_copy(vocab_size), {"steps": 3, "topk": topk, "num_draft_tokens": 1 + 3 * topk})
    run = serve(way, requests_for())
    assert run.tokens == {request.request_id: plain_tokens(request) for request in requests_for()}
    accept_length = run.engine.controller.metrics().accept_length
    if vocab_size > VOCAB_SIZE:
        assert accept_length > 2.8, "it is the target itself"
    else:
        assert accept_length > 1.4
        assert max(token for tokens in run.tokens.values() for token in tokens) >= vocab_size, "read by the draft"


# -- a target without an answer ---------------------------------------------------------------------------------------


HORIZON = 30


@cache
def short_sighted_model() -> Decoder:
    """`small_model(0)`, but from position HORIZON on nothing is a number:
    in the KV pool too, as an overflow would leave it."""
    model = Decoder(small_config(), OPS, "cpu", torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), small_model(0).parameters(), strict=True):
            mine.copy_(theirs)
    model.cos_sin = model.cos_sin.clone()
    model.cos_sin[HORIZON:] = torch.nan
    return model


@pytest.mark.fast("EAGLE-3 tree")
@pytest.mark.parametrize("name", WAYS)
def test_who_has_no_answer_fails_alone(name):
    """Requests fail at their first token, or later, in any batch; the others are served, also from slots used again."""
    rng = np.random.default_rng(5)
    prompt_lens = [3, 35, 5, 24, 8, 28, 31, 4, 40, 6, 20, 9, 30, 7]
    requests = [
        Request(f"r{i}", Prompt.of_tokens(rng.integers(0, 24, length)), 14) for i, length in enumerate(prompt_lens)
    ]
    run = serve(WAYS[name], requests, target=short_sighted_model(), disturbance=Disturbance(submit=50, idle=20))
    for request in requests:
        end, length = run.finished[request.request_id], request.prompt.length
        tokens = plain_tokens(request)
        if length + 14 < HORIZON - 5:  # drafts included
            assert end.reason is FinishReason.LENGTH and end.tokens.tolist() == tokens, request.request_id
        else:
            assert end.reason is FinishReason.ERROR and "distribution" in end.message
            most = max(0, HORIZON - length + 1)
            assert len(end.tokens) <= most and end.tokens.tolist() == tokens[: len(end.tokens)]
            assert len(end.tokens) > 0 or most < 8


@pytest.mark.parametrize("name", ["plain", "EAGLE"])
def test_a_chunk_without_numbers_is_not_cached(name):
    """Its first tokens are those of a request that has nothing wrong with it, and comes later."""
    long = np.random.default_rng(7).integers(0, 24, 45)
    requests = [
        Request("long", Prompt.of_tokens(long), 5),
        Request("short", Prompt.of_tokens(np.append(long[:26], 3)), 2),
    ]
    way = replace(WAYS[name], shape={"steps": 1 if name == "EAGLE" else 0}, config={"chunk_size": 8, "max_running": 1})
    run = serve(way, requests, target=short_sighted_model())
    joins = [join for event in run.events for join in getattr(getattr(event, "step", None), "joins", ())]
    assert {join.request.request_id: join.num_cached for join in joins} == {"long": 0, "short": 24}
    assert run.finished["long"].reason is FinishReason.ERROR and run.tokens["long"] == []
    assert run.tokens["short"] == plain_tokens(requests[1])


# -- simulated acceptance ---------------------------------------------------------------------------------------------


def accept_lens_of(run: Served) -> dict[str, list[int]]:
    """Accept lengths of every request's rounds, those of rows that had left before aside."""
    names, found = {}, {}
    for event in run.events:
        for join in getattr(getattr(event, "step", None), "joins", ()) if not isinstance(event, Committed) else ():
            names[join.row, join.epoch] = join.request.request_id
        if isinstance(event, Committed) and event.kept is not None:
            part = event.step.decode
            for lens, kept in zip(event.result.decode.accept_lens, event.kept, strict=True):
                for i in np.flatnonzero(kept).tolist():
                    found.setdefault(names[int(part.rows[i]), int(part.epochs[i])], []).append(int(lens[i]))
    return found


@pytest.mark.fast("EAGLE-3 tree-True")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["chain", "EAGLE-3 tree"])
def test_simulated_acceptance_is_that_of_the_process(name, overlap):
    """Round after round, in blocks and in flight:
    the host counts lengths by itself, since it does not look at the device's."""
    process = GaussianAcceptance((0.8, 0.75, 0.7, 0.7), seed=3)
    way = replace(WAYS[name], config={"overlap": overlap, "multi_step_rounds": 3, "num_pages": 2000})
    # As many as there are rows: there are blocks while the queue is empty.
    requests = [replace(request, max_tokens=60) for request in requests_for(4)]
    run = serve(way, requests, acceptance=process)
    found = accept_lens_of(run)
    steps = way.shape["steps"]
    for request in requests:
        lens = found[request.request_id]
        key = np.array([request_key(request.request_id)], np.uint64)
        first = np.array([1])  # the prompt's own successor has been emitted, as the simulator counts
        assert lens == process.accept_lens(key, first, steps, len(lens))[:, 0].tolist()
        assert len(run.tokens[request.request_id]) == request.max_tokens
    assert count_blocks(run.events) > 2 and max(map(max, found.values())) == steps + 1


# -- blocks, ends -----------------------------------------------------------------------------------------------------


def engine_and_executor(way: Way, **config):
    events: list = []
    engine = Engine(
        EngineConfig(**{**CONFIG, **config}), get_algorithm(way.algorithm), way.controller(), events=events.append
    )
    return engine, build_executor(engine, small_model(0), way.draft, OPS, DEBUG), events


@pytest.mark.parametrize("when", ["planned", "launched", "running"])
def test_a_block_stops_where_it_is_asked_to(when):
    engine, executor, _ = engine_and_executor(WAYS["chain"], multi_step_rounds=16, overlap=False)
    request = requests_for()[2]
    engine.submit(replace(request, max_tokens=70), 0)
    while (step := engine.plan(0)).max_rounds == 1:
        executor.launch(step)
        engine.commit(executor.collect(), 0)
    assert step.max_rounds > 3
    if when == "planned":
        executor.request_stop(step.step_id)
    executor.launch(step)
    if when == "launched":
        executor.request_stop(step.step_id)
    if when == "running":
        assert not executor.advance(2)
        executor.request_stop(step.step_id)
    decode = executor.collect().decode
    assert decode.rounds == (3 if when == "running" else 1) and decode.multi_step_end is MultiStepEnd.ASKED
    assert len(decode.accept_lens) == len(decode.tokens) == decode.rounds and not decode.ended.any()


@pytest.mark.parametrize("name", ["plain", "tree"])
def test_counters_are_the_sums_of_the_steps(name):
    engine, executor, _ = engine_and_executor(WAYS[name], multi_step_rounds=8, overlap=False)
    for request in requests_for()[:4]:
        engine.submit(request, 0)
    sums: Counter[str] = Counter()
    while (step := engine.plan(0)) is not None:
        executor.launch(step)
        result = executor.collect()
        if step.prefill is not None:
            sums["prefilled"] += int(step.prefill.lens.sum())
        if (part := step.decode) is not None:
            rows, rounds = len(part.rows), result.decode.rounds
            sums["rounds"] += rounds
            sums["verified_rows"] += rows * rounds
            sums["drafted"] += rows * rounds * (part.shape.nodes - 1)
            sums["correct_drafts"] += int(result.decode.accept_lens.sum()) - rows * rounds
        engine.commit(result, 0)
    assert asdict(executor.counters) == {name: sums[name] for name in asdict(executor.counters)}
    assert sums["prefilled"] > 20 and sums["rounds"] > 5


@pytest.mark.fast("plain", "tree")
@pytest.mark.parametrize("name", ["plain", "chain", "tree", "heads"])
def test_a_stop_at_the_length_cap_is_a_stop(name):
    requests = []
    for request in requests_for():
        tokens = plain_tokens(request)
        # A token's first occurrence, so that nothing stops before the cap.
        cap = max(n for n in range(1, 12) if tokens[n - 1] not in tokens[: n - 1])
        requests.append(replace(request, max_tokens=cap, stop_tokens=(tokens[cap - 1],)))
    run = serve(WAYS[name], requests)
    for request in requests:
        end = run.finished[request.request_id]
        assert end.reason is FinishReason.STOP
        assert end.tokens.tolist() == plain_tokens(request)


@pytest.mark.fast("EAGLE-3 tree-1", ci="heads-4")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", ["plain", "chain", "tree", "EAGLE-3 tree", "heads", "look-up"])
def test_texts_up_to_the_end_of_the_context(name, page_size):
    """Drafts behind the last position are clamped, not looked up; the output is as long as the context allows."""
    way = replace(WAYS[name], config={"context_len": 44, "page_size": page_size, "num_pages": 600 // page_size})
    requests = [replace(request, max_tokens=1000) for request in requests_for(4)]
    run = serve(way, requests)
    for request in requests:
        end, length = run.finished[request.request_id], 44 - request.prompt.length
        assert end.reason is FinishReason.LENGTH and end.num_output == length
        assert end.tokens.tolist() == plain_tokens(request, length)


# -- requests that another worker has prefilled -----------------------------------------------------------------------


class Choosy(Standalone):
    """Refuses one request, and counts how often it is asked."""

    asked: list

    def build_disagg_draft_input(self, batch, last_tokens, future_map):
        self.asked.append(batch.request_ids)
        return DraftInput(
            batch.rows,
            last_tokens,
            None,
            None,
            None,
            CaptureHiddenMode.NULL,
            failures=((2, ForedraftError("not that one")),),
        )


def test_a_request_whose_draft_input_is_refused_fails_alone_and_its_cells_can_be_read():
    algorithm = Choosy()
    algorithm.asked = []
    way = WAYS["chain"]
    engine = Engine(EngineConfig(**CONFIG), algorithm, way.controller())
    executor = build_executor(engine, small_model(0), way.draft, OPS, DEBUG)
    request = requests_for()[0]
    joins = (Join(2, 7, request, 9, 1, 0, np.array([3, 1]), num_received=2),)
    batch = HandoffBatch(
        rows=np.array([2], np.int32),
        epochs=np.array([7]),
        request_ids=("r0",),
        seq_lens=np.array([2]),
        probabilities=np.full((1, 1), 0.5, np.float32),
        token_ids=np.full((1, 1), 4),
        hidden_states=(None,),
    )
    executor.launch(Step(1, joins, (), TableWrites(), None, None, Arrivals(batch, np.array([11]))))
    result = executor.collect()
    assert result.failures == ((2, "not that one"),) and algorithm.asked == [("r0",)]
    lengths, cell = executor.future_map.resolve(batch.rows, batch.epochs)
    assert lengths.tolist() == [2] and cell["bonus_tokens"].tolist() == [11] and cell["topk_ids"].tolist() == [[4]]


# -- the moves of a launched step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True])
def test_steps_walk_every_transition_of_the_table_and_no_other(monkeypatch, eager):
    walked = set()

    class Watched(dict):
        def __init__(self, state, moves):
            super().__init__(moves)
            self.state = state

        def __getitem__(self, move):
            walked.add((self.state, move))
            return super().__getitem__(move)  # KeyError: a move that the table does not have

    watched = {state: Watched(state, moves) for state, moves in STEP_TRANSITIONS.items()}
    monkeypatch.setattr("foredraft.gpu.executor.running.STEP_TRANSITIONS", watched)
    engine, executor, _ = engine_and_executor(WAYS["chain"], overlap=eager, multi_step_rounds=4, chunk_size=8)
    executor._eager = eager
    driver, requests = Driver(engine, executor), requests_for(3)
    for request in requests:
        driver.submit(request)
    ends = driver.run_until_idle()
    assert {name: end.tokens.tolist() for name, end in ends.items()} == {
        r.request_id: plain_tokens(r) for r in requests
    }
    executor.launch(Step(executor._last_step_id + 1, (), (), TableWrites(), None, None))
    assert executor.collect().decode is None
    every = {(state, move) for state, moves in STEP_TRANSITIONS.items() for move in moves}
    ahead = {(StepState.PROMPTS, StepMove.ENQUEUE_ROUND), (StepState.PROMPTS_AND_ROUND, StepMove.READ_PROMPTS)}
    assert walked == (every if eager else every - ahead)
