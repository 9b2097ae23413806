"""Who gives way to whom: the order in which running requests are retracted.

The lowest priority gives way first, and among equals the latest arrival. So the oldest request of the greatest priority is never
retracted for another, and two requests cannot push each other out for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..errors import InvariantViolation
from .life import RequestRecord


def entitlement(record: RequestRecord) -> tuple[int, int]:
    """Greater is more entitled to its row."""
    return record.request.priority, -record.arrival_number


def least_entitled(running: Collection[RequestRecord]) -> RequestRecord:
    """Whom memory pressure retracts. A request alone always fits, or it would not have been admitted (ENGINE-08)."""
    if len(running) < 2:
        raise InvariantViolation("ENGINE-08", "a request alone does not fit the pool that it was admitted to")
    return min(running, key=entitlement)


def giving_way(head: RequestRecord, running: Iterable[RequestRecord], ageing_bound: int) -> list[RequestRecord]:
    """Running requests of strictly lower priority than `head`, the least entitled first; whoever was overtaken too often is spared."""
    priority = head.request.priority
    lower = [record for record in running if record.request.priority < priority and record.overtaken < ageing_bound]
    return sorted(lower, key=entitlement)
