"""What an engine does after a step that failed: fewer steps, then a smaller batch, and in the end only the victim fails.

A failed step delivers nothing, and neither does a step launched behind it: all of them are *lost*. Their requests go back to the
queue with what was delivered before, their slots stay behind a fence until the driver says that the device is quiet, and the
next attempt asks less of the device:

```
            failed                 failed                      failed, alone and at the least budget
 NORMAL ──────────► FEWER STEPS ──────────► SMALLER BATCH ────────────────────────────────► that request fails
    ▲                    │  ▲                │  ▲     │ failed: rows and prefill budget halve again
    └──── good steps ────┘  └── good steps ──┘  └─────┘ good steps: they double
```

Requests that had not survived any step before the lost one are suspected first: they are tried before the others, by themselves.
The state is a pure function of failures and commits. While it is not NORMAL the engine certifies single rounds only, so a block of
rounds never hides a commit.
"""

from __future__ import annotations

GOOD_STEPS = 8
"""Commits in a row before one rung is climbed."""

LEAST_BUDGET_SHARE = 8
"""The prefill budget of a step is never cut below this part of the configured chunk size."""


class Recovery:
    """The ladder. `row_limit` None: no limit beside the engine's own."""

    def __init__(self, chunk_size: int, max_rows: int) -> None:
        self.fewer_steps = False
        self.row_limit: int | None = None
        self.prefill_budget = chunk_size
        self._chunk_size = chunk_size
        self._least_budget = max(1, chunk_size // LEAST_BUDGET_SHARE)
        self._max_rows = max_rows
        self._good_steps = 0

    @property
    def is_normal(self) -> bool:
        return not self.fewer_steps and self.row_limit is None

    def failed(self, num_rows: int, num_suspects: int, has_prefill: bool, can_draft_less: bool) -> bool:
        """A step of `num_rows` live requests is lost. Says whether the only request in it is to fail.

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

    def succeeded(self) -> bool:
        """A step was committed. Says whether more is allowed from now on."""
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
