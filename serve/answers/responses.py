"""The JSON of `/v1/responses`, as OpenAI has it: an answer of one item, a message or the call of a function."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ApiError, encode
from .forms import ChatForm
from .reply import Choice, Delta
from .tools import Call

STATUS = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}


class ResponsesForm(ChatForm):
    """`call`: the function that the answer calls, in the place of text. `repeated`: parameters of the request that the
    answer has, too."""

    end = b""

    def __init__(self, *arguments: Any, call: Call | None, repeated: Mapping[str, Any], **named: Any) -> None:
        super().__init__(*arguments, usage="", **named)
        self._call = call
        self._repeated = repeated
        self._parts: list[str] = [] if call is None else [call.before]
        self._entries: list[dict[str, Any]] = []  # log-probabilities
        self._number = -1
        self._suffix = self.reply.id.removeprefix("resp_")

    def first(self) -> list[bytes]:
        response = self._response(None)
        begun = [
            self._event_of("response.created", response=response),
            self._event_of("response.in_progress", response=response),
            self._event_of("response.output_item.added", output_index=0, item=self._item("", "in_progress", [])),
        ]
        if self._call is None:
            return [*begun, self._at_part("response.content_part.added", part=self._part("", []))]
        return [*begun, self._text_event(self._call.before, [])] if self._call.before else begun

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        before = len(self._entries)
        text = self._add(choice, delta)
        entries = self._entries[before:]  # also of tokens that are a part of a character
        return self._text_event(text, entries) if text or entries else b""

    def last(self) -> list[bytes]:
        (choice,) = self.reply.choices
        text, status = "".join(self._parts), STATUS[choice.finish or "stop"]
        item = self._item(text, status, [self._part(text, self._entries)])
        if self._call is None:
            ends = [
                self._at_part("response.output_text.done", text=text, logprobs=self._entries),
                self._at_part("response.content_part.done", part=self._part(text, self._entries)),
            ]
        else:
            facts = {"item_id": item["id"], "output_index": 0, "name": self._call.name, "arguments": text}
            ends = [self._event_of("response.function_call_arguments.done", **facts)]
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return [
            *ends,
            self._event_of("response.output_item.done", output_index=0, item=item),
            self._event_of(kind, response=self._response(choice)),
        ]

    def add(self, choice: Choice, delta: Delta) -> None:
        self._add(choice, delta)

    def whole(self) -> bytes:
        (choice,) = self.reply.choices
        return encode(self._response(choice)).encode()

    def error(self, error: ApiError) -> bytes:
        told = error.to_json()["error"]
        return self._event_of("error", code=told["code"], message=told["message"], param=told["param"])

    def usage(self) -> dict[str, Any]:
        prompt, output, cached = self.reply.num_prompt_tokens, self.reply.num_tokens, self.reply.num_cached_tokens
        counts = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
        details = {"cached_tokens": cached, "cache_write_tokens": 0}
        return counts | {"input_tokens_details": details, "output_tokens_details": {"reasoning_tokens": 0}}

    def _add(self, choice: Choice, delta: Delta) -> str:
        """Add a piece to the answer. Returns its text, of a call the JSON of its arguments."""
        text = delta.text
        if self._call is not None:
            words = json.dumps(text)[1:-1] if self._call.after else ""
            text = words + (self._call.after if delta.finish else "")
        elif self.num_logprobs is not None:
            self._entries += (self._logprobs(choice, delta) or {})["content"]
        self._parts.append(text)
        return text

    def _response(self, ended: Choice | None) -> dict[str, Any]:
        """Return the answer as it is at its begin, or at its end if it has `ended`."""
        head = {"id": self.reply.id, "object": "response", "created_at": self.reply.created, "model": self.model}
        head |= {"error": None, "incomplete_details": None, **self._repeated}
        if ended is None:
            return head | {"status": "in_progress", "output": [], "usage": None}
        status, text = STATUS[ended.finish or "stop"], "".join(self._parts)
        if ended.finish == "length":
            head["incomplete_details"] = {"reason": "max_output_tokens"}
        item = self._item(text, status, [self._part(text, self._entries)])
        return head | {"status": status, "output": [item], "usage": self.usage()}

    def _item(self, text: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        status = "incomplete" if status == "cancelled" else status
        if self._call is None:
            item = {"id": f"msg_{self._suffix}", "type": "message", "role": "assistant", "status": status}
            return item | {"content": content}
        item = {"id": f"fc_{self._suffix}", "type": "function_call", "call_id": f"call_{self._suffix}"}
        return item | {"name": self._call.name, "arguments": text, "status": status}

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _text_event(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        if self._call is None:
            return self._at_part("response.output_text.delta", delta=text, logprobs=logprobs)
        item_id = f"fc_{self._suffix}"
        return self._event_of("response.function_call_arguments.delta", item_id=item_id, output_index=0, delta=text)

    def _at_part(self, kind: str, **facts: Any) -> bytes:
        return self._event_of(kind, item_id=f"msg_{self._suffix}", output_index=0, content_index=0, **facts)

    def _event_of(self, kind: str, **facts: Any) -> bytes:
        self._number += 1
        data = encode({"type": kind, "sequence_number": self._number, **facts})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data.encode())
