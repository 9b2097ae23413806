"""Two engines side by side: one is served by the executor, the other is fed what a log would have of it.

The second one never meets the executor. It gets the same requests, and of each result only what `observe.encoding`
writes into a log. Where it decides otherwise, the first engine has seen something that no log has, such as a step into
whose arrays the executor has written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ...core.adaptive.parking import Parking
from ...core.adaptive.policy import StepPolicy
from ...core.algorithm.algorithm import DraftKV
from ...core.contract.events import Committed, EventSink
from ...core.contract.outcomes import CommitOutcome
from ...core.contract.request import Request
from ...core.contract.step import FailureCause, Step, StepFailure, StepResult
from ...core.errors import ForedraftError
from ...core.scheduler.engine import Engine
from ...core.scheduler.rounds import BudgetRule, RowLengths, all_nodes, no_budget
from ...observe.decoding import decode_result
from ...observe.encoding import LineEncoder

LONG_REST = 1 << 20
"""Rounds of 0 steps after which every draft is parked."""


class ParksOnDemand:
    """Chooses as `policy` does, which has 0 among its candidates; `turn` parks the draft, or lets it return."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self.parking = Parking(prefill_token_ps=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        steps = self._policy.steps_for(batch_size, kv_tokens)
        return 0 if self.parking.is_parked else steps

    def turn(self) -> None:
        """Park a draft that is in use; ask a parked one back."""
        if self.parking.is_parked:
            self.parking.ask_back()
            return
        self.parking.want(0, 0.0, 0)  # the rounds of 0 steps before this one do not count
        for now in (0, LONG_REST):
            self.parking.rest(now)


class RecordedCore:
    """`live` is the engine that the executor serves.
    `difference` is where the other first went its own way: (served, fed), else None."""

    def __init__(self, make_engine: Callable[[EventSink], Engine]) -> None:
        self._lines: tuple[list[str], list[str]] = ([], [])
        self._encoder = LineEncoder(0)  # of results, as the log has them
        self.live = make_engine(self._writer(0))
        self.fed = make_engine(self._writer(1))
        self.parking: list[ParksOnDemand] = []  # of both, if their draft has KV and may draft nothing
        if self.live.algorithm.draft_kv is not DraftKV.NONE and 0 in self.live.controller.candidates[:-1]:
            for engine in (self.live, self.fed):
                self.parking.append(ParksOnDemand(engine.controller.policy))
                engine.controller.policy = self.parking[-1]
        self.difference: tuple[str, str] | None = None
        self.refusal = ""  # what both engines say of a result that cannot be
        self.num_events = 0
        self._in_flight: list[tuple[Step, Step]] = []  # planned by the one, by the other

    def _writer(self, number: int) -> EventSink:
        encode = LineEncoder(0).encode
        lines = self._lines[number]
        return lambda event: lines.append(encode(event))

    def submit(self, request: Request) -> Any:
        # What a user wants to see of a token decides nothing, and the log of results does not have it.
        fed = self.fed.submit(replace(request, outputs=()), 0)
        outcome = self.live.submit(request, 0)
        if outcome != fed and self.difference is None:
            self.difference = (str(outcome), str(fed))
        for lines in self._lines:
            lines.clear()
        self.num_events += 1
        return outcome

    def abort(self, request_id: str) -> Any:
        return self._both(lambda engine: engine.abort(request_id, 0))

    def retract(self, request_id: str) -> bool:
        return self._both(lambda engine: engine.request_retraction(request_id, 0))

    def turn_parking(self) -> None:
        """Park the draft, or let it return, from the next plan on."""
        for policy in self.parking:
            policy.turn()
        self.num_events += 1

    def _both(self, call: Callable[[Engine], Any]) -> Any:
        call(self.fed)
        outcome = call(self.live)
        self._compare()
        return outcome

    def plan(self, row_lengths: RowLengths = all_nodes, budget_for: BudgetRule = no_budget) -> Step | None:
        """Plan the next step, whose rows verify as many nodes as `row_lengths` and `budget_for` say."""
        for engine in (self.live, self.fed):
            engine.rounds.row_lengths, engine.rounds.budget_for = row_lengths, budget_for
        fed = self._try(lambda: self.fed.plan(0))
        live = self._try(lambda: self.live.plan(0))
        if isinstance(live, str) or isinstance(fed, str):
            self._came_apart(live, fed)
            return None
        self._compare()
        if live is not None and fed is not None:
            self._in_flight.append((live, fed))
            self.look_at_steps()
        return live

    def look_at_steps(self) -> None:
        """Check that both engines have the same steps in flight.
        Log lines are not enough: they say "=" for rows that have not changed."""
        for live, fed in self._in_flight:
            for part in ("decode", "prefill"):
                changed = first_unequal(getattr(live, part), getattr(fed, part))
                if changed and self.difference is None:
                    name, one, other = changed
                    where = f"step {live.step_id}, {part}.{name}"
                    self.difference = (f"{where} is {one}", other)

    def commit(self, step: Step, result: StepResult) -> CommitOutcome | None:
        """Commit, and return the outcome; None if the engines cannot go on: then `difference` or `refusal` says why."""
        line = self._encoder.encode(Committed(0, step, result, (), None, ()))
        _, fed_step = self._in_flight.pop(0)
        live = self._try(lambda: self.live.commit(result, 0))
        fed = self._try(lambda: self.fed.commit(decode_result(json.loads(line), fed_step), 0))
        if isinstance(live, str) or isinstance(fed, str):
            self._came_apart(live, fed)
            return None
        self._compare()
        return live

    def lose(self, step_id: int, restart: Callable[[], None]) -> None:
        """Give up all steps in flight, of which `step_id` has failed, and resume after `restart`."""
        failure = StepFailure(step_id, FailureCause.RAISED)
        self._both(lambda engine: engine.lose_steps(failure, 0))
        self._in_flight.clear()
        restart()
        self._both(lambda engine: engine.resume(0, restarted=True))

    @staticmethod
    def _try(call: Callable[[], Any]) -> Any:
        """Return the answer of a call, or what was raised as a text."""
        try:
            return call()
        except (ForedraftError, AssertionError, LookupError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    def _came_apart(self, live: Any, fed: Any) -> None:
        if isinstance(live, str) and isinstance(fed, str):
            self.refusal = live
        else:
            said = [answer if isinstance(answer, str) else "goes on" for answer in (live, fed)]
            self.difference = self.difference or (said[0], said[1])

    def _compare(self) -> None:
        live, fed = self._lines
        self.num_events += len(live)
        if live != fed and self.difference is None:
            unequal = [pair for pair in zip([*live, "nothing"], [*fed, "nothing"], strict=False) if pair[0] != pair[1]]
            self.difference = unequal[0]
        live.clear()
        fed.clear()


def first_unequal(one: Any, other: Any) -> tuple[str, str, str] | None:
    """Return the first field in which two dataclasses of arrays and numbers differ, with both values;
    None if none does."""
    if one is None or other is None:
        return None if one is other else ("is there", str(one is not None), str(other is not None))
    for field in fields(one):
        values = getattr(one, field.name), getattr(other, field.name)
        if not np.array_equal(*values):
            return field.name, *(str(np.asarray(value).tolist()) for value in values)
    return None
