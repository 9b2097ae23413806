"""Laws of the times of a run's rounds (SIM-13, SIM-14): they compare rounds with each other, and with the bytes that
none can do without. What a round should take is nowhere computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from math import log
from statistics import correlation
from typing import Any, NamedTuple

from .answer import SimulatorAnswer
from .ledger import SimulatorLedger, StepDone

SLACK = 1e-3
"""By how much more work may be cheaper: a device computes in whole tiles."""

MOST_WORKS = 120
"""Different rounds of a run that are compared with each other."""

NEAR_NS = 3
"""How far one round may be off: times are rounded to nanoseconds."""

SURE = 4.5
"""Standard deviations that a mean of draws may be off."""

SURELY = 6
"""The same of a sum of at least `MANY` device times, each with a long tail. A sum of fewer is not judged."""

MANY = 100
SURELY_APART = 40
"""Rounds of two engines from which it is looked at whether they fluctuate together."""


class TimedRound(NamedTuple):
    """A round: what it did, and from when to when host and device were busy with it alone."""

    step: StepDone
    number: int
    begin_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns

    @property
    def kind(self) -> tuple[int, bool, bool, bool]:
        """Prompts, whether rows decode, whether it continues a step, and whether the draft is parked: only rounds of
        one kind are compared."""
        return len(self.step.chunks), self.step.decode is not None, self.number > 0, not self.step.topk

    @property
    def work(self) -> tuple[int, ...]:
        """What it did; a round that is not less in any of these is no less work."""
        step = self.step
        chunks = (amount for _, start, length, _ in step.chunks for amount in (length, start))
        if step.decode is None:
            return tuple(chunks)
        decode = len(step.decode), step.steps, step.topk, step.nodes, step.kv[self.number], step.emitted[self.number]
        return (*chunks, *decode)

    def __str__(self) -> str:
        step = self.step
        parts = [f"chunks (length, start) {[(length, start) for _, start, length, _ in step.chunks]}"]
        parts = parts if step.chunks else []
        if step.decode is not None:
            kv = step.kv[self.number]
            parts += [f"{len(step.decode)} rows, {step.steps} draft steps, {step.nodes} nodes, {kv} KV tokens"]
        return f"round {self.number} of step {step.number} ({', '.join(parts)}) takes {self.ns} ns"


class Times:
    """The rounds of one run. `spans_ns`: per engine how long at least one of its steps was planned and not done."""

    def __init__(self, answer: SimulatorAnswer, ledger: SimulatorLedger) -> None:
        self.machine: Mapping[str, Any] = answer.books["machine"] if answer.books else {}
        self.rounds: list[TimedRound] = []  # with which engine and device were busy alone
        self.ends_ns: dict[int, list[int]] = {}
        self.spans_ns: dict[int, int] = {}
        self.ledger = ledger
        for replica, moments in ledger.moments.items():
            self._follow(replica, moments)

    def _follow(self, replica: int, moments: list[tuple[str, Any]]) -> None:
        in_flight: list[StepDone] = []
        shared: set[int] = set()  # steps beside which another one was planned
        total_ns = begin_ns = end_ns = 0
        for kind, what in moments:
            if kind == "plan":
                begin_ns = begin_ns if in_flight else max(what.planned_ns, end_ns)
                in_flight.append(what)
                if len(in_flight) > 1:
                    shared.update(map(id, in_flight))
                continue
            ended_ns = what.ends_ns[-1] if kind == "commit" else what
            if in_flight:
                total_ns += max(ended_ns - begin_ns, 0)
                begin_ns = end_ns = max(ended_ns, end_ns)
            if kind != "commit":
                in_flight.clear()
                continue
            in_flight.pop(0)
            if id(what) not in shared:
                begins_ns = [what.planned_ns, *what.ends_ns]
                ends = enumerate(zip(begins_ns, what.ends_ns, strict=False))
                self.rounds += [TimedRound(what, number, *times) for number, times in ends]
        self.spans_ns[replica] = total_ns

    def wrong_order(self) -> Iterator[tuple[str, str]]:
        """Find a round that is cheaper than one with less work."""
        by_kind: dict[tuple[int, bool, bool], dict[tuple[int, ...], list[TimedRound]]] = defaultdict(dict)
        for one in self.rounds:
            fastest_and_slowest = by_kind[one.kind].setdefault(one.work, [one, one])
            fastest_and_slowest[0] = min(fastest_and_slowest[0], one, key=lambda round_: round_.ns)
            fastest_and_slowest[1] = max(fastest_and_slowest[1], one, key=lambda round_: round_.ns)
        for works in by_kind.values():
            some = sorted(works.items())[:: len(works) // MOST_WORKS + 1]
            for less, (_, slowest) in some:
                for more, (fastest, _) in some:
                    if fastest.ns < slowest.ns * (1 - SLACK) - NEAR_NS and all(map(int.__le__, less, more)):
                        yield str(fastest), f"no less than less work does: {slowest}"
                        return

    def too_fast(self) -> Iterator[tuple[str, str]]:
        """Find a step that ends before the weights that its rounds need can have passed."""
        for step in self.ledger.steps:
            least_ns = self._least_ns(step)
            for number, end_ns in enumerate(step.ends_ns):
                if end_ns - step.planned_ns < (number + 1) * least_ns:
                    one = TimedRound(step, number, step.planned_ns, end_ns)
                    yield f"{one} from its plan on", f"at least {number + 1} times {least_ns:.0f} ns, for its weights"
                    return

    def _least_ns(self, step: StepDone) -> float:
        """Return the least time of a pass over the step's tokens.

        Tokens of a prompt choose experts mostly by themselves: together they reach at least half as many as they choose
        in all, or half of all experts.
        """
        machine = self.machine
        tokens = max((length for _, _, length, _ in step.chunks), default=1)
        reached = machine["experts_per_token"]
        reached = max(reached, min(machine["experts"], reached * tokens) / 2)
        return (machine["weights_bytes"] + reached * machine["expert_bytes"]) * 1e9 / machine["bytes_per_s"]

    def wrong_fluctuation(self) -> Iterator[tuple[str, str]]:
        """Find two engines whose rounds fluctuate together."""
        decodes: dict[int, list[int]] = defaultdict(list)
        for one in self.rounds:
            if not one.step.chunks:
                decodes[one.step.replica].append(max(one.ns, 1))
        for one, other in combinations(decodes, 2):
            known = [(log(a), log(b)) for a, b in zip(decodes[one], decodes[other], strict=False)]
            if (
                len(known) >= SURELY_APART
                and (together := correlation(*zip(*known, strict=True))) > SURE / len(known) ** 0.5
            ):
                was = f"the times of {len(known)} rounds of engines {one} and {other} correlate by {together:.2f}"
                yield was, "each device fluctuates by itself"


def wrong_mean(plain: Times, fluctuating: Times, share: float) -> Iterator[tuple[str, str]]:
    """Find rounds that take longer or shorter in the mean because they fluctuate. `share`: the standard deviation of a
    device time over its mean."""
    if [one.work for one in plain.rounds] != [one.work for one in fluctuating.rounds]:
        return
    should_ns, was_ns = (sum(one.ns for one in times.rounds) for times in (plain, fluctuating))
    spread_ns = sum(one.ns**2 for one in plain.rounds) ** 0.5
    if spread_ns and (should_ns / spread_ns) ** 2 >= MANY and abs(was_ns - should_ns) > SURELY * share * spread_ns:
        rounds = len(plain.rounds)
        yield f"{rounds} rounds that fluctuate take {was_ns} ns", f"about {should_ns} ns, as those that do not"


def wrong_delay(first: SimulatorLedger, slower: SimulatorLedger, delay_ns: int) -> Iterator[tuple[str, str]]:
    """Find a request that a host which takes `delay_ns` longer for each round does not delay by as much. The requests
    of these runs are alone on their engine."""
    for life in first.lives.values():
        other = slower.lives.get(life.id)
        if other is None or not life.emissions:
            continue
        rounds = sum(life.arrival_ns <= end_ns <= life.end_ns for step in first.steps for end_ns in step.ends_ns)
        was_ns = (other.end_ns - other.arrival_ns) - (life.end_ns - life.arrival_ns)
        if abs(was_ns - rounds * delay_ns) > rounds * NEAR_NS:
            was = f"{life.id} ends {was_ns} ns later where the host takes {delay_ns} ns more for each round"
            yield was, f"{rounds * delay_ns} ns later: {rounds} rounds"
            return


def wrong_speed(first: SimulatorLedger, faster: SimulatorLedger) -> Iterator[tuple[str, str]]:
    """Find a request that takes longer on a memory of more bandwidth. The requests are alone on their engine."""
    for life in first.lives.values():
        other = faster.lives.get(life.id)
        if other is None or not life.emissions:
            continue
        took_ns = [[ns - one.arrival_ns for ns, _ in one.emissions] for one in (life, other)]
        if any(b > a + NEAR_NS * (n + 1) for n, (a, b) in enumerate(zip(*took_ns, strict=False))):
            yield f"{life.id} gets its tokens after {took_ns[1]} ns with more bandwidth", f"no later than {took_ns[0]}"
            return
