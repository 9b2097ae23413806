"""Requests as clients write them. A parameter that is unknown, or that no body here can honour, is an error with its
name, or is left out: the context of a validation says which."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ...core.contract.request import biases
from ...core.contract.text import ChatEnd
from ...core.prompt import MAX_TOKEN_ID

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""Of a stop string: a stream holds back as much text as may be the beginning of one."""
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 300
"""Tokens of a `logit_bias`, as OpenAI limits them."""
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$", strict=True)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
StopList = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
]
MAX_PROMPTS = 1024
"""Of one request, whatever the server's own limit of outputs is: what is beyond is not looked at."""


def _form_of_prompt(value: Any) -> str:
    """Return the form that a prompt has by its first item: each has its own errors, and only the first is reported."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "tokens"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("lists")],
    Discriminator(_form_of_prompt),
]


@dataclass(frozen=True, eq=False)  # Python keeps one `Annotated` for marks that are equal, as of 0 and of False
class Only:
    """Marks an unsupported parameter: `values` have no effect and are accepted, as is null; any other is an error, or
    left out (see `RequestBody`)."""

    values: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = WithJsonSchema({"enum": [None, *self.values]})
        return handler.generate_schema(Annotated[source, AfterValidator(self._checked), shown])

    def _checked(self, value: Any, info: ValidationInfo) -> Any:
        if not any(type(value) is type(one) and value == one for one in (*self.values, None)):
            if info.context is not None:
                info.context["ignored"].add(info.field_name)
                return None
            shown = " or ".join(map(repr, self.values))
            raise PydanticCustomError(
                "unsupported", "is not supported{hint}", {"hint": f"; expected {shown}" if shown else ""}
            )
        return value


def only(*accepted: Any) -> Only:
    """Return the mark of an unsupported parameter, of which `accepted` values have no effect."""
    return Only(accepted)


class RequestBody(BaseModel):
    """What a client sends. A validation whose context has a set "ignored" leaves out unknown and unsupported
    parameters, and puts their names there; without it they are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is None or not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        info.context["ignored"] |= data.keys() - known
        return {name: value for name, value in data.items() if name in known}


class StreamOptions(RequestBody):
    include_usage: Flag = False
    continuous_usage_stats: Flag = Field(False, description="with include_usage: every event has the usage so far")
    include_obfuscation: Annotated[Any, only(False)] = None


class NamedSchema(RequestBody):
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    strict: Flag | None = Field(None, description="has no effect: the output always follows the schema")


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("response_format", "type json_schema and a json_schema go together")
        return self

    @property
    def schema_text(self) -> str | None:
        """The schema that an output must follow, None for any text."""
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return None if self.type == "text" else '{"type": "object"}'


class KvTransferParams(BaseModel):
    """How routers of vLLM let one server compute a prompt and another one decode it. What only the network needs is
    passed on and not looked at."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", protected_namespaces=())

    do_remote_decode: Flag = Field(False, description="the answer says where the KV of the prompt is")
    do_remote_prefill: Flag = Field(False, description="the KV of the prompt comes from another server")
    remote_block_ids: Annotated[list[Any], Field(max_length=MAX_TOKEN_ID)] | None = None

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks that are sent; of the longest group, where groups of layers have lists of their own."""
        blocks = self.remote_block_ids
        if blocks and all(isinstance(one, list) for one in blocks):
            return max(map(len, blocks))
        return None if blocks is None else len(blocks)


class Sampled(RequestBody):
    """What completions and chats have in common."""

    model: Text | None = Field(None, description="the served model; optional")
    n: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = Field(None, description="1 by default")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID, strict=True)] | None = Field(
        None, description="-1 and 0: all tokens"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1, strict=True)] | None = None
    stop: Annotated[Text, Field(max_length=MAX_STOP_CHARACTERS)] | StopList | None = None
    ignore_eos: Flag = Field(False, description="continue after the end-of-text token, up to max_tokens")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1, strict=True)] = Field(
        0, description="a greater number is more urgent"
    )
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Annotated[float, Field(strict=True, ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = Field(None, description="token id → number to add to its logit")
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    response_format: ResponseFormat | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)] | None = Field(
        None, description="no end of text, no stop token and no stop string ends the output before it has so many"
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="prompts with another one share no prefix in the cache"
    )
    kv_transfer_params: KvTransferParams | None = None
    user: Text | None = Field(None, description="not looked at")

    @property
    def shaping(self) -> dict[str, Any]:
        """The parameters that change the model's logits, and are not off, as `SamplingParams` has them."""
        off = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
        found = {name: value for name in off if (value := getattr(self, name)) not in (None, off[name])}
        return {**found, "logit_bias": biases(self.logit_bias)} if self.logit_bias else found

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that outputs must follow."""
        return None if self.response_format is None else self.response_format.schema_text

    @property
    def num_outputs(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    @property
    def usage(self) -> str:
        """Where a stream tells its usage: "" (nowhere), "last" (in an event of its own) or "each" (in
        every event, too)."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return ""
        return "each" if options.continuous_usage_stats else "last"


