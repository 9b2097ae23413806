"""Look-up drafting against a slow definition; budget, branches and memory."""

from __future__ import annotations

import numpy as np
from foredraft.core.algorithm.ngram import MAX_EXAMINED_PER_BRANCH, MAX_MATCH, NgramIndex
from foredraft.core.tree.build import build_lookup_tree
from hypothesis import given
from hypothesis import strategies as st


def index_of(tokens, **options):
    index = NgramIndex(**options)
    index.append(tokens)
    return index


def best_continuation(history, length):
    """The definition: longest earlier occurrence of a suffix, the most recent among equals, continued periodically."""
    for match in range(min(MAX_MATCH, len(history) - 1), 0, -1):
        for end in range(len(history) - 1, match - 1, -1):
            if history[end - match : end] == history[len(history) - match :]:
                text = list(history)
                for _ in range(length):
                    text.append(text[len(text) - (len(history) - end)])
                return text[len(history) :]
    return []


@given(history=st.lists(st.integers(0, 2), max_size=40), nodes=st.integers(1, 9))
def test_first_path_equals_the_definition(history, nodes):
    draft = index_of(history).draft(nodes)
    expected = best_continuation(history, nodes - 1)
    assert [path.tolist() for path in draft] == ([expected] if expected else [])


@given(
    history=st.lists(st.integers(0, 2), min_size=2, max_size=40), nodes=st.integers(1, 12), branches=st.integers(1, 5)
)
def test_branches_share_the_budget_and_the_first_is_the_best(history, nodes, branches):
    index = index_of(history)
    draft = index.draft(nodes, num_branches=branches)
    assert len(draft) <= branches
    trie = {tuple(path[:n].tolist()) for path in draft for n in range(1, len(path) + 1)}
    assert len(trie) <= nodes - 1
    assert len({tuple(path.tolist()) for path in draft}) == len(draft)
    single = index.draft(nodes)
    if single:
        length = len(draft[0])
        assert length >= (nodes - 1) // branches
        assert draft[0].tolist() == single[0][:length].tolist()
    tree = build_lookup_tree(np.array([history[-1]]), [draft], np.array([0]), nodes)
    assert tree.num_nodes[0] == len(trie) + 1


def test_common_prefixes_give_their_budget_to_the_best_path():
    history = [1, 4, 5, 6, 0, 1, 4, 5, 7, 0, 1]
    paths = index_of(history).draft(8, num_branches=2)
    assert [path.tolist() for path in paths] == [[4, 5, 7, 0, 1, 4], [4, 5, 6]]


@given(pieces=st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=12), window=st.integers(2, 12))
def test_appending_in_pieces_keeps_the_window(pieces, window):
    index, text = NgramIndex(max_tokens=window), []
    for piece in pieces:
        index.append(np.array(piece, np.int64))
        text += piece
        assert index.tokens.tolist() == text[-window:]
        assert len(index) == min(window, len(text))
        assert index._buffer.nbytes <= 4 * max(2 * window, 64)
    fresh = index_of(text[-window:])
    for left, right in zip(index.draft(6, num_branches=2), fresh.draft(6, num_branches=2), strict=True):
        assert np.array_equal(left, right)


def test_memory_is_bounded_by_the_window():
    index = NgramIndex(max_tokens=1000)
    for start in range(0, 37_000, 37):
        index.append(np.arange(start, start + 37))
    assert index._buffer.nbytes <= 8000
    assert index.tokens.tolist() == list(range(36_000, 37_000))


def test_the_search_for_branches_is_bounded():
    # Every one of 50,000 occurrences continues alike; looking for a second branch must not look at each of them.
    draft = index_of(np.zeros(50_000, np.int32)).draft(8, num_branches=4)
    assert [path.tolist() for path in draft] == [[0] * 7]
    assert MAX_EXAMINED_PER_BRANCH * 4 < 1000


def test_drafts_survive_later_appends():
    index = index_of([1, 2, 1], max_tokens=4)
    path = index.draft(3)[0]
    before = path.copy()
    for _ in range(100):
        index.append([9])
    assert np.array_equal(path, before)
