"""Answers over HTTP: a reply as one JSON object, or as server-sent events while it comes.

When an answer ends for any reason (its end, a client that leaves or does not read, an error, the deadline), its reply
is closed and its remaining requests are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from starlette.responses import Response

from ..base.connections import TRANSPORT
from ..base.errors import ApiError
from .forms import CompletionForm
from .frontend import Frontend
from .reply import Choice, ChoiceDelta, Reply

PART_BYTES = 1 << 16
"""Of a body that are handed to a connection in one turn of the event loop."""
WAITING = b": waiting\n\n"
"""A comment of a stream. Proxies give up connections on which nothing comes."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class StreamedAnswer(Response):
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
        self._held_deltas: list[tuple[Choice, ChoiceDelta]] = []
        self._wakes = False  # the task has to go on after these
        self._sent_s = time.monotonic()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._transport = scope.get(TRANSPORT)
        sending = asyncio.ensure_future(self._send_stream(send) if self._stream else self._send_whole(send))
        leaving = asyncio.ensure_future(client_leaves(receive))
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
        now, limits = asyncio.get_running_loop().time, self._frontend.limits
        wait_s = min(limits.stall_s / 4, self._reply.deadline - now())
        if self._is_waiting_for_news:
            wait_s = min(wait_s, self._sent_s + limits.quiet_s - time.monotonic())
        done, _ = await asyncio.wait((sending, leaving), timeout=max(wait_s, 0.01), return_when=asyncio.FIRST_COMPLETED)
        if now() >= self._reply.deadline:
            after = f"{limits.deadline_s:g} s"
            self._reply.fail(ApiError(504, f"not finished after {after}", code="deadline_exceeded"))
        if self._is_waiting_for_news and time.monotonic() >= self._sent_s + limits.quiet_s:
            self._reply.remind()
        return bool(done) or (self._send_began is not None and time.monotonic() - self._send_began > limits.stall_s)

    @property
    def _is_waiting_for_news(self) -> bool:
        return self._stream and self._send_began is None

    async def _send_whole(self, send: Send) -> None:
        try:
            while deltas := await self._reply.take():
                for choice, delta in deltas:
                    self._form.add(choice, delta)
                    self._abort_at_end(choice)
        except ApiError as error:
            await self._send(send, _start(error.status, "application/json", error.headers), error.to_bytes(), True)
            return
        start: Message | None = _start(200, "application/json")
        for part, is_last in _parts(self._form.whole()):
            await self._send(send, start, part, is_last)
            start = None

    async def _send_stream(self, send: Send) -> None:
        """Send events as they come. The status waits until the first news are certain, so that a
        refusal is no stream; a client that has to wait long gets it at once, and comments."""
        start: Message | None = _start(200, "text/event-stream", {"Cache-Control": "no-cache"})
        first = self._form.first()
        try:
            deltas = await self._reply.begin()
            while deltas or not self._reply.is_over:
                if self._reply.was_reminded() and not deltas:
                    await self._send(send, start, WAITING, False)
                else:
                    await self._send(send, start, b"".join(first) + self._events(deltas), False)
                    first = []
                    self._frontend.sent(deltas)
                    if self._transport is not None:
                        self._reply.writer = self
                start = None
                deltas = await self._reply.take()
            await self._send(send, None, b"".join([*self._form.last(), self._form.end]), True)
        except ApiError as error:
            if start is None:
                await self._send(send, None, self._form.error(error), True)
            else:
                await self._send(send, _start(error.status, "application/json", error.headers), error.to_bytes(), True)

    @property
    def is_ready(self) -> bool:
        transport = self._transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    def prepare(self) -> bool:
        try:
            deltas = self._reply.news()
        except ApiError:  # the task gets it, too
            return False
        if events := self._events(deltas):
            self._held += b"%x\r\n%b\r\n" % (len(events), events)
            self._held_deltas += deltas
        self._wakes = self._reply.is_over or self._reply.has_news
        return not self._wakes

    def flush(self) -> None:
        transport = self._transport
        if self._held and transport is not None and not transport.is_closing():
            held, self._held = self._held, b""
            transport.write(held)
            self._frontend.sent(self._held_deltas)
            self._held_deltas = []
            self._sent_s = time.monotonic()
        if self._wakes:
            self._reply.wake()

    def _events(self, deltas: list[tuple[Choice, ChoiceDelta]]) -> bytes:
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
        self._send_began, self._sent_s = None, time.monotonic()


class ReadyAnswer(Response):
    """Sends an answer that is ready, in parts, since a long one would hold the event loop. A client that takes nothing
    for `stall_s` is given up."""

    def __init__(self, body: bytes, stall_s: float) -> None:
        super().__init__(body, media_type="application/json")
        self._stall_s = stall_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part, is_last in _parts(bytes(self.body)):
            message = {"type": "http.response.body", "body": part, "more_body": not is_last}
            try:
                await asyncio.wait_for(send(message), self._stall_s)
            except TimeoutError:
                return


def _parts(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a body, and whether each is the last."""
    for begin in range(0, max(len(body), 1), PART_BYTES):
        yield body[begin : begin + PART_BYTES], begin + PART_BYTES >= len(body)


async def client_leaves(receive: Receive) -> None:
    """Wait until the connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: str, headers: dict[str, str] | None = None) -> Message:
    pairs = {"Content-Type": content_type, **(headers or {})}
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(name.lower().encode(), value.encode()) for name, value in pairs.items()],
    }
