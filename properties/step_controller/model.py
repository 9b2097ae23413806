"""What a step controller's trial looks at: the operation, the result that was passed, and all that is shown before and
after.

Results come from stationary processes: for every round and row, how many drafts would be accepted at most; the same in
every run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...core.draws import Purpose, hash64
from .contract import StepControllerCapabilities, StepControllerConfig
from .rule import RuleTable, read_table


def looked_at(config: StepControllerConfig, has: StepControllerCapabilities | None = None) -> tuple[int, ...]:
    """Return batch sizes at both sides of every edge that routing has, at most eight."""
    edges = [*read_table(config.table).bounds, *(size + 1 for size in config.captured)]
    sizes = sorted({size for edge in edges for size in (edge - 1, edge) if 0 < size <= 64} | {1})
    return tuple(sizes[:8])


RUNS = ((0,), (1,), (2,), (7,), (8, 0), (0, 1, 2), (3, 5), (1, 0, 0, 0))
"""How many drafts of each row would be accepted at most, over the rows in turn; with S steps, min(run, S) are."""

DEPTH = 8

PERMILLE: dict[str, tuple[int, ...]] = {
    "useless": (0,),
    "poor": (150, 200),
    "chat": (605, 596, 647, 695, 729),
    "code": (608, 641, 692, 749, 769),
    "shallow": (950, 100),
    "excellent": (900,),
}
"""Conditional acceptance by position, in permille; the last one goes on."""

CONSTANT: dict[str, tuple[int, ...]] = {
    "always-0": (0,),
    "always-1": (1,),
    "always-2": (2,),
    "mixed-1-3": (1, 3, 1, 3, 1, 3, 1, 3),
    "always-all": (DEPTH,),
}
"""The same runs in every round, over the rows in turn."""

PROCESSES = (*PERMILLE, *CONSTANT)


@lru_cache(maxsize=64)
def longest_runs(process: str, batch_size: int, rounds: int, lift: int) -> np.ndarray:
    """Return int64 [rounds, batch_size]; `lift` more in every row, up to DEPTH."""
    if process in CONSTANT:
        row = np.resize(np.array(CONSTANT[process]), batch_size)
        runs = np.broadcast_to(row, (rounds, batch_size))
    else:
        given = PERMILLE[process]
        limits = np.array([given[min(j, len(given) - 1)] for j in range(DEPTH)], np.uint64)
        position = np.arange(rounds * DEPTH).reshape(rounds, 1, DEPTH)
        bits = hash64(2026, Purpose.SWARM, np.arange(batch_size)[None, :, None], position, lane=5)
        runs = np.cumprod((bits >> np.uint64(32)) % np.uint64(1000) < limits, axis=2).sum(axis=2)
    return np.minimum(runs + lift, DEPTH).astype(np.int64)


@lru_cache(maxsize=256)
def correct_drafts(process: str, batch_size: int, rounds: int, lift: int, steps: int) -> np.ndarray:
    """Return int64 [rounds, batch_size]: what rounds of `steps` steps accept."""
    return np.minimum(longest_runs(process, batch_size, rounds, lift), steps)


GARBAGE: dict[str, Callable[[int], float]] = {
    "nan": lambda steps: math.nan,
    "infinite": lambda steps: math.inf,
    "minus-infinite": lambda steps: -math.inf,
    "negative": lambda steps: -1,
    "too-many": lambda steps: steps + 1,
    "a-bit-too-many": lambda steps: steps + 0.5,
    "huge": lambda steps: 10**30,
    "huge-integer": lambda steps: 2**63 - 1,
    "minus-huge": lambda steps: -(2**63),
}
"""Kind -> the value that no round of so many steps can have produced."""


class BuildFailed(RuntimeError):
    """A graph could not be captured."""


class RecordingBuilder:
    """Builds the graphs that a controller asks for, and fails when asked to. `built` has the last one of each
    (steps, draft tokens, batch size)."""

    def __init__(self) -> None:
        self.built: dict[tuple[int, int, int], str] = {}
        self.builds_to_failure = 0  # 0: none fails
        self.num_builds = 0

    def __call__(self, steps: int, num_draft_tokens: int, batch_size: int) -> str:
        self.num_builds += 1
        if self.builds_to_failure:
            self.builds_to_failure -= 1
            if not self.builds_to_failure:
                raise BuildFailed(f"the graph of {steps} steps for {batch_size} rows does not fit")
        graph = f"graph {self.num_builds}: {steps} steps, {num_draft_tokens} draft tokens, {batch_size} rows"
        self.built[steps, num_draft_tokens, batch_size] = graph
        return graph


class Shown(NamedTuple):
    """All that a controller shows; None where it declares no such capability.
    Steps and averages are one per batch size looked at."""

    steps: tuple[int, ...]
    state: object = None
    averages: tuple[float, ...] | None = None
    counted: tuple[int, ...] | None = None
    graphs: tuple[object, ...] | None = None  # of every batch size and each of its candidates


MOST_WAITING = 1_000
"""Results after which a controller that knows the cost has looked again; ours looks every 64, once settled."""


class GaugeAccount:
    """Recounts what a controller's gauges say: the results that it has taken, and the steps that it has chosen.
    `candidates`: all steps that it can choose."""

    def __init__(self, candidates: Sequence[int]) -> None:
        self._candidates = candidates
        self.is_known: bool = True  # no result was taken that no round can have
        self._lengths: Counter[int] = Counter()  # accepted drafts of a row -> how many rows
        self._latest: list[tuple[int, Sequence[float]]] = []  # draft steps and accepted drafts of each result
        self.results = self._proposed = self._changes = 0
        self._steps: int | None = None

    def choose(self, steps: int) -> int:
        """Note that these steps were chosen, and return them."""
        self._changes += self._steps not in (None, steps)
        self._steps = steps
        return steps

    def take(self, correct: Sequence[float], executed: int, is_good: bool) -> None:
        """Count a result. From one on that no round can have, what is due is not known."""
        self.is_known &= is_good
        if is_good:
            self._lengths.update(int(each) for each in correct)
            self._proposed += executed * len(correct)
            self.results += bool(correct)
            if executed and executed in self._candidates:
                self._latest.append((executed, tuple(correct)))

    def due(self) -> dict[str, float | list[int] | None]:
        """Return what the gauges are due to be. Lengths that no row has had, behind the longest, are left out."""
        rows, correct = self._lengths.total(), sum(length * count for length, count in self._lengths.items())
        longest = max(self._lengths, default=-1)
        return {
            "steps": self._steps,
            "draft_tokens": None if self._steps is None else self._steps + 1,
            "changes": self._changes,
            "accept_length": 1 + correct / rows if rows else 0.0,
            "accept_rate": correct / self._proposed if self._proposed else 0.0,
            "histogram": [self._lengths[length] for length in range(longest + 1)],
        }

    def are_latest(self, waiting: Counter[tuple[int, int]]) -> bool:
        """Return whether the latest results, at most MOST_WAITING, have so many rows of (draft steps, accepted drafts).
        Those before them do not wait again, and are forgotten."""
        rows: Counter[tuple[int, int]] = Counter()
        at = len(self._latest)
        while at and rows.total() < waiting.total():
            at -= 1
            executed, correct = self._latest[at]
            rows.update((executed, int(each)) for each in correct)
        del self._latest[:at]
        return rows == waiting and len(self._latest) <= MOST_WAITING


class VerifyResult(NamedTuple):
    """One verify result; `current` are the steps that the controller would have chosen at that moment."""

    executed: int
    current: int
    correct: tuple[float, ...]
    in_range: tuple[bool, ...]  # which of the batch sizes share the range of this one


class Stretch(NamedTuple):
    """A stretch of rounds with immediate results, and the steps of each.
    Rates are tokens per second: its own, those of fixed steps."""

    process: str
    batch_size: int
    candidates: tuple[int, ...]
    history: tuple[int, ...]
    rates: dict[int, float]
    rate: float
    tokens_per_row: dict[int, float]  # of fixed steps

    @classmethod
    def of(
        cls, process: str, size: int, history: Sequence[int], runs: Mapping[int, np.ndarray], times: Mapping[int, int]
    ) -> Stretch:
        """Return a stretch by what each number of steps would have accepted in its rounds, and the time of a round."""
        tokens = {steps: size + found.sum(axis=1) for steps, found in runs.items()}
        rates = {steps: int(found.sum()) * 1e9 / (len(history) * times[steps]) for steps, found in tokens.items()}
        emitted = sum(int(tokens[steps][at]) for at, steps in enumerate(history))
        rate = emitted * 1e9 / sum(times[steps] for steps in history)
        per_row = {steps: int(found.sum()) / (len(history) * size) for steps, found in tokens.items()}
        return cls(process, size, tuple(runs), tuple(history), rates, rate, per_row)

    @property
    def switches(self) -> list[int]:
        """The rounds whose steps differ from the round before."""
        h = self.history
        return [at for at in range(1, len(h)) if h[at] != h[at - 1]]

    @property
    def settled(self) -> int:
        """The steps of most rounds in the last quarter, the fewest of several."""
        last = self.history[-max(len(self.history) // 4, 1) :]
        return max(sorted(set(last)), key=last.count)


class Offered(NamedTuple):
    """All drafts were accepted for `rounds` rounds, of at most `limit`; whether the controller drafted in the end."""

    batch_size: int
    rounds: int
    drafts: bool
    limit: int


@dataclass(slots=True)
class StepControllerMoment:
    """One operation and its effects."""

    config: StepControllerConfig
    capabilities: StepControllerCapabilities
    batch_sizes: tuple[int, ...]
    operation: object
    before: Shown | None
    table: RuleTable | None = None
    candidates: tuple[tuple[int, ...], ...] = ()  # those that each of these batch sizes may have
    after: Shown | None = None
    refusal: str | None = None
    observed: VerifyResult | None = None
    garbage: object = None  # the value that no round can have produced
    added: tuple[int, int, int, int] = (0, 0, 0, 0)  # what `counted()` must have grown by
    stray_choice: tuple[int, int, tuple[int, ...]] | None = None  # (batch size, steps, candidates) of a round
    stretch: Stretch | None = None
    offered: Offered | None = None
    attached: str = ""  # "whole", or "failing" if a build has failed
    # (steps, draft tokens, batch size): built, reachable
    built_keys: tuple[frozenset[Any], frozenset[Any]] | None = None
    graphs: tuple[object, ...] | None = None  # those that must be found
    departed: tuple[int, int, int] | None = None  # (batch size, steps, steps by the rule) of the first choice beside it
    reserved: tuple[int, int, int] | None = None  # draft tokens: what it says, the least and the most that it may be
    expected: tuple[tuple[int, float], ...] = ()  # (steps, tokens per row) of the candidates of one batch size
    reordered: tuple[tuple[int, float], ...] = ()  # likewise, of a copy that got the last result first
    miscounted: tuple[str, object, object] | None = None  # a gauge, what it says, and what it is due to say
    unfinite: str = ""  # a number of the state that is not finite

    @property
    def is_bounded(self) -> bool:
        """Whether ten switches are the limit, and not one per interval."""
        return self.capabilities.goodput or self.table.min_dwell_batches > 0
