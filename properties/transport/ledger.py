"""What the messages say of every transfer: how many there are, how each one ends, and when a side must act and must
not.

```
prefill   offer ─── lease ───► offer again, or cancel          accept, renewal, computed or read page, manifest: the
                                                               lease begins anew
decode    accept ── hold ────► cancel                          page, manifest, renewal: the hold begins anew
```

A message that may have been ignored moves `heard_ns` alone; one that cannot have been ignored moves `renewed_ns` too. A
side must not act before a whole patience has passed since `renewed_ns`. It must have acted when one has passed since
`heard_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .contract import DECODE, PREFILL, Counters, TransportConfig
from .model import TransferRun

ENDS = {"transferred": "completed", "aborted": "cancelled", "error": "failed"}
"""How a request ends on the prefill side -> how its transfer ends there."""


@dataclass(slots=True, eq=False)
class TransferEntry:
    """A transfer on one side."""

    run: TransferRun
    generation: int
    first: int
    newest: int
    renewed_ns: int
    heard_ns: int
    num_attempts: int = 1
    is_waiting: bool = True  # prefill: for an answer. decode: for pages
    is_cancelled: bool = False  # by this side
    is_fenced: bool = False  # prefill: it was cancelled twice, so only the answer to that, or time, ends it
    is_lost: bool = False  # the other side is gone
    is_answered: bool = False  # nothing of it is expected any more
    is_refused: bool = False  # decode: what arrived in the newest attempt is not what was sent
    end: str = ""  # prefill: as in `Counters`, once it is known
    manifest: int = 0  # prefill: the attempt that it was sent in
    is_sending: bool = False  # prefill: accepted, and all is computed; the link has still to read pages


class TransportLedger:
    """The transfers of both sides. `problem` becomes what the last operation showed to be wrong."""

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.outgoing: dict[tuple[int, int, int], TransferEntry] = {}  # (request, generation, first attempt)
        self.incoming: dict[tuple[int, int, int], TransferEntry] = {}  # the newest of each
        self._undecided: list[TransferEntry] = []  # given up in this operation
        self.num_accepted: int = 0  # by this decode worker, as new transfers
        self.num_offers: int = 0  # that have reached it
        self.num_acknowledged: int = 0
        # (request, generation, attempt) -> by all decode workers
        self.num_accepts: dict[tuple[int, int, int], int] = {}
        self.firsts: dict[tuple[int, int, int], int] = {}  # the same -> the first attempt of its transfer
        self.problem: str = ""

    def forget(self, side: str) -> None:
        """Note that a worker began anew."""
        if side == PREFILL:
            self.outgoing.clear()
            self._undecided.clear()
        else:
            self.incoming.clear()
            self.num_accepted = self.num_offers = self.num_acknowledged = 0

    def lose_kv(self, side: str) -> None:
        """Note that a worker's device was replaced: nothing of its transfers is expected any more."""
        for entry in (self.outgoing if side == PREFILL else self.incoming).values():
            entry.is_answered = True

    def lose_peer(self, side: str, generation: int | None = None) -> None:
        """Note that a side has learned of the other worker's end, or of a worker with a newer `generation`."""
        for entry in (self.outgoing if side == PREFILL else self.incoming).values():
            if generation is None or entry.generation < generation:
                entry.is_lost = True

    # -- the prefill side ---------------------------------------------------------------------------------------------

    def outgoing_of(self, request: int, generation: int, attempt: int) -> TransferEntry | None:
        """Return the transfer if this is its newest attempt."""
        first = self.firsts.get((request, generation, attempt))
        entry = self.outgoing.get((request, generation, first))
        return entry if entry is not None and entry.newest == attempt else None

    def offered(
        self, run: TransferRun, generation: int, attempt: int, first: int, now_ns: int, timed_out: bool
    ) -> None:
        self.firsts[run.request, generation, attempt] = first
        entry = self.outgoing.get((run.request, generation, first))
        if entry is None or attempt == first:
            for other in self._undecided:
                if other.run is run:  # it was retracted: it goes on
                    other.end = "cancelled"
            self.outgoing[run.request, generation, first] = TransferEntry(
                run, generation, first, attempt, now_ns, now_ns
            )
            return
        entry.num_attempts += 1
        if entry.num_attempts > self.config.max_attempts:
            self.problem = f"attempt {entry.num_attempts} for request {run.request}, of {self.config.max_attempts}"
        self._acts(PREFILL, entry, "offers again", now_ns, timed_out)
        entry.newest, entry.is_waiting, entry.is_sending = attempt, True, False

    def sent_manifest(self, entry: TransferEntry, now_ns: int) -> None:
        entry.manifest, entry.is_waiting, entry.is_sending = entry.newest, True, False
        entry.renewed_ns = entry.heard_ns = now_ns

    def advances(self, entry: TransferEntry, now_ns: int) -> None:
        """Note that an accepted transfer goes on: its prompt is computed further, or a page of it was read."""
        if not (entry.is_waiting or entry.is_cancelled or entry.is_lost):
            entry.renewed_ns = entry.heard_ns = now_ns
            entry.is_sending = entry.run.is_computed

    def gave_up(self, entry: TransferEntry, now_ns: int, timed_out: bool) -> None:
        """Note that the prefill side has sent a cancel. If its request does not end, it was retracted."""
        self._acts(PREFILL, entry, "cancels", now_ns, timed_out)
        entry.is_fenced = entry.is_cancelled
        if not entry.is_cancelled:
            entry.is_cancelled = True
            self._undecided.append(entry)

    def prefill_ended(self, run: TransferRun, how: str) -> None:
        for entry in self.outgoing.values():
            if entry.run is run and not entry.end and how in ENDS:
                entry.end = ENDS[how]

    def decide(self) -> None:
        """End the operation: what was given up and has not ended by now was cancelled."""
        for entry in self._undecided:
            entry.end = entry.end or "cancelled"
        self._undecided.clear()

    # -- the decode side ----------------------------------------------------------------------------------------------

    def incoming_of(self, request: int, generation: int, attempt: int) -> TransferEntry | None:
        """Return the open transfer if this is its newest attempt."""
        entry = self.incoming.get((request, generation, self.firsts.get((request, generation, attempt), attempt)))
        return entry if entry is not None and entry.newest == attempt and not entry.is_answered else None

    def accepted(self, run: TransferRun, generation: int, attempt: int, now_ns: int) -> None:
        name = (run.request, generation, attempt)
        self.num_accepts[name] = self.num_accepts.get(name, 0) + 1
        first = self.firsts.get(name, attempt)
        entry = self.incoming.get((run.request, generation, first))
        if entry is None or entry.is_answered or entry.is_cancelled:
            # Where an older transfer of an equal request is open, the newer one takes its place, and its pages.
            self.num_accepted += not self._replaces_one(run.request, generation)
            self.incoming[run.request, generation, first] = TransferEntry(
                run, generation, first, attempt, now_ns, now_ns
            )
            return
        entry.newest, entry.is_refused, entry.renewed_ns, entry.heard_ns = attempt, False, now_ns, now_ns

    def _replaces_one(self, request: int, generation: int) -> bool:
        for entry in self.incoming.values():
            is_open = not (entry.is_answered or entry.is_cancelled or entry.is_lost)
            if is_open and (entry.run.request, entry.generation) == (request, generation):
                entry.is_answered = True
                return True
        return False

    def acknowledged(self, run: TransferRun, generation: int, attempt: int) -> None:
        entry = self.incoming_of(run.request, generation, attempt)
        if entry is not None:
            self.num_acknowledged += 1
            entry.is_answered = True

    def arrived(self, entry: TransferEntry, attempt: int, is_certain: bool, now_ns: int) -> None:
        """Note that news of a transfer has reached the decode side; `is_certain`: it was not ignored."""
        entry.heard_ns = now_ns
        is_certain = is_certain and self.num_accepts.get((entry.run.request, entry.generation, attempt)) == 1
        if is_certain and not entry.is_cancelled:
            entry.renewed_ns = now_ns

    def withdrew(self, entry: TransferEntry, now_ns: int, timed_out: bool) -> None:
        """Note that the decode side has sent a cancel."""
        self._acts(DECODE, entry, "cancels", now_ns, timed_out)
        entry.is_cancelled, entry.is_waiting = True, False

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _patience_ns(self, side: str) -> int:
        return self.config.lease_ns if side == PREFILL else self.config.hold_ns

    def _acts(self, side: str, entry: TransferEntry, what: str, now_ns: int, timed_out: bool) -> None:
        due_ns = entry.renewed_ns + self._patience_ns(side)
        if timed_out and now_ns < due_ns:
            self.problem = f"the {side} side {what} request {entry.run.request} {due_ns - now_ns} ns before its time"
        entry.renewed_ns = entry.heard_ns = now_ns

    def look_for_overdue(self, side: str, now_ns: int) -> int:
        """Check, after time has passed, that the side has given up what waits for an answer longer than it may.

        Returns how many wait.
        """
        num_waiting = 0
        for entry in (self.outgoing if side == PREFILL else self.incoming).values():
            is_due = entry.is_waiting or entry.is_sending
            if is_due and not (entry.is_cancelled or entry.is_lost or entry.is_answered or entry.end):
                num_waiting += 1
                if now_ns >= entry.heard_ns + self._patience_ns(side):
                    waited = f"has waited {now_ns - entry.heard_ns} ns for request {entry.run.request}"
                    self.problem = f"the {side} side {waited}, and still waits"
        return num_waiting

    def miscounted(self, side: str, c: Counters) -> str:
        """Return what the counters of a side cannot be after the messages that it has sent and received;
        empty if they can."""
        if side == DECODE:
            num_open = sum(not (e.is_answered or e.is_cancelled or e.is_lost) for e in self.incoming.values())
            for what, found, low, high in (
                ("started", c.started, self.num_accepted, self.num_offers),
                ("completed", c.completed, self.num_acknowledged, self.num_acknowledged),
                ("in flight", c.in_flight, num_open, self.num_offers),
            ):
                if not low <= found <= high:
                    return f"{found} {what}, and by its messages from {low} to {high}"
            return ""
        entries = self.outgoing.values()
        if c.started != len(entries):
            return f"{c.started} started, and {len(entries)} were offered"
        for what, found in (("completed", c.completed), ("failed", c.failed), ("cancelled", c.cancelled)):
            known = sum(entry.end == what for entry in entries)
            if not found <= known <= found + c.in_flight:
                return f"{found} {what} with {c.in_flight} in flight, and {known} have ended so"
        num_undecided = sum(not entry.end for entry in entries)
        if c.in_flight < num_undecided:
            return f"{c.in_flight} in flight, and {num_undecided} have not ended"
        return ""

    def kept(self, c: Counters) -> str:
        """Return which transfers of the prefill side are kept although their answers have come; empty if none is."""
        expected = sum(not entry.is_answered for entry in self.outgoing.values())
        if c.in_flight > expected:
            return f"{c.in_flight} transfers hold pages on the prefill side, and {expected} wait for anything"
        return ""
