"""Text from tokens as they come, and the stop strings in it.

The work per token does not depend on how much text there is, on how much of it is held back, or on the number and the
length of the stop strings: a window of tokens is decoded, and an automaton reads each character once.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are no UTF-8, also for a character of which only the first bytes are there."""
_MOST_CONTEXT = 64
"""Tokens of a prompt in which text is looked for, so that a prompt without text costs no more than another one."""
_MOST_UNSETTLED = 16
"""Tokens behind the last one whose text is settled. More of them than a character has bytes cannot be one character."""
_RESUMED = 8
"""Tokens that decoding begins before the place where it goes on: at most 3 of them are behind a beginning inside a
character."""


ChatEnd = Literal["answer", "messages", "continue"]
"""Where the prompt of a conversation ends: behind the beginning of an answer, behind the last message, or inside it,
behind its text."""


class PromptScores(NamedTuple):
    """What a model thinks of a prompt of n tokens.

    logprobs: of its tokens from the second one on, n − 1
    tops:     the most likely tokens at each of these places with their log-probabilities, the likeliest first
    """

    logprobs: Sequence[float]
    tops: Sequence[Sequence[tuple[int, float]]]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> PromptScores:
        """Return what a process has sent as a list."""
        logprobs, tops = value
        return cls(logprobs, [[(int(token), logprob) for token, logprob in pairs] for pairs in tops])


class TextDecoder(Protocol):
    """Turns tokens into text; the engine needs one only when a request has stop strings.

    `byte_ids`: the tokens that stand for single bytes, which are characters only as a whole run, with their bytes.
    `special_ids`: the tokens that `decode` leaves out, ids without a token among them.
    """

    byte_ids: Mapping[int, int] = MappingProxyType({})
    special_ids: Container[int] = frozenset()

    def decode(self, tokens: np.ndarray) -> str: ...


class NoTextDecoder(TextDecoder):
    """The text decoder of a replayed engine.

    It never finds a stop string, because the results say where one ended a request.
    """

    def decode(self, tokens: np.ndarray) -> str:
        return ""


def context_of(decoder: TextDecoder, prompt: Sequence[int] | np.ndarray) -> list[int]:
    """Return the tokens at the end of a prompt behind which its output is decoded: as few as have text that is whole,
    none if none of the last tokens have. Decoders may strip a space from the first token of a text, and an output is no
    beginning."""
    length = 1
    while True:
        tokens = prompt[-length:]
        text = decoder.decode(np.asarray(tokens, dtype=np.int64))
        if text and not text.endswith(REPLACEMENT):
            return [int(token) for token in tokens]
        if length >= min(len(prompt), _MOST_CONTEXT):
            return []
        length *= 2


class StopStrings:
    """Finds strings in a text that comes in pieces (Aho and Corasick, 1975). A state is the longest end of the text
    that is the beginning of a string; state 0 is the empty one."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.depths: list[int] = [0]  # characters of each state
        self.longest: list[int] = [0]  # characters of the longest string that ends with the state; 0: none does
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]  # the state's longest end that is another state
        for text in texts:
            state = 0
            for letter in text:
                state = self._next[state].get(letter) or self._add(state, letter)
            self.longest[state] = len(text)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            shorter = self._shorter[state]
            self.longest[state] = self.longest[state] or self.longest[shorter]
            for letter, longer in self._next[state].items():
                self._shorter[longer] = self.step(shorter, letter)
                waiting.append(longer)

    def _add(self, state: int, letter: str) -> int:
        self._next[state][letter] = added = len(self._next)
        self._next.append({})
        self._shorter.append(0)
        self.depths.append(self.depths[state] + 1)
        self.longest.append(0)
        return added

    def step(self, state: int, letter: str) -> int:
        """Return the state behind the next character."""
        while state and letter not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(letter, 0)


_stop_strings = lru_cache(maxsize=8)(StopStrings)


class _HeldText:
    """Text that is certain, and is shown as far as it is no beginning of a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.stop: str | None = None
        self.strings: StopStrings | None = _stop_strings(tuple(stop_strings)) if stop_strings else None
        self.state: int = 0
        self._parts: deque[str] = deque()
        self._length = 0

    def add(self, text: str, counts: bool) -> None:
        """Add text. The text ends before the first stop string that is complete, if one `counts`."""
        begin = self._length
        self._parts.append(text)
        self._length += len(text)
        if self.strings is None:
            return
        state, longest, first = self.state, self.strings.longest, -1
        for place, letter in enumerate(text, begin + 1):
            state = self.strings.step(state, letter)
            if counts and longest[state] and (first < 0 or place - longest[state] < first):
                first, length = place - longest[state], longest[state]
        self.state = state
        if first >= 0:
            whole = "".join(self._parts)
            self.stop = whole[first : first + length]
            self._parts, self._length = deque([whole[:first]]), first

    def take(self, final: bool) -> str:
        """Return the text that can be shown."""
        held = 0 if final or self.strings is None or self.stop is not None else self.strings.depths[self.state]
        shown = self._length - held
        self._length = held
        parts = []
        while shown > 0:
            part = self._parts.popleft()
            if len(part) > shown:
                self._parts.appendleft(part[shown:])
                part = part[:shown]
            shown -= len(part)
            parts.append(part)
        return "".join(parts)


