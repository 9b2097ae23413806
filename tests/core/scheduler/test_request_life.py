"""A request's life is the table: what it lists happens, what it does not list is refused and changes nothing."""

import itertools

import pytest
from foretoken.core.contract.request import Request, SamplingParams
from foretoken.core.errors import InvalidRequest, InvariantViolation
from foretoken.core.prompt import Prompt
from foretoken.core.scheduler.life import TERMINAL_STATES, TRANSITIONS, RequestEvent, RequestRecord, RequestState


def record_in(state):
    record = RequestRecord(Request("a", Prompt.of_tokens([1, 2]), 3), 0, 3)
    record.state = state
    return record


@pytest.mark.parametrize("state, event", list(itertools.product(RequestState, RequestEvent)))
def test_every_event_in_every_state_follows_the_table(state, event):
    record = record_in(state)
    if event in TRANSITIONS[state]:
        record.advance(event)
        assert record.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(InvariantViolation, match="ENGINE-02"):
            record.advance(event)
        assert record.state is state


def test_the_table_is_complete_and_every_state_leads_to_an_end():
    assert TRANSITIONS.keys() == set(RequestState)
    assert set(TERMINAL_STATES) == {
        RequestState.FINISHED,
        RequestState.TRANSFERRED,
        RequestState.ABORTED,
        RequestState.FAILED,
        RequestState.REFUSED,
    }
    ends = set(TERMINAL_STATES)
    while grown := {s for s in RequestState if s not in ends and ends & set(TRANSITIONS[s].values())}:
        ends |= grown
    assert ends == set(RequestState)


def test_only_a_waiting_or_running_request_can_be_aborted():
    abortable = {state for state in RequestState if RequestEvent.ABORT in TRANSITIONS[state]}
    assert abortable == {
        RequestState.WAITING,
        RequestState.PREFILL,
        RequestState.DECODE,
        RequestState.TRANSFERRING,
    }
    assert all(record_in(state).is_terminal == (state in TERMINAL_STATES) for state in RequestState)


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
