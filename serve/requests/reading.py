"""Reads the body of a request: JSON, parameters, tokens, and the limits that depend on tokens.

```
at most SMALL_BODY bytes ─────────────────────────► read ─► Asked, or the bytes of an answer
more            ── one of READERS other processes ─► read ─► …     the event loop serves others meanwhile
```

A thread would not do for long bodies: parsing and tokenizing hold the interpreter. Prompts are counted before they are
tokenized, and a text whose bytes are too many for the context is not tokenized at all.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ...core.errors import InvalidRequest
from ..answers.tools import Call
from ..base.errors import ApiError
from ..base.limits import SMALL_BODY
from ..base.port import TextCodec
from .schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedSchema,
    RequestBody,
    ResponseFormat,
    TokenizeRequest,
)

READERS = 2
"""Processes that read larger bodies: a dear one holds one of them."""
READ_S = 10.0
"""How long a larger body may be read, before the process that reads it is replaced."""
MAX_PARAMETER_BYTES = 1 << 17
MOST_BRACES = 32
"""Of a text in which a schema is looked for."""
_FORMS = ("str", "constrained-str")  # how pydantic names the forms that a value may have
MOST_NAME, MOST_NAMES = 64, 20
"""The notes about parameters that are left out."""
MAX_WAITING_BYTES = 1 << 26
"""Bytes of the larger bodies that may wait for a process that reads them, all together."""
Read = TypeVar("Read", bound=RequestBody)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """What a request is read by. It goes to the other process as it is."""

    models: tuple[str, ...]  # the names that clients may give
    vocab_size: int
    context_len: int
    longest_prompt: int  # tokens
    max_choices: int
    make_codec: Callable[[], TextCodec]  # makes the tokenizer of the body in another process
    without_tools: str = ""  # why the body takes none
    is_strict: bool = True  # a parameter that is unknown or has no effect is an error; else it is left out
    takes_any_model: bool = False  # the name of the model is not looked at
    reads_schemas: bool = False  # JSON follows a schema in the prompt, where a model would have read it


@dataclass(slots=True)
class OutputRequest:
    """A request for outputs, without its texts: `prompts` has their tokens, int64 [n] each."""

    request: Any  # a CompletionRequest or a ChatRequest
    prompts: list[np.ndarray]
    echoes: list[str] = field(default_factory=list)  # by choice, if the outputs repeat their prompts
    call: Call | None = None  # what the answer has to be, or with tool_choice auto may be


Found = OutputRequest | AbortRequest | bytes


def read(kind: type[RequestBody], data: bytes, rules: ReadingRules, codec: TextCodec) -> tuple[Found, tuple[str, ...]]:
    """Read the body of a request of this kind. Returns the request, or for `/tokenize` and `/detokenize` the answer,
    and the names of parameters that were left out. Raises ApiError."""
    ignored: set[str] = set()
    request = validated(kind, data, None if rules.is_strict else ignored)
    names = sorted(name for name in ignored if len(name) <= MOST_NAME and name.isprintable())
    return _found(request, rules, codec), tuple(names[:MOST_NAMES])


def _found(request: RequestBody, rules: ReadingRules, codec: TextCodec) -> Found:
    model = getattr(request, "model", None)
    if model is not None and model not in rules.models and not rules.takes_any_model:
        raise not_served(model, rules.models)
    if isinstance(request, CompletionRequest):
        return _read_completion(request, rules, codec)
    if isinstance(request, ChatRequest):
        return _read_chat(request, rules, codec)
    if isinstance(request, TokenizeRequest):
        return _tokenized(request, rules, codec)
    if isinstance(request, AbortRequest):
        return request
    assert isinstance(request, DetokenizeRequest), "no other kind has an endpoint"
    check_tokens(request.tokens, rules.vocab_size, "tokens")
    return json.dumps({"prompt": codec.decode(np.array(request.tokens, dtype=np.int64))}).encode()


def not_served(model: str, names: Sequence[str]) -> ApiError:
    """Return the error of a request for another model than those of these names."""
    served = f"the served model is {names[0]!r}" if len(names) == 1 else f"served are {', '.join(map(repr, names))}"
    message = f"the model {model[:MOST_NAME]!r} is not served here; {served}"
    return ApiError(404, message, param="model", code="model_not_found")


def validated(kind: type[Read], data: bytes, ignored: set[str] | None = None) -> Read:
    """Return the parameters of a request. Raises ApiError with the first problem. `ignored`: takes the names of
    parameters that are unknown or unsupported, which are then left out; None: they are errors."""
    try:
        return kind.model_validate_json(data, context=None if ignored is None else {"ignored": ignored})
    except ValidationError as error:
        first = _deepest(error)
    if first["type"] == "json_invalid":
        raise ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    where = ".".join(str(part) for part in first["loc"] if part not in _FORMS and "[" not in str(part))
    message = first["msg"] if first["type"] != "extra_forbidden" else "is not a parameter of this endpoint"
    param = str(first["loc"][0]) if first["loc"] else None
    raise ApiError(400, f"{where}: {message}" if where else message, param=param)


def _deepest(error: ValidationError) -> ErrorDetails:
    """Return the first problem; if a value may have several forms, the problem of the form that it comes nearest to."""
    found = error.errors(include_url=False, include_input=False)
    same = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    return max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError for a token id that is not in the vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        raise ApiError(400, f"token {max(tokens)} is not in the vocabulary of {vocab_size} tokens", param=param)


def _read_completion(request: CompletionRequest, rules: ReadingRules, codec: TextCodec) -> OutputRequest:
    given: Any = request.prompt
    if isinstance(given, str) or isinstance(given[0], int):
        given = [given]
    if request.num_outputs * len(given) > rules.max_choices:
        each = f"{request.num_outputs} outputs for each of {len(given)} prompts"
        message = f"{each}; expected at most {rules.max_choices} in all"
        raise ApiError(400, message, param="n" if request.num_outputs > 1 else "prompt")
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            _check_bytes(prompt, rules, codec, "prompt")
            tokens = _encoded(partial(codec.encode, prompt), "prompt")
        else:
            check_tokens(prompt, rules.vocab_size, "prompt")
            tokens = np.array(prompt, dtype=np.int64)
        prompts.append(_within_context(tokens, rules, "prompt"))
    echoes = [codec.decode(one) for one in prompts for _ in range(request.num_outputs)] if request.echo else []
    request.prompt = ""
    return OutputRequest(request, prompts, echoes)


def _read_chat(request: ChatRequest, rules: ReadingRules, codec: TextCodec) -> OutputRequest:
    if request.num_outputs > rules.max_choices:
        raise ApiError(400, f"{request.num_outputs} outputs; expected at most {rules.max_choices}", param="n")
    messages = [message.to_template() for message in request.messages]
    call, form = None, request.response_format
    wants_any = rules.reads_schemas and form is not None and form.type == "json_object"
    if wants_any and (schema := schema_in([message["content"] for message in messages])):
        request.response_format = ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=schema))
    if request.tools and rules.without_tools and request.tool_choice != "none":
        raise ApiError(400, rules.without_tools, param="tools", code="unsupported")
    tools, text = [], "".join(message["content"] or "" for message in messages)
    if request.tools and not rules.without_tools:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        text += json.dumps(tools)
        call = None if request.next_function is None else Call.of(request.next_function.model_dump())
    _check_bytes(text, rules, codec, "messages")
    tokens = _encoded(partial(codec.encode_chat, messages, request.end, tools), "messages")
    asked = OutputRequest(request, [_within_context(tokens, rules, "messages")], call=call)
    request.messages, request.tools = [], None if request.tools is None else request.tools[:1]
    return asked


def schema_in(texts: Sequence[str]) -> dict[str, Any] | None:
    """Return the last JSON schema of an object in these texts. Objects are looked for at MOST_BRACES places of each."""
    for text in reversed(texts):
        found: dict[str, Any] | None = None
        begin, decoder = 0, json.JSONDecoder()
        for _ in range(MOST_BRACES):
            if (begin := text.find("{", begin)) < 0:
                break
            try:
                value, begin = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                begin += 1
            else:
                found = value if isinstance(value.get("properties"), dict) else found
        if found is not None:
            return found
    return None


def _tokenized(request: TokenizeRequest, rules: ReadingRules, codec: TextCodec) -> bytes:
    if request.messages is not None and request.prompt is None:
        messages = [message.to_template() for message in request.messages]
        tokens = _encoded(partial(codec.encode_chat, messages, request.end), "messages")
    elif request.prompt is not None and request.messages is None:
        encode = partial(codec.encode, request.prompt, add_special_tokens=request.add_special_tokens)
        tokens = _encoded(encode, "prompt")
    else:
        raise ApiError(400, "expected exactly one of prompt and messages", param="prompt")
    return json.dumps({"tokens": tokens.tolist(), "count": len(tokens), "max_model_len": rules.context_len}).encode()


def _encoded(encode: Callable[[], np.ndarray], param: str) -> np.ndarray:
    try:
        return encode()
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=param) from None


def _check_bytes(text: str, rules: ReadingRules, codec: TextCodec, param: str) -> None:
    """Raise ApiError for a text that is too long for the context by its bytes alone."""
    size, most = len(text.encode(errors="replace")), codec.most_bytes_per_token
    if size > rules.longest_prompt * most:
        has = f"it has {size} bytes, {most} in a token at most"
        message = f"the prompt is too long: {has}; expected 1 to {rules.longest_prompt} tokens"
        raise ApiError(400, message, param=param, code="context_length_exceeded")


def _within_context(tokens: np.ndarray, rules: ReadingRules, param: str) -> np.ndarray:
    if not len(tokens):
        raise ApiError(400, f"the prompt has no tokens; expected 1 to {rules.longest_prompt}", param=param)
    if len(tokens) > rules.longest_prompt:  # clients know the case by these words
        message = f"the prompt is too long: it has {len(tokens)} tokens; expected 1 to {rules.longest_prompt}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return tokens


class RequestReader:
    """Reads bodies by `rules`; `codec` is the tokenizer of this process."""

    def __init__(self, rules: ReadingRules, codec: TextCodec) -> None:
        self.rules = rules
        self._codec = codec
        self._may_read = asyncio.Semaphore(READERS)
        self._free: list[ProcessPoolExecutor] = []  # a process each
        self._waiting_bytes = 0

    def start(self) -> None:
        """Start a process for long bodies now, instead of with the first of them."""
        self._free.append(self._new_process())
        self._free[-1].submit(os.getpid)

    def stop(self) -> None:
        for process in self._free:
            process.shutdown(wait=False, cancel_futures=True)

    async def read(self, kind: type[RequestBody], data: bytes) -> tuple[Found, tuple[str, ...]]:
        """Read a body, as the function `read` does. Raises ApiError, also if too many long bodies wait."""
        if len(data) <= SMALL_BODY:
            return read(kind, data, self.rules, self._codec)
        if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
            message = f"{self._waiting_bytes} bytes of long requests wait to be read"
            raise ApiError(429, message, code="too_many_bytes", retry_after_s=1)
        self._waiting_bytes += len(data)
        try:
            async with self._may_read:
                return await self._read_elsewhere(partial(_read_there, kind, data))
        except BrokenProcessPool:
            message = "the process that reads long requests has ended while it read this one"
            raise ApiError(503, message, code="reader_ended", retry_after_s=1) from None
        except TimeoutError:
            message = f"the request takes longer than {READ_S:g} s to read: send a shorter one"
            raise ApiError(400, message, code="too_long_to_read") from None
        finally:
            self._waiting_bytes -= len(data)

    async def _read_elsewhere(self, reading: Callable[[], _Result]) -> _Result:
        """Return what `reading` does in a process that is free. A process that does not end it in time is ended."""
        process, number = await self._ready_process()
        begun, is_free = process.submit(reading), False
        try:
            async with asyncio.timeout(READ_S):
                found = await asyncio.wrap_future(begun)
            is_free = True
            return found
        except ApiError:
            is_free = True
            raise
        finally:
            if is_free:
                self._free.append(process)
            elif not begun.done():
                os.kill(number, getattr(signal, "SIGKILL", signal.SIGTERM))
                process.shutdown(wait=False)

    async def _ready_process(self) -> tuple[ProcessPoolExecutor, int]:
        """Return a process that has loaded its tokenizer, and its id; one that has died meanwhile is replaced."""
        while self._free:
            process = self._free.pop()
            with suppress(BrokenProcessPool):
                return process, await asyncio.wrap_future(process.submit(os.getpid))
        process = self._new_process()
        return process, await asyncio.wrap_future(process.submit(os.getpid))

    def _new_process(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks as they are
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(self.rules,))


# -- in the other process ---------------------------------------------------------------------------------------------

_here: tuple[ReadingRules, TextCodec]


def _begin(rules: ReadingRules) -> None:
    global _here
    for number in (signal.SIGINT, signal.SIGTERM):  # to all processes of a terminal or a service: the server drains
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # where both want the same core, events of the others come first
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here = (rules, rules.make_codec())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child"
    parent.join()
    os._exit(0)


def _read_there(kind: type[RequestBody], data: bytes) -> tuple[Found, tuple[str, ...]]:
    """Read a body. What is left of it goes back whole, so it is bounded, too."""
    asked, ignored = read(kind, data, *_here)
    if isinstance(asked, OutputRequest) and len(asked.request.model_dump_json()) > MAX_PARAMETER_BYTES:
        message = f"its parameters have more than {MAX_PARAMETER_BYTES} bytes, beside prompt or messages"
        raise ApiError(413, message, code="body_too_large")
    return asked, ignored
