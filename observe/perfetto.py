"""A run as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: one process per replica, one track per kind of
work.

The file is in the Trace Event Format (JSON), written as the run goes. Drivers report intervals of time by `span`; the
engine's events give the counters. Times are nanoseconds here and microseconds with three decimals in the file, so
nothing is rounded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core.contract.account import EngineAccount
from ..core.contract.events import EngineStarted, Event, Planned
from ..core.errors import ForedraftError

MAX_EVENTS = 1_000_000
_BUFFER_CHARACTERS = 1 << 20

_dumps = json.JSONEncoder(separators=(",", ":")).encode


class PerfettoError(ForedraftError):
    """A trace that cannot be written: file and reason."""


class PerfettoTrace:
    """Writes `path`. After `max_events` slices and counter values it writes no more, and says so in the trace."""

    def __init__(self, path: str | os.PathLike[str], *, max_events: int = MAX_EVENTS) -> None:
        self.path: Path = Path(path)
        self.max_events = max_events
        self.num_events: int = 0
        self.num_dropped: int = 0
        self._tracks: dict[tuple[int, str], int] = {}
        self._replicas: dict[int, _ReplicaTrack] = {}
        self._lines: list[str] = []
        self._characters = 0
        self._first = True
        try:
            self._file = self.path.open("w", encoding="ascii", newline="\n")
        except OSError as error:
            raise PerfettoError(f"{path}: cannot be written: {error.strerror or error}") from error
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')

    def span(
        self,
        replica: int,
        track: str,
        name: str,
        start_ns: int,
        duration_ns: int,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Draw a slice on a track of a replica ("device", "scheduler", …)."""
        if not self._has_room(start_ns):
            return
        key = (replica, track)
        thread = self._tracks[key] if key in self._tracks else self._open_track(replica, track)
        line = (
            f'{{"ph":"X","pid":{replica},"tid":{thread},"name":{_dumps(name)},'
            f'"ts":{_microseconds(start_ns)},"dur":{_microseconds(duration_ns)}'
        )
        self._write(f'{line},"args":{_dumps(args)}}}' if args else line + "}")

    def counter(self, replica: int, name: str, now_ns: int, value: int) -> None:
        """Set a counter of a replica from `now_ns` on."""
        if not self._has_room(now_ns):
            return
        if replica not in self._replicas:
            self._open_replica(replica)
        self._write(
            f'{{"ph":"C","pid":{replica},"name":{_dumps(name)},"ts":{_microseconds(now_ns)},"args":{{"value":{value}}}}}'
        )

    def sink(self, replica: int) -> Callable[[Event], None]:
        """Return the event sink for the engine of `replica`."""
        state = self._replicas[replica] if replica in self._replicas else self._open_replica(replica)
        return state.take

    def close(self) -> None:
        """End the file. A second call does nothing."""
        if self._file.closed:
            return
        try:
            self._flush()
            facts = {"events": self.num_events, "dropped": self.num_dropped}
            self._file.write(f'\n],"otherData":{_dumps(facts)}}}\n')
        except OSError as error:
            raise PerfettoError(f"{self.path}: cannot be written: {error}") from error
        finally:
            self._file.close()

    def _open_replica(self, replica: int) -> _ReplicaTrack:
        self._replicas[replica] = _ReplicaTrack(self, replica)
        self._describe("process_name", replica, 0, f"replica {replica}")
        return self._replicas[replica]

    def _open_track(self, replica: int, track: str) -> int:
        if replica not in self._replicas:
            self._open_replica(replica)
        thread = 1 + sum(owner == replica for owner, _ in self._tracks)
        self._tracks[replica, track] = thread
        self._describe("thread_name", replica, thread, track)
        return thread

    def _describe(self, kind: str, replica: int, thread: int, name: str) -> None:
        self._write(f'{{"ph":"M","pid":{replica},"tid":{thread},"name":"{kind}","args":{{"name":{_dumps(name)}}}}}')

    def _has_room(self, now_ns: int) -> bool:
        if self.num_events < self.max_events:
            self.num_events += 1
            return True
        if self.num_dropped == 0:
            note = f"the trace ends here: it has its {self.max_events} events"
            self._write(f'{{"ph":"i","s":"g","pid":0,"tid":0,"name":{_dumps(note)},"ts":{_microseconds(now_ns)}}}')
        self.num_dropped += 1
        return False

    def _write(self, line: str) -> None:
        self._lines.append(line)
        self._characters += len(line)
        if self._characters >= _BUFFER_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        if not self._lines:
            return
        text = ",\n".join(self._lines)
        start = "\n" if self._first else ",\n"
        self._first = False
        self._lines.clear()
        self._characters = 0
        try:
            self._file.write(start + text)
        except OSError as error:
            raise PerfettoError(f"{self.path}: cannot be written: {error}") from error


class _ReplicaTrack:
    """Counters of one engine; values are written when they change."""

    def __init__(self, trace: PerfettoTrace, replica: int) -> None:
        self._trace = trace
        self._replica = replica
        self._values: dict[str, int] = {}
        self._account = EngineAccount()

    def take(self, event: Event) -> None:
        account = self._account
        account.take(event)
        if type(event) is EngineStarted:
            return
        if type(event) is Planned:
            self._count("KV slots", event.now_ns, event.num_held_slots)
        self._count("running", event.now_ns, account.num_running)
        self._count("waiting", event.now_ns, account.num_waiting)

    def _count(self, name: str, now_ns: int, value: int) -> None:
        if self._values.get(name) != value:
            self._values[name] = value
            self._trace.counter(self._replica, name, now_ns, value)


def _microseconds(ns: int) -> str:
    whole, rest = divmod(int(ns), 1000)
    return f"{whole}.{rest:03d}" if rest else str(whole)
