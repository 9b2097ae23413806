"""The whole self-test: every step in order within a budget of time, and one report. Also `python -m foretoken.gpu.selftest`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from ...core.errors import ConfigError, ForetokenError, Problem
from .report import MARKDOWN, Report
from .steps import Outcome, Step, not_run, run_apart, run_here

DEFAULT_BUDGET, DEFAULT_DIRECTORY = "10m", "selftest"
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
OnLine = Callable[[str], None]


def seconds_of(budget: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 1h. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h)", budget.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError("<arguments>", [Problem("budget", f"{budget!r}; expected a time such as 90s, 10m or 1h")])
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def selftest(device: str, directory: Path, budget: str, on_line: OnLine) -> Report:
    """Run the test on `device` ("auto", "cpu", "cuda") and return its report, which is in `directory` then.

    On Ctrl-C the report of what ran is `interrupted`. Raises ConfigError for arguments, ForetokenError if nothing can be written.
    """
    from ..session.plan import resolve_device
    from .catalogue import catalogue
    from .context import Context

    end_s = time.monotonic() + seconds_of(budget)
    device = resolve_device(device)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foretoken-selftest-") as made:
        context = Context(device, Path(made))
        steps = catalogue(context)
        report = Report(directory, device, sys.argv, f"{datetime.now():%Y-%m-%d %H:%M}", len(steps))
        report.write()

        def begin(step: Step) -> None:
            on_line(f"{len(report.outcomes) + 1} of {len(steps)}: {step.title}")
            report.begin(step)

        try:
            for outcome in _outcomes(steps, context.device, Path(made), lambda: end_s - time.monotonic(), begin):
                report.seconds = time.monotonic() - begun_s
                report.add(outcome)
        except KeyboardInterrupt:
            report.interrupted = True
            report.seconds = time.monotonic() - begun_s
            report.write()
    return report


def _outcomes(
    steps: Sequence[Step], device: str, made: Path, seconds_left: Callable[[], float], on_begin: Callable[[Step], None]
) -> Iterator[Outcome]:
    if device != "cpu":
        from .catalogue import serve_catalogue

        yield from run_apart(steps, partial(serve_catalogue, device, made), seconds_left, on_begin)
        return
    for step in steps:
        if step.needs_gpu:
            yield not_run(step, "needs a GPU")
        else:
            yield from run_here([step], seconds_left, on_begin)


def exit_code(report: Report) -> int:
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.ok else EXIT_FAILED


def closing_lines(report: Report) -> list[str]:
    """Return what is printed at the end: failures, the summary, where the report is."""
    failed = [
        f"{o.state}: {o.part}: {o.name}: {o.text}" for o in report.outcomes if o.state in ("failed", "not finished")
    ]
    return [*failed, report.summary(), f"report: {report.directory / MARKDOWN}"]


def main() -> int:
    """Run the self-test with argparse, on machines without the packages that the command `foretoken` needs."""
    parser = argparse.ArgumentParser("python -m foretoken.gpu.selftest.run", description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda; auto: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_DIRECTORY), help="directory of the report")
    parser.add_argument("--budget", default=DEFAULT_BUDGET, help="time, as 90s or 10m")
    given = parser.parse_args()
    try:
        report = selftest(given.device, given.out, given.budget, lambda text: print(text, file=sys.stderr, flush=True))
    except (ForetokenError, ModuleNotFoundError) as error:
        needed = "" if isinstance(error, ForetokenError) else ": it needs torch, triton, numpy, safetensors, tokenizers"
        print(f"foretoken: {error}{needed}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\n".join(closing_lines(report)))
    return exit_code(report)


if __name__ == "__main__":
    sys.exit(main())
