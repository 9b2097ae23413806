"""What a planned service costs: per million output tokens, and per month."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..confidence.ranked import Ranked
    from ..plan import Plan

HOURS_OF_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Bill:
    """The costs of a candidate's GPUs.

    Attributes:
        planned: Per million output tokens at the load that it holds (with a given load: at this).
        own: The same at the scenario's own load, that is `workload.rate` or the trace as it is; None if it is greater.
        month: Of 730 hours.
    """

    planned: float
    own: float | None
    month: float


def bill_of(plan: Plan, item: Ranked, price: float) -> Bill:
    """Return the bill of a candidate that holds its load. `price`: of an hour of a GPU, on average."""
    per_hour = item.gpus * price

    def per_million(load: float) -> float:
        tokens_per_s = plan.requests_per_s(load) * float(item.finding.summary["mean_output_tokens"])
        return per_hour / 3600 / tokens_per_s * 1e6

    own = per_million(plan.own_load) if plan.own_load <= item.load else None
    return Bill(per_million(item.load), own, per_hour * HOURS_OF_A_MONTH)
