"""What every request passes before the application sees it: the key, and the size and pace of its body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Container

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .base.errors import ApiError
from .base.limits import Limits


class Guards:
    """Refuses requests without `api_key` (401), bodies beyond the limit (413) and bodies that stop on the way (408)."""

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None, plain: Container[str]) -> None:
        self._app = app
        self._limits = limits
        self._api_key = None if api_key is None else api_key.encode()
        self._plain = plain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._problem(scope["path"], headers)
        try:
            messages = await self._body(receive, self._limits.max_body_bytes if error is None else 0)
        except ApiError as refused:
            error = error or refused
        if error is not None:
            await send_error(send, error)
            return
        if messages[0]["type"] == "http.disconnect":
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        if scope["method"] == "HEAD":  # the server sends no body, since its own scope has the method
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay, send)

    def _problem(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._api_key is not None and path not in self._plain:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
                return ApiError(
                    401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
        return None

    async def _body(self, receive: Receive, kept_bytes: int) -> list[Message]:
        """Read the body whole, so that a slow one holds nothing but itself. Raises ApiError 408 and 413.

        What is beyond the limit is dropped, up to as much again: a client that still sends as the connection is closed
        does not get the answer.
        """
        limits = self._limits
        chunks: list[bytes] = []
        size, ends = 0, asyncio.get_running_loop().time() + limits.deadline_s
        while True:
            try:
                async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + limits.stall_s, ends)):
                    message = await receive()
            except TimeoutError:
                late = f"nothing of the body came for {limits.stall_s:g} s, or not all of it within {limits.deadline_s:g} s"
                raise ApiError(408, late) from None
            if message["type"] == "http.disconnect":
                return [message]
            part = message.get("body", b"")
            size += len(part)
            if size <= kept_bytes:
                chunks.append(part)
            elif size > 2 * limits.max_body_bytes or (size > limits.max_body_bytes and not message.get("more_body")):
                raise ApiError(413, f"the body is larger than {limits.max_body_bytes} bytes", code="body_too_large")
            if not message.get("more_body"):
                return [{"type": "http.request", "body": b"".join(chunks), "more_body": False}]


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in the place of an answer, and close the connection."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.to_bytes()})
