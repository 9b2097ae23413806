"""What a failed step must lead to in an engine that declares `isolation`, worked out from failures, commits and entries
alone.

Each failure asks less of the device. At first the engine drafts the fewest steps. Then a step has as many rows as the
failed one had suspects, or half as many, and half of its prefill tokens if it had a prompt. At last a request fails
that was alone in a step that could not be smaller. Suspects are the requests without a committed step since they
entered, or all; they enter before all others. `GOOD_STEPS` commits in a row allow twice as much, and at last as much as
the configuration does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .contract import ServingConfig
from .model import WAITING, ModelFlight, RequestLife

GOOD_STEPS = 8
LEAST_SHARE = 8
"""Of the chunk size: prefill tokens of a step are never fewer."""


class Loss(NamedTuple):
    """What a failed step must do at once: the request that fails, and those that run on."""

    blamed: RequestLife | None
    running: tuple[str, ...]


class DeviceLimits:
    """What steps may ask of the device: `rows` (None: as configured), `prefill` tokens, and only the
    `fewest` draft steps."""

    def __init__(self, config: ServingConfig) -> None:
        self.fewest = False
        self.rows: int | None = None
        self.prefill = config.chunk_size
        self._config = config
        self._good_steps = 0
        self._first: list[RequestLife] = []

    @property
    def is_reduced(self) -> bool:
        return self.fewest or self.rows is not None

    @property
    def max_running(self) -> int:
        return min(self._config.max_running, self.rows or self._config.max_running)

    def first(self) -> list[RequestLife]:
        """Return the requests that enter before all others, in their order."""
        self._first = [life for life in self._first if life.state is WAITING]
        return list(self._first)

    def fail(self, flights: list[ModelFlight], running: Iterable[RequestLife]) -> Loss:
        """Note that the oldest of `flights` has failed, with those behind it."""
        lost = [[p.life for p in flight.parts if p.is_present and not p.life.leaving] for flight in flights]
        there = list(dict.fromkeys(lost[0]))
        suspects = [life for life in there if not life.has_committed] or there
        blamed = there[0] if there and self._reduce(flights[0], len(there), len(suspects)) else None
        gone = {life for lives in lost for life in lives}
        staying = sorted((life for life in running if life not in gone and not life.leaving), key=_place)
        if self.rows is not None:
            staying = staying[: self.rows]
            new = sorted((life for life in suspects if life is not blamed), key=_place)
            self._first = [*new, *(life for life in self.first() if life not in new)]
        return Loss(blamed, tuple(life.name for life in staying))

    def _reduce(self, failed: ModelFlight, num_rows: int, num_suspects: int) -> bool:
        """Ask for less. Returns whether less cannot be asked for."""
        self._good_steps = 0
        if not self.fewest and failed.rows and failed.steps > self._config.candidates[0]:
            self.fewest = True
            return False
        least = max(1, self._config.chunk_size // LEAST_SHARE)
        if num_rows == 1 and self.rows == 1 and (not failed.chunks or self.prefill <= least):
            return True
        self.fewest = True
        self.rows = num_suspects if num_suspects < num_rows else max(1, num_rows // 2)
        if failed.chunks:
            self.prefill = max(least, self.prefill // 2)
        return False

    def commit(self) -> None:
        """Note that a step was committed."""
        self._good_steps += self.is_reduced
        if self._good_steps < GOOD_STEPS:
            return
        self._good_steps = 0
        if self.rows is None:
            self.fewest = False
            return
        self.prefill = min(self._config.chunk_size, 2 * self.prefill)
        self.rows *= 2
        if self.rows >= self._config.max_running and self.prefill == self._config.chunk_size:
            self.rows = None


def _place(life: RequestLife) -> tuple[int, int]:
    """Return a key by which the most entitled come first."""
    return -life.wish.priority, life.place
