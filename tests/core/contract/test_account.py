"""The account of requests' lives: every step in every state, and equal facts from the account and from the summary."""

from __future__ import annotations

import re
from collections import Counter

import corpus
import numpy as np
import pytest
from foredraft.core.contract.account import TRANSITIONS, EngineAccount, LifeState, LifeStep
from foredraft.core.contract.events import (
    Aborted,
    Committed,
    EngineStarted,
    HandoffMove,
    HandoffMoved,
    Planned,
    Resumed,
    StepsLost,
    Submitted,
)
from foredraft.core.contract.request import FinishedRequest, FinishReason, Request
from foredraft.core.contract.step import (
    NO_WRITES,
    DecodeResult,
    DecodeStep,
    FailureCause,
    Join,
    MultiStepEnd,
    RoundShape,
    Step,
    StepFailure,
    StepResult,
)
from foredraft.core.errors import InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.faults.plan import swarm_plan
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario_file import scenario_from_dict
from observed_run import recorded_events
from service_under_faults import disaggregated_service, service

REQUEST = Request("a", Prompt.of_length(5), 9)


def planned(step_id: int, *rows: int, decodes: bool = False, retracted: tuple[str, ...] = ()) -> Planned:
    """A step in which the request enters each of these rows; with `decodes` its rounds are of row 1."""
    joins = tuple(Join(row, 1, REQUEST, 9, 0, 0, None) for row in rows)
    lens = np.array([5])
    decode = DecodeStep(np.array([1], np.int32), np.array([1]), lens, lens, RoundShape(1, 1, 2), 4) if decodes else None
    return Planned(0, Step(step_id, joins, (), NO_WRITES, None, decode), retracted, 0, 0)


def committed(plan: Planned, *finished: FinishedRequest, kept: list[int] | None = None, first=()) -> Committed:
    """The commit of a step; `kept` are the tokens of its one row by round."""
    step, rounds = plan.step, None
    times = np.arange(len(kept or [0]))
    if kept is not None:
        lens = np.array(kept, np.int32).reshape(-1, 1)
        rounds = DecodeResult(len(kept), lens, None, np.zeros(1, bool), MultiStepEnd.ASKED)
    result = StepResult(step.step_id, None, rounds, times)
    return Committed(7, step, result, first, None if kept is None else np.array(kept).reshape(-1, 1), finished)


def ended(reason: FinishReason = FinishReason.ERROR) -> FinishedRequest:
    return FinishedRequest("a", reason, 0)


def handed(move: HandoffMove, **more) -> HandoffMoved:
    return HandoffMoved(0, move, "a", **more)


SUBMITTED, ENTERED = Submitted(3, REQUEST, ""), planned(1, 1)
RESERVED = handed(HandoffMove.RESERVE, row=1, request=REQUEST)
ARRIVED = handed(HandoffMove.JOIN, row=1)
INTO = {  # events that bring a request into each state
    LifeState.NEW: (),
    LifeState.WAITING: (SUBMITTED,),
    LifeState.RUNNING: (SUBMITTED, ENTERED),
    LifeState.EXPECTED: (RESERVED,),
    LifeState.ARRIVED: (RESERVED, ARRIVED),
    LifeState.LEAVING: (SUBMITTED, ENTERED, Aborted(5, "a")),
    LifeState.ENDED: (SUBMITTED, handed(HandoffMove.END, finished=(ended(),))),
}
OF_STEP = {  # an event that says the step
    LifeStep.SUBMIT: SUBMITTED,
    LifeStep.REFUSE: Submitted(3, REQUEST, "full"),
    LifeStep.RESERVE: RESERVED,
    LifeStep.ARRIVE: ARRIVED,
    LifeStep.ENTER: planned(2, 2),
    LifeStep.HAND_OVER: handed(HandoffMove.HOLD, row=1),
    LifeStep.RETRACT: Resumed(4, False, ("a",)),
    LifeStep.LEAVE: Aborted(4, "a"),
    LifeStep.END: handed(HandoffMove.END, finished=(ended(),)),
}
ANEW = (LifeStep.SUBMIT, LifeStep.REFUSE, LifeStep.RESERVE)  # these begin another life of the id
AN_ABORT_ENDS = (LifeState.WAITING, LifeState.EXPECTED, LifeState.ARRIVED)


def account_in(state: LifeState, **options) -> EngineAccount:
    account = EngineAccount(**options)
    for event in INTO[state]:
        account.take(event)
    return account


