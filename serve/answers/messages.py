"""The JSON of `/v1/messages`, as Anthropic has it: an answer of one block, text or the use of a tool."""

from __future__ import annotations

import json
from typing import Any

from ..errors import ApiError, encode
from .forms import CompletionForm
from .reply import Choice, Delta
from .tools import Call

REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


class MessagesForm(CompletionForm):
    """`call`: the tool that the answer uses, in the place of text."""

    end = b""

    def __init__(self, *arguments: Any, call: Call | None = None, **named: Any) -> None:
        super().__init__(*arguments, usage="", **named)
        self._call = call
        self._parts: list[str] = []

    def first(self) -> list[bytes]:
        start = [
            _event("message_start", message=self._message([], None)),
            _event("content_block_start", index=0, content_block=self._block("", {})),
        ]
        return [*start, self._delta(self._call.before)] if self._call is not None and self._call.before else start

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        text = self._text_of(delta)
        return self._delta(text) if text else b""

    def last(self) -> list[bytes]:
        (choice,) = self.reply.choices
        usage = {"output_tokens": self.usage()["output_tokens"]}
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=self._reason(choice), usage=usage),
            _event("message_stop"),
        ]

    def add(self, choice: Choice, delta: Delta) -> None:
        self._parts.append(self._text_of(delta))

    def whole(self) -> bytes:
        (choice,) = self.reply.choices
        text = "".join(self._parts)
        used = {} if self._call is None else json.loads(self._call.before + text)
        return encode(self._message([self._block(text, used)], choice)).encode()

    def error(self, error: ApiError) -> bytes:
        return _event("error", **error.to_json())

    def usage(self) -> dict[str, Any]:
        """Return the tokens; those of the prompt that the prefix cache had are counted apart."""
        reply = self.reply
        cached = reply.num_cached_tokens
        counts = {"input_tokens": reply.num_prompt_tokens - cached, "output_tokens": reply.num_tokens}
        return counts | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    def _text_of(self, delta: Delta) -> str:
        """Return the text of a delta, of a tool's use the JSON of its arguments."""
        if self._call is None:
            return delta.text
        words = json.dumps(delta.text)[1:-1] if self._call.after else ""
        return words + (self._call.after if delta.finish else "")

    def _delta(self, text: str) -> bytes:
        if self._call is None:
            return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        return _event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": text})

    def _block(self, text: str, used: dict[str, Any]) -> dict[str, Any]:
        if self._call is None:
            return {"type": "text", "text": text}
        tool_id = f"toolu_{self.reply.id.rpartition('-')[2]}"
        return {"type": "tool_use", "id": tool_id, "name": self._call.name, "input": used}

    def _message(self, content: list[dict[str, Any]], ended: Choice | None) -> dict[str, Any]:
        head = {"id": self.reply.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return head | self._reason(ended) | {"usage": self.usage()}

    def _reason(self, ended: Choice | None) -> dict[str, Any]:
        """Return why the answer has ended: nothing yet, if `ended` is None."""
        if ended is None or ended.finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        if self._call is not None and ended.finish == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if ended.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop}
        return {"stop_reason": REASONS[ended.finish], "stop_sequence": None}


def _event(kind: str, **facts: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **facts}).encode())
