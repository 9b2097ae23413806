"""Processes that answer the questions of pages (`process.py`), each one question at a time. To cancel an answer ends
its process; another takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..observe.children.child import ONE_THREAD, Child
from ..serve.base.errors import ApiError
from . import process
from .process import READY

MOST_WAITING = 16
"""Questions that wait for a process; beyond that the server is busy."""
Message = dict[str, Any]


class _Process:
    """One process, and the messages that it sends."""

    def __init__(self, niceness: int) -> None:
        self._niceness = niceness
        self._child: Child | None = None
        self._messages: asyncio.Queue[Message | ApiError] = asyncio.Queue()

    async def start(self) -> None:
        self._child = Child(process.__name__, str(self._niceness), environment=ONE_THREAD)
        asyncio.get_running_loop().add_reader(self._child.wire, self._read, self._child)
        assert await self._message() == READY

    async def ask(self, question: Mapping[str, Any]) -> AsyncIterator[Message]:
        """Yield the messages of an answer, the last of which has the result or an error."""
        assert self._child is not None
        self._child.say(question)
        while True:
            message = await self._message()
            yield message
            if "result" in message or "error" in message:
                return

    async def _message(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, ApiError):
            raise message
        return message

    def _read(self, child: Child) -> None:
        """Take the messages that have come; of a process that has died, its end."""
        received: Sequence[Message | ApiError] | None = child.wire.receive()
        if received is None:
            asyncio.get_running_loop().remove_reader(child.wire)
            received = [ApiError(500, f"the process of the answer died ({child.close()})")]
        for message in received:
            self._messages.put_nowait(message)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


class ProcessPool:
    """At most `count` processes; `niceness` is added to that of the server."""

    def __init__(self, count: int, niceness: int) -> None:
        self.count = count
        self._niceness = niceness
        self._all: set[_Process] = set()
        self._idle: asyncio.Queue[_Process | None] = asyncio.Queue()  # None: one that could not be started
        self._starting: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._is_closed = False

    async def start(self, count: int | None = None) -> None:
        """Start `count` processes, by default all, so that no question waits for one."""
        while len(self._all) < (count or self.count):
            self._begin_one()
        await asyncio.gather(*self._starting)

    async def ask(self, question: Mapping[str, Any]) -> Message:
        """Return the last message of an answer."""
        async with self.asking(question) as messages:
            return [message async for message in messages][-1]

    @asynccontextmanager
    async def asking(self, question: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Message]]:
        """Ask a question; leaving the block before the last message cancels it. Raises ApiError if too many wait."""
        asked, is_whole = await self._take(), False

        async def messages() -> AsyncIterator[Message]:
            nonlocal is_whole
            async for message in asked.ask(question):
                is_whole = "result" in message or "error" in message
                yield message

        try:
            yield messages()
        finally:
            if is_whole:
                self._idle.put_nowait(asked)
            else:
                self._replace(asked)

    async def _take(self) -> _Process:
        """Wait for a process that is free."""
        if self._waiting >= MOST_WAITING:
            raise ApiError(429, f"{MOST_WAITING} questions wait already: try again", code="busy", retry_after_s=1)
        if self._idle.empty() and len(self._all) < self.count:
            self._begin_one()
        self._waiting += 1
        try:
            taken = await self._idle.get()
        finally:
            self._waiting -= 1
        if taken is None:
            raise ApiError(500, "no process for the answer could be started; the server's messages say why")
        return taken

    def _replace(self, ended: _Process) -> None:
        """End a process, and start another one for the next question."""
        ended.kill()
        self._all.discard(ended)
        if not self._is_closed:
            self._begin_one()

    def _begin_one(self) -> None:
        made = _Process(self._niceness)
        self._all.add(made)

        async def start() -> None:
            try:
                await made.start()
            except (OSError, ApiError):
                self._all.discard(made)
                self._idle.put_nowait(None)
            else:
                self._idle.put_nowait(made)

        task = asyncio.create_task(start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def close(self) -> None:
        """End all processes, those in the middle of an answer, too."""
        self._is_closed = True
        for task in self._starting:
            task.cancel()
        for one in self._all:
            one.kill()
