"""The part of a plan's report about `--by-hour`: the replicas of each hour of a trace, and their bill."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ...core.errors import count_of

if TYPE_CHECKING:
    from ...planning.demand.hours import Hours

WIDTH = 80
MOST_ROWS = 48


def hours_of(found: Hours) -> list[str]:
    """Return the lines of the answer by the hour."""
    hours = found.hours
    text = (
        f"{found.candidate} by the hour: a replica ({count_of(found.gpus_per_replica, 'GPU')}) holds "
        f"{found.capacity:.3g} requests/s in the busiest hour. To the rate of each hour {found.headroom:.0%} are "
        f"added. A replica starts {found.warm_up_s:g} s before the hour that needs it, and is paid from then on."
    )
    lines = ["", *textwrap.wrap(text, WIDTH), ""]
    if len(hours) <= MOST_ROWS:
        lines.append(f"{'from, h':>9}{'requests/s':>12}{'replicas':>10}{'GPU hours':>11}")
        for hour in hours:
            gpu_hours = hour.replica_hours * found.gpus_per_replica
            lines.append(f"{hour.start_s / 3600:>9.4g}{hour.rate:>12.3g}{hour.replicas:>10}{gpu_hours:>11.3g}")
        lines.append("")
    most = max(hour.replicas for hour in hours)
    total = f"All {count_of(len(hours), 'hour')}: {found.gpu_hours:.4g} GPU hours"
    if found.bill is not None:
        total += f", {found.bill:.4g} in the price's currency"
    peak_hours = most * found.gpus_per_replica * found.hours_long
    total += f". With the {count_of(most, 'replica')} of the busiest hour all the time it would be {peak_hours:.4g}."
    return [*lines, *textwrap.wrap(total, WIDTH)]
