"""The reference executor itself: what its model says, what its shadow KV refuses, and how it honours the port."""

import numpy as np
import pytest
from foredraft.core.acceptance.process import GaussianAcceptance
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.request import FinishReason, Request, SamplingParams
from foredraft.core.draws import request_key
from foredraft.core.errors import InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.driver import Driver
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor, plain_greedy
from foredraft.properties.executor.reference.language_model import (
    extend_hash,
    hash_of,
    hidden_of,
    namespace_salt,
    prefix_hashes,
)
from foredraft.properties.executor.reference.shadow import ShadowKV

MODEL = HashLanguageModel(seed=2, vocab_size=24)


def serve(algorithm="EAGLE", controller=None, requests=(), acceptance=None, agreement=0.7, on_commit=None, **config):
    """Everything an engine did for these requests: the engine, its executor, ended requests, events."""
    events = []
    defaults = {"num_pages": 300, "context_len": 120, "max_running": 4, "multi_step_rounds": 1}
    engine = Engine(
        EngineConfig(**{**defaults, **config}, track_tokens=True),
        get_algorithm(algorithm),
        controller or fixed_controller(3),
        events=events.append,
    )
    executor = ReferenceExecutor(engine, HashDraft(MODEL, agreement), acceptance=acceptance)
    driver = Driver(engine, executor)
    if on_commit is not None:
        driver.collect = lambda: on_commit(engine, result := executor.collect()) or result
    for request in requests:
        driver.submit(request)
    return engine, executor, driver.run_until_idle(), events


def ask(name, tokens, max_tokens=20, **fields):
    return Request(name, Prompt.of_tokens(tokens), max_tokens, **fields)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_prefix_hash_depends_on_every_token_and_on_the_namespace():
    tokens = [3, 1, 4, 1, 5]
    whole = prefix_hashes(namespace_salt(""), tokens)
    for i in range(5):
        changed = list(tokens)
        changed[i] += 1
        other = prefix_hashes(namespace_salt(""), changed)
        assert (other[:i] == whole[:i]).all() and (other[i:] != whole[i:]).all()
    assert (prefix_hashes(namespace_salt("x"), tokens) != whole).all()
    assert whole[-1] == extend_hash(whole[-2:-1], np.array([5]))[0]


def test_a_hidden_state_is_its_prefix():
    hashes = prefix_hashes(1, range(100))
    assert (hash_of(hidden_of(hashes)) == hashes).all()


@pytest.mark.parametrize("agreement", [0.0, 0.35, 1.0])
def test_the_draft_agrees_as_often_as_its_dial_says(agreement):
    hashes = prefix_hashes(7, range(4000))
    last = np.arange(4000) % 24
    truth = MODEL.argmax(hashes, last)
    ids, probabilities = HashDraft(MODEL, agreement).top_k(hashes, last, 8)
    assert abs((ids[:, 0] == truth).mean() - agreement) < 0.03
    assert (ids == truth[:, None]).any(axis=1).all(), "a miss stands among the next six"
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all(), "no candidate twice"
    assert (np.diff(probabilities, axis=1) < 0).all() and (probabilities.sum(axis=1) <= 1).all()
    heads = [HashDraft(MODEL, 0.5).top_k(hashes, last, 1, head)[0] for head in (0, 1)]
    assert (heads[0] != heads[1]).any()


# -- simulated acceptance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", "MULTI_LAYER_EAGLE", "STANDALONE", "NGRAM"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_given_acceptance_is_met_exactly_and_the_tokens_stay_the_targets(algorithm, overlap):
    process = GaussianAcceptance((0.7, 0.6, 0.8), seed=4)
    steps = 4
    request = ask("a", [1, 2, 3, 4, 5], max_tokens=60)
    seen = []

    def note(engine, result):
        if result.decode is not None and engine.rounds.live[1]:
            position = int(engine.rounds.kv_len[1]) - 4  # tokens emitted so far
            key = np.array([request_key("a")], dtype=np.uint64)
            run = int(process.longest_run(key, np.array([position]))[0])
            seen.append((int(result.decode.accept_lens[0, 0]), min(run, steps) + 1))

    _, _, ended, _ = serve(
        algorithm,
        fixed_controller(steps, depth_limited=algorithm != "NGRAM"),
        [request],
        process,
        overlap=overlap,
        on_commit=note,
    )
    assert len(seen) > 12 and all(got == wanted for got, wanted in seen), seen
    assert ended["a"].tokens.tolist() == plain_greedy(MODEL, request, 60).tolist()


