"""Errors as OpenAI's clients read them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

encode: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer other than success. `param` names the parameter of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(ApiError, param=self.param, code=self.code, retry_after_s=self.retry_after_s)
        return again, (self.status, self.message)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def to_json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_json()).encode()


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % encode(value).encode()


def is_full(message: str) -> bool:
    """Return whether the engine refused a request, by this message, because its queue was full."""
    return message.startswith("queue full")


def refused(message: str, retry_after_s: int) -> ApiError:
    """Return the error of a request that the engine refused or gave up, by its message."""
    if is_full(message):
        return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)
    if message.startswith("too long"):
        return ApiError(400, message, param="prompt", code="context_length_exceeded")
    if message.startswith("grammar"):
        return ApiError(400, message, param="response_format", code="schema_too_large")
    return ApiError(503, message or "the request failed", code="engine_error")
