"""The requests of one engine, as its log tells of them: arrivals, the queue, and how each ends."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .findings import Tally
from .rows import Rows


@dataclass(slots=True, eq=False)
class Life:
    """A live request. `row` 0: it waits. `emitted`, `first_ns` and `last_ns` are those before its last admission."""

    request_id: str
    arrival: int
    priority: int
    prompt_len: int
    max_tokens: int
    submit_ns: int
    row: int = 0
    emitted: int = 0
    first_ns: int = -1
    last_ns: int = -1
    prefill_len: int = 0
    computed: int = 0
    transferring: bool = False  # its KV is on its way to another engine, or from one
    arrived: bool = False  # … and is here


class RequestHistory:
    """Who is live, who waits, who has which row. `context_len`: what prompt and output may be together, None if nobody says."""

    def __init__(self, replica: int, role: str, context_len: int | None, tally: Tally) -> None:
        self.replica = replica
        self.role = role
        self.context_len = context_len
        self.tally = tally
        self.live: dict[str, Life] = {}
        self.rows = Rows()
        self.num_submitted = 0
        self.num_waiting = 0
        self._waiting: dict[
            int, list[tuple[int, str]]
        ] = {}  # priority -> heap of (arrival, id); may have some that are gone
        self._out_of_order: set[str] = set()  # to be tried before their turn, after a step that failed
        self._aborted_rows: dict[int, str] = {}  # row -> whose it was when it was aborted
        self._held_rows: set[int] = set()  # a transfer may still read or write their slots
        self._last_ns = -1

    def _flaw(self, id: str, was: str, should: str) -> None:
        self.tally.flaw(id, self.replica, was, should)

    def _check(self, id: str, holds: object, was: str, should: str) -> None:
        self.tally.check(id, self.replica, bool(holds), was, should)

    def _submit(self, data: Mapping[str, Any]) -> None:
        life = self._accept(data, data.get("refusal", ""))
        if life is not None:
            self._queue(life)

    def _accept(self, data: Mapping[str, Any], refusal: str) -> Life | None:
        """A request at the door: its life, if it is let in."""
        request_id = data["id"]
        if request_id in self.live:
            self._check(
                "ENGINE-12", refusal, f"{request_id!r} is accepted while a live request has this id", "a refusal"
            )
        if refusal:
            return None
        prompt_len = _prompt_len(data["prompt"])
        if self.context_len is not None and prompt_len + 1 > self.context_len:
            was = f"{request_id!r} with a prompt of {prompt_len} tokens is accepted"
            self._flaw("ENGINE-08", was, f"a refusal: prompt and output are {self.context_len} tokens at most")
        elif self.context_len is not None:
            self.tally.holds("ENGINE-08")
        self.num_submitted += 1
        life = Life(request_id, self.num_submitted, data.get("priority", 0), prompt_len, data["max_tokens"], data["ns"])
        self.live[request_id] = life
        return life

    def _queue(self, life: Life) -> None:
        self.num_waiting += 1
        heapq.heappush(self._waiting.setdefault(life.priority, []), (life.arrival, life.request_id))

    def _remove(self, life: Life) -> None:
        """The request has ended."""
        del self.live[life.request_id]
        self._out_of_order.discard(life.request_id)
        if life.row:
            self.rows.close(life.row)
        else:
            self.num_waiting -= 1

    def _abort(self, data: Mapping[str, Any]) -> None:
        life = self.live.get(data["id"])
        self.tally.holds("ENGINE-13")
        if life is not None:
            if life.row:
                self._aborted_rows[life.row] = life.request_id
            self._remove(life)

    def _retract(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            life = self.live.get(request_id)
            if life is None or not life.row:
                state = "is not there" if life is None else "waits already"
                self._flaw("ENGINE-02", f"{request_id!r} is retracted, and {state}", "only a running request is")
                continue
            self.tally.holds("ENGINE-02")
            row = life.row
            life.emitted = int(self.rows.emitted[row])
            life.first_ns, life.last_ns = int(self.rows.first_ns[row]), int(self.rows.last_ns[row])
            self.rows.close(row)
            life.row = 0
            self._queue(life)

    def _handoff(self, data: Mapping[str, Any]) -> None:
        """A move of a transfer between two engines."""
        move, row = data["move"], data.get("row", 0)
        if move == "role":
            idle = not self.live and not self._held_rows
            self._check("HANDOFF-10", idle, f"the role changes with {len(self.live)} requests live", "an empty engine")
            self.role = data["detail"]
        elif move == "reserve":
            life = self._accept(data, "")
            self._take_row(life.request_id, row)
            life.row, life.transferring = row, True
            self._held_rows.add(row)
        elif move == "hold":
            self._held_rows.add(row)
        elif move == "release":
            was = f"row {row} is released by a transfer that does not hold it"
            self._check("HANDOFF-02", row in self._held_rows, was, "a hold for each release")
            self._held_rows.discard(row)
        else:
            self._end_transfer(data)

    def _end_transfer(self, data: Mapping[str, Any]) -> None:
        """KV has arrived (`join`), or is with another engine (`end`); or the request fails on the way."""
        move, detail = data["move"], data.get("detail", "")
        life = self.live.get(data["id"])
        expected = life is not None and (life.transferring or (move == "end" and detail)) and not life.arrived
        was = f"{data['id']!r} comes to the end of a transfer ({move}) that it is not in"
        self._check("HANDOFF-04", expected, was, "one end for each transfer")
        if life is None:
            return
        if move == "join" and not detail:
            life.arrived = True
        else:
            self._remove(life)

    def _take_row(self, request_id: str, row: int) -> None:
        self.rows.reach(row)
        was = f"row {row} is given to {request_id!r}, and {self.rows.owner[row]!r} has it"
        self._check("ALLOC-06", not self.rows.alive[row], was, "a row has one request")
        if self._held_rows:
            was = f"row {row} is given to {request_id!r} while a transfer holds it"
            self._check("HANDOFF-02", row not in self._held_rows, was, "a row that no transfer reads or writes")

    def _finish(self, finished: list[list[Any]], expected: dict[str, tuple[str, int]]) -> None:
        """The ends that a record names, against those that its columns imply: id -> (reason, tokens)."""
        for request_id, reason, num_output in finished:
            life = self.live.get(request_id)
            if life is None:
                self._flaw(
                    "ENGINE-02", f"{request_id!r} ends ({reason}), and is not there", "one end, the last of a request"
                )
                continue
            self.tally.holds("ENGINE-02")
            self._check_end(life, reason, num_output, expected.pop(request_id, None))
            self._remove(life)
        for request_id, (reason, num_output) in expected.items():
            was = f"{request_id!r} has come to its {reason} with {num_output} tokens, and goes on"
            self._flaw("ENGINE-02", was, f"it ends in this step, with {reason!r}")
            if request_id in self.live:
                self._remove(self.live[request_id])

    def _check_end(self, life: Life, reason: str, num_output: int, expected: tuple[str, int] | None) -> None:
        request_id, row = life.request_id, life.row
        delivered = int(self.rows.emitted[row]) if row else life.emitted
        if num_output != delivered:
            self._flaw(
                "ACCEPT-12",
                f"{request_id!r} ends with {num_output} tokens, the steps have delivered {delivered}",
                "what is counted is what was delivered",
            )
        else:
            self.tally.holds("ACCEPT-12")
        if reason in ("stop", "length"):
            cap = int(self.rows.cap[row])
            if expected is None or expected[0] != reason:
                implied = f"come to its {expected[0]}" if expected else "come neither to a stop nor to its length"
                id = "ACCEPT-10" if reason == "stop" or expected else "ACCEPT-11"
                self._flaw(
                    id,
                    f"{request_id!r} ends with {reason!r} after {num_output} tokens of {cap}, and has {implied}",
                    "the first stop ends a request, else its length does",
                )
            elif reason == "stop":
                self.tally.holds("ACCEPT-10")
            fits = num_output <= cap and (reason == "stop" or num_output == cap)
            self._check(
                "ACCEPT-11", fits, f"{request_id!r} ends ({reason}) with {num_output} tokens of {cap}", "all of them"
            )
        first_ns = int(self.rows.first_ns[row]) if row else life.first_ns
        last_ns = int(self.rows.last_ns[row]) if row else life.last_ns
        if first_ns >= 0:
            if life.submit_ns <= first_ns <= last_ns <= self._last_ns:
                self.tally.holds("SIM-03")
            else:
                self._flaw(
                    "SIM-03",
                    f"{request_id!r}: arrival {life.submit_ns} ns, first token {first_ns} ns, last {last_ns} ns, "
                    f"end {self._last_ns} ns",
                    "in this order",
                )

    def _check_order(self, life: Life) -> None:
        heap = self._waiting[life.priority]
        while heap:
            arrival, request_id = heap[0]
            other = self.live.get(request_id)
            if other is not None and other is not life and other.arrival == arrival and not other.row:
                if not self._out_of_order:
                    was = f"{life.request_id!r} enters before {request_id!r}, which came first"
                    should = "first come, first served among equals"
                    self._check("ENGINE-16", arrival > life.arrival, was, should)
                    if arrival < life.arrival:
                        heapq.heappop(heap)  # said once
                return
            heapq.heappop(heap)


def _prompt_len(prompt: Mapping[str, Any]) -> int:
    if "length" in prompt:
        return int(prompt["length"])
    if "tokens" in prompt:
        return len(prompt["tokens"])
    return sum(length for _, length in prompt["segments"])
