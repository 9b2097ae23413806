"""Drafts from the host: what a proposer is asked, what of its answers is used, rejected, or a named error."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.algorithm.algorithm import AlgorithmShape
from foredraft.core.algorithm.builtin import LookupDrafting, Ngram
from foredraft.core.algorithm.host_drafts import HostDrafts, PluginError
from foredraft.core.algorithm.ngram import NgramIndex
from foredraft.core.algorithm.proposer import Proposal
from foredraft.core.contract.future_map import RelayField
from foredraft.core.contract.step import RoundShape
from foredraft.core.errors import ForedraftError
from foredraft.core.tree.build import build_lookup_tree, build_proposed_tree
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 10
SHAPE = AlgorithmShape(3, 2, target_vocab_size=VOCAB)
ROWS = np.array([4, 2])


class Scripted(LookupDrafting):
    """Answers what a test says; `calls` is what it was asked."""

    name = "SCRIPTED"

    def __init__(self, answer=None, fields=(), first=None):
        self.answer, self.fields, self.first, self.calls = answer, fields, first, []

    def relay_fields(self, shape):
        return (*super().relay_fields(shape), *self.fields)

    def make_proposer(self, shape):
        return self

    def open_row(self, row):
        self.calls.append(("open", row))

    def observe(self, row, tokens):
        self.calls.append(("observe", row, tokens.dtype, tokens.tolist()))

    def first_relay(self, rows):
        return self.first

    def propose(self, request):
        self.calls.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ask(answer, nodes=4, fields=(), relayed=None):
    drafts = HostDrafts(Scripted(answer, fields), SHAPE)
    return drafts.propose(ROWS, RoundShape(3, 2, nodes), relayed or {})


def proposal(tokens, parents, **relay):
    return Proposal(np.array(tokens), np.array(parents), relay)


def test_a_request_says_what_the_round_is():
    scripted = Scripted(proposal([[1], [1]], [[0], [0]]))
    drafts = HostDrafts(scripted, SHAPE)
    drafts.open_row(4)
    drafts.observe(4, np.array([7, 8], np.int32))
    drafts.observe(4, np.array([], np.int32))
    assert scripted.calls == [("open", 4), ("observe", 4, np.dtype(np.int64), [7, 8])]
    assert drafts.roots(np.array([4])).tolist() == [8]
    drafts.propose(ROWS, RoundShape(1, 2, 2), {"bonus_tokens": np.zeros(2)})
    request = scripted.calls[-1]
    assert (request.rows.tolist(), request.steps, request.topk, request.num_draft_tokens) == ([4, 2], 1, 2, 2)
    assert request.relayed == {}, "the bonus token is not a field of the algorithm"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 + 1, -(2**40)])
def test_ids_out_of_the_vocabulary_are_rejected_with_what_follows_them(token):
    used = ask(proposal([[1, token, 3], [4, 5, 6]], [[0, 1, 2], [0, 1, 2]]))
    tree = build_proposed_tree(np.array([0, 0]), used.tokens, used.parents, np.array([5, 5]))
    assert tree.num_nodes.tolist() == [2, 4]
    assert tree.tokens.tolist() == [0, 1, 0, 0, 0, 4, 5, 6]
    assert tree.parents.tolist() == [[-1, 0, -1, -1], [-1, 0, 1, 2]]
    assert (tree.positions - 5).tolist() == [0, 1, 0, 0, 0, 1, 2, 3]


def test_a_repeated_sibling_is_rejected():
    """A token that stands twice below one node would be two chances for one token."""
    used = ask(proposal([[1, 1, 2], [1, 1, 1]], [[0, 0, 2], [0, 1, 1]]))
    assert used.parents.tolist() == [[0, -1, 2], [0, 1, -1]]
    tree = build_proposed_tree(np.array([0, 0]), used.tokens, used.parents, np.array([0, 0]))
    assert tree.num_nodes.tolist() == [2, 3]


FIELD = RelayField("trust", (2,), "float32")
COUNT = RelayField("count", (), "int64")
CHAIN = ([[1, 2, 3], [1, 2, 3]], [[0, 1, 2], [0, 1, 2]])
VALUES = {"trust": np.zeros((2, 4, 2), np.float32), "count": np.zeros((2, 4), np.int64)}


def test_own_fields_reach_the_proposer_and_come_back():
    scripted = Scripted(proposal(*CHAIN, **VALUES), (FIELD, COUNT))
    scripted.first = {"trust": np.ones((2, 2)), "count": np.arange(2)}
    drafts = HostDrafts(scripted, SHAPE)
    assert [field.name for field in drafts.own_fields] == ["trust", "count"]
    assert drafts.first_relay(ROWS)["trust"].dtype == np.float32
    relayed = {"bonus_tokens": np.zeros(2), "trust": np.full((2, 2), 0.5), "count": np.array([3, 4])}
    used = drafts.propose(ROWS, RoundShape(3, 2, 4), relayed)
    assert sorted(scripted.calls[-1].relayed) == ["count", "trust"]
    assert sorted(used.next_relay) == ["count", "trust"]
    drafts.propose(ROWS, RoundShape(0, 2, 4), relayed)
    assert len(scripted.calls) == 2, "a round that drafts nothing still says what the next one starts from"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "propose gave NoneType"),
        ([1, 2], "propose gave list"),
        (KeyError("row"), "propose raised KeyError: 'row'"),
        (PluginError("of its own"), "propose of its own"),
        (proposal([1, 2, 3], [0, 1, 2]), r"gave tokens int64\[3\], expected integers \[2, 3\]"),
        (proposal([[1, 2], [1, 2]], [[0, 1], [0, 1]]), r"tokens int64\[2, 2\]"),
        (proposal([[1.0, 2.0, 3.0]] * 2, CHAIN[1]), r"tokens float64\[2, 3\]"),
        (Proposal(CHAIN[0], np.array(CHAIN[1])), "tokens as list"),
        (proposal(CHAIN[0], [[0, 2, 1], [0, 1, 2]]), "number of an earlier node"),
        (proposal(CHAIN[0], [[1, 1, 2], [0, 1, 2]]), "number of an earlier node"),
        (proposal(CHAIN[0], [[0, 1, -2], [0, 1, 2]]), "number of an earlier node"),
        (proposal(*CHAIN, trust=1), r"gave values to relay for \['trust'\], expected \[\]"),
    ],
)
def test_nonsense_is_an_error_that_names_algorithm_and_method(answer, words):
    with pytest.raises(PluginError, match=f"algorithm SCRIPTED: .*{words}") as error:
        ask(answer)
    assert isinstance(error.value, ForedraftError), "the command line prints it and exits with code 2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": None}, "gave count as NoneType"),
        ({"count": np.zeros((2, 4))}, r"gave count float64\[2, 4\] to relay, expected int64 \[2, 4\]"),
        ({"count": np.zeros((2, 3), np.int64)}, r"count int64\[2, 3\]"),
        ({"count": np.full((2, 4), -1)}, "a negative count"),
        ({"trust": np.zeros((2, 4))}, r"trust float64\[2, 4\] to relay, expected float32 \[2, 4, 2\]"),
        ({"more": np.zeros(2)}, "values to relay for"),
    ],
)
def test_values_to_relay_have_the_declared_form(change, words):
    relayed = {"trust": np.zeros((2, 2)), "count": np.zeros(2)}
    with pytest.raises(PluginError, match=words):
        ask(proposal(*CHAIN, **(VALUES | change)), fields=(FIELD, COUNT), relayed=relayed)


def test_a_proposer_is_there_and_its_other_methods_may_fail_too():
    class Incomplete(Scripted):
        def make_proposer(self, shape):
            return None

    with pytest.raises(PluginError, match="make_proposer gave None"):
        HostDrafts(Incomplete(), SHAPE)

    class Tired(Scripted):
        def observe(self, row, tokens):
            raise MemoryError("no more")

    with pytest.raises(PluginError, match="observe raised MemoryError: no more"):
        HostDrafts(Tired(), SHAPE).observe(1, np.array([1]))
    with pytest.raises(PluginError, match=r"first_relay gave values to relay for \['trust'\], expected \[\]"):
        HostDrafts(Scripted(first={"trust": np.zeros(2)}), SHAPE).first_relay(ROWS)


# -- trees -------------------------------------------------------------------------------------------------------------


@given(
    paths=st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=5), min_size=1, max_size=3),
    nodes=st.integers(1, 9),
)
def test_a_trie_of_paths_has_each_prefix_once_as_far_as_there_is_room(paths, nodes):
    proposed = Proposal.of_paths(paths, nodes)
    tree = build_proposed_tree(np.zeros(len(paths), np.int64), proposed.tokens, proposed.parents, np.zeros(len(paths)))
    for row, row_paths in enumerate(paths):
        wanted: dict[tuple[int, ...], None] = {}
        for path in row_paths:
            for depth in range(1, len(path) + 1):
                if len(wanted) < nodes - 1 or tuple(path[:depth]) in wanted:
                    wanted[tuple(path[:depth])] = None
                else:
                    break
        found, prefixes = [], [()]
        for node in range(1, nodes):
            parent = int(tree.parents[row, node])
            prefixes.append((*prefixes[parent], int(tree.tokens[row * nodes + node])) if parent >= 0 else ())
            if parent >= 0:
                found.append(prefixes[node])
        assert found == list(wanted)


def test_ngram_is_one_user_of_the_port():
    drafts = HostDrafts(Ngram(), SHAPE)
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    index = NgramIndex()
    index.append(text)
    for row in ROWS.tolist():
        drafts.open_row(row)
        drafts.observe(row, np.array(text[:3]))
        drafts.observe(row, np.array(text[3:]))
    used = drafts.propose(ROWS, RoundShape(3, 2, 5), {})
    paths = index.draft(5, num_branches=2)
    assert len(paths) == 2
    expected = build_lookup_tree(np.array([2, 2]), [list(paths)] * 2, np.array([8, 8]), 5)
    found = build_proposed_tree(drafts.roots(ROWS), used.tokens, used.parents, np.array([8, 8]))
    assert (found.tokens == expected.tokens).all() and (found.parents == expected.parents).all()
