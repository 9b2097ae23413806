"""Progress on standard error: redrawn in place on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.errors import count_of

if TYPE_CHECKING:
    from ..gpu.tiny.training import TrainingProgress
    from ..sim.running.report import RunProgress

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.2
CLEAR = "\r\x1b[K"


class StatusLine:
    """One line that is redrawn on a terminal; elsewhere each text is a line of its own."""

    def __init__(self, quiet: bool = False, *, redraw_every_s: float = 0.0, line_every_s: float = 0.0) -> None:
        self.is_quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._is_drawn = False
        self._every_s = redraw_every_s if self._is_terminal else line_every_s
        self._started_s = self._last_s = time.monotonic()

    def due_s(self, always: bool = False) -> float | None:
        """Return the seconds since the start if it is time for another text, else None."""
        now_s = time.monotonic()
        if not always and now_s - self._last_s < self._every_s:
            return None
        self._last_s = now_s
        return self._elapsed_s(now_s)

    def elapsed_s(self) -> float:
        """Return the seconds since the start, which are more than 0."""
        return self._elapsed_s(time.monotonic())

    def _elapsed_s(self, now_s: float) -> float:
        return max(now_s - self._started_s, 1e-9)

    def wait_longer(self) -> None:
        """Let the next line be due after twice the time; a terminal is redrawn as before."""
        if not self._is_terminal:
            self._every_s *= 2

    def show(self, text: str) -> None:
        if self.is_quiet:
            return
        before, after = (CLEAR, "") if self._is_terminal else ("", "\n")
        print(f"{before}{text}", end=after, file=sys.stderr, flush=True)
        self._is_drawn = self._is_terminal

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_drawn:
            print(CLEAR, end="", file=sys.stderr, flush=True)
            self._is_drawn = False


@contextmanager
def text_progress(quiet: bool, less_often: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a text about the progress: redrawn in place on a terminal, elsewhere a line every ten seconds. `less_often`:
    elsewhere each line after twice the time of the one before."""
    line = StatusLine(quiet, redraw_every_s=REDRAW_EVERY_S, line_every_s=LINE_EVERY_S)

    def show(text: str) -> None:
        if line.due_s() is not None:
            line.show(text)
            if less_often:
                line.wait_longer()

    try:
        yield show
    finally:
        line.clear()


@contextmanager
def simulation_progress(quiet: bool) -> Iterator[Callable[[RunProgress], None]]:
    """Show how far a simulation is: a bar of ended requests that is removed at the end, or a line every ten seconds."""
    if quiet:
        yield lambda progress: None
        return
    line = StatusLine(line_every_s=LINE_EVERY_S)
    if not sys.stderr.isatty():

        def print_line(progress: RunProgress) -> None:
            if (elapsed_s := line.due_s()) is not None:
                line.show(", ".join(_simulation_words(progress, elapsed_s)))

        yield print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    time_column, *columns = [TextColumn(f"{{task.fields[{name}]}}") for name in ("simulated", "requests", "rate")]
    with Bar(time_column, BarColumn(bar_width=24), *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, simulated="simulated", requests="", rate="")

        def update_bar(progress: RunProgress) -> None:
            simulated, requests, rate = _simulation_words(progress, line.elapsed_s())
            done, total = progress.num_ended, progress.num_expected
            bar.update(task, completed=done, total=total, simulated=simulated, requests=requests, rate=rate)

        yield update_bar


def _simulation_words(progress: RunProgress, elapsed_s: float) -> tuple[str, str, str]:
    """Return simulated time (h:mm:ss from a minute on), ended requests, and speed."""
    seconds = progress.now_ns / 1e9
    simulated = f"{seconds:.1f} s"
    if seconds >= 60:
        minutes, seconds = divmod(int(seconds), 60)
        simulated = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    ended = count_of(progress.num_ended, "request")
    if progress.num_expected is not None:
        ended = f"{progress.num_ended:,} of {count_of(progress.num_expected, 'request')}"
    rounds_per_s = progress.num_rounds / elapsed_s
    return f"simulated {simulated}", ended, f"{rounds_per_s:,.0f} rounds/s"


@contextmanager
def training_progress(quiet: bool) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show how far each part of a training is: bars that stay, or a line every ten seconds and one at the
    end of each part."""
    if quiet:
        yield lambda progress: None
        return
    if not sys.stderr.isatty():
        line = StatusLine(line_every_s=LINE_EVERY_S)

        def print_line(progress: TrainingProgress) -> None:
            if line.due_s(always=progress.step >= progress.num_steps) is not None:
                words = [f"step {progress.step} of {progress.num_steps}", *_training_words(progress)]
                line.show(f"{progress.part}: {', '.join(word for word in words if word)}")

        yield print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars

    columns = [
        TextColumn(f"{{task.fields[{name}]{width}}}") for name, width in (("loss", ":<10"), ("rate", ""), ("left", ""))
    ]
    bar = (TextColumn("{task.description:<20}"), BarColumn(bar_width=24), MofNCompleteColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*bar, *columns, console=Console(stderr=True)) as bars:

        def update_bar(progress: TrainingProgress) -> None:
            if progress.part not in tasks:
                tasks[progress.part] = bars.add_task(progress.part, total=progress.num_steps, loss="", rate="", left="")
            loss, rate, left = _training_words(progress)
            done, total = progress.step, progress.num_steps
            bars.update(tasks[progress.part], completed=done, total=total, loss=loss, rate=rate, left=left)

        yield update_bar


def _training_words(progress: TrainingProgress) -> tuple[str, str, str]:
    """Return loss, speed and time left; empty while they are not known."""
    if progress.loss is None:
        return "", "", ""
    left = f"{progress.seconds_left:.0f} s left" if progress.seconds_left >= 0.5 else ""
    return f"loss {progress.loss:.3f}", f"{progress.tokens_per_s:,.0f} tokens/s", left
