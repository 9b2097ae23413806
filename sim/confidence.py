"""How sure the results of a run are: intervals of its times, from published points of serving or the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .assembly import Assembly
from .cost.executor_steps import StepCost
from .cost.published.evidence import NO_POINTS, REQUEST, TPOT, TTFT, Interval, Load

QUANTILE = 1.2816
"""Deviations of a normal distribution within which 80 % of it lie."""
DEVIATION_OF_MEAN_ERROR = math.sqrt(math.pi / 2)
"""The standard deviation of a normal distribution whose mean absolute value is 1."""


def intervals(run: Assembly, summary: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the 80 % interval [low, high] of each result that has one, as the summary has it.

    Empty where nothing is known: our own executor has no published points. The output rate has one in a closed loop
    alone; in an open loop it is that of the arrivals.
    """
    factors = _factors(run, summary)
    found = {
        name: [value * factors[time].low, value * factors[time].high]
        for name, time, value in (
            ("mean_tpot_ms_interval", TPOT, summary["mean_tpot_ms"]),
            ("mean_ttft_ms_interval", TTFT, summary["mean_ttft_ms"]),
            ("mean_e2el_ms_interval", REQUEST, summary["mean_e2el_ms"]),
        )
        if time in factors and value is not None
    }
    rate = summary["output_throughput"]
    if REQUEST in factors and run.scenario.workload.concurrency is not None and rate is not None:
        found["output_throughput_interval"] = [rate / factors[REQUEST].high, rate / factors[REQUEST].low]
    return found


def rests_on(run: Assembly) -> str:
    """Say in one line what the intervals of a run rest on."""
    calibration = run.deployment.calibration
    if calibration is not None and calibration.parameters is not None:
        return f"the {calibration.parameters.points} points of the profile {calibration.name}"
    return NO_POINTS if run.evidence is None or isinstance(run.cost, StepCost) else run.evidence.about


def _factors(run: Assembly, summary: Mapping[str, Any]) -> dict[str, Interval]:
    calibration = run.deployment.calibration
    if calibration is not None:
        if calibration.parameters is None:
            return {}
        wide = QUANTILE * DEVIATION_OF_MEAN_ERROR * calibration.parameters.left_out_error
        own = Interval(math.exp(-wide), math.exp(wide))
        return {TPOT: own, REQUEST: own}
    if run.evidence is None or summary["mean_ttft_ms"] is None:
        return {}
    load = _load_of(run, summary)
    return {time: run.evidence.interval(time, load, run.is_corrected) for time in (TPOT, TTFT, REQUEST)}


def _load_of(run: Assembly, summary: Mapping[str, Any]) -> Load:
    """Return the load of a run as the fit of the published points has it."""
    groups = run.pools.num_engines * run.deployment.parallel.data
    first_ms, workload = summary["mean_ttft_ms"], run.scenario.workload
    decoding_ms = (summary["mean_tpot_ms"] or 0.0) * summary["mean_output_tokens"]
    are_equal = workload.concurrency is not None and workload.prompt.kind == workload.output.kind == "fixed"
    share = first_ms / decoding_ms if decoding_ms else 0.0
    return Load((summary["mean_running"] or 1.0) / groups, first_ms, share, are_equal)
