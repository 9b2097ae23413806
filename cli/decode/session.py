"""The session of `foretoken generate`: in this process, or in worker processes for prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...gpu.disaggregation.session import DisaggregatedSession
    from ...gpu.session.plan import SessionOptions
    from ...gpu.session.session import DecodeSession, SessionPlan
    from ...gpu.session.text import Tokenizer
    from .record import GenerationRecord


class SessionMaker:
    """Plans and opens a session. Checks `disaggregate`, the option's text, before anything is read."""

    def __init__(self, options: SessionOptions, disaggregate: str | None) -> None:
        self._options = options
        self._topology = None
        self._faults = {}
        if disaggregate is not None:
            from ...gpu.disaggregation.link import plans_from_environment
            from ...gpu.disaggregation.processes import Disaggregation

            self._topology = Disaggregation.parse(disaggregate)
            self._topology.devices(options.device)
            self._faults = plans_from_environment()

    def plan(self, longest_request: int) -> SessionPlan:
        if self._topology is None:
            from ...gpu.session.plan import plan_session

            return plan_session(self._options, longest_request)
        from ...gpu.disaggregation.session import plan_disaggregated

        return plan_disaggregated(self._options, self._topology, longest_request)

    @contextmanager
    def open(
        self, plan: SessionPlan, tokenizer: Tokenizer, record: GenerationRecord
    ) -> Iterator[DecodeSession | DisaggregatedSession]:
        """Open a session, and close it with its processes at the end."""
        if self._topology is None:
            from ...gpu.session.session import DecodeSession

            yield DecodeSession.open(
                self._options, plan=plan, tokenizer=tokenizer, make_sinks=lambda made: record.make_sinks(made, plan)
            )
            return
        from ...gpu.disaggregation.processes import Workers
        from ...gpu.disaggregation.session import DisaggregatedSession
        from .record import run_facts

        places = self._topology.workers()
        logs = record.worker_logs([place.name for place in places])
        with (
            Workers(places, self._topology.devices(self._options.device)) as workers,
            DisaggregatedSession.open(
                plan, workers, tokenizer=tokenizer, faults=self._faults, logs=logs, run=run_facts(plan)
            ) as session,
        ):
            yield session
