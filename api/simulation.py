"""A simulation from Python: a scenario in, a `Result` out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from foredraft.core.errors import ForedraftError
from foredraft.observe.measuring.metrics import RunMetrics
from foredraft.sim.effects.given_keys import given_keys
from foredraft.sim.running.coupling import check_workers
from foredraft.sim.running.parts import NO_REPLICAS, run_parts
from foredraft.sim.running.run import Simulation
from foredraft.sim.scenario import Scenario
from foredraft.sim.scenario_file import OVERRIDES, load_scenario, scenario_with
from foredraft.sim.summary.summary import summarize_run

if TYPE_CHECKING:
    import pyarrow

ScenarioLike = Scenario | Mapping[str, Any] | str | PathLike[str] | None
"""What functions of the package take as a scenario: itself, its tables, a file, or None for the defaults."""


@dataclass(frozen=True)
class Result:
    """What a simulated run has shown. `print(result)` shows the tables of `foredraft simulate`.

    Attributes:
        scenario: The scenario with all its values.
        summary: Every number of the run by its name, as in summary.json (docs/simulate.md).
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


def resolve(scenario: ScenarioLike, overrides: Mapping[str, Any] | None) -> tuple[Scenario, dict[str, str]]:
    """Return the scenario that a function of the package was given, and the source of every key that is no default.
    Raises ConfigError."""
    overrides, origins = overrides or {}, dict[str, str]()
    if scenario is None or isinstance(scenario, str | PathLike):
        scenario, origins = load_scenario(scenario)
    if isinstance(scenario, Scenario):
        scenario = scenario.model_dump(mode="json")
    whole = scenario_with(scenario, overrides)
    return whole, {**given_keys(whole, "scenario"), **origins, **dict.fromkeys(overrides, OVERRIDES)}


def run_scenario(scenario: ScenarioLike, overrides: Mapping[str, Any], workers: int = 1) -> Result:
    """Run the scenario that `foredraft.simulate` was given."""
    whole, origins = resolve(scenario, overrides)
    check_workers(workers, whole, "workers")
    return _run(whole, origins, workers)


def _run(scenario: Scenario, origins: Mapping[str, str], workers: int) -> Result:
    from pyarrow import parquet

    with TemporaryDirectory(prefix="foredraft-") as directory:
        with closing(RunMetrics(directory)) as metrics:
            simulation = Simulation(
                scenario,
                sinks=lambda replica: [metrics.sink(replica)],
                origins=origins,
                named_slots=False,
                own=None if workers == 1 else NO_REPLICAS,
            )
            report = simulation.run() if workers == 1 else run_parts(simulation, workers, origins, metrics)
            if not report.complete:
                raise KeyboardInterrupt  # which ended the run early; there is no whole result
            summary = summarize_run(scenario, report, metrics)
        requests, rounds = (parquet.read_table(f"{directory}/{name}.parquet") for name in ("requests", "rounds"))
    return Result(scenario, summary, requests, rounds)
