"""The simulator's trial: services are described and run, alone and in pairs that differ in one thing.

Some operations describe the service, the others run it as it is then, once or several times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ..harness.operation import Operation, operation
from ..harness.trial import Refused, Trial
from . import invariants as invariants  # registers the checkers
from .answer import Queueing, SimulatorAnswer, SimulatorMoment
from .contract import BURST, BURST_REQUESTS, CHANGES, FAULTS, Service, Simulator, SimulatorCapabilities, SimulatorConfig
from .elsewhere import CASES, digest, digests_elsewhere, is_importable
from .guards import (
    PARTS,
    QUIET_FAULTS,
    has_one_draft,
    is_apart,
    is_new_fault,
    is_open,
    is_server,
    is_steady,
    may_have_faults,
    may_have_more_pages,
    used_parts,
)
from .reading import read_answer, read_requests
from .services import (
    ALONE,
    EXPONENTIAL,
    IMPOSSIBLE,
    LONG,
    QUEUE_LOAD_PERMILLE,
    QUEUE_REQUESTS,
    QUEUE_TOLERANCE,
    STAYS,
    impossible_for,
    makes_sense,
)

ROOM = 2
"""A pool of so many times the longest request, and a few rounds of drafts, holds every request:
it may not be refused."""

CROWDED_MBPS = 100
"""Links below this bandwidth take as long for a prompt as the next one takes to come."""

STEP_FAULTS = ("device.raises", "device.restarts")
MANY = 8


class SimulatorTrial(Trial):
    """`subject` under operations. Runs share nothing, so there is nothing to give back in the end."""

    contract = "simulator"
    quick = 1_000
    run_length = 10
    limit_s = 60.0
    parts = PARTS
    values: ClassVar = {
        "kind": FAULTS,
        "clients": (0, 1, 2),
        "num_requests": (4, 1, 8, 12),
        "arrivals": ("even", "poisson"),
        "prompt_lens": ((5,), (3, 17), (40,), (1, 9, 30, 64)),
        "output_lens": ((4,), (1,), (1, 12), (30,), (2, 7, 20)),
    }

    subject: Simulator
    config: SimulatorConfig
    capabilities: SimulatorCapabilities
    moment: SimulatorMoment

    def prepare(self) -> None:
        self.service = Service()
        self._last: SimulatorAnswer | None = None  # of the service as it is
        super().prepare()

    def begin(self, operation: Operation | str) -> None:
        self.moment = SimulatorMoment(self.config, operation)

    def describe(self) -> str:
        return "; ".join(map(str, self.moment.runs))

    # -- the service --------------------------------------------------------------------------------------------------

    def _with(self, **changes: Any) -> Service:
        """Return the service with changes. The operation is left out if that would make it impossible or large."""
        service = replace(self.service, **changes)
        self.only_if(makes_sense(service))
        return service

    def _become(self, **changes: Any) -> None:
        service = self._with(**changes)
        if service != self.service:
            self.service, self._last = service, None

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    @operation(weight=14, gap_ms=(50, 5, 200, 1), seed=range(1, 33))
    def load(
        self,
        num_requests: int,
        arrivals: str,
        gap_ms: int,
        prompt_lens: tuple[int, ...],
        output_lens: tuple[int, ...],
        seed: int,
    ) -> None:
        """Give the service these requests, `gap_ms` apart on average."""
        lens = {"prompt_lens": prompt_lens, "output_lens": output_lens}
        rate_per_ks = 10**6 // gap_ms if gap_ms > 0 else 0
        self._become(num_requests=num_requests, arrivals=arrivals, rate_per_ks=rate_per_ks, seed=seed, **lens)

    @operation(weight=6, pool=(64, 4, 8, 16), max_running=(4, 1, 2), replicas=(1, 1, 2, 3))
    def size(self, pool: int, max_running: int, replicas: int) -> None:
        """Give the service this much hardware; a pool of so many times 16 tokens."""
        self._become(pages=self._pages(16 * pool), max_running=max_running, replicas=replicas)

    @operation(needs="books", weight=4, policy=("least_loaded", "round_robin"), link_mbps=(10_000, 1))
    def route(self, policy: str, link_mbps: int) -> None:
        """Give the router this policy, and links of this bandwidth; a slow one gets long prompts close together.
        Then run the service."""
        crowd = {"rate_per_ks": 10**6, "prompt_lens": (40, 64), "clients": 0} if link_mbps < CROWDED_MBPS else {}
        self._become(policy=policy, link_mbps=link_mbps, **crowd)
        self._base()

    @operation(
        needs="prefixes",
        weight=11,
        when=lambda t, groups, length, replicas: not t.config.has_pools,
        groups=(4, 2, 1),
        length=(60, 60, 30),
        replicas=(3, 3, 2),
    )
    def share(self, groups: int, length: int, replicas: int) -> None:
        """Run some long prompts, of which those of a group begin alike, on so many engines behind a prefix-aware
        router."""
        self.only_if(min(groups, length) > 0)
        load = {"num_requests": 16, "arrivals": "poisson", "rate_per_ks": 400_000, "prompt_lens": (9, 40, 64)}
        router = {"policy": "prefix_aware", "replicas": replicas, "pages": self._pages(2048)}
        self._simulate(self.subject.run, self._with(**STAYS, **load, **router, prefix_groups=groups, prefix_len=length))

    @operation(needs="books", weight=5, clients=(0, 3, 1), cancels=(0, 700, 700), deadline_ms=(0, 0, 20, 40))
    def clients(self, clients: int, cancels: int, deadline_ms: int = 0) -> None:
        """Let its requests come from so many clients, or at their times; permille of them, long ones, are given up, and
        all that wait for so long. Then run it."""
        long = LONG if cancels or deadline_ms else {}
        self._become(clients=clients, cancels=cancels, deadline_ms=deadline_ms, **long)
        self._base()

    @operation(needs="chunks", weight=4, interval=(1, 3, 8, 20), chunk_us=(0, 0, 900, 5000))
    def stream(self, interval: int, chunk_us: int) -> None:
        """Run it without faults and with clients that stay, who get long outputs in chunks of so many tokens from a
        process that takes so long for each."""
        stays = {"faults": None, "cancels": 0, "deadline_ms": 0, "output_lens": (2, 30)}
        self._simulate(self.subject.run, self._with(**stays, stream_interval=interval, chunk_us=chunk_us))

    @operation(needs="books", weight=6, requests=(8, 4), jitter=(1000, 300), replicas=(1, 2))
    def fluctuate(self, requests: int, jitter: int, replicas: int = 1) -> None:
        """Run so many long requests on so many engines, with device times that vary by so many permille."""
        size = {"pages": self._pages(1024), "max_running": 1, "replicas": replicas, "num_requests": requests}
        uneven = self._with(**STAYS, **size, prompt_lens=(5,), output_lens=(120,), jitter=jitter)
        even = self._simulate(self.subject.run, replace(uneven, jitter=0))
        if jitter:
            self.moment.fluctuating = self._beside(even, self.subject.run, uneven)

    @operation(needs="machines", weight=4, when=lambda t: not t.config.has_pools)
    def change(self) -> None:
        """Run a few requests that come far apart, and again on machines with more of something."""
        service = replace(ALONE, num_requests=3, prompt_lens=(40, 9), output_lens=(12,), pages=self._pages(1024))
        first = self._simulate(self.subject.run, service)
        for change in filter(self._is_judged, CHANGES):
            pair = self._beside(first, self.subject.changed, service, change)
            self.moment.changed += () if pair is None else ((change, *pair),)

    def _is_judged(self, change: str) -> bool:
        """Return whether it is known what a change does. With overlap a host works while the device does."""
        return change != "host" or not (self.config.machine == "free host" or self.config.overlap)

    @operation(needs="goodput", weight=4, ttft_ms=(0, 10, 20, 50), e2el_ms=(0, 20, 50, 100))
    def demand(self, ttft_ms: int, e2el_ms: int, is_tight: bool = False) -> None:
        """Demand these limits of a good request; 0: no demand.
        `is_tight`: of eight requests, some larger than the pool. Then run it."""
        tight = {"num_requests": 8, "prompt_lens": (5, 64), "output_lens": (4,), "pages": self._pages(64)}
        self._become(slo_ttft_ms=ttft_ms, slo_e2el_ms=e2el_ms, **(tight if is_tight else {}))
        self._base()

    @operation(needs="faults", weight=10, when=lambda t, percent, fails=False: may_have_faults(t), percent=(30, 10))
    def trouble(self, percent: int, fails: bool = False) -> None:
        """Put every kind of fault of links and clients into the service's plan, or all by which steps
        fail, and run it."""
        of_clients = [kind for kind in FAULTS if kind.startswith(("link", "client"))]
        kinds = dict.fromkeys(STEP_FAULTS, 6 * percent) if fails else dict.fromkeys(of_clients, 10 * percent)
        self._become(faults=self._plan_with(kinds))
        self._base()

    @operation(needs="bursts", weight=6, when=lambda t, percent, clients: may_have_faults(t), percent=(100, 40))
    def burst(self, percent: int, clients: int) -> None:
        """Run a few long requests of which so many per cent come in a burst, from so many clients or at their times."""
        self.only_if(clients in (0, 1, 2))
        plain = STAYS | {"stream_interval": 1, "chunk_us": 0, "num_requests": BURST_REQUESTS, "clients": clients}
        service = self._with(**plain | {"faults": ((BURST, 10 * percent),)}, **LONG)
        self._simulate(self.subject.run, service)

    @operation(needs="faults", weight=6, when=lambda t, kind, percent: may_have_faults(t), percent=(10, 30, 0, 2))
    def plan(self, kind: str, percent: int) -> None:
        """Put a kind of fault into the service's plan."""
        self._become(faults=self._plan_with({kind: 10 * percent}))

    @operation(needs="faults", weight=4)
    def calm(self) -> None:
        """Remove the service's fault plan."""
        self._become(faults=None)

    def _plan_with(self, kinds: dict[str, int]) -> tuple[tuple[str, int], ...]:
        """Return the plan with these kinds, each in the place that it had."""
        return tuple({**dict(self.service.faults or ()), **kinds}.items())

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _simulate(self, method: Any, service: Service, *arguments: object) -> SimulatorAnswer | None:
        """Make one run. Returns None if it was refused."""
        m = self.moment
        # Every request has room, so that there is nothing to refuse.
        m.is_possible = service.pages * self.config.page_size >= ROOM * self._longest(service)
        answer = self.ask(method, service, *arguments)
        m.refusal = None
        if self.refused(answer, None):
            return None
        found = read_answer(self, answer, service)
        self._check_whole(found)
        m.runs += (found,)
        return found

    def _base(self) -> SimulatorAnswer | None:
        """Return a run of the service as it is, an earlier one if there was one."""
        if self._last is None:
            self._last = self._simulate(self.subject.run, self.service)
            self.use({} if self._last is None else used_parts(self.config))
        return self._last

    def _beside(
        self, first: SimulatorAnswer | None, method: Any, service: Service, *arguments: object
    ) -> tuple[SimulatorAnswer, SimulatorAnswer] | None:
        """Return a run and another one. None if one was refused."""
        second = None if first is None else self._simulate(method, service, *arguments)
        return None if second is None else (first, second)

    def _longest(self, service: Service) -> int:
        """Return the most tokens of KV that one of its requests may need."""
        config = self.config
        longest = max(service.prompt_lens) + max(service.output_lens) + 4 * (config.steps + 1) + config.page_size
        # Each branch of a tree has pages of its own, with a copy of the prompt's last one; two rounds may be in flight.
        return longest + (2 * config.topk * (config.steps + 1 + 2 * config.page_size) if config.topk > 1 else 0)

    def _check_whole(self, answer: SimulatorAnswer) -> None:
        """Check that without faults every request has one end."""
        service = answer.service
        numbers = sorted(request.number for request in answer.requests if request.number >= 0)
        whole = list(range(service.num_requests))
        if len(answer.arrivals) != service.num_requests:
            was = f"{len(answer.arrivals)} arrivals"
            raise self.misbehaviour("ANSWER", was, f"{service.num_requests}: so many requests were asked for")
        if service.faults is None and (numbers != whole or len(answer.requests) != len(numbers)):
            was = f"requests {numbers} have an end, and {len(answer.requests) - len(numbers)} that were not sent"
            raise self.misbehaviour("ANSWER", was, f"requests {whole}, each once")

    @operation(weight=4)
    def run(self) -> None:
        """Run the service."""
        self._last = self._simulate(self.subject.run, self.service)

    @operation(weight=9)
    def twice(self) -> None:
        """Run it twice."""
        self.moment.twice = self._beside(self._base(), self.subject.run, self.service)

    @operation(weight=2, when=lambda t, case: is_importable(type(t.subject)) and 0 <= case < len(CASES), case=(0, 1, 2))
    def elsewhere(self, case: int) -> None:
        """Run one of a few services here, which has run in another process whose strings have other hashes."""
        config, service = CASES[case]
        kind = type(self.subject)
        answer = self.ask(kind(config).run, service)
        here = "refused" if answer is None or isinstance(answer, Refused) else digest(answer)
        self.moment.elsewhere = case, here, digests_elsewhere(kind)[case]

    @operation(weight=5, when=has_one_draft)
    def one_more_request(self) -> None:
        """Run it, and again with one request more."""
        more = replace(self.service, num_requests=self.service.num_requests + 1)
        self.moment.grown = self._beside(self._base(), self.subject.run, more)

    @operation(needs="faults", weight=14, when=is_new_fault, kind=QUIET_FAULTS, percent=(20, 5))
    def one_more_fault(self, kind: str, percent: int) -> None:
        """Run it, and again with one kind of fault more, which changes nothing of what is asked for."""
        more = self._with(faults=self._plan_with({kind: 10 * percent}))
        self.moment.grown = self._beside(self._base(), self.subject.run, more)

    @operation(needs="faults", weight=7, when=lambda t, kind: kind in FAULTS and may_have_faults(t))
    def no_probability(self, kind: str) -> None:
        """Run it without a plan, and with one in which this kind and those of its plan have probability 0."""
        planned = replace(self.service, faults=self._plan_with({kind: 0}))
        planned = replace(planned, faults=tuple((kind, 0) for kind, _ in planned.faults))
        first = self._simulate(self.subject.run, replace(self.service, faults=None))
        self.moment.planned = self._beside(first, self.subject.run, planned)

    @operation(
        weight=14,
        when=may_have_more_pages,
        pages=(1, 4, 8, 16, 64, 1024),
        percent=(0, 120, 150, 200, 60),
        together=(4, 8),
    )
    def more_pages(self, pages: int, percent: int, together: int) -> None:
        """Run it without faults, and again with more pages: first with its pool, or, of at least `MANY` requests, with
        so many per cent of what its longest request needs, in batches of `together`."""
        self.only_if(pages > 0)
        service = self.service
        if percent:
            tight = -(-self._longest(service) * percent // (100 * self.config.page_size))
            many = max(MANY, service.num_requests)
            service = self._with(pages=tight, max_running=together, num_requests=many)
        first = self._simulate(self.subject.run, service) if percent else self._base()
        self.moment.enlarged = self._beside(first, self.subject.run, replace(service, pages=service.pages + pages))

    @operation(needs="traces", weight=5, when=is_open)
    def replay(self) -> None:
        """Run it without faults, and replay its requests from a trace."""
        first = self._base()
        arrivals = [] if first is None else [list(arrival) for arrival in first.arrivals]
        self.moment.replayed = self._beside(first, self.subject.replay, self.service, arrivals)

    @operation(needs="multi_steps", weight=14, when=lambda t, gap_ms: is_steady(t), gap_ms=(5, 200, 50))
    def round_by_round(self, gap_ms: int) -> None:
        """Let long requests come `gap_ms` apart, run it, and again with steps of one round each."""
        self.only_if(gap_ms > 0)
        self._become(num_requests=8, rate_per_ks=10**6 // gap_ms, output_lens=(30, 45))
        self.moment.split = self._beside(self._base(), self.subject.round_by_round, self.service)

    @operation(needs="parts", weight=4, when=is_apart, replicas=(2, 3), cancels=(700, 0))
    def in_parts(self, replicas: int, cancels: int) -> None:
        """Run it on so many engines that get requests in turn, permille of which are given up, and each engine by
        itself."""
        self.only_if(replicas > 1)
        service = self._with(replicas=replicas, policy="round_robin", cancels=cancels, **(LONG if cancels else {}))
        together = self._simulate(self.subject.run, service)
        if together is not None:
            apart = self.ask(self.subject.in_parts, service)
            self.moment.apart = together, read_requests(self, apart, len(together.arrivals))

    @operation(weight=8, hostile=True, probes="SIM-11", when=lambda t, how: how in IMPOSSIBLE, how=impossible_for)
    def impossible(self, how: str) -> None:
        """Run it with something impossible. Must be refused."""
        m, values = self.moment, IMPOSSIBLE[how]
        if how == "no-room":
            values = {"prompt_lens": (self.service.pages * self.config.page_size + 1,)}
        m.impossible = how
        plain = replace(self.service, faults=None, clients=0)
        self.refused(self.ask(self.subject.run, replace(plain, **values)), None)

    @operation(weight=3, when=is_server, services=("constant", "exponential"), seed=range(1, 9))
    def queue(self, services: str, seed: int) -> None:
        """Simulate a thousand Poisson arrivals at one server, with "exponential" or "constant" service times."""
        # Some requests far apart tell how long one service takes; then they come so often that the server is half busy.
        outputs = (1,) if services == "constant" else EXPONENTIAL
        few = replace(ALONE, output_lens=outputs, pages=self._pages(4096), seed=seed)
        alone = self._simulate(self.subject.run, few)
        if alone is None or len(alone.completed) < ALONE.num_requests:
            return
        service_ns = sum(request.finish_ns - request.arrival_ns for request in alone.requests) // len(alone.requests)
        if service_ns < 1:
            raise self.misbehaviour("ANSWER", f"a service takes {service_ns} ns", "some time")
        rate_per_ks = QUEUE_LOAD_PERMILLE * 10**9 // service_ns
        busy = replace(alone.service, arrivals="poisson", num_requests=QUEUE_REQUESTS, rate_per_ks=rate_per_ks)
        answer = self._simulate(self.subject.run, busy)
        if answer is not None:
            self.moment.queue = Queueing(services, QUEUE_TOLERANCE, answer)
