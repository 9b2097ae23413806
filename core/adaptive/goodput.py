"""The `goodput` policy: the steps with the most expected tokens per second.

A round of S steps yields E tokens per row (learned from all shapes: `acceptance_estimate`) and takes t(S, batch size,
KV tokens) by the device's cost table. The policy picks the greatest E / t, and in a tie the lower S. All batch sizes
share one estimate of acceptance; the choice is made for each.

The first choice is that for an average draft. Early in a stationary stretch the results are few and every choice is
uncertain. So the policy takes the best choice so far, at growing intervals (`_LAST_LOOK_ROUND`). Later it leaves a
choice only for a gain of more than one standard deviation.

Acceptance of positions that are not drafted cannot be measured. So there are probes: a few rounds of a deeper draft,
where a high acceptance of these positions would pay. They become rarer after each failure and take at most about half a
percent of the time. Within one stretch a batch size sees at most ten switches in 10,000 rounds, probes included
(`SwitchGate`). Another stretch begins when the estimate finds that acceptance has changed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from .acceptance_estimate import ROWS_PER_INDEPENDENT_ROW, AcceptLengths
from .config import AdaptiveConfig, load_adaptive_config, resolve_initial_steps
from .cost_table import CostTable
from .draft_shape import DraftTreeShape
from .expected_rates import MIN_GAIN, ChoiceCell, ExpectedRates
from .parking import Parking
from .policy import NEVER, RangeRouter, SwitchGate
from .probes import PROBE_ACCEPTANCE, PROBE_COST, Probes

MIN_DWELL_ROUNDS = 64

# First looks, and how sure a choice must be. Deviations are standard deviations of the gain.
_LAST_LOOK_ROUND = 320
_LOOK_SPACING = 2  # a look is this many times as late as the one before
_SWITCHES_KEPT = 5  # of the ten switches in a window, kept for the time after the first looks
_DEVIATIONS = 1.0  # the gain that justifies another choice
_CERTAIN_DEVIATIONS = 3.0  # the gain that justifies fewer steps without a doubled dwell
_BENEFIT_DEVIATIONS = 0.5  # added to the acceptance of positions beyond the steps in use
_BENEFIT_ROWS = 4.0  # a position without measurements counts as having this many independent rows
_MAX_SPACING_ROUNDS = 64  # most rounds between two folds of the estimate, once settled

_RESTART_ROUNDS = 1000  # least distance of two changes of acceptance that reset the count of switches
_MAX_CACHED_BATCH_SIZES = 1 << 14


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
        shape: DraftTreeShape | None = None,
    ) -> None:
        self.config: AdaptiveConfig = load_adaptive_config(config)
        self.cost_table = cost_table
        for steps in self.config.candidate_steps:
            cost_table.round_time_ns(steps, 1)
        self._initial_steps = None if initial_steps is None else resolve_initial_steps(self.config, initial_steps)
        self._update_interval = min(slot.update_interval for slot in self.config.slots)
        self._warmup = min(slot.warmup_batches for slot in self.config.slots)
        self._router = RangeRouter(self.config)
        self._fixed = all(len(slot.candidate_steps) == 1 for slot in self.config.slots)
        self._shape = DraftTreeShape(self.config) if shape is None else shape
        self.estimate: AcceptLengths = AcceptLengths(self._shape.round_shapes(), self._shape.depth_limited)
        self._cells: dict[tuple[int, int], ChoiceCell] = {}
        self._cell_of: dict[int, ChoiceCell] = {}
        self._round = 0
        self._folds = 0
        self._fold_round = 0
        self._spacing = self._countdown = max(1, self._warmup, self._update_interval)
        self._rates = ExpectedRates(self.estimate, cost_table)
        self.probes: Probes = Probes(self._rates)
        self.parking: Parking = Parking(cost_table.prefill_token_ps if 0 in self.config.candidate_steps else 0)
        self._kv_fold = -1
        self._stretch_start = 0
        self._first_look = self._next_look = max(1, self._warmup, self._update_interval)
        self._is_look = False
        self._next_restart = 0
        self._switches_at_fold = 0
        self.switches: int = 0

    def set_cuda_graph_bs(self, sizes: Sequence[int] | None) -> None:
        self._router = RangeRouter(self.config, sizes)
        self._shape.set_router(self._router)
        self._cells.clear()
        self._cell_of.clear()
        self.probes.current = None

    # --- every round ---

    def steps_for(self, batch_size: int, kv_tokens: int) -> int:
        if self._kv_fold != self._folds:
            # Only the first round after a fold tells the context length: rounds inside a multi-step are not seen
            # singly.
            self._kv_fold = self._folds
            self._rates.kv_per_row = float(kv_tokens / max(batch_size, 1))
        cell = self._cell_of.get(batch_size) or self._find_cell(batch_size)
        if cell.decided != self._folds:
            cell.decided, cell.rows = self._folds, batch_size
            if self._folds and len(cell.candidates) > 1:
                self._decide(cell)
        if not self.parking.prefill_token_ps:
            return cell.steps
        return self._with_parking(cell, batch_size, kv_tokens)

    def _with_parking(self, cell: ChoiceCell, batch_size: int, kv_tokens: int) -> int:
        """Return the steps of a cell, or 0 while the draft is parked; park it, or want it back."""
        parking, now = self.parking, self._round
        if cell.steps == 0:
            if parking.rest(now):
                # A probe, which needs a return, comes when it is worth the time of both.
                round_ns = self.cost_table.round_time_ns(0, batch_size, kv_tokens)
                self.probes.postpone(now + parking.rounds_to_probe(kv_tokens, round_ns, PROBE_COST))
            return 0
        lost_ns = 0.0
        if parking.is_parked:
            lost_ns = self._lost_ns(cell, kv_tokens)
        parking.want(now, lost_ns, kv_tokens)
        return 0 if parking.is_parked else cell.steps

    def _lost_ns(self, cell: ChoiceCell, kv_tokens: int) -> float:
        """Return by how much the tokens of a round of 0 steps would come sooner with the steps of the cell; as much as
        a return costs for a probe, and where the range has no 0 steps."""
        probe = self.probes.current
        if 0 not in cell.candidates or (probe is not None and probe.cell is cell):
            return float(self.parking.price_ns(kv_tokens))
        times = self._rates.times_of(cell)
        rates = self._rates.of(cell, times)
        return max(0.0, 1.0 - rates[0] / rates[cell.steps]) * times[cell.candidates.index(0)]

    def observe(self, counts: Sequence[int], total: float, rows: int, batch_size: int, executed_steps: int) -> None:
        if executed_steps:
            self.estimate.add(self._shape.round_shape(executed_steps, batch_size), counts)
            probe = self.probes.current
            # Rounds of other batch sizes do not belong to the probe, so its cost does not include them.
            if probe is not None and executed_steps > probe.incumbent and self._cell_of.get(batch_size) is probe.cell:
                probe.rounds += 1
                probe.rows += rows
        elif self.parking.is_returning and self.probes.current is not None:
            self.probes.current.start = self._round  # it begins when the draft is back
        self._round += 1
        self._countdown -= 1
        if not self._countdown:
            self._fold()

    def rounds_to_next_decision(self, batch_size: int) -> int:
        return NEVER if self._fixed else self._countdown

    # --- folding ---

    def _fold(self) -> None:
        changed = self.estimate.fold(self._round, self._round - self._fold_round)
        self._fold_round = self._round
        self._folds += 1
        if changed:
            self.probes.hasten(self._round)
            if self._round >= self._next_restart:
                # Another process has begun, with ten switches and first looks of its own.
                self._next_restart = self._round + _RESTART_ROUNDS
                self._stretch_start, self._next_look = self._round, self._first_look
                for cell in self._cells.values():
                    cell.gate.forget_switches()
        elapsed = self._round - self._stretch_start
        is_looking = self._next_look <= _LAST_LOOK_ROUND
        self._is_look = is_looking and self._next_look <= elapsed
        if self._is_look:
            self._next_look = _LOOK_SPACING * elapsed
        is_unsettled = (
            changed or is_looking or self.probes.current is not None or self.switches != self._switches_at_fold
        )
        self._switches_at_fold = self.switches
        if self.probes.are_due(self._round):
            is_unsettled = True
        self._spacing = self._update_interval if is_unsettled else min(self._spacing * 2, _MAX_SPACING_ROUNDS)
        self._spacing = max(self._spacing - self._spacing % self._update_interval, self._update_interval)
        self._countdown = self._spacing

    def _find_cell(self, batch_size: int) -> ChoiceCell:
        index = self._router.range_index(batch_size)
        size = self._router.padded(batch_size)
        if not self._router.sizes or size > self._router.sizes[-1]:
            size = _grid_size(batch_size)
        cell = self._cells.get((index, size))
        if cell is None:
            candidates = self.config.slots[index].candidate_steps
            shapes = [self._shape.round_shape(steps, batch_size) for steps in candidates]
            steps = self._initial_steps
            if self._folds or steps not in candidates:
                rates = {
                    count: self.estimate.expected(shape) / time
                    for count, shape, time in zip(
                        candidates, shapes, self._rates.times(candidates, size, batch_size), strict=True
                    )
                    if count or self._folds or len(candidates) == 1  # with 0 steps no acceptance would be measured
                }
                steps = max(rates, key=rates.__getitem__)
            cell = ChoiceCell(
                size, candidates, dict(zip(candidates, shapes, strict=True)), steps, SwitchGate(MIN_DWELL_ROUNDS)
            )
            self._cells[index, size] = cell
        if len(self._cell_of) < _MAX_CACHED_BATCH_SIZES:
            self._cell_of[batch_size] = cell
        return cell

    # --- deciding ---

    def _decide(self, cell: ChoiceCell) -> None:
        now = self._fold_round
        times = self._rates.times_of(cell)
        probe = self.probes.current
        if probe is not None:
            if probe.cell is cell:
                if self.probes.has_shown_enough(probe, times) or probe.timed_out(now):
                    self._switch(cell, self.probes.end(probe, times, now))
                return
            if probe.timed_out(now):
                self._switch(probe.cell, self.probes.end(probe, self._rates.times_of(probe.cell), now))
        if self._is_look:
            self._look(cell, times)
        if self._next_look <= _LAST_LOOK_ROUND or self._is_look:
            return
        best, certain = self._better(cell, cell.steps, times)
        if best > cell.steps and self.probes.is_unproven(cell, best, times):
            # No measurement favours it, so try it as a probe, whose return need not wait for the dwell.
            if self.probes.may_begin(cell, now):
                self._begin_probe(cell, best)
        elif best != cell.steps:
            if cell.gate.earliest(now, certain=certain) <= now:
                self._switch(cell, best)
        elif self.probes.are_due(now):
            deeper = self.probes.worth_trying(cell, times, now)
            if deeper is not None and self.probes.may_begin(cell, now):
                self._begin_probe(cell, deeper)
            else:
                self.probes.next_round = now + _MAX_SPACING_ROUNDS

    def _begin_probe(self, cell: ChoiceCell, steps: int) -> None:
        self.probes.begin(cell, steps, self._fold_round)
        self._switch(cell, steps)

    def _look(self, cell: ChoiceCell, times: Sequence[int]) -> None:
        """Take the best choice so far. At the beginning every choice is a guess, and another guess costs nothing."""
        rates = self._rates.of(cell, times)
        best = max(rates, key=rates.__getitem__)
        least = MIN_GAIN
        if best == 0:  # there acceptance is not measured, so a mistake would last
            least += self._rates.doubt(cell, best, cell.steps, cell.steps)
        if rates[best] / rates[cell.steps] - 1 > least and not cell.gate.is_crowded(self._fold_round, _SWITCHES_KEPT):
            self._switch(cell, best)

    def _better(self, cell: ChoiceCell, current: int, times: Sequence[int]) -> tuple[int, bool]:
        """Return the best candidate if it beats `current` by more than one standard deviation, else `current`; and
        whether that is certain.

        Positions beyond `current` count with their estimate plus half a deviation, because only a deeper draft can
        measure them.
        """
        p = self._optimistic(current, _BENEFIT_DEVIATIONS)
        rates = self._rates.of(cell, times, p)
        best = max(rates, key=rates.__getitem__)
        if best == current:
            return current, False
        gain = rates[best] / rates[current] - 1
        doubt = self._rates.doubt(cell, best, current, current)
        if gain <= MIN_GAIN + _DEVIATIONS * doubt:
            return current, False
        return best, best < current and gain > MIN_GAIN + _CERTAIN_DEVIATIONS * doubt

    def _optimistic(self, first: int, deviations: float) -> list[float]:
        """Return the acceptance by position, from `first` on with `deviations` standard deviations added."""
        p = list(self.estimate.probabilities)
        for j in range(first, len(p)):
            independent_rows = self.estimate.trials(j + 1) / ROWS_PER_INDEPENDENT_ROW + _BENEFIT_ROWS
            benefit = deviations * math.sqrt(p[j] * (1 - p[j]) / independent_rows)
            p[j] = max(p[j], min(p[j] + benefit, PROBE_ACCEPTANCE))
        return p

    def _switch(self, cell: ChoiceCell, steps: int) -> None:
        if steps == cell.steps:
            return
        cell.gate.record(self._fold_round, cell.steps, steps)
        cell.steps = steps
        cell.switches += 1
        self.switches += 1

    def snapshot(self) -> dict[str, object]:
        probe = self.probes.current
        return {
            "policy": self.name,
            "round": self._round,
            "folds": self._folds,
            "countdown": self._countdown,
            "kv_per_row": self._rates.kv_per_row,
            "estimate": self.estimate.snapshot(),
            "next_probe": self.probes.next_round,
            "next_look": self._stretch_start + self._next_look,
            "probe_interval": self.probes.interval_rounds,
            **({"parking": self.parking.snapshot()} if self.parking.prefill_token_ps else {}),
            "probe": None if probe is None else [probe.cell.batch_size, probe.incumbent, probe.steps, probe.start],
            "cells": {
                f"{index}:{size}": {"steps": cell.steps, "switches": cell.switches, "gate": cell.gate.snapshot()}
                for (index, size), cell in sorted(self._cells.items())
            },
        }


_GRID: tuple[int, ...] = tuple(range(1, 8)) + tuple(
    base * 2**octave for octave in range(1, 28) for base in (4, 5, 6, 7)
)


def _grid_size(batch_size: int) -> int:
    """Return the next of 1 … 8, 10, 12, 14, 16, 20, 24, …: four sizes to an octave."""
    return _GRID[bisect_left(_GRID, batch_size)]
