"""The asyncio side of the body: the replies that clients wait for, and their pieces from the scheduler's thread.

`open` admits a request or raises. The handler of the request takes pieces from its `Reply` until it is over, and gives
it up by `abort`. No call here waits for the scheduler or for a client.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ...core.contract.request import FinishedRequest
from ..base.errors import ApiError
from ..base.limits import Limits
from ..base.port import Body, Order, Piece, body_clock
from ..base.turns import EVENT, LoopTurns
from ..metrics import ServerMetrics
from ..metrics.counts import Life
from .reply import Choice, ChoiceDelta, Reply
from .scheduler import SchedulerThread

Action = Callable[[], int | None]
"""Sends something; returns the units of work beside the sending, as `LoopTurns` counts them, if there was any."""
MOST_TOLD = 200
SPARE_COMMANDS = 8
"""How many commands may wait for the scheduler, beside one order and one abort for each output."""


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
        flush: Callable[[], None] = lambda: None,
        start_s: float = 0.0,
        after_turn: Callable[[], None] = lambda: None,
        on_end: Callable[[FinishedRequest, int, Life], None] | None = None,
    ) -> None:
        """Make a frontend of `body`. `stamps`: each event of a stream begins with a comment, when its round
        ended (Unix, ns). `flush`, `after_turn`: see SchedulerThread. `start_s`: seconds of the body that a start takes.
        `on_end` hears of each output that ends, on the scheduler's thread."""
        self.body = body
        self.limits = limits
        self.metrics = metrics
        self.tell = tell
        self.turns: LoopTurns = LoopTurns()
        self.is_draining: bool = False
        metrics.engines, metrics.pace, metrics.on_end = body.engines, body.pace, on_end
        self._stamps = stamps
        self._said: set[str] = set()
        self._began_s = time.monotonic()
        self._ns_per_s = body.at_ns(1.0) - body.at_ns(0.0)
        self._start_s = start_s * 1e9 / self._ns_per_s
        self._unix_ns = body_clock(body)
        self._numbers = itertools.count()
        self._choices: dict[str, tuple[Reply, Choice]] = {}  # of outputs that the body has, by the ids of their orders
        self._replies: dict[str, Reply] = {}
        self._loop: asyncio.AbstractEventLoop  # since `start`
        self._sent = threading.Event()
        self._sent_at: list[tuple[float, Iterable[tuple[Choice, ChoiceDelta]]]] = []  # and not counted yet
        self._held: list[tuple[int, list[Action]]] = []  # (due time, actions that send what was prepared for it)
        self.scheduler: SchedulerThread = SchedulerThread(
            body, self, self._body_failed, 2 * limits.max_streams + SPARE_COMMANDS, flush, after_turn
        )

    @property
    def num_live(self) -> int:
        """Outputs that the body has."""
        return len(self._choices)

    @property
    def is_ready(self) -> bool:
        return self.is_well and not self.is_draining

    @property
    def is_well(self) -> bool:
        """Whether the engine runs."""
        return self.scheduler.is_running and not self.body.failure and not self.is_starting

    @property
    def is_starting(self) -> bool:
        return self._left_to_start_s > 0

    @property
    def why_not_ready(self) -> str:
        if self.is_draining:
            return "the server is stopping"
        return "the weights are being loaded" if self.is_starting else self.body.failure or "the engine has failed"

    @property
    def _left_to_start_s(self) -> float:
        """Real seconds until the simulated start is over."""
        return self._start_s - (time.monotonic() - self._began_s)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being made or sent."""
        return not self._replies

    def start(self) -> None:
        """Begin to serve; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._began_s = time.monotonic()
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
            self.turns.add(self._act(held))
        await self.turns.take(0)

    def give_up(self) -> None:
        """Abort every reply; each ends with the tokens that it has."""
        for reply in list(self._replies.values()):
            self.abort(reply.choices)

    def open(self, reply_id: str, orders: Sequence[Order], num_prompt_tokens: int) -> Reply:
        """Send orders to the body. Raises ApiError 429 beyond the limit of outputs, 503 if the server stops or its
        body has failed."""
        if not self.is_ready:
            retry_after_s = max(math.ceil(self._left_to_start_s), self.limits.retry_after_s)
            raise ApiError(503, self.why_not_ready, code="not_ready", retry_after_s=retry_after_s)
        limit = self.limits.max_streams
        if self.num_live + len(orders) > limit:
            self.metrics.num_refused += 1
            message = f"{self.num_live} outputs are being served, at most {limit} may be"
            raise ApiError(429, message, code="too_many_streams", retry_after_s=self.limits.retry_after_s)
        orders = [replace(order, number=next(self._numbers), name=reply_id) for order in orders]
        at_ns = self.body.at_ns
        lives = [self.metrics.ordered(order, at_ns(order.at_s)) for order in orders]
        choices = [Choice(i, order, self.body.make_decoder(order), lives[i]) for i, order in enumerate(orders)]
        reply = Reply(reply_id, choices, num_prompt_tokens, self.limits.deadline_s, self.turns)
        self._replies[reply_id] = reply
        for choice in choices:
            self._choices[choice.order.request_id] = (reply, choice)
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

    def sent(self, deltas: Iterable[tuple[Choice, ChoiceDelta]]) -> None:
        """Note that the socket has taken these; they are counted once the others of their round have been sent."""
        self._sent_at.append((time.monotonic(), deltas))

    def _count_sent(self) -> None:
        self._sent.set()
        add = self.metrics.delay.add
        for at_s, deltas in self._sent_at:
            at_ns = self.body.at_ns(at_s)
            for _, delta in deltas:
                add((at_ns - delta.at_ns) / self._ns_per_s)
        self._sent_at = []

    def stamp(self, delta: ChoiceDelta) -> bytes:
        """Return the bytes that come before the event of a delta."""
        return b": %d\n" % self._unix_ns(delta.at_ns) if self._stamps else b""

    def tell_once(self, message: str) -> None:
        """Pass a message to the operator of the server, the first time that it comes."""
        if message not in self._said and len(self._said) < MOST_TOLD:
            self._said.add(message)
            self.tell(message)

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
        self._loop.call_soon_threadsafe(self.turns.add, self._prepare(pieces, held))
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
        self._loop.call_soon_threadsafe(self.turns.add, self._act(actions))
        if self.body.hand_over_s:
            self._sent.wait(self.body.hand_over_s)

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> Iterator[int]:
        for act in actions:
            yield EVENT + (act() or 0)
        self._loop.call_soon(self._count_sent)  # behind the tasks that wait for this news

    def _prepare(self, pieces: list[Piece], held: list[Action]) -> Iterator[int]:
        for piece in pieces:
            if piece.request_id not in self._choices:  # all were lost meanwhile
                continue
            reply, choice = self._choices[piece.request_id]
            if choice.order.stop or choice.order.stop_tokens:  # the body must learn of a stop string, at its time
                held.append(partial(self._dispatch, piece))
            elif (writer := reply.ready_writer) is not None:
                self._add(piece)
                writer.prepare()
                held.append(writer.flush)
                yield choice.units_of(len(piece.tokens))
            elif reply.expect():
                self._add(piece)
                self._loop.call_soon(reply.prepare)  # behind the task that begins the stream
                held.append(reply.tell)
                yield choice.units_of(len(piece.tokens))
            else:
                held.append(partial(self._dispatch, piece))

    def _dispatch(self, piece: Piece) -> int:
        if piece.request_id not in self._choices:  # it was aborted after the piece was prepared
            return 0
        units = self._choices[piece.request_id][1].units_of(len(piece.tokens))
        self._add(piece).tell()
        return units

    def _add(self, piece: Piece) -> Reply:
        reply, choice = self._choices[piece.request_id]
        choice.add(piece)
        if piece.finished is not None:
            choice.is_live = False
            del self._choices[piece.request_id]
            if not any(one.is_live for one in reply.choices):
                self.metrics.replied(max(one.num_received for one in reply.choices))
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
