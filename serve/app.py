"""The application: OpenAI's endpoints and a server's own, over one body."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ..observe.log import package_version
from .answers.frontend import Frontend
from .base.connections import port_of
from .base.errors import ApiError
from .base.port import RemoteEngine
from .guards import Guards
from .metrics import Exposition
from .metrics.exposition import OPENMETRICS
from .requests.api import Api
from .requests.faults import RequestFaultInjector, RequestFaults
from .requests.identity import Identity
from .requests.reading import ReadingRules, RequestReader
from .requests.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestBody,
    TokenizeRequest,
)

PLAIN = {"/health", "/health_generate", "/ready", "/version"}
"""What needs no key: probes come without one."""
COMPONENTS = "#/components/schemas/"
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""What `ApiError` looks like, for the published schema."""
GONE = {
    "/v1/messages/count_tokens": "use /tokenize",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/responses": "use /v1/chat/completions",
    "/v1/loads": "use /load and /metrics",
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), "engines do not sleep"),
}
"""Removed endpoints -> what does the same now, or why nothing does. What was below one is gone, too."""


def make_app(
    frontend: Frontend,
    *,
    model: str | None = None,
    aliases: Sequence[str] = (),
    adapters: Sequence[str] = (),
    api_key: str | None = None,
    metrics_as: str = "foredraft",
    dialect: str = "openai",
    strict: bool = False,
    tool_call_share: float = 0.0,
    access: Callable[[Mapping[str, Any]], None] | None = None,
    faults: RequestFaults | None = None,
    engine_of_port: Mapping[int, int] = MappingProxyType({}),
    origins: Sequence[str] = (),
) -> FastAPI:
    """Return the application, which begins to serve with its lifespan.

    `model`: the name that clients see, by default the body's; requests may give one of `aliases`, too, or of
    `adapters`, which a simulation serves as the model itself. `metrics_as`: the server whose metric names are used.
    `dialect`: the server whose clients are understood. `strict`: a parameter that is unknown or has no effect is an
    error, as it always is where a model decodes; else a simulation leaves it out and names it once. `tool_call_share`:
    of the answers that may call a function, how many do. `access` gets the
    facts of each request that has been answered. `faults`: what happens to requests on demand. `engine_of_port`: the
    engine that serves alone what comes to a port. `origins`: sites whose pages may use the server, or "*"; without a
    key, other pages can change nothing. Raises ConfigError.
    """
    model = model or frontend.body.name
    names = tuple(dict.fromkeys((model, *aliases)))
    reader = RequestReader(_rules(frontend, (*names, *adapters), dialect, strict), frontend.body.tokenizer)
    api = Api(frontend, names, reader, dialect, engine_of_port, tool_call_share, adapters)
    frontend.metrics.adapters = adapters
    body = frontend.body
    exposition = Exposition(frontend.metrics, model, metrics_as, lambda: body.at_ns(time.monotonic()))

    version = package_version()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        frontend.start()
        yield
        await frontend.stop()
        reader.stop()

    app = FastAPI(title="Foredraft", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    if faults is not None:
        app.add_middleware(RequestFaultInjector, faults=faults)
    app.add_middleware(
        Guards, limits=frontend.limits, turns=frontend.turns, api_key=api_key, plain=PLAIN, origins=origins
    )
    app.add_middleware(Identity, access=access)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_own_error)
    _add_endpoints(app, api, version)
    _add_probes(app, frontend, exposition, engine_of_port)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]  # FastAPI's own way to add to it
    app.state.frontend = frontend
    app.state.reader = reader
    return app


def _add_endpoints(app: FastAPI, api: Api, version: str) -> None:
    """Add the endpoints for those who use the model."""
    for path, kind, endpoint, types in (
        ("/v1/completions", CompletionRequest, api.complete, (JSON, EVENTS)),
        ("/v1/chat/completions", ChatRequest, api.chat, (JSON, EVENTS)),
        ("/tokenize", TokenizeRequest, api.tokenize, (JSON,)),
        ("/detokenize", DetokenizeRequest, api.detokenize, (JSON,)),
        ("/abort", AbortRequest, api.abort, (JSON,)),
    ):
        answers = _answers(*types)
        app.post(path, response_class=Response, openapi_extra=_takes(kind), responses=answers)(endpoint)
    app.get("/v1/models", responses=_answers(JSON))(api.models)
    app.get("/v1/models/{name:path}", responses=_answers(JSON))(api.model)
    app.get("/version", responses=_answers(JSON))(lambda: {"version": version})


