"""`foredraft serve --model … --disaggregate`: the body whose engines are processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...gpu.session.plan import SessionOptions
    from ...serve.base.port import Body
    from ...serve.telemetry.log_lines import ServerLog
    from ...serve.telemetry.recording import Recording
    from .operations import ServeOperations


def refuse_with_workers(operations: ServeOperations) -> None:
    """Refuse options that need an engine in this process. Raises ConfigError."""
    from ..options import refuse_without_effect

    why = "with --disaggregate, the caches are in other processes"
    refuse_without_effect(("--kv-events", operations.kv_events is not None, why))


@contextmanager
def workers_body(
    options: SessionOptions, disaggregate: str, recording: Recording, log: ServerLog, ready_s: float | None
) -> Iterator[Body]:
    """Start the workers that `disaggregate` names and make them ready, and end them with the block; each keeps a log of
    its own if there is a record. Raises ForedraftErrors."""
    from ...gpu.disaggregation.session import DisaggregatedSession, plan_disaggregated
    from ...gpu.disaggregation.topology import WorkerCounts
    from ...gpu.disaggregation.workers import Workers
    from ...gpu.parallel.link import plans_from_environment
    from ...gpu.session.plan import refuse_without_effect
    from ...gpu.session.session import check_vocabulary
    from ...gpu.session.text import Tokenizer
    from ...serve.bodies.workers import WorkersBody
    from ...serve.telemetry.recording import PART_BYTES
    from ..decode.record import run_facts
    from .ahead import captures_ahead, get_ready

    topology = WorkerCounts.parse(disaggregate)
    devices, faults = topology.devices(options.device, options.tensor_parallel), plans_from_environment()
    tokenizer = Tokenizer.load(options.model)
    plan = plan_disaggregated(options, topology)
    refuse_without_effect(plan.options, plan.algorithm, plan.device)
    for notice in plan.notices:
        log.tell(f"note: {notice}")
    check_vocabulary(tokenizer, plan)
    is_captured = captures_ahead(plan, ready_s)
    places = topology.workers()
    logs = recording.worker_logs([place.name for place in places])
    log.tell(f"starting {topology}")
    with (
        Workers(places, devices) as workers,
        DisaggregatedSession.open(
            plan, workers, tokenizer=tokenizer, faults=faults, logs=logs, log_part_bytes=PART_BYTES, run=run_facts(plan)
        ) as session,
    ):
        if is_captured:
            get_ready(session.make_ready, ready_s, log)
        yield WorkersBody(session, options.model.resolve().name, recording.metrics, log.tell)
        session.close(complete=True)
