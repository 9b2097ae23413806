"""`foredraft simulate`: run a scenario, print its report, write its files."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import count_of
from ..logs import DEFAULT_FORMAT, LogFormat, LogLevel, start_logging
from ..names import print_names
from ..options import (
    AsJson,
    Columns,
    Correct,
    Quiet,
    ScenarioFile,
    Seed,
    Settings,
    TraceFile,
    option,
    print_document,
    refuse_without_effect,
)
from .launch import FromSglang, FromTrtllm, FromVllm, ServerLog, launched

if TYPE_CHECKING:
    from ...sim.faults.plan import FaultPlan
    from ...sim.running.report import RunReport
    from ...sim.scenario import Scenario

EXIT_INTERRUPTED: dict[int, int] = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
}  # 128 + the signal's number, as shells have it


def _print_schema(kind: str | None) -> None:
    from .schema import print_schema

    if kind is not None:
        print_schema(kind)
        raise typer.Exit


def _print_names(kind: str | None) -> None:
    if kind is not None:
        print_names(kind)
        raise typer.Exit


# fmt: off
OutDirectory = Annotated[Path | None, option("--out", "Write the files of the run to this directory.", "DIR")]
Explain = Annotated[bool, option("--explain", "Print the scenario with the source of every number, and run nothing.")]
NoEvents = Annotated[bool, option("--no-events", "Do not write events.jsonl, the largest file.")]
NoPerfetto = Annotated[bool, option("--no-perfetto", "Do not write trace.json, the timeline for ui.perfetto.dev.")]
Faults = Annotated[str | None, option("--faults",
    "Inject the faults of a plan, or of a plan drawn from the seed (swarm). Exit code 1: a promise was broken.",
    "PLAN.toml|swarm")]
Workers = Annotated[int, option("--workers",
    "Processes that share the replicas, where the router does not look at them: the results of one, but no trace.json.",
    min=1, max=1024)]
Schema = Annotated[str | None, option("--schema",
    "Print a JSON schema and run nothing: of scenario files (scenario), or of what a command prints with --json.", "scenario|COMMAND",
    callback=_print_schema, is_eager=True)]
Names = Annotated[str | None, option("--list",
    "Print the names that a key takes, and run nothing: hardware.gpu, model.target and model.draft, or hardware.server.",
    "gpus|models|servers", callback=_print_names, is_eager=True)]
# fmt: on


def simulate(
    scenario: ScenarioFile = None, from_sglang: FromSglang = None, from_vllm: FromVllm = None, from_trtllm: FromTrtllm = None,
    server_log: ServerLog = None, settings: Settings = None, trace: TraceFile = None, columns: Columns = None,
    correct: Correct = False, seed: Seed = None, out: OutDirectory = None, explain: Explain = False,
    no_events: NoEvents = False, no_perfetto: NoPerfetto = False, faults: Faults = None, workers: Workers = 1,
    as_json: AsJson = False, quiet: Quiet = False,
    log_level: LogLevel = None, log_format: LogFormat = DEFAULT_FORMAT, _schema: Schema = None, _names: Names = None,
) -> None:  # fmt: skip
    """Simulate a deployment: throughput, latency, acceptance and memory of a scenario.

    Without arguments it simulates Llama-3.1-8B on one H100: EAGLE-3 with adaptive
    steps, overlap scheduling, a thousand chat requests.

        foredraft simulate
        foredraft simulate --set workload.rate=20 --set hardware.gpu=H200
        foredraft simulate --trace requests.csv --out runs/trace
        foredraft simulate --explain > scenario.toml
        foredraft simulate --faults swarm --seed 7
        foredraft simulate --list gpus
        foredraft simulate --schema scenario > scenario.schema.json

    With --out, DIR holds summary.json, scenario.toml, requests.parquet,
    rounds.parquet, events.jsonl and trace.json. Ctrl-C ends a run early: the
    command keeps its results, marks them as incomplete and exits with code 130.
    On bad input it prints one message and exits with code 2. With --faults, exit
    code 1 means that a promise was broken; the message contains the command that
    repeats the run.
    """
    from ...sim.running.coupling import check_workers
    from ...sim.scenario_file import load_scenario

    refuse_without_effect(
        (
            "--out",
            explain and out is not None,
            "--explain runs nothing; it prints the scenario to standard output, which you can redirect to a file",
        ),
        ("--faults", explain and faults is not None, "--explain runs nothing"),
        ("--log-level", explain and log_level is not None, "--explain runs nothing"),
        ("--log-level", workers > 1 and log_level is not None, "the processes of --workers write no lines"),
        ("--workers", explain and workers > 1, "--explain runs nothing"),
        ("--no-events", no_events and out is None, "without --out no file is written"),
        ("--no-perfetto", no_perfetto and out is None, "without --out no file is written"),
    )
    start_logging(log_level, log_format)
    launch = launched(scenario, settings or (), from_sglang, from_vllm, from_trtllm, server_log)
    given = [*(settings or ()), *given_by_options(trace, seed, columns, correct)]
    resolved, origins = load_scenario(scenario, given, launch)
    if trace is not None:
        origins["workload.trace"] = "--trace"
    if seed is not None:
        origins["seed"] = "--seed"
    if explain:
        _explain(resolved, origins, as_json)
        return
    plan = None if faults is None else fault_plan(faults, resolved, origins)
    with errors_at(origins):
        check_workers(workers, resolved, "--workers", plan is not None)
    with termination_is_interruption() as received, errors_at(origins):
        perfetto = not no_perfetto and workers == 1
        try:
            report = _run(
                resolved, origins, out, out is not None and not no_events, perfetto, as_json, quiet, plan, workers
            )
        except KeyboardInterrupt:  # in a run of one process it ends the run, and no more
            print("foredraft: interrupted; a run in several processes has no results before its end", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED[received[-1] if received else signal.SIGINT]) from None
    _exit_unless_kept(report, resolved.seed)
    if not report.complete:
        raise typer.Exit(EXIT_INTERRUPTED[received[-1] if received else signal.SIGINT])


def _exit_unless_kept(report: RunReport, seed: int) -> None:
    """Exit with code 1 if faults have broken a promise, with the command that repeats the run."""
    if report.faults is None or report.faults.kept:
        return
    from .run_record import EXIT_BROKEN, print_broken

    print_broken(report.faults, seed)
    raise typer.Exit(EXIT_BROKEN)


def fault_plan(given: str, scenario: Scenario, origins: dict[str, str]) -> FaultPlan:
    """Return the plan of `--faults`, with faults of transfers where the scenario has any."""
    from ...sim.assembly.pools import pools_of
    from ...sim.faults.plan import load_fault_plan

    with errors_at(origins):
        transfers = pools_of(scenario).is_disaggregated
    return load_fault_plan(given, scenario.seed, transfers=transfers)


def given_by_options(
    trace: Path | None, seed: int | None, columns: str | None = None, correct: bool = False
) -> list[str]:
    """Return the settings of these options."""
    given = [] if columns is None else [f"workload.columns={json.dumps(columns, ensure_ascii=False)}"]
    if correct:
        given.append("hardware.correction=published")
    if trace is not None:
        given.append(f"workload.trace={json.dumps(str(trace), ensure_ascii=False)}")
    if seed is not None:
        given.append(f"seed={seed}")
    return given


def _explain(scenario: Scenario, origins: dict[str, str], as_json: bool) -> None:
    """Print the scenario, every number that follows from it, and what it does that a user may not expect."""
    from ...sim.assembly import assemble
    from ...sim.assembly.explaining import derived_rows
    from ...sim.effects.given_keys import refuse_without_effect
    from ...sim.effects.notices import notices_of
    from ...sim.scenario.scenario_text import scenario_text

    with errors_at(origins):
        assembly = assemble(scenario)
        refuse_without_effect(assembly, origins)
        notices = notices_of(assembly, origins)
    if as_json:
        from ..documents.simulation import DerivedNumber, ExplainDocument

        derived = [DerivedNumber(*row) for row in derived_rows(assembly)]
        print_document(ExplainDocument(scenario.model_dump(mode="json"), origins, derived, list(notices)))
    else:
        typer.echo(scenario_text(scenario, origins, derived_rows(assembly), notices), nl=False)


def _run(
    scenario: Scenario,
    origins: dict[str, str],
    out: Path | None,
    events: bool,
    perfetto: bool,
    as_json: bool,
    quiet: bool,
    faults: FaultPlan | None,
    workers: int,
) -> RunReport:
    """Simulate, write the files, print the report."""
    from ...sim.assembly.explaining import derived_rows
    from ...sim.running.parts import NO_REPLICAS, run_parts
    from ...sim.running.run import Simulation
    from ..progress import simulation_progress
    from .run_record import RunRecord

    record = RunRecord(scenario, out, events=events, perfetto=perfetto)
    with record:
        simulation = Simulation(
            scenario,
            sinks=record.sinks,
            spans=record.spans,
            faults=faults,
            origins=origins,
            on_assembled=record.take_assembly,
            named_slots=events,
            own=None if workers == 1 else NO_REPLICAS,
        )
        files = record.files()
        record.write_scenario(origins, derived_rows(simulation.assembly), simulation.notices)
        if faults is not None:
            record.write_faults(faults)
        with simulation_progress(quiet) as progress:
            if workers == 1:
                report = simulation.run(progress)
            else:
                report = run_parts(simulation, workers, origins, *files, progress)
        summary = record.finish(report)
    if as_json:
        from ..documents.simulation import SimulateDocument

        place = None if out is None else str(out)
        print_document(SimulateDocument(scenario.model_dump(mode="json"), summary, place))
    else:
        record.print_report(summary, simulation.assembly)
        if report.faults is not None:
            from .run_record import print_faults

            print_faults(report.faults)
    if report.num_skipped_rows:
        print(
            f"foredraft: left out {count_of(report.num_skipped_rows, 'row')} of the trace without prompt or output",
            file=sys.stderr,
        )
    if not report.complete and (report.faults is None or report.faults.kept):
        print("foredraft: interrupted; the numbers cover the run up to then", file=sys.stderr)
    return report


@contextmanager
def errors_at(origins: dict[str, str]) -> Iterator[None]:
    """Report problems of the scenario at the file or option that gave the key."""
    from ...core.errors import ConfigError
    from ...sim.scenario_file import at_origins

    try:
        yield
    except ConfigError as error:
        raise at_origins(error, origins) from None


@contextmanager
def termination_is_interruption() -> Iterator[list[int]]:
    """Let SIGTERM end a run as Ctrl-C does, so that a run stopped by a time limit can be read.
    Yields the signals received."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
