"""The search of the least number of engines that serve a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..slo import Objective
from .judge import LoadJudge, Search


def least_count(
    settings: Mapping[str, Any],
    key: str,
    start: int,
    unit: int,
    objectives: tuple[Objective, ...],
    seeds: Sequence[int],
    most: int,
) -> Search:
    """Search the least number of engines, a multiple of `unit` up to `most`, with which the objectives hold.
    `start`: a first guess."""
    judge = LoadJudge(settings, key, objectives, seeds)
    fails, step = 0, unit
    most = most // unit * unit
    holds = min(max(unit, start // unit * unit), most)
    while not (yield from judge.is_held(holds)):
        if holds + unit > most:
            return judge.finding(0, holds)
        fails, holds, step = holds, min(holds + step, most), 2 * step
    step = unit
    while holds - fails > unit:
        value = (fails + holds) // (2 * unit) * unit if fails else max(unit, holds - step)
        if (yield from judge.is_held(value)):
            holds, step = value, 2 * step
        else:
            fails = value
    return judge.finding(holds, holds, needs_seeds=judge.needs_seeds(holds))
