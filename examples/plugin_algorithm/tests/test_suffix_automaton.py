"""Compare the automaton with its definition: it accepts every substring of the text, and nothing else."""

from __future__ import annotations

import itertools

import pytest
from foredraft_suffix.automaton import COUNTED_CONTEXTS, ROOT, SuffixAutomaton


def automaton_of(text, **options):
    automaton = SuffixAutomaton(**options)
    automaton.extend(text)
    return automaton


def longest_repeat(text):
    """The longest suffix that also ends earlier."""
    return max(
        (n for n in range(len(text)) if any(text[e - n : e] == text[len(text) - n :] for e in range(n, len(text)))),
        default=0,
    )


def texts(letters, length):
    return itertools.chain.from_iterable(itertools.product(range(letters), repeat=n) for n in range(length + 1))


@pytest.mark.parametrize(("letters", "length"), [(2, 9), (3, 6)])
def test_the_match_is_the_longest_suffix_that_occurred_before(letters, length):
    for text in texts(letters, length):
        automaton = automaton_of(text)
        assert automaton.match_length == longest_repeat(text), text
        assert automaton.num_states <= max(2 * len(text), 1)


def test_followers_of_the_match_are_what_followed_it_with_their_counts():
    for text in texts(2, 9):
        automaton = automaton_of(text)
        n = longest_repeat(text)
        if not 0 < n <= COUNTED_CONTEXTS:
            continue
        suffix, counts = text[len(text) - n :], {}
        for end in range(n, len(text)):
            if text[end - n : end] == suffix:
                counts[text[end]] = counts.get(text[end], 0) + 1
        found = {token: count for count, token, _ in automaton.followers(automaton._context)}
        assert found == counts, text


def walk(tree):
    """(path of tokens, depth) of every drafted node."""
    paths = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_drafts_are_what_followed_the_match():
    tree = automaton_of([1, 2, 3, 4, 1, 5, 6, 1, 2]).draft(num_drafts=3, branches=1, trust=0.9)
    assert walk(tree) == [(3,), (3, 4), (3, 4, 1)]
    for text in texts(2, 8):
        for path in walk(automaton_of(text).draft(4, 2, 0.7)):
            n = longest_repeat(text)
            suffix = text[len(text) - n :] + path[:1]
            assert any(text[i : i + n + 1] == suffix for i in range(len(text))), (text, path)


def test_a_tree_is_closed_ordered_and_no_larger_than_asked():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]
    for trust in (0.1, 0.5, 0.98):
        for drafts, branches in itertools.product((0, 1, 5, 12), (1, 2, 3)):
            tree = automaton_of(text).draft(drafts, branches, trust)
            assert len(tree.tokens) == len(tree.parents) == len(tree.depths) == len(tree.is_leaf) - 1 <= drafts
            assert all(parent <= node for node, parent in enumerate(tree.parents))
            assert len(set(walk(tree))) == len(tree.tokens), "no path twice"
            children = [tree.parents.count(node) for node in range(len(tree.is_leaf))]
            assert max(children, default=0) <= branches
            assert [count == 0 for count in children] == tree.is_leaf


def test_trust_makes_trees_deep_and_distrust_makes_them_wide():
    text = [9, 1, 2, 3, 4, 5, 9, 6, 7, 8, 2, 1, 9, 1, 2, 3, 9]
    deep = automaton_of(text).draft(4, 3, trust=0.98)
    wide = automaton_of(text).draft(4, 3, trust=0.1)
    assert max(deep.depths) > max(wide.depths)
    assert wide.parents.count(0) == 2


def test_a_text_that_repeats_goes_on_with_itself():
    tree = automaton_of([1, 2, 3, 1, 2, 3]).draft(7, 1, 0.9)
    assert tree.tokens == [1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_where_nothing_was_said_before():
    assert automaton_of([]).draft(4, 2, 0.9).tokens == []
    assert automaton_of([1, 2, 3]).draft(4, 2, 0.9).tokens == []
    assert automaton_of([1, 2, 1]).draft(4, 2, 0.9, min_match=2).tokens == []


def test_the_window_bounds_memory_and_how_text_is_cut_does_not_matter():
    text = [(i * i + i // 7) % 11 for i in range(500)]
    whole = automaton_of(text, window=40)
    assert 40 <= len(whole.text) < 80 and whole.text == text[-len(whole.text) :]
    assert whole.num_states <= 160
    pieces = SuffixAutomaton(window=40)
    for start in range(0, 500, 7):
        pieces.extend(text[start : start + 7])
    assert pieces.draft(9, 2, 0.8) == whole.draft(9, 2, 0.8)
    assert pieces.draft(9, 2, 0.8).tokens
    assert whole._context > ROOT
