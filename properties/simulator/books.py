"""The numbers of a report, computed once more from the ledger of its run: plain sums over requests, steps and states
(SIM-13).

What is completed, its throughput and its latencies are recounted from the requests themselves (SIM-07), whose tokens
and times are those of the ledger (SIM-16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import fsum
from operator import mul
from statistics import fmean
from typing import Any, NamedTuple

from .answer import SimulatorAnswer
from .ledger import SimulatorLedger

EXACT = 1e-9
MEAN_OFF, ERRORS_OFF = 0.05, 4
"""A share of a mean length, and standard errors: a report says that a mean is more than both of them off."""


class WrongNumber(NamedTuple):
    """A number of a report that is not what its run says."""

    name: str
    value: Any
    should: Any


class Books:
    """What `summary` says of the run behind `ledger`. `busy_ns`: the least and the most work of each replica's device.

    `is_plain`: every engine does all of a request, and no step has failed; only then all that is counted by engine can
    be recounted.
    """

    def __init__(
        self,
        ledger: SimulatorLedger,
        summary: dict[str, Any],
        busy_ns: dict[int, tuple[int, int]],
        *,
        is_plain: bool,
        has_faults: bool,
    ) -> None:
        self.ledger = ledger
        self.summary = summary
        self.busy_ns = busy_ns
        self.is_plain = is_plain
        self.has_faults = has_faults
        self.duration_ns = round(summary["duration"] * 1e9)

    def wrong(self) -> Iterator[WrongNumber]:
        """Yield every number that differs."""
        for name, should in self._expected():
            value = self.summary.get(name)
            if not _near(value, should):
                yield WrongNumber(name, value, should)
        yield from self._shares()

    def _expected(self) -> Iterator[tuple[str, Any]]:
        yield from self._counts()
        yield from self._speculation()
        yield from self._resources()
        if self.is_plain and not self.has_faults:
            yield from self._timeline()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _counts(self) -> Iterator[tuple[str, Any]]:
        ledger, completed = self.ledger, self.ledger.completed
        inputs, outputs = sum(life.prompt for life in completed), sum(life.tokens for life in completed)
        seconds = self.duration_ns / 1e9
        yield "refused", len(ledger.refused)
        yield "total_input_tokens", inputs
        yield "delivered_tokens", sum(life.tokens for life in ledger.lives.values())
        yield "truncated", sum(life.end == "length" and life.tokens < life.max_tokens for life in completed)
        if seconds:
            yield "total_token_throughput", (inputs + outputs) / seconds
        if self.is_plain:
            ends = Counter(life.end for life in ledger.lives.values())
            yield "submitted", len(ledger.lives) + len(ledger.refused)
            yield "aborted", ends["abort"]
            yield "failed", ends["error"]
            yield "unfinished", ends[""]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _speculation(self) -> Iterator[tuple[str, Any]]:
        steps = self.ledger.steps
        decodes = [step for step in steps if step.decode is not None]
        verified = sum(step.verified for step in decodes)
        correct = sum(sum(step.correct) for step in decodes)
        proposed = sum(step.verified * (step.nodes - 1) for step in decodes)
        rounds = sum(len(step.ends_ns) for step in decodes)
        histogram = Counter(drafts for step in decodes for drafts in step.correct)
        yield "verified_rows", verified
        yield "correct_drafts", correct
        yield "proposed_drafts", proposed
        yield "wasted_draft_tokens", proposed - correct
        yield "accept_length", 1 + correct / verified if verified else None
        yield "accept_rate", correct / proposed if proposed else None
        yield "wasted_draft_share", 1 - correct / proposed if proposed else None
        yield "correct_drafts_histogram", [histogram[n] for n in range(max(histogram, default=0) + 1)]
        yield "decode_rounds", rounds
        yield "committed_steps", len(steps)
        yield "prefill_tokens", sum(length for step in steps for _, _, length, _ in step.chunks)
        at_steps: Counter[int] = Counter()
        switches = 0
        newest: dict[int, int] = {}
        for step in decodes:
            at_steps[step.steps] += len(step.ends_ns)
            switches += newest.get(step.replica, step.steps) != step.steps
            newest[step.replica] = step.steps
        yield "switches", switches
        for depth, count in at_steps.items():
            yield f"rounds_at_steps_{depth}", count / rounds

    # -- states -------------------------------------------------------------------------------------------------------

    def _resources(self) -> Iterator[tuple[str, Any]]:
        ledger, duration_ns = self.ledger, self.duration_ns
        pools = {r: config["num_pages"] * config["page_size"] for r, config in ledger.configs.items()}
        held_ns, peaks = 0, []
        for replica, changes in ledger.held.items():
            for (begin_ns, slots), (end_ns, _) in pairwise([*changes, (duration_ns, 0)]):
                held_ns += slots * max(min(end_ns, duration_ns) - min(begin_ns, duration_ns), 0)
            peaks.append(max((slots for _, slots in changes), default=0) / pools[replica])
        yield "kv_capacity_slots", sum(pools.values())
        yield "kv_occupancy_max", max(peaks)
        if duration_ns:
            yield "kv_occupancy_mean", held_ns / duration_ns / sum(pools.values())
        if not self.is_plain:
            waits = [
                (life.joined_ns - life.emissions[0][0]) / 1e6 for life in ledger.lives.values() if life.joined_ns >= 0
            ]
            if not self.has_faults:
                yield "mean_transfer_wait_ms", fmean(waits) if waits else None
            return
        if not duration_ns:
            return
        ran, stayed, waited = self._areas()
        yield "mean_running", ran / duration_ns
        yield "mean_queue_length", waited / duration_ns
        yield "mean_concurrency", stayed / duration_ns

    def _areas(self) -> tuple[int, int, int]:
        """Return the time that requests ran, were in the system, and waited, added up, in nanoseconds."""
        lives = self.ledger.lives.values()
        ran = sum(end_ns - begin_ns for life in lives for begin_ns, end_ns in life.running_ns)
        stayed = sum(life.end_ns - life.arrival_ns for life in lives)
        return ran, stayed, stayed - ran

    def _timeline(self) -> Iterator[tuple[str, Any]]:
        """Check that the buckets of the timeline add up to the run."""
        width_s, running = self.summary["timeline_bucket_s"], self.summary["timeline_running"]
        events = [life.arrival_ns for life in (*self.ledger.lives.values(), *self.ledger.refused)]
        begin_ns = min(events, default=0)
        ends = [life.end_ns for life in self.ledger.lives.values()]
        end_ns = max([*ends, *(step.ends_ns[-1] for step in self.ledger.steps)], default=begin_ns)
        widths = [width_s] * len(running)
        widths[-1] = max((end_ns - begin_ns) / 1e9 - width_s * (len(running) - 1), 1e-9)
        self.summary["the timeline's requests"] = fsum(map(mul, running, widths))
        self.summary["the timeline's tokens"] = fsum(map(mul, self.summary["timeline_tokens_per_s"], widths))
        yield "the timeline's requests", self._areas()[0] / 1e9
        yield "the timeline's tokens", float(sum(life.tokens for life in self.ledger.lives.values()))

    def _shares(self) -> Iterator[WrongNumber]:
        """Check that shares are shares, and that a device's is that of its work."""
        for name, value in self.summary.items():
            values = value if isinstance(value, list) and name.endswith(("per_replica", "kv_occupancy")) else [value]
            is_share = "share" in name or "occupancy" in name or name.endswith(("_rate", "attainment"))
            if is_share and any(part is not None and not 0 <= part <= 1 for part in values):
                yield WrongNumber(name, value, "a share, 0 … 1")
        if not self.duration_ns:
            return
        shares = self.summary["device_busy_share_per_replica"]
        for replica, share in enumerate(shares):
            least, most = (min(ns / self.duration_ns, 1.0) for ns in self.busy_ns[replica])
            off = max(least - share, share - most)
            if off > 1e-6 * most + 1e-9 + 10 * len(self.ledger.steps) / self.duration_ns:
                yield WrongNumber(f"device_busy_share of replica {replica}", share, f"{least} … {most}")
        if not _near(self.summary["device_busy_share"], sum(shares) / len(shares)):
            yield WrongNumber("device_busy_share", self.summary["device_busy_share"], f"the mean of {shares}")


def wrong_notices(answer: SimulatorAnswer) -> Iterator[tuple[str, str]]:
    """Yield a mean length of which the report says that it is as asked for, or not, as (what was, what should be)."""
    books: Any = answer.books
    for kind, (mean, deviation, is_noticed) in books.get("lengths", {}).items():
        got, num_requests = books["summary"][f"mean_{kind}_tokens"], books["summary"]["completed"]
        is_off = got is not None and abs(got - mean) > max(MEAN_OFF * mean, ERRORS_OFF * deviation / num_requests**0.5)
        if is_off is not is_noticed:
            was = f"of {num_requests} requests with {got} {kind} tokens on average, {mean} ± {deviation:.4g} asked for"
            yield f"{was}, the report {'says' if is_noticed else 'does not say'} that these differ", "the contrary"


def _near(value: Any, should: Any) -> bool:
    if isinstance(should, float) and isinstance(value, int | float):
        return abs(value - should) <= EXACT * max(abs(should), 1e-3)
    return value == should
