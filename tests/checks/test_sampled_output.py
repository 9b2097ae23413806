"""Sampled output has the target's distribution whatever drafts, and with matching it does not even depend on the way of serving."""

import numpy as np
import pytest
from foretoken.core.adaptive import fixed_controller
from foretoken.core.algorithm.registry import get_algorithm
from foretoken.core.contract.request import Request, SamplingParams
from foretoken.core.prompt import Prompt
from foretoken.core.scheduler.config import EngineConfig
from foretoken.core.scheduler.driver import Driver
from foretoken.core.scheduler.engine import Engine
from foretoken.core.tree import verify as verify_module
from foretoken.core.tree.verify import target_distribution
from foretoken.properties.reference import HashDraft, HashLanguageModel, ReferenceExecutor
from foretoken.properties.reference.language_model import extend_hash, namespace_salt, prefix_hashes
from foretoken.properties.reference.sampling import SamplingRule

VOCAB = 4
LENGTH = 3  # tokens whose joint distribution is counted: the prefill's, then two of decode rounds
NUM_REQUESTS = 1200
# 64 outcomes have 63 degrees of freedom; chi² exceeds this once in 10,000 draws (inverse survival function, scipy 1.11).
CHI2_BOUND = 110.1
PROMPT = [1, 3, 0, 2]
SHAPES = {"chain": ("EAGLE", {"steps": 3}), "tree": ("STANDALONE", {"steps": 3, "topk": 3, "num_draft_tokens": 8})}


def serve(algorithm, shape, overlap, requests, rule=SamplingRule.TREE, model=None, **config):
    controller = fixed_controller(**shape)
    defaults = {"num_pages": 4000, "context_len": 80, "page_size": 1, "max_running": 64, "prefix_cache": False}
    engine = Engine(
        EngineConfig(**{**defaults, **config}, overlap=overlap, track_tokens=True), get_algorithm(algorithm), controller
    )
    draft = HashDraft(model or HashLanguageModel(seed=5, vocab_size=VOCAB), agreement=0.6, depth=2)
    executor = ReferenceExecutor.for_engine(engine, draft, sampling_rule=rule)
    driver = Driver(engine, executor)
    for request in requests:
        assert not driver.submit(request).refusal
    return {name: end.tokens for name, end in driver.run_until_idle().items()}


def sampled(temperature=0.9, **params):
    return [
        Request(f"r{i}", Prompt.of_tokens(PROMPT), LENGTH, sampling=SamplingParams(temperature, seed=i + 1, **params))
        for i in range(NUM_REQUESTS)
    ]


def joint_probabilities(temperature, **params):
    """P(t₁, t₂, t₃ | prompt) under the target alone, float64 [V, V, V]."""
    model = HashLanguageModel(seed=5, vocab_size=VOCAB)
    hashes = prefix_hashes(namespace_salt(""), PROMPT)[-1:]
    joint, words = np.ones(1), np.arange(VOCAB)
    last = np.array(PROMPT[-1:])
    for _ in range(LENGTH):
        probs = target_distribution(model.logits(hashes, last), temperature, **params)
        joint = (joint[:, None] * probs).ravel()
        hashes = extend_hash(np.repeat(hashes, VOCAB), np.tile(words, len(hashes)))
        last = np.tile(words, len(probs))
    return joint.reshape((VOCAB,) * LENGTH)


def chi2(tokens, expected):
    counts = np.zeros(expected.shape)
    for run in tokens.values():
        counts[tuple(run.tolist())] += 1
    assert counts.sum() == NUM_REQUESTS
    assert not counts[expected == 0].any(), "a token of probability 0 was emitted"
    possible = expected > 0
    wanted = expected[possible] * NUM_REQUESTS
    return float(((counts[possible] - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize(
    "shape, overlap, rule",
    [
        ("chain", False, SamplingRule.TREE),
        ("chain", True, SamplingRule.TREE),
        ("tree", False, SamplingRule.TREE),
        ("tree", True, SamplingRule.TREE),
        ("tree", True, SamplingRule.MATCH),
    ],
)
def test_sampled_output_is_distributed_as_the_target(shape, overlap, rule):
    algorithm, arguments = SHAPES[shape]
    tokens = serve(algorithm, arguments, overlap, sampled(), rule)
    assert chi2(tokens, joint_probabilities(0.9)) < CHI2_BOUND


def test_top_k_leaves_tokens_without_probability_out():
    tokens = serve("STANDALONE", SHAPES["tree"][1], True, sampled(top_k=2))
    expected = joint_probabilities(0.9, top_k=2)
    assert (expected > 0).sum() == 8
    assert chi2(tokens, expected) < CHI2_BOUND


def test_a_verifier_that_trusts_its_draft_is_noticed(monkeypatch):
    real = verify_module._accept_child

    def trusting(probs, tokens, children, coins):
        return real(probs, tokens, children, coins * 0.8)

    monkeypatch.setattr(verify_module, "_accept_child", trusting)
    tokens = serve("EAGLE", {"steps": 3}, True, sampled())
    assert chi2(tokens, joint_probabilities(0.9)) > CHI2_BOUND


def test_matched_samples_do_not_depend_on_the_way_of_serving():
    requests = [
        Request(
            f"r{i}",
            Prompt.of_tokens([(i * 5 + j) % 16 for j in range(3 + i)]),
            14,
            sampling=SamplingParams(0.0 if i % 3 == 0 else 0.8, top_p=0.95, seed=i),
        )
        for i in range(8)
    ]
    model = HashLanguageModel(seed=9, vocab_size=16)
    ways = [
        ("NONE", {"steps": 0}, False, {}),
        ("STANDALONE", {"steps": 4}, True, {"page_size": 4, "num_pages": 20, "chunk_size": 3, "block_rounds": 1}),
        ("EAGLE", {"steps": 3, "topk": 4, "num_draft_tokens": 10}, True, {"num_pages": 140, "prefix_cache": True}),
        ("NGRAM", {"steps": 2, "depth_limited": False}, False, {"max_running": 2}),
    ]
    served = [
        serve(name, shape, overlap, requests, SamplingRule.MATCH, model, **config)
        for name, shape, overlap, config in ways
    ]
    for other in served[1:]:
        assert {name: run.tolist() for name, run in other.items()} == {
            name: run.tolist() for name, run in served[0].items()
        }
