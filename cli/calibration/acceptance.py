"""`foredraft calibrate --acceptance`: fit the acceptance process to what a server wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...core.errors import count_of
from ..options import print_document

if TYPE_CHECKING:
    from ...core.acceptance.fit import AcceptanceFit
    from ...core.acceptance.presets import AcceptancePreset
    from ...core.acceptance.process import GaussianAcceptance
    from ...sim.workload.acceptance.lines import MeanAcceptance
    from ...sim.workload.acceptance.logs import AcceptanceLog
    from ..documents.simulation import AcceptanceDocument

Statistic = tuple[str, float, float]
"""A name, and its value recorded and fitted; NaN where the files do not tell it."""
MOST_STEPS = 16

_SPREAD = "the spread between requests (request_share)"
_CORRELATION = "the correlation (field_share, correlation_len)"


def fit_acceptance(
    files: Sequence[str], steps: str | None, preset: str, allow_truncated: bool, out: Path | None, as_json: bool
) -> None:
    """Fit the acceptance of drafts to the files of a server, and print it as a scenario's table.

    Prints recorded and fitted numbers side by side, and what the files do not contain. Raises ConfigError for files
    that cannot be read, or contradict themselves.
    """
    from ...core.acceptance.presets import choose_preset
    from ...sim.workload.acceptance.logs import AcceptanceLog
    from ...sim.workload.acceptance.means import read_acceptance

    chosen = choose_preset(preset).preset
    log = read_acceptance(files, _steps(steps), allow_truncated)
    distance: float | None = None
    inferred: tuple[str, ...] = ()
    if isinstance(log, AcceptanceLog):
        fitted = log.fit(chosen.process())
        process, unknown, distance = fitted.process, _unknown_parts(log, fitted, chosen.name), fitted.histogram_distance
        read, rows = _read(log, fitted), list(_statistics(fitted))
    else:
        read = f"{count_of(len(log.means), 'mean accept length')}, by tokens"
        process, unknown, rows = _fit_to_means(log, chosen)
        inferred = log.inferred
    table = _scenario_table(process, log.form, inferred, unknown)
    if out is not None:
        from ...observe.output_files import write_text

        write_text(out, table, replace=True)
    if as_json:
        print_document(_document(log, process, rows, inferred, unknown, distance))
        return
    lines = [f"format    {log.form}", f"read      {read}", "", f"{'':34}{'recorded':>12}{'fitted':>12}"]
    lines += [_row(*row) for row in rows]
    if distance is not None:
        lines.append(f"rounds by accepted drafts: {distance:.1%} fall elsewhere in the fit")
    remarks = [f"left out  {number:,} {what}" for what, number in log.left_out.items()]
    remarks += [f"inferred  {what}" for what in inferred]
    remarks += [f"unknown   {what}" for what in unknown]
    lines += ["", *remarks] if remarks else []
    typer.echo("\n".join([*lines, "", table]), nl=False)
    if out is not None:
        typer.echo(f"\nWritten to {out}.")


def _steps(text: str | None) -> int | None:
    from ...core.errors import ConfigError

    if text is not None and not (text.isdecimal() and 1 <= int(text) <= MOST_STEPS):
        message = f"found {text!r}; with --acceptance expected one number from 1 to {MOST_STEPS}"
        raise ConfigError.of("<arguments>", "--steps", message)
    return None if text is None else int(text)


def _document(
    log: AcceptanceLog | MeanAcceptance,
    process: GaussianAcceptance,
    rows: Sequence[Statistic],
    inferred: Sequence[str],
    unknown: Sequence[str],
    distance: float | None,
) -> AcceptanceDocument:
    from ..documents.simulation import AcceptanceDocument, FittedStatistic

    statistics = [
        FittedStatistic(name, *(None if math.isnan(value) else float(value) for value in numbers))
        for name, *numbers in rows
    ]
    table = {"conditional": [float(value) for value in process.conditional]}
    table |= {key: getattr(process, key) for key in ("request_share", "field_share", "correlation_len")}
    return AcceptanceDocument(log.form, statistics, distance, dict(log.left_out), list(inferred), list(unknown), table)


def _read(log: AcceptanceLog, fitted: AcceptanceFit) -> str:
    requests = "" if log.num_requests is None else f" of {count_of(log.num_requests, 'request')}"
    return f"{count_of(fitted.recorded.num_rounds, 'round')}{requests}, {count_of(log.steps, 'draft step')}"


def _statistics(fitted: AcceptanceFit) -> Iterator[Statistic]:
    recorded, simulated = fitted.recorded, fitted.simulated
    yield "mean accept length, by tokens", recorded.mean_accept_length, simulated.mean_accept_length
    yield "mean accept length, by requests", recorded.request_mean, simulated.request_mean
    yield "requests' means, 5th percentile", recorded.request_p5, simulated.request_p5
    yield "requests' means, 95th percentile", recorded.request_p95, simulated.request_p95
    yield "correlation of successive rounds", recorded.lag_correlation[0], simulated.lag_correlation[0]
    reached = 1.0
    for position, (seen, found) in enumerate(zip(recorded.conditional, simulated.conditional, strict=True), 1):
        yield f"position {position}, of {count_of(round(reached * recorded.num_rounds), 'round')}", seen, found
        reached *= seen


def _row(name: str, recorded: float, fitted: float) -> str:
    """Return a line of the table; what the files do not tell is a dash."""
    cells = ("-" if math.isnan(value) else f"{value:.3f}" for value in (recorded, fitted))
    return f"{name:34}" + "".join(f"{cell:>12}" for cell in cells)


def _unknown_parts(log: AcceptanceLog, fitted: AcceptanceFit, preset: str) -> list[str]:
    """Return what the log does not tell and the fit took from elsewhere, in words."""
    recorded = fitted.recorded
    parts = []
    if recorded.steps < log.steps:
        parts.append(f"positions after {recorded.steps}, which no round reached: as position {recorded.steps}")
    few = (
        ""
        if log.num_requests is None
        else f", too few rounds ({recorded.num_rounds:,} of {count_of(log.num_requests, 'request')})"
    )
    if not recorded.num_requests:
        parts.append(f"{_SPREAD}{few}: as in preset {preset}")
    if math.isnan(recorded.lag_correlation[0]):
        parts.append(f"{_CORRELATION}{'' if recorded.num_requests else few}: as in preset {preset}")
    return parts


def _fit_to_means(
    log: MeanAcceptance, preset: AcceptancePreset
) -> tuple[GaussianAcceptance, list[str], list[Statistic]]:
    from ...core.acceptance.fit import fit_means

    process, fitted = fit_means(log.means, preset.process())
    several = len({steps for steps, _ in log.means}) > 1
    rows = [
        (f"mean accept length, {count_of(steps, 'step')}", length, found)
        for (steps, length), found in zip(log.means, fitted, strict=True)
    ]
    shape = (
        "how acceptance changes with the position, apart from a trend"
        if several
        else "how acceptance changes with the position"
    )
    unknown = [
        f"{what}: as in preset {preset.name}" for what in (shape, f"the mean by requests, and {_SPREAD}", _CORRELATION)
    ]
    return process, unknown, rows


def _scenario_table(process: GaussianAcceptance, form: str, inferred: Sequence[str], unknown: Sequence[str]) -> str:
    lines = ["[acceptance]", f"# fitted to {form}"]
    lines += [f"# inferred: {what}" for what in inferred]
    lines += [f"# not known from it: {what}" for what in unknown]
    probabilities = ", ".join(f"{p:.4f}" for p in process.conditional)
    lines += [
        f"conditional = [{probabilities}]",
        f"request_share = {process.request_share:.4f}",
        f"field_share = {process.field_share:.4f}",
        f"correlation_len = {process.correlation_len}",
    ]
    return "\n".join(lines) + "\n"
