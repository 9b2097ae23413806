"""How requests come and go, as the metrics see it: which slot of the open requests they have, which row, when they are over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.contract.events import Aborted, HandoffMove, HandoffMoved, Planned, Resumed, StepsLost, Submitted
from ..core.contract.request import FinishReason
from .replica_metrics import ReplicaMetrics

if TYPE_CHECKING:
    from .metrics import RunMetrics

REFUSED = 0


class RequestLives:
    """Handlers of `RunMetrics` for the events of a request's life. What ends is noted in `_closing`."""

    def _submitted(self: RunMetrics, state: ReplicaMetrics, event: Submitted) -> None:
        request = event.request
        slot = self.open.open(request.request_id, state.number, event.now_ns, request.prompt.length, request.max_tokens)
        self.totals["submitted"] += 1
        if event.refusal:
            self._closing.append((slot, REFUSED, event.now_ns, 0))
            return
        state.slots[request.request_id] = slot
        self._wait(state, state.waiting + 1)

    def _aborted(self: RunMetrics, state: ReplicaMetrics, event: Aborted) -> None:
        slot = state.slots.pop(event.request_id, None)
        if slot is None:
            return
        if slot in state.awaited:
            del state.awaited[slot]
            if not self.handed.leaves_early(slot, state.number):
                self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        elif state.rows.pop(slot, None) is None:
            self._wait(state, state.waiting - 1)
            self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        elif state.config.get("role") == "prefill":
            self._running -= 1
            self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        else:
            self._running -= 1
            state.leaving.append((slot, event.now_ns))

    def _planned(self: RunMetrics, state: ReplicaMetrics, event: Planned) -> None:
        self._retracted(state, event.retracted)
        if event.step is not None:
            for join in event.step.joins:
                self._joined(state, join, event.now_ns)
            state.planned.append((event.num_held_slots, event.num_waiting))
        self._wait(state, event.num_waiting)
        held = int(event.num_held_slots)
        self._held += held - state.held
        state.held = held
        state.max_held = max(state.max_held, held)

    def _retracted(self: RunMetrics, state: ReplicaMetrics, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            slot = state.slots[request_id]
            if state.rows.pop(slot, None) is not None:  # else its KV has arrived, and no step has it yet
                self._running -= 1
            self.open.retractions[slot] += 1
            self.totals["retractions"] += 1

    def _joined(self: RunMetrics, state: ReplicaMetrics, join: Any, now_ns: int) -> None:
        request = join.request
        slot = state.slots[request.request_id]
        state.enter(slot, join.row)
        self._running += 1
        if self.open.first_scheduled_ns[slot] < 0:
            self.open.first_scheduled_ns[slot] = now_ns
            self.open.num_cached[slot] = join.num_cached
        if state.config.get("prefix_cache", True) and request.prompt.content_is_known:
            self.totals["looked_up_tokens"] += request.prompt.length + join.num_emitted
            self.totals["cached_tokens"] += join.num_cached

    def _wait(self: RunMetrics, state: ReplicaMetrics, waiting: int) -> None:
        self._waiting += waiting - state.waiting
        state.waiting = waiting

    def _lost(self: RunMetrics, state: ReplicaMetrics, event: StepsLost) -> None:
        for _ in event.step_ids:
            state.planned.popleft()
        self.totals["lost_steps"] += len(event.step_ids)
        self._settle_leaving(state)
        self._retracted(state, event.retracted)
        self._wait(state, state.waiting + len(event.retracted))
        for finished in event.finished:
            slot = state.slots.pop(finished.request_id)
            del state.rows[slot]
            self._running -= 1
            self._close(state, slot, finished.reason, event.now_ns, finished.num_output)

    def _resumed(self: RunMetrics, state: ReplicaMetrics, event: Resumed) -> None:
        self.totals["restarts"] += event.restarted
        self._retracted(state, event.retracted)
        self._wait(state, state.waiting + len(event.retracted))

    def _handed(self: RunMetrics, state: ReplicaMetrics, event: HandoffMoved) -> None:
        """A move of a handoff: a request that a decode worker reserves slots for is the one that its prefill worker has."""
        request = event.request
        if event.move is HandoffMove.ROLE:
            state.config = state.config | {"role": event.detail}
        elif event.move is HandoffMove.HOLD:
            self.handed.offered(event.request_id, state.slots[event.request_id], state.number)
        elif request is not None:
            name = request.request_id
            slot = self.handed.reserved(name, state.number)
            if slot is None:
                slot = self.open.open(name, state.number, event.now_ns, request.prompt.length, request.max_tokens)
                if self._hears_prefill_workers:
                    self.handed.leftover(slot)
                else:
                    self.totals["submitted"] += 1
            state.slots[name] = slot
            state.awaited[slot] = None
        elif event.move is HandoffMove.JOIN and event.row:
            del state.awaited[state.slots[event.request_id]]
        for finished in event.finished:
            slot = state.slots.pop(finished.request_id)
            if state.rows.pop(slot, None) is not None:
                self._running -= 1
            elif slot in state.awaited:
                # Its prefill worker has the last word on a request that has not joined.
                del state.awaited[slot]
                if self.handed.leaves_early(slot, state.number):
                    continue
            else:
                self._wait(state, state.waiting - 1)
            self._close(state, slot, finished.reason, event.now_ns, finished.num_output)

    @property
    def _hears_prefill_workers(self: RunMetrics) -> bool:
        return any(state.config.get("role") == "prefill" for state in self.replicas.values())

    def _close(self: RunMetrics, state: ReplicaMetrics, slot: int, reason: int, now_ns: int, num_output: int) -> None:
        """A worker is done with a request; so is the run, unless another one has it as well. Time and output −1: as they are counted."""
        if reason == FinishReason.TRANSFERRED:
            self.counts["transferred"] += 1
        ended = self.handed.ended(slot, state.number, (slot, int(reason), now_ns, num_output))
        if ended is not None:
            self._closing.append(ended)

    def _settle_leaving(self: RunMetrics, state: ReplicaMetrics) -> None:
        """Close the requests that were aborted since the last commit. The rounds of a running block that ended before still count
        for them, and are known only when it is committed."""
        for slot, now_ns in state.leaving:
            self._close(state, slot, FinishReason.ABORT, now_ns, -1)
        state.leaving.clear()
