"""An engine's part in handoffs: the driver of its side, and the driver's transport on simulated time.

```
prefill   submit ─► plan, launch ─► commit ─► handoff.committed ─► actions ─► interconnect
decode    interconnect ─► side.receive ─► actions, join ─► plan, launch ─► commit ─► handoff.committed
```

The state machines are those of the real executors. There is no KV here: a seal stands for a page, and the network says
how long its bytes take.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from zlib import crc32

from ...core.contract.outcomes import AbortOutcome, CommitOutcome, LossOutcome, SubmitOutcome
from ...core.contract.request import FinishedRequest, FinishReason, Request
from ...core.handoff import (
    DecodeDriver,
    DecodeSide,
    HandoffTiming,
    Message,
    PageSeal,
    PrefillDriver,
    PrefillSide,
    SendPages,
    TransferOutcome,
    TransferState,
    WritePage,
    make_driver,
)
from ...core.handoff.messages import Accept, Offer, Page
from ...core.handoff.placement import Name, Placements
from ...core.scheduler.config import EngineRole
from ...core.scheduler.engine import Engine
from ...core.scheduler.life import RequestState
from ..actors.clock import call_at
from ..actors.device import SimulatedDevice, Truth
from ..actors.engine import EngineActor
from .network import ArrivedPages, HandoffNetwork, Layers, TransferTimes

NOTHING_ENDED = CommitOutcome((), ())


class EndpointHooks:
    """Hooks of an endpoint that change nothing; subclasses override what they need."""

    def on_expected(self, endpoint: HandoffEndpoint, request_id: str, truth: Truth) -> None:
        """Note that a decode engine has taken an offer."""

    def on_pages_read(self, endpoint: HandoffEndpoint, pages: list[Page], row: int, epoch: int) -> None:
        """Note that the network has the bytes of these pages, from a row of that epoch."""

    def on_page_written(self, endpoint: HandoffEndpoint, action: WritePage) -> None:
        """Note that a page is written."""

    def on_transfer_ended(self, endpoint: HandoffEndpoint, outcome: TransferOutcome) -> None:
        """Note that a transfer has ended on this engine's side."""


class Routes(Protocol):
    """The methods of a cluster that an endpoint uses."""

    placements: Placements

    @property
    def outstanding(self) -> list[int]: ...
    def peer_of(self, request_id: str) -> str: ...
    def endpoint_of(self, name: Name) -> HandoffEndpoint: ...
    def lose(self, lost: HandoffEndpoint) -> None: ...
    def may_replace(self, lost: HandoffEndpoint) -> bool: ...


class Surroundings(NamedTuple):
    """The shared objects of a cluster's endpoints."""

    interconnect: HandoffNetwork
    timing: HandoffTiming
    times: TransferTimes
    num_layers: int
    is_layerwise: bool
    cluster: Routes
    hooks: EndpointHooks


