"""Faults of a link, injected on purpose where a parcel is sent; off unless a test asks for them.

A plan names parcels by their number, counted from 1 over everything that a worker sends in a session (`truncate_pages`: over the parcels
that have pages):

    {"prefill0": {"duplicate": [2], "truncate_messages": [3], "truncate_pages": [4], "drop": [5], "delay_ms": 20, "die_before": 6}}
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...core.errors import ConfigError, Problem, nearest
from ...core.parsing import ParseError, parse_json
from .parcel import Parcel

VARIABLE = "FORETOKEN_LINK_FAULTS"


@dataclass(frozen=True, slots=True)
class ParcelFaults:
    """What happens to the parcels that one worker sends. The default: nothing."""

    duplicate: tuple[int, ...] = ()  # sent twice
    drop: tuple[int, ...] = ()  # not sent
    truncate_messages: tuple[int, ...] = ()  # the second half of the messages' bytes is missing
    truncate_pages: tuple[int, ...] = ()  # the second half of the pages' bytes is missing
    delay_ms: float = 0.0  # before every parcel
    die_before: int = 0  # the worker is killed in front of this parcel

    @classmethod
    def from_json(cls, value: Any, source: str) -> ParcelFaults:
        known = tuple(f.name for f in fields(cls))
        if not isinstance(value, Mapping):
            raise ConfigError(source, [Problem("", f"is {value!r}; expected an object")])
        problems = []
        for name, given in value.items():
            if name not in known:
                problems.append(
                    Problem(name, f"is no fault of a link{nearest(name, known)}; known: {', '.join(known)}")
                )
            elif isinstance(getattr(cls(), name), tuple):
                if not isinstance(given, list) or any(type(n) is not int or n < 1 for n in given):
                    problems.append(Problem(name, f"is {given!r}; expected a list of numbers from 1"))
            elif isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
                problems.append(Problem(name, f"is {given!r}; expected a number"))
        if problems:
            raise ConfigError(source, problems)
        return cls(**{name: tuple(given) if isinstance(given, list) else given for name, given in value.items()})


def plans_from_environment() -> dict[str, dict[str, Any]]:
    """Return the plans by worker that the environment asks for; ConfigError if they make no sense."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        plans = parse_json(text)
    except ParseError as error:
        raise ConfigError(VARIABLE, [Problem("", f"is not JSON: {error}")]) from None
    if not isinstance(plans, dict):
        raise ConfigError(VARIABLE, [Problem("", f"is {plans!r}; expected an object of workers")])
    for name, plan in plans.items():
        ParcelFaults.from_json(plan, f"{VARIABLE}: {name}")
    return plans


class LinkFaults:
    """Applies a plan; all links of a worker share one, so that numbers count all that it sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(ParcelFaults())

    def begin(self, plan: ParcelFaults) -> None:
        """Begin a session: numbers count from the start again."""
        with self._lock:
            self._plan = plan
            self._num_sent = self._num_with_pages = 0

    def disturb(self, parcel: Parcel) -> Iterator[tuple[Parcel, float]]:
        """Return what is sent instead of `parcel`, with the share of its messages' bytes that is sent."""
        with self._lock:
            plan = self._plan
            self._num_sent += 1
            self._num_with_pages += parcel.pages is not None
            number, with_pages = self._num_sent, self._num_with_pages
        if plan.die_before == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.delay_ms:
            time.sleep(plan.delay_ms / 1e3)
        if number in plan.drop:
            return
        if parcel.pages is not None and with_pages in plan.truncate_pages:
            parcel = replace(parcel, pages=parcel.pages[: len(parcel.pages) // 2])
        share = 0.5 if number in plan.truncate_messages else 1.0
        for _ in range(2 if number in plan.duplicate else 1):
            yield parcel, share
