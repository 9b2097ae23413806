"""The results of a simulated run: the files in its directory, and the report on the terminal."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...observe.output_files import UnwritableFile, empty_run_directory, write_summary, write_text

if TYPE_CHECKING:
    from rich.table import Table

    from ...core.contract.events import EventSink
    from ...observe.log import EventLog
    from ...observe.measuring.metrics import RunMetrics
    from ...observe.perfetto import PerfettoTrace
    from ...sim.assembly import Assembly
    from ...sim.faults.plan import FaultPlan
    from ...sim.faults.service import FaultReport
    from ...sim.running.report import RunReport
    from ...sim.scenario import Scenario
    from ...sim.scenario.scenario_text import DerivedRow


SUMMARY = "summary.json"
SCENARIO = "scenario.toml"
EVENTS = "events.jsonl"
TIMELINE = "trace.json"
REQUESTS = "requests.parquet"
ROUNDS = "rounds.parquet"
FAULTS = "faults.toml"
FILES = (SUMMARY, SCENARIO, REQUESTS, ROUNDS, EVENTS, TIMELINE, FAULTS)


class RunRecord:
    """Collects a run in `directory`; None collects metrics only.

    Files are made when the simulation asks for its sinks, after its scenario was checked. Leaving the context closes
    them; without `finish` the log is marked incomplete.
    """

    def __init__(
        self, scenario: Scenario, directory: Path | None, *, events: bool = True, perfetto: bool = True
    ) -> None:
        self.scenario = scenario
        self.directory = directory
        self._wants_events = events
        self._wants_perfetto = perfetto
        self._kernels: Mapping[str, str] = {}
        self._metrics: RunMetrics | None = None
        self._log: EventLog | None = None
        self._perfetto: PerfettoTrace | None = None

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(complete=False)
        if isinstance(error, OSError):  # such as a full disk
            raise UnwritableFile(self.directory, error) from error

    # -- called by the simulation ------------------------------------------------------------------------------------

    def take_assembly(self, assembly: Assembly) -> None:
        """Note what prices the passes, for the log: a replay elsewhere may have other times."""
        self._kernels = assembly.cost.kernel_sources

    def sinks(self, replica: int) -> Sequence[EventSink]:
        """Return the event sinks of a replica's engine."""
        metrics, _ = self.files()
        sinks: list[Callable[..., None]] = [metrics.sink(replica)]
        if self._log is not None:
            sinks.append(self._log.sink(replica))
        if self._perfetto is not None:
            sinks.append(self._perfetto.sink(replica))
        return sinks

    def files(self) -> tuple[RunMetrics, EventLog | None]:
        """Return the metrics, and the log if there is one."""
        return self._open() if self._metrics is None else self._metrics, self._log

    @property
    def spans(self) -> RunRecord | None:
        """The sink of device and scheduler times;
        None if no timeline is written, so that the simulation does not make them."""
        return self if self.directory is not None and self._wants_perfetto else None

    def span(self, replica: int, track: str, name: str, start_ns: int, duration_ns: int, args: dict[str, Any]) -> None:
        assert self._perfetto is not None, "spans are asked for where a timeline is written"
        self._perfetto.span(replica, track, name, start_ns, duration_ns, args)

    # -- files ------------------------------------------------------------------------------

    def _open(self) -> RunMetrics:
        from ...observe.measuring.metrics import RunMetrics

        if self.directory is None:
            self._metrics = RunMetrics()
            return self._metrics
        _refuse_files_of_others(self.directory)
        empty_run_directory(self.directory, FILES)
        metrics = self._metrics = RunMetrics(self.directory)
        if self._wants_events:
            from ...observe.log import EventLog

            header = {"scenario": self.scenario.model_dump(mode="json"), "kernels": dict(self._kernels)}
            self._log = EventLog(self.directory / EVENTS, header)
        if self._wants_perfetto:
            from ...observe.perfetto import PerfettoTrace

            self._perfetto = PerfettoTrace(self.directory / TIMELINE)
        return metrics

    def write_scenario(self, origins: Mapping[str, str], derived: Iterable[DerivedRow], notices: Sequence[str]) -> None:
        """Write the resolved scenario with its sources; it can be run again."""
        if self.directory is not None:
            from ...sim.scenario.scenario_text import scenario_text

            write_text(self.directory / SCENARIO, scenario_text(self.scenario, origins, derived, notices))

    def write_faults(self, plan: FaultPlan) -> None:
        """Write the fault plan; it can be given again."""
        if self.directory is not None:
            write_text(self.directory / FAULTS, plan.to_toml())

    def finish(self, report: RunReport) -> dict[str, Any]:
        """Close all files, write the summary, and return it."""
        from ...sim.summary.summary import summarize_run

        assert self._metrics is not None, "a run asks for its sinks"
        summary = summarize_run(self.scenario, report, self._metrics)
        self._close(complete=report.complete)
        if self.directory is not None:
            write_summary(self.directory / SUMMARY, summary)
        return summary

    def _close(self, complete: bool) -> None:
        """Close all open files, even if one fails. A second call does nothing."""
        try:
            with ExitStack() as closing:
                if self._metrics is not None:
                    closing.callback(self._metrics.close)
                if self._perfetto is not None:
                    closing.callback(self._perfetto.close)
                if self._log is not None:
                    closing.callback(self._log.close, complete)
        except OSError as error:
            raise UnwritableFile(self.directory, error) from None

    # -- the terminal -------------------------------------------------------------------------------------------------

    def print_report(self, summary: Mapping[str, Any], assembly: Assembly) -> None:
        """Print the tables on standard output, below them whose timing was simulated and where the files are."""
        from rich.console import Console

        from ...observe.tables import report_tables
        from ...sim.assembly.explaining import timing_line

        console = Console(highlight=False, markup=False)
        for table in report_tables(summary, self._title(assembly.spec.config.mode), width=console.width):
            console.print(table)
        console.print(f"\n{timing_line(assembly)}", style="dim")
        if self.directory is not None:
            console.print(f"The run is in {self.directory}.", soft_wrap=True)

    def _title(self, mode: str) -> str:
        """Return name, model, hardware, algorithm and mode in one line."""
        from ...sim.assembly.pools import gpus_by_name, pools_of, pools_on

        model, hardware, speculation = self.scenario.model, self.scenario.hardware, self.scenario.speculation
        gpus = gpus_by_name(pools_on(hardware, pools_of(self.scenario)))
        parts = [
            f"{model.target} on {' and '.join(f'{n} × {gpu}' if n > 1 else gpu for gpu, n in gpus.items())}",
            f"{speculation.algorithm} {speculation.policy}" if speculation.algorithm != "NONE" else "NONE",
            mode,
            f"seed {self.scenario.seed}",
        ]
        return f"{self.scenario.name}: {', '.join(parts)}"


