"""The simulator's trial: services are described and run, alone and in pairs that differ in one thing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import log
from typing import Any, ClassVar

from ..harness.operation import Operation
from ..harness.trial import Refused, Trial
from ..invariants.registry import Invariant
from . import operations as ops
from .contract import FAULTS, METHODS, Service, Simulator, SimulatorCapabilities, SimulatorConfig
from .impossible import ALL
from .moment import Answer, Moment, Queueing
from .reading import read_answer
from .vocabulary import QUIET_FAULTS

MAX_REQUESTS = 64
MAX_LENGTH = 512
MAX_PAGES = 1 << 20
MAX_REPLICAS = 8
ROOM = 2
"""A pool of so many times the longest request, and a few rounds of drafts, holds every request: it may not be refused."""

QUEUE_REQUESTS = 1000
QUEUE_LOAD_PERMILLE = 500
QUEUE_TOLERANCE = 0.5
"""Of the mean wait. At half load a sample mean over n exponential services has a standard error of 5.4 / √n of it (Daley, "The
serial correlation coefficients of waiting times in a stationary single server queue", 1968): 17 % of a thousand."""

EXPONENTIAL = tuple(max(1, round(-27 * log(1 - (share + 0.5) / 20))) for share in range(20))
"""Output lengths at the middles of twenty equal shares of an exponential distribution with mean 27."""

ALONE = Service(num_requests=40, arrivals="even", rate_per_ks=10, prompt_lens=(16,), max_running=1)


class SimulatorTrial(Trial):
    """`subject` under operations. Nothing is held between two runs, so there is nothing to give back in the end."""

    methods = METHODS

    def __init__(
        self,
        subject: Simulator,
        config: SimulatorConfig,
        capabilities: SimulatorCapabilities,
        invariants: Iterable[Invariant],
    ) -> None:
        super().__init__(subject, config, capabilities, invariants)
        self.service = Service()
        self._last: Answer | None = None  # of the service as it is
        self.moment = Moment(config, capabilities)
        self.check()

    def drain(self) -> None:
        """Every run is over when it is answered."""

    def describe(self) -> str:
        m = self.moment
        if m.refusal is not None:
            return f"refused ({m.refusal})"
        return "; ".join(map(str, m.runs))

    def _begin(self, operation: Operation) -> Moment:
        self.moment = Moment(self.config, self.capabilities, operation)
        return self.moment

    # -- the service --------------------------------------------------------------------------------------------------

    def _becomes(self, operation: Operation, service: Service) -> bool:
        if not _makes_sense(service):
            return False
        self._begin(operation)
        if service != self.service:
            self.service, self._last = service, None
        return True

    def _load(self, op: ops.Load) -> bool:
        names = ("num_requests", "arrivals", "prompt_lens", "output_lens", "seed")
        rate_per_ks = 10**6 // op.gap_ms if op.gap_ms > 0 else 0
        load = {name: getattr(op, name) for name in names}
        return self._becomes(op, replace(self.service, rate_per_ks=rate_per_ks, **load))

    def _size(self, op: ops.Size) -> bool:
        size = {
            "pages": -(-16 * op.pool // self.config.page_size),
            "max_running": op.max_running,
            "replicas": op.replicas,
        }
        return self._becomes(op, replace(self.service, **size))

    def _demand(self, op: ops.Demand) -> bool:
        return self._becomes(op, replace(self.service, slo_ttft_ms=op.ttft_ms, slo_e2el_ms=op.e2el_ms))

    def _plan(self, op: ops.Plan) -> bool:
        return self._becomes(op, replace(self.service, faults=_joined(self.service.faults, op.kind, 10 * op.percent)))

    def _calm(self, op: ops.Calm) -> bool:
        return self._becomes(op, replace(self.service, faults=None))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _ask(self, method: Any, service: Service, *arguments: object) -> Answer | None:
        """One run; None if it was refused."""
        m = self.moment
        m.is_possible = self._is_possible(service)
        answer = self.ask(method, service, *arguments)
        if answer is None or isinstance(answer, Refused):
            m.refusal = "None" if answer is None else answer.reason
            return None
        m.refusal = None
        if m.impossible:
            return None
        found = read_answer(self, answer, service)
        self._look_whole(found)
        m.runs += (found,)
        return found

    def _base(self) -> Answer | None:
        """A run of the service as it is, an earlier one if there was one."""
        if self._last is None:
            self._last = self._ask(self.subject.run, self.service)
        return self._last

    def _is_possible(self, service: Service) -> bool:
        """Whether every request has room, so that there is nothing to refuse."""
        longest = max(service.prompt_lens) + max(service.output_lens) + 4 * (self.config.steps + 1)
        return service.pages * self.config.page_size >= ROOM * (longest + self.config.page_size)

    def _look_whole(self, answer: Answer) -> None:
        """Without faults every request has an end; with some, none has two."""
        service = answer.service
        numbers = sorted(request.number for request in answer.requests if request.number >= 0)
        whole = list(range(service.num_requests))
        if len(answer.arrivals) != service.num_requests:
            was = f"{len(answer.arrivals)} arrivals"
            raise self.misbehaviour("ANSWER", was, f"{service.num_requests}: so many requests were asked for")
        if service.faults is None and (numbers != whole or len(answer.requests) != len(numbers)):
            was = f"requests {numbers} have an end, and {len(answer.requests) - len(numbers)} that nobody sent"
            raise self.misbehaviour("ANSWER", was, f"requests {whole}, each once")

    def _run(self, op: ops.Run) -> bool:
        self._begin(op)
        self._last = self._ask(self.subject.run, self.service)
        return True

    def _twice(self, op: ops.Twice) -> bool:
        m = self._begin(op)
        first = self._base()
        if first is not None:
            second = self._ask(self.subject.run, self.service)
            m.twice = None if second is None else (first, second)
        return True

    def _pair(self, op: Operation, changed: Service) -> tuple[Answer, Answer] | None:
        """The service as it is, and the changed one."""
        self._begin(op)
        first = self._base()
        second = None if first is None else self._ask(self.subject.run, changed)
        return None if second is None else (first, second)

    def _one_more_request(self, op: ops.OneMoreRequest) -> bool:
        pair = self._pair(op, replace(self.service, num_requests=self.service.num_requests + 1))
        self.moment.grown = pair
        return True

    def _one_more_fault(self, op: ops.OneMoreFault) -> bool:
        planned = {kind for kind, _ in self.service.faults or ()}
        if op.kind not in QUIET_FAULTS or op.kind in planned or not 0 <= op.percent <= 100:
            return False
        pair = self._pair(op, replace(self.service, faults=_joined(self.service.faults, op.kind, 10 * op.percent)))
        self.moment.grown = pair
        return True

    def _no_probability(self, op: ops.NoProbability) -> bool:
        if op.kind not in FAULTS:
            return False
        self._begin(op)
        kinds = dict.fromkeys([kind for kind, _ in self.service.faults or ()] + [op.kind])
        before = replace(self.service, faults=None)
        first = self._ask(self.subject.run, before)
        planned = replace(before, faults=tuple((kind, 0) for kind in kinds))
        second = None if first is None else self._ask(self.subject.run, planned)
        self.moment.planned = None if second is None else (first, second)
        return True

    def _more_pages(self, op: ops.MorePages) -> bool:
        if self.service.faults is not None or op.pages < 1 or self.service.pages + op.pages > MAX_PAGES:
            return False
        pair = self._pair(op, replace(self.service, pages=self.service.pages + op.pages))
        self.moment.enlarged = pair
        return True

    def _replay(self, op: ops.Replay) -> bool:
        if self.service.faults is not None or not self.capabilities.traces:
            return False
        m = self._begin(op)
        first = self._base()
        if first is not None:
            second = self._ask(self.subject.replay, self.service, [list(arrival) for arrival in first.arrivals])
            m.replayed = None if second is None else (first, second)
        return True

    def _impossible(self, op: ops.Impossible) -> bool:
        if op.how not in ALL:
            return False
        m = self._begin(op)
        m.impossible = op.how
        self.ask_impossible(ALL[op.how](replace(self.service, faults=None), self.config))
        return True

    def ask_impossible(self, service: Service) -> None:
        """Ask for a run that cannot be; only whether it is refused is of interest."""
        m = self.moment
        answer = self.ask(self.subject.run, service)
        if answer is None or isinstance(answer, Refused):
            m.refusal = "None" if answer is None else answer.reason

    def _queue(self, op: ops.Queue) -> bool:
        """First some requests far apart say how long one service takes, then they come so often that the server is half busy.

        A pipeline that plans ahead is no such server: with the next request at the door, a short one takes a step longer.
        """
        if self.config.overlap or op.services not in ("constant", "exponential") or op.seed < 0:
            return False
        m = self._begin(op)
        outputs = (1,) if op.services == "constant" else EXPONENTIAL
        pages = -(-4096 // self.config.page_size)
        alone = self._ask(self.subject.run, replace(ALONE, output_lens=outputs, pages=pages, seed=op.seed))
        if alone is None or len(alone.of_reason("completed")) < ALONE.num_requests:
            return True
        service_ns = sum(request.finish_ns - request.arrival_ns for request in alone.requests) // len(alone.requests)
        if service_ns < 1:
            raise self.misbehaviour("ANSWER", f"a service takes {service_ns} ns", "some time")
        rate_per_ks = QUEUE_LOAD_PERMILLE * 10**9 // service_ns
        busy = replace(alone.service, arrivals="poisson", num_requests=QUEUE_REQUESTS, rate_per_ks=rate_per_ks)
        answer = self._ask(self.subject.run, busy)
        if answer is not None:
            m.queue = Queueing(op.services, QUEUE_TOLERANCE, answer)
        return True

    actions: ClassVar = {
        ops.Load: _load,
        ops.Size: _size,
        ops.Demand: _demand,
        ops.Plan: _plan,
        ops.Calm: _calm,
        ops.Run: _run,
        ops.Twice: _twice,
        ops.OneMoreRequest: _one_more_request,
        ops.OneMoreFault: _one_more_fault,
        ops.NoProbability: _no_probability,
        ops.MorePages: _more_pages,
        ops.Replay: _replay,
        ops.Impossible: _impossible,
        ops.Queue: _queue,
    }


def _joined(faults: tuple[tuple[str, int], ...] | None, kind: str, permille: int) -> tuple[tuple[str, int], ...]:
    """The plan with this kind, in the place that it had."""
    return tuple({**dict(faults or ()), kind: permille}.items())


def _makes_sense(service: Service) -> bool:
    """Whether nothing in it is impossible by itself, and it is small. Shrinking tries everything."""
    lengths = (*service.prompt_lens, *service.output_lens)
    return (
        1 <= service.num_requests <= MAX_REQUESTS
        and service.arrivals in ("poisson", "even")
        and service.rate_per_ks >= 1
        and bool(service.prompt_lens and service.output_lens)
        and all(1 <= length <= MAX_LENGTH for length in lengths)
        and service.seed >= 0
        and 1 <= service.pages <= MAX_PAGES
        and service.max_running >= 1
        and 1 <= service.replicas <= MAX_REPLICAS
        and min(service.slo_ttft_ms, service.slo_e2el_ms) >= 0
        and all(kind in FAULTS and 0 <= permille <= 1000 for kind, permille in service.faults or ())
    )
