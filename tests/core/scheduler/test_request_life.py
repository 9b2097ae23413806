"""A request's life: it ends once, a refused event changes nothing, and a request that makes no sense is refused."""

import pytest
from foredraft.core.contract.request import Request, SamplingParams
from foredraft.core.errors import InvalidRequest, InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.life import (
    JOINT_RULES,
    TRANSITIONS,
    Demand,
    RequestEvent,
    RequestRecord,
    RequestState,
    Response,
)
from hypothesis import given
from hypothesis import strategies as st

TERMINAL_STATES = (
    *(RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED),
    RequestState.TRANSFERRED,  # to another engine, which goes on with it
)


def record_in(state):
    record = RequestRecord(Request("a", Prompt.of_tokens([1, 2]), 3), 0, 3)
    record.state = state
    return record


@given(st.lists(st.sampled_from(RequestEvent), max_size=30))
def test_a_life_ends_once_and_what_is_refused_changes_nothing(events):
    record = record_in(RequestState.WAITING)
    for event in events:
        before = record.state
        try:
            record.advance(event)
        except InvariantViolation as violation:
            assert violation.invariant == "ENGINE-02" and record.state is before
        else:
            assert before not in TERMINAL_STATES, "a request that has ended goes on"
        assert record.is_terminal == (record.state in TERMINAL_STATES)


@pytest.mark.parametrize("event", RequestEvent)
@pytest.mark.parametrize("state", RequestState)
def test_a_request_follows_its_table(state, event):
    record, following = record_in(state), TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(InvariantViolation, match=f"ENGINE-02.* is {state.value} and cannot {event.value}"):
            record.advance(event)
    else:
        record.advance(event)
    assert record.state is (following or state)


def test_every_state_leads_to_an_end_and_an_abort_is_an_end():
    assert TRANSITIONS.keys() == set(RequestState)
    ends = set(TERMINAL_STATES)
    while grown := {s for s in RequestState if s not in ends and ends & set(TRANSITIONS[s].values())}:
        ends |= grown
    assert ends == set(RequestState)
    for state in set(RequestState) - set(TERMINAL_STATES) - {RequestState.NEW}:
        assert TRANSITIONS[state][RequestEvent.ABORT] is RequestState.ABORTED
        assert TRANSITIONS[state][RequestEvent.FAIL] is RequestState.FAILED


LIVE = [state for state in RequestState if state not in (*TERMINAL_STATES, RequestState.NEW)]
GIVEN_UP = (RequestEvent.ABORT, RequestEvent.FAIL)
EVENTS = {  # the events that a response may take
    (Demand.FINISH, Response.END): (RequestEvent.FINISH,),
    (Demand.GIVE_UP, Response.END): GIVEN_UP,
    (Demand.GIVE_UP, Response.LEAVE): (RequestEvent.LEAVE,),
    (Demand.RETRACT, Response.RETRACT): (RequestEvent.RETRACT,),
}


@pytest.mark.parametrize("demand", Demand)
def test_the_joint_table_has_a_rule_for_every_live_state_and_its_responses_are_in_the_table_of_life(demand):
    assert list(JOINT_RULES[demand]) == LIVE
    for state, rule in JOINT_RULES[demand].items():
        for response in filter(None, rule):
            for event in EVENTS.get((demand, response), ()):
                assert event in TRANSITIONS[state], f"{state.value}: {response.value} needs {event.value}"
            assert (demand, response) in EVENTS or response in (Response.WAIT, Response.DROP)


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("event", GIVEN_UP)
def test_every_live_request_can_be_given_up_and_ends_once_its_multi_step_is_over(state, event):
    record = record_in(state)
    inside = JOINT_RULES[Demand.GIVE_UP][state].inside
    if inside is Response.LEAVE:
        record.advance(RequestEvent.LEAVE)
        inside = JOINT_RULES[Demand.GIVE_UP][record.state].inside
    assert inside in (None, Response.WAIT)
    assert JOINT_RULES[Demand.GIVE_UP][record.state].outside is Response.END
    record.advance(event)
    assert record.is_terminal


@pytest.mark.parametrize(
    "wrong", [{"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_sampling_parameters_that_mean_nothing_are_refused(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_an_empty_prompt_and_no_tokens_to_emit_are_refused_with_the_number_expected():
    with pytest.raises(InvalidRequest, match="at least 1"):
        Request("a", Prompt.of_tokens([]), 3)
    with pytest.raises(InvalidRequest, match=">= 1, got 0"):
        Request("a", Prompt.of_tokens([1]), 0)
    with pytest.raises(InvalidRequest, match="stop string"):
        Request("a", Prompt.of_tokens([1]), 1, stop_strings=("",))
