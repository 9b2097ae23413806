"""The tables of a search: the numbers that a trial chooses, and the table of steps that follows from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from ...sim.scenario import Scenario
from ..rounds.model import RoundModel

FIRST_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Smallest batch sizes of the ranges, each twice the one before: the sizes that servers capture."""
WIDEST = 2
KNOBS: dict[str, tuple[float, float]] = {  # of the controller: the least and the greatest value that is tried
    "ema_alpha": (0.02, 0.5),
    "update_interval": (2, 40),
    "up_hysteresis": (-0.25, 0.5),
    "gap": (0.0, 0.5),  # from down_hysteresis up to up_hysteresis: the other way round it would oscillate
}
USUAL_KNOBS: dict[str, float] = {"ema_alpha": 0.2, "update_interval": 5, "up_hysteresis": 0.0, "gap": 0.25}

Table = Mapping[str, Any]
"""A table of adaptive steps in our own format (docs/adaptive.md)."""


@dataclass(frozen=True)
class TableSpace:
    """Every range has a middle number of steps, and as candidates that and up to `width` neighbours on both sides.

    Width 0 is one number of steps for each range. Some servers take only such tables, in which the controller has
    nothing to choose.
    """

    bounds: tuple[int, ...]
    most_steps: int

    @classmethod
    def of(cls, most_rows: int, most_steps: int) -> TableSpace:
        return cls(tuple(bound for bound in FIRST_BOUNDS if bound <= most_rows), most_steps)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return the numbers that an optuna trial chooses."""
        numbers = {f"steps_{bound}": trial.suggest_int(f"steps_{bound}", 0, self.most_steps) for bound in self.bounds}
        numbers["width"] = trial.suggest_int("width", 0, WIDEST)
        for name, (low, high) in KNOBS.items():
            suggest = trial.suggest_int if isinstance(low, int) else trial.suggest_float
            numbers[name] = suggest(name, low, high, log=name in ("ema_alpha", "update_interval"))
        return numbers

    def table(self, numbers: Mapping[str, Any]) -> Table:
        """Return the table of these numbers; neighbouring ranges with the same candidates become one."""
        width = numbers["width"]
        knobs = {} if not width else self._knobs(numbers)
        table: dict[str, Any] = {}
        before, middle = None, self.most_steps
        for bound in self.bounds:
            middle = min(middle, numbers[f"steps_{bound}"])  # a larger batch never pays more steps than a smaller one
            candidates = list(range(max(0, middle - width), min(self.most_steps, middle + width) + 1))
            if candidates != before:
                table[str(bound)] = {"candidate_steps": candidates, **knobs}
            before = candidates
        return table

    @staticmethod
    def _knobs(numbers: Mapping[str, Any]) -> dict[str, Any]:
        up = round(numbers["up_hysteresis"], 3)
        return {
            "ema_alpha": round(numbers["ema_alpha"], 3),
            "update_interval": numbers["update_interval"],
            "up_hysteresis": up,
            "down_hysteresis": round(up - numbers["gap"], 3),
        }

    def starts(self, model: RoundModel, context: int, measured: Sequence[tuple[float, int]]) -> list[dict[str, Any]]:
        """Return the first trials of a search; `measured` has batch sizes and their best steps, ascending.

        For each range the best steps as measured and by the cost model, alone and with their neighbours. Then every
        fixed number of steps.
        """
        priced = [
            model.best(min(bound, model.most_rows(context, 0)), context, self.most_steps).steps for bound in self.bounds
        ]
        nearest = [min(measured, key=lambda pair: abs(math.log(max(pair[0], 1.0) / bound)))[1] for bound in self.bounds]
        starts = [self._start(steps, width) for steps in (nearest, priced) for width in range(WIDEST + 1)]
        return [*starts, *(self._start([steps] * len(self.bounds), 0) for steps in range(self.most_steps + 1))]

    def _start(self, steps: Sequence[int], width: int) -> dict[str, Any]:
        return {f"steps_{bound}": count for bound, count in zip(self.bounds, steps, strict=True)} | {
            "width": width,
            **USUAL_KNOBS,
        }


def chosen_steps(scenario: Scenario) -> dict[str, Any]:
    """Return the tables of a scenario without a number of draft steps; `settings_of` sets it.

    Raises ConfigError for trees with a given number of nodes, which not every number of steps can fill.
    """
    tables = scenario.model_dump(mode="json")
    own = dict(tables["speculation"])
    if own["topk"] > 1 and own["num_draft_tokens"] is not None:
        message = "leave it out: steps are tuned for trees with as many nodes as the steps can fill, up to 16"
        raise ConfigError.of("speculation", "num_draft_tokens", message)
    for key in ("policy", "steps", "adaptive", "num_draft_tokens"):
        del own[key]
    return {**tables, "speculation": own}


def settings_of(table: Table) -> dict[str, Any]:
    """Return the keys of a scenario that use a table; one number of steps for all batch sizes is the policy `fixed`."""
    steps = list(itertools.chain.from_iterable(slot["candidate_steps"] for slot in table.values()))
    if len(set(steps)) == 1:
        return fixed_settings(steps[0])
    chosen = {} if is_schedule(table) else {"speculation.policy": "ema"}  # of one candidate there is no choice
    return {**chosen, "speculation.adaptive": dict(table)}


def fixed_settings(steps: int) -> dict[str, Any]:
    """Return the keys of a scenario with this number of steps in every round."""
    return {"speculation.policy": "fixed", "speculation.steps": steps}


def is_schedule(table: Table) -> bool:
    """Return whether a table has one number of steps for each range."""
    return all(len(slot["candidate_steps"]) == 1 for slot in table.values())
