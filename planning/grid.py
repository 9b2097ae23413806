"""The settings to try: `speculation.steps=0..7`, `workload.rate=1..64:log`, and every combination of
several of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import ConfigError, Problem
from ..core.parsing import ParseError, parse_toml

OPTION = "--grid"
MAX_VALUES = 10_000
"""The most values of one key, and the most combinations of all keys."""

ALGORITHM = "speculation.algorithm"
NO_SPECULATION = "NONE"
RATIO = "disaggregation.ratio"
POOLS = ("hardware.prefill.", "hardware.decode.")

_RANGE = re.compile(r"(?P<low>[^.:]+(?:\.\d+)?)\.\.(?P<high>[^.:]+(?:\.\d+)?)(?::(?P<how>[a-z]*)(?P<count>\d*))?")
_FORMS = "0..7 (every integer), 0.5..2:4 (four numbers, evenly spaced), 1..64:log (doubling), 1..64:log4, or [1, 2, 5]"


def parse_grid(axes: Sequence[str], option: str = OPTION) -> dict[str, list[Any]]:
    """Return the values of each key, from texts `key=values`.

    `values` is a TOML array, values with commas between them, or a range:

        low..high        the integers
        low..high:n      n evenly spaced numbers
        low..high:log    doublings from `low` on, and `high` itself
        low..high:logn   n numbers with one ratio between them

    Raises ConfigError for a text of another form, a key that is given twice, no values, and more than MAX_VALUES
    combinations.
    """
    grid: dict[str, list[Any]] = {}
    problems = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        key = key.strip()
        if not equals or not key:
            problems.append(Problem(axis, f"expected key=values, such as speculation.steps={_FORMS}"))
            continue
        if key in grid:
            problems.append(Problem(key, f"is given twice; give all its values in one {option}"))
            continue
        try:
            grid[key] = _values(text.strip())
        except ValueError as error:
            problems.append(Problem(key, str(error)))
    if not problems and math.prod(map(len, grid.values())) > MAX_VALUES:
        sizes = " × ".join(f"{len(values):,}" for values in grid.values())
        problems.append(Problem("", f"{sizes} combinations are more than {MAX_VALUES:,}"))
    if problems:
        raise ConfigError(option, problems)
    return grid


def parse_values(option: str, text: str, kind: type[int] | type[float], least: float) -> list[Any]:
    """Return the numbers that `text` stands for, as in a grid.
    Raises ConfigError for one of another kind or below `least`."""
    try:
        values = _values(text.strip())
        for value in values:
            if isinstance(value, bool) or not isinstance(value, kind if kind is int else (int, float)) or value < least:
                raise ValueError(f"{value!r} is no {'integer' if kind is int else 'number'} from {least} on")
    except ValueError as error:
        raise ConfigError.of(option, "", str(error)) from None
    return values


def combinations(grid: Mapping[str, Sequence[Any]], algorithm: str) -> list[dict[str, Any]]:
    """Return every combination of the values of a grid; the values of the last key change first. Without keys: one,
    which is empty.

    `algorithm` is that of the scenario. Without speculation, its other keys have no meaning, and without pools (a ratio
    of none) their hardware has none. Such combinations leave them out and occur once.
    """
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for point in points:
        unused = []
        if point.get(ALGORITHM, algorithm) == NO_SPECULATION:
            unused += [key for key in point if key.startswith("speculation.") and key != ALGORITHM]
        if point.get(RATIO, "") is None:
            unused += [key for key in point if key.startswith(POOLS)]
        for key in unused:
            del point[key]
    return list({repr(point): point for point in points}.values())


def _values(text: str) -> list[Any]:
    if text.startswith("["):
        try:
            values: list[Any] = parse_toml(f"values = {text}")["values"]
        except ParseError as error:
            raise ValueError(f"is no TOML array: {error}") from None
    elif (found := _RANGE.fullmatch(text)) is not None:
        values = _range(text, found)
    else:
        values = [_value(part.strip()) for part in text.split(",") if part.strip()]
    if not values:
        raise ValueError(f"has no values; expected {_FORMS}")
    if len({repr(value) for value in values}) < len(values):
        raise ValueError("has the same value twice")
    return values


def _value(text: str) -> Any:
    """Return a TOML value, or the text itself, so that `hardware.gpu=H100,H200` needs no quotes. `none` is no value, as
    with --set."""
    if text == "none":
        return None
    try:
        return parse_toml(f"value = {text}")["value"]
    except ParseError:
        return text


def _range(text: str, found: re.Match[str]) -> list[Any]:
    low, high = _value(found["low"].strip()), _value(found["high"].strip())
    if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high)):
        raise ValueError(f"{text!r} is no range of numbers; expected {_FORMS}")
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"the range {text!r} has no end; expected {_FORMS}")
    if low > high:
        raise ValueError(f"the range {text!r} is empty: {low} is more than {high}")
    how, count = found["how"], int(found["count"] or 0)
    if how is None:
        if not (isinstance(low, int) and isinstance(high, int)):
            raise ValueError(f"{text!r} needs a number of values, such as {low}..{high}:5")
        if high - low >= MAX_VALUES:
            raise ValueError(f"{text!r} has more than {MAX_VALUES:,} values")
        return list(range(low, high + 1))
    if how not in ("", "log") or (found["count"] and not 2 <= count <= MAX_VALUES) or (how == "" and not count):
        raise ValueError(f"{text!r} is not understood; expected {_FORMS}")
    if how == "log" and low <= 0:
        raise ValueError(f"{text!r}: a logarithmic range begins above 0")
    if how == "":
        numbers = [low + (high - low) * i / (count - 1) for i in range(count)]
    elif count:
        numbers = [low * (high / low) ** (i / (count - 1)) for i in range(count)]
    else:
        numbers = [*itertools.takewhile(lambda number: number < high, (low * 2**i for i in itertools.count())), high]
    integers = isinstance(low, int) and isinstance(high, int)
    tidy = [_tidy(number, integers) for number in numbers]
    return list(dict.fromkeys(tidy))


def _tidy(number: float, integers: bool) -> int | float:
    """Return a number without the digits of its rounding error; an integer where bounds and number are integers."""
    tidy = float(number) if number == int(number) else float(f"{number:.6g}")
    return int(tidy) if integers and tidy == int(tidy) else tidy
