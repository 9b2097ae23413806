"""Test the algorithm as Foredraft uses it: by its name, on the reference executor, with its own relay field.

Foredraft finds the name only if the package is installed: `pip install ./examples/plugin_algorithm`.
"""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.adaptive import fixed_controller
from foredraft.core.algorithm.algorithm import AlgorithmShape, Drafter
from foredraft.core.algorithm.host_drafts import HostDrafts
from foredraft.core.algorithm.proposer import ProposalRequest
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.contract.future_map import FutureMap
from foredraft.core.contract.handoff_batch import HandoffBatch
from foredraft.core.contract.request import Request
from foredraft.core.contract.step import RoundShape
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.config import EngineConfig
from foredraft.core.scheduler.engine import Engine
from foredraft.properties.conformance import check
from foredraft.properties.executor.contract import drawn_with
from foredraft.properties.executor.reference import HashDraft, HashLanguageModel, ReferenceExecutor, plain_greedy
from foredraft.properties.executor.reference.adapter import ReferenceAdapter
from foredraft.properties.executor.reference.handoff import HandoffPair
from foredraft.properties.suites import suite_of
from foredraft_suffix.automaton import DraftTree
from foredraft_suffix.drafting import FIRST_TRUST, FORGETTING, MOST_TRUST, SuffixAutomatonDrafting, trust_after

SHAPE = AlgorithmShape(steps=3, topk=2, target_vocab_size=50)


def test_the_entry_point_makes_it_known():
    algorithm = get_algorithm("suffix_automaton")
    assert isinstance(algorithm, SuffixAutomatonDrafting)
    assert (algorithm.name, algorithm.drafter) == ("SUFFIX_AUTOMATON", Drafter.LOOKUP)
    assert [field.name for field in algorithm.relay_fields(SHAPE)] == ["bonus_tokens", "trust"]


# -- trust ------------------------------------------------------------------------------------------------------------


def test_trust_follows_what_was_accepted():
    chain = DraftTree([1, 2, 3], [0, 1, 2], [1, 2, 3], [False, False, False, True])
    after = trust_after(0.5, chain)
    kept = (1 - FORGETTING) * 0.5
    assert after == pytest.approx([kept, kept + FORGETTING / 2, kept + FORGETTING * 2 / 3, kept + FORGETTING])
    assert after.dtype == np.float32
    assert trust_after(0.5, DraftTree([], [], [], [True])).tolist() == [0.5], "nothing drafted, nothing learned"
    trust = 0.5
    for _ in range(50):
        trust = float(trust_after(trust, chain)[3])
    assert trust == pytest.approx(MOST_TRUST)


def test_the_relayed_trust_shapes_the_tree_of_the_round():
    text = np.array([9, 1, 2, 3, 4, 5, 9, 6, 7, 8, 2, 1, 9, 1, 2, 3, 9])
    drafts = HostDrafts(get_algorithm("SUFFIX_AUTOMATON"), SHAPE)
    for row in (1, 2):
        drafts.open_row(row)
        drafts.observe(row, text)
    relayed = {"trust": np.array([0.98, 0.1], np.float32)}
    proposal = drafts.propose(np.array([1, 2]), RoundShape(3, 3, 5), relayed)
    depths = np.zeros((2, 5), int)
    for node in range(1, 5):
        depths[:, node] = depths[[0, 1], proposal.parents[:, node - 1]] + 1
    deepest = depths.max(axis=1)
    assert deepest[0] > deepest[1], "with little trust the tree is wide"
    assert (proposal.next_relay["trust"] != relayed["trust"][:, None]).any()


def test_a_proposal_depends_on_the_text_and_on_what_was_relayed_alone():
    first, again = (get_algorithm("SUFFIX_AUTOMATON").make_proposer(SHAPE) for _ in range(2))
    text = np.array([1, 2, 3, 1, 2, 4, 1, 2])
    first.open_row(1)
    for token in text:
        first.observe(1, np.array([token]))
    again.open_row(1)
    again.observe(1, np.array([7, 7, 7]))
    again.open_row(1)  # after a retraction: the whole text at once
    again.observe(1, text)
    request = ProposalRequest(np.array([1]), 3, 2, 6, {"trust": np.array([0.6], np.float32)})
    one, other = first.propose(request), again.propose(request)
    assert (one.tokens == other.tokens).all() and (one.parents == other.parents).all()
    assert (one.next_relay["trust"] == other.next_relay["trust"]).all()


