"""When every round must end: host and device, one step after the other, from plans, accept lengths and the roofline (SIM-14)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from .ledger import Ledger, StepDone
from .roofline import Decode, Roofline

NEAR_NS = 3
"""How far one round may be off: times are rounded down to nanoseconds, and sums of passes to fractions of them."""

NEAR = 1e-6


class Late(NamedTuple):
    """A round that ended at another time than it must."""

    step: StepDone
    number: int
    should_ns: float


class Clockwork:
    """The replicas of one run. `busy_ns` per replica is the work of its device."""

    def __init__(self, ledger: Ledger, roofline: Roofline) -> None:
        self.busy_ns: dict[int, float] = {}
        self.roofline = roofline
        self.host: Mapping[str, Any] = roofline.machine["host"]
        self.late: Late | None = None
        self.too_fast: Late | None = None
        for replica in ledger.moments:
            self._follow(replica, ledger.moments[replica])

    def plan_ns(self, step: StepDone) -> int:
        host, rows = self.host, len(step.chunks) + len(step.decode or ())
        base = host["plan_base_ns"] + host["launch_base_ns"] + host["sampling_base_ns"]
        return base + (host["plan_row_ns"] + host["launch_row_ns"] + host["sampling_row_ns"]) * rows

    def commit_ns(self, step: StepDone, number: int) -> int:
        """Return the time to take the results of one of its rounds."""
        host = self.host
        tokens_ns = (host["commit_token_ns"] + host["detokenise_token_ns"]) * step.emitted[number]
        return host["commit_base_ns"] + host["commit_row_ns"] * len(step.decode or ()) + tokens_ns

    def device_ns(self, step: StepDone, number: int) -> float:
        chunks = [(length, start) for _, start, length, _ in step.chunks]
        decode = None
        if step.decode is not None:
            decode = Decode(len(step.decode), step.steps, step.topk, step.nodes, step.kv[number])
        return self.roofline.step_ns(chunks, decode)

    def _follow(self, replica: int, moments: list[tuple[str, Any]]) -> None:
        cpu_ns = device_ns = busy_ns = 0.0
        launched: deque[list[Any]] = deque()  # [step, when it was launched]
        for kind, what in moments:
            if kind == "reset":
                cpu_ns = device_ns = what
                launched.clear()
            elif kind == "plan":
                cpu_ns = what.planned_ns + self.plan_ns(what)
                launched.append([what, cpu_ns])
            else:
                step, launch_ns = launched.popleft()
                behind = launched[0] if launched else None
                for number, at_ns in enumerate(step.ends_ns):
                    took_ns = self.device_ns(step, number)
                    busy_ns += took_ns
                    device_ns = max(device_ns, launch_ns) + took_ns
                    if number and behind is not None:  # the host has planned the next round before it takes this one
                        cpu_ns = step.ends_ns[number - 1] + self.plan_ns(step)
                    commit_ns = self.commit_ns(step, number)
                    should_ns = max(cpu_ns, device_ns) + commit_ns
                    if abs(at_ns - should_ns) > (number + 1) * (NEAR_NS + NEAR * took_ns):
                        self.late = self.late or Late(step, number, should_ns)
                    if at_ns - launch_ns < self.roofline.target.least_ns:
                        self.too_fast = self.too_fast or Late(step, number, launch_ns + self.roofline.target.least_ns)
                    if at_ns > max(cpu_ns, 0) + commit_ns + NEAR_NS:
                        device_ns = at_ns - commit_ns  # it kept the host waiting, so its rounding is known
                    launch_ns = self._next_launch(step, number, launch_ns, at_ns, behind)
                    cpu_ns = at_ns
                if behind is not None:
                    behind[1] = launch_ns
        self.busy_ns[replica] = busy_ns

    def _next_launch(
        self, step: StepDone, number: int, launch_ns: float, at_ns: int, behind: list[Any] | None
    ) -> float:
        """Return when the round after this one is launched."""
        if behind is None:
            return at_ns + self.plan_ns(step)
        return behind[1] if number == 0 else step.ends_ns[number - 1] + self.plan_ns(step)
