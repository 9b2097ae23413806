"""How a run goes, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.errors import ForedraftError, count_of
from ..assembly import Assembly
from ..disaggregation.network import DisaggregationReport
from ..faults.service import FaultReport


class NothingFits(ForedraftError):
    """There is nothing to simulate, because the workload has no requests or all of them were refused."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    now_ns: int
    num_submitted: int
    num_ended: int
    num_rounds: int
    num_expected: int | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """How a run ended. `complete` is False if it was interrupted."""

    complete: bool
    duration_ns: int  # from the start to the end of the last request and its work
    num_submitted: int
    num_ended: int
    num_rounds: int
    device_busy_ns: tuple[int, ...]  # per replica
    refusals: dict[str, int]  # reason -> requests
    num_skipped_rows: int  # of the trace: rows without prompt or output, which cannot be replayed
    assembly: Assembly = field(compare=False)  # what ran
    faults: FaultReport | None = None  # of a run with a fault plan
    disaggregation: DisaggregationReport | None = None  # of a run with prefill and decode engines
    asked_lengths: dict[str, tuple[float, float]] = field(default_factory=dict)  # see `load.asked_lengths`
    # Per replica: lower bound of a range of batch sizes -> EMA of correct drafts per request; empty where none is kept.
    ema_accept_len: tuple[Mapping[int, float], ...] = ()
    last_arrival_ns: int = 0  # when the last request was submitted
    notices: tuple[str, ...] = ()  # sentences for the user: what the run does that a user may not expect

    def check_that_some_fit(self) -> None:
        """Raise NothingFits for a whole run without requests, or one without faults that has refused all of them."""
        if not self.complete:
            return
        if not self.num_submitted:
            rows, skipped = self.num_skipped_rows, ""
            if rows:
                skipped = f"; {count_of(rows, 'row')} without prompt or output"
            raise NothingFits(f"the workload has no requests: nothing arrives between its start and its end{skipped}")
        if self.faults is None and sum(self.refusals.values()) == self.num_submitted:
            count, reason = max((count, reason) for reason, count in self.refusals.items())
            requests = count_of(self.num_submitted, "request")
            raise NothingFits(f"none of {requests} can be served; {count} of them: {reason}")
