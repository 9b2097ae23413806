"""SGLang's files of adaptive verification, read as what the policy `confidence` decides by, and written.

Round times (`--speculative-dspark-sps-table-path`) have one of two forms. Both are for one number of draft steps, whose
time is in every entry:

    {sample_batch_tokens, sample_steps_per_sec, max_batch_tokens}: a round that verifies t tokens takes the time of the
        greatest probe up to t, that of the first below all probes
    {bias_seconds, bs_probes, alpha_seconds, m_probes, theta_seconds}: bias + alpha(rows) + theta(rows + drafts), linear
        between probes and constant outside

Temperatures (`--speculative-dspark-confidence-sts-path`), one for each draft position:

    {temperatures, dataset, num_samples, ece_before, ece_after}: p = sigmoid(log-odds of the confidence / temperature)

Source: the Python files of SGLang's release 0.5.23 (`speculative/dspark_components`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import ConfigError, Problem, nearest, shown
from ..config import ReadFile
from ..table_text import json_kind, parse_table, repeated_keys
from .pass_costs import NO_LIMIT, PassCosts

GivenTable = str | Mapping[str, Any]
"""The path of a file, or what is in it."""

RATES = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
SUMS = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
NUMBERS = ("dataset", "num_samples", "ece_before", "ece_after")  # beside temperatures; nothing depends on them
MOST_TOKENS = 1 << 30
LONGEST_S = 1e6  # of a round
SLOWEST, FASTEST = 1e-6, 1e9  # rounds per second
COLDEST, HOTTEST = 1e-6, 1e6


def load_files(
    round_times: GivenTable | None,
    temperatures: GivenTable | None,
    candidates: Sequence[int],
    place: str,
    read_file: ReadFile | None = None,
) -> tuple[PassCosts | None, tuple[float, ...]]:
    """Read the files that were given for rounds of these numbers of draft steps. `place`: where they were named, for
    messages. Raises ConfigError, also for round times with several numbers of steps."""
    steps = candidates[-1]
    if not steps:
        return None, ()
    times: PassCosts | None = None
    found: tuple[float, ...] = ()
    if round_times is not None:
        if len(candidates) > 1:
            message = f"are of one number of draft steps, and {list(candidates)} may be chosen: give steps alone"
            raise ConfigError.of(place, "round_times", message)
        times = load_round_times(round_times, steps, f"{place}.round_times", read_file)
    if temperatures is not None:
        found = load_temperatures(temperatures, steps, f"{place}.confidence_temperatures", read_file)
    return times, found


def load_round_times(given: GivenTable, steps: int, place: str, read_file: ReadFile | None = None) -> PassCosts:
    """Read round times with `steps` draft steps, in either form. `place` names a table that is no file in messages.

    Raises ConfigError with all problems at once, also for times that fall where rows or tokens rise.
    """
    table, source = _table_of(given, place, read_file)
    is_sum = "bias_seconds" in table
    expected = SUMS if is_sum else RATES
    problems = _problems_of_keys(table, expected, ())
    if not problems:
        problems = _problems_of_sums(table) if is_sum else _problems_of_rates(table)
    if problems:
        raise ConfigError(source, problems)
    return _from_sums(table, steps) if is_sum else _from_rates(table, steps)


def _from_rates(table: Mapping[str, Any], steps: int) -> PassCosts:
    """A pass takes the time of the next size, so a size is the last one before a probe."""
    probes = table[RATES[0]]
    sizes = (*(probe - 1 for probe in probes[1:]), probes[-1])
    times = tuple(_ns(1 / rate) for rate in table[RATES[1]])
    return PassCosts((steps,), (1,), ((0,),), sizes, times, (0,), NO_LIMIT, beside_prompts=False)


def _from_sums(table: Mapping[str, Any], steps: int) -> PassCosts:
    """What all rows have in common goes to the pass of the target, since a budget changes neither."""
    alpha, theta = table["alpha_seconds"], table["theta_seconds"]
    rows, drafting = _constant_outside(table["bs_probes"], np.array(alpha) - alpha[0])
    tokens, passes = _constant_outside(table["m_probes"], np.array(theta) + (table["bias_seconds"] + alpha[0]))
    return PassCosts((steps,), rows, (drafting,), tokens, passes, (0,), beside_prompts=False)


def _constant_outside(probes: Sequence[int], seconds: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes from 1 on with their times in ns: `PassCosts` goes on behind the last two as between them."""
    sizes = (*dict.fromkeys(max(1, probe) for probe in probes), max(1, probes[-1]) + 1)
    return sizes, tuple(_ns(float(time)) for time in np.interp(sizes, probes, seconds))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def round_times_json(costs: PassCosts, steps: int, kv_tokens_per_row: int = 0) -> str:
    """Return rounds of `steps` draft steps as SGLang's sum of two functions, for rows that each read so many tokens of
    KV. Raises ConfigError if `costs` have no such steps."""
    if steps not in costs.steps:
        raise ConfigError.of("<pass costs>", "steps", f"have {list(costs.steps)}; expected {steps} among them")
    rows = list(costs.batch_sizes)
    drafting = [costs.draft_time(steps, size, size * kv_tokens_per_row) / 1e9 for size in rows]
    # Of a staircase, the token behind a size takes the time of the next one.
    sizes = {*costs.tokens, *(size * (steps + 1) for size in costs.captured_rows)}
    behind = {size + 1 for size in sizes if size <= costs.captured_tokens and size < max(sizes)}
    tokens = sorted(sizes | behind)
    passes = costs.verify_times(costs.padded(steps, np.array(tokens))) / 1e9
    values = float(passes[0]), rows, drafting, tokens, (passes - passes[0]).tolist()
    return json.dumps(dict(zip(SUMS, values, strict=True)))


