"""The draft input that a decode worker rebuilds from a handoff, and what it leaves in the FutureMap."""

import numpy as np
import pytest
from foredraft.core.algorithm.algorithm import AlgorithmShape
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.future_map import FutureMap
from foredraft.core.contract.handoff_batch import HandoffBatch
from foredraft.core.contract.hidden import CaptureHiddenMode, MissingHiddenState
from foredraft.core.errors import InvariantViolation

HIDDEN = 4


def handoff(algorithm, n, missing=(), topk=2, steps=3):
    width = topk * steps if algorithm.name == "MULTI_LAYER_EAGLE" else topk
    has_topk = algorithm.name not in ("NONE", "NGRAM")
    states = tuple(
        None if i in missing or not algorithm.needs_hidden_states else np.full(HIDDEN, i + 0.5) for i in range(n)
    )
    return HandoffBatch(
        rows=np.arange(1, n + 1, dtype=np.int32),
        epochs=np.arange(10, 10 + n),
        request_ids=tuple(f"r{i}" for i in range(n)),
        seq_lens=np.arange(5, 5 + n),
        probabilities=np.linspace(0.1, 0.9, n * width).reshape(n, width) if has_topk else None,
        token_ids=np.arange(n * width).reshape(n, width) if has_topk else None,
        hidden_states=states,
        hidden_size=HIDDEN,
    )


def relay_of(algorithm, topk=2, steps=3):
    return FutureMap(8, algorithm.relay_fields(AlgorithmShape(steps, topk, HIDDEN)), debug_poison=True)


@pytest.mark.parametrize("name", ["STANDALONE", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE"])
def test_the_input_has_the_documented_fields_and_is_what_the_first_round_resolves(name):
    algorithm = get_algorithm(name)
    batch, relay = handoff(algorithm, 3), relay_of(algorithm)
    tokens = np.array([7, 8, 9], dtype=np.int32)
    draft = algorithm.build_disagg_draft_input(batch, tokens, relay)
    width = 6 if name == "MULTI_LAYER_EAGLE" else 2
    assert draft.probabilities.dtype == np.float32 and draft.probabilities.shape == (3, width)
    assert draft.token_ids.dtype == np.int64 and draft.token_ids.shape == (3, width)
    assert draft.bonus_tokens.tolist() == [7, 8, 9]
    assert draft.failures == ()
    if algorithm.needs_hidden_states:
        assert draft.capture is CaptureHiddenMode.LAST
        assert draft.hidden_states.shape == (3, HIDDEN) and draft.hidden_states.dtype == np.float32
    else:
        assert draft.capture is CaptureHiddenMode.NULL and draft.hidden_states is None

    lengths, found = relay.resolve(batch.rows, batch.epochs)
    assert lengths.tolist() == [5, 6, 7]
    assert found["bonus_tokens"].tolist() == [7, 8, 9]
    assert (found["topk_ids"] == draft.token_ids).all()
    assert (found["topk_probabilities"] == draft.probabilities).all()
    assert ("hidden_states" in found) == algorithm.needs_hidden_states
    if algorithm.needs_hidden_states:
        assert (found["hidden_states"] == draft.hidden_states).all()
    assert relay.num_unread == 0


@pytest.mark.parametrize("name", ["NONE", "NGRAM"])
def test_by_default_only_the_bonus_token_is_stashed(name):
    algorithm = get_algorithm(name)
    batch, relay = handoff(algorithm, 2), relay_of(algorithm)
    assert algorithm.build_disagg_draft_input(batch, np.array([3, 4]), relay) is None
    lengths, found = relay.resolve(batch.rows, batch.epochs)
    assert lengths.tolist() == [5, 6]
    assert {key: value.tolist() for key, value in found.items()} == {"bonus_tokens": [3, 4]}


@pytest.mark.parametrize("name", ["NONE", "STANDALONE", "EAGLE", "MULTI_LAYER_EAGLE", "NGRAM"])
def test_without_a_relay_nothing_is_published_and_an_empty_batch_is_legal(name):
    algorithm = get_algorithm(name)
    relay = relay_of(algorithm)
    empty = algorithm.build_disagg_draft_input(handoff(algorithm, 0), np.empty(0, np.int64), relay)
    assert relay.num_unread == 0
    if empty is not None:
        assert len(empty.rows) == len(empty.bonus_tokens) == 0
        assert (empty.hidden_states is None) != algorithm.needs_hidden_states
    synchronous = algorithm.build_disagg_draft_input(handoff(algorithm, 2), np.array([1, 2]), None)
    assert (synchronous is None) == (name in ("NONE", "NGRAM"))


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE"])
@pytest.mark.parametrize("missing", [(1,), (0, 2), (0, 1, 2)])
def test_a_missing_hidden_state_fails_its_request_alone(name, missing):
    algorithm = get_algorithm(name)
    batch, relay = handoff(algorithm, 3, missing), relay_of(algorithm)
    draft = algorithm.build_disagg_draft_input(batch, np.array([7, 8, 9]), relay)
    served = [i for i in range(3) if i not in missing]
    assert [row for row, _ in draft.failures] == [i + 1 for i in missing]
    for (_, error), i in zip(draft.failures, missing, strict=True):
        assert isinstance(error, MissingHiddenState)
        assert f"'r{i}'" in str(error) and name in str(error)
    assert draft.rows.tolist() == [i + 1 for i in served]
    assert draft.hidden_states[:, 0].tolist() == [i + 0.5 for i in served]
    assert draft.token_ids.tolist() == batch.token_ids[served].tolist()
    assert relay.num_unread == len(served)
    if served:
        lengths, found = relay.resolve(batch.rows[served], batch.epochs[served])
        assert lengths.tolist() == [5 + i for i in served]
        assert found["bonus_tokens"].tolist() == [7 + i for i in served]
    with pytest.raises(InvariantViolation, match="RELAY-02"):
        relay.resolve(batch.rows[list(missing)], batch.epochs[list(missing)])
