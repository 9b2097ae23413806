"""When more pages may mean more retractions (SIM-10). There is no other exception, and none at all for fewer completions.

A scheduler that admits a request before it knows how long its output will be starts earlier, at the risk of retractions. With a little
more room it starts one request more, or the same ones sooner; then more outputs reach the end of the pool together.
"""

from __future__ import annotations

from collections.abc import Callable

from .answer import Answer


def _waited_ns(answer: Answer) -> int:
    """Return how long all requests together waited for their first tokens."""
    return sum(request.emissions[0][0] - request.arrival_ns for request in answer.completed)


EXCEPTIONS: dict[str, Callable[[Answer, Answer], bool]] = {
    # What the smaller pool has refused is served now, and needs memory too.
    "serves-more": lambda small, large: len(large.completed) > len(small.completed),
    # A request that fits in starts at once.
    "runs-more-at-once": lambda small, large: large.summary["max_running"] > small.summary["max_running"],
    # Once a pool is too small for what it has admitted, retractions depend on every single step.
    "retracts-already": lambda small, large: small.summary["retractions"] > 0,
    # The same requests wait less for their turn, and so overlap more.
    "starts-sooner": lambda small, large: _waited_ns(large) < _waited_ns(small),
}
"""Name -> whether it holds for (the run with fewer pages, the run with more). Each has a case in the tests that shows it."""


def excuse(small: Answer, large: Answer) -> str:
    """Return the name of the exception that covers these two runs; empty if none does."""
    return next((name for name, holds in EXCEPTIONS.items() if holds(small, large)), "")
