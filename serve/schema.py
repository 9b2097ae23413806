"""Requests as clients write them. A parameter that is unknown, or that no body here can honour, is an error with its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.prompt import MAX_TOKEN_ID

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 5
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Text = Annotated[str, Field(strict=True)]


def only(*accepted: Any) -> Any:
    """Return the type of a parameter that is not supported: what changes nothing is accepted, anything else an error."""

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in (*accepted, None)):
            shown = " or ".join(map(repr, accepted))
            raise PydanticCustomError(
                "unsupported", "is not supported{hint}", {"hint": f"; expected {shown}" if shown else ""}
            )
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [None, *accepted]})]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: only(False) = None


class ResponseFormat(Body):
    type: Literal["text"]


class Sampled(Body):
    """What completions and chats have in common."""

    model: Text | None = Field(None, description="the served model; it need not be named")
    n: Annotated[int, Field(ge=1, le=1024, strict=True)] | None = Field(None, description="1 by default")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID, strict=True)] | None = Field(
        None, description="-1 and 0: all tokens"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1, strict=True)] | None = None
    stop: Text | Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = Field(False, description="go on to max_tokens after the end of text")
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1, strict=True)] = Field(
        0, description="greater is more urgent"
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logit_bias: only({}) = None
    frequency_penalty: only(0, 0.0) = None
    presence_penalty: only(0, 0.0) = None
    repetition_penalty: only(1, 1.0) = None  # the benchmark clients of other servers send this and the next two
    min_p: only(0, 0.0) = None
    min_tokens: only(0) = None
    user: Text | None = Field(None, description="not looked at")

    @property
    def num_outputs(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampled):
    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    best_of: only(1) = None
    suffix: only("") = None
    response_format: ResponseFormat | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class ChatMessage(Body):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


class ChatRequest(Sampled):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID, strict=True)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, strict=True)] | None = None
    response_format: ResponseFormat | None = None
    tools: only([]) = None
    tool_choice: only("none", "auto") = None
    functions: only([]) = None
    parallel_tool_calls: only(True) = None
    modalities: only(["text"]) = None
    service_tier: only("auto", "default") = None
    store: only(False) = None


class TokenizeRequest(Body):
    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    model: Text | None = None
    tokens: list[Token]


class AbortRequest(Body):
    request_id: Annotated[Text, Field(max_length=256)] = Field(description="the id of the answer, such as cmpl-…")