def _add_probes(app: FastAPI, frontend: Frontend, exposition: Exposition, engine_of_port: Mapping[int, int]) -> None:
    """Add the endpoints for those who watch the server."""
    body = frontend.body

    def engines(request: Request) -> Sequence[int]:
        """Return the numbers of the engines that stand behind the port of a request."""
        alone = engine_of_port.get(port_of(request.scope))
        return range(len(body.engines)) if alone is None else (alone,)

    probe: dict[str, Any] = {"response_class": PlainTextResponse, "responses": _answers(TEXT, unready=TEXT)}

    @app.get("/health", **probe)
    @app.get("/health_generate", **probe)  # what probes of SGLang ask; here both are the engine's own state
    async def health() -> Response:
        """200 while the engine runs, 503 while it starts and once it has failed."""
        return PlainTextResponse("", 200 if frontend.is_well else 503)

    @app.get("/ready", responses=_answers(JSON, unready=JSON))
    async def ready() -> Response:
        """200 while requests are taken, 503 while the server stops. Of a simulation it says whether real time is kept,
        and the greatest `--speed` that can be expected to hold."""
        return JSONResponse(_readiness(frontend), 200 if frontend.is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse, responses=_answers(TEXT, OPENMETRICS))
    async def metrics(request: Request) -> Response:
        """The metrics in Prometheus' text format, or as OpenMetrics for clients that accept it."""
        content, media_type = exposition(request.headers.get("accept", ""), engines(request))
        return Response(content, headers={"Content-Type": media_type})

    @app.get("/load", responses=_answers(JSON))
    async def load(request: Request) -> Response:
        """How many outputs are running or waiting, as vLLM has it."""
        values = [frontend.metrics.values(number, 0) for number in engines(request)]
        outputs = sum(int(found.get("running", 0) + found.get("waiting", 0)) for found in values)
        return JSONResponse({"server_load": outputs})


def _readiness(frontend: Frontend) -> dict[str, Any]:
    answer: dict[str, Any] = {"ready": frontend.is_ready}
    if not frontend.is_ready:
        answer["reason"] = frontend.why_not_ready
    workers = [engine for engine in frontend.body.engines if isinstance(engine, RemoteEngine)]
    if workers:
        answer["workers"] = {worker.name: worker.loss or "lives" for worker in workers}
    if (pace := frontend.body.pace) is not None:
        answer |= {"speed": pace.speed, "possible_speed": pace.possible_speed, "behind_s": round(pace.behind_s, 3)}
        if not pace.is_kept:
            answer["warning"] = pace.sentence
    return answer


def _rules(frontend: Frontend, models: tuple[str, ...], dialect: str, strict: bool) -> ReadingRules:
    body, limits = frontend.body, frontend.limits
    longest = min(body.context_len - 1, limits.max_prompt_tokens or body.context_len)
    sizes = (body.vocab_size, body.context_len, longest, limits.max_choices)
    without_tools = body.unsupported.get("tools", "")
    return ReadingRules(
        models,
        *sizes,
        body.make_codec,
        without_tools,
        is_strict=strict or body.pace is None,  # a model would decode something else than what was asked for
        takes_any_model=dialect == "sglang",
        reads_schemas=body.pace is not None,
    )


def _takes(kind: type[RequestBody]) -> dict[str, Any]:
    """Return what the published schema says of an endpoint that takes such a body: the server reads it itself."""
    content = {JSON: {"schema": {"$ref": f"{COMPONENTS}{kind.__name__}"}}}
    return {"requestBody": {"content": content, "required": True}}


def _answers(*types: str, unready: str = "") -> dict[int | str, dict[str, Any]]:
    """Return what the published schema says of the answers of an endpoint: of success, of these media types; of the
    status 503, where the endpoint says by it that the server is not ready, `unready`; of errors."""
    found: dict[int | str, dict[str, Any]] = {200: {"content": {one: {} for one in types}}}
    if unready:
        found[503] = {"description": "not now", "content": {unready: {}}}
    error = {"schema": {"$ref": f"{COMPONENTS}Error"}}
    return {**found, "default": {"description": "an error", "content": {JSON: error}}}


def _schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        kinds = (AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)
        _, shown = models_json_schema([(kind, "validation") for kind in kinds], ref_template=f"{COMPONENTS}{{model}}")
        app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(
            {**shown["$defs"], "Error": ERROR}
        )
    return app.openapi_schema


# -- errors -----------------------------------------------------------------------------------------------------------


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.to_json(), error.status, error.headers)


async def _own_error(request: Request, error: Exception) -> Response:
    """Answer where the server itself is at fault; its traceback goes to the log."""
    return await _api_error(
        request, ApiError(500, "the server failed; its log has the traceback", code="internal_error")
    )


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    message, path = str(error.detail), request.url.path
    if (gone := next((one for one in GONE if f"{path}/".startswith(f"{one}/")), None)) is not None:
        message = f"{gone} is gone: {GONE[gone]}"
    return JSONResponse(ApiError(error.status_code, message).to_json(), error.status_code, error.headers)
