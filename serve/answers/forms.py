"""The JSON of the endpoints: completions and chats, whole and as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from ...core.contract.text import PromptScores
from ..base.errors import ApiError, encode, event
from ..base.port import TextCodec
from .reply import Choice, ChoiceDelta, Reply


def members(**values: str) -> str:
    """Return the JSON of an object, of the JSON of its values."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in values.items()) + "}"


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that an answer repeats at its start; `scores`: with the log-probabilities of its tokens."""

    text: str
    tokens: Sequence[int]
    scores: PromptScores | None = None


@dataclass(frozen=True, slots=True)
class EchoedChoice:
    """A choice that is its prompt alone."""

    index: int
    finish: str = "length"


@dataclass(frozen=True, slots=True)
class EchoedReply:
    """The answer to a request for no tokens, as `CompletionForm` reads a `Reply`."""

    id: str
    choices: Sequence[EchoedChoice]
    num_prompt_tokens: int
    created: int
    num_tokens: int = 0
    num_cached_tokens: int = 0


class CompletionForm:
    """`/v1/completions`. `echoes`: the prompt that each choice repeats at its start; `num_logprobs` None: no
    log-probabilities are shown.

    `usage`: "" (nowhere), "last" (in an event of its own) or "each" (in every event, too).
    """

    object = chunk_object = "text_completion"
    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(
        self,
        reply: Reply | EchoedReply,
        model: str,
        codec: TextCodec,
        *,
        usage: str,
        num_logprobs: int | None = None,
        echoes: Sequence[Echo] = (),
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
        self._of_echoes = [self._echoed(i, echo) for i, echo in enumerate(echoes)]

    def first(self) -> list[bytes]:
        return [self.event(i, self._gain(echo.text), self._of_echoes[i]) for i, echo in enumerate(self._echoes)]

    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        return self.event(choice.index, self._gain(delta.text), self._logprobs(choice, delta), delta.finish)

    def last(self) -> list[bytes]:
        head = self._head(self.chunk_object)
        return [event({**head, "choices": [], "usage": self.usage()})] if self._usage else []

    def add(self, choice: Choice, delta: ChoiceDelta) -> None:
        """Add a piece to the whole answer: as JSON at once, so that its end is no long work."""
        self._texts[choice.index].append(quote(delta.text)[1:-1])
        for name, values in (self._logprobs(choice, delta) or {}).items():
            if values is not None:
                self._lists[choice.index].setdefault(name, []).append(encode(values)[1:-1])

    def whole(self) -> bytes:
        """Return the whole answer of the pieces that were added."""
        shown = []
        for choice in self.reply.choices:
            echo = quote(self._echoes[choice.index].text)[1:-1] if self._echoes else ""
            text = "".join(['"', echo, *self._texts[choice.index], '"'])
            shown.append(self._choice(choice.index, text, self._all_logprobs(choice.index), choice.finish))
        head = {name: encode(value) for name, value in self._head(self.object).items()}
        more = {name: encode(value) for name, value in self.extra.items()}
        return members(**head, choices=f"[{','.join(shown)}]", usage=encode(self.usage()), **more).encode()

    def _all_logprobs(self, index: int) -> str:
        """Return the JSON of the log-probabilities of a whole output."""
        if self.num_logprobs is None:
            return "null"
        echoed = (self._of_echoes[index] if self._of_echoes else None) or {}
        begun = {name: [encode(values)[1:-1]] for name, values in echoed.items() if values is not None}
        names = dict.fromkeys((*begun, *self._lists[index]))
        parts = {name: [*begun.get(name, ()), *self._lists[index].get(name, ())] for name in names}
        lists = {name: f"[{','.join(filter(None, some))}]" for name, some in parts.items()}
        return members(**{name: lists.get(name) or encode(empty) for name, empty in self._no_logprobs.items()})

    def event(self, index: int, gain: str, logprobs: Any = None, finish: str | None = None) -> bytes:
        """Return an event of the stream, of the JSON of what a choice gains."""
        if logprobs is None and finish is None and self._usage != "each":  # most of them
            before, after = self._around_gains[index]
        else:
            before, after = self._around_gain(index, logprobs, finish)
        return f"{before}{gain}{after}".encode()

    @cached_property
    def _around_gains(self) -> list[tuple[str, str]]:
        return [self._around_gain(index, None, None) for index in range(len(self.reply.choices))]

    def _around_gain(self, index: int, logprobs: Any, finish: str | None) -> tuple[str, str]:
        """Return an event up to what a choice gains, and from there on."""
        head, usage = encode(self._head(self.chunk_object))[:-1], ""
        if self._usage:
            usage = f',"usage":{encode(self.usage() if self._usage == "each" else None)}'
        before = f'data: {head},"choices":[{{"index":{index},'
        return before, f',"logprobs":{encode(logprobs)},"finish_reason":{encode(finish)}}}]{usage}}}\n\n'

    def _gain(self, text: str) -> str:
        """Return the JSON of what an event adds to a choice."""
        return f'"text":{quote(text)}'

    def usage(self) -> dict[str, Any]:
        prompt, output, cached = self.reply.num_prompt_tokens, self.reply.num_tokens, self.reply.num_cached_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the stream."""
        return event(error.to_json())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.reply.id, "object": kind, "created": self.reply.created, "model": self.model}

    def _choice(self, index: int, text: str, logprobs: str, finish: str | None) -> str:
        """Return the JSON of a whole choice, of the JSON of its text and its log-probabilities."""
        return members(index=encode(index), text=text, logprobs=logprobs, finish_reason=encode(finish))

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [] if self.num_logprobs else None,
            "text_offset": [],
        }

    def _logprobs(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens of a delta;
        text offsets are those of the tokens' own texts, one after another."""
        if self.num_logprobs is None:
            return None
        values = [float(value) for value in delta.outputs.get("logprobs", ())]
        return self._table(choice.index, delta.tokens, values, top_pairs(delta.outputs))

    def _echoed(self, index: int, echo: Echo) -> dict[str, Any] | None:
        """Return the log-probabilities of a prompt: its first token has none, and the token that is there is among the
        likely ones."""
        if self.num_logprobs is None or echo.scores is None:
            return None
        following, logprobs = echo.tokens[1:], echo.scores.logprobs
        tops = [
            [*pairs[: self.num_logprobs], (token, value)]
            for token, value, pairs in zip(following, logprobs, echo.scores.tops, strict=True)
        ]
        shown = self._table(index, echo.tokens, [None, *logprobs], [[], *tops], extra=1)
        return shown | {"top_logprobs": [None, *shown["top_logprobs"][1:]] if self.num_logprobs else None}

    def _table(
        self,
        index: int,
        tokens: Sequence[int],
        values: Sequence[float | None],
        pairs: Sequence[Sequence[tuple[int, float]]],
        extra: int = 0,
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens as the API has them. `extra`: pairs that are shown beyond
        `num_logprobs`."""
        texts = [self.codec.text_of(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        most = (self.num_logprobs or 0) + extra
        tops = [  # of tokens with the same text the most likely one
            {self.codec.text_of(token): value for token, value in reversed(some[:most])} for some in pairs
        ]
        return {
            "tokens": texts,
            "token_logprobs": list(values),
            "top_logprobs": tops if self.num_logprobs else None,
            "text_offset": offsets,
        }


class ChatForm(CompletionForm):
    """`/v1/chat/completions`."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first(self) -> list[bytes]:
        start = f'"delta":{encode({"role": "assistant", "content": ""})}'
        return [self.event(choice.index, start) for choice in self.reply.choices]

    def _gain(self, text: str) -> str:
        return f'"delta":{{"content":{quote(text)}}}' if text else '"delta":{}'

    def _choice(self, index: int, text: str, logprobs: str, finish: str | None) -> str:
        message = members(role='"assistant"', content=text, refusal="null")
        return members(index=encode(index), message=message, logprobs=logprobs, finish_reason=encode(finish))

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {"content": [], "refusal": None}

    def _logprobs(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any] | None:
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
