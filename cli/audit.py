"""`foretoken audit`: does the log of a run contradict itself?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_CONTRADICTORY = 1


def audit(
    log: Annotated[Path, typer.Argument(help="events.jsonl of a run, or the directory that has it.")],
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Accept a log that breaks off: its run was killed.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many contradictions are printed.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file, too.")] = None,
) -> None:
    """Audit the log of a run, whichever engine wrote it.

    Every record is held against those before it: each request ends once, each
    token is delivered once, steps come back in order, times do not go back,
    and what is counted adds up. Nothing is executed again. Exit code 0: no
    contradiction; 1: there is one, with its line; 2: the log cannot be read.

        foretoken simulate --out runs/a
        foretoken audit runs/a/events.jsonl
    """
    from ..observe.log import read_header
    from ..properties.audit.history import audit_log

    path = log / "events.jsonl" if log.is_dir() else log
    candidates = _candidates(read_header(path), str(path))
    report = audit_log(path, candidates=candidates, allow_truncated=allow_truncated)
    typer.echo(report.text(limit))
    if json_file is not None:
        from .files import write_json

        write_json(json_file, report.to_json())
    if not report.ok:
        raise typer.Exit(EXIT_CONTRADICTORY)


def _candidates(header: Mapping[str, Any], source: str) -> tuple[int, ...] | None:
    """The numbers of steps that the engines of the log could choose from; None if its header does not say, or is not one of ours."""
    from ..core.errors import ForetokenError

    scenario = header.get("scenario")
    try:
        if isinstance(scenario, Mapping):
            from ..sim.assembly import assemble
            from ..sim.scenario_file import scenario_from_dict

            return assemble(scenario_from_dict(scenario, source)).spec.make_controller().candidates
        if "engine" in header:
            from ..core.scheduler.spec import EngineSpec

            return EngineSpec.from_json(header["engine"], source).make_controller().candidates
    except ForetokenError:
        return None
    return None
