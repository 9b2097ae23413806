"""The time that a scheduler's CPU thread takes to plan, launch and commit steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.contract.step import DecodeStep
from ...core.draws import Purpose
from ..cost.host import HostCost
from .device import STEADY, DrawnRounds, Jitter, Steady


class HostJitter(NamedTuple):
    """The fluctuation of the scheduler's work: of planning and launching a step, and of committing it."""

    launch: Steady
    commit: Steady

    @classmethod
    def of(cls, spread: float, seed: int, replica: int) -> HostJitter:
        """Return the fluctuation with this spread; 0: there is none."""
        return cls(*(Jitter.of(spread, seed, Purpose.HOST_TIME, replica, lane) for lane in (0, 1)))


STEADY_HOST = HostJitter(STEADY, STEADY)


class HostWork:
    """The thread's work on the steps of one engine. All times are nanoseconds; `number` counts the rounds before.

    `reads_acceptance`: the host reads what was accepted before it goes on, as in synchronous mode. `has_look_ups`: a
    step is launched only when the tokens of the step before are known.
    """

    def __init__(
        self, cost: HostCost, reads_acceptance: bool, jitter: HostJitter = STEADY_HOST, *, has_look_ups: bool = False
    ) -> None:
        self.cost = cost
        self.jitter = jitter
        self._reads_acceptance = reads_acceptance
        self._has_look_ups = has_look_ups

    def mean_launch_ns(self, batch_size: int) -> int:
        """Return the time to plan and launch a step, on average."""
        return self.cost.plan_ns(batch_size) + self.cost.launch_ns(batch_size)

    def mean_late_ns(self, batch_size: int) -> int:
        """Return the part of `mean_launch_ns` that begins only when the tokens of the step before are known."""
        return self.cost.late_ns(batch_size, self._has_look_ups)

    def launch_ns(self, number: int, mean_ns: int) -> int:
        """Return the time to plan and launch a step that takes `mean_ns` on average."""
        return self.jitter.launch.time_ns(number, mean_ns)

    def launches_ns(self, number: int, mean_ns: int, rounds: int) -> int | np.ndarray:
        """Return the time to plan and launch the round after each of a multi-step, int64 [rounds], or one number if it
        is the same for all."""
        return self.jitter.launch.repeated_ns(number + 1, mean_ns, rounds)

    def commit_ns(self, number: int, decode: DecodeStep | None, tokens: int) -> int:
        """Return the time to commit a step of one round that emits `tokens`."""
        batch_size = 0 if decode is None else len(decode.rows)
        mean_ns = self.cost.commit_ns(batch_size, tokens, self._verified_rows(decode))
        return self.jitter.commit.time_ns(number, mean_ns)

    def commits_ns(self, number: int, decode: DecodeStep, drawn: DrawnRounds) -> np.ndarray:
        """Return the time to commit each round of a multi-step, int64 [rounds]."""
        batch_size, emitted = len(decode.rows), drawn.emitted[: drawn.rounds]
        verified = self._verified_rows(decode)
        base_ns = self.cost.commit_ns(batch_size, 0, verified)
        means_ns = base_ns + (self.cost.commit_ns(batch_size, 1, verified) - base_ns) * emitted
        return self.jitter.commit.times_ns(number, means_ns)

    def _verified_rows(self, decode: DecodeStep | None) -> int:
        """Return the rows whose acceptance the host must read before it goes on."""
        return len(decode.rows) if decode is not None and decode.shape.steps and self._reads_acceptance else 0