def expected_after(state: LifeState, step: LifeStep) -> LifeState | None:
    """Where an event leads from a state, by the account's table; None: it is impossible."""
    if state in (LifeState.LEAVING, LifeState.ENDED):  # the engine may take the id again
        state = LifeState.NEW
    if step is LifeStep.REFUSE:
        return LifeState.ENDED
    if step is LifeStep.LEAVE and state in AN_ABORT_ENDS:
        return LifeState.ENDED
    if step in ANEW and state is not LifeState.NEW:
        return None
    return TRANSITIONS[state].get(step)


def test_there_are_events_for_every_state_and_step():
    assert list(INTO) == list(TRANSITIONS) == list(LifeState) and list(OF_STEP) == list(LifeStep)
    for state in LifeState:
        account = account_in(state)
        found = [one.state for one in (*account.requests.values(), *account.leaving)]
        assert found == ([state] if state not in (LifeState.NEW, LifeState.ENDED) else [])


@pytest.mark.parametrize("state", LifeState)
@pytest.mark.parametrize("step", LifeStep)
def test_each_event_in_each_state_is_taken_or_refused_as_the_table_says(state: LifeState, step: LifeStep):
    account, event, after = account_in(state), OF_STEP[step], expected_after(state, step)
    is_unknown = state in (LifeState.NEW, LifeState.LEAVING, LifeState.ENDED)
    if step is LifeStep.LEAVE and is_unknown:
        assert account.take(event) == ()  # an abort may come at any time
    elif after is None:
        number = len(INTO[state]) + 1
        with pytest.raises(InvariantViolation, match=rf"ENGINE-02: event {number}: request 'a' ") as caught:
            account.take(event)
        assert re.search(r"cannot [a-z ]+$|while one of this id is live$", caught.value.message)
    else:
        ((taken, request, before),) = account.take(event)
        assert (request.request_id, request.state) == ("a", after)
        assert before is (LifeState.NEW if step in ANEW or is_unknown else state)
        assert taken is (LifeStep.END if step is LifeStep.LEAVE and after is LifeState.ENDED else step)
        runs_on = step is LifeStep.REFUSE and state is LifeState.RUNNING  # the refused one has its id
        assert account.num_running == (after is LifeState.RUNNING or runs_on)


@pytest.mark.parametrize("state", LifeState)
@pytest.mark.parametrize("step", LifeStep)
def test_an_account_that_reports_goes_on_from_what_the_event_says(state: LifeState, step: LifeStep):
    said: list[str] = []
    account = account_in(state, report=said.append)
    assert not said
    changes = account.take(OF_STEP[step])
    is_unknown = state in (LifeState.NEW, LifeState.LEAVING, LifeState.ENDED)
    impossible = expected_after(state, step) is None and not (step is LifeStep.LEAVE and is_unknown)
    assert len(said) == impossible
    running = [one for one in account.requests.values() if one.state is LifeState.RUNNING]
    assert account.num_running == len(running)
    if step is LifeStep.ENTER:
        assert account.in_row[2] is changes[-1][1] and changes[-1][1].state is LifeState.RUNNING


def test_steps_land_in_the_order_of_their_plans():
    account = account_in(LifeState.RUNNING)
    account.take(planned(2))
    with pytest.raises(InvariantViolation, match="event 4: step 2 is committed, and step 1 is the oldest in flight"):
        account.take(committed(planned(2)))
    with pytest.raises(InvariantViolation, match="event 2: step 5 is lost, and none is the oldest"):
        account_in(LifeState.WAITING).take(StepsLost(0, StepFailure(5, FailureCause.RAISED), (5,), (), ()))


def test_tokens_go_to_the_request_that_has_the_row():
    account = EngineAccount(counts_tokens=True)
    first, second = planned(1, 1), planned(2, decodes=True)
    account.take(SUBMITTED)
    account.take(first)
    request = account.requests["a"]
    account.take(committed(first, first=("a",)))
    account.take(second)
    event = committed(second, ended(FinishReason.STOP), kept=[2, 0, 3])
    runs = [(run.request, run.round, run.place, run.tokens) for run in account.runs(event)]
    assert runs == [(request, 0, 0, 2), (request, 2, 0, 3)]
    account.take(event)
    assert (request.num_tokens, request.state, request.reason) == (6, LifeState.ENDED, FinishReason.STOP)
    third = planned(3, decodes=True)
    account.take(third)
    with pytest.raises(InvariantViolation, match="event 7: row 1 has tokens, and request 'a' has ended"):
        account.take(committed(third, kept=[1]))


