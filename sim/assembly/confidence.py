"""How sure the results of a run are: intervals of its times, from published points of serving or the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...core.scheduler.config import EngineRole
from ...observe.rates import rate_of
from ..cost.calibration import FittedParameters
from ..cost.deployments.evidence import NO_POINTS, REQUEST, TPOT, TTFT, Interval
from ..cost.executor_steps import StepCost
from . import Assembly

OWN_ROWS = 6.0
"""Rows as which what is known of other deployments counts beside the left-out rows of a calibration."""
OF_OTHERS = {TPOT: (0.074, 1.2), TTFT: (0.22, 1.4)}
"""What three rows leave, over 114 published deployments (benchmarks/accuracy.py): the mean absolute error of the
others, and half of their 80 % interval over that. With OWN_ROWS the interval holds 80 % of them."""
TIMES = {"ttft": TTFT, "tpot": TPOT, "itl": TPOT, "e2el": REQUEST}
"""The time of which a latency has the interval, by the latency's name in a summary."""


def half_width(time: str, points: int, left_out_error: float) -> float:
    """Return half of the 80 % interval of the logarithm of a time that was calibrated with so many points, of which
    each was left out with this mean error."""
    mean, width = OF_OTHERS[time]
    return width * (points * left_out_error + OWN_ROWS * mean) / (points + OWN_ROWS)


def intervals(run: Assembly, summary: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the 80 % interval [low, high] of each result that has one, as the summary has it.

    Empty where times are those of a profile whose error is not known. The output rate has one in a closed loop alone;
    in an open loop it is that of the arrivals.
    """
    ends = factors(run, summary)
    found = {
        name: [value * ends[time].low, value * ends[time].high]
        for name, time, value in (
            ("mean_tpot_ms_interval", TPOT, summary["mean_tpot_ms"]),
            ("mean_ttft_ms_interval", TTFT, summary["mean_ttft_ms"]),
            ("mean_e2el_ms_interval", REQUEST, summary["mean_e2el_ms"]),
        )
        if time in ends and value is not None
    }
    if REQUEST in ends and run.scenario.workload.concurrency is not None:
        for name, rate in (
            ("output_throughput_interval", summary["output_throughput"]),
            ("steady_output_throughput_interval", summary.get("steady_output_throughput")),
        ):
            if rate is not None:
                found[name] = [rate / ends[REQUEST].high, rate / ends[REQUEST].low]
    return found


def rests_on(run: Assembly) -> str:
    """Say in one line what the intervals of a run rest on."""
    calibration = run.deployment.calibration
    if calibration is not None and calibration.parameters is not None:
        return f"the {calibration.parameters.points} points of the profile {calibration.name}"
    if run.evidence is None or isinstance(run.cost, StepCost):
        return NO_POINTS
    abouts = {role: _about(part) for role, part in run.by_role.items()}
    if len({*abouts.values()}) == 1:
        return next(iter(abouts.values()))
    return "; ".join(f"{role}: {about}" for role, about in abouts.items())


def _about(run: Assembly) -> str:
    """Say what the intervals of engines rest on, and how their own deployment's points correct times."""
    if run.evidence is None:
        return NO_POINTS
    can_correct = run.evidence.own and not run.is_corrected
    return f"{run.evidence.about} (--correct applies it)" if can_correct else run.evidence.about


def factors(run: Assembly, summary: Mapping[str, Any]) -> dict[str, Interval]:
    """Return the 80 % intervals of the times of a run, as factors on its simulated times, by the names of times; empty
    where nothing is known."""
    calibration = run.deployment.calibration
    if calibration is not None:
        return {} if calibration.parameters is None else _calibrated(calibration.parameters)
    if run.evidence is None or summary.get("mean_ttft_ms") is None:
        return {}
    parts = {time: _engines_of(run, time) for time in (TPOT, TTFT, REQUEST)}
    rows = (rate_of(summary, "mean_running") or 0.0) / summary.get("replicas", 1)
    found = {
        time: part.evidence.interval(time, part.is_corrected, rows)
        for time, part in parts.items()
        if part.evidence is not None
    }
    if summary.get("mean_tpot_ms") is None:  # a request ends with its first token
        found[REQUEST] = found[TTFT]
    return found


def _calibrated(fitted: FittedParameters) -> dict[str, Interval]:
    """Return the intervals of calibrated times. The time to the first token has one if it was measured."""
    ends = {TPOT: half_width(TPOT, fitted.points, fitted.left_out_error)}
    ends[REQUEST] = ends[TPOT]
    if fitted.left_out_ttft_error is not None:
        ends[TTFT] = half_width(TTFT, fitted.points, fitted.left_out_ttft_error)
    return {time: Interval(math.exp(-wide), math.exp(wide)) for time, wide in ends.items()}


def factors_of_rounds(run: Assembly, rows: float) -> Interval | None:
    """Return the 80 % interval of the times of rounds of so many requests, as factors on them; None where their error
    is not known."""
    calibration = run.deployment.calibration
    if calibration is not None or run.evidence is None:
        return factors(run, {}).get(TPOT)
    return run.evidence.interval(TPOT, run.is_corrected, rows)


def difference(
    time: str, run: Assembly, summary: Mapping[str, Any], other: Assembly, other_summary: Mapping[str, Any]
) -> float | None:
    """Return by how much the logarithms of the errors of two runs may differ in a time: half of the 80 % interval; None
    if one of the runs has no published points, or fitted parameters of its own."""
    runs = (run, summary), (other, other_summary)
    if any(of.deployment.calibration is not None or shown.get("mean_ttft_ms") is None for of, shown in runs):
        return None
    mine, others = _engines_of(run, time), _engines_of(other, time)
    if mine.evidence is None or others.evidence is None:
        return None
    return mine.evidence.compare(time, others.evidence)


def _engines_of(run: Assembly, time: str) -> Assembly:
    """Return the parts of the engines whose times decide a time: of prefill engines for the first token."""
    return run.of_role(EngineRole.PREFILL) if time == TTFT else run
