"""The report of a self-test: what is known after each step, as Markdown and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...observe.output_files import UnwritableFile, write_text
from .steps import SelftestStep, State, StepOutcome

FORMAT = 1
MARKDOWN, JSON = "selftest.md", "selftest.json"


@dataclass(slots=True)
class SelftestReport:
    """What is known so far. `running` is the step that has begun and not ended."""

    directory: Path
    device: str
    command: Sequence[str]
    begun: str  # date and time
    num_steps: int
    outcomes: list[StepOutcome] = field(default_factory=list)
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

    def begin(self, step: SelftestStep) -> None:
        self.running = step.title
        self.write()

    def add(self, outcome: StepOutcome) -> None:
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


EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def seconds_of(budget: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 1h. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h)", budget.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError.of("<arguments>", "budget", f"{budget!r}; expected a time such as 90s, 10m or 1h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def exit_code(report: SelftestReport) -> int:
    if report.interrupted:
        return EXIT_INTERRUPTED
    return 0 if report.ok else EXIT_FAILED


def closing_lines(report: SelftestReport) -> list[str]:
    """Return the text to print at the end: failures, the summary, and the file to send, which has everything."""
    failed = [
        f"{o.state}: {o.part}: {o.name}: {o.text}" for o in report.outcomes if o.state in ("failed", "not finished")
    ]
    return [*failed, report.summary(), f"report, the file to send: {report.directory / MARKDOWN}"]
