"""Reduces the load after a failed step: fewer draft steps, then a smaller batch, and at last it fails a single request.

A failed step delivers no tokens, and neither do the steps launched after it: all of them are *lost*. Their requests
return to the queue with the tokens that were delivered before. Their slots stay fenced until the driver says that the
device is quiet. The next attempt demands less of the device:

```
            failed                 failed                      failed, alone and at the least budget
 NORMAL ──────────► FEWER STEPS ──────────► SMALLER BATCH ────────────────────────────────► that request fails
    ▲                    │  ▲                │  ▲     │ failed: rows and prefill budget halve again
    └──── good steps ────┘  └── good steps ──┘  └─────┘ good steps: they double
```

Requests without a committed step since they entered are the first suspects. The engine tries them before the others,
and by themselves. The limits are a pure function of failures and commits. While they are reduced the engine plans
single rounds only, so a multi-step never hides a commit.
"""

from __future__ import annotations

from ..adaptive import AdaptiveController
from ..contract.events import EventSink, Resumed, StepsLost
from ..contract.outcomes import LossOutcome
from ..contract.request import FinishReason
from ..contract.step import StepFailure
from .flights import StepInFlight
from .life import RequestRecord
from .requests import Requests
from .waiting import entitlement, least_entitled

GOOD_STEPS = 8
"""Commits in a row before the limits are raised once."""

LEAST_BUDGET_SHARE = 8
"""The prefill budget of a step is never cut below this part of the configured chunk size."""


class StepLimits:
    """The limits of a step; each failure lowers them. `row_limit` None: no limit beside the engine's own."""

    def __init__(self, chunk_size: int, max_rows: int) -> None:
        self.fewer_steps: bool = False
        self.row_limit: int | None = None
        self.prefill_budget: int = chunk_size
        self._chunk_size = chunk_size
        self._least_budget = max(1, chunk_size // LEAST_BUDGET_SHARE)
        self._max_rows = max_rows
        self._good_steps = 0

    @property
    def are_reduced(self) -> bool:
        """Whether steps are small because a step failed recently."""
        return self.fewer_steps or self.row_limit is not None

    def count_failure(self, num_rows: int, num_suspects: int, has_prefill: bool, can_draft_less: bool) -> bool:
        """Reduce the limits after a failed step of `num_rows` live requests. Returns whether the only request in the
        step must fail.

        `can_draft_less`: the step drafted more than the fewest candidate steps of its batch size.
        """
        self._good_steps = 0
        if not self.fewer_steps and can_draft_less:
            self.fewer_steps = True
            return False
        at_least_budget = not has_prefill or self.prefill_budget <= self._least_budget
        if num_rows == 1 and self.row_limit == 1 and at_least_budget:
            return True
        self.fewer_steps = True
        if num_suspects < num_rows:
            self.row_limit = max(1, num_suspects)
        else:
            self.row_limit = max(1, num_rows // 2)
        if has_prefill:
            self.prefill_budget = max(self._least_budget, self.prefill_budget // 2)
        return False

    def count_success(self) -> bool:
        """Count a committed step. Returns whether the limits are higher from now on."""
        self._good_steps += 1
        if self._good_steps < GOOD_STEPS:
            return False
        self._good_steps = 0
        if self.row_limit is None:
            self.fewer_steps = False
            return True
        self.prefill_budget = min(self._chunk_size, 2 * self.prefill_budget)
        self.row_limit *= 2
        if self.row_limit >= self._max_rows and self.prefill_budget == self._chunk_size:
            self.row_limit = None
        return True


class Recovery:
    """Gives up lost steps, resumes planning, and keeps the limits of later steps."""

    def __init__(self, limits: StepLimits, requests: Requests, controller: AdaptiveController, emit: EventSink) -> None:
        self.limits = limits
        self.requests = requests
        self.controller = controller
        self._emit = emit

    def lose_steps(self, failure: StepFailure, now_ns: int) -> LossOutcome:
        """Retract or end the requests of all steps in flight, of which the oldest has failed.

        They wait again with the tokens that were delivered before. Their slots stay fenced until `resume`. Raises
        RELAY-07 for another step.
        """
        requests = self.requests
        failed = requests.in_flight.oldest(failure.step_id, "failure")
        in_failed = requests.records_of(failed)
        suspects = self._suspects_among(in_failed)
        blamed = in_failed[0] if in_failed and self._count_failure(failed, len(in_failed), len(suspects)) else None
        step_ids = tuple(flight.step.step_id for flight in requests.in_flight)
        finished = requests.lose_in_flight(blamed, f"{failure}; it ran alone")
        self._apply_limits()
        if self.limits.row_limit is not None:
            self._shrink_to(self.limits.row_limit, [record for record in suspects if record is not blamed])
        ended = tuple(end for end in finished if end.reason is not FinishReason.ABORT)
        self._emit(StepsLost(now_ns, failure, step_ids, requests.take_retracted(), ended))
        return LossOutcome(tuple(finished), step_ids)

    def resume(self, now_ns: int, restarted: bool) -> None:
        """Allow plans again and release what is fenced, because no lost step can touch it any more. Raises RELAY-01
        with steps in flight.

        After a restart every running request is retracted and the prefix cache is empty. Holds of rows must have been
        released before.
        """
        requests = self.requests
        requests.pass_lost_steps()
        if restarted:
            for record in list(requests.running.values()):
                requests.retract(record, keeps_place=True)
            requests.store.forget()
        self._emit(Resumed(now_ns, restarted, requests.take_retracted()))

    def count_commit(self) -> None:
        """Raise the limits again after enough committed steps."""
        if self.limits.are_reduced and self.limits.count_success():
            self._apply_limits()

    def _count_failure(self, failed: StepInFlight, num_rows: int, num_suspects: int) -> bool:
        """Reduce the limits. Returns whether the step's only request must fail."""
        step = failed.step
        can_draft_less = step.decode is not None and step.decode.shape.steps > self.controller.fewest_steps(
            len(step.decode.rows)
        )
        return self.limits.count_failure(num_rows, num_suspects, step.prefill is not None, can_draft_less)

    def _suspects_among(self, records: list[RequestRecord]) -> list[RequestRecord]:
        """Return the requests without a committed step since they entered; all of them if each has one."""
        return [record for record in records if record.has_committed_nothing] or records

    def _apply_limits(self) -> None:
        self.controller.draft_fewest(self.limits.fewer_steps)
        self.requests.store.revision += 1

    def _shrink_to(self, row_limit: int, suspects: list[RequestRecord]) -> None:
        """Retract the least entitled requests beyond the limit; the suspects are admitted before all others."""
        requests = self.requests
        while len(requests.running) > row_limit:
            requests.retract(least_entitled(requests.running.values()), keeps_place=True)
        requests.waiting.try_first(sorted(suspects, key=entitlement, reverse=True))
