"""What every request passes before the application sees it: the key, the page that it comes from, and the size and pace
of its body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Container
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .base.errors import ApiError
from .base.limits import SMALL_BODY, Limits
from .base.turns import BYTES_PER_UNIT, REQUEST, LoopTurns

CHANGE_NOTHING = ("GET", "HEAD", "OPTIONS")
"""Methods that a browser may use for any page: it does not show the answer to the page."""


class Guards:
    """Refuses requests without `api_key` (401), of pages of other sites than `origins` (403), bodies beyond the limit
    (413) and bodies that stop on the way (408). Requests for other paths than `plain` ones, which need no key, wait for
    one of the `turns` of the event loop that has room for them."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        turns: LoopTurns,
        api_key: str | None,
        plain: Container[str],
        origins: Container[str] = (),
    ) -> None:
        self._app = app
        self._turns = turns
        self._limits = limits
        self._api_key = None if api_key is None else api_key.encode()
        self._plain = plain
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._problem(scope, headers)
        try:
            messages = await self._body(receive, self._limits.max_body_bytes if error is None else 0)
        except ApiError as refused:
            error = error or refused
        if error is not None:
            await send_error(send, error)
            return
        if messages[0]["type"] == "http.disconnect":
            return
        if scope["path"] not in self._plain:
            await self._turns.take(REQUEST + min(len(messages[0]["body"]), SMALL_BODY) // BYTES_PER_UNIT)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        if scope["method"] == "HEAD":  # the server sends no body, since its own scope has the method
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay, send)

    def _problem(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._api_key is None:  # a page of another site does not have it
            return None if scope["method"] in CHANGE_NOTHING else self._problem_of_page(headers)
        if scope["path"] not in self._plain:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
                return ApiError(
                    401, "the key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
                )
        return None

    def _problem_of_page(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return the error of a request that a browser sends for a page of another site: any page may send one to a
        server on its visitor's machine."""
        if b"origin" not in headers:
            return None
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        if "*" in self._origins or origin in self._origins or _is_own(origin, host):
            return None
        message = f"pages of {origin[:80]!r} may not use this server; --allowed-origins names those that may"
        return ApiError(403, message, code="origin")

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


def _is_own(origin: str, host: str) -> bool:
    """Return whether a page comes from this server by an address. By a name it may be a page of another site, whose
    owner lets the name lead here."""
    try:
        site = urlsplit(origin)
        name = site.hostname or ""
        return site.netloc == host and (name == "localhost" or bool(ip_address(name)))
    except ValueError:
        return False


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in the place of an answer, and close the connection."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.to_bytes()})
