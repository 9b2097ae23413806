"""The table of a configuration, as the suite reads it: the ranges, their candidates, and where a batch size belongs."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """`candidates[i]` belong to batch sizes from `bounds[i]` on; the knobs hold for all ranges."""

    bounds: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    update_interval: int = 5
    warmup_batches: int = 10
    ema_alpha: float = 0.2
    min_dwell_batches: int = 0

    @property
    def union(self) -> tuple[int, ...]:
        return tuple(sorted({steps for members in self.candidates for steps in members}))

    def range_of(self, batch_size: int, captured: Sequence[int]) -> int:
        """The number of the range that a batch of this size belongs to, padded to the next captured size."""
        at = bisect_left(captured, batch_size)
        padded = captured[at] if at < len(captured) else batch_size
        return max(bisect_right(self.bounds, padded) - 1, 0)

    def to_json(self) -> dict[str, Any]:
        knobs = {
            "update_interval": self.update_interval,
            "warmup_batches": self.warmup_batches,
            "ema_alpha": self.ema_alpha,
            "min_dwell_batches": self.min_dwell_batches,
        }
        entries = zip(self.bounds, self.candidates, strict=True)
        return {**knobs, **{str(bound): {"candidate_steps": list(members)} for bound, members in entries}}

    def text(self) -> str:
        return json.dumps(self.to_json())


@lru_cache(maxsize=1024)
def read_table(text: str) -> Table:
    """The table that `Table.text` wrote."""
    data = json.loads(text)
    knobs = {name: value for name, value in data.items() if not name.isdigit()}
    bounds = sorted(int(name) for name in data if name.isdigit())
    candidates = tuple(tuple(sorted(set(data[str(bound)]["candidate_steps"]))) for bound in bounds)
    return Table(tuple(bounds), candidates, **knobs)


def reloaded(table: Table, dropped: int, update_interval: int) -> Table:
    """The same ranges, with another interval, and where there are several candidates without one of them."""
    kept = tuple(
        tuple(steps for at, steps in enumerate(members) if len(members) == 1 or at != dropped % len(members))
        if dropped >= 0
        else members
        for members in table.candidates
    )
    rest = (table.warmup_batches, table.ema_alpha, table.min_dwell_batches)
    return Table(table.bounds, kept, update_interval, *rest)


DAMAGES = (
    *("half", "nothing", "array", "nan", "alpha", "interval", "negative", "boolean", "empty", "no-range", "word"),
    *("key", "twice", "unbuilt", "crossed"),
)


def damaged(table: Table, how: str) -> str:
    """The text of a table with one thing wrong, as a user or half a write may leave it."""
    data = table.to_json()
    first = str(table.bounds[0])
    match how:
        case "half":
            return table.text()[: len(table.text()) // 2]
        case "nothing":
            return ""
        case "array":
            return json.dumps(list(table.candidates))
        case "nan":
            data["ema_alpha"] = float("nan")
        case "alpha":
            data["ema_alpha"] = 0
        case "interval":
            data["update_interval"] = 0
        case "negative":
            data[first] = {"candidate_steps": [-1, *table.candidates[0]]}
        case "boolean":
            data[first] = {"candidate_steps": [True]}
        case "empty":
            data[first] = {"candidate_steps": []}
        case "no-range":
            data = {name: value for name, value in data.items() if not name.isdigit()}
        case "word":
            data[first] = "1 3 7"
        case "key":
            data["update_intervall"] = 1
        case "twice":
            data["0" + first] = {"candidate_steps": [table.candidates[0][0]]}
        case "unbuilt":
            data[first] = {"candidate_steps": [*table.candidates[0], 1 + table.union[-1]]}
        case "crossed":
            data |= {"up_hysteresis": -1.0, "down_hysteresis": 1.0}
    return json.dumps(data)