EXIT_BROKEN = 1


def print_faults(report: FaultReport) -> None:
    """Print the table on standard output."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print()
    console.print(_table(report))
    if report.never_fired:
        console.print(f"Enabled, but never injected, so not tested: {', '.join(report.never_fired)}.")
    if report.cancelled_in:
        states = ", ".join(f"{state} {count}" for state, count in sorted(report.cancelled_in.items()))
        console.print(f"Clients left while their request was: {states}.")
    if report.kept:
        console.print("Every promise was kept.")


def print_broken(report: FaultReport, seed: int | None) -> None:
    """Print the broken promises on standard error, with the command that repeats the run if a seed does."""
    for broken in report.broken:
        print(f"foredraft: broken promise: {broken}", file=sys.stderr)
    if seed is not None:
        print(f"foredraft: seed {seed}; again: {repeating_command(seed)}", file=sys.stderr)


def repeating_command(seed: int) -> str:
    """Return this command with its seed."""
    words = ["foredraft", *sys.argv[1:]]
    if not any(word == "--seed" or word.startswith("--seed=") for word in words):
        words += ["--seed", str(seed)]
    return shlex.join(words)


def _table(report: FaultReport) -> Table:
    from rich.table import Table

    from ...sim.faults.kinds import KINDS

    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    table.add_column("Faults", style="dim", no_wrap=True)
    table.add_column("injected", justify="right")
    table.add_column("checked", justify="right")
    table.add_column("promised")
    for kind, count in report.injected.items():
        checked = f"{report.checked_of(kind):,}" if count else "–"
        table.add_row(kind, f"{count:,}" if count else "never", checked, KINDS[kind].promise)
    if not report.injected:
        table.add_row("none enabled", "", "", "")
    return table


def _refuse_files_of_others(directory: Path) -> None:
    """Raise ConfigError if a file of the directory that a run would replace is none of an earlier run."""
    from ...core.errors import ConfigError

    there = [name for name in FILES if (directory / name).is_file()]
    version = _version_of(directory / SUMMARY) if SUMMARY in there else ""
    if version is None or there == [SCENARIO]:
        found = SCENARIO if version is not None else SUMMARY
        message = "is not of an earlier run and would be replaced: name another directory"
        raise ConfigError.of(str(directory / found), "", message)


def _version_of(summary: Path) -> str | None:
    """Return the version that made a summary, None if it is no summary of a run."""
    try:
        found = json.loads(summary.read_bytes())
    except (OSError, ValueError):
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None
