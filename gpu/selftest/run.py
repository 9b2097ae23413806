"""The whole self-test: every step in order within a budget of time, and one report.
Also `python -m foredraft.gpu.selftest`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, ForedraftError
from ...observe.output_files import UnwritableFile, write_text
from .steps import Context, Outcome, State, Step, not_run, run_apart, run_here

FORMAT = 1
MARKDOWN, JSON = "selftest.md", "selftest.json"


@dataclass(slots=True)
class Report:
    """What is known so far. `running` is the step that has begun and not ended."""

    directory: Path
    device: str
    command: Sequence[str]
    begun: str  # date and time
    num_steps: int
    outcomes: list[Outcome] = field(default_factory=list)
    running: str = ""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def counts(self) -> Mapping[State, int]:
        counted = Counter(outcome.state for outcome in self.outcomes)
        return {state: counted[state] for state in State if counted[state]}

    @property
    def ok(self) -> bool:
        return not self.counts.get(State.FAILED)

    def summary(self) -> str:
        """Return one line: how many steps ended how."""
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items()) or "nothing ran"
        left = self.num_steps - len(self.outcomes)
        return f"{counts}{f', {left} not reached' if left else ''} in {self.seconds:.0f} s on {self.device}"

    def begin(self, step: Step) -> None:
        self.running = step.title
        self.write()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.running = ""
        self.write()

    def write(self) -> None:
        """Write both files, each as a whole. Raises ForedraftError if they cannot be."""
        texts = {MARKDOWN: self.markdown(), JSON: json.dumps(self.document(), indent=1) + "\n"}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableFile(self.directory, error) from None
        for name, text in texts.items():
            write_text(self.directory / name, text, replace=True)

    def document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "complete": len(self.outcomes) == self.num_steps,
            "device": self.device,
            "begun": self.begun,
            "seconds": round(self.seconds, 1),
            "interrupted": self.interrupted,
            "running": self.running,
            "command": list(self.command),
            "counts": {str(state): count for state, count in self.counts.items()},
            "steps": [asdict(outcome) for outcome in self.outcomes],
        }

    def markdown(self) -> str:
        lines = ["# foredraft selftest", "", f"{self.begun}, `{' '.join(self.command)}`", "", self.summary(), ""]
        if self.interrupted:
            lines += ["It was interrupted.", ""]
        if self.running:
            lines += [f"Begun and not ended: **{self.running}**", ""]
        failed = [outcome for outcome in self.outcomes if outcome.state in (State.FAILED, State.NOT_FINISHED)]
        if failed:
            lines += ["## Failures", ""]
            for outcome in failed:
                lines += [f"### {outcome.part}: {outcome.name}", "", outcome.text, ""]
                lines += ["```text", outcome.traceback.strip(), "```", ""] if outcome.traceback.strip() else []
        steps = [
            {"part": o.part, "step": o.name, "": o.state.upper() if o.state is State.FAILED else str(o.state),
             "s": f"{o.seconds:.2f}", "found": o.text}
            for o in self.outcomes
        ]  # fmt: skip
        lines += ["## Steps", "", *_table(steps)]
        for outcome in self.outcomes:
            if outcome.rows:
                lines += [f"## {outcome.part}: {outcome.name}", "", outcome.text, "", *_table(outcome.rows)]
        return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table with a column for each key, in the order in which they come."""
    titles = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(title, "")).replace("|", "\\|").replace("\n", " ") for title in titles] for row in rows]
    return [_line(titles), _line(["---"] * len(titles)), *map(_line, cells), ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


DEFAULT_BUDGET, DEFAULT_DIRECTORY = "10m", "selftest"
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
OnLine = Callable[[str], None]


def seconds_of(budget: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 1h. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h)", budget.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError.of("<arguments>", "budget", f"{budget!r}; expected a time such as 90s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def selftest(device: str, directory: Path, budget: str, on_line: OnLine) -> Report:
    """Run the test on `device` ("auto", "cpu", "cuda") and return its report, which is in `directory` then.

    On Ctrl-C the report has the steps that ran and is marked `interrupted`. Raises ConfigError for arguments,
    ForedraftError if nothing can be written.
    """
    from ..session.plan import resolve_device
    from .catalogue import catalogue

    end_s = time.monotonic() + seconds_of(budget)
    device = resolve_device(device)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="foredraft-selftest-") as made:
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
    """Return the text to print at the end: failures, the summary, and the place of the report."""
    failed = [
        f"{o.state}: {o.part}: {o.name}: {o.text}" for o in report.outcomes if o.state in ("failed", "not finished")
    ]
    return [*failed, report.summary(), f"report: {report.directory / MARKDOWN}"]


def main() -> int:
    """Run the self-test with argparse, on machines without the packages that the command `foredraft` needs."""
    parser = argparse.ArgumentParser("python -m foredraft.gpu.selftest.run", description=__doc__)
    parser.add_argument("--device", default="auto", help="cpu, cuda; auto: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_DIRECTORY), help="directory of the report")
    parser.add_argument("--budget", default=DEFAULT_BUDGET, help="time, as 90s or 10m")
    given = parser.parse_args()
    try:
        report = selftest(given.device, given.out, given.budget, lambda text: print(text, file=sys.stderr, flush=True))
    except (ForedraftError, ModuleNotFoundError) as error:
        needed = "" if isinstance(error, ForedraftError) else ": it needs torch, triton, numpy, safetensors, tokenizers"
        print(f"foredraft: {error}{needed}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\n".join(closing_lines(report)))
    return exit_code(report)


if __name__ == "__main__":
    sys.exit(main())
