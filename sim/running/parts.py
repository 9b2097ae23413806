"""A run whose replicas are simulated in several processes, each of which has some of them.

Every process goes through the whole workload and takes the requests of its own replicas. Its numbers, rows and events
are put together in the order that one process has (`clock.py`), so the result is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...core.contract.events import EventSink
from ...core.errors import ForedraftError
from ...observe.children.pool import ChildPool, Died, Tell, serve_jobs
from ...observe.log import EventLog
from ...observe.measuring.metrics import RunMetrics
from ...observe.measuring.parts import add_parts, counts_of
from ..load import asked_lengths
from ..scenario import Scenario
from .report import RunProgress, RunReport
from .run import Simulation

EVENTS = "events.jsonl"
NO_REPLICAS = range(0)
"""`Simulation.own` of the process that puts the parts together."""


def run_parts(
    simulation: Simulation,
    workers: int,
    origins: Mapping[str, str],
    metrics: RunMetrics,
    log: EventLog | None = None,
    on_progress: Callable[[RunProgress], None] | None = None,
) -> RunReport:
    """Simulate all replicas of a simulation that has none of its own (`NO_REPLICAS`) in `workers` processes.

    What they measure is added to `metrics`, and their events to `log`. A process that dies is replaced by one that
    begins its part again. Raises ForedraftError if that dies, too.
    """
    shared = {"scenario": simulation.scenario.model_dump(mode="json"), "origins": dict(origins), "workers": workers}
    progress: dict[int, RunProgress] = {}

    def take_news(number: int, news: Any) -> None:
        progress[number] = RunProgress(**news)
        if on_progress is not None and len(progress) == workers:
            on_progress(_together(list(progress.values()), simulation.num_expected))

    with TemporaryDirectory(prefix="foredraft-parts-") as directory:
        folders = [Path(directory, str(number)) for number in range(workers)]
        with closing(ChildPool[int](__name__, shared, workers, take_news)) as processes:
            for number, folder in enumerate(folders):
                folder.mkdir()
                processes.submit(number, {"number": number, "folder": str(folder), "events": log is not None})
            parts: list[dict[str, Any]] = [{}] * workers
            for _ in folders:
                number, answer = processes.next_ended()
                if isinstance(answer, Died):
                    raise ForedraftError(f"the process of part {number + 1} of {workers} of the run {answer.reason}")
                if "error" in answer:
                    raise ForedraftError(answer["error"])
                parts[number] = answer
        add_parts(metrics, folders, [part["counted"] for part in parts])
        if log is not None:
            log.add_parts([folder / EVENTS for folder in folders])
    report = _report([part["report"] for part in parts], simulation)
    report.check_that_some_fit()
    return report


def _together(parts: Sequence[RunProgress], num_expected: int | None) -> RunProgress:
    return RunProgress(
        min(part.now_ns for part in parts),
        sum(part.num_submitted for part in parts),
        sum(part.num_ended for part in parts),
        sum(part.num_rounds for part in parts),
        num_expected,
    )


def _report(parts: Sequence[Mapping[str, Any]], simulation: Simulation) -> RunReport:
    """Return the report of a run from what its parts have reported."""
    refusals: dict[str, int] = {}
    for part in parts:
        for reason, count in part["refusals"].items():
            refusals[reason] = refusals.get(reason, 0) + count
    by_replica = [
        (parts[replica % len(parts)], replica // len(parts)) for replica in range(simulation.assembly.pools.num_engines)
    ]
    return RunReport(
        complete=True,
        duration_ns=max(part["duration_ns"] for part in parts),
        num_submitted=sum(part["num_submitted"] for part in parts),
        num_ended=sum(part["num_ended"] for part in parts),
        num_rounds=sum(part["num_rounds"] for part in parts),
        device_busy_ns=tuple(part["device_busy_ns"][place] for part, place in by_replica),
        refusals=refusals,
        num_skipped_rows=simulation.num_skipped_rows,
        assembly=simulation.assembly,
        asked_lengths=asked_lengths(simulation.workload),
        ema_accept_len=tuple(dict(part["ema_accept_len"][place]) for part, place in by_replica),
        last_arrival_ns=max(part["last_arrival_ns"] for part in parts),
        notices=simulation.notices,
    )


def simulate_part(shared: Mapping[str, Any], line: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Simulate every `workers`-th replica, and write what `run_parts` puts together to a folder. Returns the rest of
    it, or an error of the user's scenario, files or disk."""
    scenario, folder, has_events = Scenario.model_validate(shared["scenario"]), Path(line["folder"]), line["events"]
    own = range(line["number"], scenario.hardware.replicas, shared["workers"])
    try:
        with ExitStack() as files:
            metrics = files.enter_context(closing(RunMetrics(folder, is_part=True)))
            log = files.enter_context(EventLog(folder / EVENTS, {})) if has_events else None

            def sinks(replica: int) -> list[EventSink]:
                return [metrics.sink(replica), *([log.sink(replica)] if log is not None else [])]

            simulation = Simulation(scenario, sinks=sinks, origins=shared["origins"], named_slots=has_events, own=own)
            report = simulation.run(lambda progress: tell(asdict(progress)))
            metrics.flush()
    except (ForedraftError, OSError) as error:
        return {"error": str(error)}
    names = ("duration_ns", "num_submitted", "num_ended", "num_rounds", "device_busy_ns", "refusals", "last_arrival_ns")
    found = {name: getattr(report, name) for name in names}
    found["ema_accept_len"] = [list(slots.items()) for slots in report.ema_accept_len]
    return {"report": found, "counted": counts_of(metrics.measured)}


if __name__ == "__main__":
    serve_jobs(simulate_part)
