"""Runs searches at the same time, on the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from ..trial import RunOutcome
from ..workers import Job, JobWorkers
from .judge import CannotRun, Search, SearchFinding, Wanted


def run_searches(searches: Mapping[int, Search], workers: JobWorkers) -> Iterator[tuple[int, SearchFinding]]:
    """Run searches at the same time, and yield each with its result. If a search cannot run, its result has the
    reason."""
    waiting: dict[int, tuple[int, int]] = {}  # ticket -> search, index of the run among those it waits for
    outcomes: dict[int, list[RunOutcome | None]] = {}
    ended: list[tuple[int, SearchFinding]] = []
    tickets = iter(range(1 << 62))

    def advance(name: int, step: Callable[[], Wanted]) -> None:
        try:
            wanted = step()
        except StopIteration as stop:
            ended.append((name, stop.value))
            return
        except CannotRun as error:
            ended.append((name, SearchFinding(0.0, reason=str(error))))
            return
        outcomes[name] = [None] * len(wanted)
        for index, settings in enumerate(wanted):
            ticket = next(tickets)
            waiting[ticket] = (name, index)
            workers.submit(Job(ticket, settings))

    for name, search in searches.items():
        advance(name, search.__next__)
    while True:
        while ended:
            yield ended.pop()
        if not waiting:
            return
        job, trial = workers.next_ended()
        name, index = waiting.pop(job.ticket)
        outcomes[name][index] = trial
        results = [outcome for outcome in outcomes[name] if outcome is not None]
        if len(results) == len(outcomes[name]):
            del outcomes[name]
            advance(name, partial(searches[name].send, results))
