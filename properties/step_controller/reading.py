"""Reads what a step controller shows of itself. Another form is a misbehaviour; the moment notes numbers that are not
finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..harness.trial import Trial
from .contract import StepController
from .model import GaugeAccount
from .rule import AverageRule


def read_average(trial: Trial, batch_size: int) -> float:
    """Ask for the average of accepted drafts that batches of this size go by."""
    answer = trial.must(trial.subject.average, batch_size)
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise trial.misbehaviour("TYPE", f"average({batch_size}) is {answer!r}", "a number")
    if not math.isfinite(answer):
        trial.moment.unfinite = f"average({batch_size}) is {answer}"
    return float(answer)


def read_counted(trial: Trial) -> tuple[int, ...]:
    """Ask for the four counters. A sum of correct drafts may be a float that is whole."""
    numbers = trial.sequence(trial.must(trial.subject.counted), "counted()", "four numbers", 4)
    whole = [int(n) if isinstance(n, float) and n.is_integer() else n for n in numbers]
    return trial.integers(whole, "counted()")


def read_gauges(trial: Trial, account: GaugeAccount, rule: AverageRule | None) -> tuple[str, object, object] | None:
    """Ask for the gauges; `rule` is the one that the controller follows. Returns the first that is not what it is due
    to be, what it says, and what it should."""
    due = account.due() | (rule.due() if rule is not None else {})
    if trial.capabilities.goodput:
        due |= {"results": account.results, "waiting": "the latest results"}
    found = trial.mapping(trial.must(trial.subject.gauges), "gauges()", f"a mapping with {', '.join(due)}", due)
    for name, wanted in due.items() if account.is_known else ():
        says = found[name]
        if name == "waiting":
            if account.are_latest(_rows_of(trial, says)):
                continue
        elif name == "histogram":
            says = list(trial.integers(says, "the histogram of gauges()"))
            if says[: len(wanted)] == wanted and not any(says[len(wanted) :]):
                continue
        elif _agree(says, wanted):
            continue
        return name, says, wanted
    return None


def _rows_of(trial: Trial, waiting: object) -> Counter[tuple[int, int]]:
    """Return how many rows of each (draft steps, accepted drafts) wait for a look."""
    place, rows = "waiting of gauges()", Counter()
    for entry in trial.sequence(waiting, place, "pairs of draft steps and a histogram"):
        steps, histogram = trial.sequence(entry, f"an entry of {place}", "draft steps and a histogram", 2)
        for correct, count in enumerate(trial.integers(histogram, f"a histogram of {place}")):
            rows[steps, correct] += count
    return +rows


def _agree(says: Any, wanted: Any) -> bool:
    """Return whether a gauge says what it should; the order of floating-point sums is the controller's choice."""
    if isinstance(wanted, list):
        return len(says) == len(wanted) and all(map(_agree, says, wanted))
    return says == wanted or (isinstance(wanted, float) and math.isclose(says, wanted, rel_tol=1e-9, abs_tol=1e-12))


def read_expected(
    trial: Trial, subject: StepController, candidates: Sequence[int], batch_size: int
) -> tuple[tuple[int, float], ...]:
    """Ask a controller for the tokens per row that it expects of each candidate: (steps, tokens)."""
    answers = [(steps, trial.must(subject.expected, steps, batch_size)) for steps in candidates]
    return tuple((steps, float(answer)) for steps, answer in answers)


def read_state(trial: Trial, value: object, place: str) -> object:
    """Return the state as a value that nothing can change; note the first number that is not finite."""
    if isinstance(value, dict):
        return tuple((str(key), read_state(trial, item, f"{place}[{key!r}]")) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(read_state(trial, item, f"{place}[{at}]") for at, item in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        trial.moment.unfinite = trial.moment.unfinite or f"{place} is {value}"
        return str(value)
    if value is None or isinstance(value, int | float | str):
        return value
    data = "numbers, strings, None, lists and dictionaries of them"
    raise trial.misbehaviour("TYPE", f"{place} is {value!r}", data)
