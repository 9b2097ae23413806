"""Shares out the turns of the event loop, each a pass over all that is ready.

```
jobs, in their order   ▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤▤ …
turns of the loop      │ WORK_PER_TURN │ probes, new connections │ WORK_PER_TURN │ …
```

Work is counted and not timed: what a turn does is the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

WORK_PER_TURN = 100
"""Units of about 10 µs of work that a turn does."""
EVENT = 5
"""Units of an event: its bytes are written to a socket."""
REQUEST = 80
"""Units of a request, from its head to its orders, beside what its length adds."""
BYTES_PER_UNIT = 40
"""Of a request's body."""


class LoopTurns:
    """Does jobs of one event loop in their order, WORK_PER_TURN in a turn. A job does one piece of its work at each
    step, and yields the units that it took."""

    def __init__(self) -> None:
        self._jobs: deque[Iterator[int]] = deque()
        self._left = WORK_PER_TURN
        self._is_due = False  # the next turn

    def add(self, job: Iterator[int]) -> None:
        """Begin a job behind those that wait. Called in the event loop, and not by a job."""
        self._jobs.append(job)
        self._go_on()

    async def take(self, units: int) -> None:
        """Wait, behind the jobs, for a turn that has room for work of so many units, which the caller does then."""
        if not self._jobs and self._left > 0:
            self._left -= units
            self._call_next()
            return
        has_room = asyncio.get_running_loop().create_future()
        self.add(_give(has_room, units))
        await has_room

    def _begin(self) -> None:
        self._is_due, self._left = False, WORK_PER_TURN
        self._go_on()

    def _go_on(self) -> None:
        try:
            while self._jobs and self._left > 0:
                units = next(self._jobs[0], None)
                if units is None:
                    self._jobs.popleft()
                else:
                    self._left -= units
        finally:  # also behind a job that has failed, which is over
            self._call_next()

    def _call_next(self) -> None:
        if not self._is_due and self._left < WORK_PER_TURN:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin)


def _give(has_room: asyncio.Future[None], units: int) -> Iterator[int]:
    if not has_room.done():  # else its task has been cancelled
        has_room.set_result(None)
        yield units
