"""The JSON of the endpoints: completions and chats, whole and as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from ..bodies.port import TextCodec
from ..errors import ApiError, event
from .reply import Choice, Delta, Reply

FILLED = re.compile(r'"\\u0000(\d+)"')
"""In the JSON of an answer: where a part stands that is JSON already."""


class CompletionForm:
    """`/v1/completions`. `echoes`: the text that each choice repeats at its start; `num_logprobs` None: no
    log-probabilities are shown.

    `usage`: "" (nowhere), "last" (in an event of its own) or "each" (in every event, too).
    """

    object = chunk_object = "text_completion"
    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(
        self,
        reply: Reply,
        model: str,
        codec: TextCodec,
        *,
        usage: str,
        num_logprobs: int | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        self.reply = reply
        self.model = model
        self.codec = codec
        self.num_logprobs = num_logprobs
        self.extra: Mapping[str, Any] = {}  # what a whole answer has beside
        self._usage = usage
        self._echoes = echoes
        self._offsets = [0] * len(reply.choices)  # characters of the output before the next token
        # What the outputs of a whole answer have got so far, by choice, as parts of JSON:
        self._texts: list[list[str]] = [[] for _ in reply.choices]
        self._lists: list[dict[str, list[str]]] = [{} for _ in reply.choices]

    def first(self) -> list[bytes]:
        return [event(self._event([self._choice(i, text, None, None)])) for i, text in enumerate(self._echoes)]

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if delta.finish is None and delta.text and self.num_logprobs is None and self._usage != "each":
            head, tail = self._around_text[choice.index]
            return head + quote(delta.text).encode() + tail
        return event(self._event([self._choice(choice.index, delta.text, self._logprobs(choice, delta), delta.finish)]))

    @cached_property
    def _around_text(self) -> list[tuple[bytes, bytes]]:
        """By choice: an event that has nothing but text, before and after it; most are of this kind."""
        mark = "\0"
        events = [event(self._event([self._choice(i, mark, None, None)])) for i in range(len(self.reply.choices))]
        parts = (one.partition(json.dumps(mark).encode()) for one in events)
        return [(head, tail) for head, _, tail in parts]

    def last(self) -> list[bytes]:
        return [event(self._event([]) | {"usage": self.usage()})] if self._usage else []

    def add(self, choice: Choice, delta: Delta) -> None:
        """Add a piece to the whole answer: as JSON at once, so that its end is no long work."""
        self._texts[choice.index].append(quote(delta.text)[1:-1])
        for name, values in (self._logprobs(choice, delta) or {}).items():
            if values is not None:
                self._lists[choice.index].setdefault(name, []).append(json.dumps(values)[1:-1])

    def whole(self) -> bytes:
        """Return the whole answer of the pieces that were added."""
        fills: list[str] = []

        def fill(opening: str, parts: Iterable[str], closing: str) -> str:
            fills.append(opening + "".join(parts) + closing)
            return f"\0{len(fills) - 1}"

        shown = []
        for choice in self.reply.choices:
            echo = quote(self._echoes[choice.index])[1:-1] if self._echoes else ""
            text = fill('"', (echo, self._around("".join(self._texts[choice.index]))), '"')
            lists = self._lists[choice.index]
            logprobs = {name: fill("[", (", ".join(filter(None, lists.get(name, ()))),), "]") for name in lists}
            empty = None if self.num_logprobs is None else self._no_logprobs
            shown.append(self._whole_choice(choice.index, text, empty and {**empty, **logprobs}, choice.finish))
        body = json.dumps(self._head(self.object) | {"choices": shown, "usage": self.usage(), **self.extra})
        parts = FILLED.split(body)
        parts[1::2] = [fills[int(number)] for number in parts[1::2]]
        return "".join(parts).encode()

    def _around(self, text: str) -> str:
        """Return the JSON of a whole text, without its quotes."""
        return text

    def event(self, choices: list[dict[str, Any]]) -> bytes:
        """Return an event of the stream."""
        return event(self._event(choices))

    def usage(self) -> dict[str, Any]:
        prompt, output, cached = self.reply.num_prompt_tokens, self.reply.num_tokens, self.reply.num_cached_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(error.to_json())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.reply.id, "object": kind, "created": self.reply.created, "model": self.model}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = self._head(self.chunk_object) | {"choices": choices}
        if not self._usage:
            return event
        return event | {"usage": self.usage() if self._usage == "each" else None}

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    _whole_choice = _choice

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [] if self.num_logprobs else None,
            "text_offset": [],
        }

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens of a delta;
        text offsets are those of the tokens' own texts, one after another."""
        if self.num_logprobs is None:
            return None
        tokens = [self.codec.text_of(token) for token in delta.tokens]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(token)
        tops = [  # of tokens with the same text the most likely one
            {self.codec.text_of(token): value for token, value in reversed(pairs[: self.num_logprobs])}
            for pairs in top_pairs(delta.outputs)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [float(value) for value in delta.outputs.get("logprobs", ())],
            "top_logprobs": tops if self.num_logprobs else None,
            "text_offset": offsets,
        }


class ChatForm(CompletionForm):
    """`/v1/chat/completions`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self) -> list[bytes]:
        start = {"role": "assistant", "content": ""}
        return [
            event(self._event([{"index": choice.index, "delta": start, "logprobs": None, "finish_reason": None}]))
            for choice in self.reply.choices
        ]

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _whole_choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {"content": [], "refusal": None}

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        values = delta.outputs.get("logprobs", ())
        tops = top_pairs(delta.outputs) or [[]] * len(values)
        return {
            "content": [
                self._entry(token, value)
                | {"top_logprobs": [self._entry(*pair) for pair in pairs[: self.num_logprobs]]}
                for token, value, pairs in zip(delta.tokens, values, tops, strict=True)
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.codec.text_of(token),
            "logprob": float(logprob),
            "bytes": list(self.codec.bytes_of(token)),
        }


def top_pairs(outputs: Mapping[str, list[Any]]) -> list[list[tuple[int, float]]]:
    """Return, for each token, the most likely tokens with their log-probabilities."""
    ids, values = outputs.get("top_logprob_ids", ()), outputs.get("top_logprobs", ())
    return [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(ids, values, strict=True)]
