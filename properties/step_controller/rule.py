"""The rule of the moving average, read slowly: one step per sentence of the documentation, nothing kept but what it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .table import Table

LONGEST_WAIT = 32


class Undecided(Exception):
    """The average lies so near to a threshold that rounding decides."""


@dataclass(slots=True)
class _Range:
    candidates: tuple[int, ...]
    index: int
    average: float
    results: int = 0
    is_probing: bool = False
    failed_probes: int = 0
    looks_to_probe: int = 1


class AverageRule:
    """What a controller with `average_rule` must choose after each result, if no dwell holds its switches up."""

    def __init__(self, table: Table, initial: int) -> None:
        self._table = table
        first = initial if initial >= 0 else table.union[len(table.union) // 2]
        self._ranges = []
        for members in table.candidates:
            index = members.index(first) if first in members else len(members) // 2
            self._ranges.append(_Range(members, index, members[index] - 1.0))

    def steps(self, number: int) -> int:
        own = self._ranges[number]
        return own.candidates[own.index]

    def take(self, number: int, correct: Sequence[float], executed: int) -> None:
        """Take a result of a range. Raises `Undecided`."""
        own, table = self._ranges[number], self._table
        if not correct or executed != self.steps(number):
            return
        if executed > 0:
            own.average = (1.0 - table.ema_alpha) * own.average + table.ema_alpha * (sum(correct) / len(correct))
        own.results += 1
        beyond = own.results - table.warmup_batches
        if beyond > 0 and beyond % table.update_interval == 0:
            self._probe(own) if executed == 0 else self._look(own)

    def _probe(self, own: _Range) -> None:
        if len(own.candidates) == 1:
            return
        if own.looks_to_probe > 1:
            own.looks_to_probe -= 1
            return
        own.index, own.is_probing = 1, True
        if own.average < 0:  # nothing was measured yet
            own.average = own.candidates[1] - 1.0

    def _look(self, own: _Range) -> None:
        members, table, target = own.candidates, self._table, own.index
        while target > 0 and not self._above(own.average, max(members[target - 1], 1) - 0.5 + table.down_hysteresis):
            target -= 1
        if target == own.index:
            while target + 1 < len(members) and self._above(own.average, members[target] - 0.5 + table.up_hysteresis):
                target += 1
        if table.ceiling_coeff > 0 and target <= own.index:
            ceiling = max(1, math.ceil(own.average * table.ceiling_coeff))
            while target > 0 and members[target] > ceiling:
                target -= 1
        if own.is_probing:
            own.failed_probes = own.failed_probes + 1 if members[target] == 0 else 0
        if members[target] == 0:
            own.looks_to_probe = min(2**own.failed_probes, LONGEST_WAIT) if own.is_probing else 1
        own.is_probing, own.index = False, target

    @staticmethod
    def _above(average: float, threshold: float) -> bool:
        if average != threshold and math.isclose(average, threshold, rel_tol=0, abs_tol=1e-9):
            raise Undecided
        return average > threshold
