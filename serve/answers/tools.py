"""Calls of tools. A simulated server, which has no model, calls a function when a request demands it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import encode
from .forms import ChatForm, members
from .reply import Choice, ChoiceDelta


@dataclass(frozen=True, slots=True)
class Call:
    """A function that an answer calls, with the JSON of the schema that its arguments follow."""

    name: str
    schema: str

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Call:
        """Return the call of a function of `tools`."""
        schema = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        return cls(str(function.get("name", "")), json.dumps(schema))


class CallForm(ChatForm):
    """A chat whose outputs are calls of one function."""

    def __init__(self, *arguments: Any, call: Call, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._call = call

    def first(self) -> list[bytes]:
        begin = {"role": "assistant", "content": None}
        return [
            self._call_event(choice.index, self._head_of_call(choice.index), None, begin)
            for choice in self.reply.choices
        ]

    def delta(self, choice: Choice, delta: ChoiceDelta) -> bytes:
        part = {"index": 0, "function": {"arguments": delta.text}}
        return self._call_event(choice.index, part, self._finish(delta.finish), {})

    def _call_event(self, index: int, call: dict[str, Any], finish: str | None, more: dict[str, Any]) -> bytes:
        return self.event(index, f'"delta":{encode({**more, "tool_calls": [call]})}', None, finish)

    def _head_of_call(self, index: int) -> dict[str, Any]:
        function = {"name": self._call.name, "arguments": ""}
        return {
            "index": 0,
            "id": f"call_{self.reply.id.rpartition('-')[2]}_{index}",
            "type": "function",
            "function": function,
        }

    def _finish(self, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" else finish

    def _choice(self, index: int, text: str, logprobs: str, finish: str | None) -> str:
        call = {name: encode(value) for name, value in self._head_of_call(index).items() if name != "index"}
        call["function"] = members(name=encode(self._call.name), arguments=text)
        message = members(role='"assistant"', content="null", refusal="null", tool_calls=f"[{members(**call)}]")
        end = encode(self._finish(finish))
        return members(index=encode(index), message=message, logprobs="null", finish_reason=end)
