"""The router: it chooses the replica of each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ...core.contract.request import Request
from ...core.draws import Purpose, uniform
from ...core.prompt import Prompt
from ..workload.workload import TimedRequest
from .clock import Arguments, Environment, call_at
from .device import Truth
from .engine import EngineActor


class EngineWire(Protocol):
    """Carries messages to one engine: a `Link`, or one with faults."""

    def send(self, num_bytes: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments) -> None: ...


class Link:
    """Delivers in order; a message waits until the ones before it have passed."""

    def __init__(self, env: Environment, latency_ns: int, bytes_per_s: float, lane: int = 0) -> None:
        self.env = env
        self.lane = lane
        self.latency_ns = latency_ns
        self.bytes_per_s = bytes_per_s
        self._free_ns = 0

    def send(self, num_bytes: int, deliver: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Call `deliver(*arguments)` when the message has arrived."""
        self._free_ns = max(self._free_ns, self.env.now) + int(num_bytes / self.bytes_per_s * 1e9)
        call_at(self.env, self._free_ns + self.latency_ns, deliver, *arguments, lane=self.lane)


BYTES_PER_TOKEN = 4
COUNTING_POLICIES = ("round_robin", "random")
"""They choose an engine by the number of requests before, whatever the engines do."""
DECODING_TOKENS = 256  # prefix_aware: a decoding request delays a prompt as about this many waiting prompt tokens do