# -- executors --------------------------------------------------------------------------------------------------------


def test_the_reference_executor_serves_it_as_the_contract_says():
    """As `foredraft check executor reference-executor --algorithm SUFFIX_AUTOMATON` does, with fewer operations."""
    contract = suite_of("executor").drawing(drawn_with("SUFFIX_AUTOMATON"))
    report = check(contract, ReferenceAdapter, budget=1_000)
    assert report.ok, report.text()


# -- prefill and decode on different workers ---------------------------------------------------------------------------


def worker(role, model, overlap):
    engine = Engine(
        EngineConfig(
            num_pages=80,
            page_size=4,
            context_len=96,
            max_running=4,
            chunk_size=8,
            overlap=overlap,
            track_tokens=True,
            role=role,
        ),
        get_algorithm("SUFFIX_AUTOMATON"),
        fixed_controller(3, topk=2, num_draft_tokens=6, depth_limited=False),
    )
    return engine, ReferenceExecutor(engine, HashDraft(model, 0.0))


@pytest.mark.parametrize("overlap", [False, True])
def test_one_engine_prefills_and_another_decodes(overlap):
    model = HashLanguageModel(seed=3, vocab_size=24, regularity=0.8)
    pair = HandoffPair(worker("prefill", model, overlap), worker("decode", model, overlap))
    requests = [Request(f"r{i}", Prompt.of_tokens([(i + 5 * j) % 24 for j in range(1 + 6 * i)]), 20) for i in range(6)]
    for request in requests:
        assert not pair.prefill.submit(request, 0)
    ends = pair.run()
    for request in requests:
        assert ends[request.request_id].tokens.tolist() == plain_greedy(model, request, 20).tolist()
    assert pair.decode.executor.num_correct_drafts > 5
    assert pair.prefill.executor.num_rounds == 0


def handoff(**relayed):
    return HandoffBatch(
        rows=np.array([1, 2], np.int32),
        epochs=np.array([10, 11]),
        request_ids=("a", "b"),
        seq_lens=np.array([5, 6]),
        probabilities=None,
        token_ids=None,
        hidden_states=(None, None),
        relayed=relayed,
    )


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"trust": np.array([0.25, 0.9], np.float32)}, [0.25, 0.9]),
        ({"trust": np.array([np.nan, 7.0], np.float32)}, [FIRST_TRUST, MOST_TRUST]),
        ({}, [FIRST_TRUST, FIRST_TRUST]),
    ],
)
def test_the_decode_side_starts_from_the_trust_that_was_sent(sent, expected):
    algorithm = get_algorithm("SUFFIX_AUTOMATON")
    relay = FutureMap(4, algorithm.relay_fields(SHAPE), debug_poison=True)
    batch = handoff(**sent)
    draft = algorithm.build_disagg_draft_input(batch, np.array([7, 8]), relay)
    lengths, found = relay.resolve(batch.rows, batch.epochs)
    assert lengths.tolist() == [5, 6] and found["bonus_tokens"].tolist() == [7, 8]
    assert found["trust"] == pytest.approx(expected)
    assert draft.relayed["trust"] == pytest.approx(expected)
    assert draft.hidden_states is None and draft.failures == ()
    without = algorithm.build_disagg_draft_input(batch, np.array([7, 8]), None)
    assert without.relayed["trust"] == pytest.approx(expected)


def test_an_empty_batch_is_legal():
    algorithm = get_algorithm("SUFFIX_AUTOMATON")
    relay = FutureMap(4, algorithm.relay_fields(SHAPE), debug_poison=True)
    no_rows = HandoffBatch(
        np.empty(0, np.int32), np.empty(0, np.int64), (), np.empty(0, np.int64), None, None, (), relayed={}
    )
    draft = algorithm.build_disagg_draft_input(no_rows, np.empty(0, np.int64), relay)
    assert len(draft.rows) == 0 and relay.num_unread == 0
