"""Suffix decoding: what is found equals a plain reading of the text, in bounded time and memory."""

from __future__ import annotations

import numpy as np
import pytest
from foredraft.core.algorithm.algorithm import AlgorithmShape
from foredraft.core.algorithm.host_drafts import HostDrafts
from foredraft.core.algorithm.registry import get_algorithm
from foredraft.core.algorithm.suffix import MAX_EXAMINED, PastOutputs, SuffixDrafts, SuffixIndex, SuffixLimits
from foredraft.core.contract.step import RoundShape

LIMITS = SuffixLimits(max_match=6, max_requests=4, max_tokens=64)


def plain_reading(text: list[int], suffix: list[int], limits: SuffixLimits, num_drafts: int) -> tuple[list[int], float]:
    """Return the drafts and how many of them are right on average, by looking at every place of the text."""
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(min(len(suffix), limits.max_match), 1, -1):
        ends = [
            end
            for end in range(len(text) - 2, length - 2, -1)
            if text[end - length + 1 : end + 1] == suffix[-length:]
        ]  # fmt: skip
        paths = [[text[end + 1 + i % (len(text) - 1 - end)] for i in range(min(num_drafts, length))] for end in ends]
        if not paths:
            continue
        drafts, sure = [], 0.0
        for depth in range(len(paths[0])):
            alive = [path for path in paths if path[:depth] == drafts]
            tokens = [path[depth] for path in alive]
            token = max(dict.fromkeys(tokens), key=tokens.count)
            share = tokens.count(token) / len(paths)
            if token < 0 or share < limits.least_probability:
                break
            drafts.append(token)
            sure += share
        if sure > best[1]:
            best = drafts, sure
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_best_continuation_is_that_of_a_plain_reading(seed):
    random = np.random.default_rng(seed)
    text = random.integers(0, 3 + seed % 4, MAX_EXAMINED).tolist()
    index, begin = SuffixIndex(1000), 0
    while begin < len(text):  # in pieces: one token at a time and many at once
        size = int(random.integers(1, 20))
        index.append(np.array(text[begin : begin + size]))
        begin += size
    suffix = text if seed % 2 else random.integers(0, 3, 8).tolist()
    found = index.find(np.array(suffix[-6:]), LIMITS, 5)
    drafts, expected = plain_reading(text, suffix[-6:], LIMITS, 5)
    assert found.expected == pytest.approx(expected) and len(found.tokens) == len(drafts)
    assert found.tokens == drafts


def test_a_suffix_drafts_as_many_tokens_as_it_has_and_none_that_are_too_unlikely():
    index = SuffixIndex(100)
    index.append(np.array([1, 2, 7, 8, 9, 5, 5, 1, 2]))
    assert index.find(np.array([9, 1, 2]), LIMITS, 5).tokens == [7, 8]
    assert index.find(np.array([9, 1, 2]), SuffixLimits(drafts_per_match=2.0), 5).tokens == [7, 8, 9, 5]
    index.append(np.array([3, 1, 2, 4, 1, 2]))
    assert index.find(np.array([0, 1, 2]), SuffixLimits(least_probability=0.5), 5).tokens == []
    assert len(index.find(np.array([0, 1, 2]), LIMITS, 5).tokens) == 2


def test_the_oldest_half_of_a_long_text_goes():
    index = SuffixIndex(50)
    for number in range(200):
        index.append(np.array([number, number + 1000]))
    assert len(index) <= 100
    assert index.find(np.array([198, 1198]), SuffixLimits(), 3).tokens == [199, 1199]
    assert not index.find(np.array([3, 1003]), SuffixLimits(), 3).tokens


def test_past_outputs_are_bounded_and_end_where_a_request_ended():
    past = PastOutputs(LIMITS)
    for number in range(20):
        past.add([number, number + 100, 7, 8])
        assert len(past) < 2 * LIMITS.max_requests
    assert past.find(np.array([19, 119]), 6).tokens == [7, 8]  # and nothing of the next request
    assert past.find(np.array([18, 118]), 6).tokens == [7, 8]
    assert not past.find(np.array([1, 101]), 6).tokens
    none = PastOutputs(SuffixLimits(max_requests=0))
    none.add([1, 2, 3, 4])
    assert not none.find(np.array([1, 2]), 6).tokens


def test_outputs_of_rows_that_are_over_are_found_and_prompts_of_others_are_not():
    algorithm = get_algorithm("SUFFIX")
    drafts = HostDrafts(algorithm, AlgorithmShape(steps=4, target_vocab_size=2000))
    shape, row = RoundShape.chain(4), np.array([3])

    def propose(prompt, *output):
        drafts.open_row(3)
        for tokens in (prompt, *output):
            drafts.observe(3, np.array(tokens))
            proposal = drafts.propose(row, shape, {})
        return proposal.tokens[0][proposal.parents[0] >= 0].tolist()

    propose([50, 51, 52, 53, 54], [10], [11, 12, 13, 14])
    assert propose([90, 11, 12]) == [13, 14]
    assert propose([90, 51, 52]) == []


def test_a_search_looks_at_a_bounded_number_of_places():
    """In a text of one token every place matches; what is read of it does not grow with the text."""
    index = SuffixIndex(1 << 16)
    index.append(np.zeros(50_000, np.int64))
    assert len(index._ends_of(0, 0)) == MAX_EXAMINED - 1  # the last place is followed by nothing
    assert index.find(np.zeros(6, np.int64), SuffixLimits(), 4).tokens == [0] * 4


def test_a_proposer_keeps_a_text_in_bounded_memory():
    proposer = SuffixDrafts(SuffixLimits(max_tokens=100))
    proposer.open_row(1)
    for _ in range(50):
        proposer.observe(1, np.arange(17))
    assert len(proposer._texts[1]) <= 200 and len(proposer._texts[1]._tokens) <= 512
