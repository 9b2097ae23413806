"""The clock of everything that is timed on an executor: real time, or the processor time of one thread."""

from __future__ import annotations

import time

import torch

from ...core.errors import ConfigError

WALL, CPU = "wall", "cpu"


class Clock:
    """Real time, in nanoseconds from `start`."""

    read_ns = staticmethod(time.perf_counter_ns)
    _start_ns = 0

    def start(self) -> None:
        self._start_ns = self.read_ns()

    def now_ns(self) -> int:
        return self.read_ns() - self._start_ns

    def sleep_until(self, at_ns: int) -> None:
        left_ns = at_ns - self.now_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


class CpuClock(Clock):
    """The processor time of this thread; waiting takes none, it moves the clock on.
    For a busy machine: other processes do not count."""

    read_ns = staticmethod(time.thread_time_ns)

    def sleep_until(self, at_ns: int) -> None:
        self._start_ns -= max(at_ns - self.now_ns(), 0)


def wall_and_cpu_s() -> tuple[float, float]:
    """Return seconds of real time, and of the processor time of all threads of this process."""
    return time.perf_counter(), time.process_time()


def make_clock(name: str, device: str) -> Clock:
    """Return the clock called "wall" or "cpu", started. Raises ConfigError where processor time is not the time of the
    work."""
    if name not in (WALL, CPU):
        raise ConfigError.of("<arguments>", "clock", f"{name!r} is neither {WALL} nor {CPU}")
    if name == CPU and (device != "cpu" or torch.get_num_threads() > 1):
        threads = (
            "another device does the work" if device != "cpu" else f"{torch.get_num_threads()} threads share the work"
        )
        raise ConfigError.of("<arguments>", "clock", f"cpu measures one thread of this process; {threads}")
    clock = Clock() if name == WALL else CpuClock()
    clock.start()
    return clock
