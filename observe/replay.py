"""Replays a log on fresh engines, and compares every decision.

Submits, aborts, results and failures come from the log, in its order; plans come from the engine. Nothing of the
executor that wrote the log is needed, so a log from a GPU replays on a laptop. `plan` calls without a step are not
logged and not repeated.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.algorithm.arrival import Arrival
from ..core.contract.events import Event, EventSink, HandoffMove
from ..core.contract.request import FinishReason
from ..core.contract.step import Step
from ..core.errors import ForedraftError, InvariantViolation
from ..core.scheduler.config import EngineRole
from ..core.scheduler.driver import reload_table
from ..core.scheduler.engine import Engine
from .decoding import decision, decode_failure, decode_request, decode_result
from .encoding import LineEncoder
from .log import LogError, LogLine, read_log

EngineFactory = Callable[[Mapping[str, Any], int, EventSink], Engine]
"""(header, replica, events) -> an engine as the log's header describes it, that tells its events to `events`."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first decision of a replayed engine that differs.
    `expected` is the log's record, `got` the engine's (None: none)."""

    line: int
    replica: int
    expected: dict[str, Any]
    got: dict[str, Any] | None
    explanation: str

    def __str__(self) -> str:
        return f"line {self.line}, replica {self.replica}: {self.explanation}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`num_decisions` plans came out equal before the first `difference`, or to the end of the log if there is none."""

    num_decisions: int
    num_commits: int
    num_replicas: int
    complete: bool  # the log's last line says that the run was complete
    difference: ReplayDifference | None

    @property
    def identical(self) -> bool:
        return self.difference is None


class _Diverged(Exception):
    def __init__(self, got: dict[str, Any] | None, explanation: str) -> None:
        super().__init__(explanation)
        self.got, self.explanation = got, explanation


class _Replica:
    """One engine under replay, the lines that it writes, and the steps whose results are still to come."""

    def __init__(self, make_engine: EngineFactory, header: Mapping[str, Any], number: int) -> None:
        self._encoder = LineEncoder(number)
        self._lines: deque[str] = deque()
        self._steps: deque[Step] = deque()
        self._previous_rows: list[int] | None = None
        self._previous_rows_got: list[int] | None = None
        self.engine = make_engine(header, number, self._write)

    def _write(self, event: Event) -> None:
        self._lines.append(self._encoder.encode(event))

    def follow(self, record: LogLine) -> None:
        """Do what `record` says; raises _Diverged if the engine answers otherwise."""
        data = record.data
        if record.kind == "submit":
            # Requested outputs influence no decision, and are not in the log.
            self.engine.submit(replace(decode_request(data), outputs=()), data["ns"])
        elif record.kind == "abort":
            self.engine.abort(data["id"], data["ns"])
        elif record.kind == "plan":
            step = self.engine.plan(data["ns"])
            if step is not None:
                self._steps.append(step)
        elif record.kind == "commit":
            if not self._steps:
                raise _Diverged(None, f"the log commits step {data['step']}, but no step is in flight")
            self.engine.commit(decode_result(data, self._steps.popleft()), data["ns"])
        elif record.kind == "lost":
            self._steps.clear()
            self.engine.lose_steps(decode_failure(data), data["ns"])
        elif record.kind == "resume":
            self.engine.resume(data["ns"], restarted=data["restarted"])
        elif record.kind == "retract":
            self.engine.request_retraction(data["id"], data["ns"])
        elif record.kind == "deny":
            self.engine.deny_allocations(data["count"], data["ns"])
        elif record.kind == "reload":
            reload_table(self.engine, data["table"], "a reload of the log", data["ns"])
        elif record.kind == "handoff":
            try:
                self._follow_handoff(data)
            except (KeyError, ValueError) as error:
                raise _Diverged(None, f"the log's handoff move cannot be made: {error!r}") from error
        self._compare(record)

    def _follow_handoff(self, data: Mapping[str, Any]) -> None:
        """Repeat the moves of a handoff, which the log has; its messages are not needed."""
        move, now_ns, name = HandoffMove(data["move"]), data["ns"], data.get("id", "")
        if move is HandoffMove.HOLD:
            self.engine.transfers.hold(name, now_ns)
        elif move is HandoffMove.RELEASE:
            self.engine.transfers.release_hold(data["row"], now_ns)
        elif move in (HandoffMove.END, HandoffMove.MOVE):
            reason = FinishReason.MOVED if move is HandoffMove.MOVE else FinishReason.ERROR
            self.engine.transfers.end_transfer(name, now_ns, data.get("detail", ""), reason)
        elif move is HandoffMove.RESERVE:
            self.engine.transfers.reserve(replace(decode_request(data), outputs=()), now_ns)
        elif move is HandoffMove.JOIN:
            self.engine.transfers.join(name, Arrival(data.get("first"), failure=data.get("detail", "")), now_ns)
        else:
            self.engine.transfers.change_role(EngineRole(data["detail"]), now_ns)

    def _compare(self, record: LogLine) -> None:
        text = self._lines.popleft() if self._lines else None
        if text == record.text:
            if record.kind == "plan":
                rows = record.data.get("decode", "=")
                if rows != "=":
                    self._previous_rows = self._previous_rows_got = rows
            return
        if text is None:
            raise _Diverged(None, f"the log has a {record.kind!r} record here, the engine did nothing")
        got, expected = json.loads(text), record.data
        if record.kind == "plan":
            expected, self._previous_rows = _decided(expected, self._previous_rows)
            got, self._previous_rows_got = _decided(got, self._previous_rows_got)
        elif record.kind == "handoff" and "prompt" in expected:
            got, expected = ({key: data.get(key) for key in ("move", "id", "row")} for data in (got, expected))
        elif record.kind == "submit":
            got, expected = ({"refusal": data.get("refusal", "")} for data in (got, expected))
        if got != expected:
            raise _Diverged(got, _explain(record.kind, expected, got))