class _ByteRun:
    """Byte tokens at the end of an output: their characters, as far as the bytes so far are valid."""

    def __init__(self, state: int) -> None:
        self.state = state  # of the stop strings, behind the characters
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_valid = True

    def completes(self, strings: StopStrings, data: bytes) -> bool:
        """Read the next bytes. Returns whether a stop string is complete with them."""
        found = False
        if self._is_valid:
            try:
                for letter in self._decoder.decode(data):
                    self.state = strings.step(self.state, letter)
                    found = found or strings.longest[self.state] > 0
            except UnicodeDecodeError:
                self._is_valid = False
        return found


class StreamDecoder:
    """Text from tokens as they come. Shown text never changes, and all of it together equals `decode` of the `context`
    and all tokens, without the text of the context.

    Held back are bytes of an unfinished character and, with `stop_strings`, text that may be the beginning of one. The
    text ends before the first stop string (`stop` is which) that is complete behind more than `min_tokens` tokens.

    ```
    tokens   [0, _anchor) shown, forgotten · [_anchor, _settled) shown, context · [_settled, …) may still change their
             text
    ```
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stop_strings: Sequence[str] = (),
        context: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens: int = 0  # that were pushed
        self._decoder = decoder
        self._min_tokens = min_tokens if stop_strings else 0
        self._held = _HeldText(stop_strings)
        self._tokens: deque[int] = deque(context)  # without those before `_anchor`
        # where decoding begins; a decoder may treat its first token in a special way, so context stays in front
        self._settled = len(self._tokens)
        self._num_taken = len(self._text(self._settled))  # characters of these tokens that were taken already
        self._run: list[int] = []  # the bytes of the byte tokens at the end
        self._read_run: _ByteRun | None = None
        self._num_read = 0  # bytes of the run

    @property
    def stop(self) -> str | None:
        """The stop string at which the text has ended."""
        return self._held.stop

    @property
    def has_stop(self) -> bool:
        """Whether a stop string is complete, also in bytes whose characters the next token may change. To be asked
        behind each token."""
        strings = self._held.strings
        if self.stop is not None or strings is None or not self._run:
            return self.stop is not None
        if self._read_run is None:
            self._read_run, self._num_read = _ByteRun(self._held.state), 0
        data, self._num_read = bytes(self._run[self._num_read :]), len(self._run)
        return self._read_run.completes(strings, data) and self._counts

    @property
    def _counts(self) -> bool:
        return self.num_tokens > self._min_tokens

    def push(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Add the next tokens; returns the text that is certain now, perhaps none."""
        shown = []
        while self.stop is None and self.num_tokens < self._min_tokens and len(tokens) > 1:
            shown.append(self._push(tokens[:1]))
            tokens = tokens[1:]
        shown.append(self._push(tokens))
        return "".join(shown)

    def _push(self, tokens: Sequence[int] | np.ndarray) -> str:
        if self.stop is not None:
            return ""
        self.num_tokens += len(tokens)
        for token in map(int, tokens):
            if token in self._decoder.special_ids:
                continue
            self._tokens.append(token)
            if (byte := self._decoder.byte_ids.get(token)) is not None:
                self._run.append(byte)  # its next byte can change how the whole run is read
            elif self._run:
                self._run, self._read_run = [], None
        end = len(self._tokens) - len(self._run)
        if end > self._settled:
            self._settle(end)
        return self._held.take(final=False)

    def _settle(self, end: int) -> None:
        """Take the text of the tokens before `end`, but for an unfinished character."""
        text = self._text(end)
        unfinished = text.endswith(REPLACEMENT)
        certain = len(text) - unfinished
        if certain > self._num_taken:
            self._held.add(text[self._num_taken : certain], self._counts)
            self._num_taken = certain
            if not unfinished:
                self._begin_at(self._settled, end, 0)
                return
        if end - self._settled > _MOST_UNSETTLED and unfinished:  # bytes that are no character
            self._begin_at(end - _RESUMED, end, 1)
        elif end - self._settled > _MOST_UNSETTLED:  # tokens without text
            tokens = list(self._tokens)
            self._tokens = deque(tokens[: self._settled] + tokens[end:])

    def _begin_at(self, begin: int, end: int, num_unfinished: int) -> None:
        """Decode from token `begin` on; the text before `end` is taken, but for so many characters."""
        for _ in range(begin):
            self._tokens.popleft()
        self._settled = end - begin
        self._num_taken = len(self._text(self._settled)) - num_unfinished

    def finish(self) -> str:
        """Return the rest: no more tokens come."""
        if self.stop is not None:
            return ""
        self._held.add(self._text(len(self._tokens))[self._num_taken :], self._counts)
        self._tokens.clear()
        self._run, self._settled, self._num_taken = [], 0, 0
        return self._held.take(final=True)

    def _text(self, end: int) -> str:
        return self._decoder.decode(np.array(list(islice(self._tokens, end)), dtype=np.int64))
