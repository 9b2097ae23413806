"""The text of a simulated body, which has no model, and its tokenizer where no other is given, which has no vocabulary.

A token is up to four ASCII characters or up to three bytes of UTF-8, and its id is these bytes. So every text has
tokens, about one for four letters of English, and the tokens give the same text back.

    id   bits 0 … 27: four characters of seven bits, the first lowest · bits 28 … 30: how many (1 … 4)
         bits 0 … 23: three bytes, the first lowest                   · bits 28 … 30: 4 + how many (1 … 3)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from ...core.contract.text import ChatEnd
from ...core.draws import Purpose, uniform
from ...core.errors import ConfigError, InvalidRequest
from ...core.prompt import MAX_TOKEN_ID
from ..base.port import TextCodec

_PIECES = re.compile(r" [A-Za-z]{1,3}|[A-Za-z]{1,4}|[0-9]{1,3}|[\x00-\x7f]{1,2}|[^\x00-\x7f]")
# fmt: off
WORDS = [
    "the", "of", "and", "to", "in", "a", "is", "it", "on", "as", "for", "was", "be", "by", "at", "or", "an", "not", "but", "are", "has",
    "had", "its", "we", "if", "so", "one", "two", "can", "may", "all", "new", "out", "our", "way", "use", "now", "how", "see", "up", "no",
    "do", "my",
]
# fmt: on


_WORD = re.compile(r" ?[a-z]{2,}")
NUM_TOP = 20
"""Tokens that have log-probabilities, as a model gives them."""


class FillerTokenizer:
    """Text to tokens and back, without any file. It satisfies `TextCodec`."""

    byte_ids: Mapping[int, int] = MappingProxyType({})
    special_ids: Container[int] = frozenset()
    most_bytes_per_token: int = 4

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return the tokens int64 [n] of `text`. Raises InvalidRequest for half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"is not UTF-8 (at character {error.start + 1})") from None
        pieces = _PIECES.findall(text)
        return np.array([token for piece in pieces for token in _tokens_of(piece)], dtype=np.int64)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens int [n]; ids that no text has are left out."""
        return b"".join(_bytes_of(token) for token in np.asarray(tokens).tolist()).decode("utf-8", errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return _bytes_of(token)

    def text_of(self, token: int) -> str:
        """Return the text of a token inside a text."""
        return self.decode(np.array([token]))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], end: ChatEnd = "answer", tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Return the tokens int64 [n] of a conversation, with tools, up to this end."""
        described = [{"role": "tools", "content": json.dumps(tools)}] if tools else []
        text = "".join(map(_written, (*described, *messages)))
        if end == "continue":
            return self.encode(text.removesuffix("\n"))
        return self.encode(text + ("<assistant>\n" if end == "answer" else ""))


def _written(message: Mapping[str, Any]) -> str:
    calls = "".join(f"{json.dumps(call['function'])}\n" for call in message.get("tool_calls", ()))
    return f"<{message['role']}>\n{message['content']}\n{calls}"


class WordDecoder:
    """Text of words as they come, for `StreamDecoder`: each has a text of its own, and nothing is looked for in it."""

    stop: str | None = None

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def push(self, tokens: Sequence[int]) -> str:
        return "".join([self._texts[token] for token in tokens])

    def finish(self) -> str:
        return ""


class FillerWords:
    """The words that outputs are made of. Each is a token of a tokenizer; `texts` has their texts."""

    def __init__(self, codec: TextCodec, vocab_size: int) -> None:
        """Raise ConfigError for a tokenizer without tokens of words."""
        encoded = {word: codec.encode(f" {word}", add_special_tokens=False).tolist() for word in WORDS}
        self.texts: dict[int, str] = {found[0]: f" {word}" for word, found in encoded.items() if len(found) == 1}
        others = iter(range(vocab_size if len(self.texts) < NUM_TOP else 0))  # of a small vocabulary
        while len(self.texts) < NUM_TOP and (token := next(others, None)) is not None:
            if _WORD.fullmatch(text := codec.text_of(token)):
                self.texts[token] = text
        if not self.texts:
            raise ConfigError.of("--tokenizer", "", "has no tokens of words, which outputs are made of")
        self._tokens = np.array(list(self.texts), dtype=np.int64)
        self.all_edges: np.ndarray = self.edges()

    def edges(self, bias: Sequence[tuple[int, float]] = ()) -> np.ndarray:
        """Return float64 [words − 1], where one word ends and the next begins in [0, 1): all alike but for biases of
        their logits. A token that is no word has probability 0, whatever its bias."""
        logits = np.zeros(len(self._tokens))
        for token, added in bias:
            logits[token == self._tokens] += added
        return np.cumsum(np.exp(logits - np.logaddexp.reduce(logits)))[:-1]

    def draw(self, seed: int, key: int, first: int, count: int, edges: np.ndarray) -> np.ndarray:
        """Return the output tokens first … first + count − 1 of a request, int64 [count]: words that depend on seed,
        key and position alone."""
        at = uniform(seed, Purpose.TOKEN, key, np.arange(first, first + count))
        return self._tokens[np.searchsorted(edges, at, side="right")]

    def outputs(self, count: int) -> dict[str, list[Any]]:
        """Return the log-probability outputs of an executor for `count` tokens. Without a bias all words have the same
        one."""
        logprob, top = -math.log(len(self._tokens)), self._tokens[:NUM_TOP]
        return {
            "logprobs": [logprob] * count,
            "top_logprobs": [np.full(len(top), logprob)] * count,
            "top_logprob_ids": [top] * count,
        }


@lru_cache(maxsize=1 << 16)
def _tokens_of(piece: str) -> tuple[int, ...]:
    data = piece.encode()
    if piece.isascii():
        return (sum(byte << 7 * i for i, byte in enumerate(data)) | len(data) << 28,)
    parts = [data[i : i + 3] for i in range(0, len(data), 3)]
    return tuple(int.from_bytes(part, "little") | (4 + len(part)) << 28 for part in parts)


@lru_cache(maxsize=1 << 16)
def _bytes_of(token: int) -> bytes:
    size = token >> 28
    if not 1 <= size <= 7 or token > MAX_TOKEN_ID:
        return b""
    if size <= 4:
        return bytes(token >> 7 * i & 0x7F for i in range(size))
    return (token & (1 << 8 * (size - 4)) - 1).to_bytes(size - 4, "little")
