"""The waiting queue: first come, first served within a priority, and a bound on overtaking."""

import pytest
from foredraft.core.contract.request import Request
from foredraft.core.prompt import Prompt
from foredraft.core.scheduler.life import RequestRecord
from foredraft.core.scheduler.waiting import WaitingQueue

PROMPT = Prompt.of_length(1)


def arrival(number, priority=0):
    return RequestRecord(Request(f"r{number}", PROMPT, 1, priority=priority), number, 1)


def drain(queue):
    order = []
    while len(queue):
        order.append(queue.pop().arrival_number)
    return order


def test_a_greater_priority_goes_first():
    queue = WaitingQueue(8)
    for number, priority in enumerate([0, 2, 1, 2, 0]):
        queue.push(arrival(number, priority))
    assert [record.arrival_number for record in queue] == [1, 3, 2, 0, 4]
    assert drain(queue) == [1, 3, 2, 0, 4] and queue.head is None


def test_a_retracted_request_returns_to_its_place():
    queue = WaitingQueue(8)
    records = [arrival(number) for number in range(5)]
    for record in records:
        queue.push(record)
    first, second = queue.pop(), queue.pop()
    third = queue.pop()
    for record in (first, third, second):  # in no order at all
        queue.push(record)
    assert drain(queue) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bound", [1, 3, 10])
def test_no_request_is_overtaken_more_often_than_the_bound(bound):
    queue = WaitingQueue(bound)
    queue.push(arrival(0, priority=0))
    overtaken = 0
    for number in range(1, 50):
        queue.push(arrival(number, priority=1))
        if queue.pop().arrival_number == 0:
            break
        overtaken += 1
    assert overtaken == bound


def test_an_aborted_request_leaves_from_wherever_it_stands():
    queue = WaitingQueue(8)
    records = [arrival(number, priority=number % 2) for number in range(6)]
    for record in records:
        queue.push(record)
    queue.remove(records[2])
    queue.remove(records[5])
    assert drain(queue) == [1, 3, 0, 4]
