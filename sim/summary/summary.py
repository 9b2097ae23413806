"""The summary of a simulated run: every number by its name, as summary.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ...observe.metrics import RunMetrics
from ...observe.summary import SLO
from ..assembly.rounds import round_of_run
from ..confidence import intervals, rests_on
from ..load import length_notice
from ..running.report import RunReport
from ..scenario import Scenario
from .capacity import is_overloaded, saturation


def summarize_run(scenario: Scenario, report: RunReport, metrics: RunMetrics) -> dict[str, Any]:
    """Return the summary of a run: its name and seed, what was measured, and the timeline."""
    for replica, busy_ns in enumerate(report.device_busy_ns):
        metrics.observe_device(replica, busy_ns)
    slo = SLO(**scenario.slo.model_dump())
    summary = {
        "name": scenario.name,
        "seed": scenario.seed,
        "version": version("foredraft"),
        "timing": report.assembly.timing,
    }
    summary |= metrics.summary(report.duration_ns, slo, incomplete=not report.complete)
    summary["skipped_rows"] = report.num_skipped_rows
    for bound in dict.fromkeys(bound for slots in report.ema_accept_len for bound in slots):
        summary[f"ema_accept_len_from_{bound}"] = [slots.get(bound) for slots in report.ema_accept_len]
    summary |= _asked(report, summary)
    if report.complete:
        summary |= intervals(report.assembly, summary)
        summary |= round_of_run(report.assembly, summary)
    summary["intervals_rest_on"] = rests_on(report.assembly)
    timeline = metrics.timeline()
    summary |= _load(report, summary, timeline)
    if report.disaggregation is not None:
        summary |= report.disaggregation.to_json(report.duration_ns)
    if report.faults is not None:
        summary |= report.faults.to_json()
    return summary | {f"timeline_{key}": value for key, value in timeline.items()}


def _load(report: RunReport, summary: Mapping[str, Any], timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return how near the run was to what can be served, and whether it was beyond; None where that is not known."""
    last_s = None if report.last_arrival_ns is None else report.last_arrival_ns / 1e9
    rate = (report.num_submitted - 1) / last_s if last_s else None
    overloaded = None
    if last_s and report.complete:
        num_shed = sum(count for reason, count in report.refusals.items() if reason.startswith("queue full"))
        bucket_s, waiting = timeline["bucket_s"], timeline["waiting"]
        overloaded = is_overloaded(waiting, bucket_s, last_s, report.num_submitted, num_shed)
    return {"saturation": saturation(report.assembly, summary, rate), "overloaded": overloaded}


def _asked(report: RunReport, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean lengths that the workload asked for (None for a trace), and the notices of the run."""
    asked, notices = report.asked_lengths, list(report.notices)
    for kind in asked if report.complete else ():
        got = summary[f"mean_{kind}_tokens"]
        notice = length_notice(kind, asked[kind], got, summary["completed"]) if got is not None else None
        if notice is not None:
            notices.append(notice)
    return {
        "asked_mean_input_tokens": asked["input"][0] if asked else None,
        "asked_mean_output_tokens": asked["output"][0] if asked else None,
        "notices": notices,
    }
