"""When more pages may mean more retractions (SIM-10). There is no other excuse, and none at all for fewer completions.

Who admits a request before it knows how long its output will be spends memory on starting earlier, and pays with retractions. A pool
with a little more room starts a request more, or the same ones sooner; then more outputs meet the end of the pool together.
"""

from __future__ import annotations

from collections.abc import Callable

from .moment import Answer

EXCEPTIONS: dict[str, Callable[[Answer, Answer], bool]] = {
    # What the smaller pool has turned away at the door is served now, and needs memory too.
    "serves-more": lambda small, large: len(large.of_reason("completed")) > len(small.of_reason("completed")),
    # Who fits in starts at once.
    "runs-more-at-once": lambda small, large: large.summary["max_running"] > small.summary["max_running"],
    # Once a pool is too small for what it has admitted, who is retracted when, and how often, hangs on every single step.
    "retracts-already": lambda small, large: small.summary["retractions"] > 0,
    # The same requests wait less for their turn, and so overlap more.
    "starts-sooner": lambda small, large: _waited_ns(large) < _waited_ns(small),
}
"""Name -> whether it holds for (the run with fewer pages, the run with more). Each has a case in the tests that shows it."""


def _waited_ns(answer: Answer) -> int:
    """How long all requests together waited for their first tokens."""
    return sum(request.emissions[0][0] - request.arrival_ns for request in answer.of_reason("completed"))


def excuse(small: Answer, large: Answer) -> str:
    """The name of the exception that covers these two runs; empty if none does."""
    return next((name for name, holds in EXCEPTIONS.items() if holds(small, large)), "")
