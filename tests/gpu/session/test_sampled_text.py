"""Sampled output of the real executor has exactly the target's distribution, and comes from keyed coins.

What the same request (its text, its parameters, its seed) makes equal, token for token:

    plain decoding   everything: mode, blocks, batch mix, chunks, pages, retraction
    speculation      everything but retraction, for one algorithm, draft and shape. A token's coins are those of its
                     position, but whether the accept coin or the bonus coin decides depends on what was drafted there;
                     so another algorithm, draft or shape, or a retraction, which begins a round elsewhere, is equal in
                     distribution only
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.draws import Purpose, request_key, uniform
from foredraft.core.errors import ConfigError
from foredraft.core.prompt import Prompt
from foredraft.core.tree.chains import AcceptRule
from foredraft.core.tree.verify import sample_tokens, target_distribution
from foredraft.gpu.tiny.dense import DenseAttention
from hostile_driver import CALM, Disturbance
from matrix_cells import small_model
from serving import Way, chain, serve, tree
from serving_matrix import VOCAB_SIZE
from shaped import TOY, ToyMatcher, plain_text, shaped

PROMPT = [3, 14, 15, 9, 2]
NUM_SAMPLES = 3000
HOT = SamplingParams(3.0)
CUT = SamplingParams(2.0, top_p=0.85, top_k=9)
SHAPED = SamplingParams(
    2.5, min_p=0.05, presence_penalty=1.0, repetition_penalty=1.3, logit_bias=((5, 1.0),), grammar=TOY
)
BATCHES = {"max_running": 100, "num_pages": 6000, "chunk_size": 1024}


def probabilities(texts: list[list[int]], sampling: SamplingParams, held: tuple[int, ...] = ()) -> np.ndarray:
    """The target's distribution after texts of one length, float64 [n, V], by the core's own rule."""
    target, length = small_model(0), len(texts[0])
    out = target.forward(torch.tensor(texts).view(-1), DenseAttention([length] * len(texts)))
    logits = target.logits(out.hidden.view(len(texts), length, -1)[:, -1]).numpy()
    if sampling.is_shaped or held:
        begin = len(PROMPT)
        logits = np.stack(
            [shaped(row, text[:begin], text[begin:], sampling, held) for row, text in zip(logits, texts, strict=True)]
        )
    return target_distribution(logits, sampling.temperature, sampling.top_p, sampling.top_k)


@cache
def joint(sampling: SamplingParams, ends: tuple[int, ...]) -> np.ndarray:
    """Probability of the first three tokens, float64 [V, V, V], of which only the last may be one of `ends`."""
    ids = range(VOCAB_SIZE)
    first = probabilities([PROMPT], sampling, ends)[0]
    second = probabilities([[*PROMPT, a] for a in ids], sampling, ends)
    third = probabilities([[*PROMPT, a, b] for a in ids for b in ids], sampling)
    return first[:, None, None] * second[:, :, None] * third.reshape(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)


def surprise(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's χ² as a standard normal deviate (Wilson and Hilferty 1931); rare outcomes are counted together. Returns
    inf if an impossible outcome occurred."""
    counts, expected = counts.ravel(), expected.ravel() * counts.sum()
    if counts[expected == 0.0].any():
        return np.inf
    rare = expected < 5.0
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    filled = expected > 0.0
    chi2 = ((counts - expected)[filled] ** 2 / expected[filled]).sum()
    freedom = filled.sum() - 1
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))


def surprises(way: Way, sampling: SamplingParams, ends: tuple[int, ...] = ()) -> tuple[list[float], float]:
    """How far tokens 1 and 2, and tokens 2 and 3, are from their distribution;
    and the correct drafts per verified row."""
    way = replace(way, config={**BATCHES, **(way.config or {})})
    requests = [
        Request(
            f"r{i}",
            Prompt.of_tokens(PROMPT),
            3,
            sampling=replace(sampling, seed=i + 1),
            stop_tokens=ends,
            min_tokens=2 if ends else 0,
        )
        for i in range(NUM_SAMPLES)
    ]
    run = serve(way, requests, disturbance=None, debug=False, make_matcher=lambda grammar: ToyMatcher(VOCAB_SIZE))
    tokens = np.array([run.finished[request.request_id].tokens for request in requests])
    found = []
    for first in (0, 1):
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
        np.add.at(counts, (tokens[:, first], tokens[:, first + 1]), 1)
        found.append(surprise(counts, joint(sampling, ends).sum(axis=2 if first == 0 else 0)))
    metrics = run.engine.controller.metrics()
    return found, metrics.correct_drafts / metrics.verified_rows


