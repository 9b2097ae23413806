"""A language model in plain integers: the next token is a hash of all before it.

`reference/language_model.py` is a larger one, with logits, drafts and hidden states; here a token is all that is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MASK = (1 << 64) - 1
_M1, _M2, _M3 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

STOP = 7
"""The token with which the model ends a text; a request without stop tokens goes on behind it."""
FIRST_PROMPT_TOKEN = 1_000
FIRST_OUTPUT_TOKEN = 100_000
GARBAGE = 999_999_937  # what the device answers after a wrong read
NOTHING = -1  # a cell of the pool in which no KV stands


def extend(prefix_hash: int, token: int) -> int:
    mixed = ((prefix_hash ^ (token + 1)) * _M1) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(prefix_hash: int, key: int, model: int) -> int:
    """Return the token after a prefix: the most likely one for key 0, else the one drawn with this key."""
    bits = ((prefix_hash ^ (key * _M3) ^ (model * _M1)) * _M2 & _MASK) >> 24
    return STOP if bits & 7 == 0 else FIRST_OUTPUT_TOKEN + (bits >> 3) % 1_000_003


class Stream:
    """A text that grows: `tokens`, and `hashes[i]` of the first i + 1 of them.
    Rows with equal texts share one; its tokens never change."""

    __slots__ = ("hashes", "key", "model", "tokens")

    def __init__(self, context: Sequence[int], key: int, model: int) -> None:
        self.tokens = list(context)
        self.key = key
        self.model = model
        self.hashes: list[int] = []
        last = _M2
        for token in self.tokens:
            last = extend(last, token)
            self.hashes.append(last)

    def reach(self, length: int) -> None:
        """Go on until there are `length` tokens."""
        tokens, hashes = self.tokens, self.hashes
        while len(tokens) < length:
            token = next_token(hashes[-1], self.key, self.model)
            tokens.append(token)
            hashes.append(extend(hashes[-1], token))


_STREAMS: dict[tuple[tuple[int, ...], int, int], Stream] = {}
_KEPT = 20_000


def stream_of(context: Sequence[int], key: int, model: int) -> Stream:
    """Return the text that follows a context, made once."""
    name = (tuple(context), key, model)
    stream = _STREAMS.get(name)
    if stream is None:
        if len(_STREAMS) >= _KEPT:
            _STREAMS.clear()
        stream = _STREAMS[name] = Stream(context, key, model)
    return stream


STOP_STRINGS: tuple[tuple[str, ...], ...] = ((), ("ab",), ("ca", "dd"), ("Z",), ("bcd", "Ya"))
"""What a request may ask to be stopped by, in the text of its output; none first."""


def text(tokens: Sequence[int]) -> str:
    """Return the text of a sequence of tokens. One token in eight is half of a letter:
    the next one, whatever it is, completes it. Until then it is shown as decoders show half of a character."""
    letters, is_half = [], False
    for token in tokens:
        bits = (int(token) * _M1 & _MASK) >> 57
        if is_half:
            letters.append("YZ"[bits & 1])
            is_half = False
        elif bits & 7 == 0:
            is_half = True
        else:
            letters.append("abcd"[bits >> 3 & 3])
    return "".join(letters) + "\ufffd" * is_half


def prompt_of(stem: int, length: int, variant: int) -> list[int]:
    """Return a prompt: the first tokens of a stem that others share, the last one its own unless `variant` is 0."""
    tokens = list(range(FIRST_PROMPT_TOKEN + 1000 * stem, FIRST_PROMPT_TOKEN + 1000 * stem + length))
    if variant and tokens:
        tokens[-1] += 20_000 * variant
    return tokens


CONFIDENCES = (0.5, 1.0, 0.75, 0.25, 0.5, 0.75, 1.0, 0.0)  # products of them are exact in float32
NO_CONFIDENCES = (math.nan, -0.25, 1.5, math.inf)


def confidence(number: int, position: int, depth: int, may_be_invalid: bool) -> float:
    """Return how sure the draft is of its token at this depth, 0, 1, …, behind a position of a request's text. Where it
    may be invalid, about one in fifty is no probability."""
    bits = (((number * _M1) ^ (position * _M3) ^ (depth * _M2)) * _M3 & _MASK) >> 20
    if may_be_invalid and (bits >> 8) % 50 == 0:
        return NO_CONFIDENCES[bits & 3]
    return CONFIDENCES[bits & 7]


def num_correct(number: int, position: int, steps: int, accept: int) -> int:
    """Return how many drafts of a round are right, 0 … steps:
    each with probability `accept` / 8, independent of the tokens."""
    bits = (((number * _M3) ^ (position * _M2)) * _M1 & _MASK) >> 17
    correct = 0
    while correct < steps and (bits & 7) < accept:
        correct += 1
        bits >>= 3
        if correct == 15:
            bits = (bits + 1) * _M2 & _MASK
    return correct
