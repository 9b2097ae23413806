"""The requests of one engine, as its log tells of them: arrivals, the queue, admissions, transfers, ends."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.scheduler.rules import ServerRules
from .findings import Tally
from .rows import AuditedRows, AuditedStep


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An accepted request that has not ended. `emitted`, `first_ns` and `last_ns` are those before
    its last admission."""

    request_id: str
    arrival: int
    priority: int
    prompt_len: int
    max_tokens: int
    submit_ns: int
    row: int = 0  # 0: it waits
    emitted: int = 0
    may_know_first: bool = False  # its prefill may end with a token that was delivered already
    first_ns: int = -1
    last_ns: int = -1
    prefill_len: int = 0
    computed: int = 0
    transferring: bool = False  # its KV is on its way to another engine, or from one
    arrived: bool = False  # its KV has come from another engine
    cap: int = 0  # that of its last row, if tokens came to it while it waits


class AuditedRequests:
    """Holds which requests live, which of them wait, and which row each has. `context_len`: the limit of prompt and
    output together, None if the log does not say. `rules`: where a
    retracted request waits, and whether it gets its tokens of a step in flight."""

    def __init__(self, role: str, context_len: int | None, tally: Tally, rules: ServerRules) -> None:
        self.role = role
        self._rules = rules
        self._late: dict[int, LiveRequest] = {}  # row -> the retracted request to which tokens are still to come
        self._places = 0  # given out in the queue
        self.context_len = context_len
        self.tally = tally
        self.live: dict[str, LiveRequest] = {}
        self.rows = AuditedRows()
        self.now_ns = -1
        self.num_submitted = 0
        self.num_waiting = 0
        self.out_of_order: set[str] = set()  # may enter before their turn, since a step failed
        self.aborted_rows: dict[int, str] = {}  # row -> the request that had it when it was aborted
        # priority -> heap of (arrival, id), some of which wait no longer
        self._waiting: dict[int, list[tuple[int, str]]] = {}
        self._held_rows: set[int] = set()  # a transfer may still read or write their slots

    # -- arrivals and departures ---------------------------------------------------------------------------------------

    def submit(self, data: Mapping[str, Any]) -> None:
        request = self._accept(data, data.get("refusal", ""))
        if request is not None:
            self._queue(request)

    def _accept(self, data: Mapping[str, Any], refusal: str) -> LiveRequest | None:
        """Return the request that a record submits; None if the engine refused it."""
        request_id = data["id"]
        if request_id in self.live:
            was = f"{request_id!r} is accepted while a live request has this id"
            self.tally.check("ENGINE-12", refusal, was, "a refusal")
        if refusal:
            return None
        prompt_len = _prompt_len(data["prompt"])
        if self.context_len is not None:
            was = f"{request_id!r} with a prompt of {prompt_len} tokens is accepted"
            should = f"a refusal: prompt and output are {self.context_len} tokens at most"
            self.tally.check("ENGINE-08", prompt_len < self.context_len, was, should)
        request = self._add(request_id, data.get("priority", 0), prompt_len, data["max_tokens"], data["ns"])
        request.emitted = _prompt_len(data["shown"]) if "shown" in data else 0
        request.may_know_first = request.emitted > 0
        return request

    def _add(self, request_id: str, priority: int, prompt_len: int, max_tokens: int, ns: int) -> LiveRequest:
        self.num_submitted += 1
        request = LiveRequest(request_id, self._next_place(), priority, prompt_len, max_tokens, ns)
        self.live[request_id] = request
        return request

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def _queue(self, request: LiveRequest) -> None:
        self.num_waiting += 1
        heapq.heappush(self._waiting.setdefault(request.priority, []), (request.arrival, request.request_id))

    def _remove(self, request: LiveRequest) -> None:
        del self.live[request.request_id]
        self.out_of_order.discard(request.request_id)
        if request.row:
            self.rows.close(request.row)
        else:
            self.num_waiting -= 1

    def abort(self, data: Mapping[str, Any]) -> None:
        request = self.live.get(data["id"])
        self.tally.holds("ENGINE-13")
        if request is not None:
            if request.row:
                self.aborted_rows[request.row] = request.request_id
            self._remove(request)

    def retract(
        self, request_ids: Iterable[str], keeps_place: bool = False, in_flight: Iterable[AuditedStep] = ()
    ) -> None:
        """Let running requests wait again. `keeps_place`: a failed step has taken them along."""
        for request_id in request_ids:
            request = self.live.get(request_id)
            if request is None or not request.row:
                state = "is not there" if request is None else "waits already"
                self.tally.flaw("ENGINE-02", f"{request_id!r} is retracted, and {state}", "only a running request is")
                continue
            self.tally.holds("ENGINE-02")
            row, epoch = request.row, int(self.rows.epoch[request.row])
            if self._rules.delivers_late_tokens and any(step.touches(row, epoch) for step in in_flight):
                self._late[row] = request
            else:
                self._leave(row, request)
            request.row = 0
            if self._rules.waits_at_tail and not keeps_place:
                request.arrival = self._next_place()
            self._queue(request)

    def _leave(self, row: int, request: LiveRequest) -> None:
        """Close a row; the request keeps what was delivered."""
        rows = self.rows
        request.emitted, request.cap = int(rows.emitted[row]), int(rows.cap[row])
        request.first_ns, request.last_ns = int(rows.first_ns[row]), int(rows.last_ns[row])
        rows.close(row)

    def settle_late(self) -> None:
        """Close the rows of retracted requests: no step in flight computes tokens for them any more."""
        for row, request in self._late.items():
            self._leave(row, request)
        self._late.clear()

    # -- admissions ----------------------------------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        row: int,
        epoch: int,
        cached: int,
        emitted: int,
        max_tokens: int,
        received: int = 0,
        loaded: int = 0,
    ) -> None:
        """Give a request its row. With `received` tokens of KV it decodes at once. `loaded` of the cached tokens come
        from host memory."""
        check = self.tally.check
        request = self.live.get(request_id)
        if received:
            was = f"{request_id!r} joins the batch with KV that was received, and has not arrived"
            arrived = request is not None and request.arrived
            check("HANDOFF-01", arrived, was, "all of it is here, and verified, first")
        elif request is not None and not request.row:
            self.tally.holds("ENGINE-02")
            self.num_waiting -= 1
            self._check_order(request)
        else:
            state = "is not there" if request is None else f"has row {request.row} already"
            self.tally.flaw("ENGINE-02", f"{request_id!r} is given row {row}, and {state}", "only a waiting request is")
            if request is not None:
                self.rows.close(request.row)
        if request is None:  # the log has lost its beginning
            request = self._add(request_id, 0, max(received or cached, 1), max_tokens, self.now_ns)
            request.emitted = emitted
        knows_first = not received and request.may_know_first and emitted == request.emitted - 1
        if request.emitted:
            was = f"{request_id!r} begins again with {emitted} tokens, {request.emitted} were delivered"
            check("ENGINE-03", emitted + knows_first == request.emitted, was, "what was delivered stays delivered")
        fits = max_tokens <= request.max_tokens
        fits = fits and (self.context_len is None or request.prompt_len + max_tokens <= self.context_len)
        was = f"{request_id!r} may have {max_tokens} tokens after a prompt of {request.prompt_len}"
        check("ACCEPT-11", fits, was, f"at most {request.max_tokens}, and {self.context_len} with the prompt")
        if received:
            self.rows.reach(row)
        else:
            self._take_row(request_id, row)
        was = f"row {row} is given away with epoch {epoch}, after {self.rows.epoch[row]}"
        should = "a greater one, so that what an older owner left is recognized"
        check("RELAY-03", epoch > self.rows.epoch[row], was, should)
        known = emitted + knows_first
        self.rows.open(row, epoch, request_id, known, max_tokens, request.first_ns, request.last_ns)
        self.rows.decoding[row], self.rows.knows_first[row] = bool(received), knows_first
        self.aborted_rows.pop(row, None)
        self.out_of_order.discard(request_id)
        request.row, request.computed, request.prefill_len = row, cached, request.prompt_len + emitted
        request.transferring = False
        if cached and not received:
            was = f"{request_id!r} starts with {cached} tokens cached of {request.prefill_len}"
            check("RADIX-13", loaded <= cached < request.prefill_len, was, "at least one is left to compute")

    def _take_row(self, request_id: str, row: int) -> None:
        self.rows.reach(row)
        was = f"row {row} is given to {request_id!r}, and {self.rows.owner[row]!r} has it"
        self.tally.check("ALLOC-06", not self.rows.alive[row], was, "a row has one request")
        if self._held_rows:
            was = f"row {row} is given to {request_id!r} while a transfer holds it"
            should = "a row that no transfer reads or writes"
            self.tally.check("HANDOFF-02", row not in self._held_rows, was, should)

    def _check_order(self, request: LiveRequest) -> None:
        """Check that no request of the same priority that came earlier still waits."""
        heap = self._waiting[request.priority]
        while heap:
            arrival, request_id = heap[0]
            other = self.live.get(request_id)
            if other is not None and other is not request and other.arrival == arrival and not other.row:
                if not self.out_of_order:
                    was = f"{request.request_id!r} enters before {request_id!r}, which came first"
                    in_order = arrival > request.arrival
                    self.tally.check("ENGINE-16", in_order, was, "first come, first served among equals")
                    if arrival < request.arrival:
                        heapq.heappop(heap)  # report it once
                return
            heapq.heappop(heap)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def handoff(self, data: Mapping[str, Any]) -> None:
        """Follow one move of a transfer between two engines."""
        move, row = data["move"], data.get("row", 0)
        if move == "role":
            is_empty = not self.live and not self._held_rows
            was = f"the role changes with {len(self.live)} requests live"
            self.tally.check("HANDOFF-10", is_empty, was, "an empty engine")
            self.role = data["detail"]
        elif move == "reserve":
            request = self._accept(data, "")
            self._take_row(request.request_id, row)
            request.row, request.transferring = row, True
            self._held_rows.add(row)
        elif move == "hold":
            self._held_rows.add(row)
        elif move == "release":
            was = f"row {row} is released by a transfer that does not hold it"
            self.tally.check("HANDOFF-02", row in self._held_rows, was, "a hold for each release")
            self._held_rows.discard(row)
        else:
            self._end_transfer(data)

    def _end_transfer(self, data: Mapping[str, Any]) -> None:
        """Follow KV that has arrived (`join`) or is with another engine (`end`), a failure on the way, or a move
        from a lost engine."""
        move, detail = data["move"], data.get("detail", "")
        request = self.live.get(data["id"])
        on_its_way = (
            request is not None and (request.transferring or (move == "end" and detail)) and not request.arrived
        )
        is_due = on_its_way or (request is not None and move == "move")
        was = f"{data['id']!r} comes to the end of a transfer ({move}) that it is not in"
        self.tally.check("HANDOFF-04", is_due, was, "one end for each transfer")
        if request is None:
            return
        if move == "join" and not detail:
            request.arrived = True
        else:
            self._remove(request)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def finish(self, finished: list[list[Any]], expected: dict[str, tuple[str, int]]) -> None:
        """Check the ends that a record names against those that its columns imply: id -> (reason, tokens)."""
        for request_id, reason, num_output in finished:
            request = self.live.get(request_id)
            if request is None:
                was = f"{request_id!r} ends ({reason}), and is not there"
                self.tally.flaw("ENGINE-02", was, "one end, the last of a request")
                continue
            self.tally.holds("ENGINE-02")
            self._check_end(request, reason, num_output, expected.pop(request_id, None))
            self._remove(request)
        for request_id, (reason, num_output) in expected.items():
            was = f"{request_id!r} has come to its {reason} with {num_output} tokens, and goes on"
            self.tally.flaw("ENGINE-02", was, f"it ends in this step, with {reason!r}")
            if request_id in self.live:
                self._remove(self.live[request_id])

    def _check_end(self, request: LiveRequest, reason: str, num_output: int, expected: tuple[str, int] | None) -> None:
        check, request_id, row = self.tally.check, request.request_id, request.row
        emitted, first_ns, last_ns = request.emitted, request.first_ns, request.last_ns
        if row:
            emitted, first_ns, last_ns = (
                int(column[row]) for column in (self.rows.emitted, self.rows.first_ns, self.rows.last_ns)
            )
        was = f"{request_id!r} ends with {num_output} tokens, the steps have delivered {emitted}"
        check("ACCEPT-12", num_output == emitted, was, "what is counted is what was delivered")
        if reason in ("stop", "length"):
            cap = int(self.rows.cap[row]) if row else request.cap
            if expected is None or expected[0] != reason:
                implied = f"come to its {expected[0]}" if expected else "come neither to a stop nor to its length"
                was = f"{request_id!r} ends with {reason!r} after {num_output} tokens of {cap}, and has {implied}"
                id = "ACCEPT-10" if reason == "stop" or expected else "ACCEPT-11"
                self.tally.flaw(id, was, "the first stop ends a request, else its length does")
            elif reason == "stop":
                self.tally.holds("ACCEPT-10")
            fits = num_output <= cap and (reason == "stop" or num_output == cap)
            check("ACCEPT-11", fits, f"{request_id!r} ends ({reason}) with {num_output} tokens of {cap}", "all of them")
        if first_ns >= 0:
            was = f"{request_id!r}: arrival {request.submit_ns} ns, first token {first_ns} ns, last {last_ns} ns, "
            was += f"end {self.now_ns} ns"
            check("SIM-03", request.submit_ns <= first_ns <= last_ns <= self.now_ns, was, "in this order")


def _prompt_len(prompt: Mapping[str, Any]) -> int:
    if "length" in prompt:
        return int(prompt["length"])
    if "tokens" in prompt:
        return len(prompt["tokens"])
    return sum(length for _, length in prompt["segments"])
