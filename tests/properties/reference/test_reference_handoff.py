"""Prefill and decode on two reference executors: the pair's tokens are those of plain greedy decoding, whatever
happens on the link."""

from dataclasses import replace

import numpy as np
import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.events import Planned, ignore
from foredraft.core.contract.request import Request
from foredraft.core.errors import InvariantViolation
from foredraft.core.handoff import HandoffTiming
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.executor.reference import (
    HashDraft,
    HashLanguageModel,
    ReferenceExecutor,
    expected_outputs,
    plain_greedy,
)
from foredraft.properties.executor.reference import handoff as handoff_module
from foredraft.properties.executor.reference.handoff import HandoffPair
from foredraft.properties.executor.reference.language_model import USER_OUTPUTS

MODEL = HashLanguageModel(seed=3, vocab_size=24)
MS = 1_000_000
ALGORITHMS = ("NONE", "STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM")


def worker(role, algorithm, steps=3, topk=1, events=ignore, **config):
    shape = {"depth_limited": algorithm != "NGRAM"}
    if topk > 1 and steps:
        shape |= {"topk": topk, "num_draft_tokens": 5}
    defaults = {"num_pages": 200, "context_len": 96, "max_running": 4, "chunk_size": 8, "multi_step_rounds": 1}
    engine = Engine(
        EngineConfig(**{**defaults, **config}, track_tokens=True, role=role),
        get_algorithm(algorithm) if isinstance(algorithm, str) else algorithm,
        fixed_controller(0 if algorithm == "NONE" else steps, **shape),
        events=events,
    )
    return engine, ReferenceExecutor(engine, HashDraft(MODEL, 0.7))


def pair(algorithm="STANDALONE", meddle=None, timing=None, prefill=None, decode=None, **config):
    return HandoffPair(
        worker("prefill", algorithm, **{**config, **(prefill or {})}),
        worker("decode", algorithm, **{**config, **(decode or {})}),
        meddle=meddle,
        timing=timing or HandoffTiming(50 * MS, 120 * MS, 10 * MS),
    )


def ask(name, length=9, max_tokens=12, start=0, **fields):
    return Request(name, Prompt.of_tokens([(start + 5 * j) % 24 for j in range(length)]), max_tokens, **fields)


def serve(handoff, requests):
    for request in requests:
        assert not handoff.prefill.submit(request, handoff.now_ns)
    return handoff.run()


def check_ends(requests, ends):
    for request in requests:
        end = ends[request.request_id]
        wanted = plain_greedy(MODEL, request, request.max_tokens).tolist()
        assert end.tokens.tolist() == wanted and end.num_output == len(wanted), (request.request_id, end)


def check_drained(handoff):
    for side in (handoff.prefill, handoff.decode):
        engine = side.engine
        assert engine.is_idle and side.side.num_in_flight == 0
        assert engine.store.num_request_slots == 0 and engine.store.num_held_rows == 0
        assert engine.store.allocator.num_held_slots == (engine.store.cache.evictable_slots)
        side.check()


# -- every algorithm, both modes ---------------------------------------------------------------------------------------


@pytest.mark.fast("True-NONE", "True-EAGLE3", "True-NGRAM", ci="True-*")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_pair_gives_the_tokens_of_plain_greedy_decoding(algorithm, overlap):
    shapes = [(0, 1, 4), (3, 1, 16), (2, 2, 1), (3, 4, 4)]
    for steps, topk, page_size in shapes[:1] if algorithm == "NONE" else shapes:
        handoff = pair(
            algorithm, steps=steps, topk=topk, overlap=overlap, page_size=page_size, num_pages=320 // page_size
        )
        requests = [ask(f"r{i}", 1 + 6 * i, 9, start=i) for i in range(6)]
        check_ends(requests, serve(handoff, requests))
        check_drained(handoff)
        counts = handoff.decode.side.counts
        assert (counts.started, counts.completed, counts.ignored) == (6, 6, 0)


@pytest.mark.fast("NONE", "EAGLE3", "MULTI_LAYER_EAGLE")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_requests_of_a_lost_decode_worker_go_on_behind_the_tokens_that_it_had_shown(algorithm):
    requests = [ask(f"r{i}", 4 + 8 * i, 14, start=i, outputs=("logprobs",)) for i in range(5)]
    lost = pair(algorithm, page_size=4, num_pages=80)
    for request in requests:
        lost.prefill.submit(request, 0)
    while len(lost.decode.finished) < 2:
        lost.turn()
    engine = lost.decode.engine
    shown = {name: end.tokens for name, end in lost.decode.finished.items()}
    shown |= {name: engine.output.delivered(record)[1] for name, record in engine.requests.live.items()}
    assert any(1 < len(tokens) < 14 for tokens in shown.values()), "none was in the middle"

    others = pair(algorithm, page_size=4, num_pages=120)
    serve(others, [replace(request, request_id=f"warm {request.request_id}") for request in requests])
    left = [request for request in requests if request.request_id not in lost.decode.finished]
    for request in left[-2:]:
        shown[request.request_id] = plain_greedy(MODEL, request, 1)  # as many tokens as the prefix caches have
    ends = serve(others, [replace(r, shown=Prompt.of_tokens(shown.get(r.request_id, []))) for r in left])
    check_ends(left, ends)
    for request in left:
        end, before = ends[request.request_id], len(shown.get(request.request_id, ()))
        expected = expected_outputs(MODEL, request, end.tokens)["logprobs"][before:]
        assert np.allclose(end.outputs["logprobs"], expected), "what was asked to be seen of the others"
    check_drained(others)


def test_retraction_on_the_decode_side_computes_again_there_what_it_lost():
    events = []
    handoff = pair("EAGLE", decode={"events": events.append, "num_pages": 60, "chunk_size": 64}, overlap=True)
    requests = [ask(f"r{i}", 9 + i, 30, start=i) for i in range(4)]
    check_ends(requests, serve(handoff, requests))
    check_drained(handoff)
    assert any(event.retracted for event in events if isinstance(event, Planned)), "the pool was not tight"
    assert any(event.step.prefill is not None for event in events if isinstance(event, Planned) and event.step)


@pytest.mark.fast("STANDALONE", "EAGLE", "NGRAM")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_users_asked_to_see_is_complete_over_both_workers(algorithm):
    events = []
    handoff = pair(algorithm, decode={"events": events.append, "num_pages": 52}, overlap=True)
    requests = [ask(f"r{i}", 9 + i, 24, start=i, outputs=USER_OUTPUTS[i % 2 :]) for i in range(4)]
    ends = serve(handoff, requests)
    assert any(event.retracted for event in events if isinstance(event, Planned)), "the pool was not tight"
    for request in requests:
        end = ends[request.request_id]
        wanted = expected_outputs(MODEL, request, end.tokens)
        assert set(end.outputs) == set(request.outputs)
        for name in request.outputs:
            assert np.array_equal(np.stack(end.outputs[name]), wanted[name]), (request.request_id, name)


# -- a bad link --------------------------------------------------------------------------------------------------------


def test_a_changed_cell_is_found_before_its_request_runs(monkeypatch):
    """The canary itself: a wrong byte that checksums cannot know of, since it was read wrong at its source."""
    read = handoff_module.read_page

    def misread(pool, slots):
        content = read(pool, slots)
        return content and content[:8] + bytes([content[8] ^ 1]) + content[9:]

    monkeypatch.setattr(handoff_module, "read_page", misread)
    handoff = pair("STANDALONE")
    with pytest.raises(InvariantViolation, match="ACCEPT-06"):
        serve(handoff, [ask("a")])
