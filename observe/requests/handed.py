"""Requests that two engines have: one computes the prompt, the other decodes. For the metrics they are one request.

```
prefill    submit ─── first token ───────── transferred
decode                     reserve ─── join ─────────────── end        one slot of the open requests, from submit to the last end
```

The end that counts is the first one that is not a handover; the slot is closed when both engines are done with it, because until then
rounds may still deliver to it. A request whose decode engine was lost keeps its slot until it is submitted again, or the run ends.
"""

from __future__ import annotations

from ...core.contract.request import FinishReason

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
        """Note that a request is submitted once more, as an engine was lost. Returns its slot; None if it is new, or a refused copy."""
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
        """Note that a decode engine has reserved KV slots. Returns the request's slot; None if it was not offered, or has ended."""
        slot = self._slots.get(name)
        if slot is not None:
            self._shared[slot].workers.append(worker)
        return slot

    def leftover(self, slot: int) -> None:
        """Mark a copy whose request has ended; it is not counted."""
        self._leftovers.add(slot)

    def leaves_early(self, slot: int, worker: int) -> bool:
        """Note that a decode engine gives a request up before it has joined. Returns whether another engine still has it."""
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
        """Return the closings of requests of lost engines that were not submitted again, as failures: the run is over."""
        moved = [shared for shared in self._shared.values() if shared.moved is not None and not shared.workers]
        closings = []
        for shared in moved:
            slot, _, now_ns, num_output = shared.moved
            closings.append((slot, int(FinishReason.ERROR), now_ns, num_output))
            del self._shared[slot], self._slots[shared.name]
        return closings

    def take_leftovers(self, slots: list[int]) -> list[int]:
        """Return those of `slots` that are not counted, and forget them."""
        found = [slot for slot in slots if slot in self._leftovers]
        self._leftovers.difference_update(found)
        return found
