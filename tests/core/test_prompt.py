"""Prompt: a description that becomes tokens, equal where ids are equal."""

import json

import numpy as np
import pytest
from foredraft.core.errors import InvalidRequest
from foredraft.core.prompt import Prompt, following

PINNED = [570503624, 1708179983, 1371120269, 1535453786, 1577486233]

EVERY_KIND = [
    Prompt.of_tokens([5, 0, 2**31 - 1]),
    Prompt.of_tokens([]),
    Prompt.of_blocks([7, 2**63 - 1], 16, 17),
    Prompt.of_blocks([], 16, 0),
    Prompt.of_segments([(7, 16), (9, 3)]),
    Prompt.of_segments([]),
    Prompt.of_length(12),
]


def test_given_tokens_are_kept_and_copied():
    source = np.array([3, 1, 2], dtype=np.int64)
    prompt = Prompt.of_tokens(source)
    source[0] = 99
    tokens = prompt.materialize()
    assert tokens.tolist() == [3, 1, 2]
    assert tokens.dtype == np.int64
    tokens[:] = 0
    assert prompt.materialize().tolist() == [3, 1, 2]


def test_equal_leading_blocks_are_equal_tokens_and_others_are_not():
    one = Prompt.of_blocks([10, 11, 12], 512, 1200).materialize()
    two = Prompt.of_blocks([10, 11, 13, 14], 512, 2000).materialize()
    assert one.shape == (1200,)
    np.testing.assert_array_equal(one[:1024], two[:1024])
    assert not np.any(one[1024:] == two[1024:1200])


def test_a_partial_last_block_is_a_prefix_of_the_whole_block():
    whole = Prompt.of_blocks([1, 2], 64, 128).materialize()
    np.testing.assert_array_equal(Prompt.of_blocks([1, 2], 64, 70).materialize(), whole[:70])


def test_a_block_is_the_same_tokens_wherever_it_stands_and_whatever_the_block_size():
    at_front = Prompt.of_blocks([5], 64, 64).materialize()
    behind = Prompt.of_blocks([9, 5], 64, 128).materialize()
    np.testing.assert_array_equal(behind[64:], at_front)
    np.testing.assert_array_equal(Prompt.of_blocks([5], 100, 64).materialize(), at_front)


def test_segments_of_block_length_are_blocks():
    blocks = Prompt.of_blocks([4, 5, 6], 32, 70)
    segments = Prompt.of_segments([(4, 32), (5, 32), (6, 6)])
    np.testing.assert_array_equal(segments.materialize(), blocks.materialize())
    assert segments.length == 70


def test_tokens_are_fixed_for_ever():
    """Recorded decision logs name prompts by hash id, so the function behind them may not change."""
    assert Prompt.of_blocks([3, 4], 512, 600).materialize()[[0, 1, 511, 512, 599]].tolist() == PINNED


def test_an_unknown_content_has_no_tokens():
    prompt = Prompt.of_length(9)
    assert prompt.materialize() is None
    assert not prompt.content_is_known
    assert all(other.content_is_known for other in EVERY_KIND[:-1])


@pytest.mark.parametrize("prompt", EVERY_KIND, ids=repr)
def test_json_round_trip(prompt):
    again = Prompt.from_json(json.loads(json.dumps(prompt.to_json())))
    assert again == prompt
    assert hash(again) == hash(prompt)
    tokens = prompt.materialize()
    if tokens is not None:
        np.testing.assert_array_equal(again.materialize(), tokens)
        assert tokens.shape == (prompt.length,)


def test_different_descriptions_are_unequal():
    for i, one in enumerate(EVERY_KIND):
        for j, two in enumerate(EVERY_KIND):
            assert (one == two) == (i == j)
    assert Prompt.of_tokens([1, 2]) != Prompt.of_tokens([1, 3])
    assert Prompt.of_length(1) != "a prompt"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Prompt.of_length(-1), "prompt length -1"),
        (lambda: Prompt.of_tokens([-1]), "-1"),
        (lambda: Prompt.of_tokens([2**31]), "2147483648"),
        (lambda: Prompt.of_tokens([0.5]), "float64"),
        (lambda: Prompt.of_tokens([[1]]), "one dimension"),
        (lambda: Prompt.of_blocks([1, 2], 16, 16), "expected 1 blocks"),
        (lambda: Prompt.of_blocks([1], 16, 17), "expected 2 blocks"),
        (lambda: Prompt.of_blocks([1], 0, 1), "block size 0"),
        (lambda: Prompt.of_blocks([-1], 16, 1), "hash ids -1"),
        (lambda: Prompt.of_blocks([2**63], 16, 1), "hash ids"),
        (lambda: Prompt.of_segments([(1, 0)]), "segment of 0"),
        (lambda: Prompt.from_json({"token": [1]}), "did you mean 'tokens'"),
        (lambda: Prompt.from_json({}), "(none)"),
        (lambda: Prompt.from_json([1]), "list"),
        (lambda: Prompt.from_json({"length": True}), "True"),
        (lambda: Prompt.from_json({"length": 1.5}), "1.5"),
        (lambda: Prompt.from_json({"segments": [[1, 2, 3]]}), "cannot be read"),
    ],
)
def test_bad_descriptions_are_refused_with_the_value(make, words):
    with pytest.raises(InvalidRequest, match=words.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_a_prompt_is_continued_by_its_output():
    blocks, segments = Prompt.of_blocks([7, 8], 16, 20), Prompt.of_segments([(7, 16), (9, 3)])
    assert blocks.continued(20) == blocks and segments.continued(19) == segments
    assert blocks.continued(40) == Prompt.of_blocks([7, 8, following(8)], 16, 40)
    assert segments.continued(40) == Prompt.of_segments([(7, 16), (9, 3), (following(9), 21)])
    for prompt in (blocks, segments):
        long = prompt.continued(70).materialize()
        np.testing.assert_array_equal(long[:45], prompt.continued(45).materialize())
        np.testing.assert_array_equal(long[: prompt.length], prompt.materialize())
    assert following(8) != following(9) and 0 <= following(2**63 - 1) < 2**63
    with pytest.raises(ValueError, match="not known by ids"):
        Prompt.of_length(3).continued(4)
