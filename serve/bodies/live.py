"""A simulated service whose requests come from outside, one by one, while it runs; `foredraft serve --simulate` gives
it real time.

```
submit / cancel at t ──► router ──► engines, devices ──► advance(t): what each request got until then
```

Equal requests at equal times bring the events of `foredraft simulate`: the same actors decide, and nothing here reads a
clock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.contract.account import EngineAccount
from ...core.contract.events import Committed, Event, EventSink, Planned
from ...core.contract.request import FinishedRequest, FinishReason, Request, cut_runs, finish_reason
from ...core.contract.step import DecodeResult, StepResult
from ...core.errors import InvariantViolation
from ...core.scheduler.engine import Engine
from ...observe.input_files import read_text
from ...sim.actors.clock import Environment, call_at
from ...sim.actors.device import Truth
from ...sim.actors.router import ReplicaRouter
from ...sim.assembly import Assembly
from ...sim.disaggregation.received import KvReceiver
from ...sim.faults.plan import FaultPlan
from ...sim.faults.service import SoundService
from ...sim.running.clients import RunClients
from ...sim.running.run import Simulation
from ...sim.scenario import Scenario
from ...sim.workload.traces import TraceSource


@dataclass(frozen=True, slots=True)
class Emission:
    """What one request got at one moment: output tokens, of which only the number is known, or its end."""

    request_id: str
    at_ns: int
    num_tokens: int
    finished: FinishedRequest | None = None

    @property
    def amount(self) -> tuple[int, tuple[FinishReason, int] | None]:
        """What of it the client sees."""
        end = self.finished
        return self.num_tokens, None if end is None else (end.reason, end.num_output)


def live_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario as a live simulation runs it: round by round."""
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"multi_step_rounds": 1})})


def with_its_table(scenario: Scenario) -> Scenario:
    """Return the scenario with the text of its table of adaptive steps in the place of the file, which may change."""
    table = scenario.speculation.adaptive
    if not isinstance(table, str) or not os.path.isfile(table):
        return scenario
    speculation = scenario.speculation.model_copy(update={"adaptive": read_text(Path(table))})
    return scenario.model_copy(update={"speculation": speculation})


class LiveClients(RunClients):
    """Clients outside, who are told each end by `take_end` as soon as the engine reports it."""

    def __init__(
        self,
        env: Environment,
        assembly: Assembly,
        faults: SoundService,
        take_end: Callable[[FinishedRequest], None],
    ) -> None:
        super().__init__(env, assembly, faults)
        self._take_end = take_end

    def ended(self, replica: int, finished: FinishedRequest) -> None:
        self.num_ended += 1
        self._faults.ended(finished.request_id)
        self._faults.forget(finished.request_id)
        self._service.router.ended(replica, finished.request_id)
        self._take_end(finished)


