"""The steps of a self-test, run in order. A step that fails does not stop those behind it, even if it takes its process
with it.

`run_here` runs steps in this process. `run_apart` runs them in a process of their own: a fault on a GPU spoils all
later work of its process, and a kernel that hangs ends only with its process. After such a step another process runs
the remaining ones.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..session.devices import ops_for
from ..spawned import spawning
from ..types.ops import Ops
from ..types.session_options import AUTO

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """`directory` is empty at first and given to every process of the test. `ops_choice`: `SessionOptions.ops`. Sizes
    are small on a CPU."""

    device: str
    directory: Path
    ops_choice: str = AUTO
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """In the order of risk: sums in float32 first."""
        return (torch.float32, torch.bfloat16)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return make()'s value, made by the first step that asks."""
        if name not in self.made:
            self.made[name] = make()
        value: T = self.made[name]
        return value

    @property
    def ops(self) -> Ops:
        """The operations that are tested: the device's, or those that were chosen."""
        return self.once("ops", lambda: ops_for(self.device, self.ops_choice))


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
class StepFinding:
    """What a step found: a sentence, and rows of a table if it measured any."""

    text: str
    rows: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class SelftestStep:
    """One thing to be shown. `run` returns its results, and raises an error if they are wrong."""

    part: str
    name: str
    run: Callable[[], StepFinding]
    needs_gpu: bool = False
    limit_s: float = STEP_LIMIT_S

    @property
    def title(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How one step went."""

    part: str
    name: str
    state: State
    seconds: float = 0.0
    text: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()
    traceback: str = ""


class UnavailableHere(Exception):
    """A step raises it, with the reason, where the machine lacks what the step is about: then it is not run."""


OnBegin = Callable[[SelftestStep], None]


def run_here(
    steps: Sequence[SelftestStep], seconds_left: Callable[[], float], on_begin: OnBegin
) -> Iterator[StepOutcome]:
    """Run `steps` one after another; those that begin when no time is left are not run."""
    for step in steps:
        if seconds_left() <= 0:
            yield not_run(step, "the time was over")
            continue
        on_begin(step)
        yield run_step(step)


def run_step(step: SelftestStep) -> StepOutcome:
    begin = time.perf_counter()

    def outcome(state: State, **fields: Any) -> StepOutcome:
        return StepOutcome(step.part, step.name, state, time.perf_counter() - begin, **fields)

    try:
        found = step.run()
        json.dumps(found.rows, allow_nan=False)  # a figure that is no number is a failure, and no line of a report
    except UnavailableHere as error:
        return outcome(State.NOT_RUN, text=str(error))
    except Exception as error:  # whatever it is, it belongs into the report
        return outcome(State.FAILED, text=_first_line(error), traceback=traceback.format_exc())
    return outcome(State.PASSED, text=found.text, rows=tuple(found.rows))


def not_run(step: SelftestStep, why: str) -> StepOutcome:
    return StepOutcome(step.part, step.name, State.NOT_RUN, text=why)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- in a process of their own ----------------------------------------------------------------------------------------

Serve = Callable[[int, Callable[[StepOutcome], None]], None]
"""Runs the steps from a number on, and passes on each outcome: `serve_steps` over the same steps. It is pickled."""


def run_apart(
    steps: Sequence[SelftestStep], serve: Serve, seconds_left: Callable[[], float], on_begin: OnBegin
) -> Iterator[StepOutcome]:
    """Run `steps` in processes that call `serve`.
    When one dies or a step takes too long, the next one goes on behind that step."""
    number = begun = 0
    while number < len(steps):
        if seconds_left() <= 0:
            yield not_run(steps[number], "the time was over")
            number += 1
            continue
        with _Process(serve, number) as process:
            first = number
            while number < len(steps) and seconds_left() > 0:
                step = steps[number]
                if number >= begun:
                    on_begin(step)
                    begun = number + 1
                begin, limit_s = time.perf_counter(), min(step.limit_s, seconds_left())
                answer = process.next_answer(limit_s)
                if answer == 0 and number > first:
                    break  # it has ended itself, spoilt by the step before
                number += 1
                if isinstance(answer, StepOutcome):
                    yield answer
                    continue
                # A step that takes longer than any should is at fault; one that the budget cuts off is not.
                state = State.NOT_FINISHED if limit_s < step.limit_s else State.FAILED
                text = f"stopped after {limit_s:.0f} s"
                if answer is not None:
                    state, text = State.FAILED, f"its process ended with code {answer}"
                yield StepOutcome(step.part, step.name, state, time.perf_counter() - begin, text, (), process.tail())
                break


class _Process:
    """A process, its answers, and what it writes (kept, since it explains a death)."""

    def __init__(self, serve: Serve, first: int) -> None:
        self._written = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed with the process
        with spawning() as context:
            self._answers, theirs = context.Pipe(duplex=False)
            self._process = context.Process(target=_serve, args=(serve, first, theirs, self._written.name), daemon=True)
            self._process.start()
        theirs.close()

    def next_answer(self, limit_s: float) -> StepOutcome | int | None:
        """Return its next answer, its exit code if it has ended, or None once `limit_s` have passed."""
        if not self._answers.poll(limit_s):
            return None
        try:
            answer: StepOutcome = self._answers.recv()
            return answer
        except EOFError:
            self._process.join(EXIT_LIMIT_S)
            return self._process.exitcode

    def tail(self) -> str:
        self._written.seek(max(0, self._written.seek(0, os.SEEK_END) - TAIL_CHARACTERS))
        return self._written.read().decode("utf-8", "replace")

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join(EXIT_LIMIT_S)
        self._written.close()


def _serve(serve: Serve, first: int, answers: Connection, written: str) -> None:
    """Run as a process of `run_apart`."""
    with open(written, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    serve(first, answers.send)
    sys.stdout.flush()
    # Giving a spoilt device back may hang, or abort the process, which would be taken for the next step's death.
    os._exit(0)


def serve_steps(
    steps: Sequence[SelftestStep], first: int, answer: Callable[[StepOutcome], None], is_spoilt: Callable[[], bool]
) -> None:
    """Run `steps` from number `first` on, and `answer` each outcome. Ends early once `is_spoilt`."""
    for step in steps[first:]:
        outcome = run_step(step)
        answer(outcome)
        if outcome.state is State.FAILED and is_spoilt():
            return
