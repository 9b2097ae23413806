"""The router: which replica serves a request."""

from __future__ import annotations

from ...core.draws import Purpose, uniform
from ...core.request import Request
from .device import Truth
from .engine import EngineActor
from .link import Link

BYTES_PER_TOKEN = 4
AFFINITY_EXCESS = (
    8  # prefix_aware: requests that a replica may have more than the least loaded before it is passed over
)


class Router:
    """Policies: `round_robin`; `least_loaded` by outstanding requests; `random`; `prefix_aware` by the prompt's first block, unless
    that replica is much busier than the least loaded one."""

    def __init__(self, policy: str, replicas: list[EngineActor], links: list[Link], seed: int) -> None:
        self.policy = policy
        self.replicas = replicas
        self.links = links
        self.outstanding = [0] * len(replicas)
        self._seed = seed
        self._num_routed = 0
        self._home: dict[str, int] = {}

    def submit(self, request: Request, truth: Truth) -> int:
        """Send a request to its replica, which is returned."""
        replica = self._choose(request)
        self._num_routed += 1
        self.outstanding[replica] += 1
        self._home[request.request_id] = replica
        size = request.prompt.length * BYTES_PER_TOKEN
        self.links[replica].send(size, self.replicas[replica].receive, request, truth)
        return replica

    def cancel(self, request_id: str) -> None:
        """Tell the replica that the client is gone; nothing if the request has ended."""
        replica = self._home.get(request_id)
        if replica is not None:
            self.links[replica].send(0, self.replicas[replica].cancel, request_id)

    def ended(self, replica: int, request_id: str) -> None:
        self.outstanding[replica] -= 1
        del self._home[request_id]

    def _choose(self, request: Request) -> int:
        count = len(self.replicas)
        if count == 1:
            return 0
        if self.policy == "round_robin":
            return self._num_routed % count
        if self.policy == "random":
            return int(uniform(self._seed, Purpose.ROUTER, self._num_routed, 0) * count)
        least = min(range(count), key=lambda replica: (self.outstanding[replica], replica))
        if self.policy == "prefix_aware" and request.prompt.hash_ids:
            home = int(uniform(self._seed, Purpose.ROUTER, request.prompt.hash_ids[0], 0) * count)
            if self.outstanding[home] <= self.outstanding[least] + AFFINITY_EXCESS:
                return home
        return least
