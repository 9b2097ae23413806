"""How far a training is, on standard error: a bar per part on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..gpu.tiny.training import TrainingProgress

LINE_EVERY_S = 10.0


class TrainingDisplay(Protocol):
    """Shows how far each part is; a context manager around the training."""

    def __enter__(self) -> TrainingDisplay: ...
    def __exit__(self, *error: object) -> None: ...
    def __call__(self, progress: TrainingProgress) -> None: ...


def training_display(quiet: bool) -> TrainingDisplay:
    """The display that suits standard error."""
    if quiet:
        return SilentTraining()
    return TrainingBars() if sys.stderr.isatty() else TrainingLines()


class SilentTraining:
    def __enter__(self) -> SilentTraining:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, progress: TrainingProgress) -> None:
        pass


class TrainingLines:
    """A line every ten seconds, and one at the end of each part."""

    def __enter__(self) -> TrainingLines:
        self._last_s = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, progress: TrainingProgress) -> None:
        now_s = time.monotonic()
        if progress.step < progress.num_steps and now_s - self._last_s < LINE_EVERY_S:
            return
        self._last_s = now_s
        words = [f"step {progress.step} of {progress.num_steps}", *_described(progress)]
        print(f"{progress.part}: {', '.join(word for word in words if word)}", file=sys.stderr, flush=True)


class TrainingBars:
    """A bar per part; they stay, so that the losses can be read."""

    def __enter__(self) -> TrainingBars:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bars = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]:<10}"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, int] = {}
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, progress: TrainingProgress) -> None:
        task = self._tasks.get(progress.part)
        if task is None:
            task = self._bars.add_task(progress.part, total=progress.num_steps, loss="", rate="", left="")
            self._tasks[progress.part] = task
        loss, rate, left = _described(progress)
        self._bars.update(task, completed=progress.step, total=progress.num_steps, loss=loss, rate=rate, left=left)


def _described(progress: TrainingProgress) -> tuple[str, str, str]:
    """Loss, speed and time left; empty where there is nothing to say."""
    if progress.loss is None:
        return "", "", ""
    left = f"{progress.seconds_left:.0f} s left" if progress.seconds_left >= 0.5 else ""
    return f"loss {progress.loss:.3f}", f"{progress.tokens_per_s:,.0f} tokens/s", left
