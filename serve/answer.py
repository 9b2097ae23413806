"""Answers over HTTP: a reply as one JSON object, or as server-sent events while it comes.

When an answer ends for any reason (its end, a client that leaves or does not read, an error, the deadline), its reply
is closed and its remaining requests are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from .connections import TRANSPORT
from .errors import ApiError, event
from .forms import CompletionForm
from .frontend import Choice, Delta, Frontend, Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Answer(Response):
    """Sends `reply` in `form` and closes it. Once a stream has begun, it is the reply's writer."""

    def __init__(self, frontend: Frontend, reply: Reply, form: CompletionForm, *, stream: bool) -> None:
        super().__init__()
        self._frontend = frontend
        self._reply = reply
        self._form = form
        self._stream = stream
        self._send_began: float | None = None  # while the client is to take something
        self._transport: asyncio.Transport | None = None
        # What is prepared, and not written yet:
        self._held = b""
        self._held_deltas: list[tuple[Choice, Delta]] = []
        self._ends = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._transport = scope.get(TRANSPORT)
        sending = asyncio.ensure_future(self._send_stream(send) if self._stream else self._send_whole(send))
        leaving = asyncio.ensure_future(_client_leaves(receive))
        try:
            while not await self._has_ended(sending, leaving):
                pass
            if sending.done():
                with contextlib.suppress(OSError):  # the client has gone
                    sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            self._frontend.close(self._reply)

    async def _has_ended(self, sending: asyncio.Future[None], leaving: asyncio.Future[None]) -> bool:
        """Wait for some time; return whether all is sent, or the client has left or takes nothing.
        At the deadline the reply fails."""
        now, stall_s = asyncio.get_running_loop().time, self._frontend.limits.stall_s
        wait_s = min(stall_s / 4, max(self._reply.deadline - now(), 0.01))
        done, _ = await asyncio.wait((sending, leaving), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if now() >= self._reply.deadline:
            after = f"{self._frontend.limits.deadline_s:g} s"
            self._reply.fail(ApiError(504, f"not finished after {after}", code="deadline_exceeded"))
        return bool(done) or (self._send_began is not None and time.monotonic() - self._send_began > stall_s)

    async def _send_whole(self, send: Send) -> None:
        parts: list[list[Delta]] = [[] for _ in self._reply.choices]
        try:
            while deltas := await self._reply.take():
                for choice, delta in deltas:
                    parts[choice.index].append(delta)
                    self._abort_at_end(choice)
        except ApiError as error:
            await self._send(send, _start(error.status, "application/json", error.headers), error.to_bytes(), True)
            return
        body = json.dumps(self._form.whole(parts)).encode()
        await self._send(send, _start(200, "application/json"), body, True)

    async def _send_stream(self, send: Send) -> None:
        """Send events as they come. The status waits until the first news are certain, so that a
        refusal is no stream."""
        start: Message | None = _start(200, "text/event-stream", {"Cache-Control": "no-cache"})
        try:
            deltas, events = await self._reply.begin(), self._form.first()
            while deltas or start is not None:
                await self._send(send, start, b"".join(events) + self._events(deltas), False)
                start, events = None, []
                self._frontend.sent(deltas)
                if self._transport is not None:
                    self._reply.writer = self
                deltas = await self._reply.take()
            await self._send(send, None, b"".join([*self._form.last(), b"data: [DONE]\n\n"]), True)
        except ApiError as error:
            if start is None:
                await self._send(send, None, event(error.to_json()), True)
            else:
                await self._send(send, _start(error.status, "application/json", error.headers), error.to_bytes(), True)

    @property
    def is_ready(self) -> bool:
        transport = self._transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def prepare(self) -> bool:
        try:
            deltas = self._reply.news()
        except ApiError:  # the task is told it, too
            return False
        if events := self._events(deltas):
            self._held += b"%x\r\n%b\r\n" % (len(events), events)
            self._held_deltas += deltas
        self._ends = self._reply.is_over
        return not self._ends

    def flush(self) -> None:
        transport = self._transport
        if self._held and transport is not None and not transport.is_closing():
            held, self._held = self._held, b""
            transport.write(held)
            self._frontend.sent(self._held_deltas)
            self._held_deltas = []
        if self._ends:
            self._reply.wake()

    def _events(self, deltas: list[tuple[Choice, Delta]]) -> bytes:
        events = []
        for choice, delta in deltas:
            if delta.text or delta.finish or delta.tokens:
                events.append(self._frontend.stamp(delta) + self._form.delta(choice, delta))
            self._abort_at_end(choice)
        return b"".join(events)

    def _abort_at_end(self, choice: Choice) -> None:
        """Abort a choice that a stop string has ended, because the body would otherwise continue it."""
        if choice.finish is not None:
            self._frontend.abort((choice,))

    async def _send(self, send: Send, start: Message | None, body: bytes, is_last: bool) -> None:
        """Send a part of the body, with its head in front of the first."""
        self.flush()
        self._send_began = time.monotonic()
        if start is not None:
            await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._send_began = None


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: str, headers: dict[str, str] | None = None) -> Message:
    pairs = {"Content-Type": content_type, **(headers or {})}
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
    }
