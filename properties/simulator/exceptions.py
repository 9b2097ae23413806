"""When more pages may mean more retractions (SIM-10). There is no other excuse, and none at all for fewer completions."""

from __future__ import annotations

from collections.abc import Callable

from .moment import Answer

EXCEPTIONS: dict[str, Callable[[Answer, Answer], bool]] = {
    # What the smaller pool has turned away at the door is served now, and needs memory too.
    "serves-more": lambda small, large: len(large.of_reason("completed")) > len(small.of_reason("completed")),
    # Who fits in starts at once; with more of them at a time their outputs meet the end of the pool together.
    "runs-more-at-once": lambda small, large: large.summary["max_running"] > small.summary["max_running"],
}
"""Name -> whether it holds for (the run with fewer pages, the run with more). Each has a case in the tests that shows it."""


def excuse(small: Answer, large: Answer) -> str:
    """The name of the exception that covers these two runs; empty if none does."""
    return next((name for name, holds in EXCEPTIONS.items() if holds(small, large)), "")
