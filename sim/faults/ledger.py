"""The draws of a plan, whether it is still in force, and how often each kind has happened."""

from __future__ import annotations

from .plan import FaultDraws, FaultPlan


class Ledger:
    """One per run, shared by all that inject."""

    def __init__(self, plan: FaultPlan, seed: int) -> None:
        self.plan = plan
        self.draws = FaultDraws(plan, seed)
        self.injected: dict[str, int] = dict.fromkeys(plan.enabled, 0)
        self.cancelled_in: dict[str, int] = {}  # by the state of the request
        self.last_ns = 0
        self.num_requests = 0  # occasions of the unit "request"
        self._ended = False

    def kinds_at(self, unit: str, subject: int, occasion: int, now_ns: int) -> tuple[str, ...]:
        """Return the faults of this occasion; none once the plan has ended."""
        if self._ended or (self.plan.stop_s is not None and now_ns >= self.plan.stop_s * 1e9):
            return ()
        return self.draws.at(unit, subject, occasion)

    def note(self, kind: str, now_ns: int) -> None:
        """Count a fault that happens."""
        self.injected[kind] += 1
        self.last_ns = max(self.last_ns, now_ns)

    def end(self) -> None:
        """Inject no new faults from now on."""
        self._ended = True

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def never_fired(self) -> tuple[str, ...]:
        return tuple(kind for kind, count in self.injected.items() if not count)
