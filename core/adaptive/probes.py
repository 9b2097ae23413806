"""Probes of the `goodput` policy: a few rounds of a deeper draft measure positions that are not drafted otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .expected_rates import MIN_GAIN, ChoiceCell, ExpectedRates
from .policy import NEVER

# When a probe begins, how long it lasts, and when the next one may be.
_PROBE_GAIN = 0.02  # relative gain that the deeper draft must promise
PROBE_ACCEPTANCE = 0.95  # assumed at positions that were not tried lately
_PROBE_ROWS = 64  # a probe ends after so many rows or rounds ...
_PROBE_ROUNDS = 64
_MAX_PROBE_ROUNDS = 192  # ... or later, while it is neither clearly better nor clearly worse ...
_MAX_PROBE_LOSS_ROUNDS = 32.0  # ... but at once when it has lost so many rounds of the steps before it
_PROBE_TIMEOUT_ROUNDS = 512  # a probe also ends if no rounds of its batch size come for so long
_PROBE_DEVIATIONS = 0.5  # the gain that justifies keeping the probe's steps
_PROBE_SWITCHES = 4  # switches of a probe: there, back, and two for a correction
_PROBE_INTERVAL_ROUNDS = 512  # rounds to the next probe; each failure multiplies them, up to the cap
_PROBE_INTERVAL_GROWTH = 4
_PROBE_INTERVAL_CAP_ROUNDS = 4096
PROBE_COST = 0.005  # share of the time that probes may lose
_LONGEST_PROBE_WAIT_ROUNDS = 10_000


@dataclass(slots=True)
class Probe:
    """A probe under way: the cell tries `steps` to learn about the positions beyond `incumbent`."""

    cell: ChoiceCell
    incumbent: int
    steps: int
    start: int
    rounds: int = 0
    rows: int = 0

    def timed_out(self, now: int) -> bool:
        """Return whether the probe's batch size has not come up for too long."""
        return now - self.start >= _PROBE_TIMEOUT_ROUNDS


class Probes:
    """The probes of one policy. At most one is under way; `next_round` is the first at which another may begin."""

    def __init__(self, rates: ExpectedRates) -> None:
        self._rates = rates
        self.current: Probe | None = None
        self.num_begun: int = 0  # each that fails is two switches
        self.next_round: int = 0
        self.interval_rounds: int = _PROBE_INTERVAL_ROUNDS

    def are_due(self, now: int) -> bool:
        """Return whether no probe is under way and the time of the next one has come."""
        return self.current is None and now >= self.next_round

    def may_begin(self, cell: ChoiceCell, now: int) -> bool:
        """Return whether a probe of this cell may begin, and switch back."""
        return self.are_due(now) and cell.gate.earliest(now, switches=_PROBE_SWITCHES) <= now

    def begin(self, cell: ChoiceCell, steps: int, now: int) -> None:
        """Note that a cell tries `steps`."""
        self.current = Probe(cell, cell.steps, steps, now)
        self.num_begun += 1

    def hasten(self, now: int) -> None:
        """Let the next probe begin at once, since acceptance has changed."""
        self.interval_rounds = _PROBE_INTERVAL_ROUNDS
        self.next_round = min(self.next_round, now)

    def postpone(self, first: int) -> None:
        """Let no probe begin before round `first`."""
        self.next_round = max(self.next_round, first)

    def is_unproven(self, cell: ChoiceCell, deeper: int, times: Sequence[int]) -> bool:
        """Return whether no measurement favours a deeper candidate: its positions are untried, or it is no better so
        far.
        """
        rates = self._rates.of(cell, times)
        return self._rates.estimate.trials(cell.steps + 1) < _PROBE_ROWS / 2 or rates[deeper] <= rates[cell.steps]

    def worth_trying(self, cell: ChoiceCell, times: Sequence[int], now: int) -> int | None:
        """Return a deeper candidate that would pay if the positions not tried lately were accepted at 0.95, or None.

        It is the shallowest candidate with half of the greatest such gain, because it costs least.
        """
        deeper = [s for s in cell.candidates if s > cell.steps]
        if not deeper:
            return None
        optimistic = list(self._rates.estimate.probabilities)
        for j in range(cell.steps, len(optimistic)):
            tried = self._rates.estimate.last_tried(j + 1)
            age = now - tried if tried >= 0 else NEVER
            if age >= self.interval_rounds // 2:
                optimistic[j] = max(optimistic[j], PROBE_ACCEPTANCE)
        rates = self._rates.of(cell, times, optimistic)
        gains = {
            s: rates[s] * math.exp(self._rates.estimate.unknown(cell.shapes[s])) / rates[cell.steps] - 1 for s in deeper
        }
        enough = max(_PROBE_GAIN, max(gains.values()) / 2)
        return next((s for s in deeper if gains[s] >= enough), None)

    def has_shown_enough(self, probe: Probe, times: Sequence[int]) -> bool:
        """Return True once there are rows enough and, within bounds, the probe's steps are clearly better or worse.

        Steps that are not clearly worse cost little. But much more expensive steps may lose much time before the result
        is certain, so the loss has its own bound.
        """
        if self._lost_rounds(probe, times) > _MAX_PROBE_LOSS_ROUNDS:
            return True
        if probe.rows < _PROBE_ROWS and probe.rounds < _PROBE_ROUNDS:
            return False
        if probe.rounds >= _MAX_PROBE_ROUNDS:
            return True
        gain, doubt = self._gain(probe, times)
        return abs(gain) > doubt

    def end(self, probe: Probe, times: Sequence[int], now: int) -> int:
        """End the probe, and set the time of the next possible one. Returns the steps that its cell takes: the
        incumbent or better ones."""
        cell = probe.cell
        self.current = None
        rates = {s: rate for s, rate in self._rates.of(cell, times).items() if s <= probe.steps}
        chosen, incumbent = max(rates, key=rates.__getitem__), probe.incumbent
        doubt = self._rates.doubt(cell, chosen, incumbent, probe.steps)
        if rates[chosen] / rates[incumbent] - 1 <= MIN_GAIN + _PROBE_DEVIATIONS * doubt:
            chosen = incumbent
        has_failed = chosen <= incumbent
        interval = self.interval_rounds if has_failed else _PROBE_INTERVAL_ROUNDS
        longer = min(interval * _PROBE_INTERVAL_GROWTH, _PROBE_INTERVAL_CAP_ROUNDS)
        self.interval_rounds = longer if has_failed else interval
        lost_rounds = self._lost_rounds(probe, times, doubtful=True)
        wait = min(max(interval, math.ceil(lost_rounds / PROBE_COST)), _LONGEST_PROBE_WAIT_ROUNDS)
        self.next_round = now + wait
        return chosen

    def _gain(self, probe: Probe, times: Sequence[int]) -> tuple[float, float]:
        """Return the relative gain of the probe's steps over the incumbent's, and its standard deviation."""
        rates = self._rates.of(probe.cell, times)
        doubt = self._rates.doubt(probe.cell, probe.steps, probe.incumbent, probe.steps)
        return rates[probe.steps] / rates[probe.incumbent] - 1, doubt

    def _lost_rounds(self, probe: Probe, times: Sequence[int], doubtful: bool = False) -> float:
        """Return the time that a probe has lost, in rounds of the incumbent.

        With `doubtful` the uncertainty counts against the probe.
        """
        gain, doubt = self._gain(probe, times)
        index = probe.cell.candidates.index
        length = times[index(probe.steps)] / times[index(probe.incumbent)]
        return max(0.0, doubtful * doubt - gain) * length * probe.rounds