WAYS = {
    "plain": Way(),
    "chain": chain("STANDALONE", 3),
    "tree": tree("STANDALONE", 3, 4, 14),
    "drawn chain": replace(chain("STANDALONE", 3), rule=AcceptRule.REJECTION),
    "blocks": replace(chain("STANDALONE", 3), rule=AcceptRule.BLOCK),
    "EAGLE blocks": replace(chain("EAGLE", 2, page_size=4, num_pages=2500), rule=AcceptRule.BLOCK),
    "EAGLE tree": tree("EAGLE", 2, 4, 15, page_size=4, num_pages=2500),
    "EAGLE-3 tree": tree("EAGLE3", 2, 4, 12),
    "heads": tree("MULTI_LAYER_EAGLE", 3, 4, 16),
    "look-up": Way("NGRAM", None, {"steps": 5}),
}


# with every test each coin is compared with the core's, and the acceptance contract has the distribution
@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [pytest.param(HOT, id="hot"), pytest.param(CUT, id="cut"), pytest.param(SHAPED, id="shaped")]
)
@pytest.mark.parametrize("name", WAYS)
def test_sampled_tokens_have_the_targets_distribution(name, sampling, record_property):
    found, correct = surprises(WAYS[name], sampling)
    shown = ", ".join(f"{value:.1f}" for value in found)
    record_property("note", f"sampled, {name}: {shown} standard deviations, {correct:.2f} correct drafts per round")
    assert max(found) < 4.5, found
    assert correct > 0.04 or name in ("plain", "look-up")


@pytest.mark.slow
@pytest.mark.fast("EAGLE tree")
@pytest.mark.parametrize("name", WAYS)
def test_ends_that_are_held_back_leave_the_distribution_of_the_others(name, record_property):
    """Of the two likeliest tokens, held back for two tokens."""
    likeliest = tuple(np.argsort(probabilities([PROMPT], HOT)[0])[-2:].tolist())
    found, _ = surprises(WAYS[name], HOT, likeliest)
    record_property("note", f"ends held back, {name}: {found[0]:.1f}, {found[1]:.1f} standard deviations")
    assert max(found) < 4.5, found


@pytest.mark.fast("plain", "EAGLE tree", ci="*")
@pytest.mark.parametrize("name", WAYS)
def test_no_stop_token_is_drawn_before_min_tokens(name):
    """Greedily, through retractions and blocks, with every token of the plain text as a stop token of one request."""
    model, asked = small_model(0), []
    free = plain_text(model, Request("free", Prompt.of_tokens(PROMPT), 10))
    for i, token in enumerate(free):
        held = {"stop_tokens": (token, free[0]), "min_tokens": i}
        asked.append(Request(f"r{i}", Prompt.of_tokens(PROMPT), 16, **held))
    config = {"page_size": 1, "num_pages": 600, **(WAYS[name].config or {})}
    for disturbance in (None, replace(CALM, retract=8)):
        run = serve(replace(WAYS[name], config=config), asked, disturbance=disturbance)
        for request in asked:
            assert run.tokens[request.request_id] == plain_text(model, request)
            assert len(run.tokens[request.request_id]) > request.min_tokens


# -- the same coins, the same tokens ----------------------------------------------------------------------------------


def requests_for(number: int = 6) -> list[Request]:
    """Prompts and parameters of all kinds, a greedy one among them; seed 0 means the request's own key."""
    return [
        Request(
            f"r{i}",
            Prompt.of_tokens([(7 * i + 3 * j) % VOCAB_SIZE for j in range(2 + 3 * i)]),
            8 + i,
            sampling=SamplingParams(
                0.0 if i == 2 else 1.0 + i / 2, top_p=1.0 - 0.05 * i, top_k=0 if i < 4 else 6, seed=i
            ),
        )
        for i in range(number)
    ]