class HandoffEndpoint:
    """Attached to an `EngineActor`, which calls it (see `hooks.HandoffPart`).
    While not `is_alive` it neither sends nor receives."""

    def __init__(self, actor: EngineActor, around: Surroundings) -> None:
        self.actor = actor
        self.engine: Engine = actor.engine
        self.device: SimulatedDevice = actor.device
        self.replica: int = actor.replica
        self.name: str = f"engine {actor.replica}"
        self.is_alive: bool = True
        self.missed_at_ns: int | None = None  # set where the engine is lost, not its worker alone: when that is noticed
        self._around = around
        self._env = actor.env
        self._incarnation = 0
        self._accepted_ns: dict[str, int] = {}
        self._within_commit = False
        self._tick_at_ns: int | None = None
        self._begin_role()
        actor.handoff = self

    def _begin_role(self) -> None:
        self._incarnation += 1
        page_format = self._around.interconnect.page_format
        self.handoff: PrefillDriver | DecodeDriver = make_driver(
            self.engine, page_format, self._incarnation, self, self._around.timing
        )

    @property
    def side(self) -> PrefillSide | DecodeSide:
        return self.handoff.side

    @property
    def is_prefill(self) -> bool:
        return self.engine.role is EngineRole.PREFILL

    @property
    def is_lost(self) -> bool:
        return self.missed_at_ns is not None

    @property
    def is_empty(self) -> bool:
        """Whether the engine has no request, no open transfer, and nothing that another engine could still ask for."""
        is_idle = self.engine.is_idle and self.side.is_idle and self.side.next_deadline_ns is None
        return is_idle and not self.is_lost and not self._around.cluster.outstanding[self.replica]

    @property
    def now_ns(self) -> int:
        """The time for leases and fences: monotonic, whatever the host's clock shows."""
        return self._env.now

    def change_role(self, role: EngineRole) -> None:
        """Let the engine work in this role from now on. Raises InvariantViolation HANDOFF-10 unless it is empty."""
        self.engine.transfers.change_role(role, self.now_ns)
        self._begin_role()

    # -- what the actor calls -----------------------------------------------------------------------------------------

    @property
    def may_wait(self) -> bool:
        return self.engine.store.num_held_rows > 0 or not self.side.is_idle

    def submit(self, request: Request) -> SubmitOutcome:
        """Queue a request on a prefill engine."""
        peer = self._around.cluster.peer_of(request.request_id)
        return self.handoff.submit(request, peer, self.actor.hooks.stamp(self.now_ns))

    def abort(self, request_id: str) -> AbortOutcome:
        """Give up a request on this engine and on its decode engine."""
        # The prefill engine reports the end of a request that has not joined.
        ends_elsewhere = not self.is_prefill and self.engine.state_of(request_id) is RequestState.TRANSFERRING
        placement = self._around.cluster.placements.abort(request_id)
        if placement is not None and placement.decode != self.replica:
            target = self._around.cluster.endpoint_of(placement.decode).replica
            self._around.interconnect.withdraw(self, target, request_id)
        outcome = self.handoff.abort(request_id, self.now_ns)
        return AbortOutcome(None, outcome.replan) if ends_elsewhere else outcome

    def launched(self) -> None:
        """Offer prompts as soon as they have a row, where layers are sent as they are computed."""
        if self._around.is_layerwise:
            self.handoff.launched(self.now_ns)

    def committed(self, outcome: CommitOutcome) -> None:
        """Let the handoff go on after a committed step."""
        self._within_commit = True
        for request_id in outcome.computed:
            self._around.times.computed(request_id, self._env.now)
        self.handoff.committed(outcome, self.now_ns)
        self._within_commit = False

    def before_wait(self) -> None:
        """Give up transfers of retracted requests, whose slots may be what those requests wait for."""
        if self.is_prefill:
            self.handoff.committed(NOTHING_ENDED, self.now_ns)

    def lost(self, outcome: LossOutcome, restarts: bool) -> None:
        """Take the loss of steps, or of none; with `restarts` this worker is lost too, until `restarted`."""
        if not restarts:
            self.handoff.committed(CommitOutcome(outcome.finished, ()), self.now_ns)
            return
        self.is_alive = False
        if self.missed_at_ns is not None:
            self._give_back()
            call_at(self._env, max(self.missed_at_ns, self.now_ns), self._around.cluster.lose, self)

    def _give_back(self) -> None:
        """End all requests here; their router will place them anew. For requests that have joined, the router learns
        which tokens they have delivered."""
        for request_id in list(self.engine.requests.live):
            joined = self.engine.state_of(request_id) is not RequestState.TRANSFERRING
            moved = self.engine.transfers.end_transfer(
                request_id, self.now_ns, f"{self.name} was lost", FinishReason.MOVED
            )
            if joined:
                assert moved is not None, f"{request_id!r} is live, so it ends here"
                self.actor.report(moved)
            else:
                self.device.truths.pop(request_id, None)

    @property
    def may_restart(self) -> bool:
        missed_at_ns = self.missed_at_ns
        return missed_at_ns is None or (self._env.now > missed_at_ns and self._around.cluster.may_replace(self))

    def restarted(self) -> None:
        """Begin again with a new worker, without the KV of the old one."""
        self.is_alive = True
        self.missed_at_ns = None
        self._incarnation += 1
        self.handoff.worker_lost(self._incarnation, self.now_ns)

    # -- what the interconnect delivers -------------------------------------------------------------------------------

    def withdraw(self, request_id: str) -> None:
        """Abort a request whose prefill engine says that the client has left."""
        if not self.is_lost:
            self.actor.abort(request_id)

    def receive(self, peer: str, message: Message, truth: Truth | None) -> None:
        """Take a message from another engine. An offer brings the request's truth for this device."""
        side, request_id = self.side, message.key.request_id
        if self.is_prefill and type(message) is Accept:
            self._accepted_ns[request_id] = self._env.now
        before = side.counts.started
        side.receive(peer, message, self.now_ns)
        if type(message) is Offer and side.counts.started > before:
            assert truth is not None, "an offer brings the truth of its request"
            self.device.truths.setdefault(request_id, truth)
            self._around.hooks.on_expected(self, request_id, truth)
        self.handoff.carry_out()

    def receive_pages(self, peer: str, pages: ArrivedPages) -> None:
        """Take the pages of one action; ignored if the engine has become a prefill engine."""
        if not self.is_prefill:
            self.handoff.receive(peer, pages, self.now_ns)

    # -- what the driver calls (`core.handoff.Transport`) -------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        truth = self.device.truths.get(message.key.request_id) if type(message) is Offer else None
        self._around.interconnect.send(self, peer, message, truth)

    def write_page(self, action: WritePage) -> None:
        self._around.hooks.on_page_written(self, action)  # there are no bytes

    def send_pages(self, action: SendPages, driver: PrefillDriver) -> None:
        """Send pages. Those of the step that was just committed left while it ran, as far as they
        were wanted by then."""
        request_id, num_layers = action.key.request_id, self._around.num_layers
        layers = None
        if self._within_commit and self._around.is_layerwise:
            began_ns, ended_ns = self.actor.ran_ns
            first_ns = began_ns + (ended_ns - began_ns) // num_layers
            layers = Layers(max(first_ns, self._accepted_ns.get(request_id, self._env.now)), ended_ns, num_layers)
        page_format = self._around.interconnect.page_format
        row = driver.side.row_of(action.key)
        epoch = int(self.engine.store.table.epochs[row])
        pages = []
        for index in action.indices:
            mark = crc32(f"{request_id}/{index}/{epoch}".encode())
            draft_mark = mark if page_format.draft_bytes else 0
            seal = PageSeal(page_format.target_bytes, mark, page_format.draft_bytes, draft_mark)
            pages.append(Page(action.key, action.epoch, index, seal))
        started_ns, read_ns = self._around.interconnect.send_pages(self, action.peer, pages, layers)
        self._around.times.started(request_id, started_ns)
        call_at(self._env, read_ns, self._pages_read, driver, pages, row, epoch)

    def _pages_read(self, driver: PrefillDriver, pages: list[Page], row: int, epoch: int) -> None:
        """Note that the network has the bytes of the pages; `row` and `epoch`: where they were read."""
        if self.handoff is driver:
            self._around.hooks.on_pages_read(self, pages, row, epoch)
            driver.pages_sent(pages, self.now_ns)

    def report(self, finished: FinishedRequest) -> None:
        self.actor.report(finished)

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        request_id = outcome.request_id
        if self.is_prefill:
            self._accepted_ns.pop(request_id, None)
            self._around.times.ended(request_id, outcome.state)
        elif outcome.state is TransferState.COMPLETED:
            self._around.times.joined(request_id, self._env.now)
        elif self.engine.state_of(request_id) is None:
            self.device.truths.pop(request_id, None)
        self._around.hooks.on_transfer_ended(self, outcome)

    def flush(self, replan: bool) -> None:
        self._wake_in_time()
        self.actor.wake(replan)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _wake_in_time(self) -> None:
        """Schedule `_tick` for the side's next deadline. It may run early; then it is scheduled again."""
        due_ns = self.side.next_deadline_ns
        if due_ns is None:
            return
        at_ns = max(due_ns, self._env.now)
        if self._tick_at_ns is None or at_ns < self._tick_at_ns:
            self._tick_at_ns = at_ns
            call_at(self._env, at_ns, self._tick, at_ns)

    def _tick(self, at_ns: int) -> None:
        if at_ns != self._tick_at_ns:
            return  # an earlier tick was wanted meanwhile
        self._tick_at_ns = None
        if not self.is_alive:
            return
        due_ns = self.side.next_deadline_ns
        if due_ns is not None and due_ns <= self.now_ns:
            self.handoff.tick(self.now_ns)
        else:
            self._wake_in_time()
