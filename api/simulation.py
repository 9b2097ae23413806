"""A simulation from Python: a scenario in, a `Result` out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from os import PathLike
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ForedraftError
from foredraft.observe.distribution.former_name import check_variables
from foredraft.observe.metrics import RunMetrics
from foredraft.observe.summary import SLO
from foredraft.sim.assembly.rounds import round_of_run
from foredraft.sim.capacity import is_overloaded, saturation
from foredraft.sim.confidence import intervals, rests_on
from foredraft.sim.effects.given_keys import given_keys
from foredraft.sim.load import length_notice
from foredraft.sim.run import RunReport, Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import OVERRIDES, load_scenario, scenario_with

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Result:
    """What a simulated run has shown. `print(result)` shows the tables of `foredraft simulate`.

    Attributes:
        scenario: The scenario with all its values.
        summary: Every number of the run by its name, as in summary.json (docs/results.md).
        requests: A row per completed request: arrival, lengths, latencies.
        rounds: A row per step: batch size, draft steps, tokens, times.

    Example::

        result = simulate({"workload": {"rate": 10.0}, "slo": {"ttft_ms": 200.0}})
        if not result.meets_slo(0.95):
            print(f"only {result.slo_attainment:.0%} of the requests met the SLO")
        last = result.requests.sort_by([("finish_ns", "descending")]).slice(0, 10)
    """

    scenario: Scenario
    summary: dict[str, Any]
    requests: pyarrow.Table
    rounds: pyarrow.Table

    @property
    def slo_attainment(self) -> float | None:
        """The share of requests that kept every limit of the scenario's SLO; None if it sets no limit."""
        return self.summary.get("slo_attainment")

    def meets_slo(self, share: float = 0.99) -> bool:
        """Return whether at least this share of the requests kept every limit of the SLO.

        Raises:
            ForedraftError: The scenario has no SLO.
        """
        if self.slo_attainment is None:
            raise ForedraftError("the scenario sets no SLO: give slo.ttft_ms, slo.tpot_ms or another limit")
        return self.slo_attainment >= share

    def __str__(self) -> str:
        from foredraft.observe.tables import WIDTH, report_tables
        from rich.console import Console

        console = Console(width=WIDTH, highlight=False, color_system=None)
        with console.capture() as captured:
            for table in report_tables(self.summary):
                console.print(table)
        return captured.get()


def run_scenario(
    scenario: Scenario | Mapping[str, Any] | str | PathLike[str] | None, overrides: Mapping[str, Any]
) -> Result:
    """Run the scenario that `foredraft.simulate` was given."""
    check_variables(os.environ)
    origins: dict[str, str] = {}
    if scenario is None or isinstance(scenario, str | PathLike):
        scenario, origins = load_scenario(scenario)
    if isinstance(scenario, Scenario):
        scenario = scenario.model_dump(mode="json")
    whole = scenario_with(scenario, overrides)
    return _run(whole, {**given_keys(whole, "scenario"), **origins, **dict.fromkeys(overrides, OVERRIDES)})


def _run(scenario: Scenario, origins: Mapping[str, str]) -> Result:
    from pyarrow import parquet

    with TemporaryDirectory(prefix="foredraft-") as directory:
        with closing(RunMetrics(directory)) as metrics:
            report = Simulation(
                scenario, sinks=lambda replica: [metrics.sink(replica)], origins=origins, named_slots=False
            ).run()
            if not report.complete:
                raise KeyboardInterrupt  # which ended the run early; there is no whole result
            summary = summarize_run(scenario, report, metrics)
        requests, rounds = (parquet.read_table(f"{directory}/{name}.parquet") for name in ("requests", "rounds"))
    return Result(scenario, summary, requests, rounds)


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
