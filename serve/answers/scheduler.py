"""The scheduler's thread: it alone drives the body, and never waits for a client.

```
asyncio ── commands: at most `max_commands` ─►  take ─► submit, abort ─► turn ─► pieces ─► deliver
                                                        ── call_soon_threadsafe ─► asyncio
```

Pieces are handed over once per round, for all requests together, before the next round is planned. Where time is
simulated, most of them are made before the round ends, so that only their bytes must be sent at its end. What a slow
client has not read waits as its token ids on the asyncio side, at most the tokens that its request may have.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ...core.contract.request import FinishedRequest, FinishReason
from ..base.port import Body, Order, Outlet, Piece

FLUSH_S = 1.0
_Result = TypeVar("_Result")


class SchedulerThread:
    """Runs `body` between `start` and `stop`.

    On this thread `outlet` gets the pieces of each round, and `on_failure` an error of the body, which ends it. `flush`
    is called there each FLUSH_S, and when the body has nothing to do; `after_turn` after each turn of the body.
    """

    def __init__(
        self,
        body: Body,
        outlet: Outlet,
        on_failure: Callable[[BaseException], None],
        max_commands: int,
        flush: Callable[[], None] = lambda: None,
        after_turn: Callable[[], None] = lambda: None,
    ) -> None:
        self.body = body
        self.error: BaseException | None = None  # why the loop has ended before `stop`
        self._outlet = outlet
        self._on_failure = on_failure
        self._max_commands = max_commands
        self._flush = flush
        self._after_turn = after_turn
        self._flushed_s = 0.0
        self._commands: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and self.error is None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its turn, and wait for it. Requests that live are left as they are."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.body.wake()
        self._thread.join()

    def submit(self, order: Order) -> None:
        """Hand an order over."""
        self._put(partial(self._submit, order))

    def abort(self, request_id: str) -> None:
        """Give a request up before the next round; its last piece follows."""
        self._put(partial(self.body.abort, request_id))

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Queue `function`, to be called between two turns.
        The future gets its result or exception, and never ends if the loop has."""
        done: Future[_Result] = Future()

        def carry_out() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._put(carry_out)
        return done

    def _put(self, command: Callable[[], None]) -> None:
        with self._changed:
            assert len(self._commands) < self._max_commands, (
                "the limit of outputs bounds the commands: an order and an abort each"
            )
            self._commands.append(command)
            self._changed.notify()
        self.body.wake()

    def _submit(self, order: Order) -> None:
        if refusal := self.body.submit(order):
            end = FinishedRequest(order.request_id, FinishReason.ERROR, 0, message=refusal)
            self._outlet.deliver([Piece(order.request_id, self.body.at_ns(order.at_s), [], finished=end)])

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                self.body.turn(self._outlet)
                self._after_turn()
                self._flush_if_due()
        except BaseException as error:
            self.error = error
            self._on_failure(error)

    def _take_commands(self) -> None:
        """Wait until the body has something to do or a command comes; carry out the commands."""
        with self._changed:
            if not self._commands and not self._stopping:
                wait_s = self.body.wait_s()
                if wait_s is None:
                    self._changed.wait()
                elif wait_s:
                    self._changed.wait(min(wait_s, FLUSH_S))
            commands, self._commands = self._commands, []
        for carry_out in commands:
            carry_out()

    def _flush_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._flushed_s + FLUSH_S or self.body.wait_s() is None:
            self._flush()
            self._flushed_s = now_s
