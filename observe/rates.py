"""The rates and means of a run that are shown: those while its load was on, where a summary has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rate_of(summary: Mapping[str, Any], name: str) -> Any:
    """Return a rate or a mean while the load was on, where the summary has it, else that of the whole run."""
    return summary.get(f"steady_{name}", summary.get(name))


def rates_of(name: str, *summaries: Mapping[str, Any]) -> list[Any]:
    """Return a rate or a mean of several runs: while their load was on if all of them have it, else of the whole
    runs."""
    if all(f"steady_{name}" in summary for summary in summaries):
        return [summary[f"steady_{name}"] for summary in summaries]
    return [summary.get(name) for summary in summaries]
