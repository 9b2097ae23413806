"""The time of a decode round on a device for each step count and batch size.

The policy `goodput` decides with this table.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, ForedraftError, Problem

_KEYS = ("steps", "batch_sizes", "round_ns", "kv_token_ps")
_RETURN = "prefill_token_ps"  # absent where it is 0
_LARGEST = 1 << 53
_PROBE_TOKENS = 100_000  # of KV, for its cost


class UnknownStepCost(ForedraftError):
    """The table has no row for a step count; the message names the ones it has."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Round times on a grid of step counts and batch sizes, plus the cost of the KV that is read.

    `round_ns[i][j]` is the time in ns of a round with `steps[i]` draft steps (0 is plain decoding) and `batch_sizes[j]`
    rows without any KV. Each KV token that the whole batch reads adds `kv_token_ps[i]` picoseconds. All numbers are
    integers, so interpolation is exact: equal tables and arguments give equal times everywhere. Raises `ConfigError`
    with all problems at once.

    `prefill_token_ps`: the picoseconds in which target and draft compute one token of a context. With it the draft may
    be parked, and the row of 0 steps is that of a parked draft (`parking.py`). 0: the draft is never parked.
    """

    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    round_ns: tuple[tuple[int, ...], ...]
    kv_token_ps: tuple[int, ...]
    prefill_token_ps: int = 0

    def __post_init__(self) -> None:
        problems = _problems({key: getattr(self, key) for key in (*_KEYS, _RETURN)})
        if problems:
            raise ConfigError("<cost table>", problems)

    def round_time_ns(self, steps: int, batch_size: int, kv_tokens: int = 0) -> int:
        """Return the time of one round. It is linear between batch sizes, and the nearest segment extends beyond the
        grid.

        Raises `UnknownStepCost` for a step count that the table does not have.
        """
        try:
            row = self.steps.index(steps)
        except ValueError:
            raise UnknownStepCost(f"no cost for {steps} steps; the cost table has {list(self.steps)}") from None
        times, sizes = self.round_ns[row], self.batch_sizes
        kv_ns = self.kv_token_ps[row] * kv_tokens // 1000
        if len(sizes) == 1:
            return times[0] + kv_ns
        j = min(max(bisect_right(sizes, batch_size), 1), len(sizes) - 1)
        left, right = sizes[j - 1], sizes[j]
        numerator = times[j - 1] * (right - batch_size) + times[j] * (batch_size - left)
        return max(1, numerator // (right - left)) + kv_ns

    def to_json(self) -> dict[str, Any]:
        optional = {_RETURN: self.prefill_token_ps} if self.prefill_token_ps else {}
        return {key: getattr(self, key) for key in _KEYS} | optional

    @classmethod
    def from_json(cls, table: Any, source: str = "<cost table>") -> CostTable:
        """Read the object that `to_json` returned. Raises `ConfigError` with the source and all problems."""
        if not isinstance(table, Mapping) or sorted({*table} - {_RETURN}) != sorted(_KEYS):
            raise ConfigError.of(source, "", f"expected an object with {', '.join(_KEYS)}; {_RETURN} may be there, too")
        table = {_RETURN: 0, **table}
        problems = _problems(table)
        if problems:
            raise ConfigError(source, problems)
        rows = tuple(tuple(row) for row in table["round_ns"])
        return cls(
            tuple(table["steps"]), tuple(table["batch_sizes"]), rows, tuple(table["kv_token_ps"]), table[_RETURN]
        )

    @classmethod
    def from_function(
        cls, round_ns: Callable[[int, int, int], int], steps: Sequence[int], batch_sizes: Sequence[int]
    ) -> CostTable:
        """Sample `round_ns(batch_size, steps, kv_tokens)`; the KV slope is taken at the largest batch size."""
        largest = max(batch_sizes)
        rows = tuple(tuple(int(round_ns(size, step, 0)) for size in batch_sizes) for step in steps)
        slopes = tuple(
            max(0, (int(round_ns(largest, step, _PROBE_TOKENS)) - int(round_ns(largest, step, 0))) * 1000)
            // _PROBE_TOKENS
            for step in steps
        )
        return cls(tuple(steps), tuple(batch_sizes), rows, slopes)


def _problems(table: Mapping[str, Any]) -> list[Problem]:
    """Return all problems of the columns of a table."""
    steps, sizes, rows, slopes = (table[key] for key in _KEYS)
    if not _are_integers([table[_RETURN]], 0):
        return [Problem(_RETURN, f"is {table[_RETURN]!r}; expected an integer >= 0")]
    problems = [
        Problem(key, f"is {values!r}; expected ascending integers >= {lowest}")
        for key, values, lowest in (("steps", steps, 0), ("batch_sizes", sizes, 1))
        if not _are_integers(values, lowest) or not values or any(a >= b for a, b in itertools.pairwise(values))
    ]
    if problems:
        return problems
    if not _are_integers(slopes, 0) or len(slopes) != len(steps):
        problems.append(Problem("kv_token_ps", f"is {slopes!r}; expected {len(steps)} integers >= 0, one per step"))
    if not isinstance(rows, list | tuple) or len(rows) != len(steps):
        return [*problems, Problem("round_ns", f"expected {len(steps)} rows, one per step")]
    expected = f"expected {len(sizes)} integers >= 1 (ns), one per batch size"
    wrong = [i for i, row in enumerate(rows) if not _are_integers(row, 1) or len(row) != len(sizes)]
    return problems + [Problem(f"round_ns[{i}]", f"is {rows[i]!r}; {expected}") for i in wrong]


def _are_integers(values: Any, lowest: int) -> bool:
    return isinstance(values, list | tuple) and all(
        type(value) is int and lowest <= value <= _LARGEST for value in values
    )
