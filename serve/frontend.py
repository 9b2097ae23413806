"""The asyncio side of the body: the replies that clients wait for, and their pieces from the scheduler's thread.

`open` admits a request or raises. The handler of the request takes pieces from its `Reply` until it is over, and gives
it up by `abort`. No call here waits for the scheduler or for a client.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ..core.contract.request import FinishReason
from .bodies.port import Body, Order, Piece, TextDecoder
from .errors import ApiError, refused
from .limits import Limits
from .metrics import ServerMetrics
from .scheduler import SchedulerThread

Action = Callable[[], None]
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
SPARE_COMMANDS = 8
"""How many commands may wait for the scheduler, beside one order and one abort for each output."""


@dataclass(slots=True)
class Delta:
    """What a choice has gained since the last look."""

    text: str
    tokens: list[int]
    outputs: Mapping[str, list[Any]]
    finish: str | None
    at_ns: int  # of its first piece, by the clock of the body


class Choice:
    """One output of a reply: the part of its text that is final, and the pieces that have come since the last call."""

    def __init__(self, index: int, order: Order, decoder: TextDecoder) -> None:
        self.index = index
        self.order = order
        self.num_tokens: int = 0
        self.finish: str | None = None
        self.error: str = ""
        self.is_live = True  # the body has it
        self._decoder = decoder
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def take(self) -> Delta | None:
        """Return everything that has come since the last call, as one piece; None if nothing has come or the choice is
        over."""
        pieces, self._pieces = self._pieces, []
        if not pieces or self.finish is not None or self.error:
            return None
        tokens, outputs = pieces[0].tokens, pieces[0].outputs
        if len(pieces) > 1:
            tokens = [token for piece in pieces for token in piece.tokens]
            names = dict.fromkeys(name for piece in pieces for name in piece.outputs)
            outputs = {name: [value for piece in pieces for value in piece.outputs.get(name, ())] for name in names}
        text, end = self._decoder.push(tokens), pieces[-1].finished
        self.num_tokens += len(tokens)
        if self._decoder.stop is not None:
            self.finish = "stop"
        elif end is not None:
            text += self._decoder.finish()
            self.finish = "stop" if self._decoder.stop is not None else FINISH.get(end.reason)
            if self.finish is None:
                self.error = end.message or "the request failed"
        return Delta(text, tokens, outputs, self.finish, pieces[0].at_ns)


class Writer(Protocol):
    """Writes a stream in the place of the task that sends it, while that task waits for news."""

    @property
    def is_ready(self) -> bool:
        """Whether the client has read all written bytes."""

    def prepare(self) -> bool:
        """Make the bytes of the pieces that have come. Returns False if the reply is over or has failed: then the task
        sends the rest."""

    def flush(self) -> None:
        """Write the prepared bytes; wake the reply if it is over."""


class Reply:
    """The choices of one request. `take` waits for news of any of them."""

    def __init__(self, reply_id: str, choices: Sequence[Choice], num_prompt_tokens: int, deadline_s: float) -> None:
        self.id = reply_id
        self.choices = choices
        self.num_prompt_tokens = num_prompt_tokens
        self.created: int = int(time.time())
        self.writer: Writer | None = None  # once the stream has begun
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._is_beginning = False  # a stream that waits for its first news
        self._failure: ApiError | None = None
        self.deadline: float = asyncio.get_running_loop().time() + deadline_s

    @property
    def is_over(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def fail(self, error: ApiError) -> None:
        """Let `take` raise `error`."""
        self._failure = error
        self.tell()

    def prepare(self) -> bool:
        """Let the writer make the bytes of the pieces that have come. Returns False if it cannot, or if the reply is
        over."""
        writer = self.ready_writer
        return writer is not None and writer.prepare()

    def tell(self) -> None:
        """Let the writer write these bytes. If it cannot, or the reply is over, wake `take`, which fetches it."""
        self._has_news = True
        if not self.prepare():
            self.wake()
        if self.writer is not None:
            self.writer.flush()

    def wake(self) -> None:
        """Let `take` return."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def ready_writer(self) -> Writer | None:
        """The writer, or None if it may not write now. It may write while the sending task waits, once the client has
        read all earlier bytes."""
        writer = self.writer
        may_write = self._is_awaited and self._failure is None and writer is not None and writer.is_ready
        return writer if may_write else None

    @property
    def _is_awaited(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    async def begin(self) -> list[tuple[Choice, Delta]]:
        """Wait until the stream may begin. Return the first news, or none if they are certain but not due yet;
        raise as `take` does."""
        if not self._has_news:
            self._is_beginning = True
            await self._wait()
            self._is_beginning = False
        return self.news() if self._has_news else []

    def expect(self) -> bool:
        """Let a stream begin before its first news are due, because they are certain.
        Returns whether a stream waits for them."""
        if not (self._is_beginning and self._is_awaited):
            return False
        self.wake()
        return True

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    async def take(self) -> list[tuple[Choice, Delta]]:
        """Wait for news and return them; an empty list once all choices are over.
        Raises ApiError if one failed, or the reply did."""
        while not self.is_over:
            if not self._has_news:
                await self._wait()
            if deltas := self.news():
                return deltas
        return []

    def news(self) -> list[tuple[Choice, Delta]]:
        """Return the pieces that have come since the last call. Raises ApiError as `take` does; pieces that came with
        the failure are then dropped."""
        self._has_news = False
        deltas = []
        for choice in self.choices:
            if (delta := choice.take()) is not None:
                deltas.append((choice, delta))
            if choice.error and self._failure is None:
                self._failure = refused(choice.error, 1)
        if self._failure is not None:
            raise self._failure
        return deltas


class Frontend:
    """Admits requests to `body` within `limits`. `tell` gets messages for who runs the server."""

    def __init__(
        self,
        body: Body,
        limits: Limits,
        metrics: ServerMetrics,
        tell: Callable[[str], None] = lambda message: None,
        *,
        stamps: bool = False,
    ) -> None:
        """Make a frontend of `body`. `stamps`: each event of a stream begins with a comment, when its round
        ended (Unix, ns)."""
        self.body = body
        self.limits = limits
        self.metrics = metrics
        self.tell = tell
        self.is_draining: bool = False
        metrics.engines = body.engines
        self._stamps = stamps
        self._ns_per_s = body.at_ns(1.0) - body.at_ns(0.0)
        self._unix_ns = time.time_ns() - (body.at_ns(time.monotonic()) / self._ns_per_s) * 1e9  # at time 0 of the body
        self._numbers = itertools.count()
        self._choices: dict[str, tuple[Reply, Choice]] = {}  # of outputs that the body has, by the ids of their orders
        self._replies: dict[str, Reply] = {}
        self._loop: asyncio.AbstractEventLoop  # since `start`
        self._sent = threading.Event()
        self._sent_at: list[tuple[float, Iterable[tuple[Choice, Delta]]]] = []  # and not counted yet
        self._held: list[tuple[int, list[Action]]] = []  # (due time, actions that send what was prepared for it)
        self.scheduler: SchedulerThread = SchedulerThread(
            body, self, self._body_failed, 2 * limits.max_streams + SPARE_COMMANDS
        )

    @property
    def num_live(self) -> int:
        """Outputs that the body has."""
        return len(self._choices)

    @property
    def is_ready(self) -> bool:
        return self.scheduler.is_running and not self.is_draining

    def start(self) -> None:
        """Begin to serve; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    async def stop(self) -> None:
        """Abort the remaining replies, let the body end them, and stop the scheduler."""
        self.is_draining = True
        self.give_up()
        begin = time.monotonic()
        while self._choices and self.scheduler.is_running and time.monotonic() - begin < self.limits.stall_s:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(self.scheduler.stop)
        left, self._held = self._held, []
        for _, held in left:
            self._act(held)

    def give_up(self) -> None:
        """Abort every reply; each ends with the tokens that it has."""
        for reply in list(self._replies.values()):
            self.abort(reply.choices)

    def open(self, reply_id: str, orders: Sequence[Order], num_prompt_tokens: int) -> Reply:
        """Send orders to the body. Raises ApiError 429 beyond the limit of outputs, 503 if the server stops or its
        body has failed."""
        if not self.is_ready:
            raise ApiError(
                503, "the server is stopping" if self.is_draining else "the engine has failed", code="not_ready"
            )
        limit = self.limits.max_streams
        if self.num_live + len(orders) > limit:
            self.metrics.num_refused += 1
            message = f"{self.num_live} outputs are being served, at most {limit} may be"
            raise ApiError(429, message, code="too_many_streams", retry_after_s=self.limits.retry_after_s)
        orders = [replace(order, number=next(self._numbers)) for order in orders]
        choices = [Choice(i, order, self.body.make_decoder(order)) for i, order in enumerate(orders)]
        reply = Reply(reply_id, choices, num_prompt_tokens, self.limits.deadline_s)
        self._replies[reply_id] = reply
        for choice in choices:
            self._choices[choice.order.request_id] = (reply, choice)
            self.metrics.ordered(choice.order, self.body.at_ns(choice.order.at_s))
            self.scheduler.submit(choice.order)
        return reply

    def abort(self, choices: Iterable[Choice]) -> None:
        """Give choices up, unless the body has ended them; their last pieces follow."""
        for choice in choices:
            if choice.is_live:
                choice.is_live = False
                self.scheduler.abort(choice.order.request_id)

    def close(self, reply: Reply) -> None:
        """Forget a reply that no client waits for any more, and abort its remaining requests."""
        self.abort(reply.choices)
        self._replies.pop(reply.id, None)
        reply.writer = None

    def sent(self, deltas: Iterable[tuple[Choice, Delta]]) -> None:
        """Note that the socket has taken these; they are counted once the others of their round have been sent."""
        self._sent_at.append((time.monotonic(), deltas))

    def _count_sent(self) -> None:
        self._sent.set()
        add = self.metrics.histograms["delay"].add
        for at_s, deltas in self._sent_at:
            at_ns = self.body.at_ns(at_s)
            for _, delta in deltas:
                add((at_ns - delta.at_ns) / self._ns_per_s)
        self._sent_at = []

    def stamp(self, delta: Delta) -> bytes:
        """Return the bytes that come before the event of a delta."""
        return b": %d\n" % (self._unix_ns + delta.at_ns / self._ns_per_s * 1e9) if self._stamps else b""

    def find(self, reply_id: str) -> Reply | None:
        """Return the reply of this id that is being served."""
        return self._replies.get(reply_id)

    # -- from the scheduler's thread ----------------------------------------------------------------------------------

    def deliver(self, pieces: list[Piece]) -> None:
        """Send the pieces that requests have got."""
        if pieces:
            self._hand_over([partial(self._dispatch, piece) for piece in pieces])
            self.metrics.deliver(pieces)

    def prepare(self, pieces: list[Piece]) -> None:
        """Make the bytes of pieces that requests will get, and hold them until `release`."""
        held: list[Action] = []
        self._held.append((pieces[0].at_ns, held))
        self._loop.call_soon_threadsafe(self._prepare, pieces, held)
        self.metrics.deliver(pieces)

    def release(self, now_ns: int) -> None:
        """Send the bytes that were prepared for `now_ns` or earlier."""
        due = [held for at_ns, held in self._held if at_ns <= now_ns]
        if due:
            self._held = [(at_ns, held) for at_ns, held in self._held if at_ns > now_ns]
            for held in due:
                self._hand_over(held)

    def _hand_over(self, actions: list[Action]) -> None:
        """Let the event loop run `actions`. Where time is simulated, wait for it: both share the interpreter.
        No client is waited for."""
        self._sent.clear()
        self._loop.call_soon_threadsafe(self._act, actions)
        if self.body.hand_over_s:
            self._sent.wait(self.body.hand_over_s)

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        for act in actions:
            act()
        self._loop.call_soon(self._count_sent)  # behind the tasks that wait for this news

    def _prepare(self, pieces: list[Piece], held: list[Action]) -> None:
        for piece in pieces:
            reply, choice = self._choices[piece.request_id]
            if choice.order.stop:  # at a stop string the body has to be told, at its time
                held.append(partial(self._dispatch, piece))
            elif (writer := reply.ready_writer) is not None:
                self._add(piece)
                writer.prepare()
                held.append(writer.flush)
            elif reply.expect():
                self._add(piece)
                self._loop.call_soon(reply.prepare)  # behind the task that begins the stream
                held.append(reply.tell)
            else:
                held.append(partial(self._dispatch, piece))

    def _dispatch(self, piece: Piece) -> None:
        if piece.request_id in self._choices:  # else it was aborted after the piece was prepared
            self._add(piece).tell()

    def _add(self, piece: Piece) -> Reply:
        reply, choice = self._choices[piece.request_id]
        choice.add(piece)
        if piece.finished is not None:
            choice.is_live = False
            del self._choices[piece.request_id]
        return reply

    def _body_failed(self, error: BaseException) -> None:
        self.tell(f"the scheduler has stopped, every request fails: {error!r}")
        self._loop.call_soon_threadsafe(self._lose_all)

    def _lose_all(self) -> None:
        self._choices.clear()
        for reply in self._replies.values():
            for choice in reply.choices:
                choice.is_live = False
            reply.fail(ApiError(503, "the engine has failed", code="engine_error"))
