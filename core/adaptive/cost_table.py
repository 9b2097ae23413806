"""What a decode round costs on a device, for each step count and batch size: the table that `goodput` decides with."""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, ForetokenError, Problem, nearest
from ..parsing import ParseError, parse_json

_KEYS = ("steps", "batch_sizes", "round_ns", "kv_token_ps")
_LARGEST = 1 << 53
_PROBE_TOKENS = 100_000  # of KV, for its cost


class UnknownStepCost(ForetokenError):
    """The table has no row for a step count; the message names the ones it has."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Round times on a grid of step counts and batch sizes, plus the cost of the KV that is read.

    `round_ns[i][j]` is the time in ns of a round with `steps[i]` draft steps (0 is plain decoding) and `batch_sizes[j]` rows without any
    KV. Each KV token that the whole batch reads adds `kv_token_ps[i]` picoseconds. All integers, so that interpolation is exact: equal
    tables and arguments give equal times everywhere. Raises `ConfigError` with all problems at once.
    """

    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    round_ns: tuple[tuple[int, ...], ...]
    kv_token_ps: tuple[int, ...]

    def __post_init__(self) -> None:
        problems = _problems({key: getattr(self, key) for key in _KEYS})
        if problems:
            raise ConfigError("<cost table>", problems)

    def round_time_ns(self, steps: int, batch_size: int, kv_tokens: int = 0) -> int:
        """Return the time of one round, linear between batch sizes; beyond the grid the nearest segment goes on.

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

    def to_json(self) -> str:
        return json.dumps({key: getattr(self, key) for key in _KEYS})

    @classmethod
    def from_json(cls, text: str, source: str = "<cost table>") -> CostTable:
        """Read what `to_json` wrote. Raises `ConfigError` with the source and all problems."""
        try:
            table = parse_json(text)
        except ParseError as error:
            raise ConfigError(source, [Problem("", f"is not JSON: {error}")]) from None
        if not isinstance(table, Mapping):
            raise ConfigError(source, [Problem("", "is no JSON object; expected " + ", ".join(_KEYS))])
        problems = [
            Problem(str(key), f"is not a known key{nearest(str(key), _KEYS)}; expected one of {', '.join(_KEYS)}")
            for key in table
            if key not in _KEYS
        ]
        problems += [Problem(key, "is missing") for key in _KEYS if key not in table]
        problems += _problems({key: table[key] for key in _KEYS if key in table})
        if problems:
            raise ConfigError(source, problems)
        rows = tuple(tuple(row) for row in table["round_ns"])
        return cls(tuple(table["steps"]), tuple(table["batch_sizes"]), rows, tuple(table["kv_token_ps"]))

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
    """Return everything wrong with the columns of a table that are there."""
    problems: list[Problem] = []
    lengths: dict[str, int] = {}
    for key, lowest in (("steps", 0), ("batch_sizes", 1), ("kv_token_ps", 0)):
        if key not in table:
            continue
        values = table[key]
        expected = f"expected a non-empty list of integers >= {lowest}"
        if not isinstance(values, list | tuple) or not values:
            problems.append(Problem(key, expected))
            continue
        lengths[key] = len(values)
        wrong = [index for index, value in enumerate(values) if not _is_integer(value, lowest)]
        problems += [Problem(f"{key}[{index}]", f"is {values[index]!r}; {expected}") for index in wrong]
        ascending = wrong or all(a < b for a, b in itertools.pairwise(values))
        if key != "kv_token_ps" and not ascending:
            problems.append(Problem(key, f"is {list(values)}; expected ascending numbers without repeats"))
    steps, sizes = lengths.get("steps"), lengths.get("batch_sizes")
    if steps is not None and lengths.get("kv_token_ps", steps) != steps:
        problems.append(Problem("kv_token_ps", f"has {lengths['kv_token_ps']} numbers; expected {steps}, one per step"))
    rows = table.get("round_ns")
    if "round_ns" in table and not isinstance(rows, list | tuple):
        problems.append(Problem("round_ns", "expected a list of rows, one per step"))
    elif rows is not None:
        if steps is not None and len(rows) != steps:
            problems.append(Problem("round_ns", f"has {len(rows)} rows; expected {steps}, one per step"))
        for i, row in enumerate(rows):
            if not isinstance(row, list | tuple) or (sizes is not None and len(row) != sizes):
                problems.append(Problem(f"round_ns[{i}]", f"expected a list of {sizes} numbers, one per batch size"))
                continue
            for j, value in enumerate(row):
                if not _is_integer(value, 1):
                    problems.append(Problem(f"round_ns[{i}][{j}]", f"is {value!r}; expected an integer >= 1, in ns"))
    return problems


def _is_integer(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= _LARGEST
