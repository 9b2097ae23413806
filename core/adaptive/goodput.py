"""The `goodput` policy: the steps with the most expected tokens per second.

A round of S steps yields E(S) = 1 + Σ_{j ≤ S} p_1 ⋯ p_j tokens per row (p_j the conditional acceptance of position j)
and takes t(S, batch size, KV tokens) by the device's cost table; the policy picks the greatest E(S) / t(S), the lower S
in a tie. Acceptance is shared by all batch sizes, the choice is made for each.

What is not drafted is not measured, so there are probes: a few rounds of a deeper draft, only where a high acceptance
of the unmeasured positions would pay, rarer after each that failed, for about half a percent of the time at most. Within
one stationary stretch a batch size never sees more than ten switches in 10,000 rounds, probes included (`SwitchGate`);
when the estimate notices that acceptance has changed, another stretch begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .acceptance_estimate import ROWS_PER_INDEPENDENT_ROW, AcceptanceEstimate
from .config import AdaptiveConfig, load_adaptive_config, resolve_initial_steps
from .cost_table import CostTable
from .dwell import SwitchGate
from .routing import RangeRouter
from .slot import NEVER

MIN_DWELL_ROUNDS = 64
MIN_GAIN = 0.005
"""Relative gain below which a change of steps is not worth its disturbance."""

_DEVIATIONS = 1.0
_MAX_SPACING_ROUNDS = 64
_PROBE_GAIN = 0.02
_PROBE_ACCEPTANCE = 0.95
_PROBE_ROWS = 64
_PROBE_ROUNDS = 64
_MAX_PROBE_ROUNDS = 192
_PROBE_SWITCHES = 4  # there, back, and two to spare for a correction
_PROBE_DEVIATIONS = 0.5
_BENEFIT_DEVIATIONS = 0.5
_BENEFIT_ROWS = 4.0
_CERTAIN_DEVIATIONS = 3.0
_PROBE_TIMEOUT_ROUNDS = 512
_PROBE_INTERVAL_ROUNDS = 512
_PROBE_INTERVAL_GROWTH = 4
_PROBE_INTERVAL_CAP_ROUNDS = 4096
_AMNESTY_ROUNDS = 1000
_PROBE_COST = 0.005
_MAX_PROBE_LOSS_ROUNDS = 32.0
_LONGEST_PROBE_WAIT_ROUNDS = 10_000
_MAX_CACHED_BATCH_SIZES = 1 << 14


def expected_tokens(probabilities: Sequence[float], steps: int) -> float:
    """Accept length of a chain of `steps`: 1 + Σ_{j ≤ steps} Π_{i ≤ j} p_i."""
    total = run = 1.0
    for p in probabilities[:steps]:
        run *= p
        total += run
    return total


def best_steps(probabilities: Sequence[float], candidates: Sequence[int], times_ns: Sequence[int]) -> int:
    """Return the candidate with the most expected tokens per time; the lowest in a tie.

    More acceptance at any position never lowers it, and adding the same time per step never raises it.
    """
    rates = [expected_tokens(probabilities, steps) / time for steps, time in zip(candidates, times_ns, strict=True)]
    return candidates[rates.index(max(rates))]


@dataclass(slots=True)
class _Cell:
    """The choice for the batch sizes that run at one size: a captured graph size, or a size of the grid without graphs.

    `decided` is the fold whose estimates the choice was last made with.
    """

    batch_size: int
    candidates: tuple[int, ...]
    steps: int
    gate: SwitchGate
    decided: int = -1
    switches: int = 0


@dataclass(slots=True)
class _Probe:
    """A probe under way: the cell tries `steps` to learn about the positions beyond `incumbent`."""

    cell: _Cell
    incumbent: int
    steps: int
    start: int
    rounds: int = 0
    rows: int = 0


class GoodputPolicy:
    """Chooses by predicted tokens per second. Deterministic; decides only at folds of its estimate.

    `config` gives the ranges, their candidates, `update_interval` (rounds between folds while unsettled: the smallest
    of any range; up to 64 once settled) and `warmup_batches` (the smallest; rounds before the first decision).
    Raises `ConfigError`, `InvalidInitialSteps`, and `UnknownStepCost` if the table lacks a candidate.
    """

    name = "goodput"

    def __init__(
        self,
        config: str | Mapping[str, Any] | AdaptiveConfig,
        cost_table: CostTable,
        initial_steps: int | None = None,
    ) -> None:
        self.config = load_adaptive_config(config)
        self.cost_table = cost_table
        for steps in self.config.candidate_steps:
            cost_table.round_time_ns(steps, 1)
        self._initial_steps = resolve_initial_steps(self.config, initial_steps)
        self._update_interval = min(slot.update_interval for slot in self.config.slots)
        self._warmup = min(slot.warmup_batches for slot in self.config.slots)
        self._router = RangeRouter(self.config)
        self._fixed = all(len(slot.candidate_steps) == 1 for slot in self.config.slots)
        self.estimate = AcceptanceEstimate(self.config.candidate_steps[-1])
        self._probabilities = self.estimate.probabilities()
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._cell_of: dict[int, _Cell] = {}
        self._round = 0
        self._folds = 0
        self._fold_round = 0
        self._spacing = max(1, self._warmup, self._update_interval)
        self._countdown = self._spacing
        self._kv_per_row = 0.0
        self._kv_fold = -1
        self._probe: _Probe | None = None
        self._next_probe = 0
        self._next_amnesty = 0
        self._probe_interval = _PROBE_INTERVAL_ROUNDS
        self._switches_at_fold = 0
        self.switches = 0
        self.num_probes = 0  # begun so far; each failed one is two switches

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        self._router = RangeRouter(self.config, sizes)
        self._cells.clear()
        self._cell_of.clear()
        self._probe = None

    # --- every round ---

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        if self._kv_fold != self._folds:
            # Only the first round after a fold tells the context length: rounds inside a block are not seen singly.
            self._kv_fold = self._folds
            self._kv_per_row = float(kv_tokens / max(batch_size, 1))
        cell = self._cell_of.get(batch_size) or self._find_cell(batch_size)
        if cell.decided != self._folds:
            cell.decided = self._folds
            if self._folds and len(cell.candidates) > 1:
                self._decide(cell)
        return cell.steps

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        if executed_steps:
            self.estimate.add(counts)
            probe = self._probe
            # Rounds of other batch sizes are no part of the probe, and its cost is not theirs.
            if probe is not None and executed_steps > probe.incumbent and self._cell_of.get(batch_size) is probe.cell:
                probe.rounds += 1
                probe.rows += rows
        self._round += 1
        self._countdown -= 1
        if not self._countdown:
            self._fold()

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return NEVER if self._fixed else self._countdown

    # --- folding ---

    def _fold(self) -> None:
        changed = self.estimate.fold(self._round, self._round - self._fold_round)
        self._probabilities = self.estimate.probabilities()
        self._fold_round = self._round
        self._folds += 1
        if changed:
            self._probe_interval = _PROBE_INTERVAL_ROUNDS
            self._next_probe = min(self._next_probe, self._round)
            if self._round >= self._next_amnesty:
                # Another process has begun, with ten switches of its own.
                self._next_amnesty = self._round + _AMNESTY_ROUNDS
                for cell in self._cells.values():
                    cell.gate.forgive()
        restless = changed or self._probe is not None or self.switches != self._switches_at_fold
        self._switches_at_fold = self.switches
        if self._probe is None and self._round >= self._next_probe:
            restless = True
        self._spacing = self._update_interval if restless else min(self._spacing * 2, _MAX_SPACING_ROUNDS)
        self._spacing = max(self._spacing - self._spacing % self._update_interval, self._update_interval)
        self._countdown = self._spacing

    def _find_cell(self, batch_size: int) -> _Cell:
        index = self._router.range_index(batch_size)
        size = self._router.padded(batch_size)
        if not self._router.sizes or size > self._router.sizes[-1]:
            size = _grid_size(batch_size)
        cell = self._cells.get((index, size))
        if cell is None:
            candidates = self.config.slots[index].candidate_steps
            initial = self._initial_steps
            steps = initial if initial in candidates else candidates[len(candidates) // 2]
            if self._folds and len(candidates) > 1:
                times = self._times(candidates, size)
                steps = best_steps(self._probabilities, candidates, times)
            cell = _Cell(size, candidates, steps, SwitchGate(MIN_DWELL_ROUNDS))
            self._cells[index, size] = cell
        if len(self._cell_of) < _MAX_CACHED_BATCH_SIZES:
            self._cell_of[batch_size] = cell
        return cell

    # --- deciding ---

    def _times(self, candidates: Sequence[int], size: int) -> list[int]:
        kv_tokens = int(self._kv_per_row * size)
        return [self.cost_table.round_time_ns(steps, size, kv_tokens) for steps in candidates]

    def _decide(self, cell: _Cell) -> None:
        now = self._fold_round
        times = self._times(cell.candidates, cell.batch_size)
        probe = self._probe
        if probe is not None:
            if probe.cell is cell:
                if self._has_shown_enough(probe, times) or self._timed_out(probe):
                    self._end_probe(probe, times)
                return
            if self._timed_out(probe):
                self._end_probe(probe, self._times(probe.cell.candidates, probe.cell.batch_size))
        best, certain = self._better(cell, cell.steps, times)
        if best > cell.steps and self.estimate.trials(cell.steps + 1) < _PROBE_ROWS / 2:
            # Only extrapolation speaks for it: try it as a probe, whose way back need not wait for the dwell.
            if self._probe is None and cell.gate.earliest(now, switches=_PROBE_SWITCHES) <= now:
                self._begin_probe(cell, best)
        elif best != cell.steps:
            if cell.gate.earliest(now, certain=certain) <= now:
                self._switch(cell, best)
        elif now >= self._next_probe and self._probe is None:
            hopeful = self._worth_probing(cell, times)
            if hopeful is not None and cell.gate.earliest(now, switches=_PROBE_SWITCHES) <= now:
                self._begin_probe(cell, hopeful)
            else:
                self._next_probe = now + _MAX_SPACING_ROUNDS

    def _better(self, cell: _Cell, current: int, times: Sequence[int]) -> tuple[int, bool]:
        """Return the best candidate if it beats `current` beyond doubt, else `current`; and whether that is certain.

        Positions beyond `current` get the benefit of the doubt: going deeper measures them, staying never does.
        """
        p = list(self._probabilities)
        for j in range(current, len(p)):
            independent_rows = self.estimate.trials(j + 1) / ROWS_PER_INDEPENDENT_ROW + _BENEFIT_ROWS
            benefit = _BENEFIT_DEVIATIONS * math.sqrt(p[j] * (1 - p[j]) / independent_rows)
            p[j] = max(p[j], min(p[j] + benefit, _PROBE_ACCEPTANCE))
        best = best_steps(p, cell.candidates, times)
        if best == current:
            return current, False
        gain = self._rate(p, best, cell, times) / self._rate(p, current, cell, times) - 1
        doubt = self._doubt(best, current, current)
        if gain <= MIN_GAIN + _DEVIATIONS * doubt:
            return current, False
        return best, best < current and gain > MIN_GAIN + _CERTAIN_DEVIATIONS * doubt

    @staticmethod
    def _rate(p: Sequence[float], steps: int, cell: _Cell, times: Sequence[int]) -> float:
        """Expected tokens per row and ns."""
        return expected_tokens(p, steps) / times[cell.candidates.index(steps)]

    def _doubt(self, best: int, current: int, measured: int) -> float:
        """Standard deviation of log E(best)/E(current) from positions 1 … `measured`, by the delta method."""
        p = self._probabilities
        deepest = max(best, current)
        runs = [1.0]
        for position in range(1, deepest + 1):
            runs.append(runs[-1] * p[position - 1])
        variance = 0.0
        for position in range(1, measured + 1):
            slope = 0.0
            for steps, sign in ((best, 1.0), (current, -1.0)):
                if position <= steps:
                    tail = sum(runs[position : steps + 1])
                    slope += sign * tail / (max(p[position - 1], 1e-9) * sum(runs[: steps + 1]))
            variance += slope**2 * self.estimate.variance(position, p[position - 1])
        return math.sqrt(variance)

    def _switch(self, cell: _Cell, steps: int) -> None:
        if steps == cell.steps:
            return
        cell.gate.record(self._fold_round, cell.steps, steps)
        cell.steps = steps
        cell.switches += 1
        self.switches += 1

    # --- probing ---

    def _has_shown_enough(self, probe: _Probe, times: Sequence[int]) -> bool:
        """True once there are rows enough and, within bounds, the probe's steps are clearly better or worse.

        While they are neither, going on costs little: that is what not clearly worse means. Steps that are much dearer may
        be worse by far before that is certain, so the loss has a bound of its own.
        """
        if self._lost_rounds(probe, times) > _MAX_PROBE_LOSS_ROUNDS:
            return True
        if probe.rows < _PROBE_ROWS and probe.rounds < _PROBE_ROUNDS:
            return False
        if probe.rounds >= _MAX_PROBE_ROUNDS:
            return True
        gain, doubt = self._probe_gain(probe, times)
        return abs(gain) > doubt

    def _probe_gain(self, probe: _Probe, times: Sequence[int]) -> tuple[float, float]:
        """Relative gain of the probe's steps over the incumbent's, and its standard deviation."""
        rates = [self._rate(self._probabilities, s, probe.cell, times) for s in (probe.steps, probe.incumbent)]
        return rates[0] / rates[1] - 1, self._doubt(probe.steps, probe.incumbent, probe.steps)

    def _timed_out(self, probe: _Probe) -> bool:
        return self._fold_round - probe.start >= _PROBE_TIMEOUT_ROUNDS

    def _begin_probe(self, cell: _Cell, steps: int) -> None:
        self._probe = _Probe(cell, cell.steps, steps, self._fold_round)
        self.num_probes += 1
        self._switch(cell, steps)

    def _worth_probing(self, cell: _Cell, times: Sequence[int]) -> int | None:
        """Return a deeper candidate that would pay if the positions not tried lately were accepted at 0.95, or None.

        The shallowest with half of the greatest such gain: it costs least.
        """
        deeper = [s for s in cell.candidates if s > cell.steps]
        if not deeper:
            return None
        now = self._fold_round
        hopeful = list(self._probabilities)
        for j in range(cell.steps, len(hopeful)):
            tried = self.estimate.last_tried[j]
            age = now - tried if tried >= 0 else NEVER
            if age >= self._probe_interval // 2:
                hopeful[j] = max(hopeful[j], _PROBE_ACCEPTANCE)
        rates = {s: expected_tokens(hopeful, s) / t for s, t in zip(cell.candidates, times, strict=True)}
        gains = {s: rates[s] / rates[cell.steps] - 1 for s in deeper}
        enough = max(_PROBE_GAIN, max(gains.values()) / 2)
        return next((s for s in deeper if gains[s] >= enough), None)

    def _end_probe(self, probe: _Probe, times: Sequence[int]) -> None:
        """Choose between the incumbent and what the probe has shown, and set when the next probe may be."""
        cell = probe.cell
        self._probe = None
        tried = [s for s in cell.candidates if s <= probe.steps]
        chosen = best_steps(self._probabilities, tried, times[: len(tried)])
        p, incumbent = self._probabilities, probe.incumbent
        gain = self._rate(p, chosen, cell, times) / self._rate(p, incumbent, cell, times) - 1
        if gain <= MIN_GAIN + _PROBE_DEVIATIONS * self._doubt(chosen, incumbent, probe.steps):
            chosen = incumbent
        self._switch(cell, chosen)
        interval = self._probe_interval = self._probe_interval if chosen <= probe.incumbent else _PROBE_INTERVAL_ROUNDS
        if chosen <= probe.incumbent:
            self._probe_interval = min(interval * _PROBE_INTERVAL_GROWTH, _PROBE_INTERVAL_CAP_ROUNDS)
        lost_rounds = self._lost_rounds(probe, times, doubtful=True)
        wait = min(max(interval, math.ceil(lost_rounds / _PROBE_COST)), _LONGEST_PROBE_WAIT_ROUNDS)
        self._next_probe = self._fold_round + wait

    def _lost_rounds(self, probe: _Probe, times: Sequence[int], doubtful: bool = False) -> float:
        """Return the time that a probe has lost, in rounds of the incumbent; `doubtful`: with the doubt to its disadvantage."""
        gain, doubt = self._probe_gain(probe, times)
        index = probe.cell.candidates.index
        length = times[index(probe.steps)] / times[index(probe.incumbent)]
        return max(0.0, doubtful * doubt - gain) * length * probe.rounds

    def snapshot(self) -> dict[str, object]:
        probe = self._probe
        return {
            "policy": self.name,
            "round": self._round,
            "folds": self._folds,
            "countdown": self._countdown,
            "kv_per_row": self._kv_per_row,
            "estimate": self.estimate.snapshot(),
            "next_probe": self._next_probe,
            "probe_interval": self._probe_interval,
            "probe": None if probe is None else [probe.cell.batch_size, probe.incumbent, probe.steps, probe.start],
            "cells": {
                f"{index}:{size}": {"steps": cell.steps, "switches": cell.switches, "gate": cell.gate.snapshot()}
                for (index, size), cell in sorted(self._cells.items())
            },
        }


_GRID = tuple(range(1, 8)) + tuple(base * 2**octave for octave in range(1, 28) for base in (4, 5, 6, 7))


def _grid_size(batch_size: int) -> int:
    """Return the next of 1 … 8, 10, 12, 14, 16, 20, 24, …: four sizes to an octave."""
    return _GRID[bisect_left(_GRID, batch_size)]
