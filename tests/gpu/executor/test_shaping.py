"""Penalties and grammars under speculation: the text of plain decoding, whatever is drafted and
however it is served."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foredraft.core.contract.request import FinishReason, Request, SamplingParams
from foredraft.core.errors import InvalidRequest
from foredraft.core.prompt import Prompt
from foredraft.gpu.executor.shaping import Changed
from hostile_driver import CALM
from matrix_cells import small_model
from serving import Way, chain, serve, tree
from serving_matrix import VOCAB_SIZE
from shaped import TOY, ToyMatcher, plain_text

ASKED = {
    "presence and frequency": SamplingParams(presence_penalty=0.3, frequency_penalty=0.2),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "a bonus for repeating": SamplingParams(repetition_penalty=0.8, frequency_penalty=-0.2),
    "grammar": SamplingParams(grammar=TOY),
    "bias": SamplingParams(logit_bias=((3, 1.5), (7, -100.0), (11, 100.0), (12, 99.5)), presence_penalty=0.7),
    "all": SamplingParams(presence_penalty=0.3, repetition_penalty=1.2, logit_bias=((4, 1.0), (5, -2.0)), grammar=TOY),
    "nothing": SamplingParams(),
}
WAYS = {
    "plain": Way(),
    "chain": chain("STANDALONE", 3),
    "chain, overlap": chain("STANDALONE", 3, overlap=True, multi_step_rounds=1),
    "tree": tree("EAGLE", 3, 4, 14, page_size=4, num_pages=200, chunk_size=5),
    "EAGLE-3 tree": tree("EAGLE3", 3, 2, 9, chunk_size=3),
    "look-up": Way("NGRAM", None, {"steps": 5}),
}


def requests_for(stop_tokens: tuple[int, ...] = ()) -> list[Request]:
    return [
        Request(name, Prompt.of_tokens([(7 * i + 3 * j) % VOCAB_SIZE for j in range(2 + 3 * i)]), 14 + i,
                sampling=sampling, stop_tokens=stop_tokens)
        for i, (name, sampling) in enumerate(ASKED.items())
    ]  # fmt: skip


def make_matcher(grammar) -> ToyMatcher:
    assert grammar == TOY
    return ToyMatcher(VOCAB_SIZE)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    texts = {request.request_id: plain_text(small_model(0), request) for request in requests_for()}
    assert len({tuple(text[:14]) for text in texts.values()}) > 4, "the parameters change texts"
    return texts


@pytest.mark.fast("EAGLE-3 tree-False", "look-up-True", ci=("plain-False", "tree-True"))
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_greedy_text_is_that_of_plain_decoding(name, eager, expected):
    def begin_when_launched(executor):
        executor._eager = eager

    run = serve(WAYS[name], requests_for(), make_matcher=make_matcher, before=begin_when_launched)
    assert run.tokens == expected
    assert WAYS[name].algorithm == "NONE" or run.engine.controller.metrics().correct_drafts


@pytest.mark.fast("tree", "look-up")
@pytest.mark.parametrize("name", ["chain", "tree", "look-up"])
def test_the_passes_of_shaped_rounds_are_captured(name, expected):
    captured = []
    run = serve(
        WAYS[name],
        requests_for(),
        make_matcher=make_matcher,
        graph_sizes=(2, 4),
        before=lambda executor: setattr(
            executor.graphs, "on_round", lambda has_graph, rows: captured.append(has_graph)
        ),
    )
    assert run.tokens == expected
    assert len(captured) > 5 and all(captured)
    assert {report.changed for report in run.executor.graphs.reports} >= set(Changed) - {Changed.NOWHERE}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["chain", "look-up"])
def test_a_retracted_request_goes_on_where_it_was(name, expected):
    run = serve(WAYS[name], requests_for(), make_matcher=make_matcher, disturbance=replace(CALM, retract=6))
    assert run.retractions > 3 and run.tokens == expected


def test_a_grammar_that_cannot_be_made_fails_its_request_alone(expected):
    def refuse(grammar):
        raise InvalidRequest("lark: no such rule")

    for make, words in ((None, "no grammars"), (refuse, "no such rule")):
        run = serve(WAYS["chain"], requests_for(), make_matcher=make)
        assert run.finished["grammar"].reason is FinishReason.ERROR and words in run.finished["grammar"].message
        assert run.tokens["repetition"] == expected["repetition"]
