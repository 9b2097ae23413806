"""Engines that change sides: of the pool that is the idler one, one at a time, and only when it is empty.

```
serving ──the other pool is much busier──► draining: no new requests ──empty──► serving in the other role
```

Empty means that no request, no row, no transfer is left, nor the memory of one that could still be asked for (HANDOFF-10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.scheduler.config import EngineRole
from ..actors.clock import call_at

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import HandoffPart

BUSIER_BY = 0.2
"""A pool gets an engine of the other one when its devices were busier by more than this share of the time."""

ROLES = (EngineRole.PREFILL, EngineRole.DECODE)


class Roles:
    """Who has which role, for how long, and how busy it was in it. `every_ns` None: nobody changes."""

    def __init__(self, cluster: Cluster, every_ns: int | None) -> None:
        self.draining: HandoffPart | None = None
        self.num_changes = 0
        self._cluster = cluster
        self._every_ns = every_ns
        self._is_looking = False
        self._since: dict[int, tuple[int, int]] = {}  # engine -> when its role began, and its device's work by then
        self._last_look: dict[int, int] = {}  # engine -> its device's work at the last look
        self._busy_ns = dict.fromkeys(ROLES, 0)
        self._engine_ns = dict.fromkeys(ROLES, 0)

    def serving(self, role: EngineRole) -> list[int]:
        """The engines that take new requests in this role."""
        workers = self._cluster.workers
        return [worker.replica for worker in workers if worker.engine.role is role and worker is not self.draining]

    def keep_looking(self) -> None:
        """There is work: look at the pools every so often, as long as there is."""
        if self._every_ns is not None and not self._is_looking:
            self._is_looking = True
            self._last_look = {worker.replica: worker.device.busy_ns for worker in self._cluster.workers}
            call_at(self._cluster.env, self._cluster.env.now + self._every_ns, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if self.draining is None:
            self._drain_one()
        elif self.draining.is_empty:
            self._change(self.draining)
            self.draining = None
        if self._cluster.has_requests or self.draining is not None:
            self.keep_looking()

    def _drain_one(self) -> None:
        prefill, decode = (self.serving(role) for role in ROLES)
        gap = self._busy_share(prefill) - self._busy_share(decode)
        donors = decode if gap > BUSIER_BY else prefill if gap < -BUSIER_BY else []
        if len(donors) > 1:
            outstanding = self._cluster.outstanding
            least = min(donors, key=lambda engine: (outstanding[engine], engine))
            self.draining = self._cluster.workers[least]

    def _busy_share(self, engines: Sequence[int]) -> float:
        workers = self._cluster.workers
        busy_ns = sum(workers[engine].device.busy_ns - self._last_look[engine] for engine in engines)
        return busy_ns / (self._every_ns * len(engines))

    def _change(self, worker: HandoffPart) -> None:
        self._account(worker, self._cluster.env.now)
        worker.change_role(EngineRole.DECODE if worker.is_prefill else EngineRole.PREFILL)
        self.num_changes += 1

    def _account(self, worker: HandoffPart, now_ns: int) -> None:
        since_ns, before_ns = self._since.get(worker.replica, (0, 0))
        role = worker.engine.role
        self._busy_ns[role] += worker.device.busy_ns - before_ns
        self._engine_ns[role] += now_ns - since_ns
        self._since[worker.replica] = (now_ns, worker.device.busy_ns)

    def busy_shares(self, now_ns: int) -> dict[EngineRole, float | None]:
        """Per role, of the time that engines had it; to be asked at the end."""
        for worker in self._cluster.workers:
            self._account(worker, max(now_ns, self._since.get(worker.replica, (0, 0))[0]))
        return {role: self._busy_ns[role] / time_ns if time_ns else None for role, time_ns in self._engine_ns.items()}
