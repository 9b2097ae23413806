"""The lives of requests as the metrics count them: their slots among the open requests, their rows, their ends."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ...core.contract.arrays import Int64Array
from ...core.contract.events import Aborted, HandoffMove, HandoffMoved, Planned, Resumed, StepsLost, Submitted
from ...core.contract.request import FinishedRequest, FinishReason
from ...core.contract.step import Join

# -- requests that two engines have -----------------------------------------------------------------------------------
# One engine computes the prompt, the other decodes. For the metrics they are one request:
#
#     prefill    submit ─── first token ───────── transferred
#     decode                     reserve ─── join ─────────────── end
#                one slot of the open requests, from submit to the last end
#
# The end that counts is the first one that is not a handover. The slot is closed when both engines are done with it:
# until then rounds may still deliver to it. A request whose decode engine was lost keeps its slot until it is submitted
# again, or the run ends.

Closing = tuple[int, int, int, int]  # slot, reason, time or −1, output or −1


class _Shared:
    def __init__(self, name: str, worker: int) -> None:
        self.name = name
        self.workers = [worker]
        self.verdict: Closing | None = None
        self.moved: Closing | None = None  # a lost engine's end of it: it goes on elsewhere, or has failed


class HandedRequests:
    """The requests that prefill engines have offered, and which engines have each."""

    def __init__(self) -> None:
        self._shared: dict[int, _Shared] = {}  # by slot
        self._slots: dict[str, int] = {}  # offered and not over: id → slot
        self._leftovers: set[int] = set()  # slots of copies whose request has ended; only asked

    def goes_on(self, name: str, worker: int, refused: bool) -> int | None:
        """Note that a request is submitted once more, as an engine was lost.
        Returns its slot; None if it is new, or a refused copy."""
        slot = self._slots.get(name)
        if slot is None or (refused and self._shared[slot].workers):
            return None
        self._shared[slot].workers, self._shared[slot].moved = [worker], None
        return slot

    def offered(self, name: str, slot: int, worker: int) -> None:
        """Note that a prefill engine holds the KV of this request for another engine, or that a lost engine had it."""
        if slot not in self._shared:
            self._shared[slot] = _Shared(name, worker)
            self._slots[name] = slot

    def reserved(self, name: str, worker: int) -> int | None:
        """Note that a decode engine has reserved KV slots.
        Returns the request's slot; None if it was not offered, or has ended."""
        slot = self._slots.get(name)
        if slot is not None:
            self._shared[slot].workers.append(worker)
        return slot

    def leftover(self, slot: int) -> None:
        """Mark a copy whose request has ended; it is not counted."""
        self._leftovers.add(slot)

    def leaves_early(self, slot: int, worker: int) -> bool:
        """Note that a decode engine gives a request up before it has joined.
        Returns whether another engine still has it."""
        shared = self._shared.get(slot)
        if shared is None or worker not in shared.workers[1:]:
            return False
        shared.workers.remove(worker)
        return bool(shared.workers)

    def ended(self, slot: int, worker: int, closing: Closing) -> Closing | None:
        """Note that an engine is done with a request. Returns its closing if no other engine has it, else None."""
        shared = self._shared.get(slot)
        if shared is None:
            return closing
        if worker in shared.workers:
            shared.workers.remove(worker)
        if closing[1] == FinishReason.MOVED:
            shared.moved = closing
        elif shared.verdict is None and closing[1] != FinishReason.TRANSFERRED:
            shared.verdict = closing
        if shared.workers or (shared.moved is not None and shared.verdict is None):
            return None
        del self._shared[slot], self._slots[shared.name]
        return shared.verdict or closing

    def take_moved(self) -> list[Closing]:
        """Return the closings of requests of lost engines that were not submitted again, as failures:
        the run is over."""
        closings = []
        for shared in list(self._shared.values()):
            if shared.moved is None or shared.workers:
                continue
            slot, _, now_ns, num_output = shared.moved
            closings.append((slot, int(FinishReason.ERROR), now_ns, num_output))
            del self._shared[slot], self._slots[shared.name]
        return closings

    def take_leftovers(self, slots: list[int]) -> list[int]:
        """Return those of `slots` that are not counted, and forget them."""
        found = [slot for slot in slots if slot in self._leftovers]
        self._leftovers.difference_update(found)
        return found


