"""Look-up drafting against a slow definition; budget, branches and memory."""

from __future__ import annotations

import numpy as np
import pytest
from foretoken.core.algorithm.ngram import MAX_EXAMINED_PER_BRANCH, NgramIndex
from foretoken.core.errors import ConfigError
from foretoken.core.tree.build import build_lookup_tree
from hypothesis import given, settings
from hypothesis import strategies as st


def index_of(tokens, **options):
    index = NgramIndex(**options)
    index.append(tokens)
    return index


def best_continuation(history, length, min_match, max_match):
    """The definition: longest earlier occurrence of a suffix, the most recent among equals, continued periodically."""
    for match in range(min(max_match, len(history) - 1), min_match - 1, -1):
        for end in range(len(history) - 1, match - 1, -1):
            if history[end - match : end] == history[len(history) - match :]:
                text = list(history)
                for _ in range(length):
                    text.append(text[len(text) - (len(history) - end)])
                return text[len(history) :], match
    return [], 0


@settings(max_examples=150, deadline=None)
@given(
    history=st.lists(st.integers(0, 3), max_size=24),
    nodes=st.integers(1, 9),
    min_match=st.integers(1, 3),
    extra=st.integers(0, 4),
)
def test_first_path_equals_the_definition(history, nodes, min_match, extra):
    draft = index_of(history).draft(nodes, min_match, min_match + extra)
    expected, match = best_continuation(history, nodes - 1, min_match, min_match + extra)
    assert [path.tolist() for path in draft.paths] == ([expected] if expected else [])
    assert draft.match_length == (match if expected else 0)


@settings(max_examples=150, deadline=None)
@given(
    history=st.lists(st.integers(0, 2), min_size=2, max_size=40),
    nodes=st.integers(1, 12),
    branches=st.integers(1, 5),
)
def test_branches_share_the_budget_and_the_first_is_the_best(history, nodes, branches):
    index = index_of(history)
    draft = index.draft(nodes, num_branches=branches)
    assert len(draft.paths) <= branches
    trie = {tuple(path[:n].tolist()) for path in draft.paths for n in range(1, len(path) + 1)}
    assert len(trie) <= nodes - 1
    assert len({tuple(path.tolist()) for path in draft.paths}) == len(draft.paths)
    single = index.draft(nodes)
    if single.paths:
        length = len(draft.paths[0])
        assert length >= (nodes - 1) // branches
        assert draft.paths[0].tolist() == single.paths[0][:length].tolist()
    tree = build_lookup_tree(np.array([history[-1]]), [draft.paths], np.array([0]), nodes)
    assert tree.num_nodes[0] == len(trie) + 1


def test_longer_matches_come_first_then_recent_ones():
    history = [1, 2, 3, 50, 9, 3, 60, 2, 3, 70, 2, 3]
    paths = index_of(history).draft(10, num_branches=3).paths
    assert [path[0] for path in paths] == [70, 50, 60]
    assert index_of([7, 1, 8, 7, 1, 9, 1]).draft(2).paths[0].tolist() == [9]
    assert index_of([5, 7, 1, 8, 1, 9, 7, 1]).draft(2).paths[0].tolist() == [8]


def test_common_prefixes_give_their_budget_to_the_best_path():
    history = [1, 4, 5, 6, 0, 1, 4, 5, 7, 0, 1]
    paths = index_of(history).draft(8, num_branches=2).paths
    assert [path.tolist() for path in paths] == [[4, 5, 7, 0, 1, 4], [4, 5, 6]]


def test_repetition_continues_past_the_end_of_the_history():
    assert index_of([1, 2, 3, 1, 2, 3, 1, 2, 3]).draft(8).paths[0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert index_of([4, 4]).draft(5).paths[0].tolist() == [4, 4, 4, 4]


def test_no_match_no_draft():
    for history in ([], [1], [1, 2, 3]):
        assert index_of(history).draft(5).paths == ()
    assert index_of([1, 2, 1]).draft(5, min_match=2).paths == ()
    assert index_of([1, 1]).draft(1).paths == ()


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12), window=st.integers(2, 12))
def test_appending_in_pieces_keeps_the_window(pieces, window):
    index, text = NgramIndex(max_tokens=window), []
    for piece in pieces:
        index.append(np.array(piece, np.int64))
        text += piece
        assert index.tokens.tolist() == text[-window:]
        assert len(index) == min(window, len(text))
        assert index.nbytes <= 4 * max(2 * window, 64)
    fresh = index_of(text[-window:])
    for left, right in zip(index.draft(6, num_branches=2).paths, fresh.draft(6, num_branches=2).paths, strict=True):
        assert np.array_equal(left, right)


def test_memory_is_bounded_by_the_window():
    index = NgramIndex(max_tokens=1000)
    for start in range(0, 37_000, 37):
        index.append(np.arange(start, start + 37))
    assert index.nbytes <= 8000
    assert index.tokens.tolist() == list(range(36_000, 37_000))


def test_the_search_for_branches_is_bounded():
    # Every one of 50,000 occurrences continues alike; looking for a second branch must not look at each of them.
    draft = index_of(np.zeros(50_000, np.int32)).draft(8, num_branches=4)
    assert [path.tolist() for path in draft.paths] == [[0] * 7]
    assert MAX_EXAMINED_PER_BRANCH * 4 < 1000


def test_drafts_survive_later_appends():
    index = index_of([1, 2, 1], max_tokens=4)
    path = index.draft(3).paths[0]
    before = path.copy()
    for _ in range(100):
        index.append([9])
    assert np.array_equal(path, before)


@pytest.mark.parametrize("wrong", [{"num_draft_tokens": 0}, {"min_match": 0}, {"max_match": 0}, {"num_branches": 0}])
def test_refused_arguments_are_named(wrong):
    arguments = {"num_draft_tokens": 4} | wrong
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("max_match", "min_match")):
        index_of([1, 2, 1]).draft(**arguments)
    with pytest.raises(ConfigError, match="max_tokens"):
        NgramIndex(max_tokens=1)
