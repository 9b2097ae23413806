"""`foredraft audit`: find contradictions in the log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from .options import AllowTruncated, AsJson, Log, option, print_document

EXIT_CONTRADICTORY = 1


Limit = Annotated[int, option("--limit", "Print at most this number of contradictions.", min=1)]


def audit(
    log: Log,
    allow_truncated: AllowTruncated = False,
    limit: Limit = 10,
    as_json: AsJson = False,
) -> None:
    """Find contradictions in the log of a run; any engine may have written it.

    Compares every record with the records before it: each request ends once, each
    token is delivered once, steps return in order, times do not go back, and
    counts add up. It runs nothing again. Exit code 0: no contradiction; 1: some
    contradictions, each printed with its line; 2: the log cannot be read.

        foredraft simulate --out runs/a
        foredraft audit runs/a/events.jsonl
    """
    from ..observe.log import read_header
    from ..properties.audit.log import audit_log

    path = log / "events.jsonl" if log.is_dir() else log
    candidates = _candidates(read_header(path), str(path))
    report = audit_log(path, candidates=candidates, allow_truncated=allow_truncated)
    if as_json:
        from .documents.checking import AuditDocument

        print_document(AuditDocument(report.ok, report.to_json()))
    else:
        typer.echo(report.text(limit))
    if not report.ok:
        raise typer.Exit(EXIT_CONTRADICTORY)


def _candidates(header: Mapping[str, Any], source: str) -> tuple[int, ...] | None:
    """Return the draft steps that the engines of the log could choose from; None if its header does not say."""
    from ..core.errors import ForedraftError

    scenario = header.get("scenario")
    try:
        if isinstance(scenario, Mapping):
            from ..sim.assembly import assemble
            from ..sim.scenario_file import scenario_from_dict

            return assemble(scenario_from_dict(scenario, source)).spec.make_controller().candidates
        if "engine" in header:
            from ..core.scheduler.spec import EngineSpec

            return EngineSpec.from_json(header["engine"], source).make_controller().candidates
    except ForedraftError:
        return None
    return None
