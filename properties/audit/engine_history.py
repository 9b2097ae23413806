"""One engine's history, as its log tells it: each record is checked against those before it.

Only what lives is kept: requests, rows, steps in flight. After a contradiction the history goes on from what the log
says, so that one contradiction does not cause others.

The checkers of the engine contract (`properties/engine/invariants/`) cannot be used here. They compare tokens,
slots and queues, of which a simulation's log has only counts. And an audit must go on after a contradiction, over
millions of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ForedraftError
from ...core.scheduler.rules import rules_from_json
from ...observe.decoding import MalformedRecord, decode_lens
from .findings import Tally
from .requests import AuditedRequests
from .rows import AuditedStep

Ends = dict[str, tuple[str, int]]
"""Request id -> (reason, tokens) of the ends that a step's result implies."""


class EngineHistory:
    """`config`: that of the engine's first record; a limit that it does not name is not checked. `candidates`: the
    numbers of steps that the engine may choose from, None if unknown."""

    def __init__(self, config: Mapping[str, Any], candidates: frozenset[int] | None, tally: Tally) -> None:
        self.tally = tally
        rules = rules_from_json(config, "the record of an engine", "config")
        self.requests = AuditedRequests(config.get("role", "both"), config.get("context_len"), tally, rules)
        self.rows = self.requests.rows
        self.candidates = candidates
        overlap = config.get("overlap")
        self.depth = None if overlap is None else 1 + bool(overlap)
        self.chunk_size = config.get("chunk_size")
        self.max_running = config.get("max_running")
        pages = config.get("num_pages")
        self.num_slots = None if pages is None else pages * config.get("page_size", 1)
        self.runs_may_exceed_steps = _runs_may_exceed_steps(config.get("algorithm"))
        self.in_flight: deque[AuditedStep] = deque()
        self._decode_rows: np.ndarray | None = None
        self._last_end_ns = -1
        self._last_step = 0
        self._awaits_resume = False
        self._followers = {
            "submit": self.requests.submit,
            "abort": self.requests.abort,
            "plan": self._plan,
            "commit": self._commit,
            "lost": self._lost,
            "resume": self._resume,
            "handoff": self.requests.handoff,
            # Requests from outside; their effects stand in the plans.
            "retract": lambda data: None,
            "deny": lambda data: None,
            "reload": lambda data: None,
        }

    def follow(self, kind: str, data: Mapping[str, Any]) -> bool:
        """Check a record. Returns whether its kind is audited.
        Raises MalformedRecord, or Python's error for a wrong type."""
        if "ns" in data:
            ns, last_ns = data["ns"], self.requests.now_ns
            self.tally.check("SIM-02", ns >= last_ns, f"{ns} ns, after {last_ns} ns", "the clock never goes back")
            self.requests.now_ns = ns
        follower = self._followers.get(kind)
        if follower is not None:
            follower(data)
        return follower is not None

    def end(self) -> None:
        for request_id in self.requests.live:
            self.tally.flaw(
                "ENGINE-02", f"request {request_id!r} never ends", "one end for each request that is accepted"
            )
        for launched in self.in_flight:
            should = "a commit, or a loss, for each step that is launched"
            self.tally.flaw("RELAY-07", f"step {launched.step} never ends", should)

    # -- plans ---------------------------------------------------------------------------------------------------------

    def _plan(self, data: Mapping[str, Any]) -> None:
        requests = self.requests
        requests.retract(data.get("retracted", ()), in_flight=self.in_flight)
        if data["step"] is not None:
            self._launch(data)
        waiting, held = data["waiting"], data["held"]
        should = f"{requests.num_waiting}: accepted, and neither running nor ended"
        self.tally.check("ENGINE-01", waiting == requests.num_waiting, f"{waiting} requests wait, by the plan", should)
        requests.num_waiting = waiting
        if self.num_slots is not None:
            should = f"0 to {self.num_slots}: the pool has no more"
            self.tally.check("ALLOC-01", 0 <= held <= self.num_slots, f"{held} slots are held", should)

    def _launch(self, data: Mapping[str, Any]) -> None:
        step, last = data["step"], self._last_step
        self.tally.check("RELAY-07", step == last + 1, f"step {step}, after step {last}", "the next number")
        self._last_step = step
        in_flight = len(self.in_flight) + 1
        if self.depth is not None and in_flight > self.depth:
            self.tally.flaw("RELAY-07", f"{in_flight} steps are in flight", f"at most {self.depth}")
        if self._awaits_resume:
            was = f"step {step} is planned behind lost ones"
            self.tally.flaw("RELAY-01", was, "`resume` first: the device is quiet")
        for row, epoch in data.get("released", ()):
            busy = next((launched.step for launched in self.in_flight if launched.touches(row, epoch)), None)
            was = f"row {row} (epoch {epoch}) is released while step {busy} is in flight"
            self.tally.check("RELAY-01", busy is None, was, "after the newest step that may touch it")
        for join in data.get("joins", ()):
            self.requests.admit(*join)
        planned = AuditedStep(step, data["ns"], [])
        if "prefill" in data:
            self._plan_prefill(data["prefill"], planned)
        if "decode" in data:
            self._plan_decode(data, planned)
        self.in_flight.append(planned)

    def _plan_prefill(self, chunks: list[list[int]], planned: AuditedStep) -> None:
        total = 0
        for row, start, length, last in chunks:
            total += length
            owner = self._running_owner(row, planned)
            if owner is None:
                continue
            request, stop = self.requests.live[owner], start + length
            follows = start == request.computed and length >= 1 and (stop == request.prefill_len) == bool(last)
            was = f"{owner!r} computes positions {start} to {stop}{' as the last ones' if last else ''}"
            should = f"from {request.computed} on, the last ones end at {request.prefill_len}"
            self.tally.check("ENGINE-14", follows, was, should)
            request.computed = stop
            self.rows.decoding[row] = bool(last)
            planned.prefill.append((row, int(self.rows.epoch[row]), bool(last)))
        if self.chunk_size is not None:
            was = f"{total} prefill tokens in step {planned.step}"
            self.tally.check("ENGINE-05", total <= self.chunk_size, was, f"at most {self.chunk_size}")
        if len({chunk[0] for chunk in planned.prefill}) != len(planned.prefill):
            was = f"step {planned.step} has two chunks of one row"
            self.tally.flaw("ENGINE-05", was, "each request at most once")

    def _running_owner(self, row: int, planned: AuditedStep) -> str | None:
        """Return the request that has the row. If none has it, the step that is planned with it is a flaw."""
        owner = self.rows.owner[row] if 0 <= row < len(self.rows.owner) else None
        if owner is None:
            aborted = self.requests.aborted_rows.get(row)
            whose = f"belongs to {aborted!r}, which was aborted" if aborted else "belongs to no request"
            was = f"step {planned.step} is planned with row {row}, which {whose}"
            self.tally.flaw("ENGINE-13" if aborted else "ENGINE-02", was, "a running request")
        return owner

    def _plan_decode(self, data: Mapping[str, Any], planned: AuditedStep) -> None:
        step, check, flaw = planned.step, self.tally.check, self.tally.flaw
        rows = self._read_decode_rows(data["decode"], step)
        if self.rows.decoding[rows].all():
            self.tally.holds("ENGINE-02")
        else:
            self._report_early_rows(rows, planned)
        if planned.prefill:
            both = set(rows.tolist()).intersection(row for row, _, last in planned.prefill if not last)
            check("ENGINE-05", not both, f"rows {sorted(both)} are in both parts of step {step}", "in one")
        draft_steps, max_rounds = data["S"], data["rounds"]
        if self.candidates is not None:
            is_candidate = draft_steps in self.candidates
            check("STEPS-01", is_candidate, f"{draft_steps} steps in step {step}", f"one of {sorted(self.candidates)}")
        multi_steps = sum(other.max_rounds > 1 for other in self.in_flight) + (max_rounds > 1)
        if max_rounds < 1 or (planned.prefill and max_rounds > 1) or multi_steps > 1:
            was = f"step {step} may run {max_rounds} rounds, {multi_steps} steps in flight may run more than one"
            flaw("SIM-12", was, "one multi-step in flight, none beside a prefill")
        planned.rows, planned.epochs = rows, self.rows.epoch[rows]
        planned.width = max(data["nd"], draft_steps + 1) if self.runs_may_exceed_steps else draft_steps + 1
        planned.row_nodes = np.array(data["row_nodes"], np.int64) if "row_nodes" in data else None
        planned.max_rounds = max_rounds
        planned.budget = data.get("budget")

    def _read_decode_rows(self, decode: list[int] | str, step: int) -> np.ndarray:
        """Return the rows of a decode step; "=" stands for those of the one before."""
        if decode == "=":
            if self._decode_rows is None:
                raise MalformedRecord('"decode" is "=", but this engine has no earlier decode step')
            return self._decode_rows
        rows = self._decode_rows = np.array(decode, dtype=np.int64)
        if rows.ndim != 1 or (rows < 0).any():
            raise MalformedRecord(f'"decode" is {decode!r}, expected row numbers')
        self.rows.reach(int(rows.max(initial=0)))
        differ = len(np.unique(rows)) == len(rows)
        self.tally.check("ENGINE-05", differ, f"step {step} decodes a row twice", "each request at most once")
        if self.max_running is not None and len(rows) > self.max_running:
            self.tally.flaw("ENGINE-05", f"{len(rows)} rows in step {step}", f"at most {self.max_running}")
        return rows

    def _report_early_rows(self, rows: np.ndarray, planned: AuditedStep) -> None:
        """Report rows that decode without an owner, or before their prompt is computed: once for each owner."""
        for row in rows[~self.rows.decoding[rows]].tolist():
            if self.rows.reported[row]:
                continue
            self.rows.reported[row] = True
            if (owner := self._running_owner(row, planned)) is not None:
                was = f"{owner!r} decodes in step {planned.step}, before its prompt is computed"
                self.tally.flaw("ENGINE-02", was, "only after the last chunk")

    # -- results -------------------------------------------------------------------------------------------------------

    def _commit(self, data: Mapping[str, Any]) -> None:
        committed = self._take_committed(data["step"])
        if committed is None:
            return
        at = data["at"] if isinstance(data["at"], list) else [data["at"]]
        try:
            lens = self._read_lens(data, committed, len(at))
        except MalformedRecord as error:
            # Each record can be read by itself; that they do not belong together is the contradiction.
            was = f"the result of step {committed.step} is that of another one: {error}"
            self.tally.flaw("RELAY-07", was, "its own")
            self.requests.finish(data.get("finished", ()), {})
            return
        first_end, last_end = at[0], sum(at)
        if max(committed.ns, self._last_end_ns) <= first_end <= last_end <= data["ns"] and min(at) >= 0:
            self.tally.holds("SIM-02")
        else:
            was = (
                f"step {committed.step}, planned at {committed.ns} ns, ends its rounds at {at} (differences after the "
            )
            was += f"first), and is committed at {data['ns']} ns"
            should = f"each after the one before, and after {self._last_end_ns} ns, where the step before ended"
            self.tally.flaw("SIM-02", was, should)
        self._last_end_ns = max(self._last_end_ns, last_end)
        ends: Ends = {}
        for row, _ in data.get("failures", ()):
            self._fail(row, committed, lens, ends)
        self._deliver_first(data, committed, last_end, ends)
        if lens is not None:
            self._deliver_rounds(data, committed, lens, first_end, last_end, ends)
        self.requests.settle_late()
        if "finished" in data or ends:
            self.requests.finish(data.get("finished", ()), ends)

    def _read_lens(self, data: Mapping[str, Any], committed: AuditedStep, num_times: int) -> np.ndarray | None:
        """Return the accept lengths [rounds, bs] of a result.
        Raises MalformedRecord if they are not those of this step."""
        has_rounds = "rounds" in data
        if has_rounds != (committed.rows is not None):
            raise MalformedRecord("decode rounds, of a step without any" if has_rounds else "no decode rounds")
        rounds = data["rounds"] if has_rounds else 1
        if num_times != rounds:
            raise MalformedRecord(f"{num_times} end times, expected {rounds}, one for each round")
        return decode_lens(data["lens"], rounds, len(committed.rows)) if has_rounds else None

    def _take_committed(self, step: int) -> AuditedStep | None:
        """Take the step out of flight, and all before it. Returns None if it is not in flight."""
        if self.in_flight and self.in_flight[0].step == step:
            self.tally.holds("RELAY-07")
            return self.in_flight.popleft()
        known = [launched.step for launched in self.in_flight]
        self.tally.flaw("RELAY-07", f"a result of step {step}, in flight are {known}", "the oldest one's, once")
        if step not in known:
            return None
        while self.in_flight[0].step != step:
            self.in_flight.popleft()
        return self.in_flight.popleft()

    def _fail(self, row: int, committed: AuditedStep, lens: np.ndarray | None, ends: Ends) -> None:
        """End the request of a row that the executor gave up. Of a multi-step, the rounds before the last one count."""
        rows = self.rows
        if row >= len(rows.owner) or not committed.touches(row, int(rows.epoch[row])) or not rows.alive[row]:
            return
        if lens is not None and committed.max_rounds > 1:
            column = int(np.flatnonzero(committed.rows == row)[0])
            rows.deliver(row, int(lens[:-1, column].sum()))
        ends[rows.owner[row]] = ("error", int(rows.emitted[row]))
        rows.alive[row] = False  # nothing more is delivered; the row is closed when the request ends

    def _deliver_first(self, data: Mapping[str, Any], committed: AuditedStep, end_ns: int, ends: Ends) -> None:
        """Deliver the first tokens of the prompts whose last chunk this step computed."""
        rows, stopped, tokens = self.rows, data.get("stopped", ()), data.get("first")
        if tokens is not None and len(tokens) != len(committed.prefill):
            raise MalformedRecord(f"{len(tokens)} first tokens, expected {len(committed.prefill)}, one for each chunk")
        for number, (row, epoch, last) in enumerate(committed.prefill):
            if not last or not rows.alive[row] or rows.epoch[row] != epoch:
                continue
            owner = rows.owner[row]
            if tokens is not None:
                was = f"token {tokens[number]} of {owner!r}"
                self.tally.check("RELAY-05", tokens[number] >= 0, was, "a token id")
            if not rows.knows_first[row]:
                rows.deliver(row, 1)
                rows.mark(row, end_ns, end_ns)
            emitted = int(rows.emitted[row])
            if number in stopped:
                ends[owner] = ("stop", emitted)
            elif emitted >= rows.cap[row]:
                ends[owner] = ("length", emitted)
            elif self.requests.role == "prefill":
                self.requests.live[owner].transferring = True
                rows.decoding[row] = False

    def _deliver_rounds(
        self,
        data: Mapping[str, Any],
        committed: AuditedStep,
        lens: np.ndarray,
        first_end: int,
        last_end: int,
        ends: Ends,
    ) -> None:
        rows, step, check = committed.rows, committed.step, self.tally.check
        if not 1 <= data["rounds"] <= committed.max_rounds:
            self.tally.flaw("SIM-12", f"{data['rounds']} rounds in step {step}", f"1 to {committed.max_rounds}")
        delivery = self.rows.deliver_rounds(rows, committed.epochs, lens, data.get("stops", ()))
        live_lens = lens if delivery.live.all() else lens[:, delivery.live]
        least, most = (int(live_lens.min()), int(live_lens.max())) if live_lens.size else (1, 1)
        was = f"a run of {most if most > committed.width else least} tokens in step {step}"
        should = f"1 to {committed.width}: the drafts and one more"
        check("ACCEPT-02", least >= 1 and most <= committed.width, was, should)
        if committed.budget is not None:
            self._check_budget(data, committed, lens, delivery.live)
        elif committed.row_nodes is not None:
            over = rows[delivery.live & (lens.max(axis=0) > committed.row_nodes)].tolist()
            check(
                "ACCEPT-02",
                not over,
                f"rows {over} of step {step} emit more tokens than they verify",
                "at most as many",
            )
        late = [self.rows.owner[row] for row in rows[delivery.went_on].tolist()]
        was = f"step {step} goes on for rounds after the end of {late}"
        check("SIM-12", not late, was, "a multi-step ends with the first request that does")
        self.rows.mark(rows[delivery.live], first_end, last_end)
        if "tokens" in data:
            self._check_tokens(np.array(data["tokens"], np.int64), lens, delivery.live, step)
        for column in np.flatnonzero(delivery.ended).tolist():
            row = int(rows[column])
            reason = "stop" if delivery.stopped[column] else "length"
            ends[self.rows.owner[row]] = (reason, int(self.rows.emitted[row]))

    def _check_budget(
        self, data: Mapping[str, Any], committed: AuditedStep, lens: np.ndarray, live: np.ndarray
    ) -> None:
        """Check the nodes that the device has chosen for the rows of a step."""
        step, check, rows = committed.step, self.tally.check, len(committed.rows)
        nodes = decode_lens(data["nodes"], len(lens), rows)
        most = committed.width if committed.row_nodes is None else committed.row_nodes
        drafts = int(nodes.sum(axis=1).max(initial=0)) - rows
        check("DRAFT-02", drafts <= committed.budget, f"{drafts} drafts in step {step}", f"at most {committed.budget}")
        is_reserved = bool(((nodes >= 1) & (nodes <= most)).all())
        check("DRAFT-03", is_reserved, f"rows of step {step} verify {nodes.tolist()} nodes", "1 to those reserved")
        over = committed.rows[live & (lens > nodes).any(axis=0)].tolist()
        check("ACCEPT-02", not over, f"rows {over} of step {step} emit more tokens than they verify", "at most as many")

    def _check_tokens(self, tokens: np.ndarray, lens: np.ndarray, live: np.ndarray, step: int) -> None:
        """Check the tokens of all runs, round after round and row after row;
        those of departed rows are not delivered."""
        if len(tokens) != lens.sum():
            raise MalformedRecord(f"{len(tokens)} tokens, expected {lens.sum()}, the sum of lens")
        delivered = tokens[np.repeat(np.tile(live, len(lens)), lens.ravel())]
        least = int(delivered.min(initial=0))
        self.tally.check("RELAY-05", least >= 0, f"token {least} is delivered by step {step}", "a token id")

    # -- failures ------------------------------------------------------------------------------------------------------

    def _lost(self, data: Mapping[str, Any]) -> None:
        known = [launched.step for launched in self.in_flight]
        lost = list(data["steps"])
        is_whole = bool(known) and lost == known and data["step"] == known[0]
        was = f"steps {lost} are lost, in flight are {known}"
        self.tally.check("RELAY-07", is_whole, was, "all that are in flight")
        self.in_flight.clear()
        self.requests.settle_late()
        self._awaits_resume = True
        self.requests.finish(data.get("finished", ()), {})
        self.requests.retract(data.get("retracted", ()), keeps_place=True)
        self.requests.out_of_order.update(data.get("retracted", ()))

    def _resume(self, data: Mapping[str, Any]) -> None:
        was = "resumed with steps in flight"
        self.tally.check("RELAY-01", not self.in_flight, was, "they are lost, or committed")
        self._awaits_resume = False
        self.requests.retract(data.get("retracted", ()), keeps_place=True)


def _runs_may_exceed_steps(algorithm: object) -> bool:
    """Return whether a run may be longer than steps + 1:
    of an algorithm without a limit of depth, or an unknown one."""
    try:
        return get_algorithm(str(algorithm)).drafter is Drafter.LOOKUP
    except ForedraftError:
        return True
