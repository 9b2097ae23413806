"""The router: it chooses the replica of each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...core.contract.request import Request
from ...core.draws import Purpose, uniform
from .device import Truth
from .engine import EngineActor
from .link import Link

BYTES_PER_TOKEN = 4
AFFINITY_EXCESS = (
    8  # prefix_aware: requests that a replica may have more than the least loaded before it is passed over
)
MAX_REMEMBERED_BLOCKS = 1 << 16  # prefix_aware: per replica; the oldest are forgotten first


class SentBlocks:
    """The prompt blocks that were sent to one replica lately, as a guess at its prefix cache."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, hash_ids: tuple[int, ...]) -> int:
        """Return how many blocks at the front of a prompt were sent here."""
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


class Balancer:
    """Chooses one of several engines for each request, and counts the requests of each.

    Policies: `round_robin`; `least_loaded` by outstanding requests; `random`; `prefix_aware`: the engine that was sent the
    longest prefix of the prompt, unless it is much busier than the least loaded one. `lane` keeps the draws of balancers apart.
    """

    def __init__(self, policy: str, num_engines: int, seed: int, lane: int = 0) -> None:
        self.policy = policy
        self.outstanding = [0] * num_engines
        self._seed = seed
        self._lane = lane
        self._num_routed = 0
        self._sent = [SentBlocks() for _ in range(num_engines)]

    def assign(self, request: Request, among: Sequence[int]) -> int:
        """Choose the engine of a request among `among`, and count it there."""
        chosen = among[0] if len(among) == 1 else self._choose(request, among)
        self._num_routed += 1
        self.outstanding[chosen] += 1
        return chosen

    def ended(self, engine: int) -> None:
        self.outstanding[engine] -= 1

    def _choose(self, request: Request, among: Sequence[int]) -> int:
        if self.policy == "round_robin":
            return among[self._num_routed % len(among)]
        if self.policy == "random":
            coin = float(uniform(self._seed, Purpose.ROUTER, self._num_routed, 0, self._lane))
            return among[int(coin * len(among))]
        least = min(among, key=lambda engine: (self.outstanding[engine], engine))
        if self.policy == "prefix_aware" and request.prompt.hash_ids:
            least = self._nearest(request.prompt.hash_ids, least, among)
            self._sent[least].remember(request.prompt.hash_ids)
        return least

    def _nearest(self, hash_ids: tuple[int, ...], least: int, among: Sequence[int]) -> int:
        """Return the engine with the longest known prefix among those that are not too busy; the least loaded of equals."""
        most = self.outstanding[least] + AFFINITY_EXCESS
        best, best_match = least, self._sent[least].match(hash_ids)
        for engine in among:
            if self.outstanding[engine] <= most and (match := self._sent[engine].match(hash_ids)) > best_match:
                best, best_match = engine, match
        return best


class ReplicaRouter:
    """Sends requests to replicas, and cancels after them."""

    def __init__(self, policy: str, replicas: list[EngineActor], links: list[Link], seed: int) -> None:
        self.replicas = replicas
        self.links = links
        self._balancer = Balancer(policy, len(replicas), seed)
        self._home: dict[str, int] = {}

    @property
    def outstanding(self) -> list[int]:
        """Requests that each replica has."""
        return self._balancer.outstanding

    def submit(self, request: Request, truth: Truth) -> int:
        """Send a request to its replica, which is returned."""
        replica = self._balancer.assign(request, range(len(self.replicas)))
        self._home[request.request_id] = replica
        size = request.prompt.length * BYTES_PER_TOKEN
        self.links[replica].send(size, self.replicas[replica].receive, request, truth)
        return replica

    def cancel(self, request_id: str) -> None:
        """Tell the replica that the client has left; does nothing if the request has ended."""
        replica = self._home.get(request_id)
        if replica is not None:
            self.links[replica].send(0, self.replicas[replica].cancel, request_id)

    def ended(self, replica: int, request_id: str) -> None:
        self._balancer.ended(replica)
        del self._home[request_id]
