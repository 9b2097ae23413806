"""An engine of a cluster that meets the faults of a plan: those of a replica, and death in the middle of a transfer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import simpy

from ...core.contract.events import Aborted, Event, EventSink, HandoffMoved
from ...core.contract.failure import FailureCause
from ...core.contract.step import Step
from ...core.errors import InvariantViolation
from ...core.handoff import Send, TransferOutcome, TransferState, WritePage
from ...core.handoff.messages import Ack, Page
from ...core.scheduler.engine import CommitOutcome, LossOutcome
from ..actors.clock import call_at, until
from ..actors.device import Truth
from ..disaggregation.worker import HandoffPart
from .clock import HostClock
from .replica import Doom, FaultyReplica

DEATH = "transfer.peer_dies"
_DOOM = Doom(DEATH, FailureCause.WORKER_LOST, "the worker is gone")


class StampedMoves:
    """Events of an engine on their way to its sinks: what a handoff does is timed by a monotonic clock, the log by the host's.

    Set `clock` when there is one.
    """

    def __init__(self, sink: EventSink) -> None:
        self.clock = HostClock()
        self._sink = sink

    def __call__(self, event: Event) -> None:
        if isinstance(event, HandoffMoved | Aborted) and not self.clock.is_true:
            event = replace(event, now_ns=self.clock.stamp(event.now_ns))
        self._sink(event)


class FaultyWorker(HandoffPart, FaultyReplica):
    """`is_dead`: nothing that it sends leaves, nothing that is sent to it arrives."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.is_dead = False
        self._is_dying = False  # it is dead, and is yet to find out

    # -- death --------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """At once, whatever it is doing. The other engines are told later, and a new worker comes in its place."""
        if self.is_dead:
            return
        now_ns = self.env.now
        self.ledger.note(DEATH, now_ns)
        self.is_dead = self._is_dying = True
        call_at(
            self.env,
            now_ns + round(self.ledger.plan.transfer.peer_dies.notice_s * 1e9),
            self.cluster.tell_of_death,
            self,
        )
        self._wake(True)

    def peer_is_lost(self, name: str) -> None:
        self.side.peer_lost(name, self.now_ns)
        self.carry_out()

    def _doom_of(self, step: Step) -> Doom | None:
        return _DOOM if self._is_dying else super()._doom_of(step)

    def _away_s(self, doom: Doom) -> float:
        return self.ledger.plan.transfer.peer_dies.restart_s if doom is _DOOM else super()._away_s(doom)

    def _lost(self, outcome: LossOutcome, restarted: bool) -> None:
        if restarted:
            self.is_dead = True
            return
        ended = CommitOutcome(outcome.finished, ())
        if self.is_prefill:
            self.side.committed(ended, self.now_ns)
        else:
            self.side.committed(self.now_ns)
        self.carry_out()

    def _before_resume(self, restarted: bool) -> None:
        if restarted:
            self.incarnation += 1
            self.is_dead = self._is_dying = False
            self.side.worker_lost(self.incarnation, self.now_ns)
            self.carry_out()

    def _wait_for_work(self) -> Generator[simpy.Event, None, None]:
        if not self._is_dying:
            yield from super()._wait_for_work()
            return
        # It was idle when it died.
        yield until(self.env, self.env.now + round(self._away_s(_DOOM) * 1e9))
        self._before_resume(True)
        self.engine.resume(self._stamp(self.env.now), restarted=True)
        self._recount()
        self._cpu_free_ns = self._device_free_ns = self.env.now
        self.ledger.last_ns = self.env.now

    def _tick(self, at_ns: int) -> None:
        if not self.is_dead:
            super()._tick(at_ns)
        elif at_ns == self._tick_at_ns:
            self._tick_at_ns = None

    # -- clients ------------------------------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> None:
        if self.is_prefill:
            super().cancel(request_id)
        else:
            self.withdraw(request_id)

    def _where(self, request_id: str) -> str:
        transfer = self.side.state_of(request_id) if self.is_prefill else None
        if transfer is not None:
            return f"transfer {transfer.value}"
        if self.engine.state_of(request_id) is None and self.cluster.decoder_of(request_id) is not None:
            state = self.cluster.decoder_of(request_id).engine.state_of(request_id)
            return super()._where(request_id) if state is None else f"{state.value}, handed over"
        return super()._where(request_id)

    # -- what is promised ---------------------------------------------------------------------------------------------

    def _expect(self, request_id: str, truth: Truth) -> None:
        super()._expect(request_id, truth)
        self.witness.expected_output.setdefault(request_id, truth.output_len)

    def _send(self, action: Send) -> None:
        message = action.message
        if type(message) is Ack and message.key.request_id in self.witness.just_joined:
            self.witness.just_joined.discard(message.key.request_id)
            self.cluster.witness.joined(action.peer, message.key, self.env.now)
        super()._send(action)

    def _pages_read(self, pages: list[Page], row: int, epoch: int) -> None:
        store = self.engine.store
        if self.is_prefill and pages[0].key.generation == self.side.generation:
            kept = store.is_held_row(row) and int(store.table.epochs[row]) == epoch
            self.promises.check(
                "pages_kept", kept, self.env.now, f"row {row} of {pages[0].key} was given away while it was read"
            )
        super()._pages_read(pages, row, epoch)

    def _write_page(self, action: WritePage) -> None:
        store = self.engine.store
        kept = store.table.is_held(action.row) and int(store.table.epochs[action.row]) == action.epoch
        self.promises.check(
            "pages_kept", kept, self.env.now, f"row {action.row} of {action.page.key} was given away before KV came"
        )

    def _transfer_over(self, outcome: TransferOutcome) -> None:
        super()._transfer_over(outcome)
        gone = outcome.state is not TransferState.COMPLETED and self.engine.state_of(outcome.request_id) is None
        if not self.is_prefill and gone:
            self.witness.expected_output.pop(outcome.request_id, None)

    def _recount(self) -> None:
        super()._recount()
        try:
            self.side.check()
        except InvariantViolation as violation:
            self.promises.check("books_agree", False, self.env.now, str(violation))

    @property
    def left_over(self) -> str:
        if not self.side.is_idle:
            return f"{self.side.num_in_flight} transfers are not over"
        return super().left_over
