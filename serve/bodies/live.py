"""A simulated service whose requests come from outside, one by one, while it runs; `foretoken serve --simulate` gives it real time.

```
submit / cancel at t ──► router ──► engines, devices ──► advance(t): what each request got until then
```

Equal requests at equal times bring the events of `foretoken simulate`: the same actors decide, and nothing here reads a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.contract.events import Committed, Event, EventSink, Planned
from ...core.contract.request import FinishedRequest, Request
from ...core.draws import request_key
from ...core.scheduler.engine import Engine
from ...sim.actors.clock import call_at
from ...sim.actors.device import Truth
from ...sim.faults.plan import FaultPlan
from ...sim.run import Simulation
from ...sim.scenario import Scenario
from ...sim.workload.traces import TraceSource


@dataclass(frozen=True, slots=True)
class Emission:
    """What one request got at one moment: output tokens, of which only the number is known, or its end."""

    request_id: str
    at_ns: int
    num_tokens: int
    finished: FinishedRequest | None = None


def live_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario as a live simulation runs it: round by round."""
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"block_rounds": 1})})


class LiveSimulation(Simulation):
    """Serves requests as they are submitted. The workload of the scenario only says how long outputs are."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        sinks: Callable[[int], Sequence[EventSink]] = lambda replica: (),
        origins: Mapping[str, str] | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        """Raise a ForetokenError for anything that cannot run. Engines plan single rounds: tokens are told when their round ends.

        `faults` are those of the service (`FaultPlan.of_service`), for its clients come from outside.
        """
        scenario = live_scenario(scenario)
        self._emissions: list[Emission] = []
        super().__init__(
            scenario, sinks=lambda replica: [self._emission_sink(), *sinks(replica)], origins=origins, faults=faults
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

    def submit(self, request: Request, output_len: int, at_ns: int) -> None:
        """Send a request at `at_ns`, or now if that is over; the model stops it after `output_len` tokens."""
        at_ns = max(at_ns, self.env.now)
        shift = self._day.shift(at_ns) if self._day is not None else 0.0
        call_at(self.env, at_ns, self._submit, request, Truth(output_len, request_key(request.request_id), shift))

    def _submit(self, request: Request, truth: Truth) -> None:
        self._num_submitted += 1
        if self.faults is not None:
            self.faults.sent(request.request_id)
            self.faults.clients.take(self._num_submitted, request.request_id, self.env.now)
        self.router.submit(request, truth)

    def cancel(self, request_id: str, at_ns: int) -> None:
        """Give a request up at `at_ns`, or now if that is over; does nothing if it has ended."""
        call_at(self.env, max(at_ns, self.env.now), self.router.cancel, request_id)

    def advance(self, until_ns: int) -> list[Emission]:
        """Let happen what does up to and at `until_ns`, or until requests get something; return what they got."""
        while not self._emissions and self.env.peek() <= until_ns:
            self.env.step()
        emissions, self._emissions = self._emissions, []
        return emissions

    def _draw_output_lens(self) -> Iterator[int]:
        if isinstance(self.workload, TraceSource):
            yield from (arrival.output_len for lap in itertools.repeat(self.workload) for arrival in lap)
        for row in itertools.count():
            yield self.workload.make(row, 1)[0].output_len

    def _emission_sink(self) -> EventSink:
        """Return a sink that notes what committed steps of one engine deliver."""
        request_of_row: dict[int, str] = {}

        def take(event: Event) -> None:
            if isinstance(event, Planned) and event.step is not None:
                request_of_row.update((join.row, join.request.request_id) for join in event.step.joins)
            elif isinstance(event, Committed):
                at_ns = event.now_ns
                self._emissions += [Emission(request_id, at_ns, 1) for request_id in event.first_tokens]
                if event.kept is not None:
                    rows, counts = event.step.decode.rows.tolist(), np.add.reduce(event.kept, axis=0).tolist()
                    self._emissions += [
                        Emission(request_of_row[row], at_ns, count)
                        for row, count in zip(rows, counts, strict=True)
                        if count
                    ]

        return take

    def _ended(self, replica: int, finished: FinishedRequest) -> None:
        """Take the end of a request, or its refusal (which has a message)."""
        self._num_ended += 1
        if self.faults is not None:
            self.faults.ended(finished.request_id)
            self.faults.forget(finished.request_id)
        self.router.ended(replica, finished.request_id)
        self._emissions.append(Emission(finished.request_id, self.env.now, 0, finished))
