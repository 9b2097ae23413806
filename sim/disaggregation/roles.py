"""Engines that change roles: one at a time, out of the pool that is less busy, and only when the engine is empty.

```
serving ──the other pool is much busier──► draining: no new requests ──empty──► serving in the other role
```

Empty means that no request, no row, no transfer is left, nor the memory of one that could still be asked for (HANDOFF-10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import simpy

from ...core.scheduler.config import EngineRole
from ...observe.summary import share
from ..actors.clock import call_at
from .endpoint import HandoffEndpoint

BUSIER_BY = 0.2
"""A pool gets an engine of the other one when its devices were busier by more than this share of the time."""

ROLES = (EngineRole.PREFILL, EngineRole.DECODE)


class Engines(Protocol):
    """What `Roles` needs of a cluster."""

    env: simpy.Environment
    endpoints: list[HandoffEndpoint]

    @property
    def outstanding(self) -> list[int]: ...
    @property
    def has_requests(self) -> bool: ...


class Roles:
    """Which engine has which role, for how long, and how busy it was in it. `every_ns` None: roles never change."""

    def __init__(self, cluster: Engines, every_ns: int | None) -> None:
        self.draining: HandoffEndpoint | None = None
        self.num_changes = 0
        self._cluster = cluster
        self._every_ns = every_ns
        self._is_looking = False
        self._since: dict[int, tuple[int, int]] = {}  # engine -> when its role began, and its device's work by then
        self._last_look: dict[int, int] = {}  # engine -> its device's work at the last look
        self._busy_ns = dict.fromkeys(ROLES, 0)
        self._engine_ns = dict.fromkeys(ROLES, 0)

    def serving(self, role: EngineRole) -> list[int]:
        """Return the engines that take new requests in this role."""
        engines = [e for e in self._cluster.endpoints if e.engine.role is role and not e.is_lost]
        return [e.replica for e in engines if e is not self.draining]

    def keep_looking(self) -> None:
        """Look at the pools every `every_ns` from now on, as long as there are requests."""
        if self._every_ns is not None and not self._is_looking:
            self._is_looking = True
            self._last_look = {endpoint.replica: endpoint.device.busy_ns for endpoint in self._cluster.endpoints}
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
            self.draining = self._cluster.endpoints[least]

    def _busy_share(self, engines: Sequence[int]) -> float:
        endpoints = self._cluster.endpoints
        busy_ns = sum(endpoints[engine].device.busy_ns - self._last_look[engine] for engine in engines)
        return busy_ns / (self._every_ns * max(len(engines), 1))  # all may be lost

    def _change(self, endpoint: HandoffEndpoint) -> None:
        self._account(endpoint, self._cluster.env.now)
        endpoint.change_role(EngineRole.DECODE if endpoint.is_prefill else EngineRole.PREFILL)
        self.num_changes += 1

    def _account(self, endpoint: HandoffEndpoint, now_ns: int) -> None:
        since_ns, before_ns = self._since.get(endpoint.replica, (0, 0))
        role = endpoint.engine.role
        self._busy_ns[role] += endpoint.device.busy_ns - before_ns
        self._engine_ns[role] += now_ns - since_ns
        self._since[endpoint.replica] = (now_ns, endpoint.device.busy_ns)

    def busy_shares(self, now_ns: int) -> dict[EngineRole, float | None]:
        """Return the devices' busy share per role, of the time that engines had it; called once, at the end."""
        for endpoint in self._cluster.endpoints:
            self._account(endpoint, max(now_ns, self._since.get(endpoint.replica, (0, 0))[0]))
        return {role: share(self._busy_ns[role], time_ns) for role, time_ns in self._engine_ns.items()}

    def share_of_prefill(self, busy_ns: int) -> float | None:
        """Return `busy_ns` as a share of the time that engines computed prompts, after `busy_shares`."""
        return share(busy_ns, self._engine_ns[EngineRole.PREFILL])
