"""When more pages may mean more retractions (SIM-10). There is no other exception, and none at all for fewer completions.

A scheduler that admits a request before it knows how long its output will be starts earlier, at the risk of retractions. With a little
more room it has more requests in its batch, and more outputs reach the end of the pool together. Where it has not, it wastes the room.
"""

from __future__ import annotations

from collections.abc import Callable

from .answer import Answer

EXCEPTIONS: dict[str, Callable[[Answer, Answer], bool]] = {
    # What the smaller pool has refused is served now, and needs memory too.
    "serves-more": lambda small, large: len(large.completed) > len(small.completed),
    # On average more requests run at a time.
    "runs-more": lambda small, large: large.summary["mean_running"] > small.summary["mean_running"],
}
"""Name -> whether it holds for (the run with fewer pages, the run with more). Each has a case in the tests that shows it."""


def excuse(small: Answer, large: Answer) -> str:
    """Return the name of the exception that covers these two runs; empty if none does."""
    return next((name for name, holds in EXCEPTIONS.items() if holds(small, large)), "")
