"""The table of a configuration, as the suite reads it: the ranges, their candidates, and where a batch size belongs."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
            if data[name] == Table.__dataclass_fields__[name].default:
                del data[name]
        return {**data, **{str(bound): {"candidate_steps": list(members)} for bound, members in entries}}

    def text(self) -> str:
        return json.dumps(self.to_json())


@lru_cache(maxsize=1024)
def read_table(text: str) -> Table:
    """Read what `Table.text` wrote."""
    data = json.loads(text)
    knobs = {name: value for name, value in data.items() if not name.isdigit()}
    bounds = sorted(int(name) for name in data if name.isdigit())
    candidates = tuple(tuple(sorted(set(data[str(bound)]["candidate_steps"]))) for bound in bounds)
    return Table(tuple(bounds), candidates, **knobs)


def reloaded(table: Table, dropped: int, update_interval: int) -> Table:
    """Return the same ranges with another interval, and without candidate number `dropped` where there are several (−1: with all)."""
    candidates = table.candidates
    if dropped >= 0:
        candidates = tuple(
            tuple(steps for at, steps in enumerate(members) if at != dropped % len(members)) or members
            for members in candidates
        )
    return replace(table, candidates=candidates, update_interval=update_interval)


@lru_cache(maxsize=1024)
def damages(table: Table) -> dict[str, str]:
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


DAMAGES = tuple(damages(Table((1,), ((1,),))))