SAME = [
    {"overlap": False, "multi_step_rounds": 1},
    {"overlap": False, "multi_step_rounds": 8},
    {"overlap": True, "multi_step_rounds": 1},
    {"max_running": 1},
    {"max_running": 6, "chunk_size": 3, "mixed": False},
    {"page_size": 4, "num_pages": 150, "prefix_cache": False},
]


@pytest.mark.fast(ci="EAGLE tree")
@pytest.mark.parametrize("name", ["plain", "chain", "blocks", "tree", "EAGLE tree", "heads", "look-up"])
def test_the_way_of_serving_changes_no_token(name):
    def tokens(config, seed=7):
        config = {"page_size": 1, "num_pages": 600, **config}
        return serve(replace(WAYS[name], config=config), requests_for(), seed=seed).tokens

    first = tokens({})
    for config in SAME:
        assert tokens(config) == first, config
    other = tokens({}, seed=8)
    assert sum(other[f"r{i}"] == first[f"r{i}"] for i in range(6)) == 1  # the greedy one


def test_captured_rounds_draw_the_same_drafts():
    way = replace(WAYS["blocks"], config={"page_size": 1, "num_pages": 600})
    captured = serve(way, requests_for(), graph_sizes=(2, 4))
    assert captured.executor.graphs.reports and captured.tokens == serve(way, requests_for()).tokens


def test_drawn_drafts_are_refused_in_trees():
    way = replace(WAYS["EAGLE tree"], rule=AcceptRule.REJECTION)
    with pytest.raises(ConfigError, match="accept_rule: rejection verifies chains, and with topk 4 drafts are trees"):
        serve(way, requests_for(1))


def test_plain_samples_survive_retraction():
    calm = serve(chain("NONE", 0), requests_for())
    disturbed = serve(chain("NONE", 0), requests_for(), disturbance=replace(CALM, retract=8))
    assert disturbed.retractions > 3 and disturbed.tokens == calm.tokens


def test_plain_samples_are_those_of_the_cores_coins():
    requests = requests_for()
    run = serve(chain("NONE", 0), requests, seed=11)
    for request in requests:
        text = request.prompt.materialize().tolist()
        key = request.sampling.seed or request_key(request.request_id)
        for token in run.tokens[request.request_id]:
            coin = uniform(11, Purpose.BONUS_COIN, key, len(text) - 1)
            assert token == sample_tokens(probabilities([text], request.sampling), np.array([coin]))[0]
            text.append(token)


def test_a_chain_is_accepted_by_the_cores_coins():
    """Each draft d by its position's accept coin u < p(d), else the token is drawn from p without d
    by the bonus coin."""
    request = Request("r", Prompt.of_tokens(PROMPT), 40, sampling=SamplingParams(1.5, top_p=0.97, seed=123))
    drafted: dict[int, list[int]] = {}

    def watch(executor):
        real = executor.draft.propose

        def propose(batch, relayed):
            tree = real(batch, relayed)
            drafted[int(batch.lengths[0])] = tree.tokens[0].tolist()
            return tree

        executor.draft.propose = propose

    run = serve(chain("STANDALONE", 3), [request], before=watch, seed=4)
    text = PROMPT + run.tokens["r"][:1]
    accepted = drawn = 0
    while len(text) < len(PROMPT) + 40:
        nodes = drafted[len(text) - 1]
        assert nodes[0] == text[-1]
        for draft in [*nodes[1:], None]:
            position = len(text) - 1
            accept, bonus = (uniform(4, p, 123, position) for p in (Purpose.ACCEPT_COIN, Purpose.BONUS_COIN))
            p = probabilities([text], request.sampling)
            if draft is not None and accept < p[0, draft]:
                text.append(draft)
                accepted += 1
                continue
            if draft is not None:
                p[0, draft] = 0.0
            text.append(int(sample_tokens(p, np.array([bonus]))[0]))
            drawn += 1
            break
    assert text[len(PROMPT) :][:40] == run.tokens["r"]
    assert accepted > 3 and drawn > 3


def test_speculative_samples_after_retraction_are_a_sample_too():
    """They end as they should in any batch; nothing else is promised of them."""
    run = serve(WAYS["tree"], requests_for(), disturbance=Disturbance(submit=60, retract=8))
    assert run.retractions > 2
    assert [len(run.tokens[f"r{i}"]) for i in range(6)] == [8 + i for i in range(6)]
