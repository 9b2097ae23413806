"""Reads the lines of a run's log, one after the other, into plain lists: who got which tokens and when, and what every
step did.

The log's format is that of `events.jsonl` (docs/simulate.md). Nothing is taken from the engine, the metrics or the
device that wrote the log. A row's request, its length and its end are worked out from joins, accept lengths, stops and
caps, one row at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

DIGITS = {digit: n for n, digit in enumerate("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")}
COMPLETED = ("stop", "length")
KINDS = ("engine", "submit", "handoff", "abort", "plan", "commit", "lost", "resume")  # of the records that are read


@dataclass(slots=True)
class SimulatedLife:
    """One request, whichever engines had it."""

    id: str
    replica: int
    prompt: int
    max_tokens: int
    arrival_ns: int
    segments: tuple[tuple[int, int], ...] = ()  # (id, tokens) of a prompt of which more than its length is known
    emissions: list[tuple[int, int]] = field(default_factory=list)  # (time in ns, tokens)
    accepted: list[tuple[int, int, int]] = field(default_factory=list)  # (output position, steps, accept length)
    retractions: int = 0
    running_ns: list[list[int]] = field(default_factory=list)  # [from, to] of each time that it had a row
    end: str = ""  # stop, length, error, abort, refused; while lines are read also moved, until another engine goes on
    end_ns: int = -1  # when the engine took its end
    cap: int = 0
    joined_ns: int = -1  # where prefill and decode are apart: when its KV had arrived, and where
    joined_at: int = -1
    last_chunk: int = 0  # tokens that the step computed that gave the first token

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.emissions)


@dataclass(slots=True)
class SimulatorRow:
    """A row of a device, from a join on; it goes on as the device sees it, also when its request has
    left the engine."""

    id: str
    kv: int
    cap: int
    emitted: int
    is_over: bool = False


@dataclass(slots=True)
class StepDone:
    """A step from its plan to its commit. `kv`, `emitted`:
    per round, as the device had them, rows that had ended included."""

    replica: int
    number: int
    planned_ns: int
    chunks: list[tuple[int, int, int, int]]  # row, start, length, is last
    decode: tuple[int, ...] | None
    steps: int
    topk: int  # 0: the draft is parked
    nodes: int
    joins: list[list[Any]]
    ends_ns: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    verified: int = 0  # rows × rounds that still belonged to their request
    correct: list[int] = field(default_factory=list)  # drafts of each
    delivered: list[int] = field(default_factory=list)  # tokens per round


def _is_parked(record: Mapping[str, Any]) -> bool:
    """Return whether the draft was parked in a planned step."""
    return record.get("parked", False) or record.get("k") == 0


@dataclass(slots=True)
class Got:
    """Tokens that a round of an engine gave a request. `is_last`: there it gets no more."""

    replica: int
    id: str
    ns: int
    tokens: int
    is_last: bool = False


class SimulatorLedger:
    """`lives` in the order of arrival, `steps` in that of commits.

    `moments`: per replica ("plan", step), ("commit", step), ("lost", time in ns) where the oldest step fails, and
    ("reset", time in ns) where an engine goes on after that.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.lives: dict[str, SimulatedLife] = {}
        self.refused: list[SimulatedLife] = []
        self.steps: list[StepDone] = []
        self.configs: dict[int, dict[str, Any]] = {}
        self.held: dict[int, list[tuple[int, int]]] = {}  # per replica: (from, slots)
        self.got: list[Got] = []  # of each engine in the order in which its process sends them
        self.retractions = 0
        self.moments: dict[int, list[tuple[str, Any]]] = {}
        self.last_ns = 0
        self._rows: dict[tuple[int, int], SimulatorRow] = {}
        self._row_of: dict[tuple[int, str], int] = {}
        self._flights: dict[int, list[StepDone]] = {}
        self._decode: dict[int, tuple[int, ...]] = {}
        self._leaving: dict[int, list[str]] = {}
        handlers = {kind: getattr(self, f"_{kind}") for kind in KINDS}
        for line in lines:
            record = json.loads(line)
            self.last_ns = max(self.last_ns, record.get("ns", 0))
            take = handlers.get(record["t"])
            if take is not None:
                take(record["r"], record)
        for life in self.lives.values():
            life.end = "error" if life.end == "moved" else life.end

    @property
    def completed(self) -> list[SimulatedLife]:
        return [life for life in self.lives.values() if life.end in COMPLETED]

    # -- records, by their kind ---------------------------------------------------------------------------------------

    def _engine(self, replica: int, record: dict[str, Any]) -> None:
        self.configs[replica] = record["config"]
        self.held[replica] = []
        self.moments[replica] = []
        self._flights[replica] = []
        self._leaving[replica] = []

    def _submit(self, replica: int, record: dict[str, Any]) -> None:
        life = self.lives.get(record["id"])
        if life is None or life.end != "moved":
            prompt = record["prompt"]
            segments = tuple((name, length) for name, length in prompt.get("segments", ()))
            length = sum(length for _, length in segments) if segments else prompt.get("length", -1)
            life = SimulatedLife(record["id"], replica, length, record["max_tokens"], record["ns"], segments)
        life.end = ""
        if "refusal" in record:
            life.end, life.end_ns = "refused", record["ns"]
            self.refused.append(life)
        else:
            self.lives[life.id] = life

    def _handoff(self, replica: int, record: dict[str, Any]) -> None:
        move, life = record["move"], self.lives.get(record.get("id", ""))
        if life is None:
            return
        has_failed = bool(record.get("detail")) or (move == "join" and not record.get("row"))
        if move == "join" and not has_failed:
            life.joined_ns, life.joined_at = record["ns"], replica
        elif move in ("join", "end", "move"):
            self._leave(replica, life.id, record["ns"])
            if has_failed and not life.end:
                life.end, life.end_ns = "moved" if move == "move" else "error", record["ns"]

    def _abort(self, replica: int, record: dict[str, Any]) -> None:
        name = record["id"]
        life = self.lives.get(name)
        if (replica, name) in self._row_of:  # also where another engine has ended it
            self._leaving[replica].append(name)
            self._leave(replica, name, record["ns"])
        if life is not None and not life.end:
            life.end, life.end_ns = "abort", record["ns"]

    def _plan(self, replica: int, record: dict[str, Any]) -> None:
        for name in record.get("retracted", ()):
            self._take_row(replica, name, record["ns"])
        self.held[replica].append((record["ns"], record["held"]))
        if record["step"] is None:
            return
        rows = record.get("decode")
        if rows is not None and rows != "=":
            self._decode[replica] = tuple(rows)
        step = StepDone(
            replica,
            record["step"],
            record["ns"],
            [tuple(chunk) for chunk in record.get("prefill", ())],
            None if rows is None else self._decode[replica],
            record.get("S", 0),
            record.get("k", 1) if record.get("S") else int(not _is_parked(record)),
            record.get("nd", 1),
            record.get("joins", []),
        )
        for name, row, _, _, emitted, cap, *received in step.joins:
            self._rows[replica, row] = SimulatorRow(name, received[0] if received else 0, cap, emitted)
            self._row_of[replica, name] = row
            life = self.lives[name]
            life.cap = cap
            life.running_ns.append([step.planned_ns, -1])
        self._flights[replica].append(step)
        self.moments[replica].append(("plan", step))

    def _commit(self, replica: int, record: dict[str, Any]) -> None:
        step = self._flights[replica].pop(0)
        at = record["at"]
        step.ends_ns = list(accumulate(at)) if isinstance(at, list) else [at]
        stopped = record.get("stopped", ())
        step.kv, step.emitted, step.delivered = [], [0] * len(step.ends_ns), [0] * len(step.ends_ns)
        first_new = len(self.got)
        for i, (row, start, length, is_last) in enumerate(step.chunks):
            if is_last:
                self.lives[self._rows[replica, row].id].last_chunk = length
                self._first_token(step, self._rows[replica, row], start + length, i in stopped)
        if step.decode is not None:
            self._rounds(step, record)
        self._leaving[replica].clear()
        newest = {got.id: got for got in self.got[first_new:]}
        for name, reason, _ in record.get("finished", ()):
            self._leave(replica, name, record["ns"])
            life = self.lives[name]
            if name in newest:
                newest[name].is_last = True
            if reason != "transferred" and not life.end:
                life.end, life.end_ns = reason, record["ns"]
        self.steps.append(step)
        self.moments[replica].append(("commit", step))

    def _lost(self, replica: int, record: dict[str, Any]) -> None:
        self.moments[replica].append(("lost", record["ns"]))
        self._flights[replica].clear()
        self._leaving[replica].clear()
        for name in record.get("retracted", ()):
            self._take_row(replica, name, record["ns"])
        for name, reason, _ in record.get("finished", ()):
            self._leave(replica, name, record["ns"])
            self.lives[name].end, self.lives[name].end_ns = reason, record["ns"]

    def _resume(self, replica: int, record: dict[str, Any]) -> None:
        for name in record.get("retracted", ()):
            self._take_row(replica, name, record["ns"])
        self.moments[replica].append(("reset", record["ns"]))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _leave(self, replica: int, name: str, now_ns: int) -> None:
        if self._row_of.pop((replica, name), None) is not None:
            self.lives[name].running_ns[-1][1] = now_ns

    def _take_row(self, replica: int, name: str, now_ns: int) -> None:
        self.retractions += 1
        self.lives[name].retractions += 1
        self._leave(replica, name, now_ns)

    def _first_token(self, step: StepDone, row: SimulatorRow, kv: int, stopped: bool) -> None:
        """Give a request the token that the last chunk of its prompt yields."""
        step.emitted[0] += 1
        is_live = self._has(step, row) and self.lives[row.id].tokens == row.emitted  # else another engine had given it
        row.kv, row.emitted = kv, row.emitted + 1
        row.is_over = stopped or row.emitted >= row.cap
        if is_live:
            self.lives[row.id].emissions.append((step.ends_ns[0], 1))
            self.got.append(Got(step.replica, row.id, step.ends_ns[0], 1))
            step.delivered[0] += 1

    def _has(self, step: StepDone, row: SimulatorRow) -> bool:
        held = self._row_of.get((step.replica, row.id))
        return held is not None and self._rows[step.replica, held] is row

    def _rounds(self, step: StepDone, record: dict[str, Any]) -> None:
        batch, rounds = len(step.decode), len(step.ends_ns)
        lens = _lens(record["lens"], batch * rounds)
        stops = {(number, column): index for number, column, index in record.get("stops", ())}
        rows = [self._rows[step.replica, row] for row in step.decode]
        for number, end_ns in enumerate(step.ends_ns):
            step.kv.append(sum(row.kv for row in rows))
            for column, row in enumerate(rows):
                length = lens[number * batch + column]
                step.emitted[number] += length
                left_now = row.id in self._leaving[step.replica] and number < rounds - 1
                is_live = self._has(step, row) or left_now
                position, kept = row.emitted, min(length, row.cap - row.emitted, stops.get((number, column), 99) + 1)
                if row.is_over:
                    continue
                row.kv += kept
                row.emitted += kept
                row.is_over = (number, column) in stops or row.emitted >= row.cap
                if is_live:
                    self._deliver(step, row.id, number, (end_ns, kept), (position, step.steps, length))

    def _deliver(
        self, step: StepDone, name: str, number: int, emission: tuple[int, int], accepted: tuple[Any, ...]
    ) -> None:
        life = self.lives[name]
        life.emissions.append(emission)
        self.got.append(Got(step.replica, name, *emission))
        life.accepted.append(accepted)
        step.verified += 1
        step.correct.append(accepted[2] - 1)
        step.delivered[number] += emission[1]


def _lens(lens: int | str | list[int], size: int) -> list[int]:
    if isinstance(lens, int):
        return [lens] * size
    return [DIGITS[digit] for digit in lens] if isinstance(lens, str) else lens