def _decided(record: Mapping[str, Any], previous_rows: list[int] | None) -> tuple[dict[str, Any], list[int] | None]:
    decided = decision(record, previous_rows)
    return decided, decided.get("decode", previous_rows)


def _explain(kind: str, expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    keys = [*expected, *(key for key in got if key not in expected)]
    differing = [key for key in keys if expected.get(key) != got.get(key)]
    shown = [f"{key} was {_short(expected.get(key))}, is now {_short(got.get(key))}" for key in differing[:4]]
    more = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
    return f"another {kind}: {'; '.join(shown)}{more}"


def _short(value: Any) -> str:
    text = json.dumps(value) if value is not None else "absent"
    return text if len(text) <= 120 else text[:117] + "…"


def replay(path: str | os.PathLike[str], make_engine: EngineFactory, *, allow_truncated: bool = False) -> ReplayReport:
    """Replay the log at `path`. Raises LogError where the log itself is broken;
    a differing engine is a `ReplayDifference`."""
    records = read_log(path, allow_truncated=allow_truncated)
    header = next(records).data
    replicas: dict[int, _Replica] = {}
    counts = {"plan": 0, "commit": 0}
    complete = False
    difference = None
    for record in records:
        if record.kind == "end":
            complete = record.data["complete"]
            break
        number = record.data["r"]
        try:
            if number not in replicas:
                if record.kind != "engine":
                    raise LogError(path, record.line, f"replica {number} has no 'engine' record before this one")
                replicas[number] = _Replica(make_engine, header, number)
            replicas[number].follow(record)
        except _Diverged as diverged:
            difference = ReplayDifference(record.line, number, record.data, diverged.got, diverged.explanation)
            break
        except InvariantViolation as violation:
            difference = ReplayDifference(
                record.line, number, record.data, None, f"the engine refused this record: {violation}"
            )
            break
        except LogError:
            raise
        except ForedraftError as error:
            raise LogError(path, record.line, str(error)) from error
        except Exception as error:  # records are decoded by now: it is the engine that fails
            difference = ReplayDifference(record.line, number, record.data, None, f"the engine raised {error!r}")
            break
        if record.kind in counts:
            counts[record.kind] += 1
    return ReplayReport(counts["plan"], counts["commit"], len(replicas), complete, difference)