def load_temperatures(
    given: GivenTable, steps: int, place: str, read_file: ReadFile | None = None
) -> tuple[float, ...]:
    """Read a temperature for each of `steps` draft positions. Raises ConfigError with all problems at once."""
    table, source = _table_of(given, place, read_file)
    problems = _problems_of_keys(table, ("temperatures",), NUMBERS)
    found: Any = table.get("temperatures")
    if not problems and not (isinstance(found, list | tuple) and len(found) == steps):
        message = f"is {shown(found)}; expected a list of {steps}, one for each draft step"
        problems.append(Problem("temperatures", message))
    elif not problems:
        problems = [
            Problem(f"temperatures[{i}]", f"is {one!r}; expected a number from {COLDEST:g} to {HOTTEST:g}")
            for i, one in enumerate(found)
            if not _is_number(one, COLDEST, HOTTEST)
        ]
    if problems:
        raise ConfigError(source, problems)
    return tuple(float(one) for one in found)


def temperatures_json(temperatures: Sequence[float]) -> str:
    return json.dumps({"temperatures": list(temperatures)})


def _table_of(given: GivenTable, place: str, read_file: ReadFile | None) -> tuple[Mapping[str, Any], str]:
    """Return the object of a file, or the one that is given, and its name in messages."""
    source = given if isinstance(given, str) else place
    if isinstance(given, str):
        if read_file is None:
            raise ConfigError.of(place, "", f"names the file {given!r}, which needs `read_file`")
        given = parse_table(read_file(given), source)
    if not isinstance(given, Mapping):
        raise ConfigError.of(source, "", f"is {json_kind(given)}; expected a JSON object")
    return given, source


def _problems_of_keys(table: Mapping[str, Any], needed: Sequence[str], optional: Sequence[str]) -> list[Problem]:
    known = (*needed, *optional)
    problems = [Problem(key, "is written twice; expected each key once") for key in repeated_keys(table)]
    problems += [
        Problem(str(key), f"is not known{nearest(str(key), known)}; expected {', '.join(known)}")
        for key in table
        if key not in known
    ]
    return problems + [Problem(key, "is missing") for key in needed if key not in table]


def _problems_of_rates(table: Mapping[str, Any]) -> list[Problem]:
    probes, rates, most = (table[key] for key in RATES)
    problems = _problems_of_function(RATES[0], probes, 1, RATES[1], rates, (SLOWEST, FASTEST))
    if problems:
        return problems
    if not _is_count(most, probes[-1]):
        message = f"is {most!r}; expected an integer from {probes[-1]}, the last probe, to {MOST_TOKENS}"
        problems.append(Problem(RATES[2], message))
    return problems + [
        Problem(f"{RATES[1]}[{i}]", f"is {rate!r}, more than {before!r} for fewer tokens; expected no rise")
        for i, (before, rate) in enumerate(itertools.pairwise(rates), 1)
        if rate > before
    ]


def _problems_of_sums(table: Mapping[str, Any]) -> list[Problem]:
    bias, problems = table["bias_seconds"], []
    if not (_is_number(bias, 0, LONGEST_S) and bias):
        problems.append(Problem("bias_seconds", f"is {bias!r}; expected seconds above 0"))
    for probes, values in (SUMS[1:3], SUMS[3:5]):
        seconds = table[values]
        found = _problems_of_function(probes, table[probes], 0, values, seconds, (-LONGEST_S, LONGEST_S))
        problems += found or [
            Problem(f"{values}[{i}]", f"is {time!r}, less than {before!r} before it; expected no fall")
            for i, (before, time) in enumerate(itertools.pairwise(seconds), 1)
            if time < before
        ]
    if not problems and bias + table["alpha_seconds"][0] + table["theta_seconds"][0] < 1e-9:
        message = f"is {bias!r}, and nothing is left of it with the first alpha_seconds and theta_seconds"
        problems.append(Problem("bias_seconds", f"{message}; expected a sum above 0"))
    return problems


def _problems_of_function(
    probes_key: str, probes: Any, least: int, key: str, values: Any, bounds: tuple[float, float]
) -> list[Problem]:
    """Return what is wrong with probes, ascending integers from `least` on, and with their values within `bounds`."""
    problems = []
    is_list = isinstance(probes, list | tuple) and len(probes) > 0
    if not is_list or not all(_is_count(one, least) for one in probes) or sorted(set(probes)) != list(probes):
        message = f"is {shown(probes)}; expected ascending integers from {least} to {MOST_TOKENS}"
        problems.append(Problem(probes_key, message))
    if not isinstance(values, list | tuple) or (is_list and len(values) != len(probes)):
        number = f"{len(probes)} numbers, as {probes_key} has" if is_list else "numbers"
        return [*problems, Problem(key, f"is {shown(values)}; expected a list of {number}")]
    return problems + [
        Problem(f"{key}[{i}]", f"is {one!r}; expected a number from {bounds[0]:g} to {bounds[1]:g}")
        for i, one in enumerate(values)
        if not _is_number(one, *bounds)
    ]


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MOST_TOKENS


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most
