"""The order in which running requests are retracted.

The lowest priority gives way first, and among equals the latest arrival. So the oldest request of the greatest priority is never
retracted for another, and two requests cannot retract each other in turns without end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..errors import InvariantViolation
from .life import RequestRecord


def entitlement(record: RequestRecord) -> tuple[int, int]:
    """Return a key: the greater it is, the more entitled a request is to its row."""
    return record.request.priority, -record.arrival_number


def least_entitled(running: Collection[RequestRecord]) -> RequestRecord:
    """Return the request that memory pressure retracts. A single request always fits, or it was not to be admitted (ENGINE-08)."""
    if len(running) < 2:
        raise InvariantViolation("ENGINE-08", "a request alone does not fit the pool that it was admitted to")
    return min(running, key=entitlement)


def giving_way(head: RequestRecord, running: Iterable[RequestRecord], ageing_bound: int) -> list[RequestRecord]:
    """Return the running requests of strictly lower priority than `head`, least entitled first, without those overtaken too often."""
    priority = head.request.priority
    lower = [record for record in running if record.request.priority < priority and record.overtaken < ageing_bound]
    return sorted(lower, key=entitlement)
