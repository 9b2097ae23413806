"""Requests of `/v1/messages`, as Anthropic's clients write them, and the chats that they are."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ...core.prompt import MAX_TOKEN_ID
from .schema import Body, ChatRequest, Lenient, StopList, Text, TextPart


class ToolUse(Lenient):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class ToolResult(Lenient):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[TextPart] | None = None


class Thinking(Lenient):
    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextPart | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class Turn(Lenient):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(min_length=1, fail_fast=True)]

    def to_chat(self) -> list[dict[str, Any]]:
        """Return the messages of a chat: results of tools come as messages of their own. Thoughts are left out."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[dict[str, Any]] = []
        text, calls = "", []
        for block in self.content:
            if isinstance(block, ToolResult):
                messages.append({"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id})
            elif isinstance(block, ToolUse):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "function": function})
            elif isinstance(block, TextPart):
                text += block.text
        if text or calls or not messages:
            messages.append({"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})})
        return messages


def _text(content: str | list[TextPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class MessageTool(Lenient):
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any] = Field(description="a JSON schema")


class MessageToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "type tool and a name go together")
        return self

    def to_chat(self) -> Any:
        if self.type == "tool":
            return {"function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class CountTokensRequest(Body):
    """What a conversation is made of."""

    model: Text | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: Text | list[TextPart] | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True)] | None = None
    tool_choice: MessageToolChoice | None = None

    def to_chat(self, **more: Any) -> ChatRequest:
        """Return the chat that the request is. Raises ValidationError."""
        messages = [message for turn in self.messages for message in turn.to_chat()]
        if system := _text(self.system):
            messages = [{"role": "system", "content": system}, *messages]
        tools = [
            {"function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}
            for tool in self.tools or ()
        ]
        choice = None if self.tool_choice is None else self.tool_choice.to_chat()
        return ChatRequest.model_validate(
            {"model": self.model, "messages": messages, "tools": tools or None, "tool_choice": choice, **more}
        )


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)] | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = False
    metadata: Any = Field(None, description="not looked at")

    def to_chat(self, **more: Any) -> ChatRequest:
        sampled = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "stream")}
        return super().to_chat(**sampled, stop=self.stop_sequences, **more)


class LenientMessagesRequest(MessagesRequest):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