class GrowingColumn:
    """An array with room to spare at its end."""

    def __init__(self, dtype: type) -> None:
        self._values: np.ndarray = np.empty(1024, dtype=dtype)
        self._size = 0

    def extend(self, values: np.ndarray) -> None:
        end = self._size + len(values)
        if end > len(self._values):
            self._values = np.concatenate(
                [self._values[: self._size], np.empty(max(end, self._size), self._values.dtype)]
            )
        self._values[self._size : end] = values
        self._size = end

    @property
    def values(self) -> np.ndarray:
        """The values added so far; valid until the next `extend`."""
        return self._values[: self._size]


class OpenColumns(NamedTuple):
    """The columns of `OpenRequests`."""

    replica: Int64Array
    arrival_ns: Int64Array
    first_scheduled_ns: Int64Array
    first_token_ns: Int64Array
    last_token_ns: Int64Array
    prompt_len: Int64Array
    max_tokens: Int64Array
    num_cached: Int64Array
    num_output: Int64Array
    correct_drafts: Int64Array
    verify_rounds: Int64Array
    retractions: Int64Array


class OpenRequests:
    """One column entry (a *slot*) per open request; −1 is "not yet".
    Memory follows the greatest number open at once."""

    def __init__(self) -> None:
        self.capacity: int = 0
        self.ids: list[str] = []
        self._free: list[int] = []
        self._table: Int64Array = np.empty((len(OpenColumns._fields), 0), dtype=np.int64)
        self._grow(256)

    def open(self, request_id: str, replica: int, arrival_ns: int, prompt_len: int, max_tokens: int) -> int:
        if not self._free:
            self._grow(2 * self.capacity)
        slot = self._free.pop()
        self.ids[slot] = request_id
        self._table[:, slot] = (replica, arrival_ns, -1, -1, -1, prompt_len, max_tokens, 0, 0, 0, 0, 0)
        return slot

    def close(self, slots: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
        """Close the requests in `slots` int64 [n]; returns their ids, and their columns by name."""
        taken = self._table[:, slots]
        numbers = slots.tolist()
        ids = [self.ids[slot] for slot in numbers]
        self._free.extend(reversed(numbers))
        return ids, dict(zip(OpenColumns._fields, taken, strict=True))

    def _grow(self, capacity: int) -> None:
        table = np.full((len(OpenColumns._fields), capacity), -1, dtype=np.int64)
        table[:, : self.capacity] = self._table
        self._table = table
        self.columns: OpenColumns = OpenColumns(*table)
        self.ids.extend([""] * (capacity - self.capacity))
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity


REFUSED = 0


class ReplicaMetrics:
    """One engine between its events."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.config: dict[str, Any] = {}
        self.slots: dict[str, int] = {}  # open requests: id → slot
        self.rows: dict[int, int] = {}  # those with a row: slot → row
        self.awaited: dict[int, None] = {}  # slots of requests whose KV is still to arrive from a prefill worker
        self.arrived: dict[int, None] = {}  # slots of those whose KV has arrived, and that no step has yet
        self.leaving: list[tuple[int, int]] = []  # slot and time of running requests aborted since the last commit
        self.slot_of_row: Int64Array = np.zeros(64, dtype=np.int64)
        self.planned: deque[tuple[int, int]] = deque()  # per uncommitted step: held slots, waiting
        self.waiting = 0
        self.held = 0
        self.max_held = 0
        self.last_steps = -1
        self.busy_ns: int | None = None
        self._seen_rows: np.ndarray | None = None
        self._seen_slots = np.empty(0, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """KV slots of the pool; 0 if the engine's configuration is unknown."""
        return int(self.config.get("num_pages", 0) * self.config.get("page_size", 1))

    def enter(self, slot: int, row: int) -> None:
        if row >= len(self.slot_of_row):
            self.slot_of_row = np.concatenate([self.slot_of_row, np.zeros(row + 1, dtype=np.int64)])
        self.slot_of_row[row] = slot
        self.rows[slot] = row

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the slots of a decode batch. Steps share one array of rows while the batch stays the same."""
        if rows is not self._seen_rows:
            self._seen_rows, self._seen_slots = rows, self.slot_of_row[rows]
        return self._seen_slots


class RequestLives:
    """Takes the events of requests' lives, counts those that run and wait, and notes those that end in `closing`.

    `replicas`, `counts` and `totals` are those of the run's `Measurements`.
    """

    def __init__(self, replicas: dict[int, ReplicaMetrics], counts: dict[str, int], totals: dict[str, int]) -> None:
        self.open: OpenRequests = OpenRequests()
        self.running: int = 0
        self.waiting: int = 0
        self.held: int = 0
        self.closing: list[tuple[int, int, int, int]] = []  # slot, reason, time or −1, output or −1
        self._handed = HandedRequests()
        self._replicas = replicas
        self._counts = counts
        self._totals = totals

    def submitted(self, state: ReplicaMetrics, event: Submitted) -> None:
        request = event.request
        name = request.request_id
        slot = self._handed.goes_on(name, state.number, bool(event.refusal))
        if slot is None:
            arrived_ns = event.now_ns if request.arrived_ns is None else request.arrived_ns
            slot = self.open.open(name, state.number, arrived_ns, request.prompt.length, request.max_tokens)
            self._totals["submitted"] += 1
        if event.refusal:
            self._close(state, slot, REFUSED, event.now_ns, 0)
            return
        state.slots[name] = slot
        self._wait(state, state.waiting + 1)

    def aborted(self, state: ReplicaMetrics, event: Aborted) -> None:
        slot = state.slots.pop(event.request_id, None)
        if slot is None:
            return
        if slot in state.awaited:
            del state.awaited[slot]
            if not self._handed.leaves_early(slot, state.number):
                self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        elif slot in state.arrived:
            del state.arrived[slot]
            self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        elif state.rows.pop(slot, None) is None:
            self._wait(state, state.waiting - 1)
            self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        elif state.config.get("role") == "prefill":
            self.running -= 1
            self._close(state, slot, FinishReason.ABORT, event.now_ns, -1)
        else:
            self.running -= 1
            state.leaving.append((slot, event.now_ns))
            if not state.planned:  # no commit will come after which it has left
                self.close_leaving(state)

    def planned(self, state: ReplicaMetrics, event: Planned) -> None:
        self._retracted(state, event.retracted)
        if event.step is not None:
            for join in event.step.joins:
                self._joined(state, join, event.now_ns)
            state.planned.append((event.num_held_slots, event.num_waiting))
        self._wait(state, event.num_waiting)
        held = int(event.num_held_slots)
        self.held += held - state.held
        state.held = held
        state.max_held = max(state.max_held, held)

    def _retracted(self, state: ReplicaMetrics, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            slot = state.slots[request_id]
            if state.rows.pop(slot, None) is not None:
                self.running -= 1
            state.arrived.pop(slot, None)
            self.open.columns.retractions[slot] += 1
            self._totals["retractions"] += 1

    def _joined(self, state: ReplicaMetrics, join: Join, now_ns: int) -> None:
        request = join.request
        slot = state.slots[request.request_id]
        state.arrived.pop(slot, None)
        state.enter(slot, join.row)
        self.running += 1
        if self.open.columns.first_scheduled_ns[slot] < 0:
            self.open.columns.first_scheduled_ns[slot] = now_ns
            self.open.columns.num_cached[slot] = join.num_cached
        if state.config.get("prefix_cache", True) and request.prompt.content_is_known:
            self._totals["looked_up_tokens"] += request.prompt.length + join.num_emitted
            self._totals["cached_tokens"] += join.num_cached
            self._totals["loaded_tokens"] += join.num_loaded

    def _wait(self, state: ReplicaMetrics, waiting: int) -> None:
        self.waiting += waiting - state.waiting
        state.waiting = waiting

    def lost(self, state: ReplicaMetrics, event: StepsLost) -> None:
        for _ in event.step_ids:
            state.planned.popleft()
        self._totals["lost_steps"] += len(event.step_ids)
        self.close_leaving(state)
        self._retracted(state, event.retracted)
        self._wait(state, state.waiting + len(event.retracted))
        for finished in event.finished:
            self.finished(state, finished, event.now_ns)

    def finished(self, state: ReplicaMetrics, finished: FinishedRequest, now_ns: int) -> None:
        """Close a request that has ended; `now_ns` −1: when its last token was emitted. It may wait since a
        retraction, and get its last tokens from a step in flight (`ServerRules.delivers_late_tokens`)."""
        slot = state.slots.pop(finished.request_id)
        if state.rows.pop(slot, None) is not None:
            self.running -= 1
        self._close(state, slot, finished.reason, now_ns, finished.num_output)

    def resumed(self, state: ReplicaMetrics, event: Resumed) -> None:
        self._totals["restarts"] += event.restarted
        self._retracted(state, event.retracted)
        self._wait(state, state.waiting + len(event.retracted))

    def moved(self, state: ReplicaMetrics, event: HandoffMoved) -> None:
        """Take a move of a handoff. A request that a decode engine reserves slots for is the one that its
        prefill engine offered."""
        request = event.request
        if event.move is HandoffMove.ROLE:
            state.config = state.config | {"role": event.detail}
        elif event.move is HandoffMove.HOLD:
            self._handed.offered(event.request_id, state.slots[event.request_id], state.number)
        elif request is not None:
            name = request.request_id
            slot = self._handed.reserved(name, state.number)
            if slot is None:
                slot = self.open.open(name, state.number, event.now_ns, request.prompt.length, request.max_tokens)
                if self._hears_prefill_workers:
                    self._handed.leftover(slot)
                else:
                    self._totals["submitted"] += 1
            state.slots[name] = slot
            state.awaited[slot] = None
        elif event.move is HandoffMove.JOIN and event.row:
            slot = state.slots[event.request_id]
            del state.awaited[slot]
            state.arrived[slot] = None
        for finished in event.finished:
            slot = state.slots.pop(finished.request_id)
            if finished.reason is FinishReason.MOVED:
                self._handed.offered(finished.request_id, slot, state.number)
            if state.rows.pop(slot, None) is not None:
                self.running -= 1
            elif slot in state.arrived:
                del state.arrived[slot]
            elif slot in state.awaited:
                # A request that has not joined is ended by its prefill engine.
                del state.awaited[slot]
                if self._handed.leaves_early(slot, state.number):
                    continue
            else:
                self._wait(state, state.waiting - 1)
            self._close(state, slot, finished.reason, event.now_ns, finished.num_output)

    @property
    def _hears_prefill_workers(self) -> bool:
        return any(state.config.get("role") == "prefill" for state in self._replicas.values())

    def _close(self, state: ReplicaMetrics, slot: int, reason: int, now_ns: int, num_output: int) -> None:
        """Close a request that one engine is done with, unless another engine has it as well.
        Time and output −1: as they are counted."""
        if reason == FinishReason.TRANSFERRED:
            self._counts["transferred"] += 1
        ended = self._handed.ended(slot, state.number, (slot, int(reason), now_ns, num_output))
        if ended is not None:
            self.closing.append(ended)

    def close_leaving(self, state: ReplicaMetrics) -> None:
        """Close the requests that were aborted since the last commit.

        Rounds of a running block that ended before still count for them, and are known only when the block is
        committed.
        """
        for slot, now_ns in state.leaving:
            self._close(state, slot, FinishReason.ABORT, now_ns, -1)
        state.leaving.clear()

    def end_moved(self) -> None:
        """Close the requests of lost engines that no engine has taken up: the run is over."""
        self.closing += self._handed.take_moved()

    def take_closing(self) -> list[tuple[int, int, int, int]]:
        """Return the requests that have ended since the last call; copies are closed without being counted."""
        closing, self.closing = self.closing, []
        if leftovers := self._handed.take_leftovers([entry[0] for entry in closing]):
            self.open.close(np.array(leftovers))
            closing = [entry for entry in closing if entry[0] not in leftovers]
        return closing
