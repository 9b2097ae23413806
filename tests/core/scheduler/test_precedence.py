"""Who is retracted first."""

import pytest
from foredraft.core.contract.request import Request
from foredraft.core.errors import InvariantViolation
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.life import RequestRecord
from foredraft.core.scheduler.waiting import giving_way, least_entitled
from served_engine import ask, make, turn


def record(name: str, arrival: int, priority: int = 0, overtaken: int = 0) -> RequestRecord:
    made = RequestRecord(Request(name, Prompt.of_length(1), 1, priority), arrival, 1)
    made.overtaken = overtaken
    return made


def test_the_lowest_priority_gives_way_and_among_equals_the_latest():
    early, late, urgent = record("early", 0), record("late", 1), record("urgent", 2, priority=1)
    assert least_entitled([urgent, early, late]) is late
    assert least_entitled([urgent, early]) is early


def test_a_request_alone_is_never_retracted_for_memory():
    engine, executor = make()
    engine.submit(ask("alone", max_tokens=8), 0)
    turn(engine, executor)
    assert len(engine.requests.running) == 1
    with pytest.raises(InvariantViolation, match="ENGINE-08"):
        engine.preemption.retract_for_memory()


def test_only_strictly_lower_priorities_give_way_to_a_waiting_one():
    head = record("head", 9, priority=1)
    equal, early, late = record("equal", 0, priority=1), record("early", 1), record("late", 2)
    assert giving_way(head, [equal, early, late], ageing_bound=8) == [late, early]


def test_who_was_overtaken_too_often_is_spared():
    head = record("head", 9, priority=1)
    spared, other = record("spared", 1, overtaken=8), record("other", 2, overtaken=7)
    assert giving_way(head, [spared, other], ageing_bound=8) == [other]