class CompletionRequest(Sampled):
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)] | None = Field(
        None, description="0 with echo: the prompt alone, with logprobs those of its tokens"
    )
    prompt: Prompt
    echo: Flag | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None


class ContentPart(BaseModel):
    """A part of a conversation. Clients send answers back as they came, and other servers' answers, so keys that
    are unknown here are left out."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", protected_namespaces=())


class TextPart(ContentPart):
    type: Literal["text"]
    text: Text


class CalledFunction(ContentPart):
    name: Text
    arguments: Text | dict[str, Any] | None = Field("{}", description="JSON, or the object")


class ToolCall(ContentPart):
    id: Text | None = None
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it: with its arguments as an object, if they are one."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
        return {"type": "function", "id": self.id, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(ContentPart):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != "assistant":  # it may have had no text
            raise PydanticCustomError("content", "expected content")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        further: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        further["tool_calls"] = [call.to_template() for call in self.tool_calls or ()] or None
        return {"role": self.role, "content": content, **{k: v for k, v in further.items() if v is not None}}


class ToolFunction(ContentPart):
    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")


class Tool(ContentPart):
    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(ContentPart):
    name: Text


class ToolChoice(ContentPart):
    type: Literal["function"] = "function"
    function: NamedFunction


class Conversation(RequestBody):
    """How a conversation becomes a prompt."""

    add_generation_prompt: Flag = Field(True, description="the prompt ends with the beginning of an answer")
    continue_final_message: Flag = Field(
        False, description="the prompt ends with the text of the last message, which the answer continues"
    )

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise PydanticCustomError(
                "end", "continue_final_message contradicts add_generation_prompt: give one of them"
            )
        messages = getattr(self, "messages", None)
        if messages and not messages[-1].to_template()["content"]:
            raise PydanticCustomError("end", "continue_final_message: the last message has no text to continue")
        return self

    @property
    def end(self) -> ChatEnd:
        """Where the prompt ends."""
        return "continue" if self.continue_final_message else "answer" if self.add_generation_prompt else "messages"


class ChatRequest(Sampled, Conversation):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)] | None = None
    logprobs: Flag | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    functions: Annotated[Any, only([])] = None
    parallel_tool_calls: Flag | None = Field(None, description="an answer has at most one call")
    modalities: Annotated[Any, only(["text"])] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None

    @model_validator(mode="after")
    def _knows_the_function(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that is not among the tools")
        if self.tool_choice == "required" and not names:
            raise PydanticCustomError("tool_choice", "tool_choice is required, and there are no tools")
        return self

    @property
    def demands_call(self) -> bool:
        return isinstance(self.tool_choice, ToolChoice) or self.tool_choice == "required"

    @property
    def next_function(self) -> ToolFunction | None:
        """The function that the answer calls: if any will do, the first that was not called since the user's last
        message, so that an agent comes to an end. Once all were called, the last if a call is demanded, else none."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return next(function for function in functions if function.name == name)
        if self.tool_choice == "none" or not functions:
            return None
        called: set[str] = set()
        for message in self.messages:
            called = set() if message.role == "user" else called | {c.function.name for c in message.tool_calls or ()}
        left = (function for function in functions if function.name not in called)
        return next(left, functions[-1] if self.demands_call else None)


class TokenizeRequest(Conversation):
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: Flag = True


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class AbortRequest(RequestBody):
    request_id: Annotated[Text, Field(max_length=256)] = Field(description="the id of the answer, such as cmpl-…")
