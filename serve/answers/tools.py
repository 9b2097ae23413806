"""Calls of tools. A simulated server, which has no model, calls a function when a request demands it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from ..bodies.shaped import frame_of
from .forms import ChatForm
from .reply import Choice, Delta


@dataclass(frozen=True, slots=True)
class Call:
    """A function with the JSON of its arguments: `before` the words of an output, and `after` them; without a place for
    words, `before` is all of it."""

    name: str
    before: str
    after: str

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Call:
        """Return the call of a function of `tools`, with the arguments that `frame_of` makes of its parameters. Raises
        InvalidRequest."""
        return cls(str(function.get("name", "")), *frame_of({"type": "object", **(function.get("parameters") or {})}))


class CallForm(ChatForm):
    """A chat whose outputs are calls of one function."""

    def __init__(self, *arguments: Any, call: Call, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._call = call

    def first(self) -> list[bytes]:
        return [
            self._call_event(
                choice.index, self._head_of_call(choice.index), None, {"role": "assistant", "content": None}
            )
            for choice in self.reply.choices
        ]

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        text = quote(delta.text)[1:-1] if self._call.after else ""
        part = {"index": 0, "function": {"arguments": text + (self._call.after if delta.finish else "")}}
        return self._call_event(choice.index, part, self._finish(delta.finish), {})

    def _call_event(self, index: int, call: dict[str, Any], finish: str | None, more: dict[str, Any]) -> bytes:
        delta = {**more, "tool_calls": [call]}
        return self.event([{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}])

    def _head_of_call(self, index: int) -> dict[str, Any]:
        function = {"name": self._call.name, "arguments": self._call.before}
        return {
            "index": 0,
            "id": f"call_{self.reply.id.rpartition('-')[2]}_{index}",
            "type": "function",
            "function": function,
        }

    def _finish(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" else finish

    def add(self, choice: Choice, delta: Delta) -> None:
        if self._call.after:
            super().add(choice, Delta(quote(delta.text)[1:-1], delta.tokens, {}, delta.finish, delta.at_ns))

    def _whole_choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        call = self._head_of_call(index)
        del call["index"]
        call["function"]["arguments"] = text
        message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": self._finish(finish)}

    def _around(self, text: str) -> str:
        return quote(self._call.before)[1:-1] + text + quote(self._call.after)[1:-1]