class SentBlocks:
    """The prompt blocks that were sent to one engine lately, as a guess at its prefix cache:
    at most `capacity` tokens of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_tokens = 0
        self._blocks: OrderedDict[int, int] = OrderedDict()  # hash id -> tokens; the oldest first

    def match(self, prompt: Prompt) -> int:
        """Return how many tokens at the front of a prompt were sent to this engine lately."""
        matched = 0
        for block, num_tokens in _blocks_of(prompt):
            if self._blocks.get(block, 0) < num_tokens:
                break
            matched += num_tokens
        return matched

    def remember(self, prompt: Prompt) -> None:
        """Add the blocks of a prompt. The front blocks are forgotten last, because a cache evicts a prefix after its
        continuation."""
        for block, num_tokens in reversed(list(_blocks_of(prompt))):
            known = self._blocks.pop(block, 0)
            self._blocks[block] = max(known, num_tokens)
            self._num_tokens += self._blocks[block] - known
        while self._num_tokens > self._capacity:
            self._num_tokens -= self._blocks.popitem(last=False)[1]


def _blocks_of(prompt: Prompt) -> Iterator[tuple[int, int]]:
    """Yield (hash id, tokens) from the front of a prompt whose content is known."""
    assert prompt.hash_ids is not None
    if prompt.segment_lens is not None:
        yield from zip(prompt.hash_ids, prompt.segment_lens, strict=True)
        return
    left = prompt.length
    for block in prompt.hash_ids:
        yield block, min(prompt.block_size, left)
        left -= prompt.block_size


class Balancer:
    """Chooses one of several engines for each request, and keeps the load of each.

    Policies: `round_robin`; `least_loaded` by outstanding requests; `random`; `prefix_aware`: the engine that would
    finish the prompt's prefill first, by the prompt tokens that wait there and those of this prompt that its cache
    lacks (a guess from what was sent there). Prompts of unknown content go to the least loaded engine then.

    outstanding:    requests per engine that have not ended
    waiting_tokens: uncached prompt tokens per engine, of the requests without a first token

    `cache_tokens`: tokens that an engine's prefix cache can hold. `lane` keeps the draws of balancers apart.
    """

    def __init__(self, policy: str, num_engines: int, seed: int, cache_tokens: int, lane: int = 0) -> None:
        self.policy = policy
        self.outstanding: list[int] = [0] * num_engines
        self.waiting_tokens: list[int] = [0] * num_engines
        self._seed = seed
        self._lane = lane
        self._num_routed = 0
        self._sent = [SentBlocks(cache_tokens) for _ in range(num_engines)]
        self._waiting: dict[str, int] = {}  # request -> its tokens in `waiting_tokens`

    def assign(self, request: Request, among: Sequence[int]) -> int:
        """Choose the engine of a request among `among`, and count it there."""
        if self.policy == "prefix_aware":
            chosen = self._soonest(request, among)
        else:
            chosen = among[0] if len(among) == 1 else self._choose(among)
        self._num_routed += 1
        self.outstanding[chosen] += 1
        return chosen

    def skip(self) -> None:
        """Count a request that another process sends to its engine."""
        self._num_routed += 1

    def by_number(self, among: Sequence[int]) -> int:
        """Return the engine of the next request, by a policy for which only the number of requests before it counts."""
        if self.policy == "round_robin":
            return among[self._num_routed % len(among)]
        assert self.policy in COUNTING_POLICIES, f"{self.policy} looks at the engines"
        coin = float(uniform(self._seed, Purpose.ROUTER, self._num_routed, 0, self._lane))
        return among[int(coin * len(among))]

    def computed(self, engine: int, request_id: str) -> None:
        """Note that a prompt has been computed and no longer waits."""
        self.waiting_tokens[engine] -= self._waiting.pop(request_id, 0)

    def ended(self, engine: int, request_id: str) -> None:
        """Take the end of a request, however it ended."""
        self.computed(engine, request_id)
        self.outstanding[engine] -= 1

    def _choose(self, among: Sequence[int]) -> int:
        if self.policy in COUNTING_POLICIES:
            return self.by_number(among)
        return min(among, key=lambda engine: (self.outstanding[engine], engine))

    def _soonest(self, request: Request, among: Sequence[int]) -> int:
        """Return the engine with the least work before this request's first token; among equals the one with fewer
        requests."""
        prompt = request.prompt
        if not prompt.hash_ids:
            chosen, missing = min(among, key=lambda engine: (self.outstanding[engine], engine)), prompt.length
        else:
            missing_of = {engine: prompt.length - self._sent[engine].match(prompt) for engine in among}
            chosen = min(
                among, key=lambda engine: (self._delay(engine) + missing_of[engine], self.outstanding[engine], engine)
            )
            missing = missing_of[chosen]
            self._sent[chosen].remember(prompt)
        self._waiting[request.request_id] = missing
        self.waiting_tokens[chosen] += missing
        return chosen

    def _delay(self, engine: int) -> int:
        """Return the work of an engine before it begins a new prompt, in prompt tokens."""
        return self.waiting_tokens[engine] + DECODING_TOKENS * self.outstanding[engine]


class ReplicaRouter:
    """Sends requests and cancels to replicas. `replicas` and `links` are by number, of those among `num_replicas` that
    this process simulates."""

    def __init__(
        self,
        policy: str,
        num_replicas: int,
        replicas: Mapping[int, EngineActor],
        links: Mapping[int, EngineWire],
        seed: int,
        cache_tokens: int = 0,
    ) -> None:
        self.replicas = replicas
        self.links = links
        self._numbers = range(num_replicas)
        self._balancer = Balancer(policy, num_replicas, seed, cache_tokens)
        if policy == "prefix_aware":
            for replica in replicas.values():
                replica.on_first_token = self._balancer.computed
        self._home: dict[str, int] = {}

    @property
    def outstanding(self) -> list[int]:
        """Requests that each replica has."""
        return self._balancer.outstanding

    @property
    def balancers(self) -> dict[str, Balancer]:
        """By the key of a scenario that sets their policy."""
        return {"router.policy": self._balancer}

    def own(self, arrivals: Iterable[TimedRequest]) -> Iterator[TimedRequest]:
        """Yield the arrivals whose replica this process simulates. Each has to be submitted before the next is
        taken."""
        for arrival in arrivals:
            if self._balancer.by_number(self._numbers) in self.replicas:
                yield arrival
            else:
                self._balancer.skip()

    def submit(self, request: Request, truth: Truth, among: Sequence[int] = ()) -> int:
        """Send a request to its replica, which is returned: one of `among`, if any are given."""
        replica = self._balancer.assign(request, among or self._numbers)
        self._home[request.request_id] = replica
        size = request.prompt.length * BYTES_PER_TOKEN
        self.links[replica].send(size, self.replicas[replica].receive, request, truth)
        return replica

    def cancel(self, request_id: str) -> None:
        """Tell the replica that the client has left; does nothing if the request has ended."""
        replica = self._home.get(request_id)
        if replica is not None:
            self.links[replica].send(0, self.replicas[replica].cancel, request_id)

    def home_of_lost(self, deliver: Callable[..., None], request: Request, *sent: object) -> int | None:
        """Return the replica that should have got a lost request by `deliver`."""
        return next(number for number, actor in self.replicas.items() if actor.receive == deliver)

    @property
    def last_busy_ns(self) -> int:
        """When something last travelled between engines: never."""
        return 0

    def report(self, duration_ns: int) -> None:
        """Return nothing: no engine hands requests on."""

    def ended(self, replica: int, request_id: str) -> None:
        self._balancer.ended(replica, request_id)
        del self._home[request_id]
