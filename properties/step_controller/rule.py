"""Tables of draft steps, good and damaged ones, and the rule of the moving average:
one statement per sentence of its documentation."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class RuleTable:
    """`candidates[i]` belong to batch sizes from `bounds[i]` on; the knobs hold for all ranges."""

    bounds: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    update_interval: int = 5
    warmup_batches: int = 10
    ema_alpha: float = 0.2
    min_dwell_batches: int = 0
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0

    @property
    def union(self) -> tuple[int, ...]:
        return tuple(sorted({steps for members in self.candidates for steps in members}))

    def range_of(self, batch_size: int, captured: Sequence[int]) -> int:
        """Return the number of the range of a batch size, padded to the next captured one."""
        at = bisect_left(captured, batch_size)
        padded = captured[at] if at < len(captured) else batch_size
        return max(bisect_right(self.bounds, padded) - 1, 0)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        entries = zip(data.pop("bounds"), data.pop("candidates"), strict=True)
        for name in ("up_hysteresis", "down_hysteresis", "ceiling_coeff"):  # only `average_rule` has others
            if data[name] == RuleTable.__dataclass_fields__[name].default:
                del data[name]
        return {**data, **{str(bound): {"candidate_steps": list(members)} for bound, members in entries}}

    def text(self) -> str:
        return json.dumps(self.to_json())


@lru_cache(maxsize=1024)
def read_table(text: str) -> RuleTable:
    """Read what `Table.text` wrote."""
    data = json.loads(text)
    knobs = {name: value for name, value in data.items() if not name.isdigit()}
    bounds = sorted(int(name) for name in data if name.isdigit())
    candidates = tuple(tuple(sorted(set(data[str(bound)]["candidate_steps"]))) for bound in bounds)
    return RuleTable(tuple(bounds), candidates, **knobs)


def reloaded(table: RuleTable, dropped: int, update_interval: int) -> RuleTable:
    """Return the same ranges with another interval, and without candidate number `dropped` where there are
    several (−1: with all)."""
    candidates = table.candidates
    if dropped >= 0:
        candidates = tuple(
            tuple(steps for at, steps in enumerate(members) if at != dropped % len(members)) or members
            for members in candidates
        )
    return replace(table, candidates=candidates, update_interval=update_interval)


@lru_cache(maxsize=1024)
def damages(table: RuleTable) -> dict[str, str]:
    """Return texts of the table with one thing wrong, as a user or half a write may leave it."""
    data, text = table.to_json(), table.text()
    first, members = str(table.bounds[0]), table.candidates[0]

    def entry(candidates: Sequence[object]) -> dict[str, Any]:
        return {first: {"candidate_steps": candidates}}

    changes = {
        "nan": {"ema_alpha": float("nan")},
        "alpha": {"ema_alpha": 0},
        "interval": {"update_interval": 0},
        "negative": entry([-1, *members]),
        "boolean": entry([True]),
        "empty": entry([]),
        "word": {first: "1 3 7"},
        "key": {"update_intervall": 1},
        "twice": {"0" + first: {"candidate_steps": members[:1]}},
        "unbuilt": entry([*members, 1 + table.union[-1]]),
        "crossed": {"up_hysteresis": -1.0, "down_hysteresis": 1.0},
    }
    return {
        "half": text[: len(text) // 2],
        "nothing": "",
        "array": json.dumps(table.candidates),
        "no-range": json.dumps({name: value for name, value in data.items() if not name.isdigit()}),
        **{how: json.dumps(data | change) for how, change in changes.items()},
    }


DAMAGES = tuple(damages(RuleTable((1,), ((1,),))))


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
    switches: int = 0
    is_measured: bool = False


class AverageRule:
    """What a controller with `average_rule` must choose after each result, if no dwell holds its switches up."""

    def __init__(self, table: RuleTable, initial: int, backs_off: bool) -> None:
        self._table, self._backs_off = table, backs_off
        first = initial if initial >= 0 else table.union[len(table.union) // 2]
        self._ranges = []
        for members in table.candidates:
            index = members.index(first) if first in members else len(members) // 2
            self._ranges.append(_Range(members, index, members[index] - 1.0))

    def steps(self, number: int) -> int:
        own = self._ranges[number]
        return own.candidates[own.index]

    def due(self) -> dict[str, object]:
        """Return what the gauges of a controller that follows the rule are due to be."""
        table, ranges = self._table, self._ranges
        first_look, every = table.warmup_batches + table.update_interval, table.update_interval
        return {
            "switches": sum(own.switches for own in ranges),
            "averages": [
                [bound, own.average] for bound, own in zip(table.bounds, ranges, strict=True) if own.is_measured
            ],
            "ranges": [
                [
                    *(own.candidates[own.index], own.average, own.results, own.switches),
                    first_look - own.results
                    if own.results < first_look
                    else every - (own.results - first_look) % every,
                    *(own.is_probing, own.failed_probes, own.looks_to_probe),
                ]
                for own in ranges
            ],
        }

    def take(self, number: int, correct: Sequence[float], executed: int) -> None:
        """Take a result of a range. Raises `Undecided`."""
        own, table = self._ranges[number], self._table
        if not correct or executed != self.steps(number):
            return
        before = own.index
        if executed > 0:
            own.is_measured = True
            own.average = (1.0 - table.ema_alpha) * own.average + table.ema_alpha * (sum(correct) / len(correct))
        own.results += 1
        beyond = own.results - table.warmup_batches
        if beyond > 0 and beyond % table.update_interval == 0:
            self._probe(own) if executed == 0 else self._look(own)
        own.switches += own.index != before

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
        if members[target] == 0 and self._backs_off:
            own.looks_to_probe = min(2**own.failed_probes, LONGEST_WAIT) if own.is_probing else 1
        own.is_probing, own.index = False, target

    @staticmethod
    def _above(average: float, threshold: float) -> bool:
        if average != threshold and math.isclose(average, threshold, rel_tol=0, abs_tol=1e-9):
            raise Undecided
        return average > threshold
