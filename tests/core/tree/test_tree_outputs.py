"""Compaction: every per-node output follows the accepted path, whatever it is called and whatever its shape."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.errors import InvariantViolation
from foredraft.core.kv.moves import apply_moves
from foredraft.core.tree.build import build_chain, build_lookup_tree
from foredraft.core.tree.outputs import NodeOutputs, finalize
from foredraft.core.tree.verify import verify_greedy
from hypothesis import given
from hypothesis import strategies as st


def random_paths(rng, batch_size, nodes, width):
    """Ascending node numbers from the root on, int32 [bs, width], and their number."""
    accept_index = np.full((batch_size, width), -1, np.int32)
    lens = rng.integers(1, min(width, nodes) + 1, batch_size).astype(np.int32)
    for row in range(batch_size):
        path = np.sort(rng.choice(np.arange(1, nodes), lens[row] - 1, replace=False)) if nodes > 1 else []
        accept_index[row, : lens[row]] = np.array([0, *path]) + row * nodes
    return accept_index, lens


@given(seed=st.integers(0, 2**32), batch_size=st.integers(0, 5), nodes=st.integers(1, 9), width=st.integers(1, 9))
def test_every_output_follows_its_node(seed, batch_size, nodes, width):
    rng = np.random.default_rng(seed)
    accept_index, lens = random_paths(rng, batch_size, nodes, width)
    flat = batch_size * nodes
    outputs = NodeOutputs(
        {
            "tokens": rng.integers(0, 99, flat).astype(np.int32),
            "logprobs": rng.random((flat, 3)).astype(np.float32),
            "routed_experts": rng.integers(0, 9, (flat, 2, 2)).astype(np.int16),
            "something_new": rng.random(flat) < 0.5,
            "hidden_states": None,
        },
        next_relay={"trust": rng.random(flat), "text_len": rng.integers(0, 99, (flat, 2))},
        draft_hidden=rng.random((flat, 4)).astype(np.float32),
    )
    compacted = outputs.compact(accept_index, nodes)
    assert list(compacted) == list(outputs) and list(compacted.next_relay) == list(outputs.next_relay)
    assert compacted["hidden_states"] is None
    pairs = [(compacted[name], outputs[name]) for name in outputs if outputs[name] is not None]
    pairs += [(compacted.next_relay[name], outputs.next_relay[name]) for name in outputs.next_relay]
    for after, before in [*pairs, (compacted.draft_hidden, outputs.draft_hidden)]:
        assert after.shape == before.shape and after.dtype == before.dtype
        for row in range(batch_size):
            for j in range(lens[row]):
                assert np.array_equal(after[row * nodes + j], before[accept_index[row, j]])


def test_outputs_count_their_nodes_and_stay_what_they_are():
    outputs = NodeOutputs({"none": None, "hidden": np.zeros((6, 4)), "tokens": np.arange(6)})
    assert outputs.num_nodes == 6 and NodeOutputs({"none": None}).num_nodes is None
    assert NodeOutputs({}, {"trust": np.arange(3)}).num_nodes == 3
    assert NodeOutputs({}, draft_hidden=np.arange(3)).num_nodes == 3
    with pytest.raises(AttributeError):
        outputs.entries = {}
    with pytest.raises(TypeError):
        outputs.entries["hidden"] = None


def test_compaction_refuses_foreign_nodes_and_foreign_strides():
    outputs = NodeOutputs({"x": np.arange(8)})
    with pytest.raises(InvariantViolation, match="row 1 accepts"):
        outputs.compact(np.array([[0, 1], [3, -1]]), 4)
    with pytest.raises(InvariantViolation, match="row 0 accepts"):  # of a later row; and the first wrong one is named
        outputs.compact(np.array([[0, 5], [3, -1]]), 4)
    with pytest.raises(InvariantViolation, match="ACCEPT-18"):
        outputs.compact(np.array([[0, -1], [3, -1]]), 3)
    with pytest.raises(InvariantViolation, match="longer than its tree"):
        NodeOutputs({"x": np.arange(2)}).compact(np.array([[0, 1, 1]]), 2)
    with pytest.raises(InvariantViolation, match="ACCEPT-18"):
        NodeOutputs({"x": np.arange(4), "y": np.arange(5)})
    with pytest.raises(InvariantViolation, match="the relay's trust"):
        NodeOutputs({"x": np.arange(4)}, {"trust": np.arange(5)})
    with pytest.raises(InvariantViolation, match="the draft's hidden states"):
        NodeOutputs({"x": np.arange(4)}, draft_hidden=np.arange(5))


def test_finalize_moves_tokens_kv_and_outputs_together():
    #       0 → 1 → 3          accepted: 0, 2, 4
    #         → 2 → 4
    tree = build_lookup_tree(np.array([9, 9]), [[[1], [2, 5]], [[7, 8]]], np.array([10, 20]), 5)
    targets = np.array([2, 0, 5, 6, 0, 3, 0, 0, 0, 0], np.int32)
    verified = verify_greedy(tree, targets)
    node_slots = np.array([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]], np.int32)
    outputs = NodeOutputs({"tokens": tree.tokens, "hidden_states": None})
    final = finalize(verified, node_slots, outputs)
    assert verified.accept_index[:, :3].tolist() == [[0, 2, 3], [5, -1, -1]]
    assert final.emitted_tokens[:, :4].tolist() == [[2, 5, 6, -1], [3, -1, -1, -1]]
    assert final.bonus_tokens.tolist() == [6, 3]
    assert final.outputs["tokens"][:3].tolist() == [9, 2, 5] and final.outputs["tokens"][5] == 9
    pool = np.arange(30)
    apply_moves(pool, final.moves)
    assert pool[node_slots[0, :3]].tolist() == [11, 13, 14]
    assert pool[node_slots[1, 0]] == 21


def test_an_idle_batch_finalizes_to_nothing():
    tree = build_chain(np.zeros(0, int), np.zeros((0, 3), int), np.zeros(0, int))
    verified = verify_greedy(tree, np.zeros(0, np.int32))
    final = finalize(verified, np.zeros((0, 4), np.int32), NodeOutputs({"tokens": tree.tokens, "hidden_states": None}))
    assert final.emitted_tokens.shape == (0, 4) and final.emitted_tokens.dtype == np.int32
    assert final.bonus_tokens.dtype == np.int32 and final.bonus_tokens.size == 0
    assert final.moves.src.size == 0 and final.outputs["tokens"].size == 0


def test_no_placeholder_becomes_a_root():
    tree = build_chain(np.array([1]), np.array([[2]]), np.array([0]))
    verified = verify_greedy(tree, np.array([-1, 3], np.int32))
    final = finalize(verified, np.array([[1, 2]], np.int32), NodeOutputs({}))
    assert verified.target_failed.tolist() == [True]
    assert final.bonus_tokens.tolist() == verified.bonus_tokens.tolist() == [0]