def test_a_request_that_is_aborted_in_a_block_gets_its_earlier_rounds_and_ends_with_the_commit():
    account = EngineAccount(counts_tokens=True)
    plan = planned(1, 1, decodes=True)
    for event in (SUBMITTED, plan):
        account.take(event)
    request = account.requests["a"]
    assert account.take(Aborted(5, "a")) == [(LifeStep.LEAVE, request, LifeState.RUNNING)]
    assert account.num_running == 0 and account.leaving == [request]
    assert account.take(committed(plan, kept=[2])) == [(LifeStep.END, request, LifeState.LEAVING)]
    assert (request.num_tokens, request.end_ns, request.reason) == (2, 5, FinishReason.ABORT) and not account.leaving


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_on_a_prefill_engine_an_abort_ends_a_running_request_at_once(role):
    account = EngineAccount()
    for event in (EngineStarted({"role": role}), SUBMITTED, ENTERED, Aborted(5, "a")):
        account.take(event)
    assert bool(account.leaving) == (role == "both")
    if account.leaving:
        assert account.close("a").state is LifeState.ENDED and account.close("a") is None


# -- the facts of whole runs -------------------------------------------------------------------------------------------

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "error": FinishReason.ERROR}


class Facts:
    """Counts the changes of one engine's account, and compares its gauges with the plans."""

    def __init__(self) -> None:
        self.account = EngineAccount(counts_tokens=True)
        self.steps: Counter[LifeStep] = Counter()
        self.reasons: Counter[FinishReason | None] = Counter()
        self.tokens = self.cached = 0

    def __call__(self, event) -> None:
        if isinstance(event, Committed):
            self.tokens += sum(run.tokens for run in self.account.runs(event))
        for step, request, before in self.account.take(event):
            self.steps[step] += 1
            if step is LifeStep.END:
                self.reasons[request.reason] += 1
                if request.num_output >= 0 and before is not LifeState.EXPECTED:
                    assert request.num_output == request.num_tokens, request
        waiting = sum(one.state is LifeState.WAITING for one in self.account.requests.values())
        if isinstance(event, Planned):
            assert waiting == event.num_waiting


def check_against_summary(facts: list[Facts], summary: dict) -> None:
    """One engine has each request; where prefill and decode are apart, tokens and retractions still add up."""
    steps = sum((one.steps for one in facts), Counter())
    reasons = sum((one.reasons for one in facts), Counter())
    assert steps[LifeStep.RETRACT] == summary["retractions"]
    assert sum(one.tokens for one in facts) == summary["delivered_tokens"]
    assert reasons[FinishReason.STOP] + reasons[FinishReason.LENGTH] == summary["completed"]
    assert not any(one.account.requests or one.account.leaving for one in facts)
    if not steps[LifeStep.RESERVE] and not reasons[FinishReason.MOVED]:
        assert steps[LifeStep.SUBMIT] + steps[LifeStep.REFUSE] == summary["submitted"]
        assert (steps[LifeStep.REFUSE], reasons[FinishReason.ABORT], reasons[FinishReason.ERROR]) == tuple(
            summary[key] for key in ("refused", "aborted", "failed")
        )


@pytest.mark.fast("changes*-0", ci="*")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("changes", [{}, {"overlap": False}, {"num_pages": 45, "preempt": True}])
def test_the_facts_of_a_random_run_are_those_of_its_summary(seed, changes):
    facts, metrics = Facts(), RunMetrics()
    sink = metrics.sink(0)
    for event in recorded_events(seed, **changes):
        facts(event)
        sink(event)
    check_against_summary([facts], metrics.summary())


@pytest.mark.fast("disaggregated-2-faults", ci=("service-4-faults", "disaggregated-1"))
@pytest.mark.parametrize("name", [name for name in corpus.names() if not name.startswith("builtin")])
def test_the_facts_of_a_stored_run_are_those_of_its_summary(name):
    kind, seed, *faults = name.split("-")
    make = disaggregated_service if kind == "disaggregated" else service
    plan = swarm_plan(int(seed), transfers=kind == "disaggregated") if faults else None
    metrics, facts = RunMetrics(), {}

    def sinks(replica: int):
        facts[replica] = Facts()
        return [facts[replica], metrics.sink(replica)]

    Simulation(scenario_from_dict(make(int(seed)), name), sinks=sinks, faults=plan).run()
    check_against_summary(list(facts.values()), metrics.summary())
