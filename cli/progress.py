"""How far a run is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from ..sim.run import Progress

LINE_EVERY_S = 10.0


class ProgressDisplay(Protocol):
    """Shows a run's progress; a context manager around the run."""

    def __enter__(self) -> ProgressDisplay: ...
    def __exit__(self, *error: object) -> None: ...
    def __call__(self, progress: Progress) -> None: ...


def progress_display(quiet: bool) -> ProgressDisplay:
    """The display that suits standard error."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()


class Silent:
    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        pass


class Lines:
    """A line every ten seconds, for logs; a run that is shorter writes none."""

    def __enter__(self) -> Lines:
        self._started_s = self._last_s = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < LINE_EVERY_S:
            return
        self._last_s = now_s
        rate = progress.num_rounds / (now_s - self._started_s)
        print(
            f"simulated {simulated(progress)}, {requests(progress)}, {rate:,.0f} rounds/s", file=sys.stderr, flush=True
        )


class Bar:
    """A bar of ended requests with simulated time and rounds per second; it is gone when the run ends."""

    def __enter__(self) -> Bar:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        self._started_s = time.monotonic()
        self._bar = RichProgress(*_columns(), console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=None, simulated="", requests="", rate="")
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        self._bar.update(
            self._task,
            completed=progress.num_ended,
            total=progress.num_expected,
            simulated=simulated(progress),
            requests=requests(progress),
            rate=f"{progress.num_rounds / elapsed_s:,.0f} rounds/s",
        )


def _columns() -> list[ProgressColumn]:
    from rich.progress import BarColumn, TextColumn

    return [
        TextColumn("simulated {task.fields[simulated]}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[requests]}"),
        TextColumn("{task.fields[rate]}"),
    ]


def simulated(progress: Progress) -> str:
    """Simulated time as h:mm:ss, below a minute with tenths."""
    seconds = progress.now_ns / 1e9
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def requests(progress: Progress) -> str:
    """Ended requests, of how many if that is known."""
    of = f" of {progress.num_expected:,}" if progress.num_expected is not None else ""
    return f"{progress.num_ended:,}{of} requests"