class LiveSimulation(Simulation):
    """Serves requests as they are submitted. The workload of the scenario only says how long outputs are."""

    clients_are_outside = True

    def __init__(
        self,
        scenario: Scenario,
        *,
        sinks: Callable[[int], Sequence[EventSink]] = lambda replica: (),
        origins: Mapping[str, str] | None = None,
        faults: FaultPlan | None = None,
        deliver: Callable[[list[Emission]], None],
    ) -> None:
        """Raise a ForedraftError for anything that cannot run. Engines plan single rounds, so that tokens are delivered
        when their round ends.

        `deliver` gets the tokens of a round before the engine plans the next round. `faults` are those of the service
        (`FaultPlan.of_service`), for its clients come from outside.
        """
        scenario = live_scenario(scenario)
        self._deliver = deliver
        self._ends: list[Emission] = []  # that no round brought, and that are not delivered yet
        self._announced: set[str] = set()  # requests whose end came with their last round, until the actors report it
        self._num_delivered = 0
        self._receivers: list[KvReceiver] = []  # of each engine, once the first request comes with its KV
        self._foreseen_of: dict[int, dict[str, Emission]] = {}  # by engine: what its next commit brings
        super().__init__(
            scenario, sinks=lambda number: [self._emission_sink(number), *sinks(number)], origins=origins, faults=faults
        )
        self._output_lens = self._draw_output_lens()

    @property
    def engines(self) -> list[Engine]:
        return [actor.engine for actor in self.replicas]

    @property
    def next_ns(self) -> float:
        """When something happens next, in simulated nanoseconds; infinity if nothing does."""
        return self.env.peek()

    def draw_output_len(self) -> int:
        """Return the length of the next output, as the scenario's workload has them."""
        return next(self._output_lens)

    def submit(
        self, request: Request, output_len: int, at_ns: int, replica: int | None = None, *, has_kv: bool = False
    ) -> None:
        """Send a request at `at_ns`, or now if that is over, to `replica` if one is given; the model stops it after
        `output_len` tokens. `has_kv`: another program has computed its prompt, and the KV comes over the network."""
        at_ns = max(at_ns, self.env.now)
        truth = self.clients.truth(request.request_id, output_len, at_ns)
        call_at(self.env, at_ns, self._submit, request, truth, replica, has_kv)

    def _submit(self, request: Request, truth: Truth, replica: int | None, has_kv: bool) -> None:
        self.clients.num_submitted += 1
        self.faults.came(request.request_id, self.clients.num_submitted)
        if replica is None:
            chosen = self.router.submit(request, truth)
        else:
            assert isinstance(self.router, ReplicaRouter), "a replica serves whole requests"
            chosen = self.router.submit(request, truth, (replica,))
        if has_kv:
            if not self._receivers:
                self._receivers = [KvReceiver(actor, self.assembly) for actor in self.replicas]
            self._receivers[chosen].expect(request.request_id)

    def cancel(self, request_id: str, at_ns: int) -> None:
        """Give a request up at `at_ns`, or now if that is over; does nothing if it has ended."""
        call_at(self.env, max(at_ns, self.env.now), self.router.cancel, request_id)

    def advance(self, until_ns: int) -> None:
        """Run the simulation up to and including `until_ns`, or until requests have got tokens."""
        before = self._num_delivered
        while not self._ends and self._num_delivered == before and self.env.peek() <= until_ns:
            self.env.step()
        if self._ends:
            ends, self._ends = self._ends, []
            self._pass_on(ends)

    def foresee(self, now_ns: int) -> list[list[Emission]]:
        """Return the pieces that requests will get after `now_ns` from rounds that are drawn already; each round is
        returned once.

        Only an abort can keep it from them (an end that was foreseen stays the end), or a fault: with a plan of faults
        nothing is foreseen.
        """
        if self.faults.is_faulty or self.env.peek() <= now_ns:
            return []
        found = []
        for number, actor in enumerate(self.replicas):
            if actor.next_commit is None or number in self._foreseen_of:
                continue
            step, result = actor.next_commit
            at_ns = int(result.round_end_ns[-1])
            if at_ns > now_ns:
                ahead = _first_tokens(actor.engine, result, at_ns)
                if step.decode is not None:
                    assert result.decode is not None
                    ahead += _expected(actor.engine, step.decode.rows, result.decode, at_ns)
                self._foreseen_of[number] = {emission.request_id: emission for emission in ahead}
                self._announced.update(emission.request_id for emission in ahead if emission.finished is not None)
                found.append(ahead)
        return [ahead for ahead in found if ahead]

    def _pass_on(self, emissions: list[Emission]) -> None:
        self._num_delivered += len(emissions)
        self._deliver(emissions)

    def _draw_output_lens(self) -> Iterator[int]:
        if isinstance(self.workload, TraceSource):
            yield from (arrival.output_len for lap in itertools.repeat(self.workload) for arrival in lap)
        else:
            yield from (self.workload.make(row, 1)[0].output_len for row in itertools.count())

    def _emission_sink(self, number: int) -> EventSink:
        """Return a sink that reports the deliveries of committed steps of engine `number`, without those that were
        announced before."""
        account = EngineAccount()

        def take(event: Event) -> None:
            if isinstance(event, Planned) and event.step is not None and self._receivers:
                came = [join.request.request_id for join in event.step.joins if join.num_received]
                self._pass_on([Emission(request_id, event.now_ns, 1) for request_id in came])
            elif isinstance(event, Committed):  # of one round at most: see `live_scenario`
                at_ns, got = event.now_ns, [(run.request.request_id, run.tokens) for run in account.runs(event)]
                ends = {end.request_id: end for end in event.finished if end.reason is not FinishReason.ERROR}
                got += [(request_id, 0) for request_id in ends if request_id not in dict(got)]
                emissions = [Emission(request_id, at_ns, count, ends.get(request_id)) for request_id, count in got]
                if ahead := self._foreseen_of.pop(number, None):
                    emissions = self._without(ahead, emissions, self.replicas[number].engine)
                self._announced.update(emission.request_id for emission in emissions if emission.finished is not None)
                self._pass_on(emissions)
            account.take(event)

        return take

    @staticmethod
    def _without(ahead: Mapping[str, Emission], emissions: list[Emission], engine: Engine) -> list[Emission]:
        """Return the emissions that were not foreseen. Raises InvariantViolation for one that came otherwise."""
        found = {emission.request_id: emission for emission in emissions}
        for request_id, expected in ahead.items():
            got = found.pop(request_id, None)
            is_as_expected = engine.state_of(request_id) is None if got is None else got.amount == expected.amount
            if not is_as_expected:
                raise InvariantViolation("ACCEPT-12", f"request {request_id!r}: {expected} was announced, {got} came")
        return list(found.values())

    def make_clients(self) -> RunClients:
        return LiveClients(self.env, self.assembly, self.faults, self._take_end)

    def _take_end(self, finished: FinishedRequest) -> None:
        """Take the end of a request, or its refusal (which has a message)."""
        if finished.request_id in self._announced:
            self._announced.remove(finished.request_id)
        else:
            self._ends.append(Emission(finished.request_id, self.env.now, 0, finished))


def _first_tokens(engine: Engine, result: StepResult, at_ns: int) -> list[Emission]:
    """Return the first tokens that a commit of the oldest step will deliver, but for those that end their request."""
    flight = engine.requests.in_flight[0]
    if result.prefill is None:
        return []
    stopped = result.prefill.stopped
    emissions = []
    for i, chunk in flight.live_chunks():
        record = chunk.record
        ends = record.emitted_before + 1 == record.max_tokens or (stopped is not None and stopped[i])
        if chunk.is_last and not record.has_first_token and not ends:
            emissions.append(Emission(record.request.request_id, at_ns, 1))
    return emissions


def _expected(engine: Engine, rows: np.ndarray, result: DecodeResult, at_ns: int) -> list[Emission]:
    """Return the pieces that a commit of `result` will deliver to the requests that are still in `rows`, int [bs]."""
    rounds = engine.rounds
    stops = None if result.stop_index is None else result.stop_index[-1]
    runs = cut_runs(result.accept_lens[-1], stops, rounds.end_len[rows] - rounds.kv_len[rows])
    emissions = []
    for i in rounds.live[rows].nonzero()[0].tolist():
        record, count, end = engine.requests.running[int(rows[i])], int(runs.kept[i]), None
        if runs.ended[i]:
            num_output = engine.output.delivered(record)[0] + count
            end = FinishedRequest(record.request.request_id, finish_reason(bool(runs.stopped[i])), num_output)
        emissions.append(Emission(record.request.request_id, at_ns, count, end))
    return emissions
