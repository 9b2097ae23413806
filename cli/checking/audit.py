"""`foredraft audit`: find contradictions in the log of a run, or make its decisions again and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import count_of
from ..options import AllowTruncated, AsJson, Log, option, print_document, refuse_without_effect

if TYPE_CHECKING:
    from ...core.contract.events import EventSink
    from ...core.scheduler.engine import Engine
    from ...sim.assembly import Assembly

EXIT_CONTRADICTORY = EXIT_DIFFERENT = 1
CONTRADICTIONS = 10  # that are printed

Replay = Annotated[
    bool, option("--replay", "Feed the recorded results to fresh engines instead, and compare every decision.")
]
Limit = Annotated[
    int | None, option("--limit", f"Print at most this number of contradictions. Default: {CONTRADICTIONS}.", min=1)
]


def audit(
    log: Log,
    replay: Replay = False,
    allow_truncated: AllowTruncated = False,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Find contradictions in the log of a run, or replay it. Any engine may have written it.

    The command compares every record with the records before it: each request ends once, each
    token is delivered once, steps return in order, times do not go back, and
    counts add up. It runs nothing again. Exit code 0: no contradiction; 1: some
    contradictions, each printed with its line; 2: the log cannot be read.

    With --replay it builds the engines from the log's header: from the scenario
    of a simulation, or from the engine of a real run. It feeds them the recorded
    results, and needs no model and no tokenizer. Exit code 0: all decisions are
    identical; 1: a decision differs, and the command prints the first such
    decision; 2: the log cannot be used.

        foredraft simulate --out runs/a
        foredraft audit runs/a/events.jsonl
        foredraft audit --replay runs/a
    """
    from ...observe.log import read_header
    from ...properties.audit.log import audit_log

    refuse_without_effect(("--limit", replay and limit is not None, "--replay prints the first difference"))
    path = log / "events.jsonl" if log.is_dir() else log
    if replay:
        _replay(path, allow_truncated, as_json)
        return
    candidates = _candidates(read_header(path), str(path))
    report = audit_log(path, candidates=candidates, allow_truncated=allow_truncated)
    if as_json:
        from ..documents.checking import AuditDocument

        print_document(AuditDocument(report.ok, report.to_json()))
    else:
        typer.echo(report.text(limit or CONTRADICTIONS))
    if not report.ok:
        raise typer.Exit(EXIT_CONTRADICTORY)


def _candidates(header: Mapping[str, Any], source: str) -> tuple[int, ...] | None:
    """Return the draft steps that the engines of the log could choose from; None if its header does not say."""
    from ...core.errors import ForedraftError

    scenario = header.get("scenario")
    try:
        if isinstance(scenario, Mapping):
            from ...sim.assembly import assemble
            from ...sim.scenario_file import scenario_from_dict

            return assemble(scenario_from_dict(scenario, source)).spec.make_controller().candidates
        if "engine" in header:
            from ...core.scheduler.spec import EngineSpec

            return EngineSpec.from_json(header["engine"], source).make_controller().candidates
    except ForedraftError:
        return None
    return None


def _replay(path: Path, allow_truncated: bool, as_json: bool) -> None:
    """Feed the results of a log to fresh engines and print how their decisions compare."""
    from ...observe.replay import replay as replay_log

    report = replay_log(path, _EngineFactory(str(path)), allow_truncated=allow_truncated)
    if as_json:
        from ..documents.checking import ReplayDocument

        difference = None if report.difference is None else str(report.difference)
        counts = (report.num_decisions, report.num_commits, report.num_replicas, report.complete)
        print_document(ReplayDocument(report.identical, *counts, difference))
        raise typer.Exit(0 if report.identical else EXIT_DIFFERENT)
    replicas, decisions = count_of(report.num_replicas, "replica"), count_of(report.num_decisions, "decision")
    if report.difference is not None:
        typer.echo(f"{decisions} identical, then a difference.")
        typer.echo(f"{path}: {report.difference}")
        raise typer.Exit(EXIT_DIFFERENT)
    ending = "" if report.complete else " The run itself was interrupted."
    typer.echo(f"{decisions} identical ({replicas}, {count_of(report.num_commits, 'result')} fed back).{ending}")


class _EngineFactory:
    """Makes the engines of a log from its header, which is resolved once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._make_engine: Callable[[EventSink, int], Engine] | None = None

    def __call__(self, header: Mapping[str, Any], replica: int, events: EventSink) -> Engine:
        if self._make_engine is None:
            self._make_engine = self._resolve(header)
        return self._make_engine(events, replica)

    def _resolve(self, header: Mapping[str, Any]) -> Callable[[EventSink, int], Engine]:
        from ...core.errors import ConfigError

        scenario = header.get("scenario")
        if isinstance(scenario, Mapping):
            from ...sim.assembly import assemble
            from ...sim.scenario_file import scenario_from_dict

            assembly = assemble(scenario_from_dict(scenario, self._source))
            _check_kernels(header.get("kernels"), assembly, self._source)
            return assembly.make_engine
        if "engine" in header:
            from ...core.scheduler.spec import EngineSpec

            described = EngineSpec.from_json(header["engine"], f"{self._source}: line 1")
            return lambda events, replica: described.make_engine(events)
        what = 'the header has no "scenario" and no "engine": neither a simulation nor a real run wrote this log'
        raise ConfigError.of(self._source, "line 1", what)


def _check_kernels(recorded: Any, assembly: Assembly, source: str) -> None:
    """Raise ConfigError if engines choose steps by the times of passes and the log was written with times from another
    source."""
    from ...core.errors import ConfigError, Problem
    from ...core.scheduler.spec import COST_POLICIES

    here = assembly.cost.kernel_sources
    if assembly.spec.policy not in COST_POLICIES or not isinstance(recorded, dict) or recorded == here:
        return
    problems = [
        Problem(
            f"line 1: kernels.{part}",
            f"the policy {assembly.spec.policy} chose by times of {recorded.get(part)}; here the times are of "
            f"{here.get(part)}: replay needs the same times",
        )
        for part in dict.fromkeys([*recorded, *here])
        if recorded.get(part) != here.get(part)
    ]
    raise ConfigError(source, problems)
