"""The report of a run with faults: what was injected and promised, and which promises were broken."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from ...sim.faults.service import FaultReport

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
        print(f"foretoken: broken promise: {broken}", file=sys.stderr)
    if seed is not None:
        print(f"foretoken: seed {seed}; again: {repeating_command(seed)}", file=sys.stderr)


def repeating_command(seed: int) -> str:
    """Return this command with its seed."""
    words = ["foretoken", *sys.argv[1:]]
    if not any(word == "--seed" or word.startswith("--seed=") for word in words):
        words += ["--seed", str(seed)]
    return shlex.join(words)


def _table(report: FaultReport) -> Table:
    from rich.table import Table

    from ...sim.faults.plan import KINDS

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