def test_what_it_cannot_sample_fails_alone():
    plain, shaped = ask("a", [1, 2, 3]), ask("b", [1, 2, 3], sampling=SamplingParams(presence_penalty=1.0))
    ended = serve(requests=[plain, shaped])[2]
    assert ended["a"].tokens.tolist() == plain_greedy(MODEL, plain, 20).tolist()
    assert ended["b"].reason is FinishReason.ERROR and "penalties" in ended["b"].message


# -- the shadow KV -----------------------------------------------------------------------------------------------------


def small_kv():
    kv = ShadowKV(3, 8, 20, "unshifted")
    kv.open_row(1, 1, namespace_salt(""), 0)
    kv.write_table(np.full(4, 1), np.arange(4), np.array([5, 6, 7, 8]))
    tokens = np.array([1, 2, 3])
    kv.target.write(
        kv.window(1, 0, 3), kv.stays[1].repeat(3), np.arange(3), tokens, prefix_hashes(namespace_salt(""), tokens)
    )
    kv.kv_lens[1] = 3
    return kv


def test_what_was_written_is_read_back():
    read = small_kv().read_target(1, 3)
    assert read.tokens.tolist() == [1, 2, 3]


def test_a_wrong_cell_is_noticed_whatever_is_wrong_with_it():
    for column, value in (("positions", 9), ("tokens", 4), ("hashes", 1), ("stays", 77)):
        kv = small_kv()
        getattr(kv.target, column)[6] = value
        with pytest.raises(InvariantViolation):
            kv.read_target(1, 3)
    kv = small_kv()
    with pytest.raises(InvariantViolation):
        kv.read_target(1, 4)  # the last was never written


def test_a_row_writes_its_own_slots_only():
    kv = small_kv()
    with pytest.raises(InvariantViolation, match="RELAY-06"):
        kv.window(1, 3, 2)  # position 4 has no slot
    kv.open_row(2, 1, namespace_salt(""), 0)
    kv.write_table(np.array([2]), np.array([0]), np.array([8]))  # slot 8 is handed to row 2
    with pytest.raises(InvariantViolation, match="RELAY-06"):
        kv.window(1, 3, 1)
    kv.adopted[1] = 2
    with pytest.raises(InvariantViolation, match="ALLOC-06"):
        kv.window(1, 1, 1)
    with pytest.raises(InvariantViolation, match="ALLOC-07"):
        kv.window(1, 7, 4)


def test_an_entry_of_a_computed_position_is_replaced_by_its_equal_only():
    kv = small_kv()
    kv.target.write(np.array([12]), np.array([99]), np.array([0]), np.array([1]), kv.target.hashes[5:6])
    kv.write_table(np.array([1]), np.array([0]), np.array([12]))
    assert kv.read_target(1, 3).tokens.tolist() == [1, 2, 3]
    with pytest.raises(InvariantViolation, match="RADIX-10"):
        kv.write_table(np.array([1]), np.array([1]), np.array([15]))


def test_the_pool_refuses_the_sink_duplicates_and_placeholders():
    kv = small_kv()
    one = np.ones(2, dtype=np.int64)
    for slots in ([0, 3], [4, 4], [4, 20]):
        with pytest.raises(InvariantViolation, match="ACCEPT-16"):
            kv.target.write(np.array(slots), one, one, one, one.astype(np.uint64))
    with pytest.raises(InvariantViolation, match="RELAY-05"):
        kv.target.write(np.array([3, 4]), one, one, -one, one.astype(np.uint64))
