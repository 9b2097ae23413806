"""What a component prints and leaves behind while it is checked. The output may be megabytes, and stands in no report
or document."""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

MAX_KEPT = 200
"""Characters that are kept."""
MOST_LEFT = 16
"""Open files, or threads, that may be left behind without a word: libraries open some."""
MOST_MEMORY_MIB = 1024
OUTPUT = 1  # the file descriptor of the standard output


class Traces(io.TextIOBase):
    """Counts what is written, keeps its beginning, and compares the process with itself at the start of the check."""

    def __init__(self) -> None:
        self.num_characters: int = 0
        self.beginning: str = ""
        self._before = _in_use()
        self.left: str = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_characters += len(text)
        self.beginning += text[: MAX_KEPT - len(self.beginning)]
        return len(text)

    def look_back(self) -> None:
        """Note what is in use now and was not at the start."""
        gc.collect()
        files, threads, memory = (now - then for now, then in zip(_in_use(), self._before, strict=True))
        left = [f"{files:,} open files"] if files > MOST_LEFT else []
        left += [f"{threads:,} threads"] if threads > MOST_LEFT else []
        self.left = ", ".join([*left, f"{memory:,} MiB of memory"] if memory > MOST_MEMORY_MIB else left)

    def lines(self) -> str:
        """Return what a report says about it, empty if nothing was printed and nothing is left behind."""
        text = f"\nleft behind by the component: {self.left}" if self.left else ""
        if not self.num_characters:
            return text
        shown = f"{self.num_characters:,} characters, first {self.beginning!r}"
        return f"{text}\nprinted by the component, and not shown: {shown}"


def _in_use() -> tuple[int, int, int]:
    """Return this process's open files, its threads, and its memory in MiB; 0 for what the system does not tell."""
    files = memory = 0
    with suppress(OSError):
        files = len(os.listdir("/dev/fd"))
    with suppress(OSError):
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    return files, threading.active_count(), memory


def end_despite_threads(before: set[threading.Thread], code: int) -> None:
    """End the process if threads that were not there before would keep it for ever: nothing ends a component's."""
    if any(not thread.daemon for thread in set(threading.enumerate()) - before):
        if sys.stdout is not None:
            sys.stdout.flush()
        os._exit(code)


@contextmanager
def held_back() -> Iterator[Traces]:
    """Hold back what is printed meanwhile, also by code that writes to the file descriptor of the output."""
    traces = Traces()
    if sys.stdout is None:  # the output is closed, and its descriptor may be another file's
        yield traces
        traces.look_back()
        return
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file, redirect_stdout(traces):
        output = os.dup(OUTPUT)
        os.dup2(file.fileno(), OUTPUT)
        try:
            yield traces
        finally:
            os.dup2(output, OUTPUT)
            os.close(output)
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            traces.write(file.read(MAX_KEPT).decode(errors="replace"))
            traces.num_characters += max(num_bytes - MAX_KEPT, 0)
            traces.look_back()
