"""The router: which replica serves a request."""

from __future__ import annotations

from collections import OrderedDict

from ...core.draws import Purpose, uniform
from ...core.request import Request
from .device import Truth
from .engine import EngineActor
from .link import Link

BYTES_PER_TOKEN = 4
AFFINITY_EXCESS = (
    8  # prefix_aware: requests that a replica may have more than the least loaded before it is passed over
)
MAX_REMEMBERED_BLOCKS = 1 << 16  # prefix_aware: per replica; what was sent longest ago is forgotten first


class SentBlocks:
    """Which prompt blocks were sent to one replica lately: a router's guess at what is in that replica's prefix cache."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, hash_ids: tuple[int, ...]) -> int:
        """How many blocks at the front of a prompt were sent here."""
        for count, block in enumerate(hash_ids):
            if block not in self._blocks:
                return count
        return len(hash_ids)

    def remember(self, hash_ids: tuple[int, ...]) -> None:
        for block in hash_ids:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_REMEMBERED_BLOCKS:
            self._blocks.popitem(last=False)


class Router:
    """Policies: `round_robin`; `least_loaded` by outstanding requests; `random`; `prefix_aware`: the replica that was sent
    the longest prefix of the prompt, unless it is much busier than the least loaded one."""

    def __init__(self, policy: str, replicas: list[EngineActor], links: list[Link], seed: int) -> None:
        self.policy = policy
        self.replicas = replicas
        self.links = links
        self.outstanding = [0] * len(replicas)
        self._seed = seed
        self._num_routed = 0
        self._home: dict[str, int] = {}
        self._sent = [SentBlocks() for _ in replicas]

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
            least = self._nearest(request.prompt.hash_ids, least)
            self._sent[least].remember(request.prompt.hash_ids)
        return least

    def _nearest(self, hash_ids: tuple[int, ...], least: int) -> int:
        """The replica with the longest known prefix among those that are not too busy; the least loaded if they know equally much."""
        most = self.outstanding[least] + AFFINITY_EXCESS
        best, best_match = least, self._sent[least].match(hash_ids)
        for replica, sent in enumerate(self._sent):
            if self.outstanding[replica] <= most and (match := sent.match(hash_ids)) > best_match:
                best, best_match = replica, match
        return best
