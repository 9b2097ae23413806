"""The times of the passes of a round, by which the policy `confidence` weighs how many drafts to verify.

A round drafts for its rows and verifies so many tokens in one pass of the target:

    time = draft(steps, rows) + verify(tokens) + KV tokens that are read

Verify times rise with the tokens. Up to the captured limit they are a staircase: a pass takes the time of the next
captured size. Beyond they are linear between the sizes that were measured there, and past the last two. Up to the first
of these a pass takes its time: a pass that no graph holds has little in common with the largest that one holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...contract.arrays import Float64Array
from ...errors import ConfigError, Problem
from ..cost_table import CostTable

_LARGEST = 1 << 53
_OPTIONAL = ("beside_prompts", "budget_ns", "captured_rows")
NO_LIMIT = _LARGEST  # of captured tokens: a staircase without an end


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Times in ns. Raises `ConfigError` with all problems at once.

    `draft_ns[i][j]`: all passes of the draft for `steps[i]` draft steps and `batch_sizes[j]` rows, linear between
    sizes.
    `verify_ns[j]`: the target's pass over `tokens[j]`, and what follows it. `captured_tokens`: the largest captured
    size, 0 without graphs. `kv_token_ps[i]`: picoseconds for each KV token that the batch reads, draft and target.
    `budget_ns`: what a budget adds to a round, whatever it is: confidences are computed, and rows are packed. 0: all
    rounds have one. `beside_prompts`: whether the greatest sizes say what rounds with prompts beside them take; if not,
    these take the times of rounds alone. `captured_rows`: the captured sizes where they count rows, ascending: a pass
    over t tokens of a round with s steps computes those of the first size × (s + 1) that holds them. Empty: sizes count
    tokens.
    """

    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    draft_ns: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    verify_ns: tuple[int, ...]
    kv_token_ps: tuple[int, ...]
    captured_tokens: int = 0
    budget_ns: int = 0
    beside_prompts: bool = True
    captured_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ConfigError("<pass costs>", problems)

    def draft_time(self, steps: int, rows: int, kv_tokens: int = 0) -> float:
        """Return the time of drafting and of reading the KV, ns."""
        row = self.steps.index(steps)
        drafting = float(_beyond(np.array([rows]), self.batch_sizes, self.draft_ns[row])[0])
        return drafting + kv_tokens * self.kv_token_ps[row] / 1000

    def verify_times(self, tokens: np.ndarray) -> Float64Array:
        """Return the times of passes over so many tokens, ns, of the shape of `tokens`."""
        times = np.maximum.accumulate(np.array(self.verify_ns, dtype=np.float64))
        sizes = np.array(self.tokens)
        stairs = times[np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)]
        first = np.searchsorted(sizes, self.captured_tokens, side="right")  # of the sizes that no graph holds
        eager = np.maximum(tokens, sizes[first]) if first < len(sizes) else tokens
        return np.where(tokens <= self.captured_tokens, stairs, _beyond(eager, self.tokens, times))

    def padded(self, steps: int, tokens: np.ndarray) -> np.ndarray:
        """Return how many tokens the passes of rounds with so many steps compute, of the shape of `tokens`."""
        if not self.captured_rows:
            return tokens
        sizes, nodes = np.array(self.captured_rows), steps + 1
        size = np.searchsorted(sizes, -(-tokens // nodes))
        return np.where(size < len(sizes), sizes[np.minimum(size, len(sizes) - 1)] * nodes, tokens)

    def eager_times(self, tokens: np.ndarray) -> Float64Array:
        """Return the share of so many tokens, ns, in passes that prompts make larger than all captured sizes: the line
        through the greatest size and the greatest that is no more than half of it. Between neighbours a pass takes
        steps."""
        if not self.beside_prompts:
            return self.verify_times(tokens)
        sizes = np.array(self.tokens)
        half = max(int(np.searchsorted(sizes, sizes[-1] / 2, side="right")) - 1, 0)
        ends = sizes[[half, -1]]
        times = self.verify_times(ends)
        slope = (times[1] - times[0]) / max(ends[1] - ends[0], 1)
        return np.asarray(times[1] + slope * (tokens - ends[1]), dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.beside_prompts:
            del table["beside_prompts"]
        if not self.captured_rows:
            del table["captured_rows"]
        return table

    @classmethod
    def from_json(cls, table: Any, source: str = "<pass costs>") -> PassCosts:
        """Read the object that `to_json` returned. Raises `ConfigError` with the source and all problems."""
        names = [field.name for field in fields(cls)]
        if not isinstance(table, Mapping) or sorted({*_OPTIONAL, *table}) != sorted(names):
            raise ConfigError.of(source, "", f"expected an object with {', '.join(names)}")
        try:
            frozen: dict[str, Any] = {
                name: tuple(tuple(one) if isinstance(one, list) else one for one in value)
                if isinstance(value, list | tuple)
                else value
                for name, value in table.items()
            }
            return cls(**frozen)
        except ConfigError as error:
            raise ConfigError(source, error.problems) from None


Costs = CostTable | PassCosts


def costs_from_json(table: Any, source: str) -> Costs | None:
    """Read the costs of a policy, of either kind. Raises `ConfigError` with the source and all problems."""
    if table is None:
        return None
    is_of_passes = isinstance(table, Mapping) and "verify_ns" in table
    return PassCosts.from_json(table, source) if is_of_passes else CostTable.from_json(table, source)


def _beyond(values: np.ndarray, sizes: Sequence[int], times: Sequence[float] | np.ndarray) -> Float64Array:
    """Return times that are linear between sizes, and go on as between the last two."""
    found = np.interp(values, sizes, times)
    if len(sizes) > 1:
        slope = max(0.0, float(times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
        found = found + np.maximum(values - sizes[-1], 0) * slope
    return np.asarray(found, dtype=np.float64)


def _are_integers(values: Any, lowest: int) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and lowest <= value <= _LARGEST for value in values)


def _problems(table: PassCosts) -> list[Problem]:
    problems = []
    for name, lowest in (("steps", 0), ("batch_sizes", 1), ("tokens", 1)):
        values = getattr(table, name)
        if not _are_integers(values, lowest) or not values or any(a >= b for a, b in itertools.pairwise(values)):
            problems.append(Problem(name, f"is {values!r}; expected ascending integers >= {lowest}"))
    for name in ("captured_tokens", "budget_ns"):
        if not _are_integers((getattr(table, name),), 0):
            problems.append(Problem(name, f"is {getattr(table, name)!r}; expected an integer >= 0"))
    if type(table.beside_prompts) is not bool:
        problems.append(Problem("beside_prompts", f"is {table.beside_prompts!r}; expected true or false"))
    rows = table.captured_rows
    if not _are_integers(rows, 1) or any(a >= b for a, b in itertools.pairwise(rows)):
        problems.append(Problem("captured_rows", f"is {rows!r}; expected ascending integers >= 1"))
    if problems:
        return problems
    if not _are_integers(table.kv_token_ps, 0) or len(table.kv_token_ps) != len(table.steps):
        problems.append(
            Problem("kv_token_ps", f"expected {len(table.steps)} integers >= 0, one for each number of steps")
        )
    if not _are_integers(table.verify_ns, 1) or len(table.verify_ns) != len(table.tokens):
        problems.append(Problem("verify_ns", f"expected {len(table.tokens)} integers >= 1 (ns), one for each size"))
    drafts = table.draft_ns
    if not isinstance(drafts, tuple) or len(drafts) != len(table.steps):
        return [*problems, Problem("draft_ns", f"expected {len(table.steps)} rows, one for each number of steps")]
    sizes = len(table.batch_sizes)
    wrong = [i for i, row in enumerate(drafts) if not _are_integers(row, 0) or len(row) != sizes]
    return problems + [Problem(f"draft_ns[{i}]", f"expected {sizes} integers >= 0 (ns)") for i in wrong]
