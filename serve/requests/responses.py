"""Requests of `/v1/responses`, as OpenAI's newer clients write them, and the chats that they are."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ...core.prompt import MAX_TOKEN_ID
from .schema import MAX_TOP_LOGPROBS, Body, ChatRequest, Lenient, Text, only

LOGPROBS = "message.output_text.logprobs"


class ItemText(Lenient):
    type: Literal["input_text", "output_text", "text"]
    text: Text


class Refusal(Lenient):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Content = Text | list[Annotated[ItemText | Refusal, Field(discriminator="type")]]


def _text(content: Content | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class MessageItem(Lenient):
    type: Literal["message"] = "message"
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Content


class CallItem(Lenient):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text = "{}"


class CallOutputItem(Lenient):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(Lenient):
    type: Literal["reasoning"]


def _type_of_item(item: Any) -> str:
    """Return the type of an item; one without a type is a message."""
    return str((item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message")


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of_item),
]


def _form_of_input(value: Any) -> str:
    return "items" if isinstance(value, list) else "text"


class FunctionTool(Lenient):
    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class FunctionChoice(Lenient):
    type: Literal["function"]
    name: Text


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="has no effect: the output always follows the schema")

    def to_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Annotated[Any, only("medium")] = None


class EventOptions(Body):
    include_obfuscation: Annotated[Any, only(False)] = None


class ResponsesRequest(Body):
    model: Text | None = Field(None, description="the served model; optional")
    input: Annotated[
        Annotated[Text, Tag("text")] | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("items")],
        Discriminator(_form_of_input),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID, strict=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1, strict=True)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1, strict=True)] = 0
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None
    stream: bool | None = False
    stream_options: EventOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    text: TextOptions | None = None
    metadata: dict[str, Text] | None = Field(None, description="is repeated in the answer")
    user: Text | None = Field(None, description="not looked at")
    safety_identifier: Text | None = Field(None, description="not looked at")
    prompt_cache_key: Text | None = Field(None, description="not looked at")
    parallel_tool_calls: bool | None = Field(None, description="an answer has at most one call")
    previous_response_id: Text | None = Field(None, description="an error: answers are not stored")
    store: Annotated[Any, only(False)] = None
    background: Annotated[Any, only(False)] = None
    conversation: Annotated[Any, only()] = None
    max_tool_calls: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    reasoning: Annotated[Any, only({})] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    truncation: Annotated[Any, only("disabled")] = None

    @model_validator(mode="after")
    def _has_its_history(self) -> ResponsesRequest:
        if self.previous_response_id is not None:
            raise PydanticCustomError(
                "previous_response_id", "previous_response_id: answers are not stored here; send their items as input"
            )
        return self

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def to_chat(self) -> ChatRequest:
        """Return the chat that the request is. Raises ValidationError."""
        choice = self.tool_choice
        tools = [{"function": tool.model_dump(exclude={"type", "strict"})} for tool in self.tools or ()]
        same = ("model", "temperature", "top_p", "top_k", "seed", "ignore_eos", "priority", "cache_salt", "stream")
        shaped = None if self.text is None or self.text.format is None else self.text.format.to_chat()
        chat = {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "response_format": shaped,
            "tools": tools or None,
            "tool_choice": {"function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else choice,
            "logprobs": self.shows_logprobs,
            "top_logprobs": self.top_logprobs if self.shows_logprobs else None,
        }
        return ChatRequest.model_validate(chat | {name: getattr(self, name) for name in same})

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat. Calls belong to the message of the assistant before them; thoughts are left
        out."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, CallOutputItem):
                messages.append({"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id})
            elif isinstance(item, CallItem):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        return messages

    def repeated(self) -> dict[str, Any]:
        """Return the parameters that the answer repeats."""
        text = (
            {"format": {"type": "text"}}
            if self.text is None
            else self.text.model_dump(by_alias=True, exclude_none=True)
        )
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": text,
            "tool_choice": self.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "tools": [tool.model_dump() for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }


class LenientResponsesRequest(ResponsesRequest):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
