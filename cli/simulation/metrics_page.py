"""`foredraft trace` of a Prometheus page: lengths and the rate of requests, and the workload that has them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...core.errors import count_of
from ..options import print_document, refuse_without_effect

if TYPE_CHECKING:
    from ...sim.workload.prometheus import LengthHistogram, PageWorkload

WIDTH = 80
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def describe_page(
    file: Path, since: Path | None, seconds: float | None, out: Path | None, as_json: bool, given: Mapping[str, Any]
) -> None:
    """Print what a page tells of a workload; write the workload to `out`, if it is given.

    given: options that are for requests, with their values; one that is set is refused.
    """
    from ...observe.output_files import write_text
    from ...sim.scenario.scenario_text import workload_text
    from ...sim.workload.prometheus import read_workload, unknown_of

    why = "a page of metrics has no single requests"
    refuse_without_effect(*((name, bool(value), why) for name, value in given.items()))
    found = read_workload(str(file), None if since is None else str(since), seconds)
    unknown = unknown_of(found)
    if out is not None:
        write_text(out, workload_text(found.table(), file.name, unknown), replace=True)
    if as_json:
        from ..documents.simulation import TraceDocument

        description: dict[str, Any] = {"num_requests": found.requests, "rate": found.rate, "seconds": found.seconds}
        description |= {kind: _numbers(getattr(found, kind)) for kind in ("prompt", "output")}
        made = None if out is None else {"workload": found.table()}
        print_document(TraceDocument(str(file), "prometheus", (), 0, list(unknown), description, made, None))
        return
    lines = [*_lines(file, since, found), ""]
    for text in unknown:
        lines += textwrap.wrap(f"The page does not tell {text}.", WIDTH, subsequent_indent="  ")
    if out is not None:
        lines += ["", f"Written to {out}."]
    typer.echo("\n".join(lines))


def _numbers(one: LengthHistogram) -> dict[str, Any]:
    percentiles = {name: one.percentile(share) for name, share in SHARES.items()}
    return {"mean": one.mean, "up_to": percentiles, "bounds": list(one.bounds), "counts": list(one.counts)}


def _lines(file: Path, since: Path | None, found: PageWorkload) -> list[str]:
    more = "" if since is None else f" more than {since.name}"
    rate = "" if found.rate is None else f", {found.rate:.3g} per second"
    text = f"{file.name} ({found.server}, prometheus): {count_of(found.requests, 'request')}{more}{rate}"
    lines = [*textwrap.wrap(text, WIDTH), ""]
    lines.append(f"{'Tokens':10}{'mean':>10}" + "".join(f"{f'{name} up to':>14}" for name in SHARES))
    for kind in ("prompt", "output"):
        one: LengthHistogram = getattr(found, kind)
        ends = (one.percentile(share) for share in SHARES.values())
        cells = "".join(f"{'more' if end is None else f'{end:,.0f}':>14}" for end in ends)
        lines.append(f"  {kind:8}{one.mean:>10,.0f}{cells}")
    return lines
