"""The tables of a search: the numbers that make one, and which are tried next."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import ConfigError
from ...sim.scenario import Scenario
from ..candidates.rounds import RoundModel

FIRST_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Smallest batch sizes of the ranges, each twice the one before: the sizes that servers capture."""
WIDEST = 2
KNOBS: dict[str, tuple[float, ...]] = {  # of the controller: the values that are tried
    "ema_alpha": (0.02, 0.05, 0.1, 0.2, 0.35, 0.5),
    "update_interval": (2, 5, 10, 20, 40),
    "up_hysteresis": (-0.25, -0.1, 0.0, 0.1, 0.25, 0.5),
    "gap": (0.0, 0.1, 0.25, 0.5),  # from down_hysteresis up to up_hysteresis: the other way round it would oscillate
}

Table = Mapping[str, Any]
"""A table of adaptive steps in our own format (docs/planning.md)."""


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The numbers that make a table.

    Attributes:
        steps: The middle number of each range; a larger batch never has more than a smaller one.
        width: How many neighbours on both sides are candidates, too. With 0 the controller has nothing to choose, and
            the knobs have no effect.
        ema_alpha, update_interval, up_hysteresis, gap: Values of KNOBS.
    """

    steps: tuple[int, ...]
    width: int = 0
    ema_alpha: float = 0.2
    update_interval: int = 5
    up_hysteresis: float = 0.0
    gap: float = 0.25

    def __post_init__(self) -> None:
        falling = tuple(itertools.accumulate(self.steps, min))
        object.__setattr__(self, "steps", falling)

    def with_steps(self, index: int, count: int) -> TableChoice:
        """Return the choice with another number in one range; ranges before it have at least as many."""
        return replace(self, steps=(*(max(one, count) for one in self.steps[:index]), count, *self.steps[index + 1 :]))

    def knobs(self) -> dict[str, Any]:
        """Return the keys of the controller in a table; none where it has nothing to choose."""
        if not self.width:
            return {}
        return {
            "ema_alpha": self.ema_alpha,
            "update_interval": self.update_interval,
            "up_hysteresis": self.up_hysteresis,
            "down_hysteresis": round(self.up_hysteresis - self.gap, 3),
        }


@dataclass(frozen=True)
class TableSpace:
    """Every range has a middle number of steps, and as candidates that and up to WIDEST neighbours on both sides."""

    bounds: tuple[int, ...]
    most_steps: int

    @classmethod
    def of(cls, most_rows: int, most_steps: int) -> TableSpace:
        return cls(tuple(bound for bound in FIRST_BOUNDS if bound <= most_rows), most_steps)

    def table(self, choice: TableChoice) -> Table:
        """Return the table of a choice; neighbouring ranges with the same candidates become one."""
        table: dict[str, Any] = {}
        before, knobs = None, choice.knobs()
        for bound, middle in zip(self.bounds, choice.steps, strict=True):
            low, high = max(0, middle - choice.width), min(self.most_steps, middle + choice.width)
            candidates = list(range(low, high + 1))
            if candidates != before:
                table[str(bound)] = {"candidate_steps": candidates, **knobs}
            before = candidates
        return table

    def neighbours(self, choice: TableChoice) -> Iterator[TableChoice]:
        """Yield the choices that differ from this one by one move: a step more or less in one range, then a wider or
        narrower choice, then the next value of a knob."""
        for index, count in enumerate(choice.steps):
            for other in (count - 1, count + 1):
                if 0 <= other <= self.most_steps:
                    yield choice.with_steps(index, other)
        for width in (choice.width - 1, choice.width + 1):
            if 0 <= width <= WIDEST:
                yield replace(choice, width=width)
        if choice.width:
            for name, values in KNOBS.items():
                at = values.index(getattr(choice, name))
                for value in (*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]):
                    changed: dict[str, Any] = {name: value}
                    yield replace(choice, **changed)

    def starts(self, model: RoundModel, context: int, measured: Sequence[tuple[float, int]]) -> list[TableChoice]:
        """Return the first choices of a search; `measured` has batch sizes and their best steps, ascending.

        For each range the best steps as measured and by the cost model, alone and with their neighbours.
        """
        priced = [
            model.best(min(bound, model.most_rows(context, 0)), context, self.most_steps).shape.steps
            for bound in self.bounds
        ]
        nearest = [min(measured, key=lambda pair: abs(math.log(max(pair[0], 1.0) / bound)))[1] for bound in self.bounds]
        return [TableChoice(tuple(steps), width) for steps in (nearest, priced) for width in range(WIDEST + 1)]


class LocalSearch:
    """Proposes choices: first the given ones, then the untried neighbours of the best choice known, then of the next
    best. Two choices that make the same table are one. Draws nothing: the same scores give the same proposals."""

    def __init__(self, space: TableSpace, starts: Sequence[TableChoice]) -> None:
        self.space = space
        self._starts = iter(starts)
        self._seen: set[str] = set()
        self._order = itertools.count()
        self._around: list[tuple[float, int, Iterator[TableChoice]]] = []  # a heap: (-score, order, neighbours to come)

    def propose(self, most: int) -> list[TableChoice]:
        """Return up to `most` new choices; fewer only if no neighbour of a known choice is new."""
        chosen: list[TableChoice] = []
        while len(chosen) < most and (choice := self._next()) is not None:
            if self._is_new(choice):
                chosen.append(choice)
        return chosen

    def learn(self, choice: TableChoice, score: float) -> None:
        """Note the score of a choice, which is not proposed again; more is better."""
        self._is_new(choice)
        heapq.heappush(self._around, (-score, next(self._order), self.space.neighbours(choice)))

    def _is_new(self, choice: TableChoice) -> bool:
        """Return whether no other choice with the same table was here before."""
        key, before = repr(self.space.table(choice)), len(self._seen)
        self._seen.add(key)
        return len(self._seen) > before

    def _next(self) -> TableChoice | None:
        choice = next(self._starts, None)
        while choice is None and self._around:
            choice = next(self._around[0][2], None)
            if choice is None:
                heapq.heappop(self._around)
        return choice


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
