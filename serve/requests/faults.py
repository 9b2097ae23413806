"""Faults on demand, between client and server: a refusal, a connection that is reset or goes silent, a slow answer.

The headers `X-Fault` and `X-Delay-Ms` ask for one where that is switched on. A rule of the admin application, which has
a port of its own, asks for one for a share of all requests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from socket import socket
from typing import Annotated, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..answers.answer import client_leaves
from ..base.connections import TRANSPORT
from ..base.errors import ApiError
from .reading import validated
from .schema import RequestBody

Kind = Literal["503", "reset", "stall", "slow"]
KINDS = ("503", "reset", "stall", "slow")
MAX_DELAY_MS = 600_000
SLOW_MS = 100
"""Before each part of a slow answer, unless the request says otherwise."""
PATHS = ("/v1/completions", "/v1/chat/completions")


class FaultRule(RequestBody):
    """A fault for a share of all requests; `fault` null: only a delay."""

    fault: Kind | None = None
    delay_ms: Annotated[int, Field(ge=0, le=MAX_DELAY_MS)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class RequestFaults:
    """What happens to requests: what their headers ask for, if `by_header`, else what `rule` says."""

    def __init__(self, *, by_header: bool, seed: int = 0) -> None:
        self.rule: FaultRule | None = None
        self._by_header = by_header
        self._dice = random.Random(seed)

    def of(self, headers: Mapping[bytes, bytes]) -> FaultRule | None:
        """Return the fault of a request with these headers. Raises ApiError for a header that names none."""
        kind, delay = headers.get(b"x-fault"), headers.get(b"x-delay-ms")
        if self._by_header and (kind is not None or delay is not None):
            fault = None if kind is None else kind.decode("latin-1")
            if fault is not None and fault not in KINDS:
                raise ApiError(400, f"X-Fault is {fault!r}; expected one of {', '.join(KINDS)}")
            if delay is not None and not (delay.isdigit() and int(delay) <= MAX_DELAY_MS):
                raise ApiError(400, f"X-Delay-Ms is {delay.decode('latin-1')!r}; expected 0 to {MAX_DELAY_MS}")
            return FaultRule.model_validate({"fault": fault, "delay_ms": None if delay is None else int(delay)})
        rule = self.rule
        return rule if rule is not None and self._dice.random() < rule.share else None


class RequestFaultInjector:
    """Carries the faults out, on requests for outputs."""

    def __init__(self, app: ASGIApp, faults: RequestFaults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rule = None
        if scope["type"] == "http" and scope["path"] in PATHS:
            try:
                rule = self._faults.of(dict(scope["headers"]))
            except ApiError as wrong:
                await JSONResponse(wrong.to_json(), wrong.status)(scope, receive, send)
                return
        if rule is None:
            await self._app(scope, receive, send)
            return
        scope, transport = {**scope, TRANSPORT: None}, scope.get(TRANSPORT)  # all of the answer passes here
        if rule.delay_ms and rule.fault != "slow":
            await asyncio.sleep(rule.delay_ms / 1e3)
        if rule.fault == "503":
            error = ApiError(503, "a fault that was asked for", code="injected", retry_after_s=1)
            await JSONResponse(error.to_json(), error.status, error.headers)(scope, receive, send)
        elif rule.fault == "reset" and transport is not None:
            transport.abort()
            await client_leaves(receive)
        else:
            await self._app(scope, receive, _Hindered(rule, send))


class _Hindered:
    """Sends the parts of an answer slowly, or none after the first."""

    def __init__(self, rule: FaultRule, send: Send) -> None:
        self._rule = rule
        self._send = send
        self._num_parts = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if self._rule.fault == "stall" and (self._num_parts or not message.get("more_body")):
                await asyncio.Event().wait()  # until the answer is given up
            if self._rule.fault == "slow":
                await asyncio.sleep((SLOW_MS if self._rule.delay_ms is None else self._rule.delay_ms) / 1e3)
            self._num_parts += 1
        await self._send(message)


@dataclass(frozen=True, slots=True)
class Admin:
    """The application of the admin port, and its address."""

    app: FastAPI
    listener: socket


def admin_app(faults: RequestFaults) -> FastAPI:
    """Return the application of the admin port: GET, PUT and DELETE of `/faults`."""
    app = FastAPI(title="Foredraft, admin", docs_url=None, redoc_url=None)

    @app.get("/faults")
    async def shown() -> Response:
        """The rule, or null."""
        return JSONResponse(None if faults.rule is None else faults.rule.model_dump())

    @app.put("/faults")
    async def put(request: Request) -> Response:
        """Use another rule."""
        faults.rule = validated(FaultRule, await request.body())
        return await shown()

    @app.delete("/faults")
    async def delete() -> Response:
        """Use no rule."""
        faults.rule = None
        return await shown()

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.to_json(), error.status)

    return app
