"""The application: OpenAI's endpoints and a server's own, over one body."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from ..core.contract.request import Grammar, SamplingParams
from ..core.errors import ForedraftError, InvalidRequest
from ..observe.log import package_version
from .answer import Answer
from .bodies.port import Order
from .errors import ApiError
from .forms import ChatForm, CompletionForm
from .frontend import Frontend
from .guards import Guards
from .metrics import Exposition
from .schema import AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, Sampled, TokenizeRequest

DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it; a chat goes on as far as the context reaches."""
UNSEEDED = 0
SEEDS = 2**63 - 1
LONG_TEXT = 1 << 14
"""Characters from which a text is tokenized on another thread, for the event loop has other clients."""
PLAIN = {"/health", "/ready", "/version"}
"""What needs no key: probes come without one."""


def make_app(
    frontend: Frontend, *, model: str | None = None, api_key: str | None = None, metrics_as: str = "foredraft"
) -> FastAPI:
    """Return the application, which begins to serve with its lifespan.

    `model`: the name that clients see, by default the body's. `metrics_as`: the server whose metric names are used.
    Raises ConfigError.
    """
    model = model or frontend.body.name
    api = _Api(frontend, model)
    exposition = Exposition(frontend.metrics, model, metrics_as)
    version = package_version()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        frontend.start()
        yield
        await frontend.stop()

    app = FastAPI(title="Foredraft", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guards, limits=frontend.limits, api_key=api_key, plain=PLAIN)
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_own_error)
    app.post("/v1/completions", response_class=Response)(api.complete)
    app.post("/v1/chat/completions", response_class=Response)(api.chat)
    app.get("/v1/models")(api.models)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    app.post("/abort")(api.abort)
    app.get("/version")(lambda: {"version": version})

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, 503 once it has failed."""
        return PlainTextResponse("", 200 if frontend.scheduler.is_running else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken, 503 while the server stops."""
        return PlainTextResponse("", 200 if frontend.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """The metrics in Prometheus' text format."""
        content, media_type = exposition()
        return Response(content, headers={"Content-Type": media_type})

    app.state.frontend = frontend
    return app


class _Api:
    def __init__(self, frontend: Frontend, model: str) -> None:
        self._body = body = frontend.body
        self._frontend = frontend
        self._model = model
        self._codec = body.tokenizer
        self._created = int(time.time())

    async def complete(self, asked: CompletionRequest) -> Response:
        """Continue one prompt or several."""
        self._check(asked, {"logprobs": asked.logprobs is not None})
        if asked.echo and asked.logprobs is not None:
            raise ApiError(
                400, "log-probabilities of the prompt are not supported: leave out echo or logprobs", param="echo"
            )
        prompts = await self._prompts(asked.prompt)
        outputs = () if asked.logprobs is None else _outputs(asked.logprobs)
        sampling = await self._sampling(asked)
        orders = self._orders(asked, prompts, asked.max_tokens or DEFAULT_MAX_TOKENS, sampling, outputs)
        reply = self._frontend.open(_new_id("cmpl"), orders, sum(map(len, prompts)))
        echoes = (
            [self._codec.decode(prompt) for prompt in prompts for _ in range(asked.num_outputs)] if asked.echo else []
        )
        form = CompletionForm(
            reply, self._model, self._codec, usage=asked.usage, num_logprobs=asked.logprobs, echoes=echoes
        )
        return Answer(self._frontend, reply, form, stream=bool(asked.stream))

    async def chat(self, asked: ChatRequest) -> Response:
        """Answer a conversation."""
        self._check(asked, {"logprobs": bool(asked.logprobs), "top_logprobs": bool(asked.top_logprobs)})
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
            raise ApiError(400, "contradicts max_tokens: give one of them", param="max_completion_tokens")
        prompt = await self._chat_prompt([message.to_template() for message in asked.messages])
        outputs = _outputs(asked.top_logprobs or 0) if asked.logprobs else ()
        max_tokens, sampling = asked.max_completion_tokens or asked.max_tokens, await self._sampling(asked)
        orders = self._orders(asked, [prompt], max_tokens, sampling, outputs, "messages")
        reply = self._frontend.open(_new_id("chatcmpl"), orders, len(prompt))
        shown = (asked.top_logprobs or 0) if asked.logprobs else None
        form = ChatForm(reply, self._model, self._codec, usage=asked.usage, num_logprobs=shown)
        return Answer(self._frontend, reply, form, stream=bool(asked.stream))

    async def models(self) -> dict[str, Any]:
        """The served model."""
        card = {"id": self._model, "object": "model", "created": self._created, "owned_by": "foredraft"}
        return {"object": "list", "data": [card | {"max_model_len": self._body.context_len}]}

    async def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a prompt, or of a conversation as the model's template writes it."""
        self._check_model(asked.model)
        if asked.messages is not None and asked.prompt is None:
            tokens = await self._chat_prompt([message.to_template() for message in asked.messages])
        elif asked.prompt is not None and asked.messages is None:
            tokens = await self._encode(asked.prompt, asked.add_special_tokens)
        else:
            raise ApiError(400, "expected exactly one of prompt and messages", param="prompt")
        return {"tokens": tokens.tolist(), "count": len(tokens), "max_model_len": self._body.context_len}

    async def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens."""
        self._check_model(asked.model)
        self._check_tokens(asked.tokens, "tokens")
        return {"prompt": self._codec.decode(np.array(asked.tokens, dtype=np.int64))}

    async def abort(self, asked: AbortRequest) -> dict[str, Any]:
        """End an answer with what it has; its finish reason is abort."""
        reply = self._frontend.find(asked.request_id)
        if reply is None:
            raise ApiError(404, f"no answer {asked.request_id!r} is being made", param="request_id", code="not_found")
        self._frontend.abort(reply.choices)
        return {"aborted": asked.request_id}

    # -- requests -----------------------------------------------------------------------------------------------------

    def _check(self, asked: Sampled, given: dict[str, bool]) -> None:
        self._check_model(asked.model)
        given |= dict.fromkeys(asked.shaping, True) | {"response_format": asked.schema_text is not None}
        for name, is_given in given.items():
            if is_given and name in self._body.unsupported:
                raise ApiError(400, self._body.unsupported[name], param=name, code="unsupported")
        if asked.stream_options is not None and not asked.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            raise ApiError(
                404,
                f"the model {model!r} is not served here; the served model is {self._model!r}",
                param="model",
                code="model_not_found",
            )

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        if tokens and max(tokens) >= self._body.vocab_size:
            raise ApiError(
                400, f"token {max(tokens)} is not in the vocabulary of {self._body.vocab_size} tokens", param=param
            )

    async def _prompts(self, given: Any) -> list[np.ndarray]:
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                prompts.append(await self._encode(prompt))
            else:
                self._check_tokens(prompt, "prompt")
                prompts.append(np.array(prompt, dtype=np.int64))
        return prompts

    async def _encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        try:
            if len(text) < LONG_TEXT:
                return self._codec.encode(text, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self._codec.encode, text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:
            raise ApiError(400, str(error), param="prompt") from None

    async def _chat_prompt(self, messages: list[dict[str, Any]]) -> np.ndarray:
        try:
            return await asyncio.to_thread(self._codec.encode_chat, messages)
        except InvalidRequest as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _sampling(self, asked: Sampled) -> SamplingParams:
        """Return the sampling parameters. A seed is mapped to 1 … SEEDS, for 0 means none; without one the order's id
        keys its draws.

        Raises ApiError for a schema that no output can be made to follow.
        """
        grammar, shaping = None, asked.shaping
        self._check_tokens([token for token, _ in shaping.get("logit_bias", ())], "logit_bias")
        if asked.schema_text is not None:
            if asked.ignore_eos:
                raise ApiError(
                    400, "contradicts response_format, which decides where the text ends", param="ignore_eos"
                )
            grammar = Grammar("json_schema", asked.schema_text)
            try:
                await asyncio.to_thread(self._body.check_grammar, grammar)
            except ForedraftError as error:
                raise ApiError(400, str(error), param="response_format") from None
        return SamplingParams(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(asked.top_k or 0, 0),
            seed=UNSEEDED if asked.seed is None else (asked.seed - 1) % SEEDS + 1,
            grammar=grammar,
            **shaping,
        )

    def _orders(
        self,
        asked: Sampled,
        prompts: Sequence[np.ndarray],
        max_tokens: int | None,
        sampling: SamplingParams,
        outputs: tuple[str, ...],
        param: str = "prompt",
    ) -> list[Order]:
        """Return n orders for each prompt. Raises ApiError beyond a limit."""
        limits, at_s = self._frontend.limits, time.monotonic()
        if asked.num_outputs * len(prompts) > limits.max_choices:
            each = f"{asked.num_outputs} outputs for each of {len(prompts)} prompts"
            message = f"{each}; expected at most {limits.max_choices} in all"
            raise ApiError(400, message, param="n" if asked.num_outputs > 1 else param)
        longest = min(self._body.context_len - 1, limits.max_prompt_tokens or self._body.context_len)
        for prompt in prompts:
            if not 1 <= len(prompt) <= longest:
                message = f"the prompt has {len(prompt)} tokens; expected 1 to {longest}"
                raise ApiError(400, message, param=param, code="context_length_exceeded" if len(prompt) else None)
        room = self._body.context_len - max(map(len, prompts))
        if max_tokens is not None and max_tokens > room:
            asked_for = f"{max_tokens} tokens after a prompt of {self._body.context_len - room}"
            message = f"{asked_for}; the context has room for {room}"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        orders = []
        for prompt in prompts:
            for i in range(asked.num_outputs):
                seed = sampling.seed if asked.seed is None else (sampling.seed + i - 1) % SEEDS + 1
                orders.append(
                    Order(
                        number=0,  # the frontend counts
                        prompt=prompt,
                        max_tokens=max_tokens or room,
                        at_s=at_s,
                        sampling=replace(sampling, seed=seed),
                        stop=asked.stops,
                        ignore_eos=asked.ignore_eos,
                        outputs=outputs,
                        priority=asked.priority,
                    )
                )
        return orders


def _outputs(num_top: int) -> tuple[str, ...]:
    return ("logprobs", "top_logprobs", "top_logprob_ids") if num_top else ("logprobs",)


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"


# -- errors -----------------------------------------------------------------------------------------------------------


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _own_error(request: Request, error: Exception) -> Response:
    """Answer where the server itself is at fault; its traceback goes to the log."""
    return await _api_error(
        request, ApiError(500, "the server failed; its log has the traceback", code="internal_error")
    )


async def _http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error.__cause__, UnicodeDecodeError):
        error.detail = f"the body is not UTF-8 (at byte {error.__cause__.start + 1})"
    return JSONResponse(ApiError(error.status_code, str(error.detail)).to_json(), error.status_code, error.headers)


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return await _api_error(request, ApiError(400, f"the body is not JSON: {first['ctx']['error']}"))
    message = first["msg"] if first["type"] != "extra_forbidden" else "is not a parameter of this endpoint"
    param = place[0] if place else None
    where = ".".join(place)
    return await _api_error(request, ApiError(400, f"{where}: {message}" if where else message, param=param))
