"""What a planned service costs: per million tokens, per month, and in energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..confidence.ranked import Ranked
    from ..plan import Plan

HOURS_OF_A_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class PerMillion:
    """The price of a million tokens at one load. Each of the three bears the whole price of the GPUs.

    Attributes:
        output: Of output tokens.
        input: Of prompt tokens.
        all: Of both together.
    """

    output: float
    input: float
    all: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tokens per second of a load."""

    input: float
    output: float

    @classmethod
    def of(cls, plan: Plan, item: Ranked, load: float) -> Traffic:
        """Return the traffic of a load of the plan, by the mean lengths of a candidate's requests."""
        summary, rate = item.finding.summary, plan.requests_per_s(load)
        return cls(rate * float(summary["mean_input_tokens"]), rate * float(summary["mean_output_tokens"]))

    def per_million(self, per_hour: float) -> PerMillion:
        """Return the price of a million tokens, if an hour of this traffic costs `per_hour`."""
        per_second = per_hour / 3600
        of = self.output, self.input, self.input + self.output
        return PerMillion(*(per_second / tokens * 1e6 for tokens in of))


@dataclass(frozen=True, slots=True)
class Bill:
    """The costs of a candidate's GPUs.

    Attributes:
        planned: Per million tokens at the load that it holds (with a given load: at this).
        own: The same at the scenario's own load, that is `workload.rate` or the trace as it is; None if it is greater.
        month: Of 730 hours.
    """

    planned: PerMillion
    own: PerMillion | None
    month: float


@dataclass(frozen=True, slots=True)
class Energy:
    """What a candidate's GPUs take at the load that it holds.

    Attributes:
        watts_per_gpu: Of a GPU under load, as given; the mean over unlike pools.
        kwh_per_million: Of a million output tokens.
        kwh_per_month: Of 730 hours.
    """

    watts_per_gpu: float
    kwh_per_million: float
    kwh_per_month: float


def bill_of(plan: Plan, item: Ranked, price: float) -> Bill:
    """Return the bill of a candidate that holds its load. `price`: of an hour of a GPU, on average."""
    per_hour = item.gpus * price
    own = None
    if plan.own_load <= item.load:
        own = Traffic.of(plan, item, plan.own_load).per_million(per_hour)
    planned = Traffic.of(plan, item, item.load).per_million(per_hour)
    return Bill(planned, own, per_hour * HOURS_OF_A_MONTH)


def energy(plan: Plan, item: Ranked) -> Energy | None:
    """Return the energy of a candidate by the power of its GPUs under load; None if that of one is not given."""
    power = item.candidate.per_gpu(plan.question.watts)
    if power is None:
        return None
    kilowatts = item.gpus * power / 1000
    per_million = Traffic.of(plan, item, item.load).per_million(kilowatts).output
    return Energy(power, per_million, kilowatts * HOURS_OF_A_MONTH)
