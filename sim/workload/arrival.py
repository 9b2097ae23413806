"""One request as a workload offers it, before any scheduler has seen it."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    time_ns:    arrival, integer nanoseconds from the workload's start; None in a closed loop, where the next free client
                sends it
    prompt:     its prompt
    output_len: tokens it will emit before it stops, at least 1: known to the executor that plays the model, never to
                the scheduler
    session:    the conversation or user it belongs to, for routing by affinity; None if the workload has none
    priority:   greater is more urgent
    row:        number of the request in its workload or data row in its trace, from 0; the key of its draws
    """

    time_ns: int | None
    prompt: Prompt
    output_len: int
    session: str | None = None
    priority: int = 0
    row: int = 0
