"""Refuses what does not come from the page itself: other sites' requests, and names that others have pointed here."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve.base.errors import ApiError
from ..serve.guards import send_error

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""The names under which a browser on this machine, or one behind a forwarded port, knows the server. A name of another
site that resolves to this machine (DNS rebinding) is none of them."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_JSON = "application/json"


class OwnPage:
    """Passes on the requests of the own page alone, and gives every answer the headers that keep it apart."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        error = _problem(scope["method"], headers)
        if error is not None:
            await send_error(with_headers, error)
        else:
            await self._app(scope, receive, with_headers)


def _problem(method: str, headers: dict[str, str]) -> ApiError | None:
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() not in LOOPBACK:
        return ApiError(403, f"the page is served as {', '.join(LOOPBACK)} alone, not as {name[:80]!r}", code="host")
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if (origin is not None and origin != f"http://{host}") or (site not in ("same-origin", "none") and method != "GET"):
        return ApiError(403, "requests of other sites are refused", code="origin")
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != _JSON:
        return ApiError(415, f"expected a body of the type {_JSON}", code="content_type")
    return None
