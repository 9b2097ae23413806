"""Decides which request enters next and which one gives way.

The waiting queue serves first come, first served within a priority, with a bound on how often a request is overtaken.

A greater priority goes first. A request that has been overtaken `ageing_bound` times by later arrivals goes before all
others. A retracted request returns to its place by arrival, as a rule the front of its class. After a failed step the
suspects go before all others.

Running requests give way in the reverse order: the lowest priority first, and among equals the latest arrival. So the
oldest request of the greatest priority is never retracted for another, and two requests cannot retract each other in
turns without end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .life import RequestRecord


def entitlement(record: RequestRecord) -> tuple[int, int]:
    """Return a key: the greater it is, the more entitled a request is to its row."""
    return record.request.priority, -record.arrival_number


def least_entitled(running: Iterable[RequestRecord]) -> RequestRecord:
    """Return the request of the lowest priority, and among equals the latest arrival."""
    return min(running, key=entitlement)


class WaitingQueue:
    """Requests by priority and arrival."""

    def __init__(self, ageing_bound: int) -> None:
        assert ageing_bound >= 1, f"ageing_bound is {ageing_bound}, expected at least 1"
        self._ageing_bound = ageing_bound
        self._classes: dict[int, deque[RequestRecord]] = {}
        self._priorities: list[int] = []  # priorities of the classes that are not empty, greatest first
        self._size = 0
        self._first: list[RequestRecord] = []  # to be tried before all others, in this order

    def __len__(self) -> int:
        return self._size

    @property
    def head(self) -> RequestRecord | None:
        """The request that enters next; None if no request waits."""
        if not self._size:
            return None
        if self._first:
            return self._first[0]
        if len(self._priorities) > 1:
            fronts = [self._classes[priority][0] for priority in self._priorities]
            aged = [record for record in fronts if record.overtaken >= self._ageing_bound]
            if aged:
                return min(aged, key=lambda record: record.arrival_number)
        return self._classes[self._priorities[0]][0]

    def push(self, record: RequestRecord) -> None:
        """Queue a request at its place in its class: a newcomer behind it, a retracted request where it once stood."""
        waiting = self._classes.setdefault(record.request.priority, deque())
        if not waiting:
            self._priorities = sorted([*self._priorities, record.request.priority], reverse=True)
        if not waiting or record.arrival_number > waiting[-1].arrival_number:
            waiting.append(record)
        else:
            older = sum(other.arrival_number < record.arrival_number for other in waiting)
            waiting.insert(older, record)
        self._size += 1

    def try_first(self, records: list[RequestRecord]) -> None:
        """Put these waiting requests before all others, in this order, until they have entered once."""
        self._first = [*records, *(record for record in self._first if record not in records)]

    def pop(self) -> RequestRecord:
        """Take the head, and count one more admission for the requests that it overtakes."""
        record = self.head
        assert record is not None, "pop from an empty queue"
        for priority in self._priorities:
            front = self._classes[priority][0]
            if front.arrival_number < record.arrival_number:
                front.overtaken += 1
        self.remove(record)
        return record

    def remove(self, record: RequestRecord) -> None:
        """Remove a waiting request."""
        priority = record.request.priority
        waiting = self._classes[priority]
        waiting.remove(record)
        if self._first and record in self._first:
            self._first.remove(record)
        self._size -= 1
        if not waiting:
            self._priorities.remove(priority)

    def __iter__(self) -> Iterator[RequestRecord]:
        for priority in self._priorities:
            yield from self._classes[priority]


def giving_way(head: RequestRecord, running: Iterable[RequestRecord], ageing_bound: int) -> list[RequestRecord]:
    """Return the running requests of strictly lower priority than `head`, least entitled first, without those overtaken
    too often.
    """
    priority = head.request.priority
    lower = [record for record in running if record.request.priority < priority and record.overtaken < ageing_bound]
    return sorted(lower, key=entitlement)
