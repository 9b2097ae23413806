"""The steps of a self-test, run in order. A step that fails does not stop those behind it, even if it takes its process with it.

`run_here` runs steps in this process. `run_apart` runs them in a process of their own, because a fault on a GPU spoils all later work of
the process, and a kernel that hangs can only be killed with it. After such a step another process runs the remaining ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from ...core.parsing import ParseError, parse_json

STEP_LIMIT_S = 180.0
EXIT_LIMIT_S = 10.0  # a process inside a driver that hangs cannot even be killed
TAIL_CHARACTERS = 4000  # of what a process that died has written


class State(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_FINISHED = "not finished"  # the budget was over
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step found: a sentence, and rows of a table if it measured any."""

    text: str
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to be shown. `run` returns what it found, and raises if it is wrong."""

    part: str
    name: str
    run: Callable[[], Finding]
    needs_gpu: bool = False
    limit_s: float = STEP_LIMIT_S

    @property
    def title(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one step went."""

    part: str
    name: str
    state: State
    seconds: float = 0.0
    text: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()
    traceback: str = ""


OnBegin = Callable[[Step], None]


def run_here(steps: Sequence[Step], seconds_left: Callable[[], float], on_begin: OnBegin) -> Iterator[Outcome]:
    """Run `steps` one after another; those that begin when no time is left are not run."""
    for step in steps:
        if seconds_left() <= 0:
            yield not_run(step, "the time was over")
            continue
        on_begin(step)
        yield run_step(step)


def run_step(step: Step) -> Outcome:
    begin = time.perf_counter()

    def outcome(state: State, **fields: Any) -> Outcome:
        return Outcome(step.part, step.name, state, time.perf_counter() - begin, **fields)

    try:
        found = step.run()
    except Exception as error:  # whatever it is, it belongs into the report
        return outcome(State.FAILED, text=_first_line(error), traceback=traceback.format_exc())
    return outcome(State.PASSED, text=found.text, rows=tuple(found.rows))


def not_run(step: Step, why: str) -> Outcome:
    return Outcome(step.part, step.name, State.NOT_RUN, text=why)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- in a process of their own ----------------------------------------------------------------------------------------


def run_apart(
    steps: Sequence[Step],
    worker: Sequence[str],
    seconds_left: Callable[[], float],
    on_begin: OnBegin,
) -> Iterator[Outcome]:
    """Run `steps` in processes that `worker` (a command line) starts, each with `serve_steps` over the same steps.

    A process gets the numbers of the steps that are left. When it dies or a step takes too long, the next one goes on behind that step.
    """
    number = begun = 0
    while number < len(steps):
        if seconds_left() <= 0:
            yield not_run(steps[number], "the time was over")
            number += 1
            continue
        with _Process([*worker, str(number)]) as process:
            first = number
            while number < len(steps) and seconds_left() > 0:
                step = steps[number]
                if number >= begun:
                    on_begin(step)
                    begun = number + 1
                begin, limit_s = time.perf_counter(), min(step.limit_s, seconds_left())
                answer = process.next_line(limit_s)
                if answer == 0 and number > first:
                    break  # it has ended itself, spoilt by the step before
                number += 1
                if isinstance(answer, str):
                    yield _read_outcome(step, answer)
                    continue
                # A step that takes longer than any should is at fault; one that the budget cuts off is not.
                state = State.NOT_FINISHED if limit_s < step.limit_s else State.FAILED
                text = f"stopped after {limit_s:.0f} s"
                if answer is not None:
                    state, text = State.FAILED, f"its process ended with code {answer}"
                yield Outcome(step.part, step.name, state, time.perf_counter() - begin, text, (), process.tail())
                break


def _read_outcome(step: Step, answer: str) -> Outcome:
    try:
        value = parse_json(answer)
    except ParseError as error:  # such as a NaN among its figures
        return Outcome(
            step.part, step.name, State.FAILED, text=f"what it found cannot be read: {error}", traceback=answer
        )
    return Outcome(**value | {"state": State(value["state"]), "rows": tuple(value["rows"])})


class _Process:
    """A worker, the lines that it answers with, and what it writes otherwise (kept, since it explains a death)."""

    def __init__(self, command: Sequence[str]) -> None:
        self._written = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self._written}
        self._process = subprocess.Popen(command, **pipes, text=True, encoding="utf-8")
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self, limit_s: float) -> str | int | None:
        """Return its next answer, its exit code if it has ended, or None once `limit_s` have passed."""
        try:
            line = self._lines.get(timeout=limit_s)
            return self._process.wait(EXIT_LIMIT_S) if line is None else line
        except (queue.Empty, subprocess.TimeoutExpired):
            return None

    def tail(self) -> str:
        """Return the end of what it wrote."""
        self._written.seek(max(0, self._written.seek(0, os.SEEK_END) - TAIL_CHARACTERS))
        return self._written.read().decode("utf-8", "replace")

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        self._written.close()


def serve_steps(steps: Sequence[Step], first: int, is_spoilt: Callable[[], bool]) -> None:
    """Run `steps` from number `first` on and write an outcome per line on standard output. Ends early once `is_spoilt`.

    What else is written on standard output meanwhile goes to standard error.
    """
    with _own_output() as output:
        for step in steps[first:]:
            outcome = run_step(step)
            output.write(json.dumps(asdict(outcome)) + "\n")
            output.flush()
            if outcome.state is State.FAILED and is_spoilt():
                return


@contextlib.contextmanager
def _own_output() -> Iterator[IO[str]]:
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        yield output


def worker_command(device: str, directory: Path) -> list[str]:
    """Return the command line of a process that runs the catalogue's steps."""
    return [sys.executable, "-m", "foretoken.gpu.selftest.worker", device, str(directory)]
