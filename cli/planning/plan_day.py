"""`foredraft plan --by-hour`: the replicas of each hour of a trace, and their bill."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core.errors import count_of
from .plan_report import WIDTH

if TYPE_CHECKING:
    from ...planning.confidence.ranked import Ranked
    from ...planning.demand.trace_part import TracePart
    from ...planning.plan import Plan
    from ...sim.scenario import Scenario

MOST_ROWS = 48


@dataclass
class Day:
    """The question for replicas by the hour. `headroom`: the share that is added to an hour's rate. `warm_up_s`: how
    long a replica starts."""

    headroom: float
    warm_up_s: float
    _whole: TracePart | None = None

    def busiest_hour_of(self, scenario: Scenario, rate: float | None) -> Scenario:
        """Return the scenario with the busiest hour of its trace, for which a replica is planned. Raises ConfigError
        without a trace, and for a given load."""
        from ...core.errors import ConfigError
        from ...planning.demand.hours import busiest_hour
        from ...planning.demand.trace_part import TracePart

        if rate is not None:
            raise ConfigError.of("--by-hour", "", "has the rates of the trace; leave --rate out")
        self._whole = TracePart.of(scenario, None)
        if self._whole is None:
            raise ConfigError.of("--by-hour", "", "divides a trace into hours; give --trace")
        return busiest_hour(scenario, self._whole)

    def answer(self, plan: Plan, ranked: Sequence[Ranked], prices: Mapping[str, float]) -> dict[str, Any] | None:
        """Return the replicas by the hour of the best candidate as plain data; None if none holds a load."""
        from ...planning.demand.hours import hours_to_json, replicas_by_hour

        if not ranked or not ranked[0].holds or self._whole is None:
            return None
        best = ranked[0]
        gpus = best.candidate.gpus_per_unit
        capacity = plan.requests_per_s(best.load) * gpus / best.gpus
        hours = replicas_by_hour(self._whole, capacity, self.headroom, self.warm_up_s)
        made = hours_to_json(self._whole, hours, gpus, prices.get(plan.gpu_of(best.candidate)))
        asked = {"capacity": capacity, "headroom": self.headroom, "warm_up_s": self.warm_up_s}
        return {"candidate": best.candidate.name, **asked, **made}


def hours_of(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the answer by the hour."""
    hours = found["hours"]
    text = (
        f"{found['candidate']} by the hour: a replica ({count_of(found['gpus_per_replica'], 'GPU')}) holds "
        f"{found['capacity']:.3g} requests/s in the busiest hour. To the rate of each hour {found['headroom']:.0%} are "
        f"added. A replica starts {found['warm_up_s']:g} s before the hour that needs it, and is paid from then on."
    )
    lines = ["", *textwrap.wrap(text, WIDTH), ""]
    if len(hours) <= MOST_ROWS:
        lines.append(f"{'from, h':>9}{'requests/s':>12}{'replicas':>10}{'GPU hours':>11}")
        for hour in hours:
            gpu_hours = hour["replica_hours"] * found["gpus_per_replica"]
            lines.append(f"{hour['start_s'] / 3600:>9.4g}{hour['rate']:>12.3g}{hour['replicas']:>10}{gpu_hours:>11.3g}")
        lines.append("")
    most = max(hour["replicas"] for hour in hours)
    total = f"All {count_of(len(hours), 'hour')}: {found['gpu_hours']:.4g} GPU hours"
    if found["bill"] is not None:
        total += f", {found['bill']:.4g} in the price's currency"
    peak_hours = most * found["gpus_per_replica"] * found["hours_long"]
    total += f". With the {count_of(most, 'replica')} of the busiest hour all the time it would be {peak_hours:.4g}."
    return [*lines, *textwrap.wrap(total, WIDTH)]
