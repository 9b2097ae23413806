"""The name of a request: from its client or made here, in the answer's head and id, and in the line of the log."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

FACTS = "foredraft.facts"
"""Where a scope has what is known of its request: `request_id`, and `orders` once it has some."""
POD = {"POD_NAME": b"x-inference-pod", "POD_NAMESPACE": b"x-inference-namespace"}
"""Variables of the environment whose values stand in the head of each answer, as llm-d's simulator has them."""
TRACE_HEADERS = ("traceparent", "tracestate")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_TRACE = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


class Identity:
    """Takes the header X-Request-Id of a request, or makes one, and sends it back, with those of POD. `access` gets the
    facts of each request that has been answered; `traceparent` gives its `trace_id`."""

    def __init__(self, app: ASGIApp, access: Callable[[Mapping[str, Any]], None] | None) -> None:
        self._app = app
        self._access = access
        self._pod = [(name, os.environ[key].encode()) for key, name in POD.items() if key in os.environ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begin_s = dict(scope["headers"]), time.monotonic()
        given = headers.get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope[FACTS] = facts = {"request_id": request_id.decode()}
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id), *self._pod]}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        finally:
            if self._access is not None:
                trace = _TRACE.fullmatch(headers.get(b"traceparent", b""))
                client = scope.get("client") or ("", 0)
                self._access({
                    "client": client[0],
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round((time.monotonic() - begin_s) * 1e3, 1),
                    **({} if trace is None else {"trace_id": trace[1].decode()}),
                    **facts,
                })  # fmt: skip
