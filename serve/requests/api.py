"""OpenAI's endpoints, and those for tokens: from what a client asks to the answer that is sent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ...core.contract.request import SHAPING, Grammar, SamplingParams
from ...core.contract.text import PromptScores
from ...core.errors import ForedraftError
from ..answers.answer import ReadyAnswer, StreamedAnswer
from ..answers.forms import ChatForm, CompletionForm, Echo, EchoedChoice, EchoedReply
from ..answers.frontend import Frontend
from ..answers.reply import Reply
from ..answers.tools import Call, CallForm
from ..base.connections import port_of
from ..base.errors import ApiError
from ..base.limits import SMALL_BODY
from ..base.port import Order, ScoresPrompts, namespace_of
from .identity import FACTS, TRACE_HEADERS
from .kv_transfer import KvTransfers
from .reading import Found, OutputRequest, RequestReader, check_tokens, not_served
from .schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    Sampled,
    TokenizeRequest,
)

DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`, as OpenAI has it; a chat goes on as far as the context reaches."""
GRAMMAR_S = 10.0
"""How long the grammar of a schema may take, beside all else."""
DIALECTS = ("openai", "vllm", "sglang")
UNSEEDED = 0
SEEDS = 2**63 - 1


class Api:
    """The endpoints of a server of a model, whose answers have the first of its `names`. `adapters`: names of adapters
    of this model, each with prefixes of its own in the cache; their answers have their names. `dialect`: the server
    whose clients come. `engine_of_port`: the engine that serves alone what comes to a port. `tool_call_share`: of the
    answers that may call a function and need not, how many do."""

    def __init__(
        self,
        frontend: Frontend,
        names: Sequence[str],
        reader: RequestReader,
        dialect: str = "openai",
        engine_of_port: Mapping[int, int] = MappingProxyType({}),
        tool_call_share: float = 0.0,
        adapters: Sequence[str] = (),
    ) -> None:
        self._dialect = dialect
        self._tool_call_share = tool_call_share
        self._num_may_call = 0
        self._engine_of_port = engine_of_port
        self._body = frontend.body
        self._frontend = frontend
        self._names = names
        self._adapters = adapters
        self._reader = reader
        self._is_strict = reader.rules.is_strict
        self._codec = frontend.body.tokenizer
        self._created = int(time.time())
        self._kv = KvTransfers(frontend)
        self._scoring = asyncio.Lock()

    async def complete(self, request: Request) -> Response:
        """Continue one prompt or several."""
        read = await self._asked(CompletionRequest, request)
        asked: CompletionRequest = read.request
        self._check(read, {"logprobs": asked.logprobs is not None})
        echoes = await self._echoes(read)
        if asked.max_tokens == 0:
            return self._prompt_alone(asked, read.prompts, echoes)
        outputs = () if asked.logprobs is None else _outputs(asked.logprobs)
        most = min(DEFAULT_MAX_TOKENS, self._body.defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
        orders = await self._orders(request, read, asked.max_tokens or most, outputs)
        reply = self._open("cmpl-", request, orders, sum(map(len, read.prompts)))
        form = CompletionForm(
            reply,
            self._adapter(asked) or self._names[0],
            self._codec,
            usage=asked.usage,
            num_logprobs=asked.logprobs,
            echoes=echoes,
        )
        form.extra = self._kv.sent(request, asked, reply)
        return StreamedAnswer(self._frontend, reply, form, stream=bool(asked.stream))

    async def _echoes(self, read: OutputRequest) -> list[Echo]:
        """Return the prompts that the choices repeat, with logprobs the log-probabilities of their tokens. Raises
        ApiError if the body cannot tell them."""
        asked: CompletionRequest = read.request
        if not read.echoes:
            return []
        scores: list[PromptScores | None] = [None] * len(read.prompts)
        if asked.logprobs is not None:
            if not isinstance(self._body, ScoresPrompts):
                message = "log-probabilities of the prompt are not supported here: leave out echo or logprobs"
                raise ApiError(400, message, param="echo")
            scores = [await self._score(self._body, one, asked.logprobs) for one in read.prompts]
        each = asked.num_outputs
        return [Echo(text, read.prompts[i // each].tolist(), scores[i // each]) for i, text in enumerate(read.echoes)]

    async def _score(self, body: ScoresPrompts, prompt: np.ndarray, num_top: int) -> PromptScores:
        """Return the log-probabilities of a prompt's tokens, of one prompt at a time: each takes a pass of the model.
        Raises ApiError."""
        async with self._scoring:
            begun = self._frontend.scheduler.call(lambda: body.score(prompt, num_top))
            try:
                under_way = await asyncio.wrap_future(begun)
                return await asyncio.wrap_future(under_way)
            except ForedraftError as error:
                raise ApiError(503, str(error)) from None

    def _prompt_alone(
        self, asked: CompletionRequest, prompts: Sequence[np.ndarray], echoes: Sequence[Echo]
    ) -> Response:
        """Answer a request for no tokens: the prompt itself. Raises ApiError if it does not ask for that."""
        if not echoes or asked.stream:
            raise ApiError(400, "0 tokens are none to send: give echo, and no stream", param="max_tokens")
        choices = [EchoedChoice(i) for i in range(len(echoes))]
        reply = EchoedReply(f"cmpl-{secrets.token_hex(12)}", choices, sum(map(len, prompts)), int(time.time()))
        form = CompletionForm(
            reply,
            self._adapter(asked) or self._names[0],
            self._codec,
            usage=asked.usage,
            num_logprobs=asked.logprobs,
            echoes=echoes,
        )
        return ReadyAnswer(form.whole(), self._frontend.limits.stall_s)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        read = await self._asked(ChatRequest, request)
        asked: ChatRequest = read.request
        self._check(read, {"logprobs": bool(asked.logprobs), "top_logprobs": bool(asked.top_logprobs)})
        if asked.top_logprobs and not asked.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        both = asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens)
        if both and self._is_strict:
            raise ApiError(400, "contradicts max_tokens: give one of them", param="max_completion_tokens")
        if read.call is not None and not asked.demands_call and not self._calls():
            read.call = None
        outputs = _outputs(asked.top_logprobs or 0) if asked.logprobs else ()
        orders = await self._orders(request, read, asked.max_completion_tokens or asked.max_tokens, outputs)
        reply = self._open("chatcmpl-", request, orders, len(read.prompts[0]))
        shown = (asked.top_logprobs or 0) if asked.logprobs else None
        if read.call is not None:
            form: ChatForm = CallForm(
                reply, self._adapter(asked) or self._names[0], self._codec, usage=asked.usage, call=read.call
            )
        else:
            form = ChatForm(
                reply, self._adapter(asked) or self._names[0], self._codec, usage=asked.usage, num_logprobs=shown
            )
        form.extra = self._kv.sent(request, asked, reply)
        return StreamedAnswer(self._frontend, reply, form, stream=bool(asked.stream))

    def _calls(self) -> bool:
        """Return whether an answer that need not call a function does: evenly, so that the share is exact."""
        before, self._num_may_call = self._num_may_call, self._num_may_call + 1
        return int(self._num_may_call * self._tool_call_share) > int(before * self._tool_call_share)

    async def models(self) -> dict[str, Any]:
        """The served model by each of its names, and its adapters."""
        return {"object": "list", "data": [self._card(name) for name in (*self._names, *self._adapters)]}

    async def model(self, name: str) -> dict[str, Any]:
        """The served model or an adapter, by its name."""
        if name not in self._reader.rules.models:
            raise not_served(name, self._reader.rules.models)
        return self._card(name)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a prompt, or of a conversation as the model's template writes it."""
        return await self._told(TokenizeRequest, request)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        return await self._told(DetokenizeRequest, request)

    async def abort(self, request: Request) -> Response:
        """End an answer with what it has; its finish reason is abort."""
        if len(await _json_of(request)) > SMALL_BODY:
            raise ApiError(413, f"the body is larger than {SMALL_BODY} bytes", code="body_too_large")
        asked = await self._read(AbortRequest, request)
        assert isinstance(asked, AbortRequest), "the request names an answer"
        reply = self._frontend.find(asked.request_id)
        if reply is None:
            raise ApiError(404, f"no answer {asked.request_id!r} is being made", param="request_id", code="not_found")
        self._frontend.abort(reply.choices)
        return JSONResponse({"aborted": asked.request_id})

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _read(self, kind: type[RequestBody], request: Request) -> Found:
        """Read a body; name the parameters that are left out in the log, once."""
        found, ignored = await self._reader.read(kind, await _json_of(request))
        for name in ignored:
            self._leave_out(name)
        return found

    def _leave_out(self, name: str) -> None:
        self._frontend.tell_once(f"note: {name} of requests has no effect here")

    async def _asked(self, kind: type[RequestBody], request: Request) -> OutputRequest:
        read = await self._read(kind, request)
        assert isinstance(read, OutputRequest), "the request is one for outputs"
        return read

    async def _told(self, kind: type[RequestBody], request: Request) -> Response:
        answer = await self._read(kind, request)
        assert isinstance(answer, bytes), "the request is answered where it is read"
        return ReadyAnswer(answer, self._frontend.limits.stall_s)

    def _open(self, prefix: str, request: Request, orders: list[Order], num_prompt_tokens: int) -> Reply:
        """Send orders to the body. The answer has the request's id, as that of vLLM has, unless another one has it."""
        facts = request.scope.get(FACTS, {})
        reply_id = f"{prefix}{facts.get('request_id') or secrets.token_hex(12)}"
        if self._frontend.find(reply_id) is not None:
            reply_id = f"{prefix}{secrets.token_hex(12)}"
        reply = self._frontend.open(reply_id, orders, num_prompt_tokens)
        names = [choice.order.request_id for choice in reply.choices]
        facts["orders"] = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        return reply

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "foredraft"}
        parent = self._names[0] if name in self._adapters else None
        return card | {"root": name, "parent": parent, "max_model_len": self._body.context_len}

    def _adapter(self, asked: Sampled) -> str:
        return asked.model if asked.model is not None and asked.model in self._adapters else ""

    def _check(self, read: OutputRequest, given: dict[str, bool]) -> None:
        """Raise ApiError for a parameter that the body cannot honour. Leave out one without effect, unless the server
        is strict."""
        asked: Sampled = read.request
        given |= dict.fromkeys(asked.shaping, True) | {"response_format": asked.schema_text is not None}
        given["min_tokens"] = bool(asked.min_tokens)
        given["kv_transfer_params"] = getattr(asked, "kv_transfer_params", None) is not None
        without_effect = self._body.without_effect
        refused = {**self._body.unsupported, **(without_effect if self._is_strict else {})}
        for name in (name for name, is_given in given.items() if is_given):
            if name in refused:
                raise ApiError(400, refused[name], param=name, code="unsupported")
            if name in without_effect:
                setattr(asked, name, None)
                self._leave_out(name)
        if asked.stream_options is not None and not asked.stream and self._dialect != "sglang":
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")

    async def _grammar(self, schema: str, param: str) -> Grammar:
        """Return the grammar of a schema. Raises ApiError for one that no output can be made to follow, or that takes
        too long."""
        grammar = Grammar("json_schema", schema)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._body.check_grammar, grammar), GRAMMAR_S)
        except TimeoutError:
            message = f"no grammar was made of the schema within {GRAMMAR_S:g} s"
            raise ApiError(400, message, param=param, code="schema_too_large") from None
        except ForedraftError as error:
            raise ApiError(400, str(error), param=param) from None
        return grammar

    async def _sampling(self, asked: Sampled, call: Call | None) -> SamplingParams:
        """Return the sampling parameters; the body has defaults for those that are left out. A seed is mapped to 1 …
        SEEDS, for 0 means none; without one the order's id keys its draws. The text is the arguments of `call` if there
        is one.

        Raises ApiError as `_grammar` does.
        """
        usual = {name: value for name, value in self._body.defaults.items() if getattr(asked, name, None) is None}
        grammar, shaping = None, {name: usual[name] for name in SHAPING if name in usual} | asked.shaping
        biased = [token for token, _ in shaping.get("logit_bias", ())]
        check_tokens(biased, self._body.vocab_size, "logit_bias")
        if asked.schema_text is not None:
            ends = {"ignore_eos": asked.ignore_eos, "min_tokens": bool(asked.min_tokens)}
            if wrong := next((name for name, is_given in ends.items() if is_given), None):
                message = "contradicts response_format, which decides where the text ends"
                raise ApiError(400, message, param=wrong)
            grammar = await self._grammar(asked.schema_text, "response_format")
        if call is not None:
            grammar = await self._grammar(call.schema, "tools")
        return SamplingParams(
            temperature=usual.get("temperature", 1.0) if asked.temperature is None else asked.temperature,
            top_p=usual.get("top_p", 1.0) if asked.top_p is None else asked.top_p,
            top_k=max(usual.get("top_k", 0) if asked.top_k is None else asked.top_k, 0),
            seed=UNSEEDED if asked.seed is None else (asked.seed - 1) % SEEDS + 1,
            grammar=grammar,
            **shaping,
        )

    async def _orders(
        self, request: Request, read: OutputRequest, max_tokens: int | None, outputs: tuple[str, ...]
    ) -> list[Order]:
        """Return n orders for each prompt. Raises ApiError if their outputs do not fit."""
        asked, prompts, at_s = read.request, read.prompts, time.monotonic()
        sampling = await self._sampling(asked, read.call)
        room = self._body.context_len - max(map(len, prompts))
        most = min(room, self._body.defaults.get("max_tokens", room))
        if asked.min_tokens is not None and asked.min_tokens > (max_tokens or most):
            message = f"{asked.min_tokens} is more than the output may have: {max_tokens or most} tokens"
            raise ApiError(400, message, param="min_tokens")
        if max_tokens is not None and max_tokens > room:
            asked_for = f"{max_tokens} tokens after a prompt of {self._body.context_len - room}"
            message = f"{asked_for}; this model's maximum context length is {self._body.context_len} tokens"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        has_kv = self._kv.comes(asked, prompts, max_tokens or most)
        engine = self._engine_of_port.get(port_of(request.scope))
        trace = tuple((name, request.headers[name]) for name in TRACE_HEADERS if name in request.headers)
        orders: list[Order] = []
        adapter = self._adapter(asked)
        for prompt in prompts:
            for i in range(asked.num_outputs):
                seed = sampling.seed if asked.seed is None else (sampling.seed + i - 1) % SEEDS + 1
                orders.append(
                    Order(
                        number=0,  # the frontend counts
                        prompt=prompt,
                        max_tokens=max_tokens or most,
                        at_s=at_s,
                        sampling=replace(sampling, seed=seed),
                        stop=asked.stops,
                        ignore_eos=asked.ignore_eos,
                        outputs=outputs,
                        priority=-asked.priority if self._dialect == "vllm" else asked.priority,
                        min_tokens=asked.min_tokens or 0,
                        stop_tokens=frozenset(asked.stop_token_ids or ()),
                        adapter=adapter,
                        namespace=namespace_of(adapter, asked.cache_salt or ""),
                        engine=engine,
                        has_kv=has_kv,
                        trace=trace,
                        num_outputs=asked.num_outputs,
                        is_first=not orders,
                        streams=bool(asked.stream),
                    )
                )
        return orders


def _outputs(num_top: int) -> tuple[str, ...]:
    return ("logprobs", "top_logprobs", "top_logprob_ids") if num_top else ("logprobs",)


async def _json_of(request: Request) -> bytes:
    """Return the body of a request. Raises ApiError if it says that it is something else than JSON, as all do that a
    browser sends for another site without asking first."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body is {kind}: send Content-Type: application/json")
    return await request.body()
