"""The lives of requests as the metrics count them: their slots among the open requests, and their ends. What each
engine did with them is in its account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.contract.account import AccountedRequest, EngineAccount, LifeChange, LifeState, LifeStep
from ...core.contract.arrays import Int64Array
from ...core.contract.events import Committed, Event, Planned
from ...core.contract.request import FinishReason, Request

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
    """One engine between its events. In its account the column of a request is its slot among the open requests."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.account: EngineAccount = EngineAccount()
        self.held = 0
        self.max_held = 0
        self.last_steps = -1
        self.busy_ns: int | None = None

    @property
    def capacity(self) -> int:
        """KV slots of the pool; 0 if the engine's configuration is unknown."""
        return int(self.account.config.get("num_pages", 0) * self.account.config.get("page_size", 1))


class RequestLives:
    """Opens and closes requests as the accounts of the engines tell, counts those that run and wait, and notes those
    that end in `closing`.

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

    def follow(self, state: ReplicaMetrics, changes: Sequence[LifeChange], event: Event) -> None:
        """Take what an event of an engine has changed."""
        for step, request, before in changes:
            if step is LifeStep.SUBMIT or step is LifeStep.REFUSE:
                self._submitted(state, request, step is LifeStep.REFUSE)
            elif step is LifeStep.ENTER:
                self._entered(state, request, event)
            elif step is LifeStep.RETRACT:
                self._retracted(request)
            elif step is LifeStep.RESERVE:
                self._reserved(state, request)
            elif step is LifeStep.HAND_OVER:
                self._handed.offered(request.request_id, request.column, state.number)
            elif step is LifeStep.END:
                self._ended(state, request, before, type(event) is Committed)

    def _submitted(self, state: ReplicaMetrics, accounted: AccountedRequest, is_refused: bool) -> None:
        request = accounted.request
        slot = self._handed.goes_on(request.request_id, state.number, is_refused)
        if slot is None:
            arrived_ns = accounted.arrival_ns if request.arrived_ns is None else request.arrived_ns
            slot = self._open(state, request, arrived_ns)
            self._totals["submitted"] += 1
        accounted.column = slot
        if is_refused:
            self._close(state, slot, REFUSED, accounted.end_ns, 0)

    def _retracted(self, accounted: AccountedRequest) -> None:
        self.open.columns.retractions[accounted.column] += 1
        self._totals["retractions"] += 1

    def _reserved(self, state: ReplicaMetrics, accounted: AccountedRequest) -> None:
        """Open a request for which a decode engine reserves slots: it is the one that its prefill engine offered."""
        slot = self._handed.reserved(accounted.request_id, state.number)
        if slot is None:
            slot = self._open(state, accounted.request, accounted.arrival_ns)
            if self._hears_prefill_workers:
                self._handed.leftover(slot)
            else:
                self._totals["submitted"] += 1
        accounted.column = slot

    def _open(self, state: ReplicaMetrics, request: Request, arrived_ns: int) -> int:
        length = request.prompt.length
        return self.open.open(request.request_id, state.number, arrived_ns, length, request.max_tokens)

    def _entered(self, state: ReplicaMetrics, accounted: AccountedRequest, event: Event) -> None:
        slot, join, prompt = accounted.column, accounted.join, accounted.request.prompt
        assert isinstance(event, Planned) and join is not None, "a step gives a row"
        if self.open.columns.first_scheduled_ns[slot] < 0:
            self.open.columns.first_scheduled_ns[slot] = event.now_ns
            self.open.columns.num_cached[slot] = join.num_cached
        if state.account.config.get("prefix_cache", True) and prompt.content_is_known:
            self._totals["looked_up_tokens"] += prompt.length + join.num_emitted
            self._totals["cached_tokens"] += join.num_cached
            self._totals["loaded_tokens"] += join.num_loaded

    def _ended(self, state: ReplicaMetrics, accounted: AccountedRequest, before: LifeState, in_commit: bool) -> None:
        """Close a request that has ended. One that a committed step has ended by stop or length ends with its last
        token."""
        slot, reason = accounted.column, accounted.reason
        assert reason is not None, "it has ended"
        if reason is FinishReason.MOVED:
            self._handed.offered(accounted.request_id, slot, state.number)
        if before is LifeState.EXPECTED and self._handed.leaves_early(slot, state.number):
            return  # a request that has not joined is ended by its prefill engine
        has_last_token = in_commit and reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._close(state, slot, reason, -1 if has_last_token else accounted.end_ns, accounted.num_output)

    @property
    def _hears_prefill_workers(self) -> bool:
        return any(state.account.role == "prefill" for state in self._replicas.values())

    def _close(self, state: ReplicaMetrics, slot: int, reason: int, now_ns: int, num_output: int) -> None:
        """Close a request that one engine is done with, unless another engine has it as well.
        Time and output −1: as they are counted."""
        if reason == FinishReason.TRANSFERRED:
            self._counts["transferred"] += 1
        ended = self._handed.ended(slot, state.number, (slot, int(reason), now_ns, num_output))
        if ended is not None:
            self.closing.append(ended)

    def end(self) -> None:
        """Close the requests that are leaving, and those of lost engines that no engine has taken up: the run is
        over."""
        for number in sorted(self._replicas):
            state = self._replicas[number]
            for _, request, before in state.account.end_leaving():
                self._ended(state, request, before, False)
        self.end_moved()

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
