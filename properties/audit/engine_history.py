"""One engine's history, as its log tells it: every record is held against those before it.

Nothing is executed again: an engine that is not ours, and decides otherwise, is audited alike. What is kept is what is live: waiting
and running requests, rows, steps in flight. After a contradiction the log is believed, so that one does not drag others behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.algorithm.algorithm import Drafter
from ...core.algorithm.registry import get_algorithm
from ...core.errors import ForetokenError
from ...observe.encoding import MalformedRecord, decode_lens
from .findings import Tally
from .request_history import Life, RequestHistory
from .rows import Launched


class EngineHistory(RequestHistory):
    """`config`: what the engine's first record says; a limit that it does not say is not checked. `candidates`: the numbers of steps
    that it may choose from, None if nobody knows."""

    def __init__(
        self, replica: int, config: Mapping[str, Any], candidates: frozenset[int] | None, tally: Tally
    ) -> None:
        super().__init__(replica, config.get("role", "both"), config.get("context_len"), tally)
        self.candidates = candidates
        overlap = config.get("overlap")
        self.depth = None if overlap is None else 1 + bool(overlap)
        self.chunk_size = config.get("chunk_size")
        self.max_running = config.get("max_running")
        pages = config.get("num_pages")
        self.num_slots = None if pages is None else pages * config.get("page_size", 1)
        self.wide = _is_wide(config.get("algorithm"))
        self.flight: deque[Launched] = deque()
        self.num_tokens = 0
        self._decode_rows: np.ndarray | None = None
        self._told_rows: set[int] = set()  # decoded for nobody: said once, until somebody has the row
        self._last_end_ns = -1
        self._last_step = 0
        self._awaits_quiet = False
        self._follow = {
            "submit": self._submit,
            "abort": self._abort,
            "plan": self._plan,
            "commit": self._commit,
            "lost": self._lost,
            "resume": self._resume,
            "handoff": self._handoff,
            "retract": _nothing_to_check,
            "deny": _nothing_to_check,
        }

    def follow(self, kind: str, data: Mapping[str, Any]) -> bool:
        """Take a record in; says whether its kind is looked into. Raises MalformedRecord, or what Python says of a wrong type."""
        if "ns" in data:
            self._clock(data["ns"])
        follow = self._follow.get(kind)
        if follow is not None:
            follow(data)
        return follow is not None

    def end(self) -> None:
        """The run is over, and says that it is complete."""
        for life in self.live.values():
            self._flaw(
                "ENGINE-02", f"request {life.request_id!r} never ends", "one end for each request that is accepted"
            )
        for launched in self.flight:
            self._flaw(
                "RELAY-07", f"step {launched.step} never ends", "a commit, or a loss, for each step that is launched"
            )

    def _clock(self, ns: int) -> None:
        if ns < self._last_ns:
            self._flaw("SIM-02", f"{ns} ns, after {self._last_ns} ns", "the clock never goes back")
        else:
            self.tally.holds("SIM-02")
        self._last_ns = ns

    # -- plans ----------------------------------------------------------------------------------------------------------

    def _plan(self, data: Mapping[str, Any]) -> None:
        self._retract(data.get("retracted", ()))
        if data["step"] is not None:
            self._launch(data)
        if data["waiting"] != self.num_waiting:
            self._flaw(
                "ENGINE-01",
                f"{data['waiting']} requests wait, by the plan",
                f"{self.num_waiting}: accepted, and neither running nor ended",
            )
            self.num_waiting = data["waiting"]
        else:
            self.tally.holds("ENGINE-01")
        if self.num_slots is not None:
            if 0 <= data["held"] <= self.num_slots:
                self.tally.holds("ALLOC-01")
            else:
                self._flaw("ALLOC-01", f"{data['held']} slots are held", f"0 to {self.num_slots}: the pool has no more")

    def _launch(self, data: Mapping[str, Any]) -> None:
        step = data["step"]
        self._check(
            "RELAY-07", step == self._last_step + 1, f"step {step}, after step {self._last_step}", "the next number"
        )
        self._last_step = step
        in_flight = len(self.flight) + 1
        if self.depth is not None and in_flight > self.depth:
            self._flaw("RELAY-07", f"{in_flight} steps are in flight", f"at most {self.depth}")
        if self._awaits_quiet:
            self._flaw("RELAY-01", f"step {step} is planned behind lost ones", "first the device is quiet (`resume`)")
        for row, epoch in data.get("released", ()):
            busy = next((launched.step for launched in self.flight if launched.touches(row, epoch)), None)
            was = f"row {row} (epoch {epoch}) is released while step {busy} is in flight"
            self._check("RELAY-01", busy is None, was, "after the newest step that may touch it")
        for join in data.get("joins", ()):
            self._join(*join)
        launched = Launched(step, data["ns"], [])
        if "prefill" in data:
            self._plan_prefill(data["prefill"], launched)
        if "decode" in data:
            self._plan_decode(data, launched)
        self.flight.append(launched)

    def _join(
        self, request_id: str, row: int, epoch: int, cached: int, emitted: int, max_tokens: int, received: int = 0
    ) -> None:
        """A request takes a row with this step; with `received` tokens of KV it decodes at once."""
        life = self.live.get(request_id)
        if received:
            was = f"{request_id!r} joins the batch with KV that was received, and has not arrived"
            self._check("HANDOFF-01", life is not None and life.arrived, was, "all of it is here, and verified, first")
        elif life is not None and not life.row:
            self.tally.holds("ENGINE-02")
            self.num_waiting -= 1
            self._check_order(life)
        else:
            state = "is not there" if life is None else f"has row {life.row} already"
            self._flaw("ENGINE-02", f"{request_id!r} is given row {row}, and {state}", "only a waiting request is")
            if life is not None:
                self.rows.close(life.row)
        if life is None:
            # The log has lost its beginning.
            life = Life(request_id, self.num_submitted + 1, 0, max(received or cached, 1), max_tokens, self._last_ns)
            life.emitted = emitted
            self.num_submitted += 1
            self.live[request_id] = life
        if life.emitted:
            was = f"{request_id!r} begins again with {emitted} tokens, {life.emitted} were delivered"
            self._check("ENGINE-03", emitted == life.emitted, was, "what was delivered stays delivered")
        fits = max_tokens <= life.max_tokens
        fits = fits and (self.context_len is None or life.prompt_len + max_tokens <= self.context_len)
        was = f"{request_id!r} may have {max_tokens} tokens after a prompt of {life.prompt_len}"
        self._check("ACCEPT-11", fits, was, f"at most {life.max_tokens}, and {self.context_len} with the prompt")
        if received:
            self.rows.reach(row)
        else:
            self._take_row(request_id, row)
        was = f"row {row} is given away with epoch {epoch}, after {self.rows.epoch[row]}"
        self._check(
            "RELAY-03", epoch > self.rows.epoch[row], was, "a greater one: what an older owner left is told by it"
        )
        self.rows.open(row, epoch, request_id, emitted, max_tokens, life.first_ns, life.last_ns)
        self.rows.decoding[row] = bool(received)
        self._aborted_rows.pop(row, None)
        self._told_rows.discard(row)
        self._out_of_order.discard(request_id)
        life.row, life.computed, life.prefill_len = row, cached, life.prompt_len + emitted
        life.transferring = False
        if cached and not received:
            was = f"{request_id!r} starts with {cached} tokens cached of {life.prefill_len}"
            self._check("RADIX-13", cached < life.prefill_len, was, "at least one is left to compute")

    def _plan_prefill(self, chunks: list[list[int]], launched: Launched) -> None:
        total = 0
        for row, start, length, last in chunks:
            total += length
            owner = self._owner(row, launched)
            if owner is None:
                continue
            life = self.live[owner]
            ends = start + length == life.prefill_len
            if start == life.computed and length >= 1 and ends == bool(last):
                self.tally.holds("ENGINE-14")
            else:
                self._flaw(
                    "ENGINE-14",
                    f"{owner!r} computes positions {start} to {start + length}{' as the last ones' if last else ''}",
                    f"from {life.computed} on, the last ones end at {life.prefill_len}",
                )
            life.computed = start + length
            self.rows.decoding[row] = bool(last)
            launched.prefill.append((row, int(self.rows.epoch[row]), bool(last)))
        if self.chunk_size is not None:
            was = f"{total} prefill tokens in step {launched.step}"
            self._check("ENGINE-05", total <= self.chunk_size, was, f"at most {self.chunk_size}")
        rows = [chunk[0] for chunk in launched.prefill]
        if len(set(rows)) != len(rows):
            self._flaw("ENGINE-05", f"step {launched.step} has two chunks of one row", "each request at most once")

    def _owner(self, row: int, launched: Launched) -> str | None:
        """Who has the row; a step that is planned for nobody is a flaw."""
        owner = self.rows.owner[row] if 0 <= row < len(self.rows.owner) else None
        if owner is None:
            gone = self._aborted_rows.get(row)
            who = f"{gone!r}, which was aborted" if gone else "nobody"
            id = "ENGINE-13" if gone else "ENGINE-02"
            self._flaw(
                id, f"step {launched.step} is planned with row {row}, which belongs to {who}", "a running request"
            )
        return owner

    def _plan_decode(self, data: Mapping[str, Any], launched: Launched) -> None:
        if data["decode"] == "=":
            if self._decode_rows is None:
                raise MalformedRecord('"decode" is "=", but this engine has no earlier decode step')
            rows = self._decode_rows
        else:
            rows = self._decode_rows = np.array(data["decode"], dtype=np.int64)
            if rows.ndim != 1 or (rows < 0).any():
                raise MalformedRecord(f'"decode" is {data["decode"]!r}, expected row numbers')
            self.rows.reach(int(rows.max(initial=0)))
            alone = len(np.unique(rows)) == len(rows)
            self._check("ENGINE-05", alone, f"step {launched.step} decodes a row twice", "each request at most once")
            if self.max_running is not None and len(rows) > self.max_running:
                self._flaw("ENGINE-05", f"{len(rows)} rows in step {launched.step}", f"at most {self.max_running}")
        if self.rows.decoding[rows].all():
            self.tally.holds("ENGINE-02")
        else:
            for row in rows[~self.rows.decoding[rows]].tolist():
                if row in self._told_rows:
                    continue
                self._told_rows.add(row)
                if (owner := self._owner(row, launched)) is not None:
                    was = f"{owner!r} decodes in step {launched.step}, before its prompt is computed"
                    self._flaw("ENGINE-02", was, "the last chunk first")
        if launched.prefill:
            both = set(rows.tolist()).intersection(row for row, _, last in launched.prefill if not last)
            self._check(
                "ENGINE-05", not both, f"rows {sorted(both)} are in both parts of step {launched.step}", "in one"
            )
        steps, max_rounds = data["S"], data["rounds"]
        if self.candidates is not None:
            should = f"one of {sorted(self.candidates)}"
            if steps in self.candidates:
                self.tally.holds("STEPS-01")
            else:
                self._flaw("STEPS-01", f"{steps} steps in step {launched.step}", should)
        blocks = sum(other.max_rounds > 1 for other in self.flight) + (max_rounds > 1)
        if max_rounds < 1 or (launched.prefill and max_rounds > 1) or blocks > 1:
            was = f"step {launched.step} may run {max_rounds} rounds, {blocks} steps in flight may run more than one"
            self._flaw("SIM-12", was, "one block of rounds in flight, none beside a prefill")
        launched.rows, launched.epochs = rows, self.rows.epoch[rows]
        launched.width = max(data["nd"], steps + 1) if self.wide else steps + 1
        launched.max_rounds = max_rounds

    # -- results --------------------------------------------------------------------------------------------------------

    def _commit(self, data: Mapping[str, Any]) -> None:
        launched = self._committed(data["step"])
        if launched is None:
            return
        at = data["at"] if isinstance(data["at"], list) else [data["at"]]
        try:
            lens = self._lens_of(data, launched, len(at))
        except MalformedRecord as error:
            # Each record is sound by itself; that they do not belong together is what is found.
            self._flaw("RELAY-07", f"the result of step {launched.step} is that of another one: {error}", "its own")
            self._finish(data.get("finished", ()), {})
            return
        first_end, last_end = at[0], sum(at)
        if max(launched.ns, self._last_end_ns) <= first_end <= last_end <= data["ns"] and min(at) >= 0:
            self.tally.holds("SIM-02")
        else:
            self._flaw(
                "SIM-02",
                f"step {launched.step}, planned at {launched.ns} ns, ends its rounds at {at} (differences after the first), "
                f"and is committed at {data['ns']} ns",
                f"each after the one before, and after {self._last_end_ns} ns, where the step before ended",
            )
        self._last_end_ns = max(self._last_end_ns, last_end)
        ends: dict[str, tuple[str, int]] = {}
        for row, _ in data.get("failures", ()):
            self._fail(row, launched, lens, ends)
        self._deliver_first(data, launched, last_end, ends)
        if lens is not None:
            self._deliver_rounds(data, launched, lens, first_end, last_end, ends)
        if "finished" in data or ends:
            self._finish(data.get("finished", ()), ends)

    def _lens_of(self, data: Mapping[str, Any], launched: Launched, num_times: int) -> np.ndarray | None:
        """The accept lengths [rounds, bs] of a result; MalformedRecord if they are not those of this step."""
        has_rounds = "rounds" in data
        if has_rounds != (launched.rows is not None):
            raise MalformedRecord("decode rounds, of a step without any" if has_rounds else "no decode rounds")
        rounds = data["rounds"] if has_rounds else 1
        if num_times != rounds:
            raise MalformedRecord(f"{num_times} end times, expected {rounds}, one for each round")
        return decode_lens(data["lens"], rounds, len(launched.rows)) if has_rounds else None

    def _committed(self, step: int) -> Launched | None:
        """Take the step out of flight; None if the log commits what was not launched, or has been committed."""
        if self.flight and self.flight[0].step == step:
            self.tally.holds("RELAY-07")
            return self.flight.popleft()
        known = [launched.step for launched in self.flight]
        self._flaw("RELAY-07", f"a result of step {step}, in flight are {known}", "the oldest one's, once")
        if step not in known:
            return None
        while self.flight[0].step != step:
            self.flight.popleft()
        return self.flight.popleft()

    def _fail(self, row: int, launched: Launched, lens: np.ndarray | None, ends: dict[str, tuple[str, int]]) -> None:
        """The executor gave a row up: of a block of rounds, those before the last one count."""
        if (
            row >= len(self.rows.owner)
            or not launched.touches(row, int(self.rows.epoch[row]))
            or not self.rows.alive[row]
        ):
            return
        if lens is not None and launched.max_rounds > 1:
            column = int(np.flatnonzero(launched.rows == row)[0])
            self._deliver(row, int(lens[:-1, column].sum()))
        ends[self.rows.owner[row]] = ("error", int(self.rows.emitted[row]))
        self.rows.alive[row] = False  # nothing more is delivered; the row is closed with the request

    def _deliver(self, row: int, num_tokens: int) -> None:
        self.rows.emitted[row] += num_tokens
        self.num_tokens += num_tokens

    def _deliver_first(
        self, data: Mapping[str, Any], launched: Launched, end_ns: int, ends: dict[str, tuple[str, int]]
    ) -> None:
        """The first tokens of the prompts whose last chunk this step computed."""
        stopped, tokens = data.get("stopped", ()), data.get("first")
        if tokens is not None and len(tokens) != len(launched.prefill):
            raise MalformedRecord(f"{len(tokens)} first tokens, expected {len(launched.prefill)}, one for each chunk")
        for number, (row, epoch, last) in enumerate(launched.prefill):
            if not last or not self.rows.alive[row] or self.rows.epoch[row] != epoch:
                continue
            owner = self.rows.owner[row]
            if tokens is not None:
                self._check("RELAY-05", tokens[number] >= 0, f"token {tokens[number]} of {owner!r}", "a token id")
            self._deliver(row, 1)
            self.rows.mark(np.array([row]), end_ns, end_ns)
            emitted = int(self.rows.emitted[row])
            if number in stopped:
                ends[owner] = ("stop", emitted)
            elif emitted >= self.rows.cap[row]:
                ends[owner] = ("length", emitted)
            elif self.role == "prefill":
                self.live[owner].transferring = True
                self.rows.decoding[row] = False

    def _deliver_rounds(
        self,
        data: Mapping[str, Any],
        launched: Launched,
        lens: np.ndarray,
        first_end: int,
        last_end: int,
        ends: dict[str, tuple[str, int]],
    ) -> None:
        rows = launched.rows
        if not 1 <= data["rounds"] <= launched.max_rounds:
            self._flaw("SIM-12", f"{data['rounds']} rounds in step {launched.step}", f"1 to {launched.max_rounds}")
        settled = self.rows.settle(rows, launched.epochs, lens, data.get("stops", ()))
        live = settled.live
        self.num_tokens += int(settled.kept.sum())
        all_lens = lens
        if not live.all():
            lens = lens[:, live]
        if lens.size and (lens.min() < 1 or lens.max() > launched.width):
            worst = int(lens.max()) if lens.max() > launched.width else int(lens.min())
            was = f"a run of {worst} tokens in step {launched.step}"
            self._flaw("ACCEPT-02", was, f"1 to {launched.width}: the drafts and one more")
        else:
            self.tally.holds("ACCEPT-02")
        if settled.went_on.any():
            who = [self.rows.owner[row] for row in rows[settled.went_on].tolist()]
            was = f"step {launched.step} goes on for rounds after the end of {who}"
            self._flaw("SIM-12", was, "a block of rounds ends with the first request that does")
        else:
            self.tally.holds("SIM-12")
        self.rows.mark(rows[live], first_end, last_end)
        if "tokens" in data:
            self._check_tokens(np.array(data["tokens"], np.int64), all_lens, live, launched.step)
        for column in np.flatnonzero(settled.ended).tolist():
            row = int(rows[column])
            reason = "stop" if settled.stopped[column] else "length"
            ends[self.rows.owner[row]] = (reason, int(self.rows.emitted[row]))

    def _check_tokens(self, tokens: np.ndarray, lens: np.ndarray, live: np.ndarray, step: int) -> None:
        """`tokens` are those of all runs, round after round and row after row; what departed rows got, nobody is told."""
        if len(tokens) != lens.sum():
            raise MalformedRecord(f"{len(tokens)} tokens, expected {lens.sum()}, the sum of lens")
        delivered = tokens[np.repeat(np.tile(live, len(lens)), lens.ravel())]
        least = int(delivered.min(initial=0))
        self._check("RELAY-05", least >= 0, f"token {least} is delivered by step {step}", "a token id")

    # -- what goes wrong --------------------------------------------------------------------------------------------------

    def _lost(self, data: Mapping[str, Any]) -> None:
        known = [launched.step for launched in self.flight]
        lost = list(data["steps"])
        whole = bool(known) and lost == known and data["step"] == known[0]
        self._check("RELAY-07", whole, f"steps {lost} are lost, in flight are {known}", "all that are in flight")
        self.flight.clear()
        self._awaits_quiet = True
        for request_id, reason, num_output in data.get("finished", ()):
            self._finish([[request_id, reason, num_output]], {})
        self._retract(data.get("retracted", ()))
        self._out_of_order.update(data.get("retracted", ()))

    def _resume(self, data: Mapping[str, Any]) -> None:
        self._check("RELAY-01", not self.flight, "resumed with steps in flight", "they are lost, or committed")
        self._awaits_quiet = False
        self._retract(data.get("retracted", ()))


def _nothing_to_check(data: Mapping[str, Any]) -> None:
    """What somebody outside has asked for: what comes of it stands in the plans."""


def _is_wide(algorithm: object) -> bool:
    """Whether a run may be longer than steps + 1: an algorithm without a limit of depth, or one that is not known here."""
    try:
        return get_algorithm(str(algorithm)).drafter is Drafter.LOOKUP
    except ForetokenError:
        return True
