"""Requests whose KV comes from an engine of another program: `kv_transfer_params` of a simulated server.

```
request ─► reserve a row ──pages over this engine's port──► join ─► the next decode round
             (waits in order while there is no room)
```

The other engine is not simulated. It has computed the prompt, and its port is as fast as the one here.
"""

from __future__ import annotations

from collections import deque

from ...core.algorithm.arrival import Arrival
from ...core.contract.outcomes import AbortOutcome, CommitOutcome, LossOutcome, SubmitOutcome
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.scheduler.config import EngineRole
from ...core.scheduler.life import RequestState
from ..actors.engine import EngineActor
from ..assembly import Assembly
from .cluster import draft_input_bytes
from .network import Network

OTHER, HERE = 0, 1


class KvReceiver:
    """Attached to an actor whose engine serves whole requests (see `hooks.HandoffPart`). Requests that `expect` named
    arrive with their KV; all others are computed here."""

    def __init__(self, actor: EngineActor, assembly: Assembly) -> None:
        self._actor = actor
        self._engine = actor.engine
        self._token_bytes = assembly.sent_kv_bytes
        self._draft_bytes = draft_input_bytes(assembly)
        rate = assembly.deployment.port_bytes_per_s
        latency_ns = round(assembly.scenario.disaggregation.latency_us * 1000)
        self._network = Network(actor.env, latency_ns, (rate, rate))
        self._expected: set[str] = set()
        self._waiting: deque[Request] = deque()  # for room
        self._num_sent = 0  # whose KV is on its way
        actor.handoff = self

    def expect(self, request_id: str) -> None:
        """Note that the KV of a request comes from elsewhere, before it arrives here."""
        self._expected.add(request_id)

    # -- what the actor calls -----------------------------------------------------------------------------------------

    @property
    def may_wait(self) -> bool:
        return self._num_sent > 0

    def submit(self, request: Request) -> SubmitOutcome:
        if request.request_id not in self._expected:
            return self._engine.submit(request, self._now_ns)
        self._expected.remove(request.request_id)
        self._waiting.append(request)
        self._reserve()
        return SubmitOutcome("", replan=False)

    def abort(self, request_id: str) -> AbortOutcome:
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return AbortOutcome(FinishedRequest(request_id, FinishReason.ABORT, 0), replan=False)
        outcome = self._engine.abort(request_id, self._now_ns)
        self._reserve()
        return outcome

    def launched(self) -> None:
        """Do nothing: no prompt is sent from here."""

    def committed(self, outcome: CommitOutcome) -> None:
        self._reserve()

    def before_wait(self) -> None:
        self._reserve()

    @property
    def may_restart(self) -> bool:
        return True

    def lost(self, outcome: LossOutcome, restarts: bool) -> None:
        raise AssertionError("a simulation with faults receives no KV")

    def restarted(self) -> None:
        raise AssertionError("a simulation with faults receives no KV")

    def change_role(self, role: EngineRole) -> None:
        raise AssertionError("an engine without pools keeps its role")

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _now_ns(self) -> int:
        return self._actor.hooks.stamp(self._actor.env.now)

    def _reserve(self) -> None:
        """Give the oldest requests rows while there is room, and let their KV come."""
        while self._waiting:
            request = self._waiting[0]
            outcome = self._engine.transfers.reserve(request, self._now_ns)
            if outcome.refusal:
                self._waiting.popleft()
                refused = FinishedRequest(request.request_id, FinishReason.ERROR, 0, message=outcome.refusal)
                self._actor.report(refused)
                continue
            if not outcome.row:
                return
            self._waiting.popleft()
            size = self._engine.config.page_size
            num_pages = -(-request.prefill_len // size) - outcome.num_cached // size
            num_bytes = num_pages * size * self._token_bytes + self._draft_bytes
            self._num_sent += 1
            self._network.send(OTHER, HERE, num_bytes, self._arrive, request.request_id, outcome.row, outcome.epoch)

    def _arrive(self, request_id: str, row: int, epoch: int) -> None:
        """Let a request join, unless its client has left meanwhile; then the row is free."""
        engine, now_ns = self._engine, self._now_ns
        self._num_sent -= 1
        replan = False
        record = engine.requests.live.get(request_id)
        if record is not None and record.state is RequestState.TRANSFERRING and record.epoch == epoch:
            replan = engine.transfers.join(request_id, Arrival(), now_ns).replan
        engine.transfers.release_hold(row, now_ns)
        self._reserve()
        self._actor.wake(replan)
