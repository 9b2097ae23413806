"""The summary of a simulated run: every number by its name, as summary.json has it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ...observe.measuring.metrics import RunMetrics
from ...observe.measuring.summary import SLO
from ..assembly.confidence import intervals, rests_on
from ..assembly.explaining import timing_line
from ..assembly.rounds import round_of_run
from ..load import length_notice
from ..running.report import RunReport
from ..scenario import Scenario
from .capacity import ADAPTIVE, CHANCE, OpenLoad, is_overloaded, saturation
from .steady import steady_rates


def summarize_run(scenario: Scenario, report: RunReport, metrics: RunMetrics) -> dict[str, Any]:
    """Return the summary of a run: its name and seed, what was measured, and the timeline."""
    for replica, busy_ns in enumerate(report.device_busy_ns):
        metrics.observe_device(replica, busy_ns)
    slo = SLO(**scenario.slo.model_dump())
    summary = {
        "name": scenario.name,
        "seed": scenario.seed,
        "version": version("foredraft"),
        "timing": timing_line(report.assembly),
    }
    summary |= metrics.summary(report.duration_ns, slo, incomplete=not report.complete)
    summary["skipped_rows"] = report.num_skipped_rows
    for bound in dict.fromkeys(bound for slots in report.ema_accept_len for bound in slots):
        summary[f"ema_accept_len_from_{bound}"] = [slots.get(bound) for slots in report.ema_accept_len]
    summary |= _asked(report, summary)
    timeline = metrics.timeline()
    first_s, last_s = (metrics.measured.first_ns or 0) / 1e9, report.last_arrival_ns / 1e9
    if report.complete:
        summary |= steady_rates(summary, timeline, first_s, last_s)
    load = _load_of(report, summary, timeline, last_s - first_s)
    overloaded = None if load is None else is_overloaded(load)
    summary["overload"] = load.about_overload if load is not None and overloaded else None
    lengths = _usual_lengths(report, summary)
    summary["saturation"] = load.saturation if load else saturation(report.assembly, summary, None, lengths)
    summary["overloaded"] = overloaded
    summary["intervals_rest_on"] = rests_on(report.assembly)
    if report.complete and not overloaded:
        summary |= intervals(report.assembly, summary)
    if report.complete:
        summary |= round_of_run(report.assembly, summary)
    if report.disaggregation is not None:
        summary |= report.disaggregation.to_json(report.duration_ns)
    if report.faults is not None:
        summary |= report.faults.to_json()
    return summary | {f"timeline_{key}": value for key, value in timeline.items()}


def _load_of(
    report: RunReport, summary: Mapping[str, Any], timeline: Mapping[str, Any], arrivals_s: float
) -> OpenLoad | None:
    """Return the load of an open loop; None for a closed one, whose clients wait, and for a part of a run.
    `arrivals_s`: from the first arrival to the last one."""
    table = report.assembly.scenario.workload
    if table.concurrency is not None or arrivals_s <= 0 or not report.complete:
        return None
    is_asked = table.trace is None and table.arrivals in ("poisson", "gamma", "constant")
    per_s = table.rate * table.rate_scale if is_asked else (report.num_submitted - 1) / arrivals_s
    steps = [key for key, share in summary.items() if key.startswith("rounds_at_steps_") and share]
    margin = (0.0 if is_asked else CHANCE / report.num_submitted**0.5) + (ADAPTIVE if len(steps) > 1 else 0.0)
    life_ms, waiting = summary["mean_e2el_ms"], [length or 0.0 for length in timeline["waiting"]]
    return OpenLoad(
        per_s=per_s,
        num_arrivals=report.num_submitted,
        num_shed=sum(count for reason, count in report.refusals.items() if reason.startswith("queue full")),
        arrivals_s=arrivals_s,
        mean_life_s=None if life_ms is None else life_ms / 1e3,
        saturation=saturation(report.assembly, summary, per_s, _usual_lengths(report, summary)),
        margin=margin,
        bucket_s=timeline["bucket_s"],
        waiting=waiting,
        in_system=[one + (more or 0.0) for one, more in zip(waiting, timeline["running"], strict=True)],
    )


def _usual_lengths(report: RunReport, summary: Mapping[str, Any]) -> Mapping[str, tuple[float, float]] | None:
    """Return the lengths that were asked for, if those of the run differ from them by chance alone."""
    asked, got = report.asked_lengths, {kind: summary[f"mean_{kind}_tokens"] for kind in report.asked_lengths}
    if None in got.values() or any(length_notice(kind, asked[kind], got[kind], summary["completed"]) for kind in asked):
        return None
    return asked


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
